"""A language model as pure functions of plain dicts of arrays.

nnx defines the modules and their parameter names; this module turns them into functions: `embed`, `block_fn` and
`losses` (or `eval_sums`), which a train step or a pipeline runs, and `extend`, which generation runs.  Layers are
stacked along a leading dimension, `layers`.  GPT, BERT and Llama are settings of it.  Nothing here knows a mesh or a
rank."""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from spmd_lm.axes import SEQUENCE, num_shards
from spmd_lm.batch import Batch
from spmd_lm.config.remat import RematPolicy
from spmd_lm.config.schema import Model, Objective
from spmd_lm.models.embedding import Embedding
from spmd_lm.models.heads import Head, LossInputs, make_head
from spmd_lm.models.layers import column_parallel
from spmd_lm.models.transformer import RESIDUAL, Block, LossDict
from spmd_lm.ops.attention import AttentionSpec, KVCache, attention, attention_with_cache
from spmd_lm.ops.dropout import DropoutKey

Params = dict
"""Nested dicts of arrays: embedding, blocks, head."""

Microbatch = tuple[Batch, DropoutKey | None]
"""A batch without its leading dimension, and the key of its dropout; None for no dropout."""


class Modules(nnx.Module):
    def __init__(self, c: Model, objective: Objective, rngs: nnx.Rngs, dtype: str):
        def make_block(rngs: nnx.Rngs) -> Block:
            return Block(c, rngs, dtype)

        self.embedding = Embedding(c, rngs, dtype)
        stack = nnx.vmap(make_block, in_axes=0, out_axes=0, transform_metadata={nnx.PARTITION_NAME: "layers"})
        self.blocks = nnx.split_rngs(splits=c.layers_kept)(stack)(rngs)
        self.head = make_head(c, objective, rngs, dtype)


def _abstract(make: Callable[[nnx.Rngs], nnx.Module]) -> tuple[nnx.GraphDef, nnx.State]:
    """Graph and abstract parameters of the module that `make(rngs)` builds.

    nnx.eval_shape would look the dimension names up in the current mesh; this does not."""
    with nnx.use_eager_sharding(False):
        return jax.eval_shape(lambda: nnx.split(make(nnx.Rngs(0)), nnx.Param, ...)[:2])


def _to_params(state: nnx.State) -> Params:
    """As plain dicts; a head may have no parameters of its own."""
    return {"head": {}} | nnx.to_pure_dict(state)


@dataclasses.dataclass(frozen=True)
class LanguageModel:
    """c: the model's sizes.  dtype: of its parameters.  kernel: of attention, a key of ops.attention.KERNELS.
    accum_dtype: of long sums of gradients.  scan_layers: whether layers run in a loop."""

    c: Model
    objective: Objective
    dtype: str
    kernel: str
    remat: RematPolicy = RematPolicy()  # noqa: RUF009 - frozen
    accum_dtype: str = "float32"
    scan_layers: bool = True

    # ---- parameters

    @functools.cached_property
    def names(self) -> Params:
        """The dimension names of every parameter."""
        _, state = _abstract(self._modules)

        def dim_names(variable: nnx.Variable) -> nnx.Variable:
            return variable.replace(variable.get_metadata("out_sharding"))

        return _to_params(jax.tree.map(dim_names, state, is_leaf=lambda v: isinstance(v, nnx.Variable)))

    @functools.cached_property
    def shapes(self) -> Params:
        """Shape and dtype of every parameter, unpadded."""
        return jax.eval_shape(lambda: self.init(0))

    def init(self, seed: int) -> Params:
        """Matrices N(0, 0.02), biases zero, norms one: a function of the seed alone."""
        with nnx.use_eager_sharding(False):
            return _to_params(nnx.state(self._modules(nnx.Rngs(jax.random.key(seed))), nnx.Param))

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

    def embed_params(self, params: Params) -> Params:
        """The subtree that `embed` reads, of a tree like the parameters."""
        return {"embedding": params["embedding"]}

    def head_params(self, params: Params) -> Params:
        """The subtree that the head reads; a tied token table is in both."""
        tied = {"embedding": {"tokens": params["embedding"]["tokens"]}} if self.objective.ties(self.c) else {}
        return {"head": params["head"]} | tied

    # ---- embedding, blocks, head

    @property
    def attention_spec(self) -> AttentionSpec:
        c = self.c
        theta = c.rope_theta if c.positions == "rotary" else None
        return AttentionSpec(c.heads, c.kv_heads or c.heads, c.causal, theta, self.kernel, c.attention_dropout)

    @jax.named_scope("embedding")
    def embed(self, params: Params, microbatch: Microbatch) -> jax.Array:
        """The residual stream [batch, sequence, width] of a microbatch's tokens."""
        return nnx.merge(self._embedding, params["embedding"])(*microbatch)

    def block_fn(self) -> Callable[[Params, jax.Array, Microbatch, jax.Array], tuple[jax.Array, LossDict]]:
        """`block`, as training runs it: the remat policy decides what backward computes again."""
        if not self.remat.recomputes_layer:
            return self.block
        save = jax.checkpoint_policies.save_only_these_names(RESIDUAL) if self.remat.saves_branch_sums else None
        return self._checkpoint(self.block, policy=save)

    @jax.named_scope("blocks")
    def block(
        self, params: Params, x: jax.Array, microbatch: Microbatch, layer: jax.Array | int
    ) -> tuple[jax.Array, LossDict]:
        """One layer, given its own parameters and its index; tokens attend within their row.  Returns x and its
        auxiliary losses."""
        batch, key = microbatch
        key = None if key is None else key.at_layer(layer)
        core: Callable = functools.partial(attention, spec=self.attention_spec)
        project: Callable = column_parallel
        if self.remat.recomputes_attention:
            core = self._checkpoint(core)
        core = functools.partial(core, positions=batch.positions, segment_ids=batch.segments, key=key)
        if num_shards(SEQUENCE) > 1 and not self.remat.recomputes_layer:
            # Save each device's shard of the stream and gather it again (arXiv:2205.05198, section 4.2.2).
            project = self._checkpoint(column_parallel, static_argnums=2)
        return nnx.merge(self._block, params)(x, key, core, project)

    def _checkpoint(self, f: Callable, **options) -> Callable:
        """CSE cannot undo remat inside a scan; unrolled it could, so prevent it."""
        return jax.checkpoint(f, prevent_cse=not self.scan_layers, **options)

    def _head_and_table(self, params: Params) -> tuple[Head, jax.Array | None]:
        table = params["embedding"]["tokens"] if self.objective.ties(self.c) else None
        return nnx.merge(self._head, params["head"]), table

    @jax.named_scope("head")
    def losses(self, params: Params, x: jax.Array, microbatch: Microbatch, weights: LossDict) -> LossDict:
        """Of each loss the sum of weight x negative log-likelihood.  x: the output of the last block."""
        head, table = self._head_and_table(params)
        batch, key = microbatch
        return head.losses(x, table, LossInputs(batch, weights, key, self.accum_dtype))

    @jax.named_scope("head")
    def eval_sums(self, params: Params, x: jax.Array, microbatch: Microbatch, rows: int) -> dict:
        """What evaluation metrics are computed from, to be summed over microbatches and devices.  Of tokens, for each
        loss: (its sum, the weight of correct predictions, the weight of all).  Of labelled examples: logits of all
        `rows` of a step."""
        head, table = self._head_and_table(params)
        return head.eval_sums(x, table, microbatch[0], rows)

    def logits(self, params: Params, x: jax.Array, batch: Batch) -> dict[str, jax.Array]:
        """By what the head predicts.  x: the output of the last block."""
        head, table = self._head_and_table(params)
        return head.logits(x, table, batch)

    # ---- inference

    def forward(self, params: Params, gather: Callable[[Params], Params], batch: Batch) -> dict[str, jax.Array]:
        """Logits of a batch [batch, time].  gather: makes one layer's parameters, of the stack, whole."""
        block = self.block_fn()

        def layer(x, inputs):
            params, _ = inputs
            return block(gather(params), x, (batch, None), jnp.int32(0))[0], None

        x, _ = self._scan_layers(layer, self.embed(params, (batch, None)), params["blocks"])
        return self.logits(params, x, batch)

    def _scan_layers(self, layer: Callable, x: jax.Array, stack: Params, per_layer=None) -> tuple:
        """lax.scan of layer(x, (params, entry of `per_layer`)) over all layers."""
        if not self.c.share_layers:
            return jax.lax.scan(layer, x, (stack, per_layer))
        shared = jax.tree.map(lambda w: w[0], stack)
        return jax.lax.scan(lambda x, entry: layer(x, (shared, entry)), x, per_layer, self.c.layers)

    def empty_cache(self, rows: int, dtype: jnp.dtype) -> KVCache:
        """Keys and values of `rows` sequences, [layers, rows, context, local kv heads, head width] each."""
        heads = self.attention_spec.kv_heads // num_shards("heads")
        return (jnp.zeros((self.c.layers, rows, self.c.context, heads, self.c.head_width), dtype),) * 2

    def extend(
        self,
        params: Params,
        gather: Callable[[Params], Params],
        cache: KVCache,
        tokens: jax.Array,
        positions: jax.Array,
        last: jax.Array,
    ) -> tuple[jax.Array, KVCache]:
        """Adds `tokens` (int32 [batch, time], at `positions`) to the cache; returns logits [batch, padded vocab] after
        row b's token last[b].  gather: makes one layer's parameters, of the stack, whole."""
        batch = Batch(tokens, None, None, positions, None, None)

        def layer(x, inputs):
            layer_params, layer_cache = inputs

            def core(q, k, v):
                nonlocal layer_cache
                out, layer_cache = attention_with_cache(q, k, v, self.attention_spec, layer_cache, positions)
                return out

            x, _ = nnx.merge(self._block, gather(layer_params))(x, None, core)
            return x, layer_cache

        x, cache = self._scan_layers(layer, self.embed(params, (batch, None)), params["blocks"], cache)
        x = jnp.take_along_axis(x, last[:, None, None], axis=1)
        return self.logits(params, x, batch)["tokens"][:, 0], cache
