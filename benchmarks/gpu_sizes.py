"""Sizes that gpu_step.py times: shipped models, with batches that leave room for two programs in 80 GB."""

from pathlib import Path
from typing import NamedTuple

import workload

from spmd_lm.config.load import load
from spmd_lm.config.schema import RunConfig

CONFIGS = Path(__file__).parent.parent / "configs"

# The same for every program: constant lr, no dropout (cuDNN's attention has none), nothing recomputed.
COMMON = (
    *("train.steps=1000000", "model.dropout=0.0", "model.attention_dropout=0.0"),
    *("parallel.data=1", "parallel.zero=0", "remat.policy=none", "optim.decay=constant", "optim.warmup=0"),
    *("optim.min_lr=0.0", f"optim.lr={workload.LR}", f"optim.b1={workload.B1}", f"optim.b2={workload.B2}"),
    *(f"optim.eps={workload.EPS}", f"optim.weight_decay={workload.WEIGHT_DECAY}", f"optim.clip={workload.CLIP}"),
)
TINY = ("model.layers=2", "model.width=64", "model.heads=2", "model.context=128", "model.vocab=320")


class Size(NamedTuple):
    """A file in configs/, with overrides of its model.  batch: rows per step.  microbatches: parts of a batch."""

    config: str
    batch: int
    microbatches: int
    overrides: tuple[str, ...] = ()


# Vocabularies are rounded up to a multiple of 64, as nanoGPT does.
SIZES = {
    "gpt2-124m": Size("gpt2/124m.yaml", 64, 2, ("model.vocab=50304",)),
    "gpt2-355m": Size("gpt2/355m.yaml", 32, 2, ("model.vocab=50304",)),
    "gpt2-1.2b": Size("megatron/1.2b.yaml", 16, 8, ("model.vocab=50304", "model.context=2048")),
    "bert-large": Size("bert/bert-large.yaml", 64, 2, ("model.vocab=30528",)),
}
TINY_SIZES = {
    "gpt2-tiny": Size("gpt2/124m.yaml", 4, 2, TINY),
    "bert-tiny": Size("bert/bert-large.yaml", 4, 2, TINY),
}
ALL = SIZES | TINY_SIZES


def load_size(name: str, overrides: tuple[str, ...] = ()) -> RunConfig:
    """The configuration of a size.  Raises ConfigError for invalid overrides."""
    size = ALL[name]
    batch = f"train.batch={size.batch}", f"parallel.microbatches={size.microbatches}"
    return load(CONFIGS / size.config, (*COMMON, *size.overrides, *batch, *overrides))
