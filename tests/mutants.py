"""`make mutants`: break the parallel code in one place at a time, and see that parity or audit tells.

The places are found in the syntax tree: each collective and placement (dropped, doubled), each product and quotient of
the step's arithmetic (a factor dropped), each row of the rule tables (dropped, moved to another axis), each layout of a
sharding type (turned, without the axes of its addends).  A mutant is the
package with one such change; it is caught when one of WATCHERS fails.  EQUIVALENT lists those that change nothing that
anybody could see, with the reason."""

import argparse
import ast
import concurrent.futures
import copy
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
FILES = [
    "axes.py",
    "ops/collectives.py",
    "ops/compiler_workarounds.py",
    "ops/sharding_types.py",
    "ops/collective_matmul.py",
    "ops/dense.py",
    "ops/cross_entropy.py",
    "ops/embedding.py",
    "ops/experts.py",
    "models/experts.py",
    "models/layers.py",
    "models/mlp.py",
    "models/transformer.py",
    "models/heads.py",
    "period.py",
    "parallel/compiler_workarounds.py",
    "parallel/codecs.py",
    "parallel/rules.py",
    "parallel/zero.py",
    "parallel/plan.py",
    "parallel/sharded_model.py",
    "parallel/layers_loop.py",
    "parallel/prefetch.py",
    "parallel/pipeline/transfer.py",
    "parallel/pipeline/interpreter.py",
    "step/loss_scale.py",
    "step/offload.py",
    "step/optimizer.py",
    "step/train_step.py",
]
COLLECTIVES = {
    "copy_to_region",
    "reduce_from_region",
    "psum",
    "pmax",
    "all_gather",
    "psum_scatter",
    "ppermute",
    "local_slice",
    "reduce_scatter",
    "reduce_scatter_or_psum",
    "gather_replicated_grad",
    "from_first_shard",
    "local_layers",
    "gather_sequence",
    "psum_axes",
    "psum_unreduced",
    "_send",
    "_concatenate",
    "reshard",
    "constrain",
    "as_gradient",
    "residual_stream",
}
PLACED = {
    "tree_add",
    "tree_add_subset",
    "interleave",
    "psum_gradients",
    "scatter",
    "gather",
    "psum_batch",
    "psum_stages",
    "send",
    "write",
    "gather_layers",
    "dynamic_update_slice_in_dim",
    "dynamic_update_index_in_dim",
    "optimization_barrier",
}
FACTORS = (ast.Mult, ast.Div)
ADDENDS = ("reduced", "unreduced")
"""Keywords of sharding types that say over which axes addends lie."""

WATCHERS = [
    "tests/test_mutants.py",
    "tests/generation/test_generator.py",
    "tests/step/test_pipeline.py",
    "tests/models/test_language_model.py",
    "tests/parallel/test_codecs.py",
    "tests/parallel/test_plan.py",
    "tests/parallel/test_sharded_model.py",
    "tests/step/test_loss_scale.py",
    "tests/step/test_train_step.py",
    "tests/test_own_loop.py",
    "tests/step/test_layer_kinds.py",
    "tests/step/test_offload.py",
    "tests/step/test_overlap.py",
    "tests/step/test_allocated_scan.py",
    "tests/evaluation/test_scoring.py",
]  # those tests that are marked `mutants`
FIRST = {
    "models": ["tests/models"],
    "parallel": ["tests/parallel"],
    "pipeline": ["tests/parallel", "test_pipeline"],
    "step": ["test_loss_scale"],
}
"""Watchers likely to notice, or cheap to run, by the package of what is broken."""

EQUIVALENT = {
    # part of a mutant's name: why nobody who watches numbers and communication can see it
    "vocab * dtype.itemsize": "chunks of another size: the same sums; tests/ops/test_cross_entropy.py sees the size",
    "-tokens * row_bytes": "chunks of another size: the same sums; tests/ops/test_cross_entropy.py sees the size",
    "jnp.finfo(norm.dtype).tiny": "a norm of exactly 0 alone; tests/step/test_optimizer.py sees it",
    "optimization_barrier((grads, d_x))": "memory alone: tests/planning/test_audit.py sees the peak",
    "optimization_barrier(results)": "memory alone: tests/planning/test_audit.py sees the peak",
    "0 * first[": "an order of collectives, without which XLA aborts in some starts on a CPU, of steps no watcher has",
    "0 * g[": "memory alone: tests/ops/test_embedding.py sees it",
    "drop residual_stream": "a CPU's compiler loses no gather; tests/planning/test_audit.py sees that an H100's does",
    "reshard(x, partition_spec('batch', SEQUENCE, None))": "as residual_stream, which it is",
    "reshard(jnp.arange(size": "indices that a device computes for itself, wherever they are laid out",
    "turn partition_spec: partition_spec('batch', None)": "each device takes back the part of the scores that it gave",
    "unreduced=_sharding_axes(x, x_dims)": "XLA then sums at the product itself, which is where the layout asks for it",
    "optimization_barrier(inputs)": "a CPU's compiler looks through it; test_audit.py sees an H100's",
    "optimization_barrier(keys)": "seconds to compile alone",
    "optimization_barrier(d_w)": "memory alone, on a TPU",
    "devices * math.gcd": "TPUs alone; tests/planning/test_audit.py sees that a v4 makes an all-reduce",
    "128 * padded": "TPUs alone; tests/ops/test_collectives.py sees the columns",
    "math.prod(outer) * -(-rows // 8)": "TPUs alone; tests/ops/test_collectives.py sees the columns",
    "(devices + 4) * window": "TPUs alone; tests/ops/test_collectives.py sees the columns",
    "optimization_barrier((w, jnp.int32(k)))": "a CPU merges no matmuls; tests/planning/test_audit.py sees an H100's",
}


def places(tree: ast.Module) -> Iterator[tuple[str, ast.AST, str]]:
    """(what is done, to which node, how) for every mutation of a file."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if name in COLLECTIVES | PLACED and node.args:
                yield f"drop {name}", node, "drop"
            if name == "psum":
                yield f"double {name}", node, "double"
            for i, keyword in enumerate(node.keywords):
                if keyword.arg in ADDENDS:
                    yield f"lose {keyword.arg}", node, f"lose {i}"
            if name == "partition_spec" and len(node.args) > 1:
                yield "turn partition_spec", node, "turn"
        elif isinstance(node, ast.BinOp) and isinstance(node.op, FACTORS):
            yield "drop a factor", node, "left"
        elif isinstance(node, ast.Dict):
            for i, (key, value) in enumerate(zip(node.keys, node.values, strict=True)):
                axes = isinstance(value, ast.Name) and value.id.endswith("AXES")
                if axes or (isinstance(value, ast.Tuple) and value.elts):
                    yield f"drop row {ast.unparse(key) if key else '**'}", node, f"row {i}"
                    yield f"move row {ast.unparse(key) if key else '**'}", node, f"move {i}"


def mutated(node: ast.AST, how: str) -> ast.AST:
    node = copy.deepcopy(node)
    if how == "drop":
        return node.args[0]
    if how == "double":
        return ast.Call(ast.Name("_double", ast.Load()), [node], [])
    if how == "left":
        return node.left
    if how == "turn":
        node.args[:2] = reversed(node.args[:2])
        return node
    what, i = how.split()
    if what == "lose":
        del node.keywords[int(i)]
    elif what == "row":
        node.values[int(i)] = ast.Tuple([], ast.Load())
    else:
        axis = "data" if "MODEL" in ast.unparse(node.values[int(i)]) else "model"
        node.values[int(i)] = ast.Tuple([ast.Constant(axis)], ast.Load())
    return node


class Swap(ast.NodeTransformer):
    """Puts one node in the place of another, found by its position."""

    def __init__(self, old: ast.AST, new: ast.AST):
        self.old, self.new = old, new

    def visit(self, node: ast.AST) -> ast.AST:
        return self.new if node is self.old else super().visit(node)


DOUBLE = "\n\ndef _double(x):\n    import jax\n    return jax.tree.map(lambda leaf: 2 * leaf, x)\n"


def mutants() -> Iterator[tuple[str, str, str]]:
    """(name, file, its mutated source)."""
    for file in FILES:
        source = (ROOT / "spmd_lm" / file).read_text()
        count = sum(1 for _ in places(ast.parse(source)))
        for i in range(count):
            tree = ast.parse(source)
            what, node, how = list(places(tree))[i]
            line, old = node.lineno, ast.unparse(node)
            new = Swap(node, mutated(node, how)).visit(tree)
            name = f"{file}:{line}: {what}: {old if len(old) < 70 else old[:67] + '...'}"
            yield name, file, ast.unparse(ast.fix_missing_locations(new)) + DOUBLE


def snapshot(of: Path, place: Path) -> None:
    for part in ("spmd_lm", "tests", "docs"):
        shutil.copytree(of / part, place / part, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(of / "pyproject.toml", place)


def caught(package: Path, file: str | None = None, source: str = "") -> str | None:
    """Name of the test that fails; None for a survivor.  Without a file the package is whole, and nothing may fail."""
    with tempfile.TemporaryDirectory() as place:
        snapshot(package, Path(place))
        if file:
            (Path(place) / "spmd_lm" / file).write_text(source)
        env = os.environ | {"PYTHONPATH": place, "JAX_COMPILATION_CACHE_DIR": str(ROOT / ".cache" / "jax")}
        first = FIRST.get(Path(file or "").parent.name, WATCHERS[:1])
        watchers = sorted(WATCHERS, key=lambda path: not any(part in path for part in first))
        command = [sys.executable, "-m", "pytest", "-x", "-n", "0", "--no-header", *watchers]
        try:
            run = subprocess.run(
                [*command, "-m", "mutants"], cwd=place, env=env, capture_output=True, text=True, timeout=600
            )
        except subprocess.TimeoutExpired:
            return "ten minutes"
    if run.returncode < 0:
        return f"signal {-run.returncode}"
    failed = [line for line in run.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    if run.returncode not in (0, 1, 2) or bool(failed) != bool(run.returncode):
        raise RuntimeError(f"pytest exited with {run.returncode}, and watched nothing:\n{run.stdout}{run.stderr}")
    return failed[0].split("::")[-1][:60] if failed else None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="name the mutants, and run nothing")
    parser.add_argument("--only", default="", help="those whose name has this in it")
    parser.add_argument("--workers", type=int, default=2)
    args = parser.parse_args()
    chosen = [m for m in mutants() if args.only in m[0]]
    if args.list:
        print("\n".join(name for name, *_ in chosen))
        return 0
    with tempfile.TemporaryDirectory() as place:  # whoever edits the package meanwhile does not change what is judged
        snapshot(ROOT, Path(place))
        return judge(Path(place), chosen, args.workers)


def judge(package: Path, chosen: list[tuple[str, str, str]], workers: int) -> int:
    """0 where every mutant is caught or equivalent, and nothing fails without one."""
    if by := caught(package):
        print(f"{by} fails on the package as it is: mend that first")
        return 1
    survivors = 0
    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
        results = pool.map(lambda m: caught(package, *m[1:]), chosen)
        for (name, *_), by in zip(chosen, results, strict=True):
            reason = next((why for place, why in EQUIVALENT.items() if place in name), None)
            verdict = "caught" if by else "equivalent" if reason else "SURVIVED"
            survivors += verdict == "SURVIVED"
            print(f"{verdict:<10} {name}  [{by or reason or ''}]", flush=True)
    print(f"{len(chosen)} mutants, {survivors} survived")
    return int(survivors > 0)


if __name__ == "__main__":
    sys.exit(main())
