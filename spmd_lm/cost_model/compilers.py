"""What XLA's compiler for a platform makes of the arrays that a step names, where memory depends on it.

Read from the buffers that the compilers assign to steps drawn at random (benchmarks/predictions.py), and around
attention to some of few layers (docs/compilers.md)."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from spmd_lm.config.remat import Policy

MIB = 2**20


class LayerArrays(NamedTuple):
    """How many arrays of each size a layer holds at one point, apart from what it saves.

    hidden: the MLP's hidden layer, and as often what gates it.  queries, keys: all heads of queries, or of keys or
    values, padded to lanes.  logsumexps: float32, one per query and head, each as wide as a lane.  streams: the
    residual stream; with `parallel.sequence` two that are unsharded besides."""

    hidden: int = 0
    queries: int = 0
    keys: int = 0
    logsumexps: int = 0
    streams: int = 0


Points = Mapping[Policy, tuple[LayerArrays, ...]]


class Compiler(NamedTuple):
    """lanes: the minor dimension of an array is padded to a multiple of it.  wide: bfloat16 is computed as float32, and
    activations, their gradients and the weights that a loop reads are held so.  kernel_workspace: bytes that matrix
    products may use meanwhile.  scores: arrays as large as all float32 scores that backward through attention holds
    where no fused kernel computes it (read from CPUs alone).  recomputes_caps: derivatives of soft caps are made again
    from the capped scores.  streams: further copies of the unsharded residual stream in backward, without and with
    `parallel.sequence`.  least_streams: the fewest unsharded residual streams that backward holds where all-reduces
    over `model` sum them: operands and results.  in_turn: remat policies under which a layer's branches are recomputed
    one after the other, so that the larger one's activations alone are held.  keeps_gathers: those under which
    attention's gathered input stays while the MLP's gradients are made.  logits: arrays as large as a chunk of logits
    that cross-entropy holds.  sums_overlap: sums over devices, and zeros, start as early and end as late as their data
    allow, so that their float32 operands stay.  copies_replicas: sums over replicas are not written into their
    operands.  casts_layers: sharded weights are cast layer by layer as they are gathered, not all of them before the
    loop.  reuses_chunk: a stage's only chunk is used as it is, but for attention's query, key and value matrices, which
    about every second compiled step copies; all of it is copied where it is gathered for several microbatches.
    rounds_stacks: the loop that scatters a stack holds a slice of one layer, and gradients that it scatters in a
    narrower dtype are rounded ahead of it, those of all layers.  keeps_weights: they stay until a step's end, read
    again or not.  unrolled_sums: residual streams that each of several unrolled layers holds besides when their
    backward begins, where all-reduces over `model` sum few tokens.  unrolled_gathers: the same where the sequence is
    sharded, of whole streams.  decoded: float32 arrays as large as the largest matrix in few bits, which its product
    holds.  attention_arrays, forward_arrays: by remat policy, at the points of attention's
    backward, and of forward, at which a layer may hold most where a fused kernel computes attention; measured without
    post norm and dropout.  rotary_attention_arrays, rotary_forward_arrays: at those that rotary positions add."""

    lanes: int = 1
    wide: bool = False
    kernel_workspace: int = 0
    scores: float = 1.35
    recomputes_caps: bool = False
    streams: tuple[int, int] = (0, 0)
    least_streams: int = 0
    in_turn: frozenset[Policy] = frozenset()
    keeps_gathers: frozenset[Policy] = frozenset()
    logits: float = 2
    sums_overlap: bool = False
    copies_replicas: bool = False
    casts_layers: bool = False
    reuses_chunk: bool = False
    rounds_stacks: bool = False
    keeps_weights: bool = False
    unrolled_sums: float = 0
    unrolled_gathers: float = 0
    decoded: int = 0
    attention_arrays: Points = MappingProxyType({})
    forward_arrays: Points = MappingProxyType({})
    rotary_attention_arrays: Points = MappingProxyType({})
    rotary_forward_arrays: Points = MappingProxyType({})


COMPILER_OF_PLATFORM = {
    "tpu": Compiler(
        lanes=128,
        least_streams=7,
        in_turn=frozenset({"full", "residual"}),
        keeps_gathers=frozenset({"full"}),
        logits=1,
        decoded=2,
        copies_replicas=True,
        reuses_chunk=True,
        rounds_stacks=True,
        # Each first point is in the kernels: queries, keys and values with their gradients and the output's, or with
        # the output and its logsumexp, of which XLA makes a copy.  The second is before the weights' gradients.
        attention_arrays={
            "none": (
                LayerArrays(hidden=1, queries=2, keys=4, streams=6),
                LayerArrays(hidden=2, queries=1, keys=2, streams=7),
            ),
            "selective": (
                LayerArrays(hidden=1, queries=2, keys=2, logsumexps=2, streams=4),
                LayerArrays(hidden=2, queries=1, keys=2, streams=7),
            ),
            "residual": (LayerArrays(hidden=2, queries=2, keys=2, logsumexps=2, streams=5),),
            "full": (LayerArrays(hidden=2, queries=3, keys=4, streams=7),),
            "block": (LayerArrays(hidden=2, queries=3, keys=4, streams=4),),
        },
        forward_arrays={
            "none": (LayerArrays(hidden=1, queries=2, keys=2, logsumexps=1, streams=4),),
            "selective": (LayerArrays(queries=1, keys=2, streams=4), LayerArrays(hidden=1, streams=5)),
        },
        # Queries and keys in float32, and both halves of each, padded; in backward values or their gradient too.
        rotary_attention_arrays={
            "none": (LayerArrays(hidden=1, queries=4, keys=5, streams=2),),
            "selective": (LayerArrays(hidden=1, queries=4, keys=5, streams=2),),
            "residual": (LayerArrays(hidden=2, queries=5, keys=5, streams=5),),
            "full": (LayerArrays(hidden=2, queries=5, keys=5, streams=5),),
            "block": (LayerArrays(hidden=2, queries=4, keys=5, streams=2),),
        },
        rotary_forward_arrays={
            "none": (
                LayerArrays(queries=4, keys=4, streams=4),
                LayerArrays(hidden=1, queries=3, keys=2, logsumexps=1, streams=4),
            ),
            "selective": (LayerArrays(queries=4, keys=4, streams=4),),
        },
    ),
    "gpu": Compiler(
        recomputes_caps=True,
        kernel_workspace=64 * MIB,
        least_streams=11,
        logits=1.5,
        unrolled_sums=1.5,
        unrolled_gathers=1,
        in_turn=frozenset({"residual"}),
        sums_overlap=True,
        casts_layers=True,
    ),
    "cpu": Compiler(wide=True, streams=(6, 2), casts_layers=True, keeps_weights=True),
}
