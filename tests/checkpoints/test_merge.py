"""Merging: what adapters make of the matrices of their base."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spmd_lm.checkpoints.merge import merge_adapters
from spmd_lm.parallel.trees import leaves_by_path
from spmd_lm.step.program import Program
from tests.helpers import make_config

ADAPTERS = {
    "lora": {"kind": "lora", "rank": 4, "alpha": 12, "targets": ["c_attn", "down"]},
    "ia3": {"kind": "ia3", "targets": ["query", "up", "down"]},
}


@pytest.mark.parametrize("kind", ADAPTERS)
def test_a_merged_matrix_is_rounded_once(kind):
    """Parameters of 16 bits equal float64's result, or its neighbour where a float32 sum lies between two."""
    precision = {"params": "bfloat16", "compute": "bfloat16"}
    program = Program(make_config(adapter=ADAPTERS[kind], precision=precision), jax.devices()[:1])
    draw = np.random.default_rng(0)
    shapes = leaves_by_path(program.plan.shapes)
    params = {path: jnp.asarray(draw.normal(size=leaf.shape), leaf.dtype) for path, leaf in shapes.items()}
    wide = {path: np.asarray(x, np.float64) for path, x in params.items()}
    expected = {path: x for path, x in wide.items() if "_adapter" not in path}
    for path, _ in program.model.adapters:
        name = f"blocks.{path}"
        if kind == "lora":
            a, b = wide[f"{name}_adapter.a"], wide[f"{name}_adapter.b"]
            expected[name] = expected[name] + 3 * (b @ a if path == "mlp.down" else a @ b)
        else:
            expected[name] = expected[name] * wide[f"{name}_adapter.scale"][:, None]
            if path != "mlp.down" and f"{name}_bias" in expected:
                expected[f"{name}_bias"] = expected[f"{name}_bias"] * wide[f"{name}_adapter.scale"]
    result = merge_adapters(params, program.model)
    assert result.keys() == expected.keys()
    for path, x in result.items():
        assert x.dtype == jnp.bfloat16
        rounded = np.asarray(jnp.asarray(expected[path], jnp.bfloat16), np.float64)
        assert np.mean(np.asarray(x, np.float64) != rounded) < 1e-3, path
        np.testing.assert_allclose(np.asarray(x, np.float64), expected[path], rtol=2**-7, atol=2**-12)
