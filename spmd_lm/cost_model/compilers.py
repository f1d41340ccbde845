"""What XLA's compiler for a platform makes of the arrays that a step names, where memory depends on it.

Read from the buffers that the compilers assign to steps drawn at random (benchmarks/predictions.py)."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from spmd_lm.config.remat import Policy

MIB = 2**20


class LayerArrays(NamedTuple):
    """What a layer holds at one point, apart from what it saves: how many arrays as large as the MLP's hidden layer, as
    all heads' queries in the layout that a fused kernel reads, and as the residual stream."""

    hidden: int = 0
    heads: int = 0
    streams: int = 0


class Compiler(NamedTuple):
    """lanes: the minor dimension of an array is padded to a multiple of it.  wide: bfloat16 is computed as float32, and
    activations, their gradients and the weights that a loop reads are held so.  kernel_workspace: bytes that matrix
    products may use meanwhile.  scores: arrays as large as all float32 scores that backward through attention holds
    where no fused kernel computes it (read from CPUs alone).  streams: further copies of the unsharded residual stream
    in backward, without and with `parallel.sequence`.  least_streams: the fewest unsharded residual streams that
    backward holds where all-reduces over `model` sum them: operands and results.  in_turn: remat policies under which a
    layer's branches are recomputed one after the other, so that the larger one's activations alone are held.  logits:
    arrays as large as a chunk of logits that cross-entropy holds.  sums_overlap: sums over devices, and zeros, start as
    early and end as late as their data allow, so that their float32 operands stay.  copies_replicas: sums over replicas
    are not written into their operands.  casts_layers: sharded weights are cast layer by layer as they are gathered,
    not all of them before the loop.  reuses_chunk: where a stage has one chunk and a step one microbatch, the chunk is
    used as it was gathered, without a copy.  rounds_stacks: gradients that a loop over layers scatters in a narrower
    dtype are rounded ahead of it, those of all layers.  keeps_weights: they stay until a step's end, read again or not.
    attention_arrays, forward_arrays: at the points of attention's backward, and of forward, at which a layer may hold
    most where a fused kernel computes attention, by remat policy; with `parallel.sequence` two unsharded streams more.
    rotary_arrays: at those that rotary positions add, in attention's backward and in forward that saves everything."""

    lanes: int = 1
    wide: bool = False
    kernel_workspace: int = 0
    scores: float = 1.35
    streams: tuple[int, int] = (0, 0)
    least_streams: int = 0
    in_turn: frozenset[Policy] = frozenset()
    logits: int = 2
    sums_overlap: bool = False
    copies_replicas: bool = False
    casts_layers: bool = False
    reuses_chunk: bool = False
    rounds_stacks: bool = False
    keeps_weights: bool = False
    attention_arrays: Mapping[Policy, tuple[LayerArrays, ...]] = MappingProxyType({})
    forward_arrays: Mapping[Policy, tuple[LayerArrays, ...]] = MappingProxyType({})
    rotary_arrays: tuple[LayerArrays, LayerArrays] = (LayerArrays(), LayerArrays())


COMPILER_OF_PLATFORM = {
    "tpu": Compiler(
        lanes=128,
        least_streams=7,
        in_turn=frozenset({"full", "residual"}),
        logits=1,
        copies_replicas=True,
        reuses_chunk=True,
        rounds_stacks=True,
        # Queries, keys, values and gradients of theirs, or the output and the sums of softmax, which are float32 and as
        # wide as a lane, twice; where no layer runs again, also its weights' gradients, which come last.
        attention_arrays={
            "none": (LayerArrays(1, 6, 6), LayerArrays(2, 3, 7)),
            "selective": (LayerArrays(1, 8, 4), LayerArrays(2, 3, 7)),
            "residual": (LayerArrays(2, 8, 5),),
            "full": (LayerArrays(2, 7, 7),),
        },
        forward_arrays={"none": (LayerArrays(1, 6, 4),), "selective": (LayerArrays(0, 3, 4), LayerArrays(1, 0, 5))},
        # Both halves of queries and keys, each padded; and in backward both in float32.
        rotary_arrays=(LayerArrays(2, 9, 2), LayerArrays(2, 7, 4)),
    ),
    "gpu": Compiler(
        kernel_workspace=64 * MIB,
        least_streams=11,
        in_turn=frozenset({"residual"}),
        sums_overlap=True,
        casts_layers=True,
    ),
    "cpu": Compiler(wide=True, streams=(6, 2), casts_layers=True, keeps_weights=True),
}
