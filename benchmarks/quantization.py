"""Perplexity of a run whose matrices are stored in few bits, by coding and method:

    python benchmarks/quantization.py runs/quickstart --markdown

Prints also the largest share of rounding's |X (W - Q)|² that gptq leaves in a matrix."""

import argparse
import json
import tempfile
from pathlib import Path

from spmd_lm.config.load import load_run
from spmd_lm.ops.few_bits import Coding
from spmd_lm.quantization.run import METHODS, quantize_run
from spmd_lm.runtime.devices import set_up_devices

CODINGS = (
    Coding("int8"),
    Coding("int8", 64),
    Coding("nf4", 64),
    Coding("int4"),
    Coding("int4", 64),
    Coding("int3", 64),
)


def row(run: Path, coding: Coding, overrides: list[str]) -> dict[str, float | str]:
    config = set_up_devices(load_run(run, overrides))
    figures: dict[str, float | str] = {"codes": f"{coding.bits}, {coding.group or 'channel'}"}
    for method in METHODS:
        with tempfile.TemporaryDirectory() as scratch:
            result = quantize_run(config, Path(scratch) / "out", coding, method)
        figures["float"] = result["before"]["eval_perplexity"]
        figures[method] = result["after"]["eval_perplexity"]
    figures["worst share"] = max(each["gptq"] / each["rtn"] for each in result["errors"].values())
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--markdown", action="store_true", help="print a table in place of JSON")
    parser.add_argument(
        "--codes", type=int, nargs="*", default=range(len(CODINGS)), help="some of the codings, by number"
    )
    args = parser.parse_args()
    rows = [row(args.run, CODINGS[i], args.overrides) for i in args.codes]
    if not args.markdown:
        print(json.dumps(rows, indent=2))
        return
    print(f"| codes, group | float | {' | '.join(METHODS)} | gptq's worst share |\n| --- | --- | --- | --- | --- |")
    for each in rows:
        perplexity = " | ".join(f"{each[key]:.3f}" for key in ("float", *METHODS))
        print(f"| {each['codes']} | {perplexity} | {each['worst share']:.2f} |")


if __name__ == "__main__":
    main()
