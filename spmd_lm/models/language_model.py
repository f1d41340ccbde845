"""A language model as pure functions of plain dicts of arrays; GPT, BERT and Llama are settings of it.

nnx defines the modules and their parameter names; this module turns them into functions: `embed`, `block_fns` and
`losses` (or `eval_sums`) for a train step or a pipeline, `extend` for generation.  Layers are stacked along a leading
dimension, `layers`.  Nothing here asks for a device or a rank."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from spmd_lm.active_rules import axis_rules, num_shards, partition_spec
from spmd_lm.axes import SEQUENCE, is_dim_names, sharded_names
from spmd_lm.batch import Batch
from spmd_lm.config.expert_products import BUFFERS
from spmd_lm.config.remat import RematPolicy
from spmd_lm.config.schema import Model, Objective
from spmd_lm.config.types import FakeQuantKind
from spmd_lm.errors import ConfigError, LayoutError
from spmd_lm.models.adapters import (
    Adapters,
    LowRank,
    add_adapters,
    code_matrices,
    fake_quantize,
    matrices_of,
    multiply_in_eight_bits,
    require_used,
    show_inputs,
)
from spmd_lm.models.context import AttentionCore, BlockContext, LossDict, sum_losses
from spmd_lm.models.heads import Head, nonzero_totals
from spmd_lm.models.layers import COLLECTIVE_MATMUL, BlockLinears, Linears, ParamInit
from spmd_lm.models.modules import ModelModules, checked_block, checked_losses, require_names
from spmd_lm.models.transformer import RESIDUAL
from spmd_lm.ops.attention import KVCache, attention, attention_with_cache
from spmd_lm.ops.attention_spec import AttentionSpec
from spmd_lm.ops.collectives import manual_region
from spmd_lm.ops.cross_entropy import LogitsPolicy
from spmd_lm.ops.dropout import DropoutKey
from spmd_lm.ops.eight_bits import EightBits
from spmd_lm.ops.few_bits import Coding
from spmd_lm.ops.norm import upcast
from spmd_lm.ops.sharding_types import checked, is_explicit
from spmd_lm.period import BlockFn, Period, sum_by_name

BLOCK_INPUT = "block input"

Params = dict  # nested dicts of arrays: embedding, blocks, head
Gather = Callable[[Params], Params]  # all-gathers parameters of one layer, or period, of the stack
KVCaches = tuple[Any, Any]


def _identity(params: Params) -> Params:
    return params


def _unchanged(f: Callable, **_: Any) -> Callable:
    return f


def _named_input(block: BlockFn) -> BlockFn:
    """The block, with its input named inside.  Named outside of jax.checkpoint, another copy would be saved."""
    return lambda params, x, *rest: block(params, checkpoint_name(x, BLOCK_INPUT), *rest)


class ModelInput(NamedTuple):
    """One microbatch's input; a step's has a leading dimension, microbatches."""

    batch: Batch
    dropout_key: DropoutKey | None = None  # None for no dropout
    row_weight: jax.Array | float | None = None  # in training, for blocks with auxiliary losses: see BlockContext


def _abstract(make: Callable[[nnx.Rngs], Any]) -> tuple[nnx.GraphDef, nnx.State]:
    """Graph and abstract parameters of the modules that `make(rngs)` builds.

    nnx.eval_shape would look the dimension names up in the current mesh; this does not."""
    with nnx.use_eager_sharding(False):
        graph, params, others = jax.eval_shape(lambda: nnx.split(make(nnx.Rngs(0)), nnx.Param, ...))
    if kinds := sorted({type(each).__name__ for each in jax.tree.leaves(others, is_leaf=_is_variable)}):
        problem = f"a module holds variables that are no nnx.Param: {', '.join(kinds)}"
        raise ConfigError(f"{problem}. A step keeps parameters alone.")
    return graph, params


def _is_variable(x: Any) -> bool:
    return isinstance(x, nnx.Variable)


def _to_params(state: nnx.State, value: Callable[[nnx.Variable], Any] | None = None) -> Params:
    return {"head": {}} | nnx.to_pure_dict(state, value)  # a head may have no parameters of its own


@dataclasses.dataclass(frozen=True)
class LanguageModel:
    """c: the model's section.  dtype: the parameters'.  kernels: attention kernels, keys of ops.attention.KERNELS, one
    for each layer of a period.  attention_block: AttentionSpec.block.  logits_policy: in training.  scan_layers:
    whether layers run in a scan.
    collective_matmul: keys of the branches whose linears overlap with the collectives over `heads` and `mlp`; not in
    generation, and only on one device's shards: where arrays are global, XLA inserts the collectives.  adapters: those
    of its blocks' matrices.  base: how these matrices are quantized, if they are.  fake_quant: how they are rounded
    when they multiply.  eight_bits: how they multiply in eight bits, in a train step.  expert_products: formulations of
    the experts' products, one for each layer of a period; buffers for all if empty, and in generation."""

    c: Model
    objective: Objective
    dtype: str
    kernels: tuple[str, ...]
    remat: RematPolicy = RematPolicy()  # noqa: RUF009 - frozen
    logits_policy: LogitsPolicy = LogitsPolicy()  # noqa: RUF009 - frozen
    scan_layers: bool = True
    collective_matmul: tuple[str, ...] = ()
    modules: ModelModules = ModelModules()  # noqa: RUF009 - frozen
    adapters: Adapters = ()
    base: Coding | None = None
    fake_quant: FakeQuantKind = "none"
    eight_bits: EightBits | None = None
    expert_products: tuple[str, ...] = ()
    attention_block: int = AttentionSpec.block

    @property
    def names(self) -> Params:
        """The dimension names of every parameter."""
        return self._of_any_layout._names_and_shapes[0]

    @property
    def shapes(self) -> Params:
        """Shape and dtype of every parameter, unpadded."""
        return self._of_any_layout._names_and_shapes[1]

    @functools.cached_property
    def _of_any_layout(self) -> "LanguageModel":
        """A model with the same parameters and blocks, which is traced once for all layouts."""
        weights = self.dtype, self.modules, self.adapters, self.base, self.fake_quant
        return _of_any_layout(self.c, self.objective, *weights, jax.config.read("jax_enable_x64"))

    @functools.cached_property
    def _names_and_shapes(self) -> tuple[Params, Params]:
        _, state = _abstract(self._modules)
        names = _to_params(state, lambda variable: variable.get_metadata().get("out_sharding"))
        require_names(names, shapes := _to_params(state))
        return names, shapes

    def init(self, seed: int) -> Params:
        """Matrices N(0, 0.02), less where they end a branch, biases 0, norms neutral: a function of the seed alone."""
        with nnx.use_eager_sharding(False):
            return _to_params(nnx.state(self._modules(nnx.Rngs(jax.random.key(seed))), nnx.Param))

    @property
    def has_dropout(self) -> bool:
        of_adapters = any(isinstance(each, LowRank) and each.dropout for _, each in self.adapters)
        return bool(self.c.dropout or self.c.attention_dropout or of_adapters)

    @property
    def has_auxiliary_losses(self) -> bool:
        """True if blocks may have some."""
        return self.modules.own_block or bool(self.c.mixtures)

    @property
    def prefetched(self) -> tuple[str, ...]:
        """The parts of a block, by their keys, whose weights parallel.prefetch gathers a layer ahead."""
        return self.modules.prefetched or tuple(self.names["blocks"])

    @functools.cached_property
    def period(self) -> Period:
        kinds = self.c.kinds
        keys = tuple(f"{place}_{kind.kind}" for place, kind in enumerate(kinds)) if len(kinds) > 1 else ()
        return Period(keys, *divmod(self.c.layers, len(kinds)))

    def _modules(self, rngs: nnx.Rngs) -> dict[str, Any]:
        def make_stack(place: int, c: Model) -> nnx.Module:
            @nnx.split_rngs(splits=min(self.c.unique_layers, self.c.layers_like(place)))
            @nnx.vmap(transform_metadata={nnx.PARTITION_NAME: "layers"})
            def make_blocks(rngs: nnx.Rngs) -> nnx.Module:
                return self._make_block(ParamInit(c, rngs, self.dtype))

            return make_blocks(rngs)

        init = ParamInit(self.c, rngs, self.dtype)
        embedding = self.modules.embedding(init)
        blocks = self.period.join([make_stack(place, c) for place, c in enumerate(self.c.of_each_kind)])
        return {"embedding": embedding, "blocks": blocks, "head": self._make_head(init)}

    def _make_block(self, init: ParamInit) -> nnx.Module:
        block = fake_quantize(self.modules.block(init), self.fake_quant)
        how = "adapter.base" if self.adapters else "precision.quantized"
        return code_matrices(add_adapters(block, self.adapters, init), self.base, how)

    @functools.cached_property
    def matrices(self) -> dict[str, bool]:
        """Matrices of blocks, by path in a block (attention.query): True if multiplied transposed."""

        def paths() -> None:
            blocks = (self.modules.block(ParamInit(c, nnx.Rngs(0), self.dtype)) for c in self.c.of_each_kind)
            for path, module, name in (each for block in blocks for each in matrices_of(block)):
                found[path] = name in module.row_parallel

        found: dict[str, bool] = {}
        with nnx.use_eager_sharding(False):
            jax.eval_shape(paths)
        return found

    def _make_head(self, init: ParamInit) -> Head:
        return self.modules.make_head(init, self.objective, self.logits_policy)

    @functools.cached_property
    def _graphs(self) -> dict[str, nnx.GraphDef]:
        """Graphs of embedding and head.  Even a tied head has a token table here; `_head` fills in the embedding's."""
        untied = self.c.model_copy(update={"tie_embeddings": False})
        return {"embedding": self._graph(self.c, self.modules.embedding), "head": self._graph(untied, self._make_head)}

    @functools.cached_property
    def _block_graphs(self) -> list[nnx.GraphDef]:
        """Graph of the block at each place in the period."""
        return [self._graph(c, self._make_block) for c in self.c.of_each_kind]

    def _graph(self, c: Model, make: Callable[[ParamInit], nnx.Module]) -> nnx.GraphDef:
        return _abstract(lambda rngs: make(ParamInit(c, rngs, self.dtype)))[0]

    def embed_params(self, params: Params) -> Params:
        """The subtree that `embed` reads, of a tree like the parameters."""
        return {"embedding": params["embedding"]}

    def head_params(self, params: Params) -> Params:
        """The subtree that the head reads, of a tree like the parameters or some of them; a tied table is in both."""
        if not self.objective.ties_embeddings(self.c):
            return {"head": params["head"]}
        table = {name: x for name, x in params["embedding"].items() if name == "tokens"}
        return {"head": params["head"], "embedding": table}

    @jax.named_scope("embedding")
    def embed(self, params: Params, microbatch: ModelInput) -> jax.Array:
        """The residual stream [batch, sequence, width] of a microbatch's tokens."""
        return nnx.merge(self._graphs["embedding"], params["embedding"])(microbatch.batch, microbatch.dropout_key)

    def loss_weights(self, batch: Batch) -> LossDict:
        """The weights of the tokens or rows that each loss is a mean over."""
        return self.modules.loss_weights(self.objective, batch)

    def block_fns(self) -> tuple[BlockFn, ...]:
        """`block` for each place in the period, as training runs it, under the remat policy."""
        blocks: list[BlockFn] = [functools.partial(self.block, place=place) for place in range(self.period.layers)]
        if not self.remat.recomputes_layer:
            return tuple(blocks)
        if self.remat.offloads_inputs:
            blocks = list(map(_named_input, blocks))
        return tuple(self._checkpoint(block, policy=self._saved()) for block in blocks)

    def _saved(self) -> Callable | None:
        """jax.checkpoint's policy for a block; None to save its input alone."""
        policies = jax.checkpoint_policies
        if self.remat.offloads_inputs:
            return policies.save_and_offload_only_these_names(
                names_which_can_be_saved=[],
                names_which_can_be_offloaded=[BLOCK_INPUT],
                offload_src="device",
                offload_dst="pinned_host",
            )
        return policies.save_only_these_names(RESIDUAL) if self.remat.saves_branch_sums else None

    def last_block_fns(self) -> tuple[BlockFn, ...]:
        """`block_fns` of a truncated last period, which runs outside of a loop."""
        return dataclasses.replace(self, scan_layers=False).block_fns()[: self.period.rest]

    @jax.named_scope("blocks")
    def block(
        self,
        params: Params,
        x: jax.Array,
        microbatch: ModelInput,
        index: jax.Array | int,
        place: int = 0,
        show: Callable[[str, jax.Array], None] | None = None,
    ) -> tuple[jax.Array, LossDict]:
        """Runs one layer, given its parameters, the index of its period, and its place there: (x, auxiliary losses).
        Tokens attend within their row.  show: called with the path of each matrix and the inputs that it multiplies."""
        batch, key, row_weight = microbatch
        layer = index * self.period.layers + place if self.period.keys else index
        key = None if key is None else key.at_layer(layer)

        def make_attention(spec: AttentionSpec) -> AttentionCore:
            core = functools.partial(
                attention, spec=dataclasses.replace(spec, kernel=self.kernels[place], block=self.attention_block)
            )
            run: Callable = manual_region(core, partition_spec("batch", None, "heads"))
            run = self._checkpoint(run) if self.remat.recomputes_attention else run
            return functools.partial(run, positions=batch.positions, segment_ids=batch.segments_of_rows, key=key)

        training, weight = row_weight is not None, 1.0 if row_weight is None else row_weight
        product = self.expert_products[place] if self.expert_products else BUFFERS
        checkpoint = _unchanged if show else self._checkpoint  # what is shown must not be of a trace within this one
        how = self._linears(), checkpoint, batch, weight, training, layer, product
        context = BlockContext(make_attention, key, *how)
        block = nnx.merge(self._of_any_layout._block_graphs[place], params)
        if show:
            show_inputs(block, show)
        if self.eight_bits:
            multiply_in_eight_bits(block, self.eight_bits)
        result = block(x, context)
        if self.modules.own_block and (self.adapters or self.fake_quant != "none" or show or self.eight_bits):
            require_used(block)
        return checked_block(result, x, self.modules.block.__name__) if self.modules.own_block else result

    def _linears(self) -> BlockLinears:
        saves_shards = num_shards(SEQUENCE) > 1 and not self.remat.recomputes_layer

        def linears_of(branch: str) -> Linears:
            linears = COLLECTIVE_MATMUL if branch in self.collective_matmul else Linears()
            return linears.checkpointed(self._checkpoint) if saves_shards else linears

        return BlockLinears(*map(linears_of, BlockLinears._fields))

    def _checkpoint(self, f: Callable, **options) -> Callable:
        """jax.checkpoint.  CSE cannot undo remat inside a scan; unrolled it could, so prevent it."""
        return jax.checkpoint(f, prevent_cse=not self.scan_layers, **options)

    def _head(self, params: Params, x: jax.Array) -> tuple[Head, jax.Array]:
        """The head, and its input: the output of the last block after the final norm."""
        tied = self.objective.ties_embeddings(self.c)
        table = {"tokens": params["embedding"]["tokens"]} if tied else {}
        head = nnx.merge(self._graphs["head"], params["head"] | table)
        return head, x if head.norm is None else head.norm(x)

    @jax.named_scope("head")
    def losses(self, params: Params, x: jax.Array, microbatch: ModelInput, weights: LossDict) -> LossDict:
        """Sums of weight x negative log-likelihood, by loss.  x: the output of the last block."""
        head, h = self._head(params, x)
        losses = head.losses(h, microbatch.batch, weights, microbatch.dropout_key)
        return checked_losses(losses, weights, type(head).__name__) if self.modules.head else losses

    @jax.named_scope("head")
    def eval_sums(self, params: Params, x: jax.Array, microbatch: ModelInput, rows: int) -> dict:
        """See Head.eval_sums.  x: the output of the last block."""
        head, h = self._head(params, x)
        return head.eval_sums(h, microbatch.batch, rows)

    @jax.named_scope("head")
    def target_scores(self, params: Params, x: jax.Array, microbatch: ModelInput, rows: int) -> dict:
        """See Head.target_scores.  x: the output of the last block."""
        head, h = self._head(params, x)
        return head.target_scores(h, microbatch.batch, rows)

    def logits(self, params: Params, x: jax.Array, batch: Batch) -> dict[str, jax.Array]:
        """Logits by what the head predicts.  x: the output of the last block."""
        head, h = self._head(params, x)
        return head.logits(h, batch)

    def mean_loss(self, params: Params, batch: Batch, dropout: tuple[Any, Any] | None = None) -> jax.Array:
        """The sum of the objective's losses, in nats, and auxiliary ones, means over the batch, on jax.set_mesh's mesh.

        params: in the compute dtype, laid out by their names.  batch: leaves [batch, ...].  dropout: a seed and the
        step, integers, which determine the masks; None for none.  Raises LayoutError if a parameter or the batch is not
        laid out as the rules say."""
        return self.unchecked_mean_loss(*self._checked(params, batch), dropout)

    def unchecked_mean_loss(self, params: Params, batch: Batch, dropout: tuple[Any, Any] | None) -> jax.Array:
        """`mean_loss` without checks of the layout, in any context of rules."""
        key = None if dropout is None else DropoutKey(*dropout, batch.sample_ids)
        model_input = ModelInput(batch, key, 1 / batch.tokens.shape[0] if self.has_auxiliary_losses else None)
        x = self._embed_gathered(params, model_input)
        x, auxiliary = self._run_layers(params["blocks"], x, model_input, unroll=not self.scan_layers)
        dtype = upcast(x).dtype
        weights = {name: w.astype(dtype) for name, w in self.loss_weights(batch).items()}
        totals = nonzero_totals({name: w.sum() for name, w in weights.items()})
        weights = {name: w / totals[name] for name, w in weights.items()}
        losses = self._run_gathered(self.losses, self.head_params, params, x, model_input, weights)
        return sum_losses(sum_by_name(losses, auxiliary))

    def _checked(self, params: Params, batch: Batch) -> tuple[Params, Batch]:
        """Checks global arrays.  Raises LayoutError for those, and for settings, that a user's own mesh cannot run."""
        names = jax.tree.map(sharded_names, self.names, is_leaf=is_dim_names)
        params = checked(params, names, "Write jax.device_put(params, spmd_lm.param_shardings(model)).")
        batch_names = jax.tree.map(lambda x: ("batch", None)[: x.ndim], batch)
        batch = checked(batch, batch_names, "Write jax.device_put(batch, NamedSharding(mesh, P(axis of batch))).")
        rows, time = batch.tokens.shape
        for what, size, name in (
            *((f"model.heads={c.heads}", c.heads, "heads") for c in self.c.of_each_kind),
            *((f"model.kv_heads={c.kv_heads}", c.kv_heads or c.heads, "heads") for c in self.c.of_each_kind),
            (f"the batch's sequences, {time} tokens long,", time, SEQUENCE),
            (f"the number of examples in {rows} rows", rows // self.objective.rows_per_example, "batch"),
        ):
            if size % num_shards(name):
                raise LayoutError(f"{what} cannot be divided by the {num_shards(name)} shards of '{name}'.")
        if self.remat.layers_per_remat_block > 1:
            raise LayoutError("remat.policy=block is for spmd-lm train alone. Use remat.policy=full.")
        return params, batch

    def forward(self, params: Params, batch: Batch, gather: Gather = _identity) -> dict[str, jax.Array]:
        """Logits of a batch [batch, time], by what the head predicts.  Checks global arrays as `mean_loss` does."""
        if is_explicit():
            params, batch = self._checked(params, batch)
        x = self._embed_gathered(params, ModelInput(batch))
        x, _ = self._run_layers(params["blocks"], x, ModelInput(batch), gather)
        return self._run_gathered(self.logits, self.head_params, params, x, batch)

    def _with_gathered(self, f: Callable, names: Params, **how: bool) -> Callable:
        """f(params, x, *inputs), which also gathers the parameters, of these names, that rules shard between uses."""
        rules = axis_rules()
        return f if rules is None or rules.with_gathered is None else rules.with_gathered(f, names, **how)

    def _run_gathered(self, f: Callable, select: Callable[[Params], Params], params: Params, *inputs: Any) -> Any:
        """f(select(params), *inputs), with those parameters gathered."""
        return self._with_gathered(f, select(self.names), regather=False)(select(params), *inputs)

    def _embed_gathered(self, params: Params, model_input: ModelInput) -> jax.Array:
        def embed(params: Params, _: None, model_input: ModelInput) -> jax.Array:
            return self.embed(params, model_input)

        return self._run_gathered(embed, self.embed_params, params, None, model_input)

    def _gathering(self, blocks: tuple[BlockFn, ...], in_loop: bool) -> tuple[BlockFn, ...]:
        """Blocks, each of which gathers its own parameters if the rules shard them between their uses."""
        names = jax.tree.map(lambda names: names[1:], self.names["blocks"], is_leaf=is_dim_names)
        return tuple(
            self._with_gathered(block, of_layer, regather=True, prevent_cse=not in_loop)
            for block, of_layer in zip(blocks, self.period.trees(names), strict=False)
        )

    def _run_layers(
        self, stack: Params, x: jax.Array, model_input: ModelInput, gather: Gather = _identity, unroll: bool = False
    ) -> tuple[jax.Array, LossDict]:
        """Runs x through all layers; returns it and the sums of their auxiliary losses."""
        period = self.period

        def run(block: BlockFn, x: jax.Array, inputs: tuple[Params, jax.Array]) -> tuple[jax.Array, LossDict]:
            layers, index = inputs
            return block(gather(layers), x, model_input, index)

        indices = jnp.arange(period.count, dtype=jnp.int32)
        full = functools.partial(run, period.in_order(self._gathering(self.block_fns(), in_loop=not unroll)))
        x, losses = self._scan_periods(full, x, stack, indices, unroll)
        losses = {name: each.sum(0) for name, each in losses.items()}
        if period.rest:
            last = period.cut_short.in_order(self._gathering(self.last_block_fns(), in_loop=False))
            x, more = run(last, x, (period.last(stack), jnp.int32(period.count)))
            losses = sum_by_name(losses, more)
        return x, losses

    def _scan_periods(self, run: Callable, x: jax.Array, stack: Params, per_period: Any, unroll: bool = False) -> tuple:
        """lax.scan of run(x, (params, entry of `per_period`)) over all whole periods, mostly of one layer."""
        if not self.c.share_layers:
            return jax.lax.scan(run, x, (self.period.full(stack), per_period), unroll=unroll)
        shared = jax.tree.map(lambda w: w[0], stack)
        return jax.lax.scan(lambda x, entry: run(x, (shared, entry)), x, per_period, self.c.layers, unroll=unroll)

    def empty_cache(self, rows: int, dtype: jnp.dtype) -> KVCaches:
        """Keys and values of `rows` sequences, [rows, context, local kv heads, head width] each: for each layer of a
        period, stacked over the periods; and for each layer of a truncated last period.  For blocks without a cache,
        the tokens themselves."""

        if not self.modules.has_kv_cache:
            return jnp.zeros((rows, self.c.context), jnp.int32), None

        def of_layer(c: Model, *periods: int) -> KVCache:
            heads = max((c.kv_heads or c.heads) // num_shards("heads"), 1)
            return (jnp.zeros((*periods, rows, c.context, heads, c.head_dim), dtype),) * 2

        period, layers = self.period, self.c.of_each_kind
        full = period.join([of_layer(c, period.count) for c in layers])
        return full, period.cut_short.join(map(of_layer, layers[: period.rest])) if period.rest else None

    def extend(
        self, params: Params, gather: Gather, cache: KVCaches, tokens: jax.Array, positions: jax.Array, last: jax.Array
    ) -> tuple[jax.Array, KVCaches]:
        """Adds `tokens` (int32 [batch, time], at `positions`) to the cache; returns logits [batch, padded vocab] after
        row b's token last[b]."""
        if not self.modules.has_kv_cache:
            return self._extend_tokens(params, gather, cache[0], tokens, positions, last)
        batch = Batch(tokens, None, None, positions, None, None)

        def run(period: Period, x: jax.Array, inputs: tuple[Params, Any]) -> tuple[jax.Array, Any]:
            layers, caches = gather(inputs[0]), []
            for graph, layer, layer_cache in zip(
                self._of_any_layout._block_graphs, period.trees(layers), period.trees(inputs[1]), strict=False
            ):

                def make_attention(spec: AttentionSpec, layer_cache=layer_cache) -> AttentionCore:
                    def attend(q, k, v):
                        out, cache = attention_with_cache(q, k, v, spec, layer_cache, positions)
                        caches.append(cache)
                        return out

                    return attend

                x, _ = nnx.merge(graph, layer)(x, BlockContext(make_attention, batch=batch))
            if len(caches) != period.layers:
                raise ConfigError(
                    f"a block with `has_kv_cache = True` made {len(caches)} attentions in {period.layers} layers."
                )
            return x, period.join(caches)

        period, (of_full, of_last) = self.period, cache
        x = self.embed(params, ModelInput(batch))
        x, of_full = self._scan_periods(functools.partial(run, period), x, params["blocks"], of_full)
        if period.rest:
            x, of_last = run(period.cut_short, x, (period.last(params["blocks"]), of_last))
        x = jnp.take_along_axis(x, last[:, None, None], axis=1)
        return self.logits(params, x, batch)["tokens"][:, 0], (of_full, of_last)

    def _extend_tokens(
        self, params: Params, gather: Gather, read: jax.Array, tokens: jax.Array, positions: jax.Array, last: jax.Array
    ) -> tuple[jax.Array, KVCaches]:
        """`extend` for blocks without a cache: all layers run over all tokens again.  read: int32 [batch, context], the
        tokens so far; later entries, to which no earlier token attends, are arbitrary."""
        rows = jnp.arange(tokens.shape[0])[:, None]
        read = read.at[rows, positions].set(tokens)
        every = jnp.broadcast_to(jnp.arange(read.shape[1], dtype=jnp.int32), read.shape)
        batch = Batch(read, None, None, every, None, None)
        x, _ = self._run_layers(params["blocks"], self.embed(params, ModelInput(batch)), ModelInput(batch), gather)
        at = jnp.take_along_axis(positions, last[:, None], axis=1)
        x = jnp.take_along_axis(x, at[:, :, None], axis=1)
        return self.logits(params, x, batch)["tokens"][:, 0], (read, None)


@functools.lru_cache(maxsize=64)
def _of_any_layout(
    c: Model,
    objective: Objective,
    dtype: str,
    modules: ModelModules,
    adapters: Adapters,
    base: Coding | None,
    fake_quant: FakeQuantKind,
    x64: bool,
) -> LanguageModel:
    """x64: whether jax enables float64, on which a trace depends."""
    return LanguageModel(
        c, objective, dtype, kernels=(), modules=modules, adapters=adapters, base=base, fake_quant=fake_quant
    )
