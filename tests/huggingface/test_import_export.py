"""Imported models compute what Hugging Face's own compute, and exported ones are theirs bit for bit."""

import dataclasses
import json
import math
import shutil
from pathlib import Path
from types import SimpleNamespace

import jax
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from spmd_lm.checkpoints.checkpointer import Checkpointer
from spmd_lm.checkpoints.restored import open_run, restore_run
from spmd_lm.cli import main
from spmd_lm.config.load import load, load_run
from spmd_lm.config.schema import Classification, Model, RunConfig
from spmd_lm.data.corpus import load_data, make_loader
from spmd_lm.data.tokenizers.tokenizer import NumberTokenizer, keep_vocabulary, open_tokenizer
from spmd_lm.data.tokenizers.vocabulary import read_end_ids
from spmd_lm.errors import Exit
from spmd_lm.evaluation.evaluate import evaluate_run
from spmd_lm.generation.generate import Generator, end_token_ids
from spmd_lm.generation.sampling import Sampling
from spmd_lm.huggingface.config_json import build_config, label_names, parse_config
from spmd_lm.huggingface.directory import make_run_config, open_directory
from spmd_lm.huggingface.safetensors_io import SafetensorsReader
from spmd_lm.huggingface.source_config import restore_keys
from spmd_lm.huggingface.transfer import export_hf, format_result, import_hf, make_sharded_array
from spmd_lm.parallel.trees import leaves_by_path
from spmd_lm.step.program import Program
from spmd_lm.training.loop import train
from tests.data.tokenizers.test_bos import save
from tests.huggingface.small_models import (
    BYTES,
    FLOAT32,
    FLOAT64,
    HF_CONFIG,
    MODELS,
    SMALL,
    import_directory,
    make_directory,
    make_tensors,
)

SLOW = pytest.mark.slow
LAYOUTS = {
    "data8": [],
    "data2-model4": ["parallel.model=4"],
    "pipe2-data2-model2": ["parallel.pipe=2", "parallel.model=2", "parallel.microbatches=2"],
    "zero3": ["parallel.model=2", "parallel.zero=3"],
}


# --- against transformers


@dataclasses.dataclass(frozen=True)
class Rows:
    """Inputs of a model: int32 [rows, time].  real: 1, or 0 for padding, which only BERTs get."""

    tokens: np.ndarray
    types: np.ndarray
    real: np.ndarray


def some_rows(config: RunConfig) -> Rows:
    m, rows, r = config.model, config.train.batch, np.random.default_rng(5)
    time = np.arange(m.context)
    length = np.full((rows, 1), m.context) if m.causal else r.integers(m.context // 2, m.context + 1, (rows, 1))
    tokens = r.integers(0, m.vocab, (rows, m.context), dtype=np.int32)
    types = r.integers(0, max(m.token_types, 1), (rows, m.context), dtype=np.int32)
    return Rows(tokens, types, np.int32(time < length))


def our_logits(program: Program, params, rows: Rows) -> dict[str, np.ndarray]:
    """Logits [rows, ...] by output name."""
    abstract = program.abstract_batch()
    given = {"tokens": rows.tokens, "token_type_ids": rows.types, "segments": rows.real}
    given["positions"] = np.broadcast_to(np.arange(rows.tokens.shape[1], dtype=np.int32), rows.tokens.shape)

    def put(path, leaf):
        value = given.get(path[0].name, np.zeros(math.prod(leaf.shape), leaf.dtype))
        return jax.device_put(value.reshape(leaf.shape), leaf.sharding)

    batch = jax.tree_util.tree_map_with_path(put, abstract)
    made = {name: np.asarray(z) for name, z in program.forward(params, batch).items()}
    made = {name: z.reshape(-1, *z.shape[2:]) for name, z in made.items()}
    return {name: z[..., : program.config.model.vocab] if name == "tokens" else z for name, z in made.items()}


def their_logits(model, rows: Rows) -> dict[str, np.ndarray]:
    import torch

    given = {"input_ids": rows.tokens}
    if model.config.model_type == "bert":
        given |= {"attention_mask": rows.real, "token_type_ids": rows.types}
    kind = type(model).__name__
    if kind == "BertForMultipleChoice":
        given = {name: x.reshape(-1, 4, x.shape[1]) for name, x in given.items()}
    with torch.no_grad():
        out = model(**{name: torch.tensor(x) for name, x in given.items()})
    if kind == "BertForQuestionAnswering":
        return {"spans": np.stack([out.start_logits.numpy(), out.end_logits.numpy()], axis=-1)}
    if kind in ("BertForSequenceClassification", "BertForMultipleChoice"):
        classes = kind == "BertForSequenceClassification"
        return {"classes": out.logits.numpy()} if classes else {"choices": out.logits.numpy().reshape(-1)}
    if "seq_relationship_logits" in out:
        return {"tokens": out.prediction_logits.numpy(), "sentence_order": out.seq_relationship_logits.numpy()}
    return {"tokens": out.logits.numpy()}


def distance(program: Program, params, model) -> float:
    """The largest difference between our logits and theirs, padding excluded; theirs are of order one."""
    rows = some_rows(program.config)
    ours, theirs = our_logits(program, params, rows), their_logits(model, rows)
    assert ours.keys() == theirs.keys()
    is_token = rows.real[..., None].astype(bool)
    mask = {"tokens": is_token, "spans": is_token}
    assert all(0.1 < np.abs(z).max() < 100 for z in theirs.values())
    return max(float(np.abs(np.where(mask.get(name, True), ours[name] - theirs[name], 0)).max()) for name in ours)


def assert_same_tensors(one: Path, other: Path) -> None:
    """Compares names, dtypes, shapes and bits, whichever files they are in."""
    from safetensors.numpy import load_file

    a, b = (
        {k: v for file in sorted(at.glob("*.safetensors")) for k, v in load_file(file).items()} for at in (one, other)
    )
    assert a.keys() == b.keys()
    for name in a:
        assert (a[name].dtype, a[name].shape) == (b[name].dtype, b[name].shape), name
        assert a[name].tobytes() == b[name].tobytes(), name


@pytest.mark.parametrize(
    ("which", "precision", "tolerance"),
    [
        *((which, FLOAT32, 1e-5) for which in ("gpt2", "bert", "llama", "llama-tied")),
        *((which, FLOAT32, 2e-5) for which in ("llama-llama3", "llama-yarn")),
        # In float64 but for Llama, whose angles are float32.
        ("gpt2", FLOAT64, 1e-10),
        *(
            pytest.param(which, FLOAT64, 1e-10, marks=SLOW)
            for which in ("bert-classes", "bert-choices", "bert-spans", "bert-masked", "gpt2-odd", "bert")
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_logits_agree_with_transformers(hf, tmp_path, which, precision, tolerance):
    directory, model = hf(which, precision[0].partition("=")[2])
    program, params, step = open_run(import_directory(directory, tmp_path / "run", *precision))
    assert step == 0
    assert distance(program, params, model) < tolerance


@pytest.mark.parametrize(
    ("which", "layout"),
    [
        *((which, "data2-model4") for which in ("gpt2", "llama")),
        pytest.param("bert", "data2-model4", marks=SLOW),
        *(pytest.param(which, "pipe2-data2-model2", marks=SLOW) for which in ("gpt2", "bert", "llama")),
        ("gpt2", "zero3"),
    ],
)
def test_each_layout_reads_only_its_shards_and_computes_the_same(hf, tmp_path, monkeypatch, which, layout):
    directory, model = hf(which, "float32")
    parts: dict[str, list[int]] = {}
    read = SafetensorsReader.read

    def watched(self, name, index):
        parts.setdefault(name, []).append(math.prod(stop - start for start, stop in index))
        return read(self, name, index)

    monkeypatch.setattr(SafetensorsReader, "read", watched)
    config = import_directory(directory, tmp_path / "run", *FLOAT32, *LAYOUTS[layout])
    program, params, _ = open_run(config)
    assert distance(program, params, model) < 1e-5

    model_dir, p = open_directory(directory), config.parallel
    leaves = leaves_by_path(program.abstract_canonical().params)
    for tensor in model_dir.config.tensors({path: leaf.shape for path, leaf in leaves.items()}):
        size, read_sizes, count = math.prod(tensor.shape), parts[tensor.name], len(tensor.parts)
        for path, leaf in ((part.param, leaves[part.param]) for part in tensor.parts):
            shard, stacked = leaf.sharding.shard_shape(leaf.shape), tensor.parts[0].at != ()
            shard_size = math.prod(shard[1:] if stacked else shard)
            assert shard_size in read_sizes and max(read_sizes) <= size // count, path
            if (stacked and len(shard) == 3) or path.endswith(".tokens"):  # no device holds all, and no read reads all
                split = p.model * (program.plan.layout.data if p.zero else 1)
                assert shard_size * split * count == size and max(read_sizes) == shard_size, path
                assert shard[0] * (p.pipe if stacked else p.model) == leaf.shape[0], path


def test_each_slice_is_read_once_however_many_devices_hold_it():
    mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    asked = []

    def read(part):
        asked.append(part)
        return np.arange(32.0, dtype=np.float32).reshape(4, 8)[tuple(slice(*span) for span in part)]

    for spec, parts in ((P("a", "b"), 8), (P(None, "b"), 4), (P(), 1)):
        leaf = jax.ShapeDtypeStruct((4, 8), np.float32, sharding=jax.sharding.NamedSharding(mesh, spec))
        asked.clear()
        np.testing.assert_array_equal(make_sharded_array(leaf, read), np.arange(32.0).reshape(4, 8))
        assert len(asked) == len(set(asked)) == parts


@pytest.mark.parametrize(
    ("which", "layout"),
    [
        *(pytest.param(which, "data8", marks=SLOW) for which in MODELS),
        pytest.param("gpt2", "pipe2-data2-model2", marks=SLOW),
        ("llama", "zero3"),
        ("bert-classes", "data8"),
    ],
)
def test_export_returns_the_imported_tensors(hf, tmp_path, which, layout):
    directory, model = hf(which, "float32")
    config = import_directory(directory, tmp_path / "run", *LAYOUTS[layout])
    result = export_hf(config, tmp_path / "back", "float32", 5 * 10**9)
    assert_same_tensors(directory, tmp_path / "back")
    given, exported = (json.loads((each / "config.json").read_text()) for each in (directory, tmp_path / "back"))
    if given.get("label2id", {}) is None:  # which ours says
        given["label2id"] = {name: int(label) for label, name in given["id2label"].items()}
    assert {key: exported.get(key, "absent") for key in given} == given and result["left_out"] == ["optimizer state"]
    loaded = type(model).from_pretrained(tmp_path / "back", attn_implementation="eager").eval()
    assert (loaded.config.eos_token_id, str(loaded.dtype)) == (2, "torch.float32")  # 2: from config.json
    rows = some_rows(config)
    theirs, again = their_logits(model, rows), their_logits(loaded, rows)
    for name, z in theirs.items():
        np.testing.assert_array_equal(again[name], z)


def test_large_models_are_exported_in_shards_and_imported_from_them(hf, tmp_path):
    directory, model = hf("gpt2", "float32")
    config = import_directory(directory, tmp_path / "run")
    result = export_hf(config, tmp_path / "parts", "float32", 64_000)
    sizes = [file.stat().st_size for file in (tmp_path / "parts").glob("*.safetensors")]
    assert len(sizes) > 2 and max(sizes) < 64_000 + 4096 and "model.safetensors.index.json" in result["files"]
    assert_same_tensors(directory, tmp_path / "parts")
    loaded = type(model).from_pretrained(tmp_path / "parts")
    assert all((p == q).all() for p, q in zip(loaded.parameters(), model.parameters(), strict=True))
    again = import_directory(tmp_path / "parts", tmp_path / "again")
    for a, b in zip(*(jax.tree.leaves(restore_run(c)[1]) for c in (config, again)), strict=True):
        np.testing.assert_array_equal(a, b)


def test_bfloat16_export_rounds_like_torch_and_can_be_imported(hf, tmp_path):
    import torch

    directory, model = hf("gpt2", "float32")
    export_hf(import_directory(directory, tmp_path / "run"), tmp_path / "half", "bfloat16", 10**9)
    loaded = type(model).from_pretrained(tmp_path / "half")
    assert loaded.dtype == torch.bfloat16
    for p, q in zip(loaded.parameters(), model.parameters(), strict=True):
        assert (p == q.bfloat16()).all()
    config = import_directory(tmp_path / "half", tmp_path / "again")
    table = restore_run(config)[1]["embedding"]["tokens"]
    assert table.dtype == np.float32
    np.testing.assert_array_equal(table, loaded.transformer.wte.weight.detach().float().numpy())


@pytest.mark.parametrize(("which", "summary"), [("gpt2", "gpt2 of 53,440"), ("llama", "llama of 35,104")])
def test_greedy_tokens_agree_with_transformers(hf, tmp_path, capsys, which, summary):
    import torch

    directory, model = hf(which, "float32")
    run = str(tmp_path / "run")
    assert main(["import", str(directory), run, *FLOAT32, *SMALL, "parallel.model=2"]) == 0
    assert f"{summary} parameters, step 0" in capsys.readouterr().out
    assert main(["generate", run, "--prompt", "3 1 4", "--tokens", "9", "--greedy"]) == 0
    begun = torch.tensor([[3, 1, 4]])
    with torch.no_grad():
        how = {"do_sample": False, "eos_token_id": 2, "pad_token_id": 0, "attention_mask": torch.ones_like(begun)}
        theirs = model.generate(begun, max_new_tokens=9, **how)[0].tolist()
    theirs = theirs[: theirs.index(2)] if 2 in theirs else theirs  # what ends a text is not shown
    assert capsys.readouterr().out.split() == [str(token) for token in theirs]


def their_nll(logits: np.ndarray, targets: np.ndarray, weights: np.ndarray) -> float:
    """The weighted mean."""
    z = logits.astype(np.float64)
    z = np.log(np.exp(z).sum(-1)) - np.take_along_axis(z, targets[..., None], -1)[..., 0]
    return float((z * weights).sum() / weights.sum())


@pytest.mark.parametrize("which", ["bert", "llama"])
def test_losses_agree_with_transformers(hf, tmp_path, which):
    """The text is held out.  BERT's labels agree too: 0 where the second segment follows the first."""
    directory, model = hf(which, "float32")
    config = import_directory(directory, tmp_path / "run", *FLOAT32)
    program, corpus = Program(config), load_data(config.data, config.train.seed, config.model.vocab)
    loader = make_loader(config, corpus, "validation")
    batch = jax.tree.map(lambda x: np.asarray(x)[0], loader.batch(0, program.batch_shardings))
    z = their_logits(model, Rows(batch.tokens, batch.token_type_ids, batch.segments))
    figures = evaluate_run(config)
    want = their_nll(z["tokens"], batch.targets, batch.loss_weights)
    if which == "bert":
        order = their_nll(z["sentence_order"], batch.labels, batch.label_weights)
        assert figures["eval_masked_lm_loss"] == pytest.approx(want, abs=1e-5)
        assert figures["eval_sentence_order_loss"] == pytest.approx(order, abs=1e-5)
        want += order
    assert figures["eval_loss"] == pytest.approx(want, abs=1e-5)


@pytest.mark.slow
def test_an_imported_run_can_be_evaluated_and_trained(hf, tmp_path, capsys):
    directory, model = hf("gpt2", "float32")
    config = import_directory(directory, tmp_path / "run", *FLOAT32, "model.dropout=0", "model.attention_dropout=0")
    corpus = load_data(config.data, config.train.seed, config.model.vocab)

    batch = make_loader(config, corpus, "training").batch(0, Program(config).batch_shardings)
    tokens, targets, weights = (np.asarray(x)[0] for x in (batch.tokens, batch.targets, batch.loss_weights))
    first = their_nll(their_logits(model, Rows(tokens, tokens, tokens))["tokens"], targets, weights)
    assert evaluate_run(config)["step"] == 0
    steps = {"steps": 2, "log_every": 1}
    config = config.model_copy(update={"train": config.train.model_copy(update=steps)})
    assert train(config) == Exit.DONE
    output = capsys.readouterr().out
    assert "resuming after step 0 of 2" in output and "other batches" not in output
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == [1, 2]
    assert records[0]["loss"] == pytest.approx(first, abs=1e-5)
    assert Checkpointer(tmp_path / "run" / "checkpoints").latest_step() == 2


# --- without transformers


def test_legacy_names_and_buffers_are_read(tmp_path):
    tensors = {name.removeprefix("transformer."): x for name, x in make_tensors().items()}
    mask = np.tril(np.ones((1, 1, 16, 16), np.float32))
    buffers = {f"h.{layer}.attn.bias": mask for layer in range(4)} | {"lm_head.weight": tensors["wte.weight"]}
    configs = [
        import_directory(make_directory(tmp_path / name, made), tmp_path / f"run-{name}")
        for name, made in {"new": make_tensors(), "old": tensors | buffers}.items()
    ]
    for a, b in zip(*(jax.tree.leaves(restore_run(config)[1]) for config in configs), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_bert_keeps_the_heads_in_its_files(hf, tmp_path):
    """The original BERTs name the class without the next-sentence head, and their files have that head."""
    directory, _ = hf("bert", "float32")
    shutil.copytree(directory, tmp_path / "model")
    hf_config = json.loads((directory / "config.json").read_text()) | {"architectures": ["BertForMaskedLM"]}
    (tmp_path / "model" / "config.json").write_text(json.dumps(hf_config))
    model_dir = open_directory(tmp_path / "model")
    assert make_run_config(model_dir, "run", None, SMALL).objective.sentence_order
    config = make_run_config(model_dir, str(tmp_path / "run"), None, [*SMALL, "objective.sentence_order=false"])
    left = [name for name in model_dir.reader.tensors if "pooler" in name or "seq_relationship" in name]
    assert import_hf(model_dir, config)["unread"] == sorted(left) and len(left) == 4


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float64])
def test_other_float_dtypes_are_cast(tmp_path, dtype):
    tensors = make_tensors(dtype=dtype)
    params = restore_run(import_directory(make_directory(tmp_path / "model", tensors), tmp_path / "run"))[1]
    table = params["embedding"]["tokens"]
    assert table.dtype == np.float32
    np.testing.assert_array_equal(table, tensors["transformer.wte.weight"].astype(np.float32))


TOKENIZER_FILES = {
    "vocab.json": json.dumps({f"t{i}": i for i in range(64)}),
    "merges.txt": "#version: 0.2\n",
    "tokenizer_config.json": '{"chat_template": [{"name": "default", "template": "{{ messages }}"}], "other": [1]}',
    "special_tokens_map.json": '{"eos_token": "t3"}',
    "added_tokens.json": '{"t63": 63}',
    "generation_config.json": '{"eos_token_id": 3, "temperature": 0.7, "_from_model_config": true}',
    "chat_template.jinja": "{{ messages }}",
    "additional_chat_templates/tools.jinja": "{{ tools }}",
    "additional_chat_templates/rag.jinja": "{{ documents }}",
}
OTHER_KEYS = {"n_inner": None, "activation_function": "gelu_pytorch_tanh", "layer_norm_epsilon": 1e-05, "n_ctx": 16}
OTHER_KEYS |= {
    "initializer_range": 0.02,
    "task_specific_params": {"text-generation": {"max_length": 50}},
    "use_cache": True,
}
OTHER_KEYS |= {"summary_type": "cls_index", "scale_attn_weights": True, "quantization_config": None, "bos_token_id": 2}
OTHER_KEYS |= {
    "_name_or_path": "gpt2",
    "transformers_version": "4.1",
    "id2label": {"0": "a"},
    "unknown": {"of": ["ours"]},
}
OTHER_KEYS |= {"problem_type": None, "eos_token_id": [3, 4]}


@pytest.mark.parametrize(
    ("dtype", "key"), [(np.float32, "torch_dtype"), (np.float16, "dtype"), (ml_dtypes.bfloat16, "torch_dtype")]
)
def test_a_model_comes_back_with_every_file_key_and_bit(tmp_path, dtype, key):
    name = np.dtype(dtype).name
    hf_config = HF_CONFIG | OTHER_KEYS | {key: name}
    directory = make_directory(tmp_path / "model", make_tensors(dtype=dtype), hf_config, most=64_000)
    (directory / "additional_chat_templates").mkdir()
    for file, text in TOKENIZER_FILES.items():
        (directory / file).write_text(text)
    for file in ("README.md", "additional_chat_templates/notes.txt"):
        (directory / file).write_text("stays")
    config = import_directory(directory, tmp_path / "run")
    result = export_hf(config, tmp_path / "back", name, 64_000)

    left = {"README.md", "additional_chat_templates/notes.txt"}
    files = {str(path.relative_to(directory)): path for path in directory.rglob("*") if path.is_file()}
    back = {str(path.relative_to(tmp_path / "back")) for path in (tmp_path / "back").rglob("*") if path.is_file()}
    assert back == files.keys() - left == {*result["files"], "config.json"} and TOKENIZER_FILES.keys() < back
    for file in TOKENIZER_FILES:
        assert (tmp_path / "back" / file).read_bytes() == files[file].read_bytes(), file
    assert_same_tensors(directory, tmp_path / "back")  # in another order
    exported = json.loads((tmp_path / "back" / "config.json").read_text())
    assert {key: exported.get(key, "absent") for key in hf_config} == hf_config
    ours = {"embd_pdrop", "resid_pdrop", "attn_pdrop", "tie_word_embeddings"}  # defaults that the source leaves out
    assert exported.keys() - hf_config.keys() == ours and result["left_out"] == ["optimizer state"]


CLASSIFIER = {"architectures": ["BertForSequenceClassification"], "model_type": "bert", **BYTES}
CLASSIFIER |= {"id2label": {"0": "no", "1": "yes"}, "label2id": {"no": 0, "yes": 1}}
DROPOUTS = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}


@pytest.mark.parametrize(
    ("source", "task", "step", "lost"),
    [
        ({"num_labels": 2, "problem_type": "single_label_classification", "finetuning_task": "x"}, "cola", 0, {}),
        ({"num_labels": 2, "problem_type": "multi_label_classification", "finetuning_task": "x"}, "jsonl", 3,
         {"num_labels": None, "problem_type": None, "finetuning_task": None}),
        ({}, "cola", 3, {"id2label": {"0": "unacceptable", "1": "acceptable"}}),
        ({"architectures": ["BertForMaskedLM"], "problem_type": "x"}, "jsonl", 0,
         {"architectures": CLASSIFIER["architectures"], "problem_type": None}),
        ({"id2label": {"0": "a", "1": "b", "2": "c"}}, "jsonl", 0, {"id2label": {"0": "LABEL_0", "1": "LABEL_1"}}),
        ({"hidden_dropout_prob": 0.5, "attention_probs_dropout_prob": 0}, "jsonl", 0, DROPOUTS),
        ({"auto_map": {"AutoModel": "org/name--modeling.Bert"}}, "jsonl", 0, {"auto_map": None}),
        ({"dtype": "float16"}, "jsonl", 0, {"dtype": None}),
        ({"position_embedding_type": "relative_key"}, "jsonl", 0, {"position_embedding_type": None, "other": None}),
        ({"hidden_size": 64, "eos_token_id": 9}, "jsonl", 0, {"hidden_size": 32, "other": None}),
        ({"model_type": "llama", "architectures": ["LlamaForCausalLM"]}, "jsonl", 0,
         {"model_type": "bert", "architectures": CLASSIFIER["architectures"], "other": None}),
    ],
)  # fmt: skip
def test_keys_that_the_model_or_its_training_made_false_do_not_come_back(source, task, step, lost):
    """lost: what an export has in place of keys of the source, None for keys that it lacks."""
    objective = Classification(kind="classification", classes=2)
    config = SimpleNamespace(objective=objective, data=SimpleNamespace(task=task))
    built = parse_and_build(CLASSIFIER, objective)
    source = CLASSIFIER | {"other": [1], "eos_token_id": 7} | source
    expected = source | lost
    exported = restore_keys(built, source, config, step)
    checked = source.keys() - {"label2id"}
    assert {key: exported.get(key) for key in checked} == {key: expected[key] for key in checked}
    assert exported["label2id"] == {name: int(label) for label, name in exported["id2label"].items()}


def parse_and_build(hf_config: dict, objective) -> dict:
    """The config.json that the configuration of an imported one makes."""
    model = parse_config(hf_config).model
    return build_config(Model.model_validate(model), objective)[1]


def test_what_a_dtype_cannot_hold_is_not_exported(tmp_path, capsys):
    tensors = make_tensors()
    tensors["transformer.wte.weight"][3, 5] = 1e5
    import_directory(make_directory(tmp_path / "model", tensors), tmp_path / "run")
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "back"), "--dtype", "float16"]) == Exit.NON_FINITE
    assert "transformer.wte.weight has values up to 1e+05, which are not finite in float16" in capsys.readouterr().err
    assert not (tmp_path / "back").exists()


@pytest.mark.parametrize(
    ("files", "ends"),
    [
        ({"config.json": 7}, [7]),
        ({"config.json": [3, 9, 60]}, [3, 9, 60]),
        ({"config.json": 7, "generation_config.json": [5, 6]}, [5, 6]),
        ({"config.json": 7, "generation_config.json": None}, [7]),
        ({"config.json": None}, []),
    ],
)
def test_text_ends_where_the_models_own_files_say_and_export_says_so_too(directory, tmp_path, files, ends):
    for name, value in files.items():
        settings = json.loads((directory / name).read_text()) if name == "config.json" else {}
        (directory / name).write_text(json.dumps(settings | {"eos_token_id": value}))
    config = import_directory(directory, tmp_path / "run")
    assert end_token_ids(config, NumberTokenizer()) == ends
    generator = Generator(Program(config), 2, Sampling(tokens=2), NumberTokenizer())
    assert [generator.length(np.array([1, 2, end, 4, end])) for end in ends] == [2] * len(ends)
    assert generator.length(np.array([1, 2])) == 2
    export_hf(config, tmp_path / "back", "float32", 10**9)
    for name, value in files.items():
        assert json.loads((tmp_path / "back" / name).read_text())["eos_token_id"] == value


def test_a_run_that_takes_over_a_tokenizer_takes_over_what_ends_a_text(directory, tmp_path):
    save(directory, ["<s>"])
    (directory / "config.json").write_text(json.dumps(HF_CONFIG | {"eos_token_id": [2, 3]}))
    keep_vocabulary(open_tokenizer(str(directory)), str(directory), tmp_path / "kept")
    assert read_end_ids(tmp_path / "kept") == [2, 3]


@pytest.mark.parametrize("difference", [0.0, 0.25])
def test_a_head_that_a_tied_model_does_not_use_is_told(tmp_path, difference):
    tensors = make_tensors()
    head = tensors["transformer.wte.weight"].copy()
    head[-1, -1] += difference
    directory = make_directory(tmp_path / "model", tensors | {"lm_head.weight": head})
    (directory / "README.md").write_text("stays")
    model_dir = open_directory(directory)
    result = import_hf(model_dir, make_run_config(model_dir, str(tmp_path / "run"), None, SMALL))
    warned = "lm_head.weight is not the token table: they differ by up to 0.25. config.json ties them"
    assert warned in format_result(result) if difference else not result["warning"]
    assert "README.md" in result["unread"]


@pytest.mark.parametrize(
    ("task", "source", "is_trained", "names"),
    [
        ("mnli", {}, True, ["entailment", "neutral", "contradiction"]),
        ("jsonl", {"id2label": {"0": "no", "1": "maybe", "2": "yes"}}, True, ["no", "maybe", "yes"]),
        ("mnli", {"id2label": {"0": "no", "1": "maybe", "2": "yes"}}, False, ["no", "maybe", "yes"]),
        ("jsonl", {}, True, []),
        ("jsonl", {"id2label": {"0": "no", "1": "no", "2": "yes"}}, True, []),
        ("jsonl", {"id2label": {"0": 1, "1": [], "2": None}}, True, []),
        ("jsonl", {"id2label": ["no", "maybe", "yes"]}, True, []),
    ],
)
def test_classes_keep_their_names(task, source, is_trained, names):
    config = SimpleNamespace(
        objective=Classification(kind="classification", classes=3), data=SimpleNamespace(task=task)
    )
    found = label_names(config, source, is_trained)
    numbers = {name: label for label, name in enumerate(names)}
    assert found.get("label2id", {}) == numbers
    assert found.get("id2label", {}) == {str(label): name for name, label in numbers.items()}


def test_a_model_with_its_tokenizer_reads_and_writes_text(tmp_path, capsys):
    hf_config = HF_CONFIG | {"vocab_size": 264}
    directory = make_directory(tmp_path / "model", make_tensors(hf_config), hf_config)
    pieces = ["[UNK]", *map(chr, range(33, 127))]
    (directory / "vocab.txt").write_text("\n".join(pieces) + "\n")
    config = import_directory(directory, tmp_path / "run", *FLOAT32, "data.source=text", "data.path=x")
    assert (config.data.source, config.data.tokenizer) == ("text", str(tmp_path / "run" / "tokenizer"))
    (tmp_path / "run").rename(tmp_path / "moved")
    moved = load_run(tmp_path / "moved", ["data.source=python-stdlib"])
    assert (moved.data.source, moved.data.tokenizer) == ("python-stdlib", str(tmp_path / "moved" / "tokenizer"))
    assert main(["generate", str(tmp_path / "moved"), "--prompt", "x", "--tokens", "2", "--greedy"]) == 0
    assert capsys.readouterr().out.startswith("x")


def test_training_settings_come_from_a_file_and_the_command_line(directory, tmp_path, capsys):
    base = tmp_path / "base.yaml"
    base.write_text("model: {width: 512, scan: false}\ntrain: {steps: 7, batch: 16}\noptim: {lr: 1e-3}\n")
    line = ["import", str(directory), str(tmp_path / "run"), "--config", str(base), "train.batch=8", "model.dropout=0"]
    assert main([*line, "--json", "-"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["directory"], result["parameters"], result["unread"]) == (str(tmp_path / "run"), 53_440, [])
    config = load(tmp_path / "run" / "config.yaml")
    assert (config.model.width, config.model.scan, config.model.dropout) == (32, False, 0)
    assert (config.train.steps, config.train.batch, config.optim.lr, config.optim.b2) == (7, 8, 1e-3, 0.999)
    assert config.run.directory == tmp_path / "run"
