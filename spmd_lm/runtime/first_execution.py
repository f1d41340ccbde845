"""A program's first execution, with its devices to itself.

XLA completes what it compiled when it first executes it: it reads cuDNN's plans back, which captures a CUDA graph.  On
a busy H200 such a capture failed in one of six runs ("capturing stream has unjoined work", jax 0.11.2); the
state may still be computed then, and the thread of `data.loader.batches_ahead` placed the next batch."""

from collections.abc import Callable
from typing import Any, TypeVar

import jax

Results = TypeVar("Results")


def alone_at_first(execute: Callable[..., Results]) -> Callable[..., Results]:
    """`execute`, whose first call waits until its arguments are ready, and then until its results are.  That no thread
    uses the devices meanwhile is up to the caller."""
    executed = False

    def call(*arguments: Any) -> Results:
        nonlocal executed
        if executed:
            return execute(*arguments)
        results = jax.block_until_ready(execute(*jax.block_until_ready(arguments)))
        executed = True
        return results

    return call
