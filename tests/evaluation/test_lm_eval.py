"""A Llama whose tokenizer begins every text with a token: item by item what lm-eval's own model of Hugging Face's says.

Where the extra `lm-eval` is not installed, a loop over transformers answers the same requests by the same rules."""

import inspect
import json
import re
import types
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from spmd_lm.checkpoints.restored import open_run
from spmd_lm.checkpoints.saved_run import make_run_tokenizer
from spmd_lm.config.schema import RunConfig
from spmd_lm.evaluation.continuations import Encoder
from spmd_lm.evaluation.scoring import Scorer
from spmd_lm.evaluation.zero_shot import make_tasks
from tests.evaluation.items import write_lines
from tests.huggingface.small_models import FLOAT32, LLAMA3, SCALED, import_directory, random_model
from tests.huggingface.test_tokenizers import llama3

CONTEXT = 48
Pair = tuple[str, str]
"""A request: a context, and what is scored after it."""


class Imported(NamedTuple):
    config: RunConfig
    model: object
    tokenizer: object


@pytest.fixture(scope="module")
def imported(tmp_path_factory):
    for name in ("torch", "transformers"):
        pytest.importorskip(name, reason="the extra `hf` is not installed")
    from transformers import AutoTokenizer

    path, (tokenizer, settings) = tmp_path_factory.mktemp("llama"), llama3()
    sizes = {"vocab_size": tokenizer.get_vocab_size(), "max_position_embeddings": CONTEXT, "rope_parameters": LLAMA3}
    model = random_model("LlamaForCausalLM", SCALED | sizes, "float32")
    model.save_pretrained(path / "model")
    tokenizer.save(str(path / "model" / "tokenizer.json"))
    (path / "model" / "tokenizer_config.json").write_text(json.dumps(settings))
    config = import_directory(path / "model", path / "run", *FLOAT32)
    return Imported(config, model, AutoTokenizer.from_pretrained(path / "model"))


class Loop:
    """The rules of lm-eval 0.4 (HFLM, and TemplateLM before it), one forward pass per request."""

    def __init__(self, pretrained, tokenizer):
        self.model, self.tokenizer = pretrained, tokenizer

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        begun = text.startswith(self.tokenizer.bos_token)
        return self.tokenizer.encode(text, add_special_tokens=add_special_tokens and not begun)

    def loglikelihood(self, requests: list) -> list[tuple[float, bool]]:
        return [self._score(*request.args) for request in requests]

    def _score(self, context: str, text: str) -> tuple[float, bool]:
        import torch

        stripped = context.rstrip()
        if stripped:
            row, length = self.encode(context + text), len(self.encode(stripped))
        else:
            row, length = [self.tokenizer.bos_token_id, *self.encode(text, add_special_tokens=False)], 1
        ids = torch.tensor(row[length:])
        with torch.no_grad():
            logits = self.model(torch.tensor([row[-CONTEXT - 1 : -1]])).logits[0, -len(ids) :].double()
        scores = torch.log_softmax(logits, -1).gather(1, ids[:, None])
        return float(scores.sum()), bool((logits.argmax(-1) == ids).all())


@pytest.fixture(scope="module", params=["loop", "lm_eval"])
def theirs(request, imported):
    """The answers to pairs, in order."""
    if request.param == "loop":
        made = Loop(imported.model, imported.tokenizer)
        return lambda pairs: made.loglikelihood([types.SimpleNamespace(args=pair) for pair in pairs])
    for name in ("lm_eval", "accelerate"):
        pytest.importorskip(name, reason="lm-eval's models of Hugging Face's are not installed")
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    hf = HFLM(pretrained=imported.model, tokenizer=imported.tokenizer, batch_size=4, device="cpu")
    return lambda pairs: hf.loglikelihood([Instance("loglikelihood", {}, pair, i) for i, pair in enumerate(pairs)])


# --- 30 items of each task


def contexts(count: int) -> list[str]:
    """Contexts of 1 to 60 words of Python's own documentation; the longest do not fit before what is scored."""
    words = re.findall(r"\S+", f"{inspect.__doc__} {types.__doc__} {inspect.getdoc(re)}")
    return [" ".join(words[7 * i % 150 :][: 1 + i * 7 % 60]) for i in range(count)]


def write_passages(imported: Imported, path: Path) -> list[Pair]:
    """Writes passages, 10 of which end with the model's likeliest word.  Returns the requests."""
    import torch

    found = []
    for context in contexts(200):
        ids = imported.tokenizer(context)["input_ids"][-CONTEXT:]
        with torch.no_grad():
            token = int(imported.model(torch.tensor([ids])).logits[0, -1].argmax())
        word = imported.tokenizer.decode([token])
        ends_alike = imported.tokenizer(context + word)["input_ids"][-1] == token
        if ends_alike and re.fullmatch(r" \w+", word):
            found.append((context, word))
    words = ["", "it", "was", "a", "cold", "day", "in", "April", "so", "it", "was"][1:]
    pairs = [*found[:10], *((context, f" {words[i % 10]}") for i, context in enumerate(contexts(20)))]
    write_lines(path, [{"text": context + word} for context, word in pairs])
    return pairs


CHOICES = ["it", "a bright day", "so it was, and so it is", "April", "returning 31.4", "cold"]


def write_questions(path: Path) -> tuple[list[list[Pair]], list[int]]:
    """Returns the requests of each, and the labels.  The first begins a document, the second with the token that does,
    and the third ends with spaces."""
    made = ["", "<|begin_of_text|>It was", "It was  ", *contexts(27)]
    choices = [[CHOICES[(i + k) % 6] for k in range(2 + i % 3)] for i in range(30)]
    labels = [i % 2 for i in range(30)]
    keys = ("context", "choices", "label")
    write_lines(path, [dict(zip(keys, item, strict=True)) for item in zip(made, choices, labels, strict=True)])
    spaces = ["" if not context or context.endswith(" ") else " " for context in made]
    return [[(made[i], spaces[i] + choice) for choice in choices[i]] for i in range(30)], labels


@pytest.fixture(scope="module")
def scorer(imported):
    return Scorer(*open_run(imported.config)[:2])


@pytest.mark.slow
def test_last_words_are_as_likely_and_as_right(imported, scorer, theirs, tmp_path):
    pairs = write_passages(imported, tmp_path / "lambada.jsonl")
    (task,) = make_tasks(imported.config, [f"lambada={tmp_path}/lambada.jsonl"])
    scored = scorer(task.windows)
    expected, greedy = zip(*theirs(pairs), strict=True)
    assert scored.window_log_likelihood() == pytest.approx(expected, abs=1e-4)
    assert scored.window_greedy().tolist() == list(greedy) and 10 <= sum(greedy) < 30
    found = task.figures(scored).to_dict()
    assert found["metrics"]["accuracy"] == np.mean(greedy) and found["n"] == 30
    assert 0 < found["truncated"] < 30


@pytest.mark.slow
def test_choices_are_as_likely_and_as_right(imported, scorer, theirs, tmp_path):
    questions, labels = write_questions(tmp_path / "choice.jsonl")
    (task,) = make_tasks(imported.config, [f"choice={tmp_path}/choice.jsonl"])
    scored = scorer(task.windows)
    expected, greedy = zip(*theirs([pair for pairs in questions for pair in pairs]), strict=True)
    assert scored.window_log_likelihood() == pytest.approx(expected, abs=1e-4)
    assert scored.window_greedy().tolist() == list(greedy)

    ends = np.cumsum([len(pairs) for pairs in questions])[:-1]
    ours = scored.window_log_likelihood()
    assert [*map(np.argmax, np.split(ours, ends))] == [*map(np.argmax, np.split(np.array(expected), ends))]
    per_byte = np.divide(expected, [len(text.strip()) for pairs in questions for _, text in pairs])
    metrics = task.figures(scored).metrics
    for name, by in (("accuracy", np.array(expected)), ("accuracy_per_byte", per_byte)):
        right = [int(np.argmax(each)) == label for each, label in zip(np.split(by, ends), labels, strict=True)]
        assert metrics[name] == np.mean(right) and 0 < sum(right) < 30


@pytest.mark.slow
def test_each_context_begins_with_the_token_once(imported, tmp_path):
    """Ids show what is compared above."""
    bos = imported.tokenizer.bos_token_id
    encoder = Encoder(make_run_tokenizer(imported.config), imported.config.model.vocab)
    questions, _ = write_questions(tmp_path / "choice.jsonl")
    for context, text in (pair for pairs in questions for pair in pairs):
        ids = encoder.continuation(context, text, "here").context.tolist()
        assert ids[0] == bos and ids.count(bos) == 1
