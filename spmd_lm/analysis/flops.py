"""Model FLOPs: what the arithmetic of a step needs, however it is laid out and whatever is computed twice.

Matrix products only, 2 per multiply-add, backward twice the forward; attention counted over the whole square, as papers
do (arXiv:2104.04473, section 5.1, less recomputation)."""

from spmd_lm.config.schema import MaskedLM, Model, RunConfig


def _block(m: Model) -> int:
    """Entries of a block's matrices."""
    attention = 2 * m.width * (m.width + m.kv_width)
    return attention + (3 if m.activation == "swiglu" else 2) * m.width * m.mlp_width


def forward_per_sequence(config: RunConfig) -> float:
    """FLOPs of one sequence of model.context tokens, forward."""
    m, objective = config.model, config.objective
    each = m.layers * (_block(m) + 2 * m.context * m.width) + m.width * m.vocab
    once = 0
    if isinstance(objective, MaskedLM):
        each += m.width**2
        once = (m.width + 2) * m.width if objective.sentence_order else 0
    return 2.0 * (m.context * each + once)


def train_step(config: RunConfig) -> float:
    """FLOPs of one step over the global batch, forward and backward."""
    return 3.0 * config.train.batch * forward_per_sequence(config)


def parameters(config: RunConfig) -> int:
    """Number of parameters, unpadded."""
    m, objective, b = config.model, config.objective, int(config.model.biases)
    norm = m.width * (1 + (b and m.norm_kind == "layer"))
    hidden = m.mlp_width * (2 if m.activation == "swiglu" else 1)
    block = _block(m) + 2 * norm + b * (3 * m.width + 2 * m.kv_width + hidden)
    tables = m.vocab * (1 if m.tie_embeddings else 2) + m.context * (m.positions == "learned") + m.token_types
    total = m.layers_kept * block + tables * m.width + norm  # the last one after the embedding, or before the head
    if isinstance(objective, MaskedLM):
        total += m.width**2 + norm + b * (m.width + m.vocab)
        total += (m.width + b) * (m.width + 2) if objective.sentence_order else 0
    return total
