"""notebooks/: their form, and the first cell on a machine like Google Colab's.  `make notebooks` runs them whole
(tests/run_notebooks.py)."""

import ast
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
MOST_LINES = 25  # of a cell

PACKAGE_IMPORTS = {"spmd_lm", "spmd_lm.analysis.scaling_law", "spmd_lm.runtime.notebook_setup"}
"""Modules that notebooks may import; `plots` is a name of `spmd_lm`."""


def read(path: Path) -> dict:
    return json.loads(path.read_text())


def code_cells(path: Path) -> list[str]:
    return ["".join(cell["source"]) for cell in read(path)["cells"] if cell["cell_type"] == "code"]


@each_notebook
def test_is_a_notebook_without_outputs(path):
    notebook = read(path)
    assert notebook["nbformat"] == 4 and notebook["metadata"]["kernelspec"]["name"] == "python3"
    assert notebook["cells"][0]["cell_type"] == "markdown" and notebook["cells"][0]["source"][0].startswith("# ")
    ids = [cell["id"] for cell in notebook["cells"]]
    assert len(ids) == len(set(ids))
    for cell in notebook["cells"]:
        assert cell["cell_type"] in ("markdown", "code") and not cell["metadata"]
        assert cell["cell_type"] == "markdown" or (cell["execution_count"], cell["outputs"]) == (None, [])


@each_notebook
def test_the_first_cell_is_the_same_everywhere(path):
    first, other = (re.sub("DEVICES = [18] ", "", code_cells(each)[0]) for each in (path, NOTEBOOKS[0]))
    assert first == other


@each_notebook
def test_cells_are_short(path):
    assert not [cell for cell in code_cells(path) if len(cell.splitlines()) > MOST_LINES]


@each_notebook
def test_uses_what_is_public(path):
    for node in ast.walk(ast.parse("\n".join(code_cells(path)))):
        if isinstance(node, ast.Attribute):
            assert not re.match("_(?!_)", node.attr), node.attr
        if isinstance(node, ast.ImportFrom) and node.module.startswith("spmd_lm"):
            names = {each.name for each in node.names}
            assert node.module in PACKAGE_IMPORTS and not {name for name in names if name.startswith("_")}
        if isinstance(node, ast.Import):
            assert not [each.name for each in node.names if each.name.startswith("spmd_lm.")]


@each_notebook
def test_asserts_what_it_says(path):
    assert [node for node in ast.walk(ast.parse("\n".join(code_cells(path)[1:]))) if isinstance(node, ast.Assert)]


@each_notebook
def test_is_listed(path):
    assert f"]({path.name})" in (path.parent / "README.md").read_text()


def python_process(code: str, cwd: Path, python: Path | str = sys.executable) -> subprocess.CompletedProcess:
    """Runs the code as a kernel in `cwd` would; it sees no TPU or GPU."""
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(Path.home()), "JAX_PLATFORMS": "cpu"}
    return subprocess.run([python, "-c", code], cwd=cwd, env=environment, capture_output=True, text=True, check=False)


FIRST_CELL = code_cells(NOTEBOOKS[0])[0]
WHERE = "\nimport spmd_lm, jax; print(spmd_lm.__file__, jax.__version__, Path('configs').is_dir())"


def test_the_first_cell_without_a_clone_says_what_to_set(tmp_path):
    done = python_process(FIRST_CELL, tmp_path)
    assert done.returncode and "AssertionError: No clone of the repository is here. Set REPOSITORY" in done.stderr


def test_the_first_cell_clones_the_repository_it_is_given(tmp_path):
    if subprocess.run(["git", "rev-parse"], cwd=ROOT, capture_output=True, check=False).returncode:
        pytest.skip("this is no clone, so it cannot be cloned")
    cell = FIRST_CELL.replace('REPOSITORY = ""', f'REPOSITORY = "file://{ROOT}"')
    for _ in range(2):  # the second one finds the clone
        done = python_process(cell + WHERE, tmp_path)
        assert f"{tmp_path}/spmd-lm/spmd_lm/__init__.py" in done.stdout and done.stdout.endswith("True\n"), done.stderr
        assert "8 devices: simulated by the CPU" in done.stdout


COLAB = ["jax==0.7.2", "jaxlib==0.7.2", "flax==0.11.2", "orbax-checkpoint==0.12.4", "tokenizers==0.22.2"]
COLAB += ["numpy==2.1.3", "ipykernel"]
"""Versions on Google Colab with Python 3.13 in August 2026."""


@pytest.fixture
def colab(tmp_path) -> tuple[Callable[[str], subprocess.CompletedProcess], Path]:
    """pip, and the Python, of an environment like Colab's."""
    pythons = [*Path.home().glob(".pyenv/versions/3.13.*/bin/python"), shutil.which("python3.13")]
    pythons = [python for python in pythons if python]
    if not pythons:
        pytest.skip("no Python 3.13, which Google Colab has, under pyenv or on the path")
    subprocess.run([pythons[0], "-m", "venv", tmp_path / "venv"], check=True)
    python = tmp_path / "venv" / "bin" / "python"

    def install(*packages: str) -> None:
        pip = [python, "-m", "pip", "install", "-qq", "--disable-pip-version-check", "--only-binary", ":all:"]
        done = subprocess.run([*pip, *packages], capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"pip cannot install {', '.join(packages)} here: {done.stderr.strip().splitlines()[-1]}")

    install(*COLAB)
    return install, python


@pytest.mark.slow
def test_the_first_cell_in_colab(colab, tmp_path):
    """The cell installs a jax that serves; if the kernel has imported the old one, it says what to do, and does."""
    install, python = colab
    clone = tmp_path / "spmd-lm"
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, listed.split("\0")):
        (clone / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, clone / name, follow_symlinks=False)
    done = python_process(FIRST_CELL + WHERE, tmp_path, python)
    assert "installing" in done.stdout and "8 devices: simulated by the CPU" in done.stdout, done.stderr
    assert str(clone) in done.stdout and "0.7.2" not in done.stdout

    install(*COLAB[:2], COLAB[-2])
    done = python_process("import jax, jax.numpy\n" + FIRST_CELL, tmp_path, python)
    assert "This kernel had imported jax 0.7.2" in done.stderr and "Restart the runtime" in done.stderr
    done = python_process(FIRST_CELL + WHERE, tmp_path, python)
    assert "installing" not in done.stdout and "8 devices: simulated by the CPU" in done.stdout, done.stderr
