"""Order and outcomes of cells; the processes are fake."""

import contextlib
import csv
import json
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from spmd_lm.config.load import load
from spmd_lm.config.schema import RunConfig
from spmd_lm.errors import ConfigError, Exit
from spmd_lm.files import write_atomically
from spmd_lm.runtime.directories import lock_directory
from spmd_lm.runtime.metrics import BUCKETS, Status
from spmd_lm.runtime.signals import StopSignals
from spmd_lm.sweeps import runner
from spmd_lm.sweeps.cells import Cell, Outcome
from spmd_lm.sweeps.jobs import LocalJobs
from spmd_lm.sweeps.runner import Runner
from spmd_lm.sweeps.sweep import check_recipes, read_owner, run_cells
from spmd_lm.sweeps.table import CellTable, parquet
from tests.processes import ROOT


class FakeJobs:
    """Processes that end when they are polled for the second time, with the exit codes given by cell ID."""

    name, outlive_sweep = "paper", False

    def __init__(self, codes: dict[str, int] | None = None):
        self.codes, self.started, self.most_at_once, self.stopped = codes or {}, [], 0, []
        self._polls: dict[str, int] = {}

    def start(self, cell: Cell, slot: int) -> None:
        self.started.append(cell.id)
        self._polls[cell.id] = 0
        self.most_at_once = max(self.most_at_once, len(self._polls))

    def poll(self, cell: Cell) -> int | None:
        self._polls[cell.id] += 1
        if self._polls[cell.id] < 2:
            return None
        del self._polls[cell.id]
        code = Exit.PREEMPTED if self.stopped else self.codes.get(cell.id, 0)
        if code == 0:
            finish(cell)
        return code

    def stop(self, number: signal.Signals) -> None:
        self.stopped.append(number)


def finish(cell: Cell, state: str = "done") -> None:
    status = Status(path=cell.directory / "status.json", state=state, step=cell.config.train.steps, restarts=0,
                    goodput=dict.fromkeys(BUCKETS, 0.0), exit_code=0)  # fmt: skip
    cell.directory.mkdir(parents=True, exist_ok=True)
    status.write()


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(runner, "SECONDS_BETWEEN_POLLS", 0.001)


@pytest.fixture
def cells(tmp_path) -> list[Cell]:
    return [Cell(name, {"train.seed": i}, config_of(tmp_path / "cells" / name)) for i, name in enumerate("abcd")]


def config_of(directory: Path, *overrides: str) -> RunConfig:
    return load(ROOT / "configs" / "debug.yaml", [f"run.dir={directory}", "run.simulate_devices=8", *overrides])


def run(cells, jobs, at_once=1, on_change: Callable[[], None] = lambda: None, received=None):
    log: list[str] = []
    signals = StopSignals()
    signals.received = received
    each = Runner(cells, jobs, at_once, log.append)
    return each.run(signals, on_change), each, log


def test_all_cells_run_once(cells):
    jobs = FakeJobs()
    code, each, _ = run(cells, jobs)
    assert code == Exit.DONE and {outcome.status for outcome in each.outcomes.values()} == {"done"}
    assert jobs.started == ["a", "b", "c", "d"] and jobs.most_at_once == 1
    jobs = FakeJobs()
    assert run(cells, jobs)[0] == Exit.DONE and not jobs.started


def test_at_once_is_a_limit_that_is_used(cells):
    jobs = FakeJobs()
    run(cells, jobs, 3)
    assert jobs.most_at_once == 3 and sorted(jobs.started) == ["a", "b", "c", "d"]


def test_a_failed_cell_does_not_stop_the_others_and_is_tried_again(cells):
    cells[1].directory.mkdir(parents=True)
    (cells[1].directory / "output.log").write_text("step 1\nerror: first\nerror: the disk is full\n")
    code, each, log = run(cells, FakeJobs({"b": 2}))
    assert code == Exit.CHECK_FAILED
    assert each.outcomes["b"] == cells[1].outcome() == ("failed", 2, "the disk is full")
    assert "b: failed in" in log[3] and "exit code 2: the disk is full (1 of 4 done)" in log[3]
    jobs = FakeJobs()
    code, each, log = run(cells, jobs)
    assert (code, jobs.started) == (Exit.DONE, ["b"]) and log[:2] == ["3 of 4 cells are done already",
                                                                      "b: trying again on paper"]  # fmt: skip
    assert cells[1].outcome() == ("done", 0, "")


def test_a_killed_cell_names_the_signal(cells):
    code, each, _ = run(cells, FakeJobs({"a": 137}))
    assert code == Exit.CHECK_FAILED and each.outcomes["a"][:2] == ("failed", 137)
    assert "killed by signal 9" in each.outcomes["a"].reason


def test_a_cell_whose_directory_cannot_be_made_fails_alone(cells):
    cells[1].directory.parent.mkdir()
    cells[1].directory.write_text("a file")
    code, each, log = run(cells, FakeJobs())
    assert code == Exit.CHECK_FAILED and [each.outcomes[id].status for id in "abcd"] == [
        "done",
        "failed",
        "done",
        "done",
    ]
    assert each.outcomes["b"].exit_code == Exit.CONFIG and f"{cells[1].directory}: File exists" in "\n".join(log)


def test_a_process_that_ends_well_but_is_not_done_is_a_failure(cells, monkeypatch):
    monkeypatch.setattr(f"{__name__}.finish", lambda cell: None)
    code, each, _ = run(cells[:1], FakeJobs())
    assert code == Exit.CHECK_FAILED and each.outcomes["a"].status == "failed"


def test_a_preempted_cell_is_resumed_by_the_next_sweep(cells):
    code, each, _ = run(cells, FakeJobs({"c": 3}))
    assert code == Exit.PREEMPTED and each.outcomes["c"] == ("preempted", 3, "")
    code, _, log = run(cells, FakeJobs())
    assert code == Exit.DONE and "c: resuming on paper" in log


@pytest.mark.parametrize("number, code", [(signal.SIGTERM, Exit.PREEMPTED), (signal.SIGINT, Exit.INTERRUPTED)])
def test_a_signal_is_passed_on_and_nothing_more_starts(cells, number, code):
    jobs = FakeJobs()
    signals = StopSignals()
    each = Runner(cells, jobs, 2, lambda line: None)

    def stop_when_two_run() -> None:
        if len(jobs.started) == 2:
            signals.received = number

    assert each.run(signals, stop_when_two_run) == code
    assert jobs.started == ["a", "b"] and {*jobs.stopped} == {number}
    assert [each.outcomes[id].status for id in "abcd"] == ["preempted", "preempted", "pending", "pending"]


def test_a_cell_that_is_told_to_stop_before_it_can_answer_is_preempted(cells, monkeypatch):
    """A process is in that state while Python starts."""
    local, start, started = LocalJobs(), subprocess.Popen, []
    commands = iter([["/bin/sleep", "60"], ["/bin/sh", "-c", "kill -TERM $$"]])
    monkeypatch.setattr(
        subprocess, "Popen", lambda _, **options: started.append(start(next(commands), **options)) or started[-1]
    )
    for cell, is_told, code in ((cells[0], True, Exit.PREEMPTED), (cells[1], False, 128 + signal.SIGTERM)):
        cell.prepare()
        local.start(cell, 0)
        if is_told:
            local.stop(signal.SIGTERM)
        started[-1].wait()
        assert local.poll(cell) == code


def test_jobs_that_outlive_the_sweep_are_left_in_their_queue(cells):
    jobs = FakeJobs()
    jobs.outlive_sweep = True
    code, each, log = run(cells, jobs, 4, received=None)
    assert code == Exit.DONE
    signals = StopSignals()
    for cell in cells:
        (cell.directory / "status.json").unlink()
    each = Runner(cells, jobs, 4, log.append)
    jobs.started.clear()

    def stop() -> None:
        signals.received = signal.SIGTERM if jobs.started else None

    assert each.run(signals, stop) == Exit.PREEMPTED and not jobs.stopped
    assert log[-1] == "4 cells stay in the queue of paper. The same command waits for them."


def test_a_cell_that_another_process_trains_is_waited_for(cells):
    jobs, lock = FakeJobs(), contextlib.ExitStack()

    def finish_it() -> None:
        if jobs.started:
            finish(cells[0])
            lock.close()

    cells[0].directory.mkdir(parents=True)
    lock.enter_context(lock_directory(cells[0].directory, print, True))
    code, _, log = run(cells[:2], jobs, 2, finish_it)
    assert code == Exit.DONE and jobs.started == ["b"]
    assert log[0] == f"a: another process trains {cells[0].directory}; waiting until it ends"


def test_tables_have_every_cell_and_its_figures(cells, tmp_path):
    import arro3.io

    (tmp_path / "cells" / "a").mkdir(parents=True)
    records = [{"step": s, "loss": 5.0 - s, "tokens_per_second": s * 10.0, "mfu": None, "lr": 1e-3} for s in (1, 2, 3)]
    write_atomically(tmp_path / "cells" / "a" / "metrics.jsonl", "".join(json.dumps(r) + "\n" for r in records))
    with StopSignals() as signals:
        code, found = run_cells(cells, tmp_path, FakeJobs({"b": 4}), 1, signals, print)
    assert code == Exit.CHECK_FAILED
    lines = [*csv.DictReader((tmp_path / "cells.csv").open())]
    assert list(lines[0])[:6] == ["id", "status", "exit_code", "reason", "run_dir", "train.seed"]
    assert [(line["id"], line["status"], line["exit_code"]) for line in lines] == [
        ("a", "done", "0"), ("b", "failed", "4"), ("c", "done", "0"), ("d", "done", "0")
    ]  # fmt: skip
    assert (lines[0]["loss"], lines[0]["tokens_per_second"], lines[1]["loss"]) == ("2.0", "25.0", "")
    assert found[0]["parameters"] > 0 and found[0]["devices"] == 8
    table = arro3.io.read_parquet(tmp_path / "cells.parquet").read_all()
    assert table.column_names == list(lines[0])
    assert table["loss"].to_pylist() == [2.0, None, None, None] and table["train.seed"].to_pylist() == [0, 1, 2, 3]


def test_columns_without_a_value_yet_have_the_type_of_those_to_come(tmp_path):
    import arro3.io
    from arro3.core import DataType

    (tmp_path / "cells.parquet").write_bytes(
        parquet([{"exit_code": None, "peak_bytes": None, "loss": None, "on": [True]}])
    )
    schema = arro3.io.read_parquet(tmp_path / "cells.parquet").schema
    expected = [DataType.int64(), DataType.int64(), DataType.float64(), DataType.string()]
    assert [schema.field(i).type for i in range(4)] == expected


def test_cells_trained_with_other_settings_are_refused(cells, tmp_path):
    cells[0].prepare()
    finish(cells[0])
    other = config_of(cells[0].directory, "optim.lr=0.5")
    with pytest.raises(ConfigError, match=r"other settings(.|\n)*a:  optim.lr: "):
        check_recipes([Cell("a", {}, other)])


def test_cells_with_damaged_files(cells, tmp_path):
    """A damaged status is that cell's failure; without a configuration nobody knows what was trained."""
    for cell in cells[:2]:
        cell.prepare()
        finish(cell)
    (cells[0].directory / "status.json").write_text("{")
    check_recipes(cells)
    code, each, _ = run(cells, FakeJobs({"a": 5}))
    assert code == Exit.CHECK_FAILED and [each.outcomes[id].status for id in "ab"] == ["failed", "done"]
    (cells[1].directory / "config.yaml").unlink()
    with pytest.raises(ConfigError, match=f"Restore .*, or delete {cells[1].directory} to train"):
        check_recipes(cells)


def test_a_finished_cell_says_why_it_has_no_figures(cells):
    cells[0].prepare()
    finish(cells[0])
    (cells[0].directory / "metrics.jsonl").write_text("garbage\n")
    record, *_ = CellTable(cells[:1]).records({"a": Outcome("done", 0)})
    assert record["status"] == "done" and "metrics.jsonl: line 1 is not a record" in record["reason"]


def test_tables_that_cannot_be_written_are_told(cells, tmp_path):
    (tmp_path / "cells.parquet").mkdir()
    with StopSignals() as signals, pytest.raises(ConfigError, match=r"parquet: cannot be written: Is a directory"):
        run_cells(cells, tmp_path, FakeJobs(), 1, signals, print)


@pytest.mark.parametrize("text", [b"", b"[1]", b"\xff", b'"x'])
def test_a_damaged_owner_is_told(text, tmp_path):
    (tmp_path / "sweep.yaml").write_bytes(text)
    with pytest.raises(ConfigError, match=f"is damaged.*If {tmp_path} is this sweep's, delete that file"):
        read_owner(tmp_path / "sweep.yaml")


def test_another_process_of_a_job_starts_what_the_first_one_has_prepared(cells, monkeypatch):
    """Exit codes count: the first one writes status.json, maybe later."""
    jobs, prepared = FakeJobs(), []
    jobs.poll = lambda cell: 0
    each = Runner(cells[:1], jobs, 1, lambda line: None, is_first=False)

    def prepare(_: float) -> None:
        assert not jobs.started
        cells[0].prepare()
        prepared.extend(sorted(cells[0].directory.iterdir()))

    monkeypatch.setattr("time.sleep", prepare)
    cells[0].directory.mkdir(parents=True)
    with lock_directory(cells[0].directory, print, True):  # by the cell's first process
        assert each.run(StopSignals(), lambda: None) == Exit.DONE and each.outcomes["a"].status == "done"
        assert jobs.started == ["a"] and sorted(cells[0].directory.iterdir()) == prepared
