"""The benchmark's training: sizes, initial weights, one batch, and the protocol for steps.

A program ends in `serve(step)`: it reports its first losses, then makes one step for each empty line on standard
input."""

import dataclasses
import json
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

LR, B1, B2, EPS, WEIGHT_DECAY = 3e-4, 0.9, 0.95, 1e-8, 0.1
CLIP = 1.0  # of the gradients' norm, on GPUs; the steps on a CPU do not clip
WARMUP = 3
"""Steps before timing starts.  Their losses must agree; later ones drift apart by rounding alone."""


@dataclasses.dataclass(frozen=True)
class Sizes:
    layers: int = 6
    width: int = 384
    heads: int = 6
    context: int = 256
    batch: int = 12
    vocab: int = 50_304

    @property
    def matmul_flops(self) -> int:
        """FLOPs of one step, forward and backward, with the full square of attention scores."""
        tokens, w = self.batch * self.context, self.width
        layer = 12 * w * w + 2 * self.context * w
        return 6 * tokens * (self.layers * layer + self.vocab * w)


SIZES = {
    "gpt-50k": Sizes(),
    "gpt-256": Sizes(vocab=256),
    "tiny": Sizes(layers=2, width=64, heads=2, context=128, batch=2, vocab=256),
}


def matrices(s: Sizes) -> dict[str, np.ndarray]:
    """The random weights; weights of layers are [layers, in, out].  Norms start at one, biases at zero."""
    rng = np.random.default_rng(0)
    shapes = {
        "tokens": (s.vocab, s.width),
        "positions": (s.context, s.width),
        **dict.fromkeys(("query", "key", "value", "out"), (s.layers, s.width, s.width)),
        "up": (s.layers, s.width, 4 * s.width),
        "down": (s.layers, 4 * s.width, s.width),
    }
    branch_ends = {"out", "down"}  # outputs of the residual branches
    std = {name: 0.02 / (2 * s.layers) ** 0.5 if name in branch_ends else 0.02 for name in shapes}
    return {name: rng.standard_normal(shape, np.float32) * np.float32(std[name]) for name, shape in shapes.items()}


def tokens(s: Sizes) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and targets, int32 [batch, context]: the same at every step."""
    stream = np.random.default_rng(1).integers(0, s.vocab, (s.batch, s.context + 1), np.int32)
    return stream[:, :-1], stream[:, 1:]


def serve(step: Callable[[], float], answers: dict[str, Callable[[], dict[str, Any]]] | None = None) -> None:
    """Runs steps for the parent process.
    step: makes one update, complete when it returns its loss.  answers: further answers, by the parent's question."""
    start = time.perf_counter()
    losses = [step() for _ in range(WARMUP)]
    print(json.dumps({"losses": losses, "seconds": time.perf_counter() - start}), flush=True)
    for question in map(str.strip, sys.stdin):
        if question:
            print(json.dumps((answers or {})[question]()), flush=True)
            continue
        wall, cpu = time.perf_counter(), time.process_time()
        step()
        print(json.dumps({"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu}), flush=True)
