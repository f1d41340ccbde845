"""`spmd-lm quantize`: stores the blocks' matrices of a run in few bits, as a new run."""

import argparse
from pathlib import Path

from spmd_lm.commands.common import Arguments, add_fallback, at_least, load_configuration, write_result
from spmd_lm.errors import ConfigError
from spmd_lm.runtime.devices import set_up_devices
from spmd_lm.runtime.directories import require_absent_or_empty
from spmd_lm.runtime.formatting import format_bytes

CHANNEL = "channel"
DEFAULT_GROUP = 64


def run(arguments: Arguments) -> int:
    require_absent_or_empty(Path(arguments.OUT))
    if arguments.calibrate is not None and arguments.method == "rtn":
        raise ConfigError("--calibrate has no effect with --method rtn. Use --method gptq, or leave it out.")
    config = set_up_devices(load_configuration(arguments, "RUN_DIR"))
    from spmd_lm.ops.few_bits import Coding
    from spmd_lm.quantization.run import quantize_run

    default = None if arguments.bits == "int8" else DEFAULT_GROUP
    group = {None: default, CHANNEL: None}.get(arguments.group, arguments.group)
    how = Coding(arguments.bits, group), arguments.method, arguments.calibrate, arguments.fallback
    result = quantize_run(config, Path(arguments.OUT), *how)
    return write_result(arguments, result, render(result))


def render(result: dict) -> str:
    """What was done, what it saves, what it costs."""
    group = f"groups of {result['group']}" if result["group"] else "one scale for each output"
    sizes = " instead of ".join(format_bytes(result["bytes"][key]) for key in ("stored", "multiplied"))
    what = f"{result['directory']}: {result['matrices']} matrices of step {result['step']} as {result['bits']}, {group}"
    lines = [f"{what}, by {result['method']}: {sizes}"]
    if errors := result["errors"]:
        shares = [each["gptq"] / each["rtn"] if each["rtn"] else 1.0 for each in errors.values()]
        mean = sum(shares) / len(shares)
        lines.append(f"squared errors of products: {mean:.2g} of rounding's on average, at most {max(shares):.2g}")
    if result["after"]:
        for name, value in result["after"].items():
            lines.append(f"{name}: {result['before'][name]:,.6g} before, {value:,.6g} after")
    else:
        lines.append(f"not evaluated: {result['not_evaluated']}")
    return "\n".join(lines)


def group(text: str) -> int | str:
    return text if text == CHANNEL else at_least(1)(text)


def add_options(parser: argparse.ArgumentParser) -> None:
    help = "codes: multiples of a scale, or NF4's values times one (default int8)"
    parser.add_argument("--bits", choices=("int8", "int4", "int3", "nf4"), default="int8", help=help)
    help = f"inputs that share a scale, or {CHANNEL}: all of an output (default {DEFAULT_GROUP}; of int8 {CHANNEL})"
    parser.add_argument("--group", type=group, metavar="N", help=help)
    help = "rtn: to the nearest codes; gptq: with the least error on a text (arXiv:2210.17323) (default rtn)"
    parser.add_argument("--method", choices=("rtn", "gptq"), default="rtn", help=help)
    help = "text for gptq: a file, glob or directory (default: the run's training data)"
    parser.add_argument("--calibrate", metavar="PATH", help=help)
    add_fallback(parser)
