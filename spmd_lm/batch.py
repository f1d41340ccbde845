"""One step's input, as a pytree.

Sample s of a step is row [s // B, s % B] under every layout: the order of samples belongs to the run, not to the mesh.

M microbatches, B sequences of each over all devices, T the context."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from spmd_lm.config.schema import MaskedLM, RunConfig

# On a device jax.Array; on the host np.ndarray; as a description of either, jax.sharding.Sharding.
Leaf = Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Batch:
    tokens: Leaf  # int32 [M, B, T]
    targets: Leaf  # int32 [M, B, T]: what each position must predict
    weights: Leaf  # float32 [M, B, T]: of each target in the loss; 0 is padding
    positions: Leaf  # int32 [M, B, T]: within the document or the row
    segments: Leaf  # int32 [M, B, T]: tokens see those of their own segment; None where each row is one
    samples: Leaf  # int32 [M, B]: index of the row within its step; dropout is keyed by it
    types: Leaf = None  # int32 [M, B, T]: which part of a row a token is of; None where models do not ask
    labels: Leaf = None  # int32 [M, B]: what a row is; None where objectives do not ask
    label_weights: Leaf = None  # float32 [M, B]: of each label in the loss; 0 is padding


PER_ROW = ("samples", "labels", "label_weights")  # fields without a time dimension


def abstract_batch(config: RunConfig) -> Batch:
    """Shapes and dtypes of one step's batch; None for what this objective and this model do not ask."""
    m = config.parallel.microbatches
    rows = (m, config.train.batch // m)
    long = (*rows, config.model.context)
    of = jax.ShapeDtypeStruct
    ids, numbers = of(long, jnp.int32), of(rows, jnp.int32)
    masked = config.objective if isinstance(config.objective, MaskedLM) else None
    ordered = masked is not None and masked.sentence_order
    return Batch(
        tokens=ids,
        targets=ids,
        weights=of(long, jnp.float32),
        positions=ids,
        segments=ids if masked else None,
        samples=numbers,
        types=ids if config.model.token_types else None,
        labels=numbers if ordered else None,
        label_weights=of(rows, jnp.float32) if ordered else None,
    )
