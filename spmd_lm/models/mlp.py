"""The MLP of a block."""

import functools
from collections.abc import Callable

import jax

from spmd_lm.models.context import BlockContext
from spmd_lm.models.layers import HasMatrices, ParamInit, add_bias

ACTIVATIONS: dict[str, Callable[..., jax.Array]] = {
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
    "swiglu": lambda x, gate: jax.nn.silu(gate) * x,
    "geglu_tanh": lambda x, gate: jax.nn.gelu(gate, approximate=True) * x,
}


class MLP(HasMatrices):
    row_parallel = ("down",)

    def __init__(self, init: ParamInit, out_std: float):
        c = init.c
        self.up, self.up_bias = init.linear(c.mlp_dim, "mlp", "mlp")
        self.down, self.down_bias = init.matrix(c.mlp_dim, "mlp", out_std), init.bias(c.width, "width", "mlp")
        self.gate = init.matrix(c.mlp_dim, "mlp") if c.gated else None
        self.gate_bias = init.bias(c.mlp_dim, "mlp", "mlp") if c.gated else None
        self.activation = c.activation

    def __call__(self, x: jax.Array, context: BlockContext) -> jax.Array:
        """x: [batch, sequence, width] of the residual stream."""
        linears = context.linears.mlp
        matrices = tuple(self.matrix(name, context) for name in self._names)
        h = self._activate(linears.column(x, matrices, "mlp", ordered=False), context)
        return add_bias(linears.row(h, self.matrix("down", context), "mlp", ordered=False), self.bias("down"))

    def addend(self, x: jax.Array, context: BlockContext) -> jax.Array:
        """This device's addend, without the bias, of the sum over `mlp`.  x: [batch, time, width], the whole row."""
        h = self._activate([self.matrix(name, context).multiply(x) for name in self._names], context)
        return self.matrix("down", context).multiply(h, transpose=True)

    @property
    def _names(self) -> tuple[str, ...]:
        return ("up",) if self.gate is None else ("up", "gate")

    def _activate(self, hidden: list[jax.Array], context: BlockContext) -> jax.Array:
        return context.checkpoint(ACTIVATIONS[self.activation])(*map(add_bias, hidden, map(self.bias, self._names)))
