"""The output of a run, on a terminal and in a file."""

import io
import subprocess
import sys

import pytest
from rich.console import Console

from spmd_lm.runtime.progress import Progress

RECORD = {"step": 120, "loss": 2.31, "tokens_per_second": 31_000.0, "mfu": 0.12}


def lines(record: dict) -> str:
    out = io.StringIO()
    progress = Progress(400, Console(file=out, width=200))
    with progress.live_line():
        progress.step(119)
        progress.step(120)
        progress.record(record)
    return out.getvalue()


def test_a_file_gets_a_line_for_each_record():
    line = lines(RECORD)
    assert line.startswith("step 120/400  loss 2.3100  31k tok/s  MFU 12%  ETA ") and line.count("\n") == 1


def test_an_unknown_mfu_is_not_printed():
    assert "MFU" not in lines(RECORD | {"mfu": None})


@pytest.mark.parametrize("last_seconds, message", [(None, "minutes for a large one"), (42.0, "took 42s last time")])
def test_compiling_is_announced(last_seconds, message):
    out = io.StringIO()
    progress = Progress(1, Console(file=out, width=200))
    with progress.compiling(last_seconds):
        assert message in out.getvalue()
    assert "compiled in" in out.getvalue()


def test_a_run_continues_when_its_reader_has_left(tmp_path):
    code = (
        "import sys; from pathlib import Path; from spmd_lm.runtime.progress import Progress; p = Progress(9)\n"
        "for _ in range(9): p.log('x' * 10_000)\n"
        "Path(sys.argv[1]).write_text('trained')"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "end")], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.close()
    assert process.wait() == 0 and (tmp_path / "end").read_text() == "trained"
