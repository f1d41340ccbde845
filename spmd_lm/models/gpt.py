"""GPT as pure functions of plain dicts: `embed`, `block` and `head`, which is all that a train step or a pipeline needs
to know.

nnx defines the modules and their names; here, at the edge, they become trees of arrays.  Layers are stacked along a
leading dimension, `layers`.  Nothing here knows a mesh or a rank.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from spmd_lm import axes
from spmd_lm.config.schema import Model
from spmd_lm.models.attention import Attend
from spmd_lm.models.layers import INIT_STD, LayerNorm, Project, layer_norm, normal, project
from spmd_lm.models.transformer import AFTER_EMBEDDING, RESIDUAL, Block, Losses, residual_dropout
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
    remat: what the backward pass computes again, 'none', 'selective' (the attention core), 'full' (each block) or
    'residual' (each block's two branches: no collective of theirs that sums is repeated).  sums: dtype of long sums of
    gradients.  looped: whether several layers run in one loop."""

    c: Model
    dtype: str
    kernel: str
    remat: str = "none"
    sums: str = "float32"
    looped: bool = True

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

    def embedding_of(self, params: Params) -> Params:
        """What `embed` reads, of a tree like the parameters'."""
        return {"embedding": params["embedding"]}

    def head_of(self, params: Params) -> Params:
        """What `head` reads."""
        tied = {"embedding": {"tokens": params["embedding"]["tokens"]}} if self.c.tie_embeddings else {}
        return {"head": params["head"]} | tied

    def embed(self, params: Params, tokens: jax.Array, positions: jax.Array, draw: Draw | None) -> jax.Array:
        """tokens, positions: int32 [batch, time] -> [batch, sequence, width]."""
        table = params["embedding"]
        x = lookup(table["tokens"], tokens, "vocab") + lookup(table["positions"], positions, "position")
        return residual_dropout(x, self.c.dropout, draw, AFTER_EMBEDDING)

    def block(
        self, layer: Params, x: jax.Array, draw: Draw | None, attend: Attend, project: Project = project
    ) -> tuple[jax.Array, Losses]:
        """One layer, given its own parameters."""
        return nnx.merge(self._block, layer)(x, draw, attend, project)

    def train_block(self, layer: Params, x: jax.Array, draw: Draw | None, segments) -> tuple[jax.Array, Losses]:
        """`block` as training runs it: rows attend to themselves, and remat decides what is kept."""

        def attend(q, k, v, draw, segments):
            rate = self.c.attention_dropout
            return attention(q, k, v, heads=self.c.heads, kernel=self.kernel, rate=rate, draw=draw, segments=segments)

        # Inside a scan nothing outside the loop can be merged with what is computed again; unrolled, it can and must
        # not be.
        again = functools.partial(jax.checkpoint, prevent_cse=not self.looped)
        all_of_it, branches = self.remat == "full", self.remat == "residual"
        attend = again(attend) if self.remat == "selective" else attend
        # Where the stream is split keep each device's part of it, and gather once more (arXiv:2205.05198, 4.2.2).
        in_parts = axes.shards(axes.SEQUENCE) > 1 and not (all_of_it or branches)
        enter = again(project, static_argnums=2) if in_parts else project
        run = lambda layer, x, draw, segments: self.block(  # noqa: E731
            layer, x, draw, lambda q, k, v: attend(q, k, v, draw, segments), enter
        )
        keep = jax.checkpoint_policies.save_only_these_names(RESIDUAL) if branches else None
        return (again(run, policy=keep) if all_of_it or branches else run)(layer, x, draw, segments)

    def _head(self, params: Params, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        head = params["head"]
        table = params["embedding"]["tokens"] if self.c.tie_embeddings else head["tokens"]
        return layer_norm(x, **head["norm"]), table

    def head(self, params: Params, x: jax.Array, targets: jax.Array, weights: jax.Array) -> jax.Array:
        """Sum over tokens of weight x negative log-likelihood."""
        return cross_entropy(*self._head(params, x), targets, weights, self.c.vocab, self.sums)

    def logits(self, params: Params, x: jax.Array) -> jax.Array:
        """[batch, time, padded vocab], float32 or wider; padding is -inf, so that it can never be drawn."""
        h, table = self._head(params, x)
        h = axes.gathered(h)
        z = jnp.einsum("btd,vd->btv", h, table, preferred_element_type=jnp.promote_types(h.dtype, jnp.float32))
        z = jnp.where(axes.places("vocab", z.shape[-1]) < self.c.vocab, z, -jnp.inf)
        return axes.whole(z, "vocab", 2)

    # ---- generation

    def empty_cache(self, rows: int, dtype: jnp.dtype) -> Cache:
        """Keys and values of `rows` sequences, [layers, rows, context, this device's heads x head width] each."""
        return (jnp.zeros((self.c.layers, rows, self.c.context, self.c.width // axes.shards("heads")), dtype),) * 2

    def extend(
        self,
        params: Params,
        fetch: Callable[[Params], Params],
        cache: Cache,
        tokens: jax.Array,
        positions: jax.Array,
        last: jax.Array,
    ) -> tuple[jax.Array, Cache]:
        """Read `tokens` (int32 [batch, time], at `positions`) into the cache; logits [batch, padded vocab] after row
        b's token last[b].  fetch: makes one layer's parameters, of the stack, whole."""

        def layer(x, part):
            weights, cache = part
            grown = []

            def attend(q, k, v):
                out, new = attention_with_cache(q, k, v, cache, heads=self.c.heads, positions=positions)
                grown.append(new)
                return out

            x, _ = self.block(fetch(weights), x, None, attend)
            return x, grown[0]

        x = self.embed(params, tokens, positions, None)
        x, cache = jax.lax.scan(layer, x, (params["blocks"], cache))
        x = jnp.take_along_axis(x, last[:, None, None], axis=1)
        return self.logits(params, x)[:, 0], cache
