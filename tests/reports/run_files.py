"""Directories as runs leave them, in any state, without training."""

import json
from pathlib import Path

from spmd_lm.config.load import dump, load
from spmd_lm.runtime.metrics import BUCKETS

HOSTILE = "<script>alert('$x_1$')</script> & \"q\" \x00\x1b"

LIFE = {
    "started": "2026-03-14T15:09:26+00:00",
    "first_step": 1,
    "last_step": 20,
    "seconds": 90.0,
    "exit_code": 0,
    "devices": 8,
    "platform": "cpu",
    "device_kind": "cpu",
    "processes": 1,
    "peak_bytes": None,
}

PIPELINE = ("parallel.model=2", "parallel.pipe=2", "parallel.microbatches=4")


def record(step: int, **changes) -> dict:
    values = {"step": step, "loss": 5 / step**0.1, "grad_norm": 2.0, "lr": 1e-3, "tokens": 1024 * step}
    return values | {"tokens_per_second": 3e4 + step % 7, "mfu": 0.4, "seconds": 0.03} | changes


def make_run(directory: Path, *overrides: str, state="done", step=20, lives=(LIFE,), records=None, **status) -> Path:
    """A run's files.  lives: None for a version that did not record them; records: None for one of each step."""
    directory.mkdir(parents=True, exist_ok=True)
    config = load("configs/debug.yaml", [f"run.name={directory.name}", *overrides])
    (directory / "config.yaml").write_text(dump(config))
    goodput = dict.fromkeys(BUCKETS, 4.0) | {"step": 60.0}
    about = {"state": state, "step": step, "exit_code": 0, "restarts": 0, "goodput": goodput} | status
    about |= {} if lives is None else {"lives": list(lives)}
    (directory / "status.json").write_text(json.dumps(about))
    if records is None:
        records = [record(i, **({"eval_loss": 4.0} if i % 5 == 0 else {})) for i in range(1, step + 1)]
    lines = "".join(json.dumps(each) + "\n" for each in records)
    (directory / "metrics.jsonl").write_text(lines)
    return directory
