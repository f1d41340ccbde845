"""`spmd-lm import`: makes a run of a Hugging Face directory."""

import argparse
from pathlib import Path

from spmd_lm.commands.common import Arguments, Verb, check_json, device_override, set_up_devices, write_result


def run(arguments: Arguments) -> int:
    from spmd_lm.huggingface.directory import make_run_config, open_directory
    from spmd_lm.runtime.atomic_dir import require_absent_or_empty

    require_absent_or_empty(Path(arguments.RUN_DIR))
    model_dir = open_directory(Path(arguments.DIR))
    overrides = [*arguments.overrides, *device_override(arguments)]
    config = make_run_config(model_dir, arguments.RUN_DIR, arguments.config, overrides)
    check_json(arguments)
    config = set_up_devices(config)
    from spmd_lm.huggingface.transfer import format_result, import_hf

    result = import_hf(model_dir, config)
    return write_result(arguments, result, format_result(result))


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", metavar="YAML", help="how to train it; the model section of this file is ignored")


VERB = Verb("makes a run of a Hugging Face directory", run, add_options, ("DIR", "RUN_DIR"))
