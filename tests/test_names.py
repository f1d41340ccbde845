"""Names are the field's: the words that this code had to itself do not come back, and functions stay small."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "spmd_lm"
FILES = sorted(PACKAGE.rglob("*.py"))

PRIVATE_IDENTIFIERS = {
    *("enter", "leave", "whole", "gathered_sequence", "summed", "places", "at_first", "together", "_live", "live"),
    *(
        "Pieces",
        "kept",
        "held",
        "early",
        "fetching",
        "to_read",
        "dealt",
        "rings",
        "unsummed",
        "go",
        "come_back",
        "half",
    ),
    *("pull_layers", "plus", "merged", "Steps", "Unit", "without", "lean", "looped", "layers_together", "sums", "Draw"),
    *("Heads", "Sums", "of_tokens", "of_rows", "rows_of_one", "samples", "ends_", "pieces", "labelled", "beginning"),
    *("claim", "claimed", "fresh", "take_in", "give_out", "biases", "norm_kind", "hidden_width"),
}
"""As names of functions, classes, arguments, attributes and fields."""

STANDARD = {
    # where: the names on the list that mean there what they mean everywhere
    "parallel/pipeline/interpreter.py": {"half"},  # one half of a tick
    "parallel/pipeline/schedule_table.py": {"half"},
    "ops/rotary.py": {"half"},  # of the features
}


def identifiers(tree: ast.Module):
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.Name):
            yield node.id


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_identifiers_are_the_field_s(path):
    allowed = STANDARD.get(str(path.relative_to(PACKAGE)), set())
    used = PRIVATE_IDENTIFIERS & set(identifiers(ast.parse(path.read_text())))
    assert used <= allowed


def functions(path: Path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef):
            yield node


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_functions_are_small(path):
    """At most 50 lines, and 7 parameters besides self and cls."""
    for function in functions(path):
        a = function.args
        parameters = [each.arg for each in (*a.posonlyargs, *a.args, *a.kwonlyargs) if each.arg not in ("self", "cls")]
        assert len(parameters) <= 7, f"{function.name}: {parameters}"
        assert function.end_lineno - function.lineno < 50, function.name


def test_no_lambda_has_a_name():
    """As ruff's E731, but without exceptions."""
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            named = isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Lambda)
            assert not named, f"{path}:{node.lineno}"


def is_set(node: ast.expr) -> bool:
    """Whether the expression is visibly a set."""
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


def test_config_keys_are_the_field_s():
    of_model, of_objective = r"model\.(hidden|norm_kind|biases)", r"objective\.(rate|short|stride|longest)"
    old = rf"\b({of_model}|{of_objective}|parallel\.mask|remat\.every)\b"
    pages = [*FILES, *ROOT.glob("configs/**/*.yaml"), *ROOT.glob("docs/**/*.md"), ROOT / "README.md"]
    pages = [page for page in pages if "adr" not in page.parts and page.name not in ("log.md", "suggest.py")]
    assert not [page for page in pages if re.search(old, page.read_text())]
