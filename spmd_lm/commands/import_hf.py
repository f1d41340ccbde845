"""`spmd-lm import`: makes a run of a Hugging Face directory."""

import argparse
from pathlib import Path

from spmd_lm.commands.common import Arguments, Verb, check_json, device_override, set_up_devices, write_result


def run(arguments: Arguments) -> int:
    from spmd_lm.huggingface.directory import configure, open_directory
    from spmd_lm.runtime.atomic_dir import refuse_taken

    refuse_taken(Path(arguments.RUN_DIR))
    found = open_directory(Path(arguments.DIR))
    config = configure(found, arguments.RUN_DIR, arguments.config, [*arguments.overrides, *device_override(arguments)])
    check_json(arguments)
    config = set_up_devices(config)
    from spmd_lm.huggingface.transfer import import_run, render

    result = import_run(found, config)
    return write_result(arguments, result, render(result))


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", metavar="YAML", help="how to train it; the model section of this file is ignored")


VERB = Verb("makes a run of a Hugging Face directory", run, add_options, ("DIR", "RUN_DIR"))
