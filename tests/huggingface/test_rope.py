"""Scaled rotary positions: frequencies and cosines against those of transformers, and what config.json may say."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from spmd_lm.config.schema import CausalLM, Model
from spmd_lm.errors import ConfigError
from spmd_lm.huggingface.config_json import build_config, parse_config
from spmd_lm.huggingface.rope import export_rope, flatten_rope, parse_rope, rope_parameters
from spmd_lm.models.transformer import make_rotary

ORIGINAL = "original_max_position_embeddings"
LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 256, "num_attention_heads": 4}
LLAMA |= {"num_hidden_layers": 1, "intermediate_size": 64, "vocab_size": 64}
YARN = {"rope_type": "yarn", "factor": 4.0, ORIGINAL: 2048}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, ORIGINAL: 8192}
SCALED = {
    "linear": {"rope_type": "linear", "factor": 2.5},
    "linear, another theta": {"rope_type": "linear", "factor": 8.0, "rope_theta": 5e5},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "dynamic, another theta": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e6},
    "yarn": YARN,
    "yarn of Qwen": YARN | {"rope_theta": 1e6, ORIGINAL: 32768},
    "yarn of DeepSeek": YARN
    | {"factor": 40.0, ORIGINAL: 4096, "mscale": 1.0, "mscale_all_dim": 0.707}
    | {"beta_fast": 32.0, "beta_slow": 1.0},
    "yarn, its ramp as it is": YARN | {"truncate": False, "beta_fast": 16.0, "beta_slow": 0.5},
    "yarn, its factor named": YARN | {"attention_factor": 1.5},
    "yarn without an original context": {"rope_type": "yarn", "factor": 4.0},
    "llama3": LLAMA3 | {"rope_theta": 5e5},
    "llama3, another ramp": LLAMA3 | {"factor": 32.0, "low_freq_factor": 0.5, "high_freq_factor": 8.0, ORIGINAL: 1024},
}


def hf_config(rope: dict, context: int = 4096) -> dict:
    return LLAMA | {"max_position_embeddings": context, "rope_parameters": {"rope_theta": 1e4} | rope}


def our_model(rope: dict, context: int = 4096, **changes) -> Model:
    return Model(**parse_config(hf_config(rope, context)).model | changes)


def cosines(positions: np.ndarray, frequencies: np.ndarray, dtype) -> np.ndarray:
    return np.cos(positions[:, None].astype(dtype) * frequencies.astype(dtype))


@pytest.mark.parametrize("fraction", [1.0, 0.5])
@pytest.mark.parametrize("name", SCALED)
def test_frequencies_and_cosines_are_those_of_transformers(name, fraction):
    """Positions up to 100,000.  Rounding an angle to float32 moves it by up to 6e-8 of itself, rounding its frequency
    by as much.  transformers computes llama3's in float32 throughout, and is 2.6e-7 off."""
    transformers = pytest.importorskip("transformers", reason="the extra `hf` is not installed")
    rope, positions = SCALED[name], np.r_[0:2000, 2000:100_001:97].astype(np.int32)
    theirs = transformers.LlamaConfig(**hf_config(rope | {"partial_rotary_factor": fraction}))
    init = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS[rope["rope_type"]]
    model = our_model(rope).model_copy(update={"rope_fraction": fraction})
    for length in [4096, 10_000] if rope["rope_type"] == "dynamic" else [4096]:
        expected, factor = init(theirs, seq_len=length)
        rotary = make_rotary(model.model_copy(update={"context": length}))
        ours, expected = rotary.frequencies(64, jnp.float32), expected.numpy()
        np.testing.assert_allclose(ours, expected, rtol=1e-6)
        assert rotary.attention_factor == pytest.approx(factor, rel=1e-6)

        x = np.zeros((1, len(positions), 1, 64), np.float32)
        x[..., : len(ours)] = 1  # the first of each pair of features, which becomes its cosine
        got = np.asarray(rotary.apply(jnp.asarray(x), positions[None]))[0, :, 0, : len(ours)]
        exact = rotary.theta ** (-np.arange(len(ours)) / len(ours)) * rotary.ratios(64)
        for want, slope in (
            (cosines(positions, exact, np.float64), 1e-7),
            (cosines(positions, expected, np.float32), 2e-7),
        ):
            assert (np.abs(got - factor * want) <= factor * (1e-6 + slope * positions[:, None])).all()


@pytest.mark.parametrize("name", SCALED)
def test_a_config_round_trips_with_its_scaling(name):
    rope = {"rope_theta": 1e4} | SCALED[name]
    model = our_model(rope)
    _, exported = build_config(model, CausalLM())
    again = Model(**parse_config(exported).model)
    assert (again.rope_scaling, again.rope_theta) == (model.rope_scaling, model.rope_theta)
    assert exported["max_position_embeddings"] == 4096 and exported["rope_scaling"] == exported["rope_parameters"]
    defaults = {"beta_fast": 32.0, "beta_slow": 1.0} | ({} if rope["rope_type"] == "dynamic" else {ORIGINAL: 4096})
    assert rope.items() <= (defaults | exported["rope_parameters"]).items()
    assert exported["rope_parameters"].items() <= (defaults | rope).items()


def test_transformers_reads_what_is_exported():
    transformers = pytest.importorskip("transformers", reason="the extra `hf` is not installed")
    for rope in SCALED.values():
        _, exported = build_config(our_model(rope), CausalLM())
        theirs = transformers.AutoConfig.for_model(**exported)
        assert theirs.rope_parameters.items() >= rope_parameters(our_model(rope)).items()
        assert theirs.max_position_embeddings == 4096


def test_a_theta_that_grew_is_exported_as_it_is():
    """A run of ours may be longer than its original context; transformers would have that theta for no shorter row."""
    model = our_model(SCALED["dynamic"], context=1024).model_copy(update={"context": 4096})
    rope = export_rope(model)["rope_parameters"]
    assert rope["rope_type"] == "default" and rope["rope_theta"] == pytest.approx(1e4 * 7 ** (64 / 62))
    plain = Model(**parse_config(build_config(model, CausalLM())[1]).model)
    want = make_rotary(model).frequencies(64, jnp.float32)
    np.testing.assert_allclose(make_rotary(plain).frequencies(64, jnp.float32), want, rtol=1e-6)
    shorter = our_model(SCALED["dynamic"], context=1024).model_copy(update={"context": 512})
    assert build_config(shorter, CausalLM())[1]["max_position_embeddings"] == 1024


def test_partial_rotation_is_read_for_architectures_that_have_it():
    errors: list[str] = []
    parsed = parse_rope({"type": "linear", "factor": 2, "partial_rotary_factor": 0.25}, 64, errors)
    assert parsed == {"rope_theta": 1e4, "rope_fraction": 0.25, "rope_scaling": {"kind": "linear", "factor": 2.0}}
    model = our_model({}, 64, **parsed)
    assert not errors and rope_parameters(model)["partial_rotary_factor"] == 0.25
    with pytest.raises(ConfigError, match=r"nearest is llama, except for model.rope_fraction=0.25"):
        build_config(model, CausalLM())


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        (
            {"rope_type": "longrope"},
            "rope_type=longrope is not supported here. Supported: default, linear, dynamic, yarn",
        ),
        ({"type": "mrope"}, "rope_type=mrope is not supported"),
        ({"rope_type": "linear"}, "factor: missing, and rope_type=linear needs it"),
        ({"rope_type": "yarn", ORIGINAL: 64}, "factor: missing, and rope_type=yarn needs it"),
        ({"rope_type": "llama3", "factor": 8.0}, "low_freq_factor: missing, and rope_type=llama3 needs it"),
        ({"rope_type": "linear", "factor": "2"}, 'factor: input should be a valid number, got "2"'),
        ({"rope_type": "linear", "factor": 0.5}, "factor: input should be greater than or equal to 1, got 0.5"),
        (YARN | {ORIGINAL: 0}, f"{ORIGINAL}: input should be greater than or equal to 1, got 0"),
        (YARN | {"beta_fast": 0.5}, "rope_type=yarn: expected beta_fast to be at least beta_slow"),
        (LLAMA3 | {"high_freq_factor": 1.0}, "rope_type=llama3: expected high_freq_factor to be more than low_freq"),
        (LLAMA3 | {"type": "linear"}, 'rope_type="llama3" and type="linear" differ'),
        ({"rope_type": "dynamic", "factor": 2.0, ORIGINAL: 64}, "takes max_position_embeddings=4096. Make them equal"),
        ({"rope_theta": -1}, "rope_theta: expected a positive number, got -1"),
        ({"rope_theta": None}, "rope_theta: expected a positive number, got null"),
        ({"full_attention": {}, "sliding_attention": {}}, "settings for full_attention and sliding_attention apart"),
    ],
)
def test_what_cannot_be_computed_is_refused_by_name(rope, message):
    with pytest.raises(ConfigError) as error:
        parse_config(hf_config(rope))
    assert message in str(error.value), str(error.value)


def test_keys_that_contradict_each_other_are_refused():
    flat = {"rope_parameters": YARN, ORIGINAL: 1024}
    with pytest.raises(ConfigError, match=r"\[1024, 2048\], of which one is in rope_parameters. Remove one"):
        flatten_rope(flat)
    with pytest.raises(ConfigError, match="rope_scaling and rope_parameters differ"):
        flatten_rope({"rope_parameters": YARN, "rope_scaling": LLAMA3})
    assert flatten_rope({"rope_parameters": YARN, "rope_scaling": YARN, ORIGINAL: 2048}) == YARN


def test_the_original_context_may_stand_beside_the_scaling():
    rope = {key: value for key, value in YARN.items() if key != ORIGINAL}
    for place in itertools.pairwise([{}, {ORIGINAL: 512}, {}]):
        outside, inside = place
        parsed = parse_config(LLAMA | {"max_position_embeddings": 4096} | outside | {"rope_scaling": rope | inside})
        assert parsed.model["rope_scaling"]["original_context"] == 512 and parsed.unknown_keys == []


def test_keys_of_another_scaling_are_named_as_not_read():
    assert parse_config(hf_config(SCALED["linear"] | {"beta_fast": 32, "finetuned": True})).unknown_keys == [
        "beta_fast",
        "finetuned",
    ]
