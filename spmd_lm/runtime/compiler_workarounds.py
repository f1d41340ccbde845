"""Process-wide workarounds for XLA's clients and compilers: symptom, versions, remedy, and the test that covers it.

This module does not import jax: some workarounds are set up before jax starts."""

import os
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

Results = TypeVar("Results")

# ---- simulated devices: XLA's CPU client

IN_ORDER = "--xla_cpu_enable_concurrency_optimized_scheduler=false"


def run_in_order(flags: list[str]) -> list[str]:
    """XLA's flags, with IN_ORDER unless the user sets it.

    With XLA's other scheduler two scatters of one group may meet, which ends the process (`rendezvous.h: Check failed:
    id < num_threads`).  With ZeRO-1, 7M parameters, two microbatches and data 4 x model 2, it ended 12 of 12 starts
    that compiled the step (jax 0.10.2 and 0.12); with this scheduler none of 6.  Steps take as long.  Separate channels
    (`number_channels`) also keep them apart, but not in a job of several processes, whose collectives have no channels.
    tests/runtime/test_devices.py covers it."""
    return flags if any(flag.startswith(IN_ORDER.partition("=")[0]) for flag in flags) else [*flags, IN_ORDER]


def enlarge_thread_pool(local_devices: int) -> None:
    """Sets NPROC, which sizes the thread pool of XLA's CPU client, instead of the number of cores.

    A collective holds threads of that pool for every device until the last one has joined: with 8 devices on 2 cores
    and jax 0.10.2, 4 of 4 runs deadlocked within 4,000 steps; with NPROC at 16 or 64 none did."""
    os.environ.setdefault("NPROC", str(max(4 * local_devices, 64)))


COLLECTIVES = {
    *("all_gather", "all_gather_invariant", "all_gather_reduced", "all_to_all", "pmax", "pmin", "ppermute"),
    *("psum", "psum_invariant", "reduce_scatter"),
    *("unreduced_pmax", "unreduced_pmin", "unreduced_psum", "unreduced_reduce_scatter"),
}


def number_channels() -> None:
    """Gives each collective that is lowered for CPUs from now on a channel of its own.

    XLA's CPU client tells collectives apart by their group of devices and their channel, and jax gives all collectives
    of a shard_map channel 1.  They start in the program's order, but a loop or conditional counts as started before the
    collectives in it are: the next collective after it may overtake them, on one device and not on another.  If both
    have the same group, they then meet: the rendezvous never ends, or fails with `Check failed: id < num_threads`.
    XLA's partitioners also number the collectives that they insert.  Other platforms keep channel 1: they run all
    collectives in one order.  tests/runtime/test_channels.py covers it."""
    from spmd_lm.runtime.jax_internals import lowerings, register_lowering

    for primitive, entry in list(lowerings.items()):
        if primitive.name in COLLECTIVES:
            # Uncached: equal collectives would be one function, and one channel.
            register_lowering(primitive, _numbered(entry.rule), platform="cpu", cacheable=False)


def _numbered(rule: Callable[..., Sequence[Any]]) -> Callable[..., Sequence[Any]]:
    from spmd_lm.runtime.jax_internals import ir

    def lower(ctx: Any, *args: Any, **params: Any) -> Sequence[Any]:
        results = rule(ctx, *args, **params)
        for value in results:
            while value not in args and "channel_handle" not in value.owner.attributes:
                value = value.owner.operands[0]  # the result may be reshaped
            if value not in args:
                channel = ctx.module_context.new_channel()
                handle = f"#stablehlo.channel_handle<handle = {channel}, type = 1>"  # 1: from device to device
                value.owner.attributes["channel_handle"] = ir.Attribute.parse(handle)
        return results

    return lower


# ---- GPUs and TPUs


def exclusive_first_call(execute: Callable[..., Results]) -> Callable[..., Results]:
    """`execute`, whose first call waits until its arguments are ready, and then until its results are.  The caller
    makes sure that no other thread uses the devices meanwhile.

    XLA completes a compiled program at its first execution: it reads cuDNN's plans back, which captures a CUDA graph.
    On a busy H200 such a capture failed in one of six runs ("capturing stream has unjoined work", jax 0.11.2): the
    state might still be computed, and the thread of `data.loader.batches_ahead` was placing the next batch."""
    executed = False

    def call(*arguments: Any) -> Results:
        import jax

        nonlocal executed
        if executed:
            return execute(*arguments)
        results = jax.block_until_ready(execute(*jax.block_until_ready(arguments)))
        executed = True
        return results

    return call


COMPILER_STACKS = "--undefok=fibers_default_thread_stack_size --fibers_default_thread_stack_size=1048576"


def deepen_compiler_stacks() -> None:
    """Sets the stack size of libtpu's compiler threads, which libtpu reads when it is loaded.  The user's flags come
    last, and prevail.

    The default is too small for its cost model of matmuls fused with matmuls (SIGSEGV in CalculateClassicWindowCost),
    as in GPTs with 4 layers, width 1024, context 256 and remat.policy=full, where 131072 bytes are enough (libtpu
    0.0.42.1).  A libtpu that does not know the flag ignores it."""
    arguments = os.environ.get("LIBTPU_INIT_ARGS", "")
    if COMPILER_STACKS not in arguments:
        os.environ["LIBTPU_INIT_ARGS"] = f"{COMPILER_STACKS} {arguments}".rstrip()
