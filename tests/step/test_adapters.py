"""Adapters under every layout: the run of one device, and nothing else trained."""

import jax
import numpy as np
import pytest

from spmd_lm.adapters import adapters_of
from spmd_lm.config.adapters import CODED, HF_LAYERS, HF_MODULES, LoRA
from spmd_lm.errors import ConfigError, LayoutError
from spmd_lm.huggingface.architectures import LAYER
from spmd_lm.huggingface.families import ARCHITECTURES
from spmd_lm.models.language_model import LanguageModel
from spmd_lm.parallel.trees import leaves_by_path
from spmd_lm.step.program import Program
from tests.helpers import ORIGINAL_BERT, TASKS, assert_states_close, diagonals, make_config, program, trained
from tests.own import MIXER, write_module

SLOW = pytest.mark.slow
LORA = {"kind": "lora", "rank": 3, "alpha": 12.0, "dropout": 0.25}
LLAMA = {"positions": "rotary", "norm_type": "rms", "activation": "swiglu", "use_bias": False, "kv_heads": 2}
BLOCKS = {"width": 64, "mlp_width": 512, "head_width": 64}  # of 64 inputs, whole on each of eight devices
RUNS = {
    "gpt": {"adapter": LORA},
    "llama": {"model": LLAMA | {"heads": 8, "tie_embeddings": False}, "adapter": LORA | {"rslora": True}},
    "some": {
        "adapter": LORA | {"targets": ["c_attn", "down"], "modules_to_save": ["wte"]},
        "optim": {"freeze": "*.1.*"},
    },
    "bert": {"model": ORIGINAL_BERT, **TASKS["classification"], "adapter": LORA},
    "ia3": {"model": {"use_bias": True}, "adapter": {"kind": "ia3", "targets": ["key", "value", "up", "down"]}},
    "int8": {"model": LLAMA | {"heads": 8}, "adapter": LORA | {"base": "int8"}},
    "nf4": {"model": LLAMA | BLOCKS, "adapter": LORA | {"base": "nf4"}},
    "nf4-double": {"model": BLOCKS, "adapter": LORA | {"base": "nf4-double"}},
}
LAYOUTS = {
    "tensor": {"data": 2, "model": 4},
    "eight": {"model": 8, "data": 1},
    "sequence-zero1": {"data": 2, "model": 4, "sequence": True, "zero": 1},
    "zero2": {"data": 4, "model": 2, "zero": 2, "microbatches": 2},
    "zero3": {"data": 4, "model": 2, "zero": 3, "microbatches": 2},
    "zero3-sequence-prefetched": {"data": 2, "model": 4, "sequence": True, "zero": 3, "prefetch": "on"},
    "hybrid": {"replica": 2, "data": 2, "model": 2, "zero": 3},
    "1f1b": {"pipe": 2, "data": 2, "model": 2, "zero": 3, "microbatches": 2},
    "gpipe": {"pipe": 2, "data": 4, "zero": 3, "microbatches": 2, "schedule": "gpipe"},
    "interleaved": {"pipe": 2, "data": 2, "zero": 3, "microbatches": 4, "schedule": "interleaved", "chunks": 2},
    "breadth-first": {"pipe": 2, "data": 2, "zero": 3, "microbatches": 4, "schedule": "breadth_first", "chunks": 2},
    "breadth-first-prefetched": {"pipe": 2, "data": 2, "zero": 3, "microbatches": 2, "chunks": 2, "prefetch": "on"}
    | {"schedule": "breadth_first"},
}
REMAT = {"zero3": "full", "tensor": "residual", "hybrid": "selective", "1f1b": "full"}
UNROLLED = ("zero2", "hybrid")


@SLOW
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(("run", "layout"), [*diagonals(RUNS, LAYOUTS, 3)])
def test_every_layout_computes_the_same(run, layout):
    """A base of codes and one of floats under each layout, and each run under four."""
    sections = dict(RUNS[run])
    model = {"layers": 4, "dropout": 0.1} | sections.pop("model", {})
    sections["optim"] = {"eps": 1e-6} | sections.get("optim", {})  # A has no gradient while B is zero
    remat, scan = {"policy": REMAT.get(layout, "none")}, layout not in UNROLLED
    got = trained(make_config(model=model | {"scan": scan}, parallel=LAYOUTS[layout], remat=remat, **sections))
    want = trained(make_config(model=model, parallel={"data": 1}, **sections))
    assert got.losses == pytest.approx(want.losses, rel=1e-12)
    assert got.norms == pytest.approx(want.norms, rel=1e-12)
    assert_states_close(got.last, want.last, 1e-11)
    for path, leaf in leaves_by_path(want.last.params).items():
        if path.rpartition(".")[2] in CODED:
            assert leaf.dtype != np.float64 and np.array_equal(leaf, leaves_by_path(got.last.params)[path])
    if run == "int8":
        assert_adapters_alone_change_and_have_moments(want)


def assert_adapters_alone_change_and_have_moments(outcome):
    first, last, moments = (
        leaves_by_path(each) for each in (outcome.first.params, outcome.last.params, outcome.last.opt_state)
    )
    changed = {path for path in first if not np.array_equal(first[path], last[path])}
    assert changed == {path for path in first if "_adapter." in path}
    assert {path.partition(".")[2] for path in moments if path.startswith("mu.")} == changed


@pytest.mark.usefixtures("x64")
def test_the_base_is_drawn_as_without_adapters():
    plain, adapted = (
        leaves_by_path(program(config).model.init(3)) for config in (make_config(), make_config(adapter=LORA))
    )
    assert all(np.array_equal(leaf, adapted[path]) for path, leaf in plain.items())
    for path, leaf in adapted.items():
        if path.endswith("_adapter.a"):
            inputs = leaf.shape[2 if path.split(".")[2] in ("out_adapter", "down_adapter") else 1]
            assert 0.9 / np.sqrt(inputs) < np.abs(leaf).max() <= 1 / np.sqrt(inputs)
        elif path.endswith("_adapter.b"):
            assert not leaf.any()


def model_of(**model) -> LanguageModel:
    config = make_config(model=model)
    return LanguageModel(config.model, config.objective, "float32", ("xla",))


@pytest.mark.parametrize(
    "architecture", ARCHITECTURES, ids=lambda each: f"{each.model_type} {next(iter(each.classes))}"
)
def test_matrices_have_the_names_of_their_family(architecture):
    kind = architecture.fixed.get("kind", "gpt")
    for mapping in architecture.weights:
        is_matrix = not mapping.param.endswith(("_bias", ".scale", ".bias", ".router", ".shared_gate"))
        if mapping.param.startswith("blocks.") and is_matrix and ".experts." not in mapping.param:
            layers, _, module = mapping.tensor.removesuffix(".weight").partition(f".{LAYER}.")
            assert layers in HF_LAYERS[kind]
            assert module in HF_MODULES[kind][mapping.param.removeprefix("blocks.")]


@pytest.mark.parametrize(
    ("targets", "expected"),
    [
        ("all-linear", "attention.key attention.out attention.query attention.value mlp.down mlp.gate mlp.up"),
        (["q_proj", "value"], "attention.query attention.value"),
        (["mlp.up", "self_attn.o_proj"], "attention.out mlp.up"),
        (["gate_up_proj"], "mlp.gate mlp.up"),
        (r".*\.layers\.\d+\.self_attn\.[qk]_proj", "attention.key attention.query"),
        ("attention.*", "attention.key attention.out attention.query attention.value"),
    ],
)
def test_targets_are_read_as_peft_reads_them(targets, expected):
    targets = targets if isinstance(targets, str) else tuple(targets)
    adapters = adapters_of(LoRA(kind="lora", targets=targets), model_of(**LLAMA))
    assert [path for path, _ in adapters] == expected.split()


def test_devices_that_would_cut_blocks_are_told():
    config = make_config(model=BLOCKS | {"mlp_width": 192}, adapter=LORA | {"base": "nf4"}, parallel={"model": 8})
    with pytest.raises(LayoutError, match=r"of which mlp.down has 3. Use parallel.model=1, or adapter.base=int8."):
        Program(config, jax.devices())


def test_what_is_to_be_trained_is_not_frozen():
    config = make_config(adapter=LORA | {"modules_to_save": ["wte"]}, optim={"freeze": "embedding.*"})
    with pytest.raises(ConfigError, match=r"optim.freeze=embedding.\* freezes all of wte, which the adapter trains."):
        Program(config, jax.devices()[:1])


def test_an_adapter_is_not_frozen():
    config = make_config(adapter=LORA, optim={"freeze": "blocks.*.query_adapter.*"})
    with pytest.raises(ConfigError, match=r"freezes the adapter of attention.query. Leave attention.query out of"):
        Program(config, jax.devices()[:1])
    some = make_config(adapter=LORA, optim={"freeze": "blocks.0.*_adapter*"})  # of one layer of several
    assert Program(some, jax.devices()[:1]).plan.trains("blocks", "attention", "query_adapter")


@pytest.mark.parametrize(
    ("part", "paths"),
    [
        ("model.embed_tokens", {"embedding.tokens"}),
        ("transformer.ln_f", {"head.norm.scale", "head.norm.bias"}),
        ("head.norm", {"head.norm.scale", "head.norm.bias"}),
        ("blocks.norm1", {"blocks.norm1.scale", "blocks.norm1.bias"}),
    ],
)
def test_parts_are_trained_by_our_names_and_hugging_face_s(part, paths):
    plan = Program(make_config(adapter=LORA | {"modules_to_save": [part]}), jax.devices()[:1]).plan
    trained = {".".join(each.path) for each in plan.trained_parameters}
    assert {path for path in trained if "_adapter" not in path} == paths


def test_the_first_of_several_patterns_counts():
    adapter = LORA | {"rank_pattern": {"q.*": 2, "query": 3}, "targets": ["query"]}
    plan = Program(make_config(adapter=adapter), jax.devices()[:1]).plan
    assert plan.shapes["blocks"]["attention"]["query_adapter"]["a"].shape[-1] == 2


@pytest.mark.parametrize(
    ("adapter", "problem"),
    [
        ({"targets": ["q_prj"]}, "adapter.targets: q_prj matches no matrix of a block. Did you mean q_proj?"),
        ({"targets": []}, "adapter.targets=[] leaves nothing to train. Use adapter.targets=all-linear."),
        ({"targets": "(["}, "adapter.targets: ([ is no regular expression"),
        ({"targets": "a{99999999999}"}, "is no regular expression"),
        ({"targets": "q_proj"}, "A text is a regular expression of a whole name. Write [q_proj]."),
        ({"rank": 33}, "adapter.rank=33: attention.key is [32, 32], and no matrix of its size has a rank above 32."),
        ({"base": "int8", "modules_to_save": ["blocks.mlp.up"]}, "is in few bits (adapter.base=int8)"),
        ({"targets": "q_proj"}, "adapter.targets: q_proj matches no matrix"),  # a pattern of a whole name
        ({"targets": r".*\.0\.attn\.c_attn"}, "attention.key is another in layers 1 than in layer 0"),
        ({"modules_to_save": ["lm_head"]}, "lm_head is the token table of the embedding (model.tie_embeddings=true)"),
        (
            {"base": "nf4"},
            "adapter.base=nf4: attention.key has 32 inputs, which groups of 64 do not divide. Use adapter.base=int8 or",
        ),
        ({"modules_to_save": ["hed"]}, "adapter.modules_to_save: hed is no part of this model. Did you mean head?"),
        ({"modules_to_save": ["poolr"]}, "poolr is no part of this model. Names are like"),  # of which it has none
        ({"modules_to_save": ["blocks.mlp"]}, "blocks.mlp trains mlp.down itself, which has an adapter too."),
        ({"targets": ["all_linear"]}, "all_linear matches no matrix of a block. Did you mean all-linear?"),
        ({"rank_pattern": {"query": 40}}, "adapter.rank_pattern=40: attention.query is [32, 32]"),
    ],
)
def test_what_an_adapter_cannot_have_is_told(adapter, problem):
    with pytest.raises(ConfigError) as caught:
        Program(make_config(adapter=LORA | adapter), jax.devices()[:1])
    assert problem in str(caught.value)


def test_parameters_of_one_s_own_may_be_called_as_factors_are(tmp_path):
    module = write_module(tmp_path, "Mixer", MIXER.replace("self.decay", "self.b"))
    plan = Program(make_config(model={"module": module}, adapter=LORA), jax.devices()[:1]).plan
    trained = {".".join(each.path) for each in plan.trained_parameters}
    assert trained == {f"blocks.{matrix}_adapter.{factor}" for matrix in ("up", "down") for factor in "ab"}


def test_parameters_of_one_s_own_are_not_called_as_codes_are(tmp_path):
    module = write_module(tmp_path, "Mixer", MIXER.replace("self.decay", "self.offset"))
    with pytest.raises(ConfigError, match=r"blocks.offset: names that end in _adapter .* Rename this parameter."):
        Program(make_config(model={"module": module}), jax.devices()[:1])
