"""A program's first execution, with exclusive use of its devices.

XLA completes compilation at the first execution: it reads cuDNN's plans back, which captures a CUDA graph.  On a busy
H200 such a capture failed in one of six runs ("capturing stream has unjoined work", jax 0.11.2); the state may still be
in computation then, and the thread of `data.loader.batches_ahead` placed the next batch."""

from collections.abc import Callable
from typing import Any, TypeVar

import jax

Results = TypeVar("Results")


def exclusive_first_call(execute: Callable[..., Results]) -> Callable[..., Results]:
    """`execute`, with a first call that waits until its arguments, and then its results, are ready.  The caller must
    keep other threads off the devices meanwhile."""
    executed = False

    def call(*arguments: Any) -> Results:
        nonlocal executed
        if executed:
            return execute(*arguments)
        results = jax.block_until_ready(execute(*jax.block_until_ready(arguments)))
        executed = True
        return results

    return call
