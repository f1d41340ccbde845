"""`spmd-lm eval`: metrics of a run's newest checkpoint on its validation data, or on zero-shot tasks."""

import argparse
import math

from spmd_lm.commands.common import Arguments, add_fallback, at_least, load_configuration, write_result
from spmd_lm.errors import NonFiniteError


def run(arguments: Arguments) -> int:
    from spmd_lm.api import evaluate

    config = load_configuration(arguments)
    result = evaluate(config, arguments.fallback, arguments.task or (), arguments.stride)
    if "tasks" in result:
        return write_result(arguments, result, render_tasks(result))
    width = max(16, *(len(key) + 2 for key in result))
    code = write_result(arguments, result, "\n".join(f"{key:<{width}}{value:,.10g}" for key, value in result.items()))
    if not math.isfinite(result["eval_loss"]):
        raise NonFiniteError(
            f"{config.run.directory}: at step {result['step']} eval_loss is {result['eval_loss']:g}. Lower optim.lr, "
            "lengthen optim.warmup, or set precision.compute=float32, and train again in a new run.dir."
        )
    return code


def render_tasks(result: dict) -> str:
    """A line for each metric, with its 95% interval, and for each count."""
    lines = [("step", f"{result['step']:,}")]
    for task, figures in result["tasks"].items():
        for name, value in figures["metrics"].items():
            low, high = figures["ci95"][name]
            lines.append((f"{task}.{name}", f"{value:,.6g}   95% [{low:,.6g}, {high:,.6g}]"))
        counts = {name: value for name, value in figures.items() if name not in ("metrics", "ci95")}
        lines += [(f"{task}.{name}", f"{value:,}") for name, value in counts.items()]
    width = max(len(name) for name, _ in lines) + 2
    return "\n".join(f"{name:<{width}}{value}" for name, value in lines)


def add_options(parser: argparse.ArgumentParser) -> None:
    help = "a zero-shot task, in place of the validation data; may be repeated (docs/evaluation.md)"
    parser.add_argument("--task", action="append", metavar="NAME[=PATH]", help=help)
    help = "how many tokens the windows of a text move by (default: the context; of wikitext 32)"
    parser.add_argument("--stride", type=at_least(1), metavar="N", help=help)
    add_fallback(parser)
