"""Memory of fine-tuning: Llama-shaped models, trained whole, by LoRA and by QLoRA.

    python benchmarks/fine_tuning.py

Prints the table of docs/adapters.md: GiB per device by `spmd-lm plan`, with ZeRO-3 on several devices, for one row of
2,048 tokens per device; GiB of the state alone; in bold if it fits the memory that a run may take.  Nothing runs, and
nothing is compiled."""

from typing import Any

import spmd_lm
from spmd_lm.config.schema import RunConfig

LLAMA_3B = ("model.layers=28", "model.width=3072", "model.heads=24", "model.kv_heads=8", "model.mlp_width=8192")
MODELS = {
    "Llama 3.2 1B": ("configs/llama/3.2-1b.yaml",),
    "Llama 3.2 3B": ("configs/llama/3.2-1b.yaml", *LLAMA_3B),
    "Llama 3.1 8B": ("configs/llama/3.1-8b.yaml",),
    "Llama 3.1 70B": ("configs/llama/3.1-70b.yaml",),
}
ROWS = (
    *(("Llama 3.2 1B", topology) for topology in ("t4:1x1", "h100:1x1")),
    *(("Llama 3.2 3B", topology) for topology in ("t4:1x1", "h100:1x1")),
    *(("Llama 3.1 8B", topology) for topology in ("t4:1x1", "h100:1x1", "h100:1x8")),
    *(("Llama 3.1 70B", topology) for topology in ("h100:1x1", "h100:1x8", "h100:8x8")),
)
LORA = ("adapter.kind=lora", "adapter.rank=16", "adapter.targets=all-linear")
METHODS = {"full": (), "LoRA": LORA, "QLoRA": (*LORA, "adapter.base=nf4-double")}
HALF: tuple[str, ...] = ("precision.compute=float16", "precision.loss_scale=dynamic")


def configuration(model: str, topology: str, method: str) -> RunConfig:
    """One row of 2,048 tokens per device and step, in the device's 16-bit dtype."""
    hosts, _, gpus = topology.partition(":")[2].partition("x")
    devices = int(hosts) * int(gpus)
    layout = (
        "parallel.data=-1",
        "parallel.model=1",
        "parallel.microbatches=1",
        f"train.batch={devices}",
        f"parallel.zero={3 if devices > 1 else 0}",
    )
    dtype, precision = ("float16", HALF) if topology.startswith("t4") else ("bfloat16", ())
    if METHODS[method]:
        precision += (f"precision.frozen={dtype}",)
    return spmd_lm.load_config(*MODELS[model], *METHODS[method], *precision, *layout, "model.context=2048")


def cell(plan: dict[str, Any]) -> str:
    """GiB in total and of state alone; in bold if it fits."""
    needed = sum(plan["memory"].values())
    text = f"{needed / 2**30:,.1f}, {plan['state_bytes'] / 2**30:,.1f}"
    return f"**{text}**" if needed <= plan["capacity"] else text


def main() -> None:
    rows = [["model", "devices", *METHODS]]
    for model, topology in ROWS:
        plans = [spmd_lm.plan(configuration(model, topology, method), topology) for method in METHODS]
        rows.append([model, topology, *map(cell, plans)])
    rows.insert(1, ["---"] * len(rows[0]))
    print("\n".join(f"| {' | '.join(row)} |" for row in rows))


if __name__ == "__main__":
    main()
