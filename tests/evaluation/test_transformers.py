"""Zero-shot figures of imported models equal those of plain loops over Hugging Face's own."""

import functools
import json
import math

import numpy as np
import pytest

from spmd_lm.checkpoints.restored import open_run
from spmd_lm.cli import main
from spmd_lm.evaluation.scoring import Scorer
from spmd_lm.evaluation.zero_shot import make_tasks
from tests.evaluation.items import ARTICLE, PASSAGES, QUESTIONS, TEXT, figures, write_items
from tests.huggingface.small_models import FLOAT32, import_directory, random_model

ODD = {"vocab_size": 259, "n_positions": 27, "n_embd": 24, "n_layer": 1, "n_head": 2, "n_inner": 40}
SHAPES = {
    "tied": {"vocab_size": 256, "n_positions": 32, "n_embd": 32, "n_layer": 2, "n_head": 4},
    "untied, odd": ODD | {"activation_function": "gelu", "tie_word_embeddings": False, "layer_norm_epsilon": 1e-3},
    "deep, narrow": {"vocab_size": 300, "n_positions": 48, "n_embd": 16, "n_layer": 5, "n_head": 2},
}
BYTES = ["data.source=text", "data.path=unread.txt", "data.tokenizer=bytes"]


@pytest.fixture(scope="module", params=["tied", "untied, odd", pytest.param("deep, narrow", marks=pytest.mark.slow)])
def models(request, tmp_path_factory):
    """A configuration of an imported run, what scores with it, and transformers' model."""
    for name in ("torch", "transformers"):
        pytest.importorskip(name, reason="the extra `hf` is not installed")
    root = tmp_path_factory.mktemp("imported")
    model = random_model("GPT2LMHeadModel", SHAPES[request.param], "float32")
    model.save_pretrained(root / "model")
    config = import_directory(root / "model", root / "run", *FLOAT32, *BYTES)
    return config, Scorer(*open_run(config)[:2]), model


def their_scores(model, context: bytes, ids: bytes) -> list[tuple[float, bool]]:
    """Log-likelihood of each byte after the context, and if it is the greedy choice; a forward pass each."""
    import torch

    result = []
    for end in range(len(ids)):
        read = (context + ids[:end])[-model.config.n_positions :]
        with torch.no_grad():
            logits = model(torch.tensor([list(read)])).logits[0, -1].double()
        result.append((float(torch.log_softmax(logits, -1)[ids[end]]), int(logits.argmax()) == ids[end]))
    return result


def their_continuation(model, context: str, text: str) -> tuple[float, bool]:
    """The harness's row, cut off at its left end."""
    whole, length = (context + text).encode(), len(text.encode())
    scores = their_scores(model, whole[-model.config.n_positions - 1 : -length], whole[-length:])
    return math.fsum(score for score, _ in scores), all(greedy for _, greedy in scores)


def their_text(model, text: bytes, stride: int) -> list[float]:
    """The log-likelihood of each byte but the first, read from the start of the first window that predicts it."""
    context = model.config.n_positions
    starts = [max(0, math.ceil((t - context) / stride)) * stride for t in range(1, len(text))]
    pairs = ((text[start:t], text[t : t + 1]) for t, start in enumerate(starts, 1))
    return [their_scores(model, read, target)[0][0] for read, target in pairs]


def test_figures_agree(models, tmp_path):
    config, scorer, model = models
    found = figures(config, scorer, write_items(tmp_path), stride=7)
    got = {name: task["metrics"] for name, task in found.items()}
    close = functools.partial(pytest.approx, rel=1e-5)

    nats = -math.fsum(their_text(model, TEXT.encode(), 7))
    want = {"nats_per_token": nats / (len(TEXT) - 1), "nats_per_byte": nats / len(TEXT)}
    assert got["text"] == close(want | {"perplexity": math.exp(want["nats_per_token"])})

    wiki, words = "= Title =\n\nIt's a cold day, a one-off (so it was) .", 21
    nats = -math.fsum(their_text(model, wiki.encode(), 7))
    assert got["wikitext"]["perplexity"] == close(math.exp(nats / (len(wiki) - 1)))
    assert got["wikitext"]["word_perplexity"] == close(math.exp(nats / words))

    divided = [passage.rstrip().rpartition(" ") for passage in PASSAGES]
    scores = [their_continuation(model, context, space + word) for context, space, word in divided]
    loss = -math.fsum(score for score, _ in scores) / len(scores)
    assert got["lambada"] == close({"accuracy": np.mean([g for _, g in scores]), "perplexity": math.exp(loss)})


def test_choices_agree_one_by_one(models, tmp_path):
    """The log-likelihoods, not only which is highest."""
    config, scorer, model = models
    write_items(tmp_path)
    choice, race = make_tasks(config, [f"{name}={tmp_path}/{name}.jsonl" for name in ("choice", "race")])
    pairs = [("It was", f" {each}") for each in QUESTIONS[0]["choices"]]
    pairs += [("The clocks were", f" {each}") for each in QUESTIONS[1]["choices"]]
    pairs += [("\0", each) for each in QUESTIONS[2]["choices"]]
    article, (cold, struck, prompt) = ARTICLE["article"], ARTICLE["options"]
    in_race = [(f"{article}\nIn April it was", f" {each} .") for each in cold]
    in_race += [(f"{article}\nWhat struck?", f" {each}") for each in struck]
    in_race += [(article, f"\n{each} is early.") for each in prompt]
    for task, expected in ((choice, pairs), (race, in_race)):
        scored = scorer(task.windows)
        theirs, greedy = zip(*(their_continuation(model, *pair) for pair in expected), strict=True)
        assert scored.window_log_likelihood() == pytest.approx(theirs, rel=1e-5)
        assert scored.window_greedy().tolist() == list(greedy)
        lengths = [len(text.strip()) for _, text in expected]
        found = task.figures(scored).metrics
        for name, by in (("accuracy", theirs), ("accuracy_per_byte", np.divide(theirs, lengths))):
            best = [int(np.argmax(part)) for part in np.split(np.array(by), np.cumsum(SIZES[task.name])[:-1])]
            assert found[name] == np.mean(np.equal(best, LABELS[task.name]))


SIZES, LABELS = {"choice": [3, 2, 4], "race": [4, 4, 4]}, {"choice": [1, 0, 3], "race": [0, 1, 3]}


@pytest.mark.parametrize("models", ["untied, odd"], indirect=True)
def test_the_command_writes_them(models, tmp_path, capsys):
    config, *_ = models
    task = write_items(tmp_path)[2]
    run = [str(config.run.directory), "--devices", "8"]
    validation = ["validation", f"data.path={tmp_path / 'text.txt'}", "data.validation_fraction=0.5"]
    assert main(["eval", *run, "--task", task, "--task", *validation, "--json", "-"]) == 0
    result = json.loads(capsys.readouterr().out)
    lambada, validation = result["tasks"]["lambada"], result["tasks"]["validation"]
    assert result["step"] == 0 and [*result] == ["step", "tasks"] and lambada["n"] == len(PASSAGES)
    low, high = lambada["ci95"]["perplexity"]
    assert low < lambada["metrics"]["perplexity"] < high
    assert validation["n"] == validation["tokens"] - 1 == len(TEXT) // 2
