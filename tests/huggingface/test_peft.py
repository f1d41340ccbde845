"""Adapters of PEFT compute here what they compute there, and those of a run compute there what they compute here."""

import json
import shutil
from contextlib import closing
from pathlib import Path

import jax
import numpy as np
import pytest

from spmd_lm.batch import Batch
from spmd_lm.checkpoints.checkpointer import Checkpointer
from spmd_lm.checkpoints.merge import merge_run
from spmd_lm.checkpoints.restored import open_run, restore_run
from spmd_lm.config.load import load_run
from spmd_lm.errors import ConfigError
from spmd_lm.huggingface.peft import export_peft, import_peft, open_adapter
from spmd_lm.huggingface.peft_config import ADAPTER_CONFIG, ADAPTER_FILE, make_adapter_config
from spmd_lm.parallel.trees import leaves_by_path, merge
from tests.huggingface.small_models import FLOAT32, FLOAT64, GPT2, SIZES, import_directory, random_model
from tests.huggingface.test_import_export import assert_same_tensors, our_logits, some_rows, their_logits

SLOW = pytest.mark.slow
GROUPED = SIZES | {"num_attention_heads": 4, "num_key_value_heads": 2}
NEOX = SIZES | {"rotary_pct": 0.5}
BERT = SIZES | {"vocab_size": 264}
HEAD = {"target_modules": ["q_proj", "v_proj"], "modules_to_save": ["lm_head"], "use_rslora": True}
CASES = {
    "gpt2": ("GPT2LMHeadModel", GPT2, {"target_modules": ["c_attn", "mlp.c_proj"], "fan_in_fan_out": True}),
    "gpt2, all": ("GPT2LMHeadModel", GPT2, {"target_modules": "all-linear", "fan_in_fan_out": True, "bias": "all"}),
    "llama": ("LlamaForCausalLM", GROUPED, {"target_modules": r".*\.(self_attn|mlp)\.(q|k|v|o|up|down)_proj"}),
    "llama, patterns": (
        "LlamaForCausalLM",
        GROUPED,
        {
            "target_modules": ["q_proj", "k_proj", "mlp.down_proj", "gate_proj"],
            "rank_pattern": {"q_proj": 2, r"mlp\.down_proj": 5},
            "alpha_pattern": {"q_proj": 3},
        },
    ),
    "llama, head": ("LlamaForCausalLM", GROUPED, HEAD),
    "qwen2": ("Qwen2ForCausalLM", GROUPED, {"target_modules": ["k_proj", "o_proj"], "bias": "lora_only"}),
    "neox": ("GPTNeoXForCausalLM", NEOX, {"target_modules": ["query_key_value", "dense"]}),
    "phi3": ("Phi3ForCausalLM", GROUPED | {"pad_token_id": 0}, {"target_modules": ["qkv_proj", "gate_up_proj"]}),
    "bert": ("BertForMaskedLM", BERT, {"target_modules": ["query", "value", "output.dense"]}),
    "bert, mlp": ("BertForMaskedLM", BERT, {"target_modules": r".*\.\d+\.output\.dense"}),
    "bert, classes": (
        "BertForSequenceClassification",
        BERT | {"id2label": {0: "a", 1: "b", 2: "c"}},
        {"target_modules": ["query", "intermediate.dense"], "task_type": "SEQ_CLS", "modules_to_save": ["pooler"]},
    ),
}
CASES |= {
    "gpt2, ia3": (
        "GPT2LMHeadModel",
        GPT2,
        {"target_modules": ["c_attn", "mlp.c_proj"], "feedforward_modules": ["mlp.c_proj"], "fan_in_fan_out": True},
    ),
    "llama, ia3": (
        "LlamaForCausalLM",
        GROUPED | {"attention_bias": True},
        {"target_modules": ["k_proj", "v_proj", "down_proj"], "feedforward_modules": ["down_proj"]},
    ),
    "bert, ia3": (
        "BertForMaskedLM",
        BERT,
        {"target_modules": ["key", "value", "output.dense"], "feedforward_modules": ["output.dense"]},
    ),
}
LAYOUT = ["parallel.model=2", "parallel.zero=3"]


@pytest.fixture(scope="module")
def peft():
    pytest.importorskip("transformers", reason="the extra `hf` is not installed")
    return pytest.importorskip("peft", reason="the extra `hf` is not installed")


def adapted(peft, model, settings: dict, directory):
    """A model of PEFT, with adapters that are random throughout, which it saves in `directory`."""
    import torch

    is_ia3 = "feedforward_modules" in settings
    of_kind = {} if is_ia3 else {"r": 3, "lora_alpha": 7, "lora_dropout": 0.1}
    settings = {"task_type": "CAUSAL_LM"} | of_kind | settings
    if "Masked" in type(model).__name__:
        settings["task_type"] = None
    model = peft.get_peft_model(model, (peft.IA3Config if is_ia3 else peft.LoraConfig)(**settings)).eval()
    draw = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for _, p in model.named_parameters():
            if p.requires_grad:
                p.add_(torch.randn(p.shape, generator=draw) * 0.1)
    model.save_pretrained(directory)
    return model


def imported(peft, case: str, where, *overrides: str):
    """(the model of PEFT, the configuration of the run with its adapters), of this case."""
    name, hf_config, settings = CASES[case]
    random_model(name, hf_config, "float32").save_pretrained(where / "base-theirs")
    import_directory(where / "base-theirs", where / "base", *overrides)
    theirs = adapted(peft, random_model(name, hf_config, "float32"), settings, where / "theirs")
    overrides = (f"run.init_from={where / 'base'}", *overrides)
    config = make_adapter_config(where / "theirs", str(where / "run"), None, overrides)
    import_peft(where / "theirs", config)
    return theirs, load_run(where / "run")


def largest_difference(program, params, model) -> float:
    """Largest difference of logits, in units of the largest."""
    rows = some_rows(program.config)
    (ours,), (theirs,) = (z.values() for z in (our_logits(program, params, rows), their_logits(model, rows)))
    assert 0.1 < np.abs(theirs).max() < 100
    mask = rows.real[..., None].astype(bool) if theirs.ndim == 3 else True
    return float(np.abs(np.where(mask, ours - theirs, 0)).max() / np.abs(theirs).max())


def moved(config, where):
    """A run like this one, with every trained parameter moved apart, as training moves it."""
    draw = np.random.default_rng(1)
    program, params, _ = restore_run(config)

    def move(x: jax.Array) -> jax.Array:
        return x + jax.device_put(0.05 * draw.normal(size=x.shape).astype(x.dtype), x.sharding)

    state = program.initial_canonical(merge(params, jax.tree.map(move, program.plan.trained(params))))
    shutil.copytree(config.run.directory, where)
    with closing(Checkpointer(where / "checkpoints", config.checkpoint)) as checkpoints:
        checkpoints.save(1, program.saved_part(state), checkpoints.meta(0))
    return load_run(where)


@SLOW
@pytest.mark.parametrize("case", CASES)
def test_logits_agree_with_peft_both_ways_and_merged(peft, tmp_path, case):
    import torch

    theirs, config = imported(peft, case, tmp_path, *FLOAT32, *LAYOUT)
    program, params, _ = open_run(config)
    assert largest_difference(program, params, theirs) < 1e-5
    export_peft(config, tmp_path / "back", "float32")
    if case != "bert, classes":  # of which the pooler is trained here, and not there
        assert_same_tensors(tmp_path / "theirs", tmp_path / "back")

    other = moved(config, tmp_path / "moved")
    program, params, _ = open_run(other)
    export_peft(other, tmp_path / "ours", "float32")
    name, hf_config, _ = CASES[case]
    loaded = peft.PeftModel.from_pretrained(random_model(name, hf_config, "float32"), tmp_path / "ours").eval()
    assert largest_difference(program, params, loaded) < 1e-5

    merge_run(other, tmp_path / "merged")
    program, params, _ = open_run(load_run(tmp_path / "merged"))
    with torch.no_grad():
        assert largest_difference(program, params, loaded.merge_and_unload()) < 1e-5


@pytest.mark.slow
def test_gradients_are_those_of_peft(peft, tmp_path):
    """Projections are separate; gradients, float64."""
    import torch

    theirs, config = imported(peft, "llama", tmp_path, *FLOAT64)
    program, params, _ = restore_run(config)
    rows = some_rows(config)
    ids = torch.tensor(rows.tokens, dtype=torch.int64)
    theirs = theirs.double()
    theirs(input_ids=ids, labels=ids).loss.backward()
    count, time = rows.tokens.shape
    targets = np.pad(rows.tokens[:, 1:], ((0, 0), (0, 1)))
    weights = np.broadcast_to(np.arange(time) < time - 1, targets.shape).astype(np.float32)
    positions = np.broadcast_to(np.arange(time, dtype=np.int32), targets.shape)
    batch = Batch(rows.tokens, targets, weights, positions, None, np.arange(count, dtype=np.int32))
    trained = jax.device_get(program.plan.trained(params))
    base = jax.device_get(params)
    with jax.enable_x64(True):
        loss = jax.jit(lambda trained: program.model.unchecked_mean_loss(merge(base, trained), batch, None))
        ours = leaves_by_path(jax.grad(loss)(trained))
    names = {"q": "query", "k": "key", "v": "value", "o": "out"}
    for layer in range(SIZES["num_hidden_layers"]):
        attention = theirs.base_model.model.model.layers[layer].self_attn
        for letter, name in names.items():
            module = getattr(attention, f"{letter}_proj")
            for factor in "ab":
                want = getattr(module, f"lora_{factor.upper()}")["default"].weight.grad.numpy()
                got = np.asarray(ours[f"blocks.attention.{name}_adapter.{factor}"][layer])
                got = got if name == "out" else got.T
                np.testing.assert_allclose(got, want, atol=1e-5 * np.abs(want).max())


@pytest.fixture(scope="module")
def run(peft, tmp_path_factory):
    """A run with adapters, and what it was imported from, which no test changes."""
    where = tmp_path_factory.mktemp("adapter")
    imported(peft, "gpt2", where, *FLOAT32)
    return where


def changed(run: Path, tmp_path: Path, changes: dict) -> Path:
    """A copy of the adapter, with other settings."""
    theirs = shutil.copytree(run / "theirs", tmp_path / "theirs")
    settings = json.loads((theirs / ADAPTER_CONFIG).read_text())
    (theirs / ADAPTER_CONFIG).write_text(json.dumps(settings | changes))
    return theirs


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"use_dora": True}, "use_dora=true is not implemented here"),
        ({"layers_to_transform": [0]}, "layers_to_transform=[0] is not implemented here"),
        ({"something_new": 3}, "something_new=3 is not implemented here"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights=pissa may change the base"),
        ({"init_lora_weights": ["pissa"]}, "may change the base"),
        ({"peft_type": ["LORA"]}, 'peft_type=["LORA"] is not supported'),
        ({"target_modules": [["c_attn"]]}, "adapter.targets"),
        ({"r": 10**9}, "no matrix of its size has a rank above"),
        ({"lora_alpha": 1e300}, "adapter.alpha: must be at most"),
        ({"rank_pattern": {r"(\w+\.?)+!": 2}}, "is not implemented here. Write names."),
        ({"peft_type": "PREFIX_TUNING"}, 'peft_type="PREFIX_TUNING" is not supported. Supported: LORA, IA3.'),
        ({"r": 0}, "adapter.rank: must be at least 1"),
        ({"r": "8"}, "adapter.rank"),
        ({"target_modules": ["x_proj"]}, "adapter.targets: x_proj matches no matrix"),
        ({"r": 4}, "is [3, 32], not [4, 32]: it is of another model"),
        ({"target_modules": ["c_attn"]}, "no parameter of this adapter"),
        ({"target_modules": ["c_attn", "c_proj"]}, "is missing"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_what_cannot_be_read_is_told_and_nothing_is_made(run, tmp_path, changes, problem):
    theirs = changed(run, tmp_path, changes)
    with pytest.raises(ConfigError) as caught:
        overrides = [f"run.init_from={run / 'base'}", *FLOAT32]
        import_peft(theirs, make_adapter_config(theirs, str(tmp_path / "run"), None, overrides))
    assert problem in str(caught.value)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"target_modules": 5}, "adapter.targets: expected a list or text, got 5."),
        ({"rank_pattern": {"attn.c_attn": "12"}}, "adapter.rank_pattern"),
        ({"lora_alpha": 0}, "adapter.alpha: must be more than 0, got 0."),
    ],
    ids=str,
)
def test_what_generate_cannot_read_is_told(run, tmp_path, changes, problem):
    theirs = changed(run, tmp_path, changes)
    with pytest.raises(ConfigError) as caught:
        open_adapter(load_run(run / "base"), theirs)
    assert problem in str(caught.value) and str(tmp_path) in str(caught.value)


def test_what_is_no_adapter_of_the_run_is_told(run, tmp_path):
    with pytest.raises(ConfigError, match=r"--adapter .*: neither a run \(config.yaml\) nor a directory of PEFT"):
        open_adapter(load_run(run / "base"), tmp_path)
    with pytest.raises(ConfigError, match=r"run holds adapters itself, of .*base. Give that run instead."):
        open_adapter(load_run(run / "run"), run / "theirs")
    freezes = load_run(run / "base", ["optim.freeze=blocks.*.attention.*"])  # as it was trained
    open_adapter(freezes, run / "theirs")


def test_a_damaged_file_is_told(run, tmp_path):
    shutil.copytree(run / "theirs", tmp_path / "theirs")
    shutil.copy(run / "theirs" / ADAPTER_FILE, tmp_path / "theirs" / "model.safetensors")  # which is not read
    content = (tmp_path / "theirs" / ADAPTER_FILE).read_bytes()
    (tmp_path / "theirs" / ADAPTER_FILE).write_bytes(content[: len(content) // 2])
    overrides = [f"run.init_from={run / 'base'}", *FLOAT32]
    config = make_adapter_config(tmp_path / "theirs", str(tmp_path / "run"), None, overrides)
    with pytest.raises(ConfigError, match="damaged, or not safetensors"):
        import_peft(tmp_path / "theirs", config)
    (tmp_path / "theirs" / ADAPTER_FILE).unlink()
    with pytest.raises(ConfigError, match=r"adapter_model.safetensors: cannot be read: No such file"):
        import_peft(tmp_path / "theirs", config)
    with pytest.raises(ConfigError, match=r"is an adapter of .*\. Import that first, and name its run"):
        make_adapter_config(tmp_path / "theirs", str(tmp_path / "run"), None, [])


def test_an_import_takes_its_base_from_a_file_and_keeps_the_adapter(run, tmp_path):
    (tmp_path / "mine.yaml").write_text(f"run: {{init_from: {run / 'base'}}}\n")
    here, file = str(tmp_path / "run"), str(tmp_path / "mine.yaml")
    config = make_adapter_config(run / "theirs", here, file, FLOAT32)
    assert config.run.init_from == str(run / "base") and config.run.dir == here
    with pytest.raises(ConfigError, match=r"adapter.rank=4: .*adapter_config.json sets 3. Leave it out."):
        make_adapter_config(run / "theirs", here, file, ["adapter.rank=4"])
    with pytest.raises(ConfigError, match=r"run.dir=other: the run is created in .*run. Leave it out."):
        make_adapter_config(run / "theirs", here, file, ["run.dir=other"])


def test_an_adapter_is_opened_in_the_layout_of_its_base(run):
    base = load_run(run / "base", ["parallel.model=1", "parallel.data=8"])
    program, _ = open_adapter(base, run / "theirs")
    assert program.plan.layout.model == 1
    with pytest.raises(ConfigError, match=r"--adapter .*theirs: .*parallel.partitioner=types"):
        open_adapter(load_run(run / "base", ["parallel.partitioner=types"]), run / "theirs")
