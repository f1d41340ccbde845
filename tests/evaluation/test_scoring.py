"""Scores depend on the model and the text alone: not on layout, stride or batch."""

import functools
import json

import jax
import numpy as np
import pytest

from spmd_lm.errors import NonFiniteError
from spmd_lm.evaluation.bootstrap import RESAMPLES, Metric, estimate
from spmd_lm.evaluation.scoring import Scored, Scorer, WindowLoader, Windows, sliding_windows
from spmd_lm.step.program import Program
from tests.evaluation.items import figures
from tests.helpers import FLOAT32, canonical, make_config, partitioned, program, run_of

CONTEXT = 16
slow = pytest.mark.slow


# --- windows


@pytest.mark.parametrize("stride", [1, 7, CONTEXT])
@pytest.mark.parametrize("last_is_full", [False, True])
@pytest.mark.parametrize("length", [2, 3, CONTEXT, CONTEXT + 1, CONTEXT + 2, 60, 97])
def test_each_token_is_scored_once_with_all_the_context_of_its_window(length, stride, last_is_full):
    tokens = np.arange(length) % 61
    windows = sliding_windows(tokens, CONTEXT, stride, last_is_full=last_is_full)
    loader = WindowLoader(windows, make_config(train={"batch": 4, "eval_batches": 1}))
    rows = [loader.rows(step, 0, 4) for step in range(len(loader))]
    scored, n = [], len(windows.start)
    for window, start in enumerate(windows.start):
        row, at = rows[window // 4], window % 4
        is_scored = np.flatnonzero(row.loss_weights[at])
        scored += [start + 1 + i for i in is_scored]
        assert (row.targets[at, is_scored] == tokens[start + 1 + is_scored]).all()
        assert (row.tokens[at, : is_scored[-1] + 1] == tokens[start : start + is_scored[-1] + 1]).all()
        assert not window or last_is_full or is_scored[0] == CONTEXT - stride
        full = is_scored[-1] == CONTEXT - 1 or length <= CONTEXT
        assert full if last_is_full or window < n - 1 else windows.stop[-1] == length
    assert scored == list(range(1, length))
    assert not any(row.loss_weights[n % 4 :].any() for row in rows[-1:] if n % 4)  # rows that pad the last batch


def test_a_window_is_greedy_if_all_its_tokens_are():
    scored = Scored(np.array([-1.0, -2, -4, -8, -16]), np.array([1, 1, 0, 1, 1], bool), np.array([0, 2, 4, 5]))
    assert scored.window_log_likelihood().tolist() == [-3, -12, -16]
    assert scored.window_greedy().tolist() == [True, False, True]


def test_windows_move_by_the_stride():
    windows = sliding_windows(np.zeros(40, int), CONTEXT, 7)
    assert windows.start.tolist() == [0, 7, 14, 21, 28] and windows.stop.tolist() == [17, 24, 31, 38, 40]


# --- layouts


@pytest.fixture
def items(tmp_path):
    """Files of token ids, which synthetic data consists of."""

    def ids(seed, count):
        return " ".join(map(str, np.random.default_rng(seed).integers(0, 61, count)))

    (tmp_path / "text.txt").write_text(ids(0, 90))
    passages = [json.dumps({"text": ids(seed, seed)}) for seed in range(2, 25)]
    (tmp_path / "lambada.jsonl").write_text("\n".join(passages))
    lines = [
        {"context": ids(s, s), "choices": [ids(9 * s + c, c + 1) for c in range(3)], "label": 1} for s in range(1, 9)
    ]
    (tmp_path / "choice.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return [f"text={tmp_path}/text.txt", f"lambada={tmp_path}/lambada.jsonl", f"choice={tmp_path}/choice.jsonl"]


@functools.cache
def weights():
    """One device's parameters, on the host, large enough for logits to differ."""
    one = program(make_config(model={"layers": 4}))
    return jax.tree.map(lambda w: 8 * w, canonical(one, one.init()).params)


def placed(p: Program):
    shardings = jax.tree.map(lambda x: x.sharding, p.abstract_state().params)
    padded = jax.jit(p.plan.from_canonical, out_shardings=shardings)
    return padded(weights())


def all_figures(config, items) -> dict:
    p = program(config)
    return figures(config, Scorer(p, placed(p)), items, stride=7)


def pipelined(**keys):
    return make_config(model={"layers": 4}, parallel={"pipe": 2, "microbatches": 4, "data": 1} | keys)


def of_layout(layout: str, microbatches: int = 1):
    return run_of(layout, microbatches, model={"layers": 4})


LAYOUTS = {
    "replica2-data2-model2-sequence-zero3": of_layout("replica2-data2-model2-sequence-zero3", 2),
    "pipe2-data2-model2-zero3": pipelined(data=2, model=2, zero=3),
    "types-data2-model4-sequence-zero1": partitioned(of_layout("data2-model4-sequence-zero1"), "types"),
}
SLOW = {
    name: of_layout(name) for name in ("data8", "data4-model2", "model8-sequence", "data8-zero1", "data8-zero3")
} | {
    "types-data4-model2": partitioned(of_layout("data4-model2", 2), "types"),
    "interleaved": pipelined(schedule="interleaved", chunks=2),
    "breadth_first-zero2": pipelined(schedule="breadth_first", chunks=2, data=2, zero=2),
    "run_idle_stages-sequence": pipelined(run_idle_stages=True, model=2, sequence=True),
    "batch of 40": make_config(model={"layers": 4}, train={"batch": 40}),
}


def assert_same(got: dict, want: dict) -> None:
    assert got.keys() == want.keys()
    for name, task in want.items():
        for kind in ("metrics", "ci95"):
            for metric, value in task[kind].items():
                assert got[name][kind][metric] == pytest.approx(value, rel=1e-9, abs=1e-12), (name, metric)
        assert {**got[name], "metrics": 0, "ci95": 0} == {**task, "metrics": 0, "ci95": 0}


@pytest.mark.mutants
@pytest.mark.parametrize("layout", [*LAYOUTS, *(pytest.param(name, marks=slow) for name in SLOW)])
def test_every_layout_gives_the_same_figures(layout, items, x64):
    """The vocabulary has 61 tokens: all shards but one are padded."""
    want = all_figures(make_config(model={"layers": 4}), items)
    assert want["lambada"]["metrics"]["perplexity"] > 0 and want["lambada"]["truncated"] == 7
    assert_same(all_figures((LAYOUTS | SLOW)[layout], items), want)


def test_neighbours_and_padding_change_nothing(x64):
    """Windows in another order, and alone, have the same scores."""
    p = program(make_config(model={"layers": 4}))
    scorer, windows = Scorer(p, placed(p)), sliding_windows(np.arange(80) * 7 % 61, CONTEXT, 3)
    together = scorer(windows).window_log_likelihood()
    for order in ([3], np.arange(len(windows.start))[::-1]):
        chosen = Windows(windows.tokens, windows.start[order], windows.first[order], windows.stop[order])
        assert scorer(chosen).window_log_likelihood() == pytest.approx(together[order], rel=1e-12)


def test_a_run_on_packed_documents_scores_a_text_as_one(x64):
    windows, data = sliding_windows(np.arange(30) * 7 % 61, CONTEXT, 5), {"source": "tokens", "path": "x", "pack": True}
    plain, packed = (program(make_config(model={"layers": 4}, data=d)) for d in ({"source": "synthetic"}, data))
    scores = [Scorer(p, placed(p))(windows).log_likelihood for p in (plain, packed)]
    np.testing.assert_allclose(*scores, rtol=1e-12)


def test_a_model_that_is_not_finite_is_told(x64):
    p = program(make_config(model={"layers": 4}))
    scorer = Scorer(p, jax.tree.map(lambda w: w * np.nan, placed(p)))
    with pytest.raises(NonFiniteError, match="log-likelihoods are not finite"):
        scorer(sliding_windows(np.arange(9), CONTEXT, 1))


# --- a model that knows its text


@pytest.mark.slow
def test_a_memorised_text_has_a_perplexity_of_one(tmp_path):
    """The model learns one window by heart: cloze is 100%, and the true choice wins."""
    text = "the clock struck one, so the day began."
    config = make_config(
        model={"dropout": 0, "vocab": 256, "context": len(text) - 1},
        data={"source": "text", "path": "unread.txt"},
        precision=FLOAT32,
        optim={"warmup": 10, "clip": 1.0},
        train={"batch": 1, "steps": 100},
    )
    p = program(config)
    ids = np.frombuffer(text.encode(), np.uint8)
    batch = WindowLoader(sliding_windows(ids, len(text) - 1, 1), config).batch(0, p.batch_shardings)
    state = p.init()
    for _ in range(config.train.steps):
        state, _ = p.step(state, batch)

    ends = [i for i, character in enumerate(text) if i > 4 and character == " "] + [len(text)]
    (tmp_path / "text.txt").write_text(text)
    (tmp_path / "lambada.jsonl").write_text("\n".join(json.dumps({"text": text[:end]}) for end in ends))
    choices = ["struck one,", "broke in two, as", "began"]
    (tmp_path / "choice.jsonl").write_text(json.dumps({"context": "the clock", "choices": choices, "label": 0}))
    tasks = [f"text={tmp_path}/text.txt", f"lambada={tmp_path}/lambada.jsonl", f"choice={tmp_path}/choice.jsonl"]
    found = {name: task["metrics"] for name, task in figures(config, Scorer(p, state.params), tasks).items()}
    assert 1 <= found["text"]["perplexity"] < 1.05
    assert found["lambada"]["accuracy"] == 1 and found["lambada"]["perplexity"] < 1.2
    assert found["choice"] == {"accuracy": 1, "accuracy_per_byte": 1}


# --- intervals


def test_an_infinite_perplexity_has_an_infinite_interval():
    losses = np.array([800.0, 900.0, 1000.0])
    found, intervals = estimate({"perplexity": Metric(losses, np.ones(3), np.exp)})
    assert found["perplexity"] == np.inf and intervals["perplexity"] == [np.inf, np.inf]


def test_intervals_are_those_of_a_plain_bootstrap():
    values, sizes = np.random.default_rng(1).normal(3, 1, 400), np.random.default_rng(2).uniform(1, 2, 400)
    metrics = {"mean": Metric(values, np.ones(400)), "ratio": Metric(values, sizes, np.exp)}
    found, intervals = estimate(metrics)
    assert found["mean"] == pytest.approx(values.mean()) and found["ratio"] == pytest.approx(
        np.exp(values.sum() / sizes.sum())
    )
    draw, means = np.random.default_rng(7), []
    for _ in range(4 * RESAMPLES):
        chosen = draw.integers(400, size=400)
        means.append((values[chosen].mean(), np.exp(values[chosen].sum() / sizes[chosen].sum())))
    for (low, high), plain in zip(intervals.values(), np.transpose(means), strict=True):
        spread = np.std(plain)
        assert np.abs(np.quantile(plain, [0.025, 0.975]) - [low, high]).max() < 0.2 * spread
        assert 3.5 * spread < high - low < 4.3 * spread
    assert estimate(metrics) == (found, intervals)  # seeded


def test_an_interval_of_many_items_takes_little_memory(monkeypatch):
    """The resamples are divided, and all are drawn."""
    values = np.random.default_rng(1).normal(3, 1, 300)
    monkeypatch.setattr("spmd_lm.evaluation.bootstrap.MOST_DRAWS", 1000)
    _, intervals = estimate({"mean": Metric(values, np.ones(300))})
    low, high = intervals["mean"]
    assert high - low == pytest.approx(2 * 1.96 * values.std() / 300**0.5, rel=0.15)
