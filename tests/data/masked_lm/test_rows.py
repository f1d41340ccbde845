"""Rows of masked text.  Tokens are bytes, so what a row shows can be looked up in the text."""

import dataclasses
import random
from itertools import pairwise

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from spmd_lm.batch import PER_ROW, Batch, abstract_batch
from spmd_lm.config.data_sections import Text
from spmd_lm.config.schema import RunConfig
from spmd_lm.data.corpus import load_data, make_loader
from spmd_lm.data.loader import CausalLMLoader
from spmd_lm.data.masked_lm.rows import MaskedLMLoader
from spmd_lm.data.masked_lm.word_boundaries import WordBoundaries
from spmd_lm.data.token_array import TokensInMemory
from spmd_lm.data.tokenizers.tokenizer import ByteTokenizer, NumberTokenizer
from spmd_lm.errors import ConfigError, DataError

BYTES = ByteTokenizer()
SPECIAL, WORDS = BYTES.special_tokens_and_words()
FIELDS = [field.name for field in dataclasses.fields(Batch)]


def story(documents=40, words=120, seed=0) -> bytes:
    """Documents of sentences of numbered words: no word occurs twice, so every order can be recognized."""
    draw, number, texts = random.Random(seed), 0, []
    for _ in range(documents):
        pieces = []
        for _ in range(draw.randint(1, 2 * words)):
            number += 1
            pieces.append(f"{'w' * draw.randint(1, 6)}{number}" + draw.choice(["", "", "", "", "."]))
        texts.append(" ".join(pieces).encode())
    return b"\0".join(texts)


STORY = story()
TOKENS = np.frombuffer(STORY, np.uint8)


def run_config(**sections) -> RunConfig:
    tree = {
        "model": {"kind": "bert", "layers": 1, "width": 8, "heads": 1, "context": 64, "vocab": 260, "token_types": 2},
        "objective": {"kind": "masked_lm"},
        "data": {"source": "python-stdlib"},
        "optim": {"lr": 0.1},
        "parallel": {"microbatches": 2},
        "train": {"steps": 2, "batch": 16, "seed": 5, "eval_batches": 3},
    }
    return RunConfig.model_validate({name: {**tree[name], **sections.get(name, {})} for name in tree})


def make(
    split="training",
    tokens=TOKENS,
    tokenizer=BYTES,
    context=64,
    token_types=2,
    batch=16,
    microbatches=2,
    seed=5,
    eval_batches=5,
    **objective,
):
    config = run_config(
        model={"context": context, "token_types": token_types},
        objective=objective,
        parallel={"microbatches": microbatches},
        train={"batch": batch, "seed": seed, "eval_batches": eval_batches},
    )
    return MaskedLMLoader(TokensInMemory(tokens, tokenizer.eos_token_id), tokenizer, config, split)


def test_random_tokens_are_those_of_the_model():
    """A tokenizer may have more."""

    class Larger(ByteTokenizer):
        def special_tokens_and_words(self):
            spelled = [None, *(bytes([byte]) for byte in range(1, 256)), *[None] * 4, *[b"x"] * 1000]
            return SPECIAL, WordBoundaries.from_bytes(spelled)

    loader = make(tokenizer=Larger())
    assert all(loader.rows(step, 0, 16).tokens.max() < 260 for step in range(9))


def present(batch: Batch) -> list[str]:
    return [name for name in FIELDS if getattr(batch, name) is not None]


def assert_same(actual: Batch, expected: Batch) -> None:
    assert present(actual) == present(expected)
    for field in present(actual):
        np.testing.assert_array_equal(getattr(actual, field), getattr(expected, field), err_msg=field)


def segments(rows: Batch, row: int) -> list[bytes]:
    """The text of each segment of a row, without masks."""
    ids = rows.targets[row][rows.segments[row] == 1]
    assert ids[0] == SPECIAL.cls and ids[-1] == SPECIAL.sep
    ends = np.flatnonzero(ids == SPECIAL.sep)
    return [bytes(ids[a + 1 : b].astype(np.uint8)) for a, b in pairwise([0, *ends])]


def text_of(rows: Batch, row: int) -> bytes:
    """The segments of a row in the order of the text."""
    swapped = rows.labels is not None and rows.labels[row] == 1
    return b"".join(segments(rows, row)[:: -1 if swapped else 1])


def many(rows, steps=40) -> Batch:
    parts = [rows.rows(step, 0, rows.batch_size) for step in range(steps)]
    return jax.tree.map(lambda *leaves: np.concatenate(leaves), *parts)


@pytest.fixture(scope="module")
def seen():
    return many(make(batch=64), 32)


def test_a_row_is_two_neighbouring_segments_of_one_document(seen):
    for row in range(len(seen.tokens)):
        a, b = segments(seen, row)
        joined = text_of(seen, row)
        assert a and b and b"\0" not in joined
        assert STORY.count(joined) == 1, "the other way round it is nowhere"


def test_words_are_whole_at_both_ends_of_a_row(seen):
    starts = WORDS.word_starts(TOKENS)
    for row in range(len(seen.tokens)):
        joined = text_of(seen, row)
        at = STORY.index(joined)
        bounds = [at, at + len(joined)]
        assert all(place == len(TOKENS) or starts[place] or TOKENS[place] == 0 for place in bounds)


def test_rows_are_cut_at_sentences_where_there_are_any(seen):
    parted = 0
    for row in range(len(seen.tokens)):
        a, b = segments(seen, row)
        before, after = (b, a) if seen.labels[row] else (a, b)
        parted += before.endswith(b".")
        assert after.startswith((b" ", b".")) or before.endswith(b".")
    assert parted / len(seen.tokens) > 0.5  # without looking, a tenth


def test_both_segments_begin_alike_so_only_their_content_tells_their_order():
    """A row has many lines: a segment that began within one would be recognized as the first."""
    lines = b"\n".join(b"word and another %d" % n for n in range(4000))
    rows = many(make(tokens=np.frombuffer(lines, np.uint8), context=128, short_seq_prob=0.0, mask_prob=0.05))
    parted = [segments(rows, row) for row in range(len(rows.tokens))]
    begins = [all(segment.startswith(b"\n") for segment in both) for both in parted if not lines.startswith(both[0])]
    assert np.mean(begins) > 0.99  # the rest have all their line breaks within spans


def test_no_span_reaches_from_one_segment_into_the_other(seen):
    """No two spans touch, so masked words on both sides of the cut would be of one span."""
    ends = np.array([np.flatnonzero(row) for row in (seen.targets == SPECIAL.sep)])  # of A, of B
    rows, swapped = np.arange(len(ends)), seen.labels == 1
    last = np.where(swapped, ends[:, 1] - 1, ends[:, 0] - 1)
    first = np.where(swapped, 1, ends[:, 0] + 1)
    beside = seen.loss_weights[rows, last] + seen.loss_weights[rows, first]
    assert beside.max() == 1 and (beside == 1).mean() > 0.1


def test_half_of_the_rows_are_swapped(seen):
    assert abs(seen.labels.mean() - 0.5) < 0.03 and (seen.label_weights == 1).all()


def test_token_types_mark_segment_b_and_segment_ids_mark_padding(seen):
    inside = seen.segments == 1
    separators = (seen.targets == SPECIAL.sep) & inside
    before = np.cumsum(separators, axis=1) - separators  # separators before each position
    np.testing.assert_array_equal(seen.token_type_ids, np.where(inside, before, 0))
    assert (inside[:, 1:] <= inside[:, :-1]).all() and (separators.sum(axis=1) == 2).all()
    for field in (seen.tokens, seen.targets):
        assert ((field == SPECIAL.pad) == ~inside).all()
    assert (seen.positions == np.arange(64)).all()


def test_weights_are_1_where_words_are_masked(seen):
    assert set(np.unique(seen.loss_weights)) == {0, 1}
    changed = seen.tokens != seen.targets
    assert (seen.loss_weights[changed] == 1).all()
    assert (seen.loss_weights[seen.targets >= 256] == 0).all(), "special tokens are never masked"
    text = (seen.segments == 1) & (seen.targets < 256)
    assert abs(seen.loss_weights.sum() / text.sum() - 0.15) < 0.005
    hidden = seen.tokens[seen.loss_weights == 1]
    assert abs((hidden == SPECIAL.mask).mean() - 0.8) < 0.02
    assert set(np.unique(hidden[hidden != SPECIAL.mask])) <= set(WORDS.text_ids.tolist())


def test_words_are_masked_whole(seen):
    same_word = ~WORDS.word_starts(seen.targets)[:, 1:]
    assert (seen.loss_weights[:, 1:] == seen.loss_weights[:, :-1])[same_word].all()


def test_short_rows():
    held = [make(short_seq_prob=short, batch=64) for short in (0.0, 0.5)]
    long, short = ((many(each, 30).segments == 1).sum(axis=1) for each in held)
    assert np.median(long) > 64 - 10 and (long < 40).mean() < 0.15  # a word less, and documents that are short
    assert 0.25 < (short < 40).mean() - (long < 40).mean() < 0.4
    assert short.min() < 20


def test_rows_of_one_segment():
    rows = many(make(sentence_order=False, token_types=0), 10)
    assert present(rows) == ["tokens", "targets", "loss_weights", "positions", "segments", "sample_ids"]
    for row in range(len(rows.tokens)):
        (text,) = segments(rows, row)
        assert STORY.count(text) == 1
    assert abs(rows.loss_weights.sum() / ((rows.targets < 256) & (rows.segments == 1)).sum() - 0.15) < 0.02


def test_dtypes_and_shapes_are_those_of_abstract_batch():
    for types, ordered in ((2, True), (0, True), (2, False), (0, False)):
        config = run_config(model={"token_types": types}, objective={"sentence_order": ordered})
        expected = abstract_batch(config)
        rows = make(token_types=types, sentence_order=ordered).rows(0, 0, 16)
        assert present(rows) == present(expected)
        for field in present(rows):
            leaf, shape = getattr(rows, field), getattr(expected, field)
            assert leaf.dtype == shape.dtype
            assert (2, 8, *leaf.shape[1:]) == shape.shape and (len(shape.shape) == 2) == (field in PER_ROW)


# --- order ------------------------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(step=st.integers(0, 10**9), cuts=st.sets(st.integers(1, 15)))
def test_rows_do_not_depend_on_the_ranges_they_are_read_in(step, cuts):
    rows = make()
    edges = [0, *sorted(cuts), 16]
    parts = [rows.rows(step, start, stop) for start, stop in pairwise(edges)]
    assert_same(jax.tree.map(lambda *leaves: np.concatenate(leaves), *parts), rows.rows(step, 0, 16))


@pytest.mark.parametrize("spec", [P(), P(None, "data"), P(None, ("data", "model")), P("data", "model")])
def test_a_sharded_batch_equals_the_rows_on_the_host(spec):
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    rows = make(batch=32, microbatches=4)
    sharding = NamedSharding(mesh, spec)
    fields = present(rows.rows(9, 0, 32))
    assert {*FIELDS} - {*fields} == {"end_positions", "row_segments"}
    batch = rows.batch(9, Batch(**dict.fromkeys(fields, sharding)))
    assert_same(batch, jax.tree.map(lambda leaf: leaf.reshape(4, 8, *leaf.shape[1:]), rows.rows(9, 0, 32)))
    assert all(getattr(batch, field).sharding == sharding for field in fields)


def test_a_field_without_sharding_is_left_out():
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    batch = make().batch(0, Batch(here, here, here, None, None, here))
    assert present(batch) == ["tokens", "targets", "loss_weights", "sample_ids"]


def test_reading_one_step_equals_running_up_to_it_with_any_microbatches():
    running = make()
    for step in range(30):
        rows = running.rows(step, 0, 16)
    assert_same(make(microbatches=8).rows(29, 0, 16), rows)


def test_every_epoch_has_each_window_once_and_its_own_masks():
    count = make().num_examples
    rows = make(batch=count, microbatches=1, short_seq_prob=0.0)
    whole = many(rows, 2)
    epochs = range(count), range(count, 2 * count)
    for epoch in epochs:
        spans = sorted((STORY.index(text), len(text)) for text in (text_of(whole, row) for row in epoch))
        assert all(a + length <= b for (a, length), (b, _) in pairwise(spans)), "no text comes twice"
        assert sum(length for _, length in spans) > 0.8 * len(TOKENS)
    first, second = ({whole.tokens[row].tobytes() for row in epoch} for epoch in epochs)
    assert len(first & second) < 0.05 * count  # documents of a few words may come the same again
    assert (make(seed=6).rows(0, 0, 16).tokens != make().rows(0, 0, 16).tokens).any(axis=1).all()  # another seed


def test_a_memory_map_reads_the_same(tmp_path):
    TOKENS.tofile(tmp_path / "tokens.bin")
    mapped = np.memmap(tmp_path / "tokens.bin", TOKENS.dtype, mode="r")
    assert_same(make(tokens=mapped).rows(7, 0, 16), make().rows(7, 0, 16))


# --- validation -------------------------------------------------------------------------------------------------------


def test_validation_pads_its_end_with_weight_0():
    held = make("validation", eval_batches=10**6)
    assert len(held) == -(-held.num_examples // 16) and held.num_examples % 16
    rows = many(held, len(held))
    real = np.arange(len(rows.tokens)) < held.num_examples
    assert (rows.loss_weights[~real] == 0).all() and (rows.label_weights == real).all()
    assert rows.loss_weights[real].any(axis=1).mean() > 0.5
    found = [text_of(rows, row) for row in np.flatnonzero(real)]
    assert len(set(found)) == len(found)


@pytest.mark.parametrize("batch", [1, 3, 50])
def test_the_same_rows_are_validated_at_any_batch_size(batch):
    def rows(size):
        held = make("validation", eval_batches=10**6, batch=size, microbatches=1)
        whole = many(held, len(held))
        return jax.tree.map(lambda leaf: leaf[: held.num_examples], dataclasses.replace(whole, sample_ids=None))

    assert_same(rows(batch), rows(16))


def test_validation_is_evenly_spaced(monkeypatch):
    held, shown = make("validation", eval_batches=2), []
    monkeypatch.setattr(held, "read", lambda indices: shown.extend(indices.example_R))
    for step in range(len(held)):
        held.rows(step, 0, 16)
    assert len(held) == 2 and len(shown) == 32 and shown[0] == 0
    assert set(np.diff(shown)) <= {held.num_examples // 32, held.num_examples // 32 + 1}


# --- edge cases -------------------------------------------------------------------------------------------------------


def test_a_document_shorter_than_a_row_is_padded_and_an_empty_one_left_out():
    text = b"\0\0one two\0\0three. four five\0" + b"six seven eight nine ten " * 4
    rows = make(tokens=np.frombuffer(text, np.uint8), short_seq_prob=0.0)
    assert rows.num_examples == 1 + 1 + 1
    found = {text_of(rows.rows(step, 0, 16), row) for step in (0, 1) for row in range(16)}
    assert {b"one two", b"three. four five"} <= found and b"\0" not in b"".join(found)


def test_a_word_longer_than_a_row_is_cut_and_has_no_order_label():
    rows = make(tokens=np.full(1000, ord("x"), np.uint8), short_seq_prob=0.0).rows(0, 0, 16)
    assert (rows.label_weights == 0).all() and (rows.labels == 0).all() and (rows.loss_weights == 0).all()
    assert ((rows.targets == ord("x")).sum(axis=1) == 61).all()
    assert ((rows.targets == SPECIAL.sep).sum(axis=1) == 1).all() and (rows.token_type_ids == 0).all()


@settings(deadline=None, max_examples=60)
@given(
    text=st.text(st.sampled_from("ab. \n\0"), min_size=40, max_size=300),
    context=st.integers(8, 24),
    short=st.sampled_from([0.0, 0.9]),
    ordered=st.booleans(),
)
def test_rows_of_any_text_occur_in_it(text, context, short, ordered):
    data = text.encode()
    if len(data.replace(b"\0", b"")) < context:
        return
    rows = make(tokens=np.frombuffer(data, np.uint8), context=context, short_seq_prob=short, sentence_order=ordered)
    batch = rows.rows(3, 0, 16)
    for row in range(16):
        found = segments(batch, row)
        assert all(found) and len(found) == (2 if ordered and batch.label_weights[row] else 1)
        assert text_of(batch, row) in data
    assert (batch.targets[batch.loss_weights == 1] < 256).all()


@pytest.mark.parametrize("split", ["training", "validation"])
def test_too_short_a_text_is_an_error_with_its_sizes(split):
    with pytest.raises(DataError, match=rf"{split} text: 16 tokens.*model\.context=64 holds 61\. Add text"):
        make(split, tokens=TOKENS[:16])


def test_validation_text_of_which_nothing_is_masked():
    with pytest.raises(DataError, match=r"validation text: none of its 1000 tokens is masked.*eval_every=0"):
        make("validation", tokens=np.full(1000, ord("x"), np.uint8))


def test_synthetic_data_has_no_words():
    with pytest.raises(
        ConfigError, match=r"data\.source=synthetic: its tokens form no words\. Use data\.source=python"
    ):
        make(tokenizer=NumberTokenizer())


# --- loaders of a config ----------------------------------------------------------------------------------------------


def test_the_objective_selects_the_loader(tmp_path):
    (tmp_path / "a.txt").write_bytes(STORY.replace(b"\0", b"\n"))
    corpus = load_data(Text(source="text", path=str(tmp_path / "a.txt")), 0, 260)
    masked = run_config()
    causal = run_config(model={"kind": "gpt", "token_types": 0}, objective={"kind": "causal_lm"})
    for split in ("training", "validation"):
        assert isinstance(make_loader(masked, corpus, split), MaskedLMLoader)
        assert isinstance(make_loader(causal, corpus, split), CausalLMLoader)
        assert make_loader(causal, corpus, split).tokens.ids is getattr(corpus, {"training": "train"}.get(split, split))
    for config in (masked, causal):
        rows = make_loader(config, corpus, "training").rows(0, 0, 16)
        assert present(rows) == present(abstract_batch(config))
        assert len(make_loader(config, corpus, "validation")) == 3 and rows.tokens.shape == (16, 64)
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    shardings = jax.tree.map(lambda _: here, abstract_batch(masked))
    batch = make_loader(masked, corpus, "training").batch(1, shardings)
    assert jax.tree.map(jax.typeof, batch) == jax.tree.map(
        lambda x: jax.typeof(np.zeros(x.shape, x.dtype)), abstract_batch(masked)
    )
    assert_same(
        jax.tree.map(lambda leaf: leaf.reshape(16, *leaf.shape[2:]), batch),
        make_loader(masked, corpus, "training").rows(1, 0, 16),
    )
