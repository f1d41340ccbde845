"""Imports point down only, and what has to be quick stays clear of jax."""

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "spmd_lm"

# From the bottom up.  A part may import what stands below it; parts on one line do not know each other.
LAYERS = (
    {"addresses", "errors", "files", "axes"},
    {"buckets"},
    {"active_rules", "config", "period"},
    {"ops", "batch", "own_module"},
    {"models", "parallel", "data", "runtime", "own_optimizer"},
    {"adapters"},
    {"cost_model"},
    {"analysis", "plots", "prepare", "resolve"},
    {"step"},
    {"checkpoints"},
    {"generation", "planning"},
    {"evaluation", "reports"},
    {"training"},
    {"huggingface"},
    {"quantization"},
    {"sweeps"},
    {"api"},
    {"commands"},
    {"cli"},
    {"__main__"},
)
KNOW = {
    "addresses": set(),
    "files": set(),
    "axes": set(),
    "period": set(),
    "active_rules": {"errors"},
    "buckets": {"addresses", "errors", "files"},
    "config": {"addresses", "axes", "buckets", "errors", "files"},
    "ops": {"active_rules", "axes", "errors"},
    "batch": {"config"},
    "own_module": {"config", "errors"},
    "own_optimizer": {"config", "errors", "own_module"},
}  # these, no more than this


def imports(path: Path) -> set[str]:
    """The parts of the package that a file imports, wherever in it."""
    names = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports by a relative name"
            names += [f"{node.module}.{each.name}" for each in node.names]
        elif isinstance(node, ast.Import):
            names += [each.name for each in node.names]
    return {name.split(".")[1] for name in names if name.startswith("spmd_lm.") and name != "spmd_lm.__version__"}


def height(name: str) -> int:
    (level,) = [level for level, parts in enumerate(LAYERS) if name in parts]
    return level


FILES = [path for path in sorted(PACKAGE.rglob("*.py")) if path != PACKAGE / "__init__.py"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_down(path):
    own = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    others = imports(path) - {own}
    assert not {name for name in others if height(name) >= height(own)}
    assert others <= KNOW.get(own, others)


def test_no_package_does_work_on_import():
    for path in PACKAGE.rglob("__init__.py"):
        body = ast.parse(path.read_text()).body
        assert all(isinstance(node, ast.Expr | ast.Assign | ast.ImportFrom | ast.FunctionDef) for node in body), path


def test_configuration_and_command_import_no_jax():
    code = "import sys, spmd_lm.cli; print(sorted({'jax', 'numpy', 'flax', 'orbax'} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_benchmarks_import_what_exists():
    """Most import inside functions, which no test runs; and some start others, or need what is not installed."""
    benchmarks = PACKAGE.with_name("benchmarks")
    trees = {path.stem: ast.parse(path.read_text()) for path in benchmarks.glob("*.py")}
    for name, tree in trees.items():
        for node in ast.walk(tree):
            if not isinstance(node, ast.ImportFrom) or not node.module:
                continue
            if node.module in trees:
                there = defined(trees[node.module])
            elif node.module.startswith("spmd_lm"):
                there = set(dir(importlib.import_module(node.module)))
            else:
                continue
            assert {each.name for each in node.names} <= there, f"benchmarks/{name}.py:{node.lineno}"


def defined(module: ast.Module) -> set[str]:
    """Names that a module binds itself, at its top."""
    names = {node.name for node in module.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    assigned = [node for node in module.body if isinstance(node, ast.Assign | ast.AnnAssign)]
    return names | {each.id for node in assigned for each in ast.walk(node) if isinstance(each, ast.Name)}
