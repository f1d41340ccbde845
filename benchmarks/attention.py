"""Attention in blocks beside attention that holds all scores, forward and backward, on this machine.

    python benchmarks/attention.py [--tokens 256 512 1024 4096] [--rounds 5] [--dropout 0.1] [--bidirectional]

Each row has 4 heads of 64 features; a batch has 4,096 tokens.  Both kernels run in turns.  Prints, for each length of
rows, the dense kernel's fastest time, the chunked one's as a share of it, and the temporary arrays of both, in MiB."""

import argparse
import time

import jax
import jax.numpy as jnp
import numpy as np

from spmd_lm.config.attention_kernels import attention_block
from spmd_lm.ops.attention import attention
from spmd_lm.ops.attention_spec import AttentionSpec
from spmd_lm.ops.dropout import DropoutKey

HEADS, WIDTH, TOKENS = 4, 256, 4096


def compiled(kernel: str, tokens: int, dropout: float, causal: bool):
    """The compiled result and gradients of a batch, and its arguments."""
    block = attention_block(jax.default_backend())
    spec = AttentionSpec(HEADS, HEADS, causal, dropout=dropout, kernel=kernel, block=block)
    rows = max(TOKENS // tokens, 1)
    key = DropoutKey(jnp.uint32(0), jnp.int32(0), jnp.arange(rows, dtype=jnp.int32))
    arrays = [jnp.asarray(x) for x in np.random.default_rng(0).normal(size=(4, rows, tokens, WIDTH)).astype(np.float32)]

    def both(q, k, v, g):
        out, vjp = jax.vjp(lambda q, k, v: attention(q, k, v, spec, key=key), q, k, v)
        return out, *vjp(g)

    return jax.jit(both).lower(*arrays).compile(), arrays


def seconds(run, arrays) -> float:
    start = time.perf_counter()
    jax.block_until_ready(run(*arrays))
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[256, 512, 1024, 4096])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--bidirectional", action="store_true")
    args = parser.parse_args()
    for tokens in args.tokens:
        runs = {name: compiled(name, tokens, args.dropout, not args.bidirectional) for name in ("xla", "chunked")}
        times = {name: [seconds(*run) for _ in range(1)] for name, run in runs.items()}
        for _ in range(args.rounds):
            for name, run in runs.items():
                times[name].append(seconds(*run))
        dense, chunked = (min(times[name]) for name in ("xla", "chunked"))
        temporaries = [run.memory_analysis().temp_size_in_bytes / 2**20 for run, _ in runs.values()]
        print(
            f"{tokens:6d} tokens  dense {1e3 * dense:8.1f} ms  chunked {chunked / dense:5.2f} of it  "
            f"temporaries {temporaries[0]:7.1f} and {temporaries[1]:6.1f} MiB",
            flush=True,
        )


if __name__ == "__main__":
    main()
