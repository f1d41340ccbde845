"""The package's source: lambdas have no names, and nothing iterates over a set."""

import ast
from pathlib import Path

FILES = sorted((Path(__file__).parents[1] / "spmd_lm").rglob("*.py"))


def test_no_lambda_has_a_name():
    """ruff's E731 has exceptions; this has none."""
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            named = isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Lambda)
            assert not named, f"{path}:{node.lineno}"


def is_set(node: ast.expr) -> bool:
    """True if the expression is visibly a set."""
    if isinstance(node, ast.BinOp):
        return is_set(node.left) or is_set(node.right) or ast.unparse(node.left).endswith(".keys()")
    return isinstance(node, ast.Set | ast.SetComp) or ast.unparse(node).startswith(("set(", "frozenset("))


def test_nothing_loops_over_a_set():
    """The order of a set of strings differs from process to process: they would trace different programs."""
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            loops = [node] if isinstance(node, ast.For) else []
            loops += node.generators if isinstance(node, ast.ListComp | ast.DictComp) else []
            assert not [ast.unparse(loop.iter) for loop in loops if is_set(loop.iter)], path
