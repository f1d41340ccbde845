"""The input of one step, as a pytree.

Shapes: M microbatches, B sequences in each (over all devices), T tokens in the context.  Sample s of a step is row
[s // B, s % B] under every layout: the order of samples does not depend on the mesh."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from spmd_lm.config.data_sections import packs_documents
from spmd_lm.config.schema import ExtractiveQA, RunConfig

Leaf = Any
"""jax.Array on devices, np.ndarray on the host; in descriptions of a batch a ShapeDtypeStruct, sharding or spec."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Batch:
    """Arrays of one step; None for those that the objective and the model do not use."""

    tokens: Leaf  # int32 [M, B, T]
    targets: Leaf  # int32 [M, B, T]: the token to predict at each position
    loss_weights: Leaf  # float32 [M, B, T]: weight of each target in the loss; 0 for padding
    positions: Leaf  # int32 [M, B, T]: within the document or the row
    segments: Leaf  # int32 [M, B, T]: tokens attend within their segment only; None if each row is one segment
    sample_ids: Leaf  # int32 [M, B]: index of the row within its step; keys its dropout
    token_type_ids: Leaf = None  # int32 [M, B, T]: token type (BERT's segment A or B)
    labels: Leaf = None  # int32 [M, B]: class of the row, or position at which the answer starts
    end_positions: Leaf = None  # int32 [M, B]: position at which the answer ends
    label_weights: Leaf = None  # float32 [M, B]: weight of each label in the loss; 0 for padding
    row_segments: Leaf = None  # int32 [M, B, T]: segments of whole rows, where the other fields are of some tokens

    @property
    def segments_of_rows(self) -> Leaf:
        """Segments of all tokens of the rows."""
        return self.segments if self.row_segments is None else self.row_segments


PER_ROW = ("sample_ids", "labels", "end_positions", "label_weights")
"""Fields without a token dimension."""


def abstract_batch(config: RunConfig) -> Batch:
    """Shapes and dtypes of one step's batch."""
    microbatches, objective, model = config.parallel.microbatches, config.objective, config.model
    rows = microbatches, config.train.batch // microbatches
    tokens = *rows, model.context
    token_ids, token_weights = jax.ShapeDtypeStruct(tokens, jnp.int32), jax.ShapeDtypeStruct(tokens, jnp.float32)
    row_ids, row_weights = jax.ShapeDtypeStruct(rows, jnp.int32), jax.ShapeDtypeStruct(rows, jnp.float32)
    has_labels = objective.has_sequence_label or not objective.predicts_tokens
    return Batch(
        tokens=token_ids,
        targets=token_ids if objective.predicts_tokens else None,
        loss_weights=token_weights if objective.predicts_tokens else None,
        positions=token_ids,
        segments=token_ids if packs_documents(config.data) or not model.causal else None,
        sample_ids=row_ids,
        token_type_ids=token_ids if model.token_types else None,
        labels=row_ids if has_labels else None,
        end_positions=row_ids if isinstance(objective, ExtractiveQA) else None,
        label_weights=row_weights if has_labels else None,
    )
