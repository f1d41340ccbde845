"""What a model is trained for: which head that takes, and what its losses are over."""

from flax import nnx

from spmd_lm.batch import Batch
from spmd_lm.config.schema import Classification, MaskedLM, Model, MultipleChoice, Objective, Span
from spmd_lm.models.heads import ChoiceHead, ClassHead, Head, MaskedHead, SpanHead, Sums, TokenHead


def make_head(c: Model, objective: Objective, rngs: nnx.Rngs, dtype: str) -> Head:
    match objective:
        case MaskedLM():
            return MaskedHead(c, objective, rngs, dtype)
        case Classification():
            return ClassHead(c, objective, rngs, dtype)
        case MultipleChoice():
            return ChoiceHead(c, objective, rngs, dtype)
        case Span():
            return SpanHead(c, rngs, dtype)
    return TokenHead(c, rngs, dtype)


def weights(objective: Objective, batch: Batch) -> Sums:
    """Of everything that each loss is over, as the batch has it."""
    if not objective.of_tokens:
        return {objective.kind: batch.label_weights}
    return {objective.kind: batch.weights} | ({"sentence_order": batch.label_weights} if objective.of_rows else {})
