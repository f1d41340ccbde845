"""A run as a model of the EleutherAI harness: its figures are those of `spmd-lm eval`.

Where the extra `lm-eval` is not installed, classes of the same form stand in for the two that the adapter uses."""

import dataclasses
import importlib
import json
import sys
import types

import numpy as np
import pytest

from spmd_lm.errors import ConfigError, DataError
from spmd_lm.evaluation.scoring import Scorer
from spmd_lm.generation.sampling import Sampling
from tests.evaluation.items import PASSAGES, QUESTIONS, TEXT, figures, write_items
from tests.huggingface.small_models import FLOAT32, HF_CONFIG, import_directory, make_directory, make_tensors

SIZES = HF_CONFIG | {"vocab_size": 256, "n_positions": 32, "n_layer": 2}


@dataclasses.dataclass
class FakeInstance:
    request_type: str
    doc: dict
    arguments: tuple
    idx: int

    @property
    def args(self):
        return self.arguments


class FakeLM:
    def __init__(self):
        self.cache_hook = None


@pytest.fixture(scope="module")
def harness():
    """The module spmd_lm.evaluation.harness, and what makes a request."""
    try:
        instance, model = (importlib.import_module(f"lm_eval.api.{name}") for name in ("instance", "model"))
        assert model.LM.__init__ and instance.Instance
        yield importlib.import_module("spmd_lm.evaluation.harness"), instance.Instance
    except ImportError:
        with pytest.MonkeyPatch.context() as patch:
            for name, content in {"model": {"LM": FakeLM}, "instance": {"Instance": FakeInstance}}.items():
                module = types.ModuleType(f"lm_eval.api.{name}")
                vars(module).update(content)
                patch.setitem(sys.modules, module.__name__, module)
            for name in ("lm_eval", "lm_eval.api"):
                patch.setitem(sys.modules, name, types.ModuleType(name))
            patch.delitem(sys.modules, "spmd_lm.evaluation.harness", raising=False)
            yield importlib.import_module("spmd_lm.evaluation.harness"), FakeInstance
        sys.modules.pop("spmd_lm.evaluation.harness", None)


@pytest.fixture(scope="module")
def lm(harness, tmp_path_factory):
    root = tmp_path_factory.mktemp("harness")
    (root / "unread.txt").write_text("so it was")
    text = ["data.source=text", f"data.path={root / 'unread.txt'}", "data.tokenizer=bytes"]
    tensors = make_tensors(SIZES)
    tensors["transformer.wte.weight"][128:] = 0  # never likeliest: what is generated is text, whichever bytes it has
    config = import_directory(make_directory(root / "model", tensors, SIZES), root / "run", *FLOAT32, *text)
    return harness[0].HarnessLM(config.run.directory)


@pytest.fixture
def requests(harness):
    def make(kind: str, *arguments: tuple) -> list:
        return [harness[1](kind, {}, each, i) for i, each in enumerate(arguments)]

    return make


def test_likelihoods_are_those_of_eval(lm, requests, tmp_path):
    specs = write_items(tmp_path)
    want = figures(lm.program.config, Scorer(lm.program, lm.params), specs)
    divided = [passage.rstrip().rpartition(" ") for passage in PASSAGES]
    pairs = [(context, f" {word}") for context, _, word in divided]
    found = lm.loglikelihood(requests("loglikelihood", *pairs))
    assert all(type(score) is float and type(greedy) is bool for score, greedy in found)
    metrics = want["lambada"]["metrics"]
    assert np.exp(-np.mean([score for score, _ in found])) == pytest.approx(metrics["perplexity"], rel=1e-12)
    assert np.mean([greedy for _, greedy in found]) == metrics["accuracy"]

    correct = []
    for question in QUESTIONS:
        context, space = question["context"], " " if question["context"] else ""
        pairs = [(context, space + choice) for choice in question["choices"]]
        scores = [score for score, _ in lm.loglikelihood(requests("loglikelihood", *pairs))]
        correct.append(int(np.argmax(scores)) == question["label"])
    assert np.mean(correct) == want["choice"]["metrics"]["accuracy"]


def test_rolling_likelihoods_are_those_of_all_tokens(lm, requests, tmp_path):
    """They follow the token that starts a document, as the harness wants it; a long text is scored in windows."""
    first, second = TEXT[:20], TEXT.replace(" ", "-")  # space at the end of a context would be the continuation's
    got = lm.loglikelihood_rolling(requests("loglikelihood_rolling", (first,), ("",), (second,)))
    ((alone, _),) = lm.loglikelihood(requests("loglikelihood", ("", first)))
    assert got[:2] == [pytest.approx(alone, rel=1e-6), 0.0]
    text = f"\0{second}"
    windows = [("", text[1:33]), (text[32], text[33:65]), (text[len(text) - 33 : 65], text[65:])]
    scores = lm.loglikelihood(requests("loglikelihood", *windows))
    assert got[2] == pytest.approx(sum(score for score, _ in scores), rel=1e-6)
    (tmp_path / "text.txt").write_text(first)
    metrics = figures(lm.program.config, lm.scorer, [f"text={tmp_path}/text.txt"])["text"]["metrics"]
    ((start, _),) = lm.loglikelihood(requests("loglikelihood", ("", first[0])))
    ((rest, _),) = lm.loglikelihood(requests("loglikelihood", (first[0], first[1:])))
    assert rest == pytest.approx(-19 * metrics["nats_per_token"], rel=1e-6) and start < 0


def test_what_is_generated_is_the_greedy_choice(lm, requests):
    contexts, options = ["the day", "so it was", "x"], {"until": [], "max_gen_toks": 12}
    texts = lm.generate_until(requests("generate_until", *((context, options) for context in contexts)))
    scored = lm.loglikelihood(requests("loglikelihood", *zip(contexts, texts, strict=True)))
    assert all(greedy for _, greedy in scored) and max(map(len, texts)) == 12
    (opening,) = lm.generate_until(requests("generate_until", ("", options)))
    assert lm.loglikelihood(requests("loglikelihood", ("", opening)))[0][1]
    text = max(texts, key=len)
    stopped = lm.generate_until(
        requests("generate_until", *((c, options | {"until": ["", text[3:5]]}) for c in contexts))
    )
    assert stopped[texts.index(text)] == text[: text.index(text[3:5])]


def test_options_of_generation(harness):
    parse = harness[0].parse_options
    assert parse({}) == (Sampling(256, greedy=True), [])
    assert parse({"until": "\n", "max_gen_toks": 5, "do_sample": False, "temperature": 0.0}) == (
        Sampling(5, greedy=True),
        ["\n"],
    )
    assert parse({"do_sample": True, "temperature": 0.7, "top_p": 0.9})[0] == Sampling(256, 0.7, 0, 0.9)
    assert harness[0].cut("one, two. three", ["two", "", ".", "four", ","]) == "one"
    with pytest.raises(ConfigError, match="unknown option beams"):
        parse({"beams": 4})


def test_what_cannot_be_scored(lm, requests):
    assert lm.loglikelihood([]) == [] and lm.tokenizer_name == "bytes"
    with pytest.raises(DataError, match="loglikelihood request 1: a continuation of 40 tokens"):
        lm.loglikelihood(requests("loglikelihood", ("a", "b"), ("a", "b" * 40)))
    assert json.dumps(lm.loglikelihood(requests("loglikelihood", ("a", "b"))))
