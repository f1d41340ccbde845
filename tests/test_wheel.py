"""A wheel works without the repository."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests import processes

UV = Path(sys.executable).with_name("uv")
TINY = ["model.layers=1", "train.steps=2", "train.eval_every=0"]


@pytest.mark.slow
@pytest.mark.skipif(not UV.exists(), reason="no uv in this environment to build a wheel with")
@pytest.mark.parametrize("options", [["--wheel"], []], ids=["of a clone", "of an sdist"])
def test_a_wheel_plans_and_trains_what_it_ships(options, tmp_path):
    """The environment is this one: its packages are those that pip would install beside the wheel."""
    subprocess.run([UV, "build", "--quiet", *options, "--out-dir", tmp_path / "dist", processes.ROOT], check=True)
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    package, elsewhere = tmp_path / "package", tmp_path / "elsewhere"
    elsewhere.mkdir()
    install = [UV, "pip", "install", "--quiet", "--python", sys.executable, "--no-deps", "--target", package, wheel]
    subprocess.run(install, check=True)

    def spmd_lm(*arguments: str) -> str:
        command = [sys.executable, "-m", "spmd_lm", *arguments]
        return processes.wait(processes.start_command(command, cwd=elsewhere, PYTHONPATH=str(package)))[0]

    assert "124,439,808" in spmd_lm("plan", "gpt2/124m", "--devices", "8")
    if options:  # what they train is the same
        assert "done: step 2" in spmd_lm("train", "quickstart", *TINY)
