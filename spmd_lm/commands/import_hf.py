"""`spmd-lm import`: makes a run of a Hugging Face directory, or of a model of the hub."""

import argparse
import os
from pathlib import Path

from spmd_lm.addresses import HUB_SCHEME
from spmd_lm.commands.common import Arguments, check_json, write_result
from spmd_lm.runtime.devices import set_up_devices
from spmd_lm.runtime.directories import require_absent_or_empty


def run(arguments: Arguments) -> int:
    require_absent_or_empty(Path(arguments.RUN_DIR))
    if os.path.lexists(Path(arguments.DIR) / "adapter_config.json"):
        return import_adapter(arguments)
    from spmd_lm.huggingface.directory import make_run_config, open_directory
    from spmd_lm.huggingface.hub import download

    hub_model = download(arguments.DIR) if arguments.DIR.startswith(HUB_SCHEME) else None
    model_dir = open_directory(hub_model.directory if hub_model else Path(arguments.DIR))
    config = make_run_config(model_dir, arguments.RUN_DIR, arguments.config, arguments.overrides)
    check_json(arguments)
    set_up_devices(config)
    from spmd_lm.huggingface.transfer import format_result, import_hf

    result = import_hf(model_dir, config, hub_model)
    return write_result(arguments, result, format_result(result))


def import_adapter(arguments: Arguments) -> int:
    from spmd_lm.huggingface.peft_config import make_adapter_config

    directory = Path(arguments.DIR)
    config = make_adapter_config(directory, arguments.RUN_DIR, arguments.config, arguments.overrides)
    check_json(arguments)
    set_up_devices(config)
    from spmd_lm.huggingface.peft import import_peft
    from spmd_lm.huggingface.transfer import format_result

    result = import_peft(directory, config)
    return write_result(arguments, result, format_result(result))


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", metavar="YAML", help="how to train it; the model section of this file is ignored")
