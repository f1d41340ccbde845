"""Names are the field's: the words that this code had to itself do not come back, and functions stay small."""

import ast
import re
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "spmd_lm"
FILES = sorted(PACKAGE.rglob("*.py"))
PAGES = [*ROOT.glob("configs/**/*.yaml"), *ROOT.glob("docs/**/*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
PAGES = [page for page in PAGES if "adr" not in page.parts and page.name != "log.md"]

FORMER = """
enter leave total maximum whole gathered_sequence gathered summed part places at_first together live Pieces kept held
early fetching to_read dealt rings unsummed go come_back half pull_layers plus merged Steps Unit ticks stack without
lean looped scan layers_together sums Draw Heads Sums of_tokens of_rows rows_of_one types samples ends theory pieces
rows labelled examples words scores sources beginning scaling describe exchange take_in give_out claim claimed fresh
tensors numbers messages Run Program Span Row Rows Messages schedule CONFIG weights Tree hidden hidden_width validation
mask norm_kind biases every rate short longest stride"""
"""Names of functions, classes, arguments, fields, keys and modules that the field does not have, or has for something
else."""

STANDARD = {
    # those of them that stay, for what everybody means by them
    "total": "a sum",
    "maximum": "numpy's; the most there may be",
    "gathered": "after an all-gather",
    "part": "of a whole that is taken in turns",
    "half": "forward or backward, of a tick; of a head's features",
    "ticks": "of a pipeline schedule",
    "pieces": "SentencePiece's name for its tokens",
    "stack": "numpy's; of layers, as arrays [layers, ...]",
    "scan": "lax.scan",
    "types": "of tokens, as in token_type_ids; of Python",
    "ends": "of an answer, as end positions",
    "rows": "of a batch or a table",
    "examples": "labelled ones",
    "words": "of a text",
    "scores": "of attention, before the softmax",
    "sources": "where each residual or text comes from",
    "scaling": "whether the loss is scaled; of rotary frequencies",
    "describe": "to describe in a line, or as plain data",
    "tensors": "of a safetensors file",
    "numbers": "of signals",
    "messages": "from stage to stage; of errors",
    "theory": "a key of audit's --json",
    "Run": "the section `run`",
    "Program": "step.program",
    "schedule": "of a pipeline",
    "CONFIG": "an exit code, and the argument CONFIG",
    "weights": "parameters; of losses",
    "Tree": "a pytree",
    "hidden": "as in hidden states",
    "validation": "the split",
    "mask": "of attention, of parameters, of tokens",
    "every": "checkpoint.every: steps between checkpoints",
    "stride": "of windows that slide over a text",
    "rate": "of dropout",
}
PRIVATE_NAMES = set(FORMER.split()) - STANDARD.keys()

ORDINARY_IN_TESTS = {
    "held",
    "kept",
    "whole",
    "without",
    "together",
    "samples",
    "pieces",
    "places",
    "sums",
    "short",
    "Rows",
}
"""Words that name local things, as they would anywhere."""


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


def used_names(path: Path) -> set[str]:
    names = {path.stem, *identifiers(ast.parse(path.read_text()))}
    return {name.strip("_") for name in names if not name.startswith("__")}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_names_are_the_field_s(path):
    assert not used_names(path) & PRIVATE_NAMES


def test_exceptions_are_in_use():
    assert not STANDARD.keys() - set().union(*map(used_names, FILES))


def test_tests_use_the_same_names():
    for path in [*ROOT.glob("tests/**/*.py"), *ROOT.glob("benchmarks/*.py")]:
        assert not used_names(path) & (PRIVATE_NAMES - ORDINARY_IN_TESTS), path


def test_docs_use_the_same_names():
    """In docs, a name stands between backticks; some words are nobody's anywhere."""
    nobody_s = r"\b(lean|looped|dealt|unsummed|fetching|to_read|layers_together|pull_layers|take_in|give_out)\b"
    for page in PAGES:
        names = re.findall(r"\w+(?!\.txt)", " ".join(re.findall(r"`([^`\n]+)`", page.read_text())))
        assert not PRIVATE_NAMES & set(names), page
        assert not re.search(nobody_s, page.read_text()), page


def test_one_name_means_one_thing():
    """Each class, type and constant of a module is defined in one module only."""
    defined = Counter()
    for path in FILES:
        names = set()
        for node in ast.parse(path.read_text()).body:
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            names |= {node.name} if isinstance(node, ast.ClassDef) else set()
            names |= {target.id for target in targets if isinstance(target, ast.Name)}
        defined.update(names)
    repeated = [name for name, modules in defined.items() if modules > 1]
    assert repeated == ["__all__", "CHECKS"]  # of packages; of layouts, and all of them


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
    pages = [page for page in [*FILES, *PAGES] if page.name != "suggest.py"]  # which knows the old ones
    assert not [page for page in pages if re.search(old, page.read_text())]
