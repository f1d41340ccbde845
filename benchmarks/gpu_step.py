"""Time spmd-lm's train step against PyTorch's on one GPU, in bfloat16: GPT-2 against a compiled GPT in the manner of
nanoGPT, BERT against Hugging Face's.

    python benchmarks/gpu_step.py [gpt2-124m gpt2-355m gpt2-1.2b bert-large] [--rounds 20]

Both programs start from the same weights, train on the same batch, stay warm and take turns, one step at a time.
Then each is profiled, and its time is compared with that of an MFU of 60%.  Without a GPU the script runs tiny
models on the CPU in float32, which tests the script, not speed.  Exits 1 if the first losses differ."""

import argparse
import importlib.util
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path

import children
from gpu_kernels import COLUMNS, by_kind
from gpu_sizes import ALL, SIZES, TINY_SIZES, load_size
from turns import Contender, measure, started

from spmd_lm.errors import ConfigError
from spmd_lm.runtime.devices import GPU_FILES, hide_xla_warnings

HERE = Path(__file__).parent
OURS, TORCH, SCANNED = PROGRAMS = ("spmd-lm", "torch", "spmd-lm-scanned")
GOAL = 0.6  # MFU
LONGEST, SHOWN = 20, 5  # kernels written, and printed
TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2}
"""Largest difference of the first losses.  In bfloat16 the two programs round in different places."""


def has_gpu() -> bool:
    return any(map(os.path.exists, GPU_FILES))


def environment(on_gpu: bool) -> dict[str, str]:
    """The programs' environment.  They share a GPU's memory, so none preallocates it.  On a CPU, waiting OpenMP threads
    spin: beside other work, PyTorch's tiny step takes 100 times as long with two threads as with one."""
    hide_xla_warnings()
    env = children.environment() | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    return env if on_gpu else env | {"JAX_PLATFORMS": "cpu", "OMP_NUM_THREADS": "1"}


def commands(
    size: str, directory: str, programs: list[str], settings: tuple[str, ...], eager: bool
) -> dict[str, list[str]]:
    ours = [sys.executable, str(HERE / "gpu_framework.py"), size, directory, *settings]
    torch = [sys.executable, str(HERE / "gpu_torch.py"), directory, *["--eager"] * eager]
    of_program = {OURS: ours, TORCH: torch, SCANNED: [*ours, "model.scan=true"]}
    return {name: of_program[name] for name in programs}


def make_row(contender: Contender, reference: Contender, about: dict) -> dict:
    """about: spmd-lm's answer, which has the step's FLOPs and the device's peak; all programs do the same work."""
    own, profile = contender.ask("about"), contender.ask("profile")
    seconds = statistics.median(contender.wall)
    pairs = zip(contender.wall, reference.wall, strict=True)
    return {
        "step_seconds": {"median": seconds, "min": min(contender.wall), "max": max(contender.wall)},
        "ratio": statistics.median(one / base for one, base in pairs),
        "tokens_per_second": about["tokens"] / seconds,
        "mfu": about["flops"] / seconds / about["peak_flops"] if about["peak_flops"] else None,
        "memory_bytes": own["memory_bytes"],
        "compile_seconds": own["compile_seconds"],
        "attention": own["attention"],
        "seconds_by_kind": by_kind(profile),
        "kernels": dict(list(profile["kernels"].items())[:LONGEST]),
        "loss_difference": max(abs(a - b) for a, b in zip(contender.losses, reference.losses, strict=True)),
    }


def all_settings(args: argparse.Namespace, on_gpu: bool) -> tuple[str, ...]:
    return f"precision.compute={'bfloat16' if on_gpu else 'float32'}", *args.settings


def require_packages(programs: list[str]) -> None:
    """Raises ConfigError if PyTorch is to run and is not installed."""
    missing = [name for name in ("torch", "transformers") if not importlib.util.find_spec(name)]
    if missing and TORCH in programs:
        raise ConfigError(f"{' and '.join(missing)} cannot be imported. Install the extra hf: pip install -e '.[hf]'.")


def time_size(size: str, args: argparse.Namespace, on_gpu: bool) -> dict:
    """Times all programs at one size: a row for each, and the figures that they share."""
    settings = all_settings(args, on_gpu)
    config = load_size(size, settings)
    with tempfile.TemporaryDirectory() as directory:
        programs = commands(size, directory, args.programs, settings, args.eager)
        with started(programs, environment(on_gpu)) as contenders:
            measure(contenders, args.rounds)
            about = contenders[0].ask("about")
            rows = {c.name: make_row(c, contenders[0], about) for c in contenders}
    m = config.model
    # Queries by keys and probabilities by values, the full square: 2 products, 2 FLOPs, 3 times with backward.
    attention_flops = 12 * m.layers * m.width * m.context * about["tokens"]
    return {
        "size": size,
        "settings": args.settings,
        "tolerance": TOLERANCE[config.precision.compute],
        **{key: about[key] for key in ("device", "tokens", "flops", "peak_flops", "peak_source")},
        "product_flops": about["flops"] - attention_flops,
        "rows": rows,
    }


def render(result: dict) -> str:
    columns = "".join(f"{kind:>15s}" for kind in COLUMNS)
    lines = [
        f"{result['size']}: {result['tokens']:,} tokens a step, on {result['device']}",
        f"{'':18s}{'step ms':>9s}{'ratio':>7s}{'tokens/s':>10s}{'MFU':>7s}{'GiB':>7s}{columns}  (ms)",
    ]
    for name, r in result["rows"].items():
        mfu = "" if r["mfu"] is None else f"{r['mfu']:.1%}"
        gib = "" if r["memory_bytes"] is None else f"{r['memory_bytes'] / 2**30:.1f}"
        speed = f"{r['step_seconds']['median'] * 1e3:9.1f}{r['ratio']:7.3f}{r['tokens_per_second']:10,.0f}"
        kinds = "".join(f"{r['seconds_by_kind'][kind] * 1e3:15.1f}" for kind in COLUMNS)
        lines.append(f"{name:18s}{speed}{mfu:>7s}{gib:>7s}{kinds}")
    return "\n".join([*lines, *explain(result)])


def explain(result: dict) -> list[str]:
    """Reasons why each program misses GOAL; needs the device's peak."""
    if not result["peak_flops"]:
        return []
    goal = result["flops"] / result["peak_flops"] / GOAL
    lines = [f"an MFU of {GOAL:.0%} of {result['peak_source']} would be {goal * 1e3:.1f} ms a step"]
    for name, r in result["rows"].items():
        seconds = r["seconds_by_kind"]
        products, rest = seconds["products"], sum(seconds.values()) - seconds["products"]
        of_peak = f" at {result['product_flops'] / products / result['peak_flops']:.0%} of the peak" if products else ""
        by_kernel = ", ".join(f"{kernel[:60]} {each * 1e3:.2f}" for kernel, each in list(r["kernels"].items())[:SHOWN])
        lines += [
            f"{name}: matrix products {products * 1e3:.1f} ms{of_peak}, all else {rest * 1e3:.1f} ms",
            f"  its longest kernels, in ms: {by_kernel}",
        ]
    return lines


def parse_arguments(on_gpu: bool) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = list(SIZES if on_gpu else TINY_SIZES)
    parser.add_argument("sizes", nargs="*", metavar="SIZE", help=f"of {', '.join(ALL)}; default {' '.join(default)}")
    parser.add_argument("--rounds", type=int, default=20, help="steps that each program makes")
    parser.add_argument("--programs", nargs="+", choices=PROGRAMS, default=[OURS, TORCH], help="spmd-lm comes first")
    parser.add_argument("--set", dest="settings", action="append", default=[], metavar="KEY=VALUE", help="of spmd-lm's")
    parser.add_argument("--eager", action="store_true", help="PyTorch does not compile")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    args = parser.parse_args()
    args.sizes = args.sizes or default
    if unknown := [size for size in args.sizes if size not in ALL]:
        parser.error(f"no size {', '.join(unknown)}. Use {', '.join(ALL)}.")
    if args.rounds < 1:
        parser.error("--rounds is at least 1.")
    args.programs = sorted(set(args.programs) | {OURS}, key=PROGRAMS.index)
    return args


def main() -> int:
    on_gpu = has_gpu()
    args = parse_arguments(on_gpu)
    for size in args.sizes:  # raises ConfigError before the first size takes minutes
        load_size(size, all_settings(args, on_gpu))
    require_packages(args.programs)
    if not on_gpu:
        print("No GPU here: tiny models in float32 on the CPU. The figures say nothing of a GPU.")
    results = []
    for size in args.sizes:
        results.append(time_size(size, args, on_gpu))
        print(render(results[-1]), flush=True)
        if args.json:
            args.json.write_text(json.dumps(results, indent=1))
    wrong = [
        f"{result['size']}, {name}: the first losses differ from {OURS}'s by {row['loss_difference']:.1e}"
        for result in results
        for name, row in result["rows"].items()
        if not row["loss_difference"] <= result["tolerance"]
    ]
    print("\n".join(f"FAILED: {line}" for line in wrong), end="\n" if wrong else "")
    return int(bool(wrong))


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ConfigError as error:
        print("\n".join(error.problems), file=sys.stderr)
        sys.exit(2)
