import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spmd_lm.axes import is_dim_names
from spmd_lm.batch import Batch
from spmd_lm.models.heads import loss_weights
from spmd_lm.models.language_model import LanguageModel, ModelInput
from tests import reference
from tests.helpers import TASKS, host_batch, make_config, relative

L, D, M, V, T = 2, 32, 128, 61, 16  # layers, width, MLP, vocabulary, context
NAMED = {
    "embedding.tokens": ((V, D), ("vocab", "width")),
    "embedding.positions": ((T, D), ("position", "width")),
    "blocks.attention.query": ((L, D, D), ("layers", "width", "heads")),
    "blocks.attention.key": ((L, D, D), ("layers", "width", "kv_heads")),
    "blocks.attention.value": ((L, D, D), ("layers", "width", "kv_heads")),
    "blocks.attention.out": ((L, D, D), ("layers", "width", "heads")),
    "blocks.attention.query_bias": ((L, D), ("layers", "heads")),
    "blocks.attention.key_bias": ((L, D), ("layers", "kv_heads")),
    "blocks.attention.value_bias": ((L, D), ("layers", "kv_heads")),
    "blocks.attention.out_bias": ((L, D), ("layers", "width")),
    "blocks.mlp.up": ((L, D, M), ("layers", "width", "mlp")),
    "blocks.mlp.up_bias": ((L, M), ("layers", "mlp")),
    "blocks.mlp.down": ((L, D, M), ("layers", "width", "mlp")),
    "blocks.mlp.down_bias": ((L, D), ("layers", "width")),
    "blocks.norm1.scale": ((L, D), ("layers", "width")),
    "blocks.norm1.bias": ((L, D), ("layers", "width")),
    "blocks.norm2.scale": ((L, D), ("layers", "width")),
    "blocks.norm2.bias": ((L, D), ("layers", "width")),
    "head.norm.scale": ((D,), ("width",)),
    "head.norm.bias": ((D,), ("width",)),
}
PLAIN = {"use_bias": False, "tie_embeddings": False}
LLAMA = PLAIN | {"norm_type": "rms", "positions": "rotary", "activation": "swiglu", "kv_heads": 2, "mlp_width": 40}
BERT = {"kind": "bert", "norm": "post", "norm_eps": 1e-12, "activation": "gelu", "token_types": 2}
MASKED = {"kind": "masked_lm"}


def config_of(**changes):
    objective = {"objective": MASKED} if changes.get("kind") == "bert" else {}
    return make_config(model=changes, **objective)


@functools.cache
def model(**changes) -> LanguageModel:
    config = config_of(**changes)
    return LanguageModel(config.model, config.objective, "float32", ("xla",))


@functools.cache
def weights(seed=0, **changes):
    return jax.jit(lambda: model(**changes).init(seed))()


def flat(tree, **kind):
    """Leaves by dotted path."""
    leaves = jax.tree_util.tree_leaves_with_path(tree, **kind)
    return {".".join(key.key for key in path): leaf for path, leaf in leaves}


def test_parameters_have_these_names_and_shapes():
    names, shapes = flat(model().names, is_leaf=is_dim_names), flat(model().shapes)
    assert {name: (shapes[name].shape, names[name]) for name in shapes} == NAMED


def test_a_model_without_ties_and_biases_has_a_head_and_no_vectors_but_scales():
    kept = {name: named for name, named in NAMED.items() if "bias" not in name}
    names, shapes = flat(model(**PLAIN).names, is_leaf=is_dim_names), flat(model(**PLAIN).shapes)
    assert {name: (shapes[name].shape, names[name]) for name in shapes} == kept | {
        "head.tokens": ((V, D), ("vocab", "width"))
    }


@pytest.mark.mutants
def test_weights_are_drawn_as_gpt2_s():
    """Deviations are 0.02, or 0.02 / sqrt(2 x layers) behind a residual branch, to five sigma."""
    big = {"width": 64, "layers": 3, "vocab": 512}
    for name, leaf in flat(weights(**big)).items():
        x = np.asarray(leaf)
        if "bias" in name or "scale" in name:
            assert (x == ("scale" in name)).all(), name
            continue
        std = 0.02 / np.sqrt(6) if name.endswith(("out", "down")) else 0.02
        each = x.reshape(-1, *x.shape[-2:])  # every layer for itself
        assert np.abs(each.std((1, 2)) / std - 1).max() < 5 / np.sqrt(2 * each[0].size), name
        assert np.abs(each.mean((1, 2)) / std).max() < 5 / np.sqrt(each[0].size), name


def test_no_two_matrices_or_layers_or_seeds_are_alike():
    matrices = [m for leaf in jax.tree.leaves(weights()) if leaf.ndim == 3 for m in np.asarray(leaf)]
    matrices += [m for leaf in jax.tree.leaves(weights(1)) if leaf.ndim == 3 for m in np.asarray(leaf)]
    firsts = [m[0, 0] for m in matrices]
    assert len(set(firsts)) == len(firsts) == 2 * 6 * L


def test_a_llama_s_parameters():
    c = model(**LLAMA).c
    names, shapes = flat(model(**LLAMA).names, is_leaf=is_dim_names), flat(model(**LLAMA).shapes)
    assert not [name for name in shapes if "bias" in name or "positions" in name]
    assert shapes["blocks.attention.key"].shape == shapes["blocks.attention.value"].shape == (L, D, 2 * c.head_dim)
    assert shapes["blocks.mlp.gate"].shape == (L, D, 40) and names["blocks.mlp.gate"] == ("layers", "width", "mlp")


def test_a_bert_s_parameters():
    kept = {name: named for name, named in NAMED.items() if not name.startswith("head.")}
    names, shapes = flat(model(**BERT).names, is_leaf=is_dim_names), flat(model(**BERT).shapes)
    vector, matrix = ((D,), ("width",)), ((D, D), ("width", "feature"))
    assert {name: (shapes[name].shape, names[name]) for name in shapes} == kept | {
        "embedding.types": ((2, D), ("type", "width")),
        "embedding.norm.scale": vector,
        "embedding.norm.bias": vector,
        "head.transform": matrix,
        "head.transform_bias": ((D,), ("feature",)),
        "head.transform_norm.scale": vector,
        "head.transform_norm.bias": vector,
        "head.output_bias": ((V,), ("vocab",)),
        "head.pooler": matrix,
        "head.pooler_bias": ((D,), ("feature",)),
        "head.binary": ((D, 2), ("width", "label")),
        "head.binary_bias": ((2,), ("label",)),
    }


def batch_of(tokens, positions, segments=None) -> Batch:
    return Batch(tokens, None, None, positions, segments, None, token_type_ids=np.int32(positions > 5))


def forward(model, params, batch: Batch):
    return model.forward(params, batch)


TOKENS = np.random.default_rng(0).integers(0, V, (2, T), dtype=np.int32)
PLACES = np.broadcast_to(np.arange(T, dtype=np.int32), (2, T))


def loud(params):
    """Weights at which every part of the model matters to its result."""
    r = np.random.default_rng(0)
    return jax.tree.map(lambda p: np.asarray(p, np.float64) * 8 + 0.1 * r.normal(size=p.shape), params)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        PLAIN | {"activation": "gelu"},
        pytest.param(LLAMA, marks=pytest.mark.mutants),
        BERT,
        BERT | {"norm": "pre"},
        BERT | PLAIN | {"token_types": 0, "positions": "rotary", "norm_type": "rms"},
        {"share_layers": True, "norm": "post"},
    ],
    ids=["gpt2", "plain", "llama", "bert", "megatron bert", "plain bert", "shared layers, norms after"],
)
def test_logits_are_the_reference_s(changes, x64):
    params, config = loud(weights(**changes)), config_of(**changes)
    batch = batch_of(TOKENS, PLACES, np.int32(PLACES < [[T], [11]]) if config.model.kind == "bert" else None)
    got = jax.jit(lambda params: forward(model(**changes), params, batch))(params)
    want = jax.jit(lambda params: reference.predictions(params, config, batch))(params)
    assert relative(got["tokens"], want[config.objective.kind]) < 1e-13
    assert ("sentence_order" in got) == ("sentence_order" in want)
    if "sentence_order" in want:
        assert relative(got["sentence_order"], want["sentence_order"]) < 1e-13


@pytest.mark.parametrize("objective", [*TASKS, "masked language model"])
def test_losses_are_the_reference_s(objective, x64):
    config = make_config(model=BERT, **TASKS.get(objective, {"objective": MASKED}))
    model = LanguageModel(config.model, config.objective, "float64", ("xla",))
    params, batch = loud(model.init(0)), host_batch(config, 0)
    weights = {name: w / w.sum(dtype=np.float64) for name, w in loss_weights(config.objective, batch).items()}

    def loss(params):
        x = model.embed(params, ModelInput(batch))
        for i in range(config.model.layers):
            x, _ = model.block(jax.tree.map(lambda p, i=i: p[i], params["blocks"]), x, ModelInput(batch), i)
        return sum(model.losses(params, x, ModelInput(batch), weights).values())

    assert float(jax.jit(loss)(params)) == pytest.approx(float(reference.loss(params, config, batch)), rel=1e-12)


def test_documents_packed_into_a_row_do_not_see_each_other(x64):
    params, cut = loud(weights()), 6
    segments = np.int32(cut <= PLACES)
    batch = batch_of(TOKENS, PLACES - cut * segments, segments)
    packed = jax.jit(lambda p: forward(model(), p, batch)["tokens"])(params)

    def each(p):
        return [reference.logits(p, model().c, part) for part in np.split(TOKENS, [cut], axis=1)]

    assert relative(packed, np.concatenate(jax.jit(each)(params), axis=1)) < 1e-13


def test_padding_of_the_vocabulary_is_never_likely(x64):
    params = loud(weights())
    params["embedding"]["tokens"] = np.pad(params["embedding"]["tokens"], [(0, 3), (0, 0)], constant_values=1e3)
    one = np.ones((1, 1), np.int32)
    z = model().logits(params, jnp.ones((1, 1, D)), batch_of(one, one))["tokens"]
    assert z.shape == (1, 1, V + 3)
    assert np.isneginf(z[..., V:]).all() and np.isfinite(z[..., :V]).all()
