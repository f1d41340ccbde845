"""A language model as pure functions of plain dicts of arrays; GPT, BERT and Llama are settings of it.

nnx defines the modules and their parameter names; this module turns them into functions: `embed`, `block_fn` and
`losses` (or `eval_sums`) for a train step or a pipeline, `extend` for generation.  Layers are stacked along a leading
dimension, `layers`.  Nothing here asks for a device or a rank."""

import dataclasses
import functools
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from spmd_lm.active_rules import num_shards, partition_spec
from spmd_lm.axes import SEQUENCE
from spmd_lm.batch import Batch
from spmd_lm.config.remat import RematPolicy
from spmd_lm.config.schema import Model, Objective
from spmd_lm.errors import LayoutError
from spmd_lm.models.heads import Head, loss_weights, make_head, nonzero_totals
from spmd_lm.models.layers import PRODUCTS_IN_PARTS, BlockProducts, BranchProducts, ParamInit
from spmd_lm.models.transformer import RESIDUAL, Block, BlockContext, Embedding, LossDict
from spmd_lm.ops.attention import AttentionSpec, KVCache, attention, attention_with_cache
from spmd_lm.ops.collectives import manual_region
from spmd_lm.ops.cross_entropy import LogitsPolicy
from spmd_lm.ops.dropout import DropoutKey
from spmd_lm.ops.norm import widen
from spmd_lm.ops.sharding_types import checked, is_explicit

Params = dict  # nested dicts of arrays: embedding, blocks, head
Gather = Callable[[Params], Params]  # makes one layer's parameters, of the stack, whole


class ModelInput(NamedTuple):
    """One microbatch's input; a step's has a leading dimension, microbatches."""

    batch: Batch
    dropout_key: DropoutKey | None = None  # None for no dropout


def _abstract(make: Callable[[nnx.Rngs], Any]) -> tuple[nnx.GraphDef, nnx.State]:
    """Graph and abstract parameters of the modules that `make(rngs)` builds.

    nnx.eval_shape would look the dimension names up in the current mesh; this does not."""
    with nnx.use_eager_sharding(False):
        return jax.eval_shape(lambda: nnx.split(make(nnx.Rngs(0)), nnx.Param, ...)[:2])


def _to_params(state: nnx.State, value: Callable[[nnx.Variable], Any] | None = None) -> Params:
    return {"head": {}} | nnx.to_pure_dict(state, value)  # a head may have no parameters of its own


@dataclasses.dataclass(frozen=True)
class LanguageModel:
    """c: the model's sizes.  dtype: of its parameters.  kernel: of attention, a key of ops.attention.KERNELS.
    logits_policy: how training holds logits.  scan_layers: whether layers run in a loop.
    collective_matmul: branches of a layer, by their keys, whose products run in parts, beside the collectives over
    `heads` and `mlp`; not in generation.  Only on one device's shards: where arrays are global, XLA inserts the
    collectives."""

    c: Model
    objective: Objective
    dtype: str
    kernel: str
    remat: RematPolicy = RematPolicy()  # noqa: RUF009 - frozen
    logits_policy: LogitsPolicy = LogitsPolicy()  # noqa: RUF009 - frozen
    scan_layers: bool = True
    collective_matmul: tuple[str, ...] = ()

    @property
    def names(self) -> Params:
        """The dimension names of every parameter."""
        return self._names_and_shapes[0]

    @property
    def shapes(self) -> Params:
        """Shape and dtype of every parameter, unpadded."""
        return self._names_and_shapes[1]

    @functools.cached_property
    def _names_and_shapes(self) -> tuple[Params, Params]:
        return _names_and_shapes(self.c, self.objective, self.dtype, jax.config.read("jax_enable_x64"))

    def init(self, seed: int) -> Params:
        """Matrices N(0, 0.02), biases zero, norms one: a function of the seed alone."""
        with nnx.use_eager_sharding(False):
            return _to_params(nnx.state(self._modules(nnx.Rngs(jax.random.key(seed))), nnx.Param))

    def _modules(self, rngs: nnx.Rngs) -> dict[str, nnx.Module]:
        @nnx.split_rngs(splits=self.c.unique_layers)
        @nnx.vmap(transform_metadata={nnx.PARTITION_NAME: "layers"})
        def make_blocks(rngs: nnx.Rngs) -> Block:
            return Block(ParamInit(self.c, rngs, self.dtype))

        init = ParamInit(self.c, rngs, self.dtype)
        embedding, blocks = Embedding(init), make_blocks(rngs)
        return {"embedding": embedding, "blocks": blocks, "head": make_head(init, self.objective, self.logits_policy)}

    @functools.cached_property
    def _graphs(self) -> dict[str, nnx.GraphDef]:
        """A tied head has a table of its own, which is the embedding's: see `_head`."""
        untied = self.c.model_copy(update={"tie_embeddings": False})

        def graph(make: Callable[[ParamInit], nnx.Module]) -> nnx.GraphDef:
            return _abstract(lambda rngs: make(ParamInit(untied, rngs, self.dtype)))[0]

        head = graph(lambda init: make_head(init, self.objective, self.logits_policy))
        return {"embedding": graph(Embedding), "block": graph(Block), "head": head}

    def embed_params(self, params: Params) -> Params:
        """The subtree that `embed` reads, of a tree like the parameters."""
        return {"embedding": params["embedding"]}

    def head_params(self, params: Params) -> Params:
        """The subtree that the head reads, of a tree like the parameters or some of them; a tied token table is in
        both."""
        if not self.objective.ties_embeddings(self.c):
            return {"head": params["head"]}
        table = {name: x for name, x in params["embedding"].items() if name == "tokens"}
        return {"head": params["head"], "embedding": table}

    @jax.named_scope("embedding")
    def embed(self, params: Params, microbatch: ModelInput) -> jax.Array:
        """The residual stream [batch, sequence, width] of a microbatch's tokens."""
        return nnx.merge(self._graphs["embedding"], params["embedding"])(*microbatch)

    def block_fn(self) -> Callable[[Params, jax.Array, ModelInput, jax.Array], tuple[jax.Array, LossDict]]:
        """`block`, as training runs it: the remat policy decides what backward computes again."""
        if not self.remat.recomputes_layer:
            return self.block
        save = jax.checkpoint_policies.save_only_these_names(RESIDUAL) if self.remat.saves_branch_sums else None
        return self._checkpoint(self.block, policy=save)

    @jax.named_scope("blocks")
    def block(
        self, params: Params, x: jax.Array, microbatch: ModelInput, layer: jax.Array | int
    ) -> tuple[jax.Array, LossDict]:
        """One layer, given its parameters and index: x and its auxiliary losses.  Tokens attend within their row."""
        batch, key = microbatch
        key = None if key is None else key.at_layer(layer)
        attend = functools.partial(self._attend, positions=batch.positions, segment_ids=batch.segments, key=key)
        context = BlockContext(attend, key, self._products(), self._checkpoint)
        return nnx.merge(self._graphs["block"], params)(x, context)

    def _attend(self, q: jax.Array, k: jax.Array, v: jax.Array, spec: AttentionSpec, **tokens: Any) -> jax.Array:
        """tokens: keywords of `attention`."""
        core = functools.partial(attention, spec=spec, kernel=self.kernel)
        run: Callable = manual_region(core, partition_spec("batch", None, "heads"))
        return (self._checkpoint(run) if self.remat.recomputes_attention else run)(q, k, v, **tokens)

    def _products(self) -> BlockProducts:
        saves_shards = num_shards(SEQUENCE) > 1 and not self.remat.recomputes_layer

        def products_of(branch: str) -> BranchProducts:
            products = PRODUCTS_IN_PARTS if branch in self.collective_matmul else BranchProducts()
            return products.checkpointed(self._checkpoint) if saves_shards else products

        return BlockProducts(*map(products_of, BlockProducts._fields))

    def _checkpoint(self, f: Callable, **options) -> Callable:
        """CSE cannot undo remat inside a scan; unrolled it could, so prevent it."""
        return jax.checkpoint(f, prevent_cse=not self.scan_layers, **options)

    def _head(self, params: Params, x: jax.Array) -> tuple[Head, jax.Array]:
        """The head, and its input: the output of the last block after the final norm."""
        tied = self.objective.ties_embeddings(self.c)
        table = {"tokens": params["embedding"]["tokens"]} if tied else {}
        head = nnx.merge(self._graphs["head"], params["head"] | table)
        return head, x if head.norm is None else head.norm(x)

    @jax.named_scope("head")
    def losses(self, params: Params, x: jax.Array, microbatch: ModelInput, weights: LossDict) -> LossDict:
        """Of each loss the sum of weight x negative log-likelihood.  x: the output of the last block."""
        head, h = self._head(params, x)
        return head.losses(h, microbatch.batch, weights, microbatch.dropout_key)

    @jax.named_scope("head")
    def eval_sums(self, params: Params, x: jax.Array, microbatch: ModelInput, rows: int) -> dict:
        """As Head.eval_sums, of the output x of the last block."""
        head, h = self._head(params, x)
        return head.eval_sums(h, microbatch.batch, rows)

    @jax.named_scope("head")
    def target_scores(self, params: Params, x: jax.Array, microbatch: ModelInput, rows: int) -> dict:
        """As Head.target_scores, of the output x of the last block."""
        head, h = self._head(params, x)
        return head.target_scores(h, microbatch.batch, rows)

    def logits(self, params: Params, x: jax.Array, batch: Batch) -> dict[str, jax.Array]:
        """By what the head predicts.  x: the output of the last block."""
        head, h = self._head(params, x)
        return head.logits(h, batch)

    def mean_loss(self, params: Params, batch: Batch, dropout: tuple[Any, Any] | None = None) -> jax.Array:
        """The sum of the objective's losses, each a mean over the batch, in nats, on the mesh of jax.set_mesh.

        params: in the dtype that is to be computed in, laid out by their names.  batch: leaves [batch, ...].  dropout:
        a seed and the step, integers, of which the masks are a function; None for none.  Raises LayoutError where a
        parameter or the batch is laid out in another way than the rules say."""
        params, batch = self._checked(params, batch)
        key = None if dropout is None else DropoutKey(*dropout, batch.sample_ids)
        model_input, block = ModelInput(batch, key), self.block_fn()

        def layer(x: jax.Array, inputs: tuple[Params, jax.Array]) -> tuple[jax.Array, LossDict]:
            layer_params, index = inputs
            return block(layer_params, x, model_input, index)

        x, indices = self.embed(params, model_input), jnp.arange(self.c.layers, dtype=jnp.int32)
        x, auxiliary = self._scan_layers(layer, x, params["blocks"], indices, unroll=not self.scan_layers)
        wide = widen(x).dtype
        weights = {name: w.astype(wide) for name, w in loss_weights(self.objective, batch).items()}
        totals = nonzero_totals({name: w.sum() for name, w in weights.items()})
        losses = self.losses(params, x, model_input, {name: w / totals[name] for name, w in weights.items()})
        return functools.reduce(
            operator.add, [*losses.values(), *(of_layers.sum() for of_layers in auxiliary.values())]
        )

    def _checked(self, params: Params, batch: Batch) -> tuple[Params, Batch]:
        """Both, of global arrays.  Raises LayoutError for those of which something else would be computed."""
        params = checked(params, self.names, "Write jax.device_put(params, spmd_lm.param_shardings(model)).")
        batch_names = jax.tree.map(lambda x: ("batch", None)[: x.ndim], batch)
        batch = checked(batch, batch_names, "Write jax.device_put(batch, NamedSharding(mesh, P(axis of batch))).")
        rows, time = batch.tokens.shape
        for what, size, name in (
            (f"model.heads={self.c.heads}", self.c.heads, "heads"),
            (f"model.kv_heads={self.c.kv_heads}", self.c.kv_heads or self.c.heads, "heads"),
            (f"the batch's sequences, {time} tokens long,", time, SEQUENCE),
            (f"the number of examples in {rows} rows", rows // self.objective.rows_per_example, "batch"),
        ):
            if size % num_shards(name):
                raise LayoutError(f"{what} cannot be divided by the {num_shards(name)} shards of '{name}'.")
        if self.remat.layers_per_remat_block > 1:
            raise LayoutError("remat.policy=block is for spmd-lm train alone. Use remat.policy=full.")
        return params, batch

    def forward(self, params: Params, batch: Batch, gather: Gather = lambda layer: layer) -> dict[str, jax.Array]:
        """Logits of a batch [batch, time], by what the head predicts.  On a mesh of jax.set_mesh as `mean_loss`."""
        if is_explicit():
            params, batch = self._checked(params, batch)
        block = self.block_fn()

        def layer(x, inputs):
            return block(gather(inputs[0]), x, ModelInput(batch), jnp.int32(0))[0], None

        x, _ = self._scan_layers(layer, self.embed(params, ModelInput(batch)), params["blocks"])
        return self.logits(params, x, batch)

    def _scan_layers(self, layer: Callable, x: jax.Array, stack: Params, per_layer=None, **options) -> tuple:
        """lax.scan of layer(x, (params, entry of `per_layer`)) over all layers."""
        if not self.c.share_layers:
            return jax.lax.scan(layer, x, (stack, per_layer), **options)
        shared = jax.tree.map(lambda w: w[0], stack)
        return jax.lax.scan(lambda x, entry: layer(x, (shared, entry)), x, per_layer, self.c.layers, **options)

    def empty_cache(self, rows: int, dtype: jnp.dtype) -> KVCache:
        """Keys and values of `rows` sequences, [layers, rows, context, local kv heads, head width] each."""
        heads = (self.c.kv_heads or self.c.heads) // num_shards("heads")
        return (jnp.zeros((self.c.layers, rows, self.c.context, heads, self.c.head_width), dtype),) * 2

    def extend(
        self, params: Params, gather: Gather, cache: KVCache, tokens: jax.Array, positions: jax.Array, last: jax.Array
    ) -> tuple[jax.Array, KVCache]:
        """Adds `tokens` (int32 [batch, time], at `positions`) to the cache; returns logits [batch, padded vocab] after
        row b's token last[b]."""
        batch = Batch(tokens, None, None, positions, None, None)

        def layer(x, inputs):
            layer_params, layer_cache = inputs

            def attend(q, k, v, spec):
                nonlocal layer_cache
                out, layer_cache = attention_with_cache(q, k, v, spec, layer_cache, positions)
                return out

            x, _ = nnx.merge(self._graphs["block"], gather(layer_params))(x, BlockContext(attend))
            return x, layer_cache

        x, cache = self._scan_layers(layer, self.embed(params, ModelInput(batch)), params["blocks"], cache)
        x = jnp.take_along_axis(x, last[:, None, None], axis=1)
        return self.logits(params, x, batch)["tokens"][:, 0], cache


@functools.lru_cache(maxsize=64)
def _names_and_shapes(c: Model, objective: Objective, dtype: str, x64: bool) -> tuple[Params, Params]:
    """Traced once for all layouts of a model.  x64: whether jax knows float64, which what is traced depends on."""
    model = LanguageModel(c, objective, dtype, kernel="xla")
    _, state = _abstract(model._modules)
    names = _to_params(state, lambda variable: variable.get_metadata("out_sharding"))
    return names, jax.eval_shape(lambda: model.init(0))
