"""The number of parameters, without padding: of the model itself, and by hand."""

import jax

from spmd_lm.config.schema import Classification, ExtractiveQA, MaskedLM, MultipleChoice, RunConfig
from spmd_lm.models.language_model import LanguageModel


def model_parameters(config: RunConfig) -> int:
    shapes = LanguageModel(config.model, config.objective, "float32", ("xla",)).shapes
    return sum(leaf.size for leaf in jax.tree.leaves(shapes))


def parameters_by_formula(config: RunConfig) -> int:
    m, objective, bias = config.model, config.objective, int(bool(config.model.use_bias))
    of_qkv, of_out, of_mlp, of_norm = (int(m.has_bias(where)) for where in ("qkv", "out", "mlp", "norm"))
    norm = m.width * (1 + (of_norm and m.norm_type == "layer"))
    qkv, into_mlp = m.query_width + 2 * m.kv_width, m.mlp_dim * (1 + m.gated)
    matrices = m.width * (qkv + m.query_width + into_mlp + m.mlp_dim)
    norms = (4 if m.norm == "sandwich" else 2) * norm + 2 * m.head_dim * m.qk_norm
    block = matrices + norms + of_qkv * qkv + of_out * m.width + of_mlp * (into_mlp + m.width)
    untied = objective.predicts_tokens and not m.tie_embeddings
    tables = m.vocab * (1 + untied) + m.context * (m.positions == "learned") + m.token_types
    # The last norm is after the embedding, or before the head.
    total = m.unique_layers * block + tables * m.width + norm
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
