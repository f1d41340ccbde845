"""The activations of one layer on a device: what forward saves for backward, and what backward works with.

By formula (arXiv:2205.05198, table 2), in the dtypes and with the kernels of this program."""

import functools
import operator

import jax

from spmd_lm.config.attention_kernels import choose_kernel
from spmd_lm.config.schema import RunConfig
from spmd_lm.cost_model.compilers import Compiler, Points
from spmd_lm.cost_model.own_layer import has_own_block, trace_layer
from spmd_lm.ops.attention import computed_scores
from spmd_lm.parallel.mesh import Layout
from spmd_lm.parallel.plan import Plan


@functools.cache
def dtype_bytes(dtype: str) -> int:
    return jax.numpy.dtype(dtype).itemsize


@functools.cache
def at_least_float32(dtype: str) -> str:
    return jax.numpy.promote_types(dtype, "float32").name


def tokens_per_device(config: RunConfig, layout: Layout) -> int:
    """Tokens of one microbatch on a device, with the whole sequence."""
    return config.train.batch // config.parallel.microbatches // layout.batch_shards * config.model.context


def stream_bytes(config: RunConfig, plan: Plan) -> int:
    """One microbatch's residual stream on a device, in the compute dtype, whatever its compiler makes of it."""
    size = tokens_per_device(config, plan.layout) * config.model.width * dtype_bytes(config.precision.compute)
    return size // (plan.layout.model if plan.sequence else 1)


def shares_of_kinds(config: RunConfig) -> list[float]:
    """Share of the layers that each place of a period has."""
    m = config.model
    return [m.layers_like(place) / m.layers for place in range(len(m.kinds))]


def layer_activations(config: RunConfig, plan: Plan, compiler: Compiler) -> "LayerActivations":
    """Activations of a layer; of several kinds the mean of what is saved, and the most of everything else."""
    kind = OwnLayerActivations if has_own_block(config) else LayerActivations
    layers = [kind(of_kind, plan, compiler) for of_kind in config.of_each_kind]
    layer, saved = layers[0], sum(map(operator.mul, (each.saved for each in layers), shares_of_kinds(config)))
    if len(layers) > 1:
        vars(layer).update({name: max(vars(each)[name] for each in layers) for name in vars(layer)}, saved=saved)
    return layer


class LayerActivations:
    """Bytes per token, as a compiler holds them, of a layer of a model whose layers are all of one kind.

    stream: of the residual stream.  hidden: of the MLP's hidden layer.  outside: what is saved if nothing is
    recomputed, but for the attention core.  core: what the attention core saves then.  saved: what the run's remat
    policy saves.  workspace: what backward through a layer holds besides, its recomputed activations included.
    attention_workspace: the same in attention's backward, where a fused kernel reads copies in its own layout.
    forward_workspace: what forward holds then.  forward_alone: what forward holds where nothing is saved."""

    def __init__(self, config: RunConfig, plan: Plan, compiler: Compiler):
        m, shards, remat = config.model, plan.layout.model, config.remat_policy
        wide = dtype_bytes(at_least_float32(config.precision.compute))
        size = wide if compiler.wide else dtype_bytes(config.precision.compute)
        fused = choose_kernel(config, plan.platform, plan.device_kind).kernel != "xla"

        # Split into heads, but for queries, keys and values whose attention is recomputed.
        lanes = 1 if remat.recomputes_attention else compiler.lanes
        padding = -(-m.head_dim // lanes) * lanes / m.head_dim

        unsharded = m.width * size
        self.stream = unsharded / shards if plan.sequence else unsharded
        self.hidden = hidden = m.mlp_dim / shards * size
        streams, attention, mlp = self._outside(config, plan, padding * size, size)
        self.outside = streams + attention + mlp
        # A fused kernel saves its output, in its own layout; XLA's attention the scores before and after softmax, and
        # after dropout, with its mask, and the derivatives of a soft cap.
        computed = computed_scores(m.context, m.causal, m.span)
        scores = m.heads * m.context / shards * computed
        masked = size + 1 if m.attention_dropout else 0
        capped = wide if m.attention_softcap and not compiler.recomputes_caps else 0
        self.core = m.query_width * padding / shards * size if fused else scores * (2 * size + masked + capped)
        self.saved = self._saved(config)

        # The hidden layer's gradient before and after the activation; the gradient of a branch's output, and where the
        # sequence is sharded the whole of it and of the branch's input, under some policies of attention's input too.
        gathered = 2 if plan.sequence else 0
        if plan.sequence and shards > 1 and remat.policy in compiler.keeps_gathers:
            gathered += 1
        self.workspace = 2 * hidden + (1 + gathered + compiler.streams[plan.sequence]) * unsharded
        core = self.core if fused else 0
        if remat.recomputes_layer:
            self.workspace += self.outside + core - self.saved
        if remat.policy in compiler.in_turn:  # of the branches, with their norms' outputs, the larger one alone
            self.workspace -= self.stream + min(attention + core, mlp)
        if shards > 1 and not plan.sequence:
            self.workspace = max(self.workspace, compiler.least_streams * unsharded)
        if not fused:
            seen = computed / computed_scores(m.context, m.causal, None)
            self.workspace += compiler.scores * m.heads * m.context / shards * wide * seen
        self.attention_workspace = self.forward_workspace = 0.0
        # Forward alone: a branch's input, its norm's output and its sum, and the larger branch.
        core = self.core if fused else scores * (size + wide)
        self.forward_alone = 2 * self.stream + unsharded + max(attention + core, 2 * mlp)
        if fused:
            self._around_kernel(config, plan, compiler)

    def _outside(self, config: RunConfig, plan: Plan, padded: float, size: int) -> tuple[float, float, float]:
        """What is saved outside of the attention core: of the residual stream, of attention and of the MLP.

        Both branches' inputs and both norms' outputs, and where norms follow the branches their outputs; queries, keys
        and values, before their norms too, and what attention's last matrix reads; the MLP's hidden layer before and
        after the activation, and what gates it.  What a frozen matrix alone would
        read, for its gradient, is not saved; an adapter reads it too.  padded: bytes of an entry that is split into
        heads; size: of others."""
        m, shards = config.model, plan.layout.model
        reads = functools.partial(plan.reads_input, "blocks")
        norms = [
            any(reads(branch, key) for key in keys)
            for branch, keys in (("attention", ("query", "key", "value")), ("mlp", ("up", "gate")))
        ]
        masks = 2 * self.stream / size if m.dropout else 0  # one byte per element
        between = 2 * (m.norm == "sandwich") - m.parallel_branches
        attention = m.qkv_width(shards) * padded + m.query_width / shards * reads("attention", "out") * size
        mlp = ((2 if m.gated else 1) + reads("mlp", "down")) * self.hidden
        attention += m.qk_norm * m.qk_width(shards) * padded
        return (2 + between + sum(norms)) * self.stream + masks, attention, mlp

    def _around_kernel(self, config: RunConfig, plan: Plan, compiler: Compiler) -> None:
        """Sets what a layer holds around a fused attention kernel."""
        m, policy, shards = config.model, config.remat_policy.policy, plan.layout.model
        size = dtype_bytes(config.precision.compute)
        head = -(-m.head_dim // compiler.lanes) * compiler.lanes * size
        queries, keys = m.heads / shards * head, max((m.kv_heads or m.heads) / shards, 1) * head
        logsumexps = m.heads * compiler.lanes * dtype_bytes("float32") / shards
        unsharded = 2 * m.width * size if plan.sequence else 0
        hidden = self.hidden * (2 if m.gated else 1)

        def most(points: Points, rotary: Points) -> float:
            sizes = hidden, queries, keys, logsumexps, self.stream
            each = points.get(policy, ()) + (rotary.get(policy, ()) if m.positions == "rotary" else ())
            return max((sum(map(operator.mul, arrays, sizes)) + unsharded for arrays in each), default=0.0)

        self.attention_workspace = most(compiler.attention_arrays, compiler.rotary_attention_arrays)
        self.forward_workspace = most(compiler.forward_arrays, compiler.rotary_forward_arrays)

    def _saved(self, config: RunConfig) -> float:
        remat = config.remat_policy
        if remat.policy == "block":  # the input of each remat block, and everything inside one of them
            size, everything = remat.layers_per_remat_block, self.outside + self.core
            return self.stream / size + everything * size / config.layers_per_chunk
        if remat.recomputes_layer:
            return self.stream * remat.saved_streams
        return self.outside + (0 if remat.recomputes_attention else self.core)


class OwnLayerActivations(LayerActivations):
    """The same of a block of one's own, by its trace: what is as wide as the residual stream is sharded as it is,
    everything else over `model`."""

    def __init__(self, config: RunConfig, plan: Plan, compiler: Compiler):
        del compiler
        fused = choose_kernel(config, plan.platform, plan.device_kind).kernel != "xla"
        m, shards, traced = config.model, plan.layout.model, trace_layer(config, fused=fused)
        unsharded = m.width * dtype_bytes(config.precision.compute)
        self.stream = unsharded / shards if plan.sequence else unsharded
        self.hidden = self.core = self.attention_workspace = self.forward_workspace = 0.0
        streams = traced.stream_bytes / (shards if plan.sequence else 1)
        self.outside = (streams + traced.other_bytes / shards) / m.context
        self.saved = self._saved(config)
        self.workspace = 2 * unsharded + self.outside - (0 if config.remat_policy.recomputes_layer else self.saved)
        self.forward_alone = 2 * self.stream + self.outside
