"""What XLA's compiler for a platform makes of the arrays that a step names, where memory depends on it.

Read from the buffers that the compilers assign to steps drawn at random (benchmarks/predictions.py)."""

from typing import NamedTuple

from spmd_lm.config.remat import Policy

MIB = 2**20


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
    used as it was gathered, without a copy.  keeps_weights: they stay until a step's end, read again or not."""

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
    keeps_weights: bool = False


COMPILER_OF_PLATFORM = {
    "tpu": Compiler(
        lanes=128,
        least_streams=7,
        in_turn=frozenset({"full", "residual"}),
        logits=1,
        copies_replicas=True,
        reuses_chunk=True,
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
