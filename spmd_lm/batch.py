"""One step's input, as a pytree.

Sample s of a step is row [s // B, s % B] under every layout: the order of samples belongs to the run, not to the mesh.

M microbatches, B sequences of each over all devices, T the context."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from spmd_lm.config.schema import RunConfig, Span

# On a device jax.Array; on the host np.ndarray; as a description of either, jax.sharding.Sharding.
Leaf = Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Batch:
    tokens: Leaf  # int32 [M, B, T]
    targets: Leaf  # int32 [M, B, T]: what each position must predict; None where objectives do not ask
    weights: Leaf  # float32 [M, B, T]: of each target in the loss; 0 is padding
    positions: Leaf  # int32 [M, B, T]: within the document or the row
    segments: Leaf  # int32 [M, B, T]: tokens see those of their own segment; None where each row is one
    samples: Leaf  # int32 [M, B]: index of the row within its step; dropout is keyed by it
    types: Leaf = None  # int32 [M, B, T]: which part of a row a token is of; None where models do not ask
    labels: Leaf = None  # int32 [M, B]: what a row is, or where the answer in it begins; None where nobody asks
    ends: Leaf = None  # int32 [M, B]: where the answer ends
    label_weights: Leaf = None  # float32 [M, B]: of each label in the loss; 0 is padding


PER_ROW = ("samples", "labels", "ends", "label_weights")  # fields without a time dimension


def abstract_batch(config: RunConfig) -> Batch:
    """Shapes and dtypes of one step's batch; None for what this objective and this model do not ask."""
    m, objective = config.parallel.microbatches, config.objective
    rows = (m, config.train.batch // m)
    long = (*rows, config.model.context)
    of = jax.ShapeDtypeStruct
    ids, numbers = of(long, jnp.int32), of(rows, jnp.int32)
    labelled, span = objective.of_rows or not objective.of_tokens, isinstance(objective, Span)
    return Batch(
        tokens=ids,
        targets=ids if objective.of_tokens else None,
        weights=of(long, jnp.float32) if objective.of_tokens else None,
        positions=ids,
        segments=None if config.model.causal else ids,
        samples=numbers,
        types=ids if config.model.token_types else None,
        labels=numbers if labelled else None,
        ends=numbers if span else None,
        label_weights=of(rows, jnp.float32) if labelled else None,
    )
