"""Model FLOPs: what the math of a step needs, whatever the layout and whatever is recomputed.

Matrix products only: 2 FLOPs per multiply-add, and backward costs twice as much as forward.  Attention counts the full
square of scores, causal or not, as papers do (arXiv:2104.04473, section 5.1, without its recomputation)."""

from spmd_lm.config.schema import Classification, ExtractiveQA, MaskedLM, Model, MultipleChoice, RunConfig


def forward_per_sequence(config: RunConfig) -> float:
    """FLOPs of the forward pass over one sequence of model.context tokens."""
    m = config.model
    per_token, per_row = _head_weights(config)
    scores = 2 * m.context * m.width  # queries by keys, and probabilities by values
    per_token += m.layers * (_block_weights(m) + scores)
    if config.objective.predicts_tokens:
        per_token += m.width * m.vocab
    return 2.0 * (m.context * per_token + per_row)


def train_step(config: RunConfig) -> float:
    """FLOPs of one step over the global batch, forward and backward."""
    return 3.0 * config.train.batch * forward_per_sequence(config)


def _block_weights(m: Model) -> int:
    """Entries of a block's matrices."""
    attention = 2 * m.width * (m.width + m.kv_width)
    return attention + (3 if m.activation == "swiglu" else 2) * m.width * m.mlp_dim


def _head_weights(config: RunConfig) -> tuple[int, int]:
    """Entries of the head's matrices, without the vocabulary's: (applied to each token, applied once per row)."""
    width, objective = config.model.width, config.objective
    match objective:
        case MaskedLM():
            return width**2, (width + 2) * width * objective.has_sequence_label
        case Classification():
            return 0, (width + objective.classes) * width
        case MultipleChoice():
            return 0, (width + 1) * width
        case ExtractiveQA():
            return 2 * width, 0
    return 0, 0
