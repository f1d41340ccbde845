"""Model FLOPs: what the arithmetic of a step needs, however it is laid out and whatever is computed twice.

Matrix products only, 2 per multiply-add, backward twice the forward; attention counted over the whole square, as papers
do (arXiv:2104.04473, section 5.1, less recomputation)."""

from spmd_lm.config.schema import Classification, MaskedLM, Model, MultipleChoice, RunConfig, Span


def _block(m: Model) -> int:
    """Entries of a block's matrices."""
    attention = 2 * m.width * (m.width + m.kv_width)
    return attention + (3 if m.activation == "swiglu" else 2) * m.width * m.mlp_dim


def forward_per_sequence(config: RunConfig) -> float:
    """FLOPs of one sequence of model.context tokens, forward."""
    m = config.model
    each, once = _head(config)
    each += m.layers * (_block(m) + 2 * m.context * m.width) + m.width * m.vocab * config.objective.of_tokens
    return 2.0 * (m.context * each + once)


def _head(config: RunConfig) -> tuple[int, int]:
    """Entries of the matrices that an objective adds: of those that meet each token, and of those that meet a row."""
    width, objective = config.model.width, config.objective
    match objective:
        case MaskedLM():
            return width**2, (width + 2) * width * objective.of_rows
        case Classification():
            return 0, (width + objective.classes) * width
        case MultipleChoice():
            return 0, (width + 1) * width
        case Span():
            return 2 * width, 0
    return 0, 0


def train_step(config: RunConfig) -> float:
    """FLOPs of one step over the global batch, forward and backward."""
    return 3.0 * config.train.batch * forward_per_sequence(config)


def parameters(config: RunConfig) -> int:
    """Number of parameters, unpadded."""
    m, b = config.model, int(config.model.use_bias)
    norm = m.width * (1 + (b and m.norm_type == "layer"))
    hidden = m.mlp_dim * (2 if m.activation == "swiglu" else 1)
    block = _block(m) + 2 * norm + b * (3 * m.width + 2 * m.kv_width + hidden)
    untied = config.objective.of_tokens and not m.tie_embeddings
    tables = m.vocab * (1 + untied) + m.context * (m.positions == "learned") + m.token_types
    # The last norm is after the embedding, or before the head.
    total = m.layers_kept * block + tables * m.width + norm + sum(_head(config))
    each, once = (entries // m.width for entries in _head(config))
    if isinstance(config.objective, MaskedLM):
        total += norm + b * m.vocab
    return total + b * (each + once)
