"""Gives every collective in programs of simulated devices its own channel.

XLA's CPU client identifies collectives by their group of devices and their channel, and jax gives all collectives of a
shard_map channel 1.  They start in program order, but a loop or conditional counts as started before the collectives in
it do: the next collective may overtake them, on one device and not on another.  Two with the same group then met: a
rendezvous that never ended, or a `Check failed: id < num_threads`.  XLA's partitioners also number their
collectives."""

from collections.abc import Callable, Sequence
from typing import Any

COLLECTIVES = {
    *("all_gather", "all_gather_invariant", "all_gather_reduced", "all_to_all", "pmax", "pmin", "ppermute"),
    *("psum", "psum_invariant", "reduce_scatter"),
    *("unreduced_pmax", "unreduced_pmin", "unreduced_psum", "unreduced_reduce_scatter"),
}


def number_channels() -> None:
    """Numbers the collectives of each program lowered for CPUs from now on.  Other platforms run collectives in one
    order, and keep channel 1."""
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
