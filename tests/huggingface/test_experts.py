"""Mixtures of experts in and out of Hugging Face's directories; test_families.py compares their logits."""

import json

import numpy as np
import pytest

from spmd_lm.checkpoints.restored import open_run
from spmd_lm.cli import main
from spmd_lm.config.load import load_run
from spmd_lm.config.mlp import DenseMLP, MoE
from spmd_lm.config.schema import Model
from spmd_lm.errors import ConfigError, Exit
from spmd_lm.huggingface.config_json import build_config, parse_config
from spmd_lm.huggingface.directory import open_directory
from spmd_lm.huggingface.safetensors_io import SafetensorsReader, write_tensors
from spmd_lm.huggingface.transfer import export_hf
from tests.huggingface.small_models import FLOAT32, import_directory, random_model
from tests.huggingface.test_architectures import ours, theirs
from tests.huggingface.test_families import BASE, MOE, QWEN2_MOE
from tests.huggingface.test_import_export import assert_same_tensors, our_logits, some_rows, their_logits

MIXTRAL = BASE | {"num_hidden_layers": 2, "num_local_experts": 4, "router_aux_loss_coef": 0.02}
QWEN2 = QWEN2_MOE | MOE | {"num_hidden_layers": 2, "mlp_only_layers": [0]}
LAYOUT = ["parallel.expert=2", "parallel.model=2", "parallel.zero=3"]


def make(path, name: str, hf_config: dict):
    pytest.importorskip("torch", reason="the extra `hf` is not installed")
    pytest.importorskip("transformers", reason="the extra `hf` is not installed")
    random_model(name, hf_config, "float32").save_pretrained(path)
    return path


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "hf_config"),
    [("MixtralForCausalLM", MIXTRAL), ("Qwen2MoeForCausalLM", QWEN2)],
    ids=["mixtral", "qwen2"],
)
def test_experts_on_several_devices_compute_the_same_and_come_back_bit_for_bit(tmp_path, name, hf_config):
    """Each device has a part of the experts, of their hidden width, and of the model's width."""
    before = make(tmp_path / "theirs", name, hf_config | {"output_router_logits": True})
    config = import_directory(before, tmp_path / "run", *FLOAT32, *LAYOUT)
    program, params, _ = open_run(config)
    rows = some_rows(config)
    expected = their_logits(random_model(name, hf_config, "float32"), rows)["tokens"]
    assert np.abs(our_logits(program, params, rows)["tokens"] - expected).max() < 2e-5 * np.abs(expected).max()
    export_hf(config, tmp_path / "back", "float32", 5 * 10**9)
    assert_same_tensors(before, tmp_path / "back")
    again = json.loads((tmp_path / "back" / "config.json").read_text())
    assert again["output_router_logits"] is True and "left_out" not in again
    assert parse_config(again) == parse_config(json.loads((before / "config.json").read_text()))


def test_a_model_with_a_capacity_is_not_exported_as_one_without(tmp_path, capsys):
    """Other keys of training change, and come back with the export."""
    before = make(tmp_path / "theirs", "MixtralForCausalLM", MIXTRAL)
    assert open_directory(before).config.model["mlp"]["capacity"] == "none"
    training = ["model.mlp.capacity=1.25", "model.mlp.balance_loss=0.5", "model.mlp.z_loss=0.25"]
    config = import_directory(before, tmp_path / "run", *training)
    assert (config.model.mlp.capacity, config.model.mlp.z_loss) == (1.25, 0.25)
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "back")]) == Exit.CONFIG
    error = capsys.readouterr().err
    assert "model.mlp.capacity=1.25: in training experts drop the tokens beyond it" in error
    assert "Use model.mlp.capacity=none" in error and not (tmp_path / "back").exists()
    export_hf(load_run(tmp_path / "run", ["model.mlp.capacity=none"]), tmp_path / "back", "float32", 5 * 10**9)
    assert_same_tensors(before, tmp_path / "back")
    assert json.loads((tmp_path / "back" / "config.json").read_text())["router_aux_loss_coef"] == 0.5


def test_an_import_keeps_what_the_model_computes(tmp_path):
    before = make(tmp_path / "theirs", "MixtralForCausalLM", MIXTRAL)
    with pytest.raises(ConfigError, match=r"model.mlp=.*'per_token': 1.* sets .*'per_token': 2"):
        import_directory(before, tmp_path / "run", "model.mlp.per_token=1")


def test_files_must_have_the_experts(tmp_path):
    """A number of experts in config.json alone allocates nothing."""
    hf_config = theirs("MixtralForCausalLM", num_local_experts=10**6)
    (tmp_path / "config.json").write_text(json.dumps(hf_config))
    tensors = {f"{i}": np.ones(1, "f4") for i in range(2)}
    write_tensors(tmp_path, tensors, iter(tensors.values()), 10**9)
    assert len(SafetensorsReader(tmp_path).tensors) == 2
    with pytest.raises(ConfigError, match="has 1000000 experts, but the files have 2 tensors"):
        open_directory(tmp_path)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("MixtralForCausalLM", {"shared": 16}, "nearest is mixtral, except for model.mlp.shared=16"),
        ("MixtralForCausalLM", {"renormalize": False}, "nearest is mixtral, except for model.mlp.renormalize=False"),
        ("Qwen3MoeForCausalLM", {"shared": 16}, "nearest is qwen3_moe, except for model.mlp.shared=16"),
    ],
)
def test_what_hugging_face_lacks_is_refused_by_name(name, changes, message):
    m, objective = ours(name)
    with pytest.raises(ConfigError) as error:
        build_config(m.model_copy(update={"mlp": m.mlp.model_copy(update=changes)}), objective)
    assert message in str(error.value)


def test_a_capacity_of_one_kind_of_layer_is_refused_too():
    m, objective = ours("Qwen3MoeForCausalLM")
    dense, sparse = m.kinds
    layers = (dense, sparse.model_copy(update={"mlp": m.mlp.model_copy(update={"capacity": 2.0})}))
    with pytest.raises(ConfigError, match=r"^mlp.capacity in model.period=2.0: in training .* in model.mlp, and the"):
        build_config(m.model_copy(update={"period": layers}), objective)


def test_a_dense_family_has_no_experts():
    m, objective = ours("GPT2LMHeadModel")
    moe = MoE(kind="moe", experts=4, capacity="none")
    with pytest.raises(ConfigError, match=r"nearest is gpt2, except for model.mlp.kind=moe\."):
        build_config(m.model_copy(update={"mlp": moe}), objective)


def test_qwen_layers_without_experts_are_a_period():
    model = parse_config(theirs("Qwen2MoeForCausalLM", num_hidden_layers=6, decoder_sparse_step=3)).model
    dense = {"kind": "block", "mlp": {"kind": "dense"}}
    assert model["period"] == [dense, dense, "block"] and model["mlp"]["shared_gate"]
    kinds = Model(**model).of_each_kind
    assert [kind.mlp == DenseMLP() for kind in kinds] == [True, True, False]
