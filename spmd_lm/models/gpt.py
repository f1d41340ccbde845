"""GPT as pure functions of plain dicts: `embed`, `block` and `head`, which is all that a train step or a pipeline needs
to know.

nnx defines the modules and their names; here, at the edge, they become trees of arrays.  Layers are stacked along a
leading dimension, `layers`.  Nothing here knows a mesh or a rank.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from flax import nnx

from spmd_lm.axes import constrain
from spmd_lm.config.schema import Model
from spmd_lm.models.attention import Attend
from spmd_lm.models.layers import INIT_STD, LayerNorm, layer_norm, normal
from spmd_lm.models.transformer import AFTER_EMBEDDING, Block, Losses, residual_dropout
from spmd_lm.ops.attention import Cache, attention, attention_with_cache
from spmd_lm.ops.cross_entropy import cross_entropy
from spmd_lm.ops.dropout import Draw
from spmd_lm.ops.embedding import lookup

Params = dict


class Embedding(nnx.Module):
    def __init__(self, c: Model, rngs: nnx.Rngs, dtype: str):
        self.tokens = normal(rngs, (c.vocab, c.width), ("vocab", "width"), INIT_STD, dtype)
        self.positions = normal(rngs, (c.context, c.width), ("position", "width"), INIT_STD, dtype)


class Head(nnx.Module):
    def __init__(self, c: Model, rngs: nnx.Rngs, dtype: str):
        self.norm = LayerNorm(c.width, c.biases, dtype)
        if not c.tie_embeddings:
            self.tokens = normal(rngs, (c.vocab, c.width), ("vocab", "width"), INIT_STD, dtype)


class Modules(nnx.Module):
    def __init__(self, c: Model, rngs: nnx.Rngs, dtype: str):
        self.embedding = Embedding(c, rngs, dtype)
        stack = {nnx.PARTITION_NAME: "layers"}
        make = nnx.vmap(lambda r: Block(c, r, dtype), in_axes=0, out_axes=0, transform_metadata=stack)
        self.blocks = nnx.split_rngs(splits=c.layers)(make)(rngs)
        self.head = Head(c, rngs, dtype)


def _abstract(make) -> tuple[nnx.GraphDef, nnx.State]:
    """Graph and abstract parameters of the module that `make(rngs)` builds.

    nnx.eval_shape would look the names up in whatever mesh is in force; this does not."""
    with nnx.use_eager_sharding(False):
        return jax.eval_shape(lambda: nnx.split(make(nnx.Rngs(0)), nnx.Param, ...)[:2])


@dataclasses.dataclass(frozen=True)
class GPT:
    """c: the model's sizes.  dtype: of its parameters.  kernel: of attention, see ops.attention.choose.
    remat: what the backward pass computes again, 'none', 'selective' (the attention core) or 'full' (each block)."""

    c: Model
    dtype: str
    kernel: str
    remat: str = "none"

    @functools.cached_property
    def names(self) -> Params:
        """The names of every parameter's dimensions."""
        _, state = _abstract(lambda rngs: Modules(self.c, rngs, self.dtype))
        is_variable = lambda v: isinstance(v, nnx.Variable)  # noqa: E731
        names = jax.tree.map(lambda v: v.replace(v.get_metadata("out_sharding")), state, is_leaf=is_variable)
        return nnx.to_pure_dict(names)

    @functools.cached_property
    def shapes(self) -> Params:
        """Shape and dtype of every parameter, unpadded."""
        return jax.eval_shape(lambda: self.init(0))

    @functools.cached_property
    def _block(self) -> nnx.GraphDef:
        return _abstract(lambda rngs: Block(self.c, rngs, self.dtype))[0]

    def init(self, seed: int) -> Params:
        """Matrices N(0, 0.02), biases zero, norms one: a function of the seed alone."""
        with nnx.use_eager_sharding(False):
            modules = Modules(self.c, nnx.Rngs(jax.random.key(seed)), self.dtype)
            return nnx.to_pure_dict(nnx.state(modules, nnx.Param))

    def embed(self, params: Params, tokens: jax.Array, positions: jax.Array, draw: Draw | None) -> jax.Array:
        """tokens, positions: int32 [batch, time] -> [batch, time, width]."""
        table = params["embedding"]
        x = constrain(lookup(table["tokens"], tokens), "batch", "sequence", None)
        x = x + constrain(lookup(table["positions"], positions, "position"), "batch", "sequence", None)
        x = residual_dropout(x, self.c.dropout, draw, AFTER_EMBEDDING)
        return constrain(x, "batch", "sequence", None)

    def block(self, layer: Params, x: jax.Array, draw: Draw | None, attend: Attend) -> tuple[jax.Array, Losses]:
        """One layer, given its own parameters."""
        return nnx.merge(self._block, layer)(x, draw, attend)

    def train_block(self, layer: Params, x: jax.Array, draw: Draw | None, segments) -> tuple[jax.Array, Losses]:
        """`block` as training runs it: rows attend to themselves, and remat decides what is kept."""

        def attend(q, k, v, draw, segments):
            rate = self.c.attention_dropout
            return attention(q, k, v, heads=self.c.heads, kernel=self.kernel, rate=rate, draw=draw, segments=segments)

        # Inside a scan nothing outside the loop can be merged with what is computed again; unrolled, it can and must
        # not be.
        again = functools.partial(jax.checkpoint, prevent_cse=not self.c.scan)
        attend = again(attend) if self.remat == "selective" else attend
        run = lambda layer, x, draw, segments: self.block(  # noqa: E731
            layer, x, draw, lambda q, k, v: attend(q, k, v, draw, segments)
        )
        return (again(run) if self.remat == "full" else run)(layer, x, draw, segments)

    def _head(self, params: Params, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        head = params["head"]
        table = params["embedding"]["tokens"] if self.c.tie_embeddings else head["tokens"]
        return constrain(layer_norm(x, **head["norm"]), "batch", None, None), table

    def head(self, params: Params, x: jax.Array, targets: jax.Array, weights: jax.Array) -> jax.Array:
        """Sum over tokens of weight x negative log-likelihood."""
        return cross_entropy(*self._head(params, x), targets, weights, self.c.vocab)

    def logits(self, params: Params, x: jax.Array) -> jax.Array:
        """[batch, time, padded vocab], float32 or wider; padding is -inf, so that it can never be drawn."""
        h, table = self._head(params, x)
        z = jnp.einsum("btd,vd->btv", h, table, preferred_element_type=jnp.promote_types(h.dtype, jnp.float32))
        z = constrain(z, "batch", None, "vocab")
        return jnp.where(jnp.arange(z.shape[-1], dtype=jnp.int32) < self.c.vocab, z, -jnp.inf)

    # ---- generation

    def empty_cache(self, rows: int, dtype: str) -> Cache:
        """Keys and values of `rows` sequences, [layers, rows, context, width] each."""
        zeros = jnp.zeros((self.c.layers, rows, self.c.context, self.c.width), dtype)
        return (constrain(zeros, "layers", "batch", None, "heads"),) * 2

    def extend(
        self, params: Params, cache: Cache, tokens: jax.Array, positions: jax.Array, last: jax.Array
    ) -> tuple[jax.Array, Cache]:
        """Read `tokens` (int32 [batch, time], at `positions`) into the cache; logits [batch, padded vocab] after row
        b's token last[b]."""

        def layer(x, part):
            weights, cache = part
            grown = []

            def attend(q, k, v):
                out, new = attention_with_cache(q, k, v, cache, heads=self.c.heads, positions=positions)
                grown.append(new)
                return out

            x, _ = self.block(weights, x, None, attend)
            return x, grown[0]

        x = self.embed(params, tokens, positions, None)
        x, cache = jax.lax.scan(layer, x, (params["blocks"], cache))
        x = jnp.take_along_axis(x, last[:, None, None], axis=1)
        return self.logits(params, x)[:, 0], cache
