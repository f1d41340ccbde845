import json
import struct
from pathlib import Path

import numpy as np
import pytest

from spmd_lm.batch import Batch
from spmd_lm.config.load import load
from spmd_lm.config.schema import RunConfig
from spmd_lm.data.corpus import load_data, make_loader, make_text_loader
from spmd_lm.data.shuffle import fold_in, permute
from spmd_lm.data.token_files.megatron import open_megatron, split_documents
from spmd_lm.data.tokenizers.tokenizer import ByteTokenizer
from spmd_lm.data.tokenizers.vocabulary import vocabulary_hash
from spmd_lm.errors import ConfigError, DataError
from tests.data.token_files.conftest import read_documents, write_dataset

CONTEXT, BATCH, SEED = 16, 8, 5


def config(context: int = CONTEXT, vocab: int = 1000, model: dict | None = None, **data) -> RunConfig:
    return RunConfig.model_validate(
        {
            "model": {"layers": 1, "width": 8, "heads": 1, "context": context, "vocab": vocab} | (model or {}),
            "objective": {"kind": "masked_lm" if model else "causal_lm"},
            "data": {"source": "tokens"} | data,
            "optim": {"lr": 0.1},
            "train": {"steps": 1, "batch": BATCH, "seed": SEED, "eval_batches": 3},
        }
    )


def present(batch: Batch) -> list[str]:
    return [name for name, field in vars(batch).items() if field is not None]


def loader(split: str = "training", **data):
    run = config(**data)
    return make_loader(run, load_data(run.data, SEED, run.model.vocab), split)


@pytest.fixture(autouse=True)
def many_bytes(monkeypatch):
    """Bytes with 1,000 ids, so that a token can be its own offset."""
    monkeypatch.setattr("spmd_lm.data.tokenizers.tokenizer.ByteTokenizer.vocab_size", 1000)


def test_rows_are_read_across_shards(dataset):
    """A token is its own offset, but for separators; rows cross both ends of the short second shard."""
    rows = loader(path=str(dataset), context=150).rows(0, 0, BATCH)
    at = np.where(rows.tokens == 999, -1, rows.tokens)
    start = np.array([row[row >= 0][0] - np.flatnonzero(row >= 0)[0] for row in at])
    expected = start[:, None] + np.arange(150)
    assert ((at == expected) | (at == -1)).all() and (rows.targets[:, :-1] == rows.tokens[:, 1:]).all()
    assert {99, 150, 300} <= set(expected[at == -1].tolist()) and rows.tokens.dtype == np.int32


def reference_sample(n: int, corpora: list[tuple[int, float]], size: int) -> tuple[int, int]:
    """The corpus and the first token of sample n of a run: the specification.  corpora: tokens and weight of each."""
    total, counts = sum(weight for _, weight in corpora), [0] * len(corpora)
    margin = 1 / (2 * len(corpora) - 2) if len(corpora) > 1 else 0
    for t in range(1, n + 2):  # Tijdeman: of those that may come, the one that must first
        may = [i for i, (_, w) in enumerate(corpora) if t * w / total >= counts[i] + margin - 1e-9]
        chosen = min(may, key=lambda i: (counts[i] + 1 - margin) * total / corpora[i][1])
        counts[chosen] += 1
    seed = int(fold_in(SEED, 3, chosen)) if len(corpora) > 1 else SEED
    windows = corpora[chosen][0] // size - 1
    epoch, index = divmod(counts[chosen] - 1, windows)
    shift = int(fold_in(seed, 1, epoch) % min(size, corpora[chosen][0] - windows * size))
    return chosen, int(permute(index, windows, fold_in(seed, 0, epoch))) * size + shift


def blend(tmp_path: Path, weights: list[float]) -> tuple[list[dict], list[tuple[int, float]]]:
    """Corpora whose token k is 100 i + k: as data.blend, and as the reference takes them."""
    parts, corpora = [], []
    for i, weight in enumerate(weights):
        size = 60 + 17 * i % 40
        split = [[[100 * i + k for k in range(size)]]]
        write_dataset(tmp_path / str(i), {"train": split, "validation": split[: i != 1]}, eos=None)
        parts.append({"path": str(tmp_path / str(i)), "weight": weight})
        corpora.append((size, weight))
    return parts, corpora


@pytest.mark.parametrize("weights", [[1.0], [0.3, 0.7], [3.0, 1.5, 0.25], [1.0] * 9])
def test_samples_come_in_the_order_of_the_specification(tmp_path, weights):
    parts, corpora = blend(tmp_path, weights)
    rows = loader(blend=parts)
    for step in (0, 1, 7):  # any step at once
        expected = [reference_sample(step * BATCH + row, corpora, CONTEXT) for row in range(BATCH)]
        found = rows.rows(step, 0, BATCH)
        np.testing.assert_array_equal(found.tokens[:, 0], [100 * corpus + start for corpus, start in expected])
        assert (found.sample_ids == np.arange(BATCH)).all()
        few = rows.read_rows(step, np.array([1, 6]))  # as another process reads them
        np.testing.assert_array_equal(few.tokens, found.tokens[[1, 6]])


def test_validation_is_blended_too_and_repeats_no_window(tmp_path):
    """The second corpus has no validation text; 24 rows are asked for, and the first corpus has fewer."""
    parts, _ = blend(tmp_path, [0.5, 0.2, 0.3])
    assert f"(none of {parts[1]['path']})" in load_data(config(blend=parts).data, SEED, 1000).describe()
    rows = loader("validation", blend=parts)
    batches = [rows.rows(step, 0, BATCH) for step in range(len(rows))]
    weights = np.concatenate([batch.loss_weights[:, 0] for batch in batches])
    first = np.concatenate([batch.tokens[:, 0] for batch in batches])[weights > 0]
    assert len(set(first.tolist())) == len(first) == rows.num_validated
    assert set((first // 100).tolist()) == {0, 2} and (first < 100).sum() == 3  # (60 - 1) // 16 windows


def test_a_blend_of_masked_text_has_rows_of_every_field(tmp_path):
    """A corpus has every second row, which is the row that it would have alone."""
    model, parts = {"kind": "bert", "token_types": 2}, []
    for i, word in enumerate((b"first", b"other")):
        text = [[list(b"Sentence %d of the %s corpus. " % (k, word)) for k in range(40)]]
        write_dataset(tmp_path / str(i), {"train": text, "validation": text}, vocab=256, eos=0)
        parts.append({"path": str(tmp_path / str(i)), "weight": 1.0})
    both, run = loader(blend=parts, model=model), config(path=parts[0]["path"], model=model)
    rows, corpus = both.rows(3, 0, BATCH), load_data(run.data, SEED, 1000).corpora[0]
    alone = make_text_loader(corpus.train, ByteTokenizer(), run, "training", int(fold_in(SEED, 3, 0)))
    same = alone.read_examples(np.arange(3 * BATCH // 2, 2 * BATCH), np.arange(0, BATCH, 2))
    for name in present(same):
        field = getattr(same, name)
        np.testing.assert_array_equal(getattr(rows, name)[::2], field, err_msg=name)
    assert rows.labels.shape == (BATCH,) and rows.token_type_ids.shape == (BATCH, CONTEXT)


def pieces(batch: Batch) -> list[tuple[list[int], list[float]]]:
    """Tokens and weights of each document, row by row."""
    found = []
    for tokens, segments, weights in zip(batch.tokens, batch.segments, batch.loss_weights, strict=True):
        assert segments[0] == 1 and (np.diff(segments) >= 0).all()
        found += [(tokens[segments == s].tolist(), weights[segments == s].tolist()) for s in np.unique(segments)]
    return found


def test_packed_rows_keep_documents_apart(dataset):
    rows = loader(path=str(dataset), context=150, pack=True).rows(0, 0, BATCH)
    plain = loader(path=str(dataset), context=150).rows(0, 0, BATCH)
    np.testing.assert_array_equal(rows.tokens, plain.tokens)
    for tokens, weights in pieces(rows):
        assert 999 not in tokens[:-1]  # a separator ends its document
        assert weights == [1.0] * (len(tokens) - 1) + [float(tokens[-1] != 999)]  # and predicts nothing
    starts = np.diff(rows.segments, prepend=0) != 0
    assert (rows.positions[starts] == 0).all() and (rows.positions[~starts] > 0).all()
    assert rows.segments.max() > 2


# An independent writer of Megatron-LM's format.
def write_megatron(prefix: Path, texts: list[list[list[int]]], dtype=np.uint16, code: int = 8) -> None:
    """texts: documents, each of one or more sequences."""
    sequences = [np.array(sequence, dtype) for document in texts for sequence in document]
    with open(f"{prefix}.bin", "wb") as file:
        for sequence in sequences:
            file.write(sequence.tobytes(order="C"))
    with open(f"{prefix}.idx", "wb") as file:
        file.write(b"MMIDIDX\x00\x00" + struct.pack("<Q", 1) + struct.pack("<B", code))
        file.write(struct.pack("<Q", len(sequences)) + struct.pack("<Q", len(texts) + 1))
        file.write(np.array([len(sequence) for sequence in sequences], np.int32).tobytes())
        pointers, address = [], 0
        for sequence in sequences:
            pointers.append(address)
            address += sequence.nbytes
        file.write(np.array(pointers, np.int64).tobytes())
        ends = np.cumsum([0, *(len(document) for document in texts)])
        file.write(ends.astype(np.int64).tobytes())


TEXTS = [[[1, 2, 3], [4]], [[5] * 40], [[]], [[6, 7] * 20, [8]], [list(range(100, 160))]]


@pytest.mark.parametrize(("dtype", "code"), [(np.uint16, 8), (np.int32, 4), (np.int64, 5)])
def test_megatron_s_files_read_back_exactly(tmp_path, dtype, code):
    write_megatron(tmp_path / "corpus_text_document", TEXTS, dtype, code)
    shard = open_megatron(tmp_path / "corpus_text_document")
    expected = [[token for sequence in document for token in sequence] for document in TEXTS]
    assert [document.tolist() for document in read_documents(shard)] == expected and shard.tokens.dtype == dtype
    train, validation = split_documents(shard, 0.2, rules=1)
    assert [document.tolist() for document in (*read_documents(train), *read_documents(validation))] == expected
    assert len([*read_documents(validation)]) == 1
    train, validation = split_documents(shard, 0.2, rules=2)  # the last document has 41% of the tokens
    assert [*train.tokens, *validation.tokens] == [*shard.tokens]
    assert validation.tokens.size == 29 and [*map(len, read_documents(train))] == [4, 40, 0, 41, 31]
    path = str(tmp_path / "corpus_text_document")
    data = {part: config(path=path, validation_fraction=part).data for part in (0.1, 0.5)}
    prints = {load_data(data[part], SEED, 1000).fingerprint for part in data}
    write_megatron(tmp_path / "corpus_text_document", [[[9, 2, 3], [4]], *TEXTS[1:]], dtype, code)
    prints.add(load_data(data[0.1], SEED, 1000).fingerprint)
    assert len(prints) == 3
    rows = loader(path=path, context=8).rows(0, 0, BATCH)
    assert not {*rows.tokens.ravel().tolist()} & {*range(145, 160)}  # a tenth, the end of the last document


@pytest.mark.parametrize(
    ("suffix", "change", "said"),
    [
        (".bin", lambda data: data[:-2], "bytes instead of"),
        (".idx", lambda data: data[:-2], "bytes instead of"),
        (".idx", lambda data: data[:20], "does not begin as Megatron-LM's do"),
        (".idx", lambda data: b"x" + data[1:], "does not begin as Megatron-LM's do"),
        (".idx", lambda data: data[:9] + b"\2" + data[10:], "its version is 2"),
        (".idx", lambda data: data[:17] + b"\7" + data[18:], "its dtype 7"),
        (".idx", lambda data: data[:34] + b"\4" + data[35:], "do not follow one another"),
        (".idx", lambda data: data[:-8] + b"\6" + data[-7:], "its documents are not of its sequences"),
    ],
)
def test_damaged_megatron_files_are_told(tmp_path, suffix, change, said):
    write_megatron(tmp_path / "corpus", TEXTS)
    file = tmp_path / f"corpus{suffix}"
    file.write_bytes(change(file.read_bytes()))
    with pytest.raises(DataError, match=said):
        loader(path=str(tmp_path / "corpus"), context=8)


@pytest.mark.parametrize("verify", ["touch", "off"])
def test_ids_that_the_model_lacks_are_told_before_the_first_step(tmp_path, verify):
    write_megatron(tmp_path / "corpus", [[[3, 4, 70, 2] * 20]] * 3)
    with pytest.raises(DataError, match="it has the token 70, but the vocabulary has 50"):
        loader(path=str(tmp_path / "corpus"), context=8, vocab=50, verify=verify)


def flip(file: Path, at: int) -> None:
    data = bytearray(file.read_bytes())
    data[at] ^= 4
    file.write_bytes(bytes(data))


@pytest.mark.parametrize("shard", [0, 1, 2])
def test_a_flipped_bit_is_told_before_a_batch_has_it(dataset, shard):
    flip(dataset / f"train/shard-0000{shard}.bin", 20)
    rows = loader(path=str(dataset), context=150)
    with pytest.raises(DataError, match=f"shard-0000{shard}.bin: damaged: the checksum of bytes 0 to"):
        for step in range(4):
            rows.rows(step, 0, BATCH)
    with pytest.raises(DataError, match="damaged"):
        loader(path=str(dataset), verify="full")
    loader(path=str(dataset), verify="off", context=150).rows(0, 0, BATCH)


def test_changed_data_has_another_fingerprint(dataset, tmp_path):
    def fingerprint(**data) -> str:
        return load_data(config(**data).data, SEED, 1000).fingerprint

    here, path = fingerprint(path=str(dataset)), str(dataset)
    assert here == fingerprint(path=path, verify="full", pack=True)
    assert len({here, fingerprint(blend=[{"path": path, "weight": 1.0}] * 2)}) == 2
    write_dataset(tmp_path / "other", {"train": [[[1, 2] * 30]], "validation": [[[3] * 50]]})
    assert fingerprint(path=str(tmp_path / "other")) != here


def test_what_is_no_data_set_is_told(dataset, tmp_path):
    def told(said: str, error=DataError, **data) -> None:
        with pytest.raises(error, match=said):
            loader(**data)

    told("no prepared data set, which has a manifest.json, and no nowhere.idx", path=str(tmp_path / "nowhere"))
    told(r"no nowhere.idx beside it \(working directory /.*\)\. Prepare", path="nowhere")
    manifest = dataset / "manifest.json"
    good = json.loads(manifest.read_text())
    for change, said in (
        ({"format": "other"}, "not the manifest of a data set"),
        ({"splits": {"train": {"shards": ["../x"]}, "validation": {"shards": []}}}, "does not list shards in this"),
        ({"splits": {"train": {"shards": []}, "validation": {"shards": []}}}, "its training split has no tokens"),
        ({"tokenizer": 3}, "does not say which tokenizer"),
        ({"eos_token_id": 7}, "its shards are of another tokenizer"),
        ({"splits": {"train": [], "validation": {"shards": []}}}, "does not list shards in this"),
        ({"splits": {"train": {"shards": ["a\0b"]}, "validation": {"shards": []}}}, "does not list shards in this"),
        ({"splits": {"train": {"shards": ["\ud800"]}, "validation": {"shards": []}}}, "does not list shards in this"),
    ):
        manifest.write_text(json.dumps(good | change))
        told(said, path=str(dataset))
    manifest.write_text(json.dumps(good | {"tokenizer": "0" * 64}))
    told("tokenizer: damaged: its vocabulary is missing. Remove the data set", path=str(dataset))
    (dataset / "tokenizer").mkdir()
    (dataset / "tokenizer/vocab.txt").write_text("[UNK]\n")
    told("tokenizer: damaged: its vocabulary is not the one that made the token ids", path=str(dataset))
    manifest.write_text(json.dumps(good | {"tokenizer": vocabulary_hash(str(dataset / "tokenizer"))}))
    told("data.tokenizer=bytes is not the one that made the token ids", ConfigError, path=str(dataset))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ([], "data.source=tokens with neither data.path nor data.blend"),
        (["data.path=a", "data.blend=[{path: b, weight: 1}]"], "with both .* Use data.path=null, or data.blend=null"),
        (["data.blend=[]"], "data.blend"),
        (["data.blend=a"], r"data.blend: expected a list, got 'a'. Write data.blend='\[{path: a, weight: 0.7}, "),
        (["data.blend=[a]"], r"data.blend\[0\]: expected a mapping of keys, got 'a'. Write data.blend='\[{path: a, "),
        (["data.blend=[{path: b, weight: 0}]"], r"data.blend\[0\].weight: must be more than 0, got 0"),
        (
            ["data.blend=[{path: a, weight: 1}, {path: b, wait: 1}]"],
            r"blend\[1\].wait: unknown key. Did you mean 'weight'",
        ),
        (["data.blend=[{path: b}]"], r"data.blend\[0\].weight: missing"),
        (["data.path=a", "data.verify=sometimes"], "data.verify: expected touch, full or off"),
        (["data.path=a", "data.pack=true", "model.attention=cudnn"], "cuDNN has no causal mask of documents"),
    ],
)
def test_a_bad_section_is_told(settings, said):
    base = ["model.layers=1", "model.width=8", "model.heads=1", "model.context=8", "model.vocab=256", "optim.lr=0.1"]
    with pytest.raises(ConfigError, match=said):
        load(None, [*base, "train.steps=1", "train.batch=8", "data.source=tokens", *settings])


def test_the_tokenizer_beside_the_ids_is_the_run_s(dataset):
    (dataset / "tokenizer").mkdir()
    base = ["model.layers=1", "model.width=8", "model.heads=1", "model.context=8", "model.vocab=256", "optim.lr=0.1"]
    base += ["train.steps=1", "train.batch=8", "data.source=tokens"]
    for where in (f"data.path={dataset}", f"data.blend=[{{path: {dataset}, weight: 1.0}}]"):
        assert load(None, [*base, where]).data.tokenizer == str(dataset / "tokenizer")
    assert load(None, [*base, f"data.path={dataset}", "data.tokenizer=bytes"]).data.tokenizer == "bytes"
