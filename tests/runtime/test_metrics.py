"""A step has one record, numbers keep their bits, and a reader never sees half a file."""

import json
import math

import pytest

from spmd_lm.errors import CheckpointError
from spmd_lm.files import write_atomically
from spmd_lm.runtime import metrics
from spmd_lm.runtime.formatting import format_duration, format_quantity
from spmd_lm.runtime.metrics import BUCKETS, Attempt, Clock, MetricsLog, Status, read_records
from spmd_lm.runtime.progress import format_record


def logged(directory, steps, resume_step=0, **more):
    log = MetricsLog(directory, resume_step)
    for step in steps:
        log.write({"step": step, "loss": 1 / step, **more})
    log.close()
    return [record["step"] for record in read_records(directory / "metrics.jsonl")]


def test_resuming_drops_records_beyond_the_checkpoint(tmp_path):
    assert logged(tmp_path, [1, 2, 3, 4]) == [1, 2, 3, 4]
    assert logged(tmp_path, [3, 4, 5], resume_step=2) == [1, 2, 3, 4, 5]
    assert logged(tmp_path, [], resume_step=0) == []


@pytest.mark.parametrize(
    "every, resume_step, missing",
    [(2, 9, (8, 9)), (2, 7, None), (2, 6, None), (10, 9, None), (1, 7, (7, 7)), (3, 1, None), (1, 1, (1, 1))],
)
def test_missing_steps_of_a_truncated_file(tmp_path, every, resume_step, missing):
    logged(tmp_path, [2, 4, 6, 20])
    log = MetricsLog(tmp_path, resume_step=resume_step)
    log.close()
    assert log.missing_steps(every) == missing


def test_a_line_cut_short_by_a_crash_is_dropped(tmp_path):
    logged(tmp_path, [1, 2])
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 3, "lo')
    assert logged(tmp_path, [3], resume_step=2) == [1, 2, 3]


@pytest.mark.parametrize("line", [b"oops", b"\xff", b"[]", b"3", b'{"loss": 1.0}', b'{"step": null}'])
def test_a_broken_line_is_named_and_nothing_is_dropped(tmp_path, line):
    text = b'{"step": 1}\n' + line + b'\n{"step": 3}\n'
    (tmp_path / "metrics.jsonl").write_bytes(text)
    with pytest.raises(CheckpointError, match=r"metrics\.jsonl: line 2 is not a record .*Fix.*away"):
        MetricsLog(tmp_path, resume_step=1)
    assert (tmp_path / "metrics.jsonl").read_bytes() == text


def test_floats_keep_every_bit_and_json_stays_json(tmp_path):
    loss = math.pi * 1e-3
    logged(tmp_path, [1], exact=loss, lost=math.inf, unknown=None)
    (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
    record = json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert record["exact"] == loss
    assert record["lost"] is None and record["unknown"] is None


def test_an_atomic_write_that_fails_leaves_the_old_text(tmp_path, monkeypatch):
    path = tmp_path / "status.json"
    write_atomically(path, "old")

    def fail(_):
        raise OSError("disk full")

    monkeypatch.setattr("spmd_lm.files.os.fsync", fail)
    with pytest.raises(OSError, match="disk full"):
        write_atomically(path, "new")
    assert path.read_text() == "old"


def test_status_reads_back(tmp_path):
    assert Status.read(tmp_path) is None
    status = Status(path=tmp_path / "status.json", state="running", step=3, restarts=1, goodput={"step": 1.5})
    assert status.attempts == []  # as of versions that did not write them
    status.attempts = [
        Attempt(
            started="2026-01-01T00:00:00+00:00",
            first_step=1,
            last_step=0,
            devices=1,
            platform="tpu",
            device_kind="v5",
            processes=1,
        )
    ]
    status.write(state="preempted", exit_code=3)
    assert Status.read(tmp_path) == status
    assert json.loads(status.path.read_text())["state"] == "preempted"


OURS = b'{"state": "done", "step": 3, "restarts": 0, "goodput": {}'


@pytest.mark.parametrize(
    "text",
    [
        *(b"{", b"[]", b"3", b"\xff", b"{}", b'{"state": "done"}', OURS + b', "colour": 1}', OURS[:-2] + b"3}"),
        *(OURS[:-1] + b'"init": %s}}' % seconds for seconds in (b"null", b'"1"', b"true", b"[]", b"NaN")),
        *(OURS + b', "compile_seconds": %s}' % seconds for seconds in (b'"1"', b"[1]", b"true")),
    ],
)
def test_a_foreign_status_is_refused(tmp_path, text):
    (tmp_path / "status.json").write_bytes(OURS + b"}")
    assert Status.read(tmp_path).step == 3
    (tmp_path / "status.json").write_bytes(text)
    with pytest.raises(CheckpointError, match=r"status\.json: not a run's status .*away"):
        Status.read(tmp_path)


@pytest.mark.parametrize(
    ("text", "problem"),
    [("[]", r"expected an object of its keys, got \[\]"), ('{"state": 3}', r"state: Input should .*, got 3;")],
)
def test_what_is_wrong_with_a_status_is_said(tmp_path, text, problem):
    (tmp_path / "status.json").write_text(text)
    with pytest.raises(CheckpointError, match=problem):
        Status.read(tmp_path)


def test_a_directory_in_place_of_a_file_is_refused_by_name(tmp_path):
    for name in ("metrics.jsonl", "status.json"):
        (tmp_path / name).mkdir()
    with pytest.raises(CheckpointError, match=r"metrics\.jsonl: cannot be read"):
        read_records(tmp_path / "metrics.jsonl")
    with pytest.raises(CheckpointError, match=r"status\.json: not a run's status"):
        Status.read(tmp_path)


def test_the_clock_counts_each_second_once(monkeypatch):
    now = 100.0
    monkeypatch.setattr(metrics.time, "perf_counter", lambda: now)
    seconds = dict.fromkeys(BUCKETS, 0.0)
    clock = Clock(seconds)
    now += 1  # other
    with clock.time("checkpoint"):
        now += 2
        with clock.time("step"):
            now += 4
        now += 8
    now += 16  # other
    clock.update()
    assert seconds == dict.fromkeys(BUCKETS, 0.0) | {"other": 17, "checkpoint": 10, "step": 4}
    assert clock.elapsed() == (31, 31)
    later = Clock(seconds)
    now += 2
    assert later.elapsed() == (2, 33)


@pytest.mark.parametrize(
    "seconds, text",
    [
        (0.04, "0.0s"),
        (9.87, "9.9s"),
        (12.4, "12s"),
        (72, "1m12s"),
        (3599.6, "1h00m"),
        (11100, "3h05m"),
        (190000, "2d04h"),
    ],
)
def test_durations(seconds, text):
    assert format_duration(seconds) == text


@pytest.mark.parametrize(
    "number, text",
    [(7.25, "7.25"), (312.4, "312"), (999.7, "1000"), (31400, "31.4k"), (999_999, "1000k"), (2.5e6, "2.5M")],
)
def test_quantities(number, text):
    assert format_quantity(number) == text


def test_a_record_as_text():
    speed = {"tokens_per_second": 31_000.0, "mfu": 0.118}
    assert format_record({"step": 120, "loss": 2.31, **speed}) == "  loss 2.3100  31k tok/s  MFU 12%"
    assert format_record({"step": 120, "loss": 2.31, **speed, "mfu": None}) == "  loss 2.3100  31k tok/s"
    assert format_record({"step": 9, "eval_loss": 1.0, "eval_perplexity": 2.718}) == "  eval 1.0000 (perplexity 2.72)"


def test_only_shares_are_printed_as_percentages():
    """Zero-shot tasks' nats and perplexities are not."""
    of_tasks = {"eval_validation_nats_per_token": 2.3, "eval_wikitext_word_perplexity": 41.0}
    of_tasks |= {"eval_choice_accuracy": 0.5, "eval_choice_accuracy_per_byte": 0.6}
    record = {"step": 9, "eval_loss": 1.0, "eval_perplexity": 2.7, "eval_accuracy": 0.25} | of_tasks
    assert format_record(record) == "  eval 1.0000 (accuracy 25.0%, choice 50.0%)"


@pytest.mark.parametrize(
    ("figure", "lower"),
    [
        *((name, True) for name in ("loss", "eval_loss", "eval_text_nats_per_byte", "eval_lambada_perplexity")),
        *((name, False) for name in ("eval_lossless_accuracy", "eval_gloss_accuracy", "eval_accuracy")),
    ],
)
def test_words_of_a_name_say_which_value_is_better(figure, lower):
    assert metrics.lower_is_better(figure) == lower


@pytest.mark.parametrize(("value", "plots"), [(1, True), (0.5, True), (True, False), (1e300, False), ("1", False)])
def test_a_figure_is_a_number_for_an_axis(value, plots):
    assert metrics.is_number(value) == plots
