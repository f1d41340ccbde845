"""Model FLOPs: what the arithmetic of a step needs, however it is laid out and whatever is computed twice.

Matrix products only, 2 per multiply-add, backward twice the forward; attention counted over the whole square, as papers
do (arXiv:2104.04473, section 5.1, less recomputation)."""

from spmd_lm.config.schema import Model, RunConfig


def forward_per_sequence(m: Model) -> float:
    """FLOPs of one sequence of m.context tokens, forward."""
    block = 4 * m.width**2 + 2 * m.width * m.mlp_width
    products = m.layers * block + m.width * m.vocab
    attention = m.layers * 2 * m.context * m.width
    return 2.0 * m.context * (products + attention)


def train_step(config: RunConfig) -> float:
    """FLOPs of one step over the global batch, forward and backward."""
    return 3.0 * config.train.batch * forward_per_sequence(config.model)


def parameters(m: Model) -> int:
    """Number of parameters, unpadded."""
    matrices = 4 * m.width**2 + 2 * m.width * m.mlp_width
    norms = 2 if m.biases else 1
    vectors = 2 * norms * m.width + (5 * m.width + m.mlp_width if m.biases else 0)
    tables = m.vocab * m.width * (1 if m.tie_embeddings else 2) + m.context * m.width
    return m.layers * (matrices + vectors) + tables + norms * m.width
