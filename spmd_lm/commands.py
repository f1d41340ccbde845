"""The verbs of the command `spmd-lm`: what each one takes besides a configuration, and does.

A verb's work is imported when it runs, after its configuration is sound and its devices are simulated: help waits for
nothing, and a refusal never for jax."""

import argparse
import contextlib
import json
import math
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spmd_lm.analysis.topology import parse as parse_topology
from spmd_lm.errors import ConfigError, Exit, NonFiniteError, UserError
from spmd_lm.runtime.devices import simulate
from spmd_lm.runtime.distributed import join, processes
from spmd_lm.runtime.signals import StopSignals, interruptible
from spmd_lm.train.sampling import Sampling

if TYPE_CHECKING:
    from spmd_lm.config.schema import RunConfig

Arguments = argparse.Namespace


@dataclass(frozen=True)
class Verb:
    help: str
    run: Callable[[Arguments], int]
    options: Callable[[argparse.ArgumentParser], None] = lambda parser: None
    places: tuple[str, ...] = ("CONFIG",)  # what comes before the overrides


def configuration(arguments: Arguments, place: str = "CONFIG") -> "RunConfig":
    """What the file or run in this place and the overrides say."""
    path = Path(getattr(arguments, place))
    from spmd_lm.config.load import load, load_run

    config = (load_run if path.is_dir() else load)(path, [*arguments.overrides, *simulated(arguments)])
    check_json(arguments)
    return config


def simulated(arguments: Arguments) -> list[str]:
    """What --devices says, as an override."""
    return [] if arguments.devices is None else [f"run.simulate_devices={arguments.devices}"]


def check_json(arguments: Arguments) -> None:
    """Whether --json can be written is told before the work rather than after it."""
    if arguments.json not in (None, "-"):
        target = Path(arguments.json)
        if target.is_dir() or not os.access(target if target.exists() else target.parent, os.W_OK):
            raise ConfigError(f"--json {target}: cannot be written. Give a file in a directory that can be.")


def on_devices(config: "RunConfig") -> "RunConfig":
    """The same, with the job's other processes met and the devices that it simulates in place: for the verbs that
    compute."""
    if devices := config.run.simulate_devices:
        simulate(devices, processes())
    join()
    return config


def deliver(arguments: Arguments, result: Any, text: str) -> int:
    """Hands over a verb's result: as JSON where --json says, as text on standard output unless JSON went there."""
    if arguments.json:
        as_json = json.dumps(finite(result), indent=2, allow_nan=False)
        put(as_json, arguments.json)
    if text and arguments.json != "-":
        put(text)
    return Exit.DONE


def put(text: str, path: str = "-") -> None:
    """Writes text to a file, or to standard output for `-`.  A reader that leaves, as `head` does, is no error."""
    try:
        if path == "-":
            print(text, flush=True)
        else:
            Path(path).write_text(text + "\n")
    except OSError as error:
        if path == "-":  # what is left in the buffer would fail once more as Python ends
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):
            where = "standard output" if path == "-" else f"--json {path}"
            raise UserError(f"{where}: cannot be written: {error.strerror}. Make room, or write elsewhere.") from error


def finite(value: Any) -> Any:
    """The same with null for NaN and infinity, which JSON has no word for."""
    if isinstance(value, dict):
        return {key: finite(each) for key, each in value.items()}
    if isinstance(value, list):
        return [finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def train(arguments: Arguments) -> int:
    with StopSignals() as signals:  # from here on: the import below takes seconds
        with interruptible():
            config = on_devices(configuration(arguments))
            from spmd_lm.train.loop import train

            if arguments.seeds is not None:
                from spmd_lm.train.seeds import render, train_seeds

        result: dict[str, Any] = {"directory": str(config.run.directory)}
        with contextlib.redirect_stdout(sys.stderr) if arguments.json == "-" else contextlib.nullcontext():
            if arguments.seeds is None:
                code = train(config, signals)
            else:
                code, figures = train_seeds(config, arguments.seeds, signals)
                result |= figures
    text = render(result) if "median" in result else ""
    if arguments.json or text:
        deliver(arguments, result | {"exit_code": int(code)}, text)
    return code


def evaluate(arguments: Arguments) -> int:
    config = on_devices(configuration(arguments))
    from spmd_lm.train.evaluate import evaluate_run

    result = evaluate_run(config)
    width = max(16, *(len(key) + 2 for key in result))
    code = deliver(arguments, result, "\n".join(f"{key:<{width}}{value:,.10g}" for key, value in result.items()))
    if not math.isfinite(result["eval_loss"]):
        raise NonFiniteError(
            f"{config.run.directory}: at step {result['step']} eval_loss is {result['eval_loss']:g}. Lower optim.lr, "
            "lengthen optim.warmup, or set precision.compute=float32, and train again in a new run.dir."
        )
    return code


def generate(arguments: Arguments) -> int:
    given = vars(arguments)
    sampling = Sampling(**{key.name: given[key.name] for key in fields(Sampling) if key.name in given})
    config = on_devices(configuration(arguments))
    from spmd_lm.generate import generate_run

    prompts = arguments.prompt or [""]
    texts = generate_run(config, prompts, sampling)
    pairs = [{"prompt": prompt, "text": text} for prompt, text in zip(prompts, texts, strict=True)]
    return deliver(arguments, pairs, "\n\n".join(texts))


def plan(arguments: Arguments) -> int:
    config = configuration(arguments)
    from spmd_lm.train.describe import describe, render

    result = describe(config)
    return deliver(arguments, result, render(result))


def bench(arguments: Arguments) -> int:
    config = on_devices(configuration(arguments))
    from spmd_lm.bench import bench, render

    result = bench(config, arguments.steps, arguments.warmup)
    return deliver(arguments, result, render(result))


def audit(arguments: Arguments) -> int:
    topology = parse_topology(arguments.topology) if arguments.topology is not None else None
    if topology and arguments.devices is not None:
        raise ConfigError("--topology has devices of its own. Leave out --devices.")
    if topology:  # its devices, and no others
        simulated = topology.size if topology.platform == "cpu" else 0
        arguments.overrides.append(f"run.simulate_devices={simulated}")
    config = on_devices(configuration(arguments))
    if topology and topology.platform != "cpu":
        simulate(1)  # what compiles for hardware that is not there runs on the CPU
    from spmd_lm.audit import audit, render

    result = audit(config, topology)
    deliver(arguments, result, render(result))
    return Exit.DONE if result["ok"] else Exit.CHECK_FAILED


def take_in(arguments: Arguments) -> int:
    from spmd_lm.huggingface import configure, open_directory
    from spmd_lm.runtime.fresh import refuse_taken

    refuse_taken(Path(arguments.RUN_DIR))
    found = open_directory(Path(arguments.DIR))
    config = configure(found, arguments.RUN_DIR, arguments.config, [*arguments.overrides, *simulated(arguments)])
    check_json(arguments)
    config = on_devices(config)
    from spmd_lm.exchange import import_run, render

    result = import_run(found, config)
    return deliver(arguments, result, render(result))


def give_out(arguments: Arguments) -> int:
    from spmd_lm.runtime.fresh import refuse_taken

    refuse_taken(Path(arguments.DIR))
    config = on_devices(configuration(arguments, "RUN_DIR"))
    from spmd_lm.exchange import export_run, render

    result = export_run(config, Path(arguments.DIR), arguments.dtype, arguments.shard)
    return deliver(arguments, result, render(result))


def show(arguments: Arguments) -> int:
    config = configuration(arguments)
    from spmd_lm.config.load import dump

    return deliver(arguments, config.model_dump(by_alias=True), dump(config).rstrip())


# --- what they take ---------------------------------------------------------------------------------------------------


def generate_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prompt", action="append", metavar="TEXT", help="what to continue; may be given again")
    # Sampling has the defaults; what is not given here is not set.
    sampling = parser.add_argument_group("sampling", argument_default=argparse.SUPPRESS)
    for name, letter, help in (
        ("tokens", "N", "how many to add"),
        ("temperature", "X", "0 takes the likeliest token"),
        ("top_k", "N", "keep the N likeliest tokens; 0 keeps all"),
        ("top_p", "P", "keep the likeliest tokens that sum to P"),
        ("seed", "N", "of what is drawn"),
    ):
        default = getattr(Sampling, name)
        option = f"--{name.replace('_', '-')}"
        sampling.add_argument(option, type=type(default), metavar=letter, help=f"{help} (default {default})")
    sampling.add_argument("--greedy", action="store_true", help="always take the likeliest token")


def train_options(parser: argparse.ArgumentParser) -> None:
    several = "train so many runs, of seeds from train.seed on, in run.dir/seed-N, and tell the median of their figures"
    parser.add_argument("--seeds", type=at_least(1), metavar="N", help=several)


def bench_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=at_least(1), default=10, metavar="N", help="timed steps (default 10)")
    parser.add_argument("--warmup", type=at_least(0), default=2, metavar="N", help="steps before them (default 2)")


def audit_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--topology", metavar="T", help="compile for T, there or not: cpu:8, v5p:4x4x4, 2*v5e:16x16, h100:2x8"
    )


def import_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", metavar="YAML", help="how to train it: a file whose model is not looked at")


def export_options(parser: argparse.ArgumentParser) -> None:
    types = ("float32", "bfloat16")
    parser.add_argument("--dtype", choices=types, default=types[0], help=f"of the tensors (default {types[0]})")
    parser.add_argument("--shard", type=size, default="5GB", metavar="SIZE", help="most bytes of a file (default 5GB)")


def size(text: str) -> int:
    """Bytes, written as 5GB or 500MB; in thousands, as Hugging Face counts."""
    digits, unit = text[:-2], text[-2:].upper()
    if unit not in UNITS or not digits.isdecimal() or not int(digits):
        raise argparse.ArgumentTypeError(f"expected a size as 5GB, 500MB or 64KB, got '{text}'")
    return int(digits) * UNITS[unit]


UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9}


def at_least(low: int) -> Callable[[str], int]:
    def count(text: str) -> int:
        if not text.isdecimal() or int(text) < low:
            raise argparse.ArgumentTypeError(f"expected a whole number of at least {low}, got '{text}'")
        return int(text)

    return count


VERBS = {
    "train": Verb("trains, or resumes the run in run.dir", train, train_options),
    "eval": Verb("figures of a run's newest checkpoint on what is held out", evaluate),
    "generate": Verb("samples text from a run's newest checkpoint", generate, generate_options),
    "plan": Verb("prints mesh, shardings and memory, and trains nothing", plan),
    "audit": Verb("compiles the step and compares what it sends with theory", audit, audit_options),
    "bench": Verb("times training steps: tokens/s, model FLOP/s, MFU, peak memory", bench, bench_options),
    "import": Verb("makes a run of a Hugging Face directory", take_in, import_options, ("DIR", "RUN_DIR")),
    "export": Verb("makes a Hugging Face directory of a run", give_out, export_options, ("RUN_DIR", "DIR")),
    "config": Verb("prints the resolved YAML", show),
}
