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
    if config.remat.policy == "full":
        return m.width  # the block's input
    whole = 4 * m.width  # its input, both norms' results and the stream between the branches
    # q, k, v, and what attention gives; the MLP's hidden layer on both sides of GELU
    split = (4 * m.width + 2 * m.mlp_width) / t
    causal = 0.75  # two blocks of queries: the first sees half of the keys
    scores = 0 if kernel != "xla" or config.remat.policy == "selective" else 2 * causal * m.heads * m.context / t
    return whole + split + scores


def table(config: RunConfig, plan: Plan, kernel: str) -> dict[str, int]:
    """Bytes per device of each thing that a step holds; 'state' of it from step to step."""
    c, p = config, config.precision
    state = lambda dtype: per_device(plan, plan.placed_shapes, plan.specs, dtype)  # noqa: E731
    rows = c.train.batch // c.parallel.microbatches // plan.layout.batch_shards
    tokens = rows * c.model.context
    layers = c.model.layers // plan.layout.pipe
    wide = max(bytes_of("float32"), bytes_of(p.compute))
    vocab = padded_vocab(c.model.vocab, plan.layout.model) // plan.layout.model
    accumulated = c.parallel.microbatches > 1
    return {
        "parameters": state(p.params),
        "adam moments": 2 * state(p.params),
        "gradients": state(p.reduce) + (state(p.params) if accumulated else 0),  # a microbatch's, and their sum
        "compute copy": 0 if p.compute == p.params else state(p.compute),
        "activations": int(tokens * layers * block_elements(config, plan, kernel) * bytes_of(p.compute)),
        # a chunk of them, and the gradient of the table that they add up to
        "logits": min(tokens * vocab * wide, cross_entropy.CHUNK_BYTES) + vocab * c.model.width * wide,
    }


STATE = ("parameters", "adam moments")
"""The rows of `table` that outlive a step."""
