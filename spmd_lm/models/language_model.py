"""A language model as pure functions of plain dicts: `embed`, `train_block` and `losses` (or `scores`), which is what a
step or a pipeline runs, and `extend`, which writes.

nnx defines the modules and their names; here, at the edge, they become trees of arrays.  Layers are stacked along a
leading dimension, `layers`.  GPT, BERT and Llama are settings of it.  Nothing here knows a mesh or a rank.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from spmd_lm import axes
from spmd_lm.batch import Batch
from spmd_lm.config.schema import Model, Objective
from spmd_lm.models.attention import Attend
from spmd_lm.models.embedding import Embedding
from spmd_lm.models.heads import Head, Sums
from spmd_lm.models.layers import Project, project
from spmd_lm.models.objectives import make_head
from spmd_lm.models.transformer import RESIDUAL, Block, Losses
from spmd_lm.ops.attention import Cache, Heads, attention, attention_with_cache
from spmd_lm.ops.dropout import Draw

Params = dict


class Modules(nnx.Module):
    def __init__(self, c: Model, objective: Objective, rngs: nnx.Rngs, dtype: str):
        self.embedding = Embedding(c, rngs, dtype)
        stack = {nnx.PARTITION_NAME: "layers"}
        make = nnx.vmap(lambda r: Block(c, r, dtype), in_axes=0, out_axes=0, transform_metadata=stack)
        self.blocks = nnx.split_rngs(splits=c.layers_kept)(make)(rngs)
        self.head = make_head(c, objective, rngs, dtype)


def _abstract(make) -> tuple[nnx.GraphDef, nnx.State]:
    """Graph and abstract parameters of the module that `make(rngs)` builds.

    nnx.eval_shape would look the names up in whatever mesh is in force; this does not."""
    with nnx.use_eager_sharding(False):
        return jax.eval_shape(lambda: nnx.split(make(nnx.Rngs(0)), nnx.Param, ...)[:2])


def _parts(state: nnx.State) -> Params:
    """As plain dicts; a head may have no parameters of its own."""
    return {"head": {}} | nnx.to_pure_dict(state)


@dataclasses.dataclass(frozen=True)
class LanguageModel:
    """c: the model's sizes.  dtype: of its parameters.  kernel: of attention, see config.attention_kernels.
    remat: what the backward pass computes again, 'none', 'selective' (the attention core), 'full' (each block),
    'residual' (each block's two branches: no collective of theirs that sums is repeated) or 'block' (whoever runs the
    layers says of how many).  sums: dtype of long sums of gradients.  looped: whether several layers run in one
    loop."""

    c: Model
    objective: Objective
    dtype: str
    kernel: str
    remat: str = "none"
    sums: str = "float32"
    looped: bool = True

    @functools.cached_property
    def names(self) -> Params:
        """The names of every parameter's dimensions."""
        _, state = _abstract(self._modules)
        is_variable = lambda v: isinstance(v, nnx.Variable)  # noqa: E731
        names = jax.tree.map(lambda v: v.replace(v.get_metadata("out_sharding")), state, is_leaf=is_variable)
        return _parts(names)

    @functools.cached_property
    def shapes(self) -> Params:
        """Shape and dtype of every parameter, unpadded."""
        return jax.eval_shape(lambda: self.init(0))

    def _modules(self, rngs: nnx.Rngs) -> Modules:
        return Modules(self.c, self.objective, rngs, self.dtype)

    @functools.cached_property
    def _embedding(self) -> nnx.GraphDef:
        return _abstract(lambda rngs: Embedding(self.c, rngs, self.dtype))[0]

    @functools.cached_property
    def _block(self) -> nnx.GraphDef:
        return _abstract(lambda rngs: Block(self.c, rngs, self.dtype))[0]

    @functools.cached_property
    def _head(self) -> nnx.GraphDef:
        return _abstract(lambda rngs: make_head(self.c, self.objective, rngs, self.dtype))[0]

    def init(self, seed: int) -> Params:
        """Matrices N(0, 0.02), biases zero, norms one: a function of the seed alone."""
        with nnx.use_eager_sharding(False):
            return _parts(nnx.state(self._modules(nnx.Rngs(jax.random.key(seed))), nnx.Param))

    def embedding_of(self, params: Params) -> Params:
        """What `embed` reads, of a tree like the parameters'."""
        return {"embedding": params["embedding"]}

    def head_of(self, params: Params) -> Params:
        """What the head reads."""
        tied = {"embedding": {"tokens": params["embedding"]["tokens"]}} if self.objective.ties(self.c) else {}
        return {"head": params["head"]} | tied

    def embed(self, params: Params, batch: Batch, draw: Draw | None) -> jax.Array:
        """Tokens [batch, time] -> [batch, sequence, width]."""
        embedding = nnx.merge(self._embedding, params["embedding"])
        return embedding(batch.tokens, batch.positions, batch.types, draw)

    def block(
        self, layer: Params, x: jax.Array, draw: Draw | None, attend: Attend, project: Project = project
    ) -> tuple[jax.Array, Losses]:
        """One layer, given its own parameters."""
        return nnx.merge(self._block, layer)(x, draw, attend, project)

    @property
    def heads(self) -> Heads:
        theta = self.c.rope_theta if self.c.positions == "rotary" else None
        return Heads(self.c.heads, self.c.kv_heads or self.c.heads, self.c.causal, theta)

    def train_block(self, layer: Params, x: jax.Array, batch: Batch, draw: Draw | None) -> tuple[jax.Array, Losses]:
        """`block` as training runs it: rows attend to themselves, and remat decides what is kept."""

        def attend(q, k, v, positions, draw, segments):
            rate = self.c.attention_dropout
            of = {"positions": positions, "draw": draw, "segments": segments}
            return attention(q, k, v, self.heads, kernel=self.kernel, rate=rate, **of)

        # Inside a scan nothing outside the loop can be merged with what is computed again; unrolled, it can and must
        # not be.
        again = functools.partial(jax.checkpoint, prevent_cse=not self.looped)
        all_of_it, branches = self.remat == "full", self.remat == "residual"
        attend = again(attend) if self.remat == "selective" else attend
        # Where the stream is split keep each device's part of it, and gather once more (arXiv:2205.05198, 4.2.2).
        in_parts = axes.num_shards(axes.SEQUENCE) > 1 and not (all_of_it or branches)
        enter = again(project, static_argnums=2) if in_parts else project
        run = lambda layer, x, *of: self.block(  # noqa: E731
            layer, x, of[1], lambda q, k, v: attend(q, k, v, *of), enter
        )
        keep = jax.checkpoint_policies.save_only_these_names(RESIDUAL) if branches else None
        run = again(run, policy=keep) if all_of_it or branches else run
        return run(layer, x, batch.positions, draw, batch.segments)

    def _end(self, params: Params) -> tuple[Head, jax.Array | None]:
        table = params["embedding"]["tokens"] if self.objective.ties(self.c) else None
        return nnx.merge(self._head, params["head"]), table

    def losses(self, params: Params, x: jax.Array, batch: Batch, weights: Sums, draw: Draw | None) -> Sums:
        """Of each loss the sum of weight x negative log-likelihood.  x: the last block's."""
        head, table = self._end(params)
        return head.losses(x, table, batch, weights, draw, self.sums)

    def scores(self, params: Params, x: jax.Array, batch: Batch, rows: int) -> dict:
        """What a validation is made of, to be summed over microbatches and devices.  Of tokens, for each loss: its sum,
        the weight of what was right, and the weight of all.  Of labelled examples: logits of all `rows` of a step."""
        head, table = self._end(params)
        return head.scores(x, table, batch, rows)

    def logits(self, params: Params, x: jax.Array, batch: Batch) -> dict[str, jax.Array]:
        """Of each thing that the head predicts.  x: the last block's."""
        head, table = self._end(params)
        return head.logits(x, table, batch)

    # ---- without training

    def forward(self, params: Params, fetch: Callable[[Params], Params], batch: Batch) -> dict[str, jax.Array]:
        """Logits of a batch [batch, time].  fetch: makes one layer's parameters, of the stack, whole."""
        layer = lambda x, part: (self.train_block(fetch(part[0]), x, batch, None)[0], None)  # noqa: E731
        return self.logits(params, self._through(layer, self.embed(params, batch, None), params["blocks"])[0], batch)

    def _through(self, layer: Callable, x: jax.Array, stack: Params, rest=None) -> tuple:
        """lax.scan of layer(x, (weights, its part of `rest`)) over all layers."""
        if not self.c.share_layers:
            return jax.lax.scan(layer, x, (stack, rest))
        shared = jax.tree.map(lambda w: w[0], stack)
        return jax.lax.scan(lambda x, rest: layer(x, (shared, rest)), x, rest, self.c.layers)

    def empty_cache(self, rows: int, dtype: jnp.dtype) -> Cache:
        """Keys and values of `rows` sequences, [layers, rows, context, this device's heads, head width] each."""
        heads = self.heads.kv_heads // axes.num_shards("heads")
        return (jnp.zeros((self.c.layers, rows, self.c.context, heads, self.c.head_width), dtype),) * 2

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
                out, new = attention_with_cache(q, k, v, self.heads, cache, positions=positions)
                grown.append(new)
                return out

            x, _ = self.block(fetch(weights), x, None, attend)
            return x, grown[0]

        batch = Batch(tokens, None, None, positions, None, None)
        x, cache = self._through(layer, self.embed(params, batch, None), params["blocks"], cache)
        x = jnp.take_along_axis(x, last[:, None, None], axis=1)
        return self.logits(params, x, batch)["tokens"][:, 0], cache
