"""The number of parameters, without padding: of the model itself, and by hand."""

import jax

from spmd_lm.config.mlp import MoE
from spmd_lm.config.schema import Classification, ExtractiveQA, MaskedLM, Model, MultipleChoice, RunConfig
from spmd_lm.models.language_model import LanguageModel


def model_parameters(config: RunConfig) -> int:
    shapes = LanguageModel(config.model, config.objective, "float32", ("xla",)).shapes
    return sum(leaf.size for leaf in jax.tree.leaves(shapes))


def active_parameters(config: RunConfig) -> int:
    """Those that a token uses: without the experts that it does not choose."""
    mixtures = _mixtures(config.model)
    idle = sum(layers * (moe.experts - moe.per_token) * _mlp(m, moe.width or m.mlp_dim) for m, moe, layers in mixtures)
    return parameters_by_formula(config) - idle


def expert_matrices(config: RunConfig) -> int:
    """Entries of all experts' matrices."""
    mixtures = _mixtures(config.model.model_copy(update={"use_bias": False}))
    return sum(layers * moe.experts * _mlp(m, moe.width or m.mlp_dim) for m, moe, layers in mixtures)


def _mixtures(m: Model) -> list[tuple[Model, MoE, int]]:
    """Kinds of layers with experts, and how many layers are of each."""
    kinds = [(each, each.moe, m.layers_like(place)) for place, each in enumerate(m.of_each_kind)]
    return [(each, moe, layers) for each, moe, layers in kinds if moe]


def _mlp(m: Model, width: int) -> int:
    """One MLP of this hidden width."""
    hidden = width * (1 + m.gated)
    return m.width * (hidden + width) + m.has_bias("mlp") * (hidden + m.width)


def _norm(m: Model) -> int:
    return m.width * (1 + (m.has_bias("norm") and m.norm_type == "layer"))


def _block(m: Model) -> int:
    """A layer of a model with one kind of layer."""
    qkv = m.query_width + 2 * m.kv_width
    attention = m.width * (qkv + m.query_width) + m.has_bias("qkv") * qkv + m.has_bias("out") * m.width
    norms = (4 if m.norm == "sandwich" else 2) * _norm(m) + 2 * m.head_dim * m.qk_norm
    if not (moe := m.moe):
        return attention + norms + _mlp(m, m.mlp_dim)
    router = m.width * (moe.experts + moe.shared_gate)
    shared = _mlp(m, moe.shared) if moe.shared else 0
    return attention + norms + router + shared + moe.experts * _mlp(m, moe.width or m.mlp_dim)


def parameters_by_formula(config: RunConfig) -> int:
    m, objective, bias = config.model, config.objective, int(bool(config.model.use_bias))
    norm = _norm(m)
    layers = [1] if m.share_layers else [m.layers_like(place) for place in range(len(m.of_each_kind))]
    blocks = sum(n * _block(each) for n, each in zip(layers, m.of_each_kind, strict=True))
    untied = objective.predicts_tokens and not m.tie_embeddings
    tables = m.vocab * (1 + untied) + m.context * (m.positions == "learned") + m.token_types
    # The last norm is after the embedding, or before the head.
    total = blocks + tables * m.width + norm
    match objective:
        case MaskedLM():  # a dense layer and its norm; a pooler and the sentence classifier
            columns = m.width + (m.width + 2) * objective.has_sequence_label
            total += norm + bias * m.vocab
        case Classification():
            columns = m.width + objective.classes
        case MultipleChoice():
            columns = m.width + 1
        case ExtractiveQA():
            columns = 2
        case _:
            columns = 0
    return total + columns * (m.width + bias)
