"""Parameters that a pattern names; that they stay unchanged, test_train_step.py checks."""

import jax
import numpy as np
import pytest

from spmd_lm.analysis.compiled_flops import compiled_flops
from spmd_lm.analysis.hlo import HloModule
from spmd_lm.config.load import load
from spmd_lm.cost_model.flops import train_step
from spmd_lm.errors import ConfigError
from spmd_lm.models.language_model import LanguageModel
from spmd_lm.parallel.freeze import frozen_mask, trained_count
from spmd_lm.parallel.trees import leaves_by_path
from spmd_lm.planning.plan_report import describe, summary
from tests.helpers import make_config, program
from tests.parameter_count import parameters_by_formula

LAYERS = 12
BERT = {"kind": "bert", "layers": LAYERS, "token_types": 2}
FILES = {"source": "task", "task": "jsonl", "path": "a", "validation_path": "b"}
CONFIG = make_config(model=BERT, objective={"kind": "classification", "classes": 2}, data=FILES)


def masks(patterns: str, config=CONFIG) -> dict[str, np.ndarray]:
    model = LanguageModel(config.model, config.objective, "float32", ("xla",))
    return leaves_by_path(frozen_mask(patterns.split(), model.names, model.shapes))


def names(patterns: str, config=CONFIG) -> set[str]:
    """Names of the frozen parameters, each layer's apart."""
    found = set()
    for path, mask in masks(patterns, config).items():
        first, rest = path.split(".", 1)
        if mask.ndim == 0:
            found |= {path} if mask else set()
        else:
            assert mask.shape == (config.model.unique_layers,)
            found |= {f"{first}.{layer}.{rest}" for layer in np.flatnonzero(mask)}
    return found


EVERY = names("embedding.* blocks.* head.pooler*") | {"head.output", "head.output_bias", "head.norm.scale"}
EVERY |= {"head.norm.bias"}


def test_names_are_paths_with_a_layer_s_number():
    leaves = masks("embedding.tokens")
    assert len(EVERY) == sum(LAYERS if path.startswith("blocks.") else 1 for path in leaves)
    assert {"embedding.tokens", "blocks.0.attention.query", "blocks.11.mlp.down_bias", "head.output"} <= EVERY


@pytest.mark.parametrize(
    ("patterns", "fits"),
    [
        ("embedding.*", lambda name: name.startswith("embedding.")),
        ("embedding.tokens", lambda name: name == "embedding.tokens"),
        ("blocks.1.*", lambda name: name.startswith("blocks.1.")),  # not the eleventh or the twelfth
        ("blocks.1*", lambda name: name.startswith(("blocks.1.", "blocks.10.", "blocks.11."))),
        ("blocks.[0-5].*", lambda name: name.split(".")[0] == "blocks" and int(name.split(".")[1]) < 6),
        ("blocks.*.mlp.up", lambda name: name.endswith(".mlp.up")),
        ("*bias", lambda name: name.endswith("bias")),
        ("  head.pooler\tblocks.3.norm?.scale ", lambda name: name in {
            "head.pooler", "blocks.3.norm1.scale", "blocks.3.norm2.scale"
        }),
        ("*.tokens embedding.*", lambda name: name.startswith("embedding.")),  # one may add nothing to another
    ],
)  # fmt: skip
def test_a_pattern_is_a_shell_s(patterns, fits):
    assert names(patterns) == {name for name in EVERY if fits(name)} != set()


def test_shared_layers_are_layer_0():
    shared = make_config(model={"layers": 4, "share_layers": True})
    assert names("blocks.0.mlp.*", shared) == {f"blocks.0.mlp.{w}" for w in ("up", "up_bias", "down", "down_bias")}
    assert "blocks.1.* matches no parameter" in refused("blocks.1.*", shared)[0]


@pytest.mark.parametrize("patterns", ["embedding.*", "blocks.[0-6].*", "blocks.[024].* *norm2*", "*s.1.attention.key"])
def test_what_is_left_to_train_is_counted(patterns):
    model = LanguageModel(CONFIG.model, CONFIG.objective, "float32", ("xla",))
    made = frozen_mask(patterns.split(), model.names, model.shapes)
    still = sum(
        int(np.broadcast_to(mask.reshape(mask.shape + (1,) * (len(leaf.shape) - mask.ndim)), leaf.shape).sum())
        for mask, leaf in zip(jax.tree.leaves(made), jax.tree.leaves(model.shapes), strict=True)
    )
    assert trained_count(made, model.shapes) == parameters_by_formula(CONFIG) - still


def refused(patterns: str, config=CONFIG) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        masks(patterns, config)
    return caught.value.problems


def test_a_pattern_without_a_parameter_is_told_and_what_names_are_like():
    near, none = refused("embedding.* Blocks.0.mlp.upp zzz.*")
    assert near == "optim.freeze: Blocks.0.mlp.upp matches no parameter. Did you mean blocks.0.mlp.up?"
    assert none.startswith("optim.freeze: zzz.* matches no parameter. Names are like ")
    assert {*none.removesuffix(".").partition("Names are like ")[2].split(" and ")} <= {*EVERY}
    assert len(refused("blocks.12.*")) == 1  # counted from 0


@pytest.mark.parametrize("patterns", ["*", "embedding.* blocks.* head.*"])
def test_something_is_left_to_train(patterns):
    assert refused(patterns) == (f"optim.freeze={patterns} freezes every parameter. Leave some out.",)


def test_a_plan_tells_what_is_trained():
    some = CONFIG.model_copy(update={"optim": CONFIG.optim.model_copy(update={"freeze": "embedding.tokens"})})
    plan, count = describe(some, program(some).plan), parameters_by_formula(CONFIG)
    assert (plan["parameter_count"], plan["trained_count"]) == (count, count - 61 * 32)
    line = (
        f"{count:,} parameters, {count - 61 * 32:,} of them trained, which saves 30.5 KiB of moments per device and 0%"
    )
    assert line in summary(plan)  # of the FLOPs: a table is looked up
    assert "trained" not in summary(describe(CONFIG, program(CONFIG).plan))


def test_a_program_knows_before_it_compiles():
    with pytest.raises(ConfigError, match=r"layers\.0 matches no parameter"):
        program(make_config(optim={"freeze": "layers.0"}))


def compiled(freeze: str) -> tuple[float, float, int]:
    """FLOPs of products that a step of debug.yaml runs on one device, those of the model, and bytes of its state."""
    overrides = ["model.tie_embeddings=false", "parallel.data=1", *([f"optim.freeze={freeze!r}"] if freeze else [])]
    p = program(load("debug", overrides))
    state = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(p.abstract_state()))
    return compiled_flops(HloModule(p.compiled.as_text())), train_step(p.config, p.plan), state


@pytest.mark.parametrize(
    ("freeze", "most"),
    [
        ("embedding.* blocks.*", 0.42),
        ("embedding.tokens embedding.positions head.tokens *query *key *value *out *up *down", 0.72),
    ],
)
@pytest.mark.slow
def test_what_is_frozen_is_not_computed(freeze, most):
    whole, model, state = compiled("")
    some, of_model, less = compiled(freeze)
    assert some / whole <= most
    assert of_model / model == pytest.approx(some / whole, abs=0.03)  # XLA leaves out hidden scores
    names, shapes = model_trees()
    masks = jax.tree.leaves(frozen_mask(freeze.split(), names, shapes))
    frozen = sum(leaf.size for leaf, mask in zip(jax.tree.leaves(shapes), masks, strict=True) if mask.all())
    assert state - less == 8 * frozen  # no moments: 4 bytes are left of 12


def model_trees():
    config = load("debug", ["model.tie_embeddings=false"])
    model = LanguageModel(config.model, config.objective, "float32", ("xla",))
    return model.names, model.shapes
