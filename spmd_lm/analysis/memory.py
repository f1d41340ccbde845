"""Where the bytes of a device go, before anything runs.

State is exact: it is what the compiled step takes as arguments.  Activations are a formula (arXiv:2205.05198, table 2,
in the dtypes and with the kernels of this program); the compiler may do a little better or worse."""

import math

import jax
from jax.sharding import NamedSharding

from spmd_lm.config.schema import RunConfig
from spmd_lm.ops import cross_entropy
from spmd_lm.parallel.plan import Plan, Tree, padded_vocab


def bytes_of(dtype: str) -> int:
    return jax.numpy.dtype(dtype).itemsize


def per_device(plan: Plan, shapes: Tree, specs: Tree, dtype: str) -> int:
    """Bytes that one device holds of arrays of these shapes under these specs."""
    size = lambda x, spec: math.prod(NamedSharding(plan.mesh, spec).shard_shape(x.shape))  # noqa: E731
    return sum(jax.tree.leaves(jax.tree.map(size, shapes, specs))) * bytes_of(dtype)


def block_elements(config: RunConfig, plan: Plan, kernel: str) -> float:
    """Elements per token and layer that the backward pass finds saved."""
    m, t = config.model, plan.layout.model
    stream = 1 / t if plan.sequence else 1  # each device's share of what lies between the branches
    if config.remat.policy in ("full", "residual"):  # the block's input, and the stream between its branches
        return m.width * stream * (1 if config.remat.policy == "full" else 2)
    whole = 4 * m.width * stream  # the stream twice, and both norms' results
    # q, k, v, and what attention gives; the MLP's hidden layer on both sides of GELU
    split = (4 * m.width + 2 * m.mlp_width) / t
    causal = 0.75  # two blocks of queries: the first sees half of the keys
    scores = 0 if kernel != "xla" or config.remat.policy == "selective" else 2 * causal * m.heads * m.context / t
    return whole + split + scores


def weights_and_gradients(config: RunConfig, plan: Plan) -> tuple[int, int]:
    """Bytes of the weights that a step makes of the parameters, and of their gradients, as ZeRO's stage has them."""
    p, stage = config.precision, plan.zero
    layers = config.model.layers // plan.layout.pipe
    of = lambda specs, dtype: {  # noqa: E731
        name: per_device(plan, plan.placed_shapes[name], specs[name], dtype) for name in plan.placed_shapes
    }
    whole, shards = of(plan.whole_specs, p.compute), of(plan.specs, p.reduce)
    early = stage > 1 and not config.parallel.reduce_once
    one_by_one = stage == 3 and early
    held = sum(whole.values()) - (whole["blocks"] - whole["blocks"] // layers if one_by_one else 0)
    if stage == 0 and p.compute == p.params:
        held = 0  # the parameters themselves
    widen = bytes_of("float32") / bytes_of(p.compute) if p.compute in ("bfloat16", "float16") else 1.0
    accumulated = config.parallel.microbatches > 1
    if early:  # a layer's, and the shards of all, which are added up in float32 or wider
        made = whole["blocks"] // layers + whole["embedding"] + sum(shards.values())
        sums = sum(of(plan.specs, p.params).values()) if accumulated else 0
    else:  # all, and once they are scattered or reduced their shards
        made = sum(whole.values()) + (sum(shards.values()) if stage or p.reduce != p.compute else 0)
        sums = int(sum(whole.values()) * widen) if accumulated else 0
    return held, made + sums


def table(config: RunConfig, plan: Plan, kernel: str) -> dict[str, int]:
    """Bytes per device of each thing that a step holds; 'state' of it from step to step."""
    c, p = config, config.precision
    state = per_device(plan, plan.placed_shapes, plan.specs, p.params)
    rows = c.train.batch // c.parallel.microbatches // plan.layout.batch_shards
    tokens = rows * c.model.context
    layers = c.model.layers // plan.layout.pipe
    wide = max(bytes_of("float32"), bytes_of(p.compute))
    vocab = padded_vocab(c.model.vocab, plan.layout.model) // plan.layout.model
    weights, gradients = weights_and_gradients(config, plan)
    return {
        "parameters": state,
        "adam moments": 2 * state,
        "weights": weights,  # in the compute dtype, whole over data
        "gradients": gradients,
        "activations": int(tokens * layers * block_elements(config, plan, kernel) * bytes_of(p.compute)),
        # a chunk of them, and the gradient of the table that they add up to
        "logits": min(tokens * vocab * wide, cross_entropy.CHUNK_BYTES) + vocab * c.model.width * wide,
    }


STATE = ("parameters", "adam moments")
"""The rows of `table` that outlive a step."""
