"""Quantized runs in Hugging Face's files: their readers compute what the run does."""

import dataclasses
import json

import numpy as np
import pytest
from safetensors.numpy import load_file

from spmd_lm.checkpoints.new_run import write_new_run
from spmd_lm.checkpoints.restored import open_run, restore_run
from spmd_lm.config.schema import RunConfig
from spmd_lm.errors import ConfigError
from spmd_lm.huggingface.config_json import build_config
from spmd_lm.huggingface.transfer import export_hf, gather_tensor
from spmd_lm.parallel.trees import from_paths, leaves_by_path
from spmd_lm.step.program import Program
from tests.helpers import FLOAT32, make_config
from tests.huggingface.test_import_export import our_logits, some_rows, their_logits

SLOW = pytest.mark.slow
GPT2 = {"width": 64, "heads": 4, "mlp_width": 192}
NEOX = GPT2 | {"positions": "rotary", "parallel_branches": True, "tie_embeddings": False}
LLAMA = GPT2 | {"positions": "rotary", "norm_type": "rms", "activation": "swiglu", "use_bias": False, "kv_heads": 2}


def name_of(value) -> str:
    return value if isinstance(value, str) else "-".join(map(str, value[1:]))


def config_of(directory, model: dict, bits: str, group: int | None) -> RunConfig:
    precision = FLOAT32 | {"quantized": bits, "quantized_group": group}
    sections = {"model": model, "precision": precision, "parallel": {"data": 8}, "run": {"dir": str(directory)}}
    return make_config(**sections)


def exported(tmp_path, *how) -> RunConfig:
    """A run in tmp_path/run and its export in tmp_path/files.  Matrices are large enough that each moves the logits."""
    config = config_of(tmp_path / "run", *how)
    program = Program(config, trains=False)
    leaves = leaves_by_path(program.canonical(program.init()).params)
    params = {path: leaf * 8 if path.endswith("absmax") else leaf for path, leaf in leaves.items()}
    write_new_run(program, from_paths(params, program.plan.shapes), tmp_path / "run")
    export_hf(config, tmp_path / "files", "float32", 10**9)
    return config


@SLOW
@pytest.mark.parametrize(
    ("reader", "how"),
    [
        ("bitsandbytes", (LLAMA, "nf4", 64)),
        ("bitsandbytes", (GPT2, "nf4", 64)),
        ("compressed_tensors", (LLAMA, "int8", None)),
        ("compressed_tensors", (LLAMA, "int4", 64)),
        ("compressed_tensors", (NEOX, "int8", 16)),
    ],
    ids=name_of,
)
def test_readers_compute_what_the_run_does(tmp_path, reader, how):
    pytest.importorskip("torch", reason="the extra `hf` is not installed")
    transformers = pytest.importorskip("transformers", reason="the extra `hf` is not installed")
    pytest.importorskip(reader, reason=f"{reader} is not installed")
    config = exported(tmp_path, *how)
    program, params, _ = open_run(config)
    ours = our_logits(program, params, rows := some_rows(config))["tokens"]
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "files", attn_implementation="eager").eval()
    theirs = their_logits(model, rows)["tokens"]
    assert 0.1 < np.abs(theirs).max() < 1
    assert np.abs(ours - theirs).max() < 1e-5


CASES = [(NEOX, "int4", 16), (LLAMA | {"mlp_width": 190}, "int4", None), (LLAMA, "int8", None), (GPT2, "nf4", 64)]


@pytest.mark.parametrize("how", [CASES[0], *(pytest.param(case, marks=SLOW) for case in CASES[1:])], ids=name_of)
def test_files_hold_the_codes_of_the_run(tmp_path, how):
    """Decoded as the formats are defined, and joined as the matrices are."""
    config = exported(tmp_path, *how)
    program, params, _ = restore_run(config)
    uncoded = leaves_by_path(dataclasses.replace(program.model, base=None).shapes)
    architecture, _ = build_config(config.model, config.objective)
    tensors = architecture.tensors({path: leaf.shape for path, leaf in uncoded.items()}, config.model.heads)
    read = load_file(tmp_path / "files" / "model.safetensors")
    for tensor in tensors:
        if tensor.parts[0].param.startswith("blocks.") and len(tensor.shape) == 2:
            want = gather_tensor(tensor, leaves_by_path(params), program)
            got = unblocked(read, tensor.name) if how[1] == "nf4" else unpacked(read, tensor.name, int(how[1][-1]))
            assert np.array_equal(got, want.T if how[0] is GPT2 else want)


def unpacked(read: dict, name: str, bits: int) -> np.ndarray:
    packed, scale, (outputs, inputs) = (read[f"{name}_{key}"] for key in ("packed", "scale", "shape"))
    fields = packed.view(np.uint32)[..., None] >> np.arange(0, 32, bits, dtype=np.uint32) & 2**bits - 1
    codes = fields.reshape(outputs, -1)[:, :inputs].astype(np.float32) - 2 ** (bits - 1)
    return codes * np.repeat(scale, inputs // scale.shape[1], axis=1)


def unblocked(read: dict, name: str) -> np.ndarray:
    state = json.loads(read[f"{name}.quant_state.bitsandbytes__nf4"].tobytes())
    indices = np.stack([read[name] >> 4, read[name] & 15], -1).reshape(-1, state["blocksize"])
    return (read[f"{name}.quant_map"][indices] * read[f"{name}.absmax"][:, None]).reshape(state["shape"])


@pytest.mark.parametrize(
    ("how", "problem"),
    [
        ((LLAMA, "int3", 64), "int3: versions of compressed-tensors pack 3 bits differently, .* --bits int4"),
        ((GPT2, "int8", None), "int8: matrices of gpt2 are of transformers' Conv1D, .* --bits nf4 --group 64"),
        ((LLAMA, "nf4", 32), "nf4 with precision.quantized_group=32: bitsandbytes, .* has groups of 64, 128, .* 4096"),
    ],
    ids=name_of,
)
def test_what_has_no_format_is_told(tmp_path, how, problem):
    with pytest.raises(ConfigError, match=problem):
        export_hf(config_of(tmp_path / "run", *how), tmp_path / "files", "float32", 10**9)
    assert not (tmp_path / "files").exists()
