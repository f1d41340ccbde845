"""Task datasets: fingerprints, descriptions, and the vocabularies and labels that are refused."""

import json
import random
from pathlib import Path

import pytest

from spmd_lm.data.corpus import make_loader
from spmd_lm.errors import ConfigError, DataError
from tests.published import published
from tests.task_files import assert_rows, config, corpus, write_squad


def test_the_fingerprint_covers_both_splits(task, root, tmp_path):
    made = config(task, root / task)
    assert corpus(made).fingerprint == corpus(made).fingerprint and len(corpus(made).fingerprint) == 64
    prints = {corpus(made).fingerprint}
    old, new = {"jsonl": ('"label": 1', '"label": 2'), "race": ('["A"]', '["B"]'), "squad": ("?", "!")}[task]
    for side in ("train", "dev"):
        text = (root / task / f"{side}.jsonl").read_text()
        assert old in text
        (tmp_path / "changed.jsonl").write_text(text.replace(old, new, 1))
        key = "path" if side == "train" else "validation_path"
        prints.add(corpus(config(task, root / task, **{key: str(tmp_path / "changed.jsonl")})).fingerprint)
    assert len(prints) == 3


def test_the_fingerprint_covers_answers(tmp_path):
    for name in ("train.jsonl", "dev.jsonl"):
        write_squad(tmp_path / name, random.Random(2), 3, impossible=0)
    before = corpus(config("squad", tmp_path)).fingerprint
    tree = json.loads((tmp_path / "dev.jsonl").read_text())
    del tree["data"][0]["paragraphs"][2]["qas"][0]["answers"][1]
    (tmp_path / "dev.jsonl").write_text(json.dumps(tree))
    assert corpus(config("squad", tmp_path)).fingerprint != before


def test_the_description(root, tmp_path):
    made = corpus(config("jsonl", root / "jsonl"))
    assert made.name == f"jsonl, {root}/jsonl/train.jsonl"
    line = made.describe()
    assert line.startswith(f"{made.name}: 37 training examples, 21 validation examples, ") and "skipped" not in line
    assert line.endswith(f" tokens, sha256 {made.fingerprint[:12]}") and "\n" not in line
    for name in ("train.jsonl", "dev.jsonl"):
        (tmp_path / name).write_text("sentence1\tsentence2\tgold_label\na\tb\tneutral\na\tcd\t-\n")
    line = corpus(config("mnli", tmp_path)).describe()
    assert "1 training examples, 1 validation examples, 2 lines skipped, 4 tokens" in line


def test_a_label_out_of_range_is_reported_with_its_line(root):
    made = config("jsonl", root / "jsonl", classes=2)
    for split in ("training", "validation"):
        with pytest.raises(DataError, match=r"\.jsonl: line \d+: label 2 is not below objective\.classes=2\. Use .*=3"):
            make_loader(made, corpus(made), split)


def test_vocabulary_files_are_checked(root, tmp_path):
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghi"]
    (tmp_path / "vocab.txt").write_text("\n".join(pieces))
    with pytest.raises(ConfigError, match=r"model\.vocab=13 is less than the 14 tokens of data\.tokenizer=.*vocab=14"):
        corpus(config("jsonl", root / "jsonl", tokenizer=str(tmp_path), vocab=13))
    (tmp_path / "vocab.txt").write_text("\n".join(pieces[:4]))
    made = config("jsonl", root / "jsonl", tokenizer=str(tmp_path))
    with pytest.raises(ConfigError, match=r"^data\.tokenizer=.*: it has no \[MASK\]\. Use data\.tokenizer=bytes"):
        make_loader(made, corpus(made), "training")


def test_rows_of_word_pieces_equal_those_of_hugging_face_tokenizers():
    """Template and truncation are the library's.  The room is even: of equally long texts it truncates the other."""
    from tokenizers.processors import BertProcessing

    path = str(published("mnli_dev_matched_raw_first.tsv"))
    vocabulary = str(published("bert_base_uncased_vocab.txt"))
    made = config(
        "mnli",
        Path(path).parent,
        path=path,
        validation_path=path,
        tokenizer=vocabulary,
        vocab=30522,
        context=33,
        batch=52,
    )
    read = corpus(made)
    rows = make_loader(made, read, "validation").rows(0, 0, 51)
    library = read.tokenizer.backend
    library.post_processor = BertProcessing(("[SEP]", 102), ("[CLS]", 101))
    library.enable_truncation(33, strategy="longest_first")
    library.enable_padding(length=33, pad_id=0)
    pairs = [line.split("\t")[1:3] for line in Path(path).read_text().splitlines()[1:]]
    encoded = [library.encode(a, b) for a, b in pairs]
    assert any(each.overflowing for each in encoded)
    assert_rows(rows, [(each.ids, each.attention_mask, each.type_ids) for each in encoded])
