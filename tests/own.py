"""The examples of docs/own-model.md, as files."""

import re
from pathlib import Path

from spmd_lm.config.own_modules import sealed

PAGE = Path(__file__).parents[1] / "docs/own-model.md"


def example(name: str) -> str:
    """The example that defines this name."""
    (source,) = (
        each for each in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL) if f" {name}(" in each
    )
    return source


def write_example(directory: Path, name: str) -> str:
    """Writes an example into `directory`; `path.py:Name@hash`."""
    return write_module(directory, name, example(name))


def write_module(directory: Path, name: str, source: str) -> str:
    path = directory / f"{name.lower()}.py"
    path.write_text(source)
    return sealed(f"{path}:{name}")


MIXER = """
import jax
import jax.numpy as jnp
from flax import nnx
from spmd_lm.models.layers import HasMatrices, Norm
from spmd_lm.ops.collectives import copy_to_region, reduce_from_region, residual_stream


class Mixer(HasMatrices):
    '''Averages of earlier tokens, weighted per state; and a penalty on their size.'''

    rules = {"state": "model"}

    def __init__(self, init):
        self.norm = Norm(init)
        self.up, self.down = init.matrix(24, "state"), init.matrix(24, "state")
        self.decay = init.vector(0.5, 24, "state")

    def __call__(self, x, context):
        x = residual_stream(x)
        h = self.matrix("up").multiply(copy_to_region(self.norm(x), "state"))
        steps = jnp.arange(h.shape[1])
        ages = jnp.tril(steps[:, None] - steps)
        weights = jnp.where(ages[..., None] >= 0, jax.nn.sigmoid(self.decay[...]) ** ages[..., None], 0)
        weights = weights * jnp.tril(jnp.ones_like(ages))[..., None].astype(h.dtype)
        h = jnp.einsum("tsd,bsd->btd", weights, h)
        x = x + reduce_from_region(self.matrix("down").multiply(h, transpose=True), "state")
        penalty = jnp.square(context.batch.tokens.astype(h.dtype)).mean(-1).sum() * context.row_weight
        return residual_stream(x), {"penalty": penalty.astype(jnp.float32)}
"""
