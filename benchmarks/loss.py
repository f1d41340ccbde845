"""Time and peak memory of the loss and its gradients, compared with materialized logits, on one CPU device.

    python benchmarks/loss.py [--vocab 50304] [--context 1024] [--batch 8] [--width 768] [--rounds 7]

Both take turns, one evaluation at a time; ratios are of minima.  Memory is the compiler's size of temporaries.
Exits 1 if ours takes more than a quarter of the memory or 1.1 times the time."""

import argparse
import os
import sys
import time
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path.insert(0, str(Path(__file__).parents[1]))

import jax
import jax.numpy as jnp
import numpy as np

from spmd_lm.ops.cross_entropy import cross_entropy


def plain(h, table, targets, weights):
    """Cross-entropy from materialized logits."""
    log_probs = jax.nn.log_softmax(jnp.einsum("btd,vd->btv", h, table, preferred_element_type=jnp.float32))
    return -(weights * jnp.take_along_axis(log_probs, targets[..., None], -1)[..., 0]).sum()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("vocab", 50304), ("context", 1024), ("batch", 8), ("width", 768), ("rounds", 7)):
        parser.add_argument(f"--{name}", type=int, default=default)
    a = parser.parse_args()
    r = np.random.default_rng(0)
    h = jnp.asarray(r.normal(size=(a.batch, a.context, a.width)), jnp.float32)
    table = jnp.asarray(r.normal(size=(a.vocab, a.width)) * 0.02, jnp.float32)
    targets = jnp.asarray(r.integers(0, a.vocab, (a.batch, a.context)), jnp.int32)
    args = h, table, targets, jnp.full((a.batch, a.context), 1 / (a.batch * a.context), jnp.float32)
    losses = {"plain": plain, "ours": lambda h, table, *rest: cross_entropy(h, table, None, *rest, a.vocab)}
    compiled = {name: jax.jit(jax.value_and_grad(f, (0, 1))).lower(*args).compile() for name, f in losses.items()}
    values = {name: jax.block_until_ready(f(*args)) for name, f in compiled.items()}
    difference = abs(float(values["ours"][0]) - float(values["plain"][0]))
    del values
    seconds: dict[str, list[float]] = {name: [] for name in compiled}
    for _ in range(a.rounds):
        for name, f in compiled.items():
            start = time.perf_counter()
            jax.block_until_ready(f(*args))
            seconds[name].append(time.perf_counter() - start)
    print(f"{a.batch} x {a.context} tokens, vocabulary {a.vocab}, width {a.width}; losses differ by {difference:.1e}")
    memory = {}
    for name, f in compiled.items():
        analysis = f.memory_analysis()
        assert analysis is not None
        memory[name] = analysis.temp_size_in_bytes
        print(f"{name:<6} {min(seconds[name]):6.2f} s   {memory[name] / 2**20:8,.0f} MiB of temporaries")
    slower, smaller = min(seconds["ours"]) / min(seconds["plain"]), memory["plain"] / memory["ours"]
    print(f"ours takes {slower:.3f} times the time and a {smaller:.1f}th of the memory")
    return int(slower > 1.1 or smaller < 4)


if __name__ == "__main__":
    sys.exit(main())
