"""Two processes as one job, on this machine."""

import json
import socket
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from spmd_lm.errors import ConfigError
from spmd_lm.runtime import devices
from tests import processes

STEPS = ("train.steps=4", "train.log_every=1", "train.eval_every=4", "checkpoint.every=2", "model.layers=4")


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("localhost", 0))
        return s.getsockname()[1]


def start(directory: Path, overrides: tuple[str, ...], **environment: str) -> subprocess.Popen:
    return processes.start("train", "configs/pipeline.yaml", f"run.dir={directory}", *STEPS, *overrides, **environment)


def losses(directory: Path) -> list[tuple[int, float]]:
    records = map(json.loads, (directory / "metrics.jsonl").read_text().splitlines())
    return [(record["step"], record.get("loss", record.get("eval_loss"))) for record in records]


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides",
    [
        ("parallel.schedule=1f1b",),  # replicas of the pipeline in each process
        ("parallel.pipe=4", "parallel.data=1", "parallel.schedule=gpipe", "parallel.zero=0"),  # stages in each
    ],
    ids=["data", "pipe"],
)
def test_two_processes_train_what_one_does(tmp_path, overrides):
    address = {"JAX_COORDINATOR_ADDRESS": f"localhost:{free_port()}", "JAX_NUM_PROCESSES": "2"}
    both = [start(tmp_path / "two", overrides, **address, JAX_PROCESS_ID=str(which)) for which in (0, 1)]
    processes.wait(*both)
    processes.wait(start(tmp_path / "one", overrides))
    two, one = losses(tmp_path / "two"), losses(tmp_path / "one")
    assert [step for step, _ in two] == [step for step, _ in one]
    assert [loss for _, loss in two] == pytest.approx([loss for _, loss in one], rel=1e-6)


def set_all(monkeypatch, **environment: str):
    for name in (devices.COORDINATOR_ADDRESS, devices.NUM_PROCESSES, devices.PROCESS_ID):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)


def set_up(simulated: int):
    return devices.set_up_devices(SimpleNamespace(run=SimpleNamespace(simulate_devices=simulated)))


def test_a_single_process_connects_to_nothing(monkeypatch):
    set_all(monkeypatch)
    assert set_up(simulated=0).run.simulate_devices == 0 and devices.read_processes() == (None, None)


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"JAX_NUM_PROCESSES": "2"}, "go together"),
        ({"JAX_PROCESS_ID": "0"}, "go together"),
        ({"JAX_NUM_PROCESSES": "two", "JAX_PROCESS_ID": "0"}, "JAX_NUM_PROCESSES=two: expected the number"),
        ({"JAX_NUM_PROCESSES": "0", "JAX_PROCESS_ID": "0"}, "JAX_NUM_PROCESSES=0: expected the number"),
        ({"JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "2"}, "JAX_PROCESS_ID=2 is not below JAX_NUM_PROCESSES=2"),
    ],
)
def test_an_inconsistent_environment_is_refused(monkeypatch, environment, message):
    set_all(monkeypatch, JAX_COORDINATOR_ADDRESS="localhost:1", **environment)
    with pytest.raises(ConfigError, match=message):
        set_up(simulated=0)


def test_a_number_without_an_address_is_refused(monkeypatch):
    set_all(monkeypatch, JAX_NUM_PROCESSES="2", JAX_PROCESS_ID="0")
    with pytest.raises(ConfigError, match="each process would train alone"):
        set_up(simulated=0)


def test_simulated_devices_need_a_number(monkeypatch):
    set_all(monkeypatch, JAX_COORDINATOR_ADDRESS="localhost:1")
    with pytest.raises(ConfigError, match="needs JAX_NUM_PROCESSES too"):
        set_up(simulated=2)


def test_simulated_devices_are_divided_among_the_processes():
    with pytest.raises(ConfigError, match=r"run\.simulate_devices=9 is not divisible by JAX_NUM_PROCESSES=2"):
        devices.simulate_devices(9, processes=2)
