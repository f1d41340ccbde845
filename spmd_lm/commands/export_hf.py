"""`spmd-lm export`: makes a Hugging Face directory of a run."""

import argparse
from pathlib import Path

from spmd_lm.commands.common import Arguments, add_fallback, load_configuration, write_result
from spmd_lm.runtime.devices import set_up_devices
from spmd_lm.runtime.directories import require_absent_or_empty
from spmd_lm.runtime.formatting import parse_count

UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9}


def run(arguments: Arguments) -> int:
    require_absent_or_empty(Path(arguments.DIR))
    config = set_up_devices(load_configuration(arguments, "RUN_DIR"))
    from spmd_lm.huggingface.transfer import export_hf, format_result

    if config.adapter.kind != "none":
        from spmd_lm.huggingface.peft import export_peft

        result = export_peft(config, Path(arguments.DIR), arguments.dtype, arguments.fallback)
        return write_result(arguments, result, format_result(result))
    result = export_hf(config, Path(arguments.DIR), arguments.dtype, arguments.shard, arguments.fallback)
    return write_result(arguments, result, format_result(result))


def add_options(parser: argparse.ArgumentParser) -> None:
    types = ("float32", "bfloat16", "float16")
    parser.add_argument("--dtype", choices=types, default=types[0], help=f"of the tensors (default {types[0]})")
    help = "largest size of one file (default 5GB)"
    parser.add_argument("--shard", type=size, default="5GB", metavar="SIZE", help=help)
    add_fallback(parser)


def size(text: str) -> int:
    """Bytes, written as 5GB or 500MB; in powers of 1000, as Hugging Face counts."""
    number, unit = parse_count(text[:-2]), text[-2:].upper()
    if unit not in UNITS or not number:
        raise argparse.ArgumentTypeError(f"expected a size as 5GB, 500MB or 64KB, got '{text:.40}'")
    return number * UNITS[unit]
