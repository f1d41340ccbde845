"""One step's input, as a pytree.

Sample s of a step is row [s // B, s % B] under every layout: the order of samples belongs to the run, not to the mesh.

M microbatches, B sequences of each over all devices, T the context."""

import dataclasses
from typing import Any

import jax

# On a device jax.Array; on the host np.ndarray; as a description of either, jax.sharding.Sharding.
Leaf = Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Batch:
    tokens: Leaf  # int32 [M, B, T]
    targets: Leaf  # int32 [M, B, T]: what each position must predict
    weights: Leaf  # float32 [M, B, T]: of each target in the loss; 0 is padding
    positions: Leaf  # int32 [M, B, T]: within the document or the row
    segments: Leaf  # int32 [M, B, T]: which document a token is of; None where each row is one
    samples: Leaf  # int32 [M, B]: index of the row within its step; dropout is keyed by it
