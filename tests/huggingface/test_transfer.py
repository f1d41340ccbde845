"""Imported models compute what Hugging Face's own compute, exported ones are theirs bit for bit, and what cannot be
imported is refused before anything is left behind."""

import dataclasses
import functools
import json
import math
import os
import shutil
import signal
import struct
import subprocess
import sys
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from spmd_lm.checkpoints.checkpointer import Checkpointer
from spmd_lm.cli import main
from spmd_lm.config.load import load, load_run
from spmd_lm.config.schema import RunConfig
from spmd_lm.data.corpus import load as load_corpus
from spmd_lm.data.loader import training, validation
from spmd_lm.errors import ConfigError, Exit, UserError
from spmd_lm.evaluation.evaluate import evaluate_run, open_run, restore_run
from spmd_lm.huggingface.directory import configure, open_directory
from spmd_lm.huggingface.safetensors_io import Planned, Tensors, write
from spmd_lm.huggingface.transfer import export_run, filled, import_run, locate, paths, read_params
from spmd_lm.step.program import Program
from spmd_lm.training.loop import train

FLOAT32 = [f"precision.{key}=float32" for key in ("params", "compute", "reduce")]
FLOAT64 = [f"precision.{key}=float64" for key in ("params", "compute", "reduce")]
SMALL = ["train.batch=8", "train.eval_batches=1"]
LAYOUTS = {
    "data8": [],
    "data2-model4": ["parallel.model=4"],
    "pipe2-data2-model2": ["parallel.pipe=2", "parallel.model=2", "parallel.microbatches=2"],
    "zero3": ["parallel.model=2", "parallel.zero=3"],
}

GPT2 = {"vocab_size": 64, "n_positions": 16, "n_embd": 32, "n_layer": 4, "n_head": 4}
ODD = {"vocab_size": 61, "n_positions": 12, "n_embd": 24, "n_layer": 1, "n_head": 2, "n_inner": 40}
ODD |= {"activation_function": "gelu", "tie_word_embeddings": False, "layer_norm_epsilon": 1e-3}
SIZES = {"vocab_size": 64, "max_position_embeddings": 16, "hidden_size": 32, "num_hidden_layers": 4}
SIZES |= {"num_attention_heads": 8, "intermediate_size": 48}
GROUPED = SIZES | {"num_key_value_heads": 4, "rope_parameters": {"rope_type": "default", "rope_theta": 100.0}}
WORDS = SIZES | {"vocab_size": 264}  # bytes, and what hides them
MODELS = {
    "gpt2": ("GPT2LMHeadModel", GPT2),
    "gpt2-odd": ("GPT2LMHeadModel", ODD),
    "bert": ("BertForPreTraining", WORDS),
    "bert-masked": (
        "BertForMaskedLM",
        WORDS | {"type_vocab_size": 3, "hidden_act": "gelu_new", "layer_norm_eps": 1e-3},
    ),
    "bert-classes": ("BertForSequenceClassification", WORDS | {"id2label": {0: "a", 1: "b", 2: "c"}}),
    "bert-choices": ("BertForMultipleChoice", WORDS),
    "bert-spans": ("BertForQuestionAnswering", WORDS),
    "llama": ("LlamaForCausalLM", GROUPED),
    "llama-tied": ("LlamaForCausalLM", SIZES | {"tie_word_embeddings": True, "rms_norm_eps": 1e-3}),
}
FILES = ["data.source=task", "data.path=train", "data.validation_path=dev"]  # which nobody opens here
TASKS = {
    "classification": [*FILES, "data.task=jsonl"],
    "multiple_choice": [*FILES, "data.task=race", "train.batch=32"],  # a question for each of eight devices
    "span": [*FILES, "data.task=squad"],
}


# --- what they compute ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def hf(tmp_path_factory):
    """A model of transformers with every parameter drawn, biases and norms as well, saved as it saves itself.

    (a name in MODELS, dtype) -> (its directory, the model in that dtype)."""
    reason = "the extra `hf` is not installed"
    torch = pytest.importorskip("torch", reason=reason)
    transformers = pytest.importorskip("transformers", reason=reason)
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)

    @functools.cache
    def make(which: str, dtype: str):
        name, said = MODELS[which]
        config = getattr(transformers, name).config_class(**said, bos_token_id=1, eos_token_id=2)
        model = getattr(transformers, name)._from_config(config, attn_implementation="eager").eval()
        draw = torch.Generator().manual_seed(7)
        with torch.no_grad():
            for path, p in model.named_parameters():
                norm = p.ndim == 1 and path.endswith("weight")
                p.copy_(torch.randn(p.shape, generator=draw) * 0.2 + norm)
        model = model.to(getattr(torch, dtype))
        directory = tmp_path_factory.mktemp(which)
        model.save_pretrained(directory)
        return directory, model

    return make


def take_in(directory: Path, run: Path, *overrides: str):
    """The configuration of the run made of a directory."""
    found = open_directory(directory)
    config = configure(found, str(run), None, [*SMALL, *TASKS.get(found.description.objective["kind"], []), *overrides])
    import_run(found, config)
    return config


@dataclasses.dataclass(frozen=True)
class Rows:
    """What models are asked: int32 [rows, time].  real: 1, and 0 for padding, which BERTs have."""

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
    """By what they are of; [rows, ...]."""
    abstract = program.abstract_batch()
    given = {"tokens": rows.tokens, "types": rows.types, "segments": rows.real}
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
    """The largest difference of a logit from theirs, of tokens that are no padding; theirs are of order one."""
    rows = some_rows(program.config)
    ours, theirs = our_logits(program, params, rows), their_logits(model, rows)
    assert ours.keys() == theirs.keys()
    of_tokens = rows.real[..., None].astype(bool)
    mask = {"tokens": of_tokens, "spans": of_tokens}
    assert all(0.1 < np.abs(z).max() < 100 for z in theirs.values())
    return max(float(np.abs(np.where(mask.get(name, True), ours[name] - theirs[name], 0)).max()) for name in ours)


def assert_same_tensors(one: Path, other: Path) -> None:
    """Names, types, shapes and bits, whichever files they are in."""
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
        *((which, FLOAT64, 1e-10) for which in ("bert-classes", "bert-choices", "bert-spans")),
        *(
            (which, FLOAT64, 1e-10) for which in ("gpt2", "gpt2-odd", "bert", "bert-masked")
        ),  # llama's angles are float32
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_logits_are_theirs(hf, tmp_path, which, precision, tolerance):
    directory, model = hf(which, precision[0].partition("=")[2])
    program, params, step = open_run(take_in(directory, tmp_path / "run", *precision))
    assert step == 0
    assert distance(program, params, model) < tolerance


@pytest.mark.parametrize(
    ("which", "layout"),
    [
        *((which, layout) for which in ("gpt2", "bert", "llama") for layout in LAYOUTS if "model" in layout),
        ("gpt2", "zero3"),
    ],
)
def test_any_layout_reads_its_own_parts_and_computes_the_same(hf, tmp_path, monkeypatch, which, layout):
    directory, model = hf(which, "float32")
    parts: dict[str, list[int]] = {}
    read = Tensors.read

    def watched(self, name, index):
        parts.setdefault(name, []).append(math.prod(stop - start for start, stop in index))
        return read(self, name, index)

    monkeypatch.setattr(Tensors, "read", watched)
    config = take_in(directory, tmp_path / "run", *FLOAT32, *LAYOUTS[layout])
    program, params, _ = open_run(config)
    assert distance(program, params, model) < 1e-5

    found, p = open_directory(directory), config.parallel
    rows = {row.ours: row for row in found.description.architecture.rows}
    for path, leaf in paths(program.abstract_canonical().params).items():
        row, mine = rows[path], leaf.sharding.shard_shape(leaf.shape)
        name = row.theirs.format(layer=0)
        whole = math.prod(found.tensors.stored[name].shape)
        here = math.prod(mine[row.stacked :])
        assert here in parts[name] and max(parts[name]) <= whole // row.parts, path
        if (row.stacked and len(mine) == 3) or path.endswith(".tokens"):  # no device and no read has a whole one
            split = p.model * (program.plan.layout.data if p.zero else 1)
            assert here * split * row.parts == whole and max(parts[name]) == here, path
            assert mine[0] * (p.pipe if row.stacked else p.model) == leaf.shape[0], path


def test_each_part_is_read_once_however_many_devices_hold_it():
    mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    asked = []

    def read(part):
        asked.append(part)
        return np.arange(32.0, dtype=np.float32).reshape(4, 8)[tuple(slice(*span) for span in part)]

    for spec, parts in ((P("a", "b"), 8), (P(None, "b"), 4), (P(), 1)):
        leaf = jax.ShapeDtypeStruct((4, 8), np.float32, sharding=jax.sharding.NamedSharding(mesh, spec))
        asked.clear()
        np.testing.assert_array_equal(filled(leaf, read), np.arange(32.0).reshape(4, 8))
        assert len(asked) == len(set(asked)) == parts


@pytest.mark.parametrize(
    ("which", "layout"), [*((which, "data8") for which in MODELS), ("gpt2", "pipe2-data2-model2"), ("llama", "zero3")]
)
def test_export_gives_the_same_tensors_back(hf, tmp_path, which, layout):
    directory, model = hf(which, "float32")
    config = take_in(directory, tmp_path / "run", *LAYOUTS[layout])
    export_run(config, tmp_path / "back", "float32", 5 * 10**9)
    assert_same_tensors(directory, tmp_path / "back")
    loaded = type(model).from_pretrained(tmp_path / "back", attn_implementation="eager").eval()
    assert (loaded.config.eos_token_id, str(loaded.dtype)) == (2, "torch.float32")  # the first was carried along
    rows = some_rows(config)
    theirs, again = their_logits(model, rows), their_logits(loaded, rows)
    for name, z in theirs.items():
        np.testing.assert_array_equal(again[name], z)


def test_large_models_are_exported_in_several_files_and_read_from_them(hf, tmp_path):
    directory, model = hf("gpt2", "float32")
    config = take_in(directory, tmp_path / "run")
    result = export_run(config, tmp_path / "parts", "float32", 64_000)
    sizes = [file.stat().st_size for file in (tmp_path / "parts").glob("*.safetensors")]
    assert len(sizes) > 2 and max(sizes) < 64_000 + 4096 and "model.safetensors.index.json" in result["files"]
    assert_same_tensors(directory, tmp_path / "parts")
    loaded = type(model).from_pretrained(tmp_path / "parts")
    assert all((p == q).all() for p, q in zip(loaded.parameters(), model.parameters(), strict=True))
    again = take_in(tmp_path / "parts", tmp_path / "again")
    for a, b in zip(*(jax.tree.leaves(restore_run(c)[1]) for c in (config, again)), strict=True):
        np.testing.assert_array_equal(a, b)


def test_bfloat16_is_rounded_as_torch_rounds_it_and_read_again(hf, tmp_path):
    import torch

    directory, model = hf("gpt2", "float32")
    export_run(take_in(directory, tmp_path / "run"), tmp_path / "half", "bfloat16", 10**9)
    loaded = type(model).from_pretrained(tmp_path / "half")
    assert loaded.dtype == torch.bfloat16
    for p, q in zip(loaded.parameters(), model.parameters(), strict=True):
        assert (p == q.bfloat16()).all()
    config = take_in(tmp_path / "half", tmp_path / "again")
    table = restore_run(config)[1]["embedding"]["tokens"]
    assert table.dtype == np.float32
    np.testing.assert_array_equal(table, loaded.transformer.wte.weight.detach().float().numpy())


@pytest.mark.parametrize(("which", "told"), [("gpt2", "gpt2 of 53,440"), ("llama", "llama of 35,104")])
def test_the_likeliest_tokens_are_theirs(hf, tmp_path, capsys, which, told):
    import torch

    directory, model = hf(which, "float32")
    run = str(tmp_path / "run")
    assert main(["import", str(directory), run, *FLOAT32, *SMALL, "parallel.model=2"]) == 0
    assert f"{told} parameters, step 0" in capsys.readouterr().out
    assert main(["generate", run, "--prompt", "3 1 4", "--tokens", "9", "--greedy"]) == 0
    begun = torch.tensor([[3, 1, 4]])
    with torch.no_grad():
        how = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "attention_mask": torch.ones_like(begun)}
        theirs = model.generate(begun, max_new_tokens=9, **how)
    assert capsys.readouterr().out.split() == [str(token) for token in theirs[0].tolist()]


def their_nll(logits: np.ndarray, targets: np.ndarray, weights: np.ndarray) -> float:
    """The weighted mean."""
    z = logits.astype(np.float64)
    z = np.log(np.exp(z).sum(-1)) - np.take_along_axis(z, targets[..., None], -1)[..., 0]
    return float((z * weights).sum() / weights.sum())


@pytest.mark.parametrize("which", ["bert", "llama"])
def test_an_imported_run_has_their_losses(hf, tmp_path, which):
    """Of held-out text; a row's label is theirs too: 0 where its second part follows its first."""
    directory, model = hf(which, "float32")
    config = take_in(directory, tmp_path / "run", *FLOAT32)
    program, corpus = Program(config), load_corpus(config.data, config.train.seed, config.model.vocab)
    batch = jax.tree.map(lambda x: np.asarray(x)[0], validation(config, corpus).batch(0, program.batch_shardings))
    z = their_logits(model, Rows(batch.tokens, batch.types, batch.segments))
    figures = evaluate_run(config)
    want = their_nll(z["tokens"], batch.targets, batch.weights)
    if which == "bert":
        order = their_nll(z["sentence_order"], batch.labels, batch.label_weights)
        assert figures["eval_masked_lm_loss"] == pytest.approx(want, abs=1e-5)
        assert figures["eval_sentence_order_loss"] == pytest.approx(order, abs=1e-5)
        want += order
    assert figures["eval_loss"] == pytest.approx(want, abs=1e-5)


def test_an_imported_run_is_evaluated_and_trained_from_there(hf, tmp_path, capsys):
    directory, model = hf("gpt2", "float32")
    config = take_in(directory, tmp_path / "run", *FLOAT32, "model.dropout=0", "model.attention_dropout=0")
    corpus = load_corpus(config.data, config.train.seed, config.model.vocab)

    batch = training(config, corpus).batch(0, Program(config).batch_shardings)
    tokens, targets, weights = (np.asarray(x)[0] for x in (batch.tokens, batch.targets, batch.weights))
    first = their_nll(their_logits(model, Rows(tokens, tokens, tokens))["tokens"], targets, weights)
    assert evaluate_run(config)["step"] == 0
    steps = {"steps": 2, "log_every": 1}
    config = config.model_copy(update={"train": config.train.model_copy(update=steps)})
    assert train(config) == Exit.DONE
    said = capsys.readouterr().out
    assert "resuming after step 0 of 2" in said and "other batches" not in said
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == [1, 2]
    assert records[0]["loss"] == pytest.approx(first, abs=1e-5)
    assert Checkpointer(tmp_path / "run" / "checkpoints").latest_step() == 2


# --- without torch ----------------------------------------------------------------------------------------------------


SAID = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], **GPT2}


def make_tensors(said: dict = SAID, dtype=np.float32) -> dict[str, np.ndarray]:
    """Random weights of a tied GPT-2, by their names."""
    w, r = said["n_embd"], np.random.default_rng(3)
    block = {"ln_1.weight": (w,), "ln_1.bias": (w,), "ln_2.weight": (w,), "ln_2.bias": (w,)}
    block |= {"attn.c_attn.weight": (w, 3 * w), "attn.c_attn.bias": (3 * w,), "attn.c_proj.weight": (w, w)}
    block |= {"attn.c_proj.bias": (w,), "mlp.c_fc.weight": (w, 4 * w), "mlp.c_fc.bias": (4 * w,)}
    block |= {"mlp.c_proj.weight": (4 * w, w), "mlp.c_proj.bias": (w,)}
    shapes = {"wte.weight": (said["vocab_size"], w), "wpe.weight": (said["n_positions"], w)}
    shapes |= {"ln_f.weight": (w,), "ln_f.bias": (w,)}
    shapes |= {f"h.{layer}.{name}": shape for layer in range(said["n_layer"]) for name, shape in block.items()}
    return {f"transformer.{name}": r.normal(size=shape).astype(dtype) for name, shape in shapes.items()}


def make_directory(path: Path, tensors: dict[str, np.ndarray], said: dict = SAID, most: int = 10**9) -> Path:
    path.mkdir()
    (path / "config.json").write_text(json.dumps(said))
    write(path, [Planned(n, x.shape, x.dtype) for n, x in tensors.items()], iter(tensors.values()), most)
    return path


@pytest.fixture
def directory(tmp_path) -> Path:
    return make_directory(tmp_path / "model", make_tensors())


def errors(capsys, line: list[str], code: int = Exit.CONFIG) -> list[str]:
    assert main(line) == code
    out, err = capsys.readouterr()
    assert out == ""
    return [each.removeprefix("error: ") for each in err.splitlines()]


def refused(capsys, directory: Path, *overrides: str) -> list[str]:
    """What import says; it leaves nothing behind, and changes nothing."""
    parent = directory.parent
    before = sorted(str(path) for path in parent.rglob("*"))
    told = errors(capsys, ["import", str(directory), str(parent / "deep" / "run"), *SMALL, *overrides])
    assert sorted(str(path) for path in parent.rglob("*")) == before
    return told


def test_older_names_and_buffers_are_read_too(tmp_path):
    tensors = {name.removeprefix("transformer."): x for name, x in make_tensors().items()}
    mask = np.tril(np.ones((1, 1, 16, 16), np.float32))
    buffers = {f"h.{layer}.attn.bias": mask for layer in range(4)} | {"lm_head.weight": tensors["wte.weight"]}
    configs = [
        take_in(make_directory(tmp_path / name, made), tmp_path / f"run-{name}")
        for name, made in {"new": make_tensors(), "old": tensors | buffers}.items()
    ]
    for a, b in zip(*(jax.tree.leaves(restore_run(config)[1]) for config in configs), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_bert_keeps_the_heads_that_its_files_have(hf, tmp_path):
    """As the first BERTs: of the smaller class by name, and in files of the larger one."""
    directory, _ = hf("bert", "float32")
    shutil.copytree(directory, tmp_path / "model")
    said = json.loads((directory / "config.json").read_text()) | {"architectures": ["BertForMaskedLM"]}
    (tmp_path / "model" / "config.json").write_text(json.dumps(said))
    found = open_directory(tmp_path / "model")
    assert configure(found, "run", None, SMALL).objective.sentence_order
    config = configure(found, str(tmp_path / "run"), None, [*SMALL, "objective.sentence_order=false"])
    left = [name for name in found.tensors.stored if "pooler" in name or "seq_relationship" in name]
    assert import_run(found, config)["unread"] == sorted(left) and len(left) == 4


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float64])
def test_other_types_are_cast(tmp_path, dtype):
    tensors = make_tensors(dtype=dtype)
    params = restore_run(take_in(make_directory(tmp_path / "model", tensors), tmp_path / "run"))[1]
    table = params["embedding"]["tokens"]
    assert table.dtype == np.float32
    np.testing.assert_array_equal(table, tensors["transformer.wte.weight"].astype(np.float32))


def test_tokenizer_files_travel_along(directory, tmp_path):
    files = {
        "vocab.json": json.dumps({f"t{i}": i for i in range(64)}),
        "merges.txt": "#version: 0.2\n",
        "tokenizer_config.json": "{}",
        "generation_config.json": '{"eos_token_id": 3}',
    }
    for name, text in files.items():
        (directory / name).write_text(text)
    (directory / "README.md").write_text("stays")
    config = take_in(directory, tmp_path / "run")
    assert {path.name for path in (tmp_path / "run" / "tokenizer").iterdir()} == files.keys() | {"config.json"}
    export_run(config, tmp_path / "back", "float32", 10**9)
    assert all((tmp_path / "back" / name).read_text() == text for name, text in files.items())
    assert not (tmp_path / "back" / "README.md").exists()


def test_a_model_with_its_tokenizer_reads_and_writes_text(tmp_path, capsys):
    said = SAID | {"vocab_size": 264}
    directory = make_directory(tmp_path / "model", make_tensors(said), said)
    pieces = ["[UNK]", *map(chr, range(33, 127))]
    (directory / "vocab.txt").write_text("\n".join(pieces) + "\n")
    own = f"Use data.tokenizer={tmp_path / 'deep' / 'run'}/tokenizer"
    assert own in refused(capsys, directory, "data.tokenizer=bytes")[0]
    config = take_in(directory, tmp_path / "run", *FLOAT32, "data.source=text", "data.path=x")
    assert (config.data.source, config.data.tokenizer) == ("text", str(tmp_path / "run" / "tokenizer"))
    (tmp_path / "run").rename(tmp_path / "moved")
    moved = load_run(tmp_path / "moved", ["data.source=python-stdlib"])
    assert (moved.data.source, moved.data.tokenizer) == ("python-stdlib", str(tmp_path / "moved" / "tokenizer"))
    assert main(["generate", str(tmp_path / "moved"), "--prompt", "x", "--tokens", "2", "--greedy"]) == 0
    assert capsys.readouterr().out.startswith("x")


def test_how_it_is_trained_comes_from_a_file_and_the_line(directory, tmp_path, capsys):
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


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.width=64", "model.width=64: "),
        ("objective.kind=masked_lm", "objective.kind=masked_lm"),
        ("run.dir=elsewhere", "run.dir=elsewhere: the run is made in "),
        ("model.heds=2", "unknown key 'heds'"),
        ("parallel.model=3", "is not divisible by parallel.model=3"),
    ],
)
def test_another_model_than_is_there_cannot_be_asked_for(directory, capsys, override, message):
    assert message in "\n".join(refused(capsys, directory, override))


def change(name: str, value) -> dict[str, np.ndarray]:
    tensors = make_tensors()
    if value is None:
        del tensors[name]
    else:
        tensors[name] = value
    return tensors


ONE = np.zeros((1,), np.float32)
WRONG = {
    "missing": (change("transformer.h.2.ln_1.bias", None), ["1 missing: transformer.h.2.ln_1.bias"]),
    "extra": (change("transformer.h.9.ln_1.bias", ONE), ["1 of no use to this model: transformer.h.9.ln_1.bias"]),
    "misshapen": (change("transformer.ln_f.bias", ONE), ["1 of another shape: transformer.ln_f.bias [1] and not [32]"]),
    "vocabulary": (
        change("transformer.wte.weight", np.zeros((48, 32), np.float32)),
        ["1 of another shape: transformer.wte.weight [48, 32] and not [64, 32]"],
    ),
    "all": (
        {name: x for name, x in make_tensors().items() if ".ln_" not in name}
        | {"other": ONE, "transformer.wpe.weight": ONE},
        [
            "18 missing: transformer.h.0.ln_1.weight, ",
            " and 10 more",
            "1 of no use to this model: other",
            "1 of another",
        ],
    ),
}


@pytest.mark.parametrize(("tensors", "messages"), WRONG.values(), ids=WRONG)
def test_tensors_that_are_not_the_models_are_named(tmp_path, capsys, tensors, messages):
    told = "\n".join(refused(capsys, make_directory(tmp_path / "model", tensors)))
    assert all(message in told for message in messages), told


def test_weights_that_are_no_numbers_are_refused(tmp_path, capsys):
    tensors = make_tensors()
    tensors["transformer.h.1.mlp.c_fc.weight"][3, 5] = np.nan
    line = ["import", str(make_directory(tmp_path / "model", tensors)), str(tmp_path / "run"), *SMALL]
    (told,) = errors(capsys, line, Exit.NON_FINITE)
    assert "transformer.h.1.mlp.c_fc.weight has values that are no float32 numbers" in told
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_directory_that_is_no_model(tmp_path, capsys):
    (empty := tmp_path / "empty").mkdir()
    assert "no config.json in it, so it is no model" in refused(capsys, empty)[0]
    assert "no such directory" in refused(capsys, tmp_path / "absent")[0]
    (empty / "config.json").write_text("[1, 2]")
    assert "expected an object, got [1, 2]" in refused(capsys, empty)[0]
    (empty / "config.json").write_text(json.dumps(SAID | {"architectures": ["MambaForCausalLM"]}))
    first, second = refused(capsys, empty)
    assert "MambaForCausalLM is not known. Known: GPT2LMHeadModel, BertForPreTraining, BertForMaskedLM, Bert" in first
    assert "has no weights: no model.safetensors" in second


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "weights.pickle"])
def test_pickles_are_never_opened(directory, capsys, name):
    (directory / "model.safetensors").unlink()
    (directory / name).write_bytes(b"cos\nsystem\n(S'touch owned'\ntR.")
    (told,) = refused(capsys, directory)
    assert f"pickles alone ({name}), which run code when they are loaded" in told and "safe_serialization=True" in told


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("vocab.json", json.dumps({"a": 0, "b": 64})),
        ("vocab.txt", "\n".join(f"t{i}" for i in range(65)) + "\n"),
        ("added_tokens.json", json.dumps({"<x>": 64})),
        ("tokenizer.json", json.dumps({"model": {"vocab": {"a": 64}}})),
        ("tokenizer.json", json.dumps({"model": {"vocab": [["a", 0.5]] * 65}})),
        ("tokenizer.json", json.dumps({"model": {"vocab": {"a": 0}}, "added_tokens": [{"id": 64}]})),
    ],
)
def test_a_tokenizer_of_another_model(directory, capsys, name, text):
    (directory / name).write_text(text)
    (told,) = refused(capsys, directory)
    assert f"{name} has ids up to 64, which vocab_size=64 of config.json does not hold" in told


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"model": {"vocab": 3}}', '{"model": []}', "\xff"])
def test_a_damaged_tokenizer(directory, capsys, text):
    (directory / "tokenizer.json").write_text(text, "latin-1")
    (told,) = refused(capsys, directory)
    assert "tokenizer.json: " in told


def test_a_run_or_directory_that_is_there_is_not_touched(directory, tmp_path, capsys):
    run, taken = tmp_path / "run", tmp_path / "taken"
    config = take_in(directory, run)
    taken.mkdir()
    (taken / "notes").write_text("mine")
    for line in (["import", str(directory), str(run)], ["export", str(run), str(taken)]):
        (told,) = errors(capsys, line)
        assert "nothing is written over" in told
    (told,) = errors(capsys, ["import", str(directory), str(directory / "config.json")])
    assert "is there, and no directory" in told
    taken.joinpath("notes").unlink()
    export_run(config, taken, "float32", 10**9)  # empty: it may be filled
    assert (taken / "model.safetensors").exists()
    (tmp_path / "locked").mkdir(mode=0o500)
    if os.geteuid():
        (told,) = errors(capsys, ["import", str(directory), str(tmp_path / "locked" / "run"), *SMALL])
        assert "Permission denied. Nothing was made of" in told


def test_a_run_without_a_checkpoint_or_of_no_architecture_is_not_exported(directory, tmp_path, capsys):
    config = take_in(directory, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    (told, *_) = errors(capsys, ["export", str(tmp_path / "run"), str(tmp_path / "back")], Exit.CHECKPOINT)
    assert "holds no checkpoint" in told
    (told,) = errors(capsys, ["export", str(tmp_path / "run"), str(tmp_path / "back"), "model.use_bias=false"])
    assert "nearest is gpt2, but for model.use_bias=False" in told
    assert not (tmp_path / "back").exists() and config.run.directory.exists()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (["import"], "spmd-lm import: no DIR given: name a Hugging Face directory"),
        (["import", "somewhere"], "spmd-lm import: no RUN_DIR given: name a run's directory"),
        (["import", "somewhere", "train.steps=3"], "no RUN_DIR given"),
        (["export", "somewhere"], "spmd-lm export: no DIR given"),
        (["export", "somewhere", "else", "--dtype", "int8"], "argument --dtype: invalid choice: 'int8'"),
        (["export", "somewhere", "else", "--shard", "5"], "expected a size as 5GB, 500MB or 64KB, got '5'"),
        (["export", "somewhere", "else"], "somewhere: no such file or run"),
        (["import", "somewhere", "run"], "somewhere: no such directory"),
    ],
)
def test_a_wrong_line_is_told_with_its_mending(capsys, line, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (told,) = errors(capsys, line)
    assert message in told


def test_a_refusal_does_not_wait_for_jax(directory):
    (directory / "config.json").write_text("{}")
    program = (
        "import sys; from spmd_lm.cli import main; code = main(sys.argv[1:]); "
        "print(*{'jax', 'flax', 'orbax', 'torch'} & sys.modules.keys()); sys.exit(code)"
    )
    line = [sys.executable, "-c", program, "import", str(directory), str(directory.parent / "run")]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (Exit.CONFIG, "\n") and "model_type=null is not known" in done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_who_stops_an_import_finds_nothing_of_it(directory, tmp_path, number):
    program = (
        "import os, signal, sys, time\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from spmd_lm import exchange\n"
        "from spmd_lm.cli import main\n"
        "def save(*_): os.kill(os.getpid(), int(sys.argv[1])); time.sleep(60)\n"
        "exchange.Checkpointer.save = save\n"
        "sys.exit(main(sys.argv[2:]))"
    )
    line = [sys.executable, "-c", program, str(int(number)), "import", str(directory), str(tmp_path / "a" / "run")]
    done = subprocess.run([*line, *SMALL], capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stderr) == (128 + number, "")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


# --- files that lie ---------------------------------------------------------------------------------------------------


def header(entries: dict) -> bytes:
    text = json.dumps(entries).encode()
    return struct.pack("<Q", len(text)) + text


def entry(start: int, end: int, shape=(2,), dtype="F32") -> dict:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}


LIES = {
    "empty": b"",
    "a header beyond the file": struct.pack("<Q", 2**40) + b"{}",
    "no JSON": struct.pack("<Q", 8) + b"not json",
    "bytes that are not there": header({"a": entry(0, 8)}) + b"\0" * 4,
    "bytes of nobody": header({"a": entry(0, 8)}) + b"\0" * 16,
    "overlapping": header({"a": entry(0, 8), "b": entry(4, 12)}) + b"\0" * 12,
    "a hole": header({"a": entry(0, 8), "b": entry(12, 20)}) + b"\0" * 20,
    "another shape": header({"a": entry(0, 8, (3,))}) + b"\0" * 8,
    "a negative shape": header({"a": entry(0, 8, (-2,))}) + b"\0" * 8,
    "no such type": header({"a": entry(0, 8, dtype="F31")}) + b"\0" * 8,
    "a huge shape": header({"a": entry(0, 8, (2**62, 2**62))}) + b"\0" * 8,
}


@pytest.mark.parametrize("data", LIES.values(), ids=LIES)
def test_a_lying_header_is_refused(directory, capsys, data):
    (directory / "model.safetensors").write_bytes(data)
    (told,) = refused(capsys, directory)
    assert "model.safetensors: damaged, or no safetensors: " in told


def test_types_that_are_no_weights(tmp_path, capsys):
    directory = make_directory(tmp_path / "model", make_tensors())
    file = directory / "model.safetensors"
    (length,) = struct.unpack("<Q", (data := file.read_bytes())[:8])
    said = json.loads(data[8 : 8 + length])
    said["transformer.ln_f.bias"]["dtype"] = "I32"
    file.write_bytes(header(said) + data[8 + length :])
    (told,) = refused(capsys, directory)
    assert "1 of a type that is none of F64, F32, F16, BF16: transformer.ln_f.bias I32" in told


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ("{", "index.json: not JSON"),
        ("{}", "weight_map: expected the name of a file for each tensor"),
        ('{"weight_map": {}}', "weight_map: expected the name of a file"),
        ('{"weight_map": {"a": 3}}', "weight_map: expected the name of a file"),
        ('{"weight_map": {"a": "model-00009.safetensors"}}', "names model-00009.safetensors, not there"),
        ('{"weight_map": {"a": "../secret.safetensors"}}', "expected names of .safetensors files beside the index"),
        ('{"weight_map": {"a": "model.bin"}}', "expected names of .safetensors files beside the index"),
        ('{"weight_map": {"a": "model.safetensors"}}', "without a, which model.safetensors.index.json says are in it"),
    ],
)
def test_a_lying_index_is_refused(directory, capsys, index, message):
    (directory / "model.safetensors.index.json").write_text(index)
    (told,) = refused(capsys, directory)
    assert message in told


def test_several_files_want_an_index_and_agree(tmp_path, capsys):
    directory = make_directory(tmp_path / "model", make_tensors(), most=64_000)
    index = directory / "model.safetensors.index.json"
    said = index.read_text()
    index.unlink()
    assert "and no model.safetensors.index.json to say which are the model's" in refused(capsys, directory)[0]
    index.write_text(said)
    first, second = sorted(directory.glob("*.safetensors"))[:2]
    shutil.copy(first, second)
    assert any("are in another file too" in told or "says are in it" in told for told in refused(capsys, directory))


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """What import asks of SAID's tensors: its configuration's shapes, from one program."""
    path = make_directory(tmp_path_factory.mktemp("whole") / "model", make_tensors())
    program = Program(configure(open_directory(path), "run", None, SMALL))
    return program, {path: leaf.shape for path, leaf in paths(program.plan.shapes).items()}


def test_any_damage_is_an_error_of_ours_or_none(directory, expected):
    """Bytes of the header changed, cut and repeated at random: never a traceback, never a part of a model."""
    program, shapes = expected
    file, r = directory / "model.safetensors", np.random.default_rng(11)
    whole = file.read_bytes()
    (length,) = struct.unpack("<Q", whole[:8])
    ends = {"refused": 0, "read": 0}
    for _ in range(150):
        data = bytearray(whole)
        for at in r.integers(0, 8 + length, r.integers(1, 4)):
            data[at] = r.integers(0, 256) if r.random() < 0.5 else ord(r.choice(list('0123456789[]{},:"')))
        if r.random() < 0.2:
            data = data[: r.integers(0, len(data))]
        file.write_bytes(data)
        try:
            found = open_directory(directory)
            names = locate(found, shapes)
            read_params(found, names, program.abstract_canonical().params)
            ends["read"] += 1
        except UserError as error:
            assert str(directory) in str(error)
            ends["refused"] += 1
    assert ends["refused"] > 100, ends


@pytest.mark.parametrize(
    "text", ["[" * 10**5, '{"n_embd": ' + "1" * 5000 + "}", "\ufeff{}", "", "{'a': 1}", '"x"', "\0"]
)
def test_a_config_that_is_no_json(directory, capsys, text):
    (directory / "config.json").write_text(text, "utf-8")
    (told,) = refused(capsys, directory)
    assert told.startswith(f"{directory / 'config.json'}: ")


STRANGE = [None, True, -1, 0, 0.5, 3, 10**30, 1e308, math.inf, math.nan, "", "x", [], [1], {}, {"a": 1}]


@pytest.mark.parametrize("key", ["architectures", "model_type", *GPT2, "n_inner", "resid_pdrop", "layer_norm_epsilon"])
def test_any_value_of_any_key_is_an_error_of_ours_or_none(directory, expected, key):
    _, shapes = expected
    for value in STRANGE:
        (directory / "config.json").write_text(json.dumps(SAID | {key: value}))
        try:
            found = open_directory(directory)
            config = configure(found, "run", None, SMALL)
        except ConfigError:
            continue
        try:
            Program(config)
            locate(found, {**shapes})
        except ConfigError:
            pass
