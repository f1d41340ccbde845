"""Where the bytes of a device go, before anything runs.

State is exact: it is what the compiled step takes as arguments.  The rest is of the phase in which a step holds most,
with activations by formula (arXiv:2205.05198, table 2, in the dtypes and with the kernels of this program); the
compiler's peak is within a tenth of the sum on a TPU."""

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


def block_bytes(config: RunConfig, plan: Plan, kernel: str) -> float:
    """Bytes per token and layer that the backward pass finds saved on a device."""
    m, t, size = config.model, plan.layout.model, bytes_of(config.precision.compute)
    stream = 1 / t if plan.sequence else 1  # each device's share of what lies between the branches
    if config.remat.policy in ("full", "residual"):  # the block's input, and the stream between its branches
        return m.width * stream * size * (1 if config.remat.policy == "full" else 2)
    whole = 4 * m.width * stream * size  # the stream twice, and both norms' results
    # q, k, v, and what attention gives; the MLP's hidden layer on both sides of GELU
    split = (4 * m.width + 2 * m.mlp_width) / t * size
    masks = 2 * m.width * stream if m.dropout else 0  # a byte each, at the branches' ends
    causal = 0.75  # two blocks of queries: the first sees half of the keys
    scores = 2 * size + (size + 1 if m.attention_dropout else 0)  # before and after softmax; dropped ones, and a mask
    if kernel != "xla" or config.remat.policy == "selective":
        scores = 0
    return whole + split + masks + scores * causal * m.heads * m.context / t


def _phases(config: RunConfig, plan: Plan, kernel: str) -> dict[str, dict[str, int]]:
    """Bytes per device beside the state, where a step may hold most: in the head, in backward through the blocks, and
    in the embedding's gradient."""
    c, p, t = config, config.precision, plan.layout.model
    layers, accumulating = c.model.layers // plan.layout.pipe, c.parallel.microbatches > 1
    early = plan.zero > 1 and not c.parallel.reduce_once
    one_by_one = plan.zero == 3 and early
    width_of, wide = bytes_of(p.compute), max(bytes_of("float32"), bytes_of(p.compute))

    of = lambda specs, dtype: {  # noqa: E731
        name: per_device(plan, plan.placed_shapes[name], specs[name], dtype) for name in plan.placed_shapes
    }
    whole, shards = of(plan.whole_specs, p.compute), of(plan.specs, p.compute)
    low = p.compute != p.params
    copied = low or plan.zero > 0  # else the parameters themselves serve
    layer, ends = whole["blocks"] // layers, (whole["embedding"] + whole["head"]) * copied
    held = shards["blocks"] * low if one_by_one else whole["blocks"] * copied
    added = 0
    if accumulating:
        added = sum(of(plan.specs, p.params).values()) if early else sum(whole.values()) * wide // width_of
    made = sum(of(plan.specs, p.reduce).values()) if early else sum(whole.values())

    tokens = c.train.batch // c.parallel.microbatches // plan.layout.batch_shards * c.model.context
    saved = int(tokens * layers * block_bytes(c, plan, kernel))
    # the MLP's hidden layer and its gradient; the stream, where it has to be made whole
    work = int(tokens * (2 * c.model.mlp_width / t + (3 * c.model.width if plan.sequence else 0)) * width_of)
    vocab = padded_vocab(c.model.vocab, t) // t
    chunk = min(tokens * vocab * wide, cross_entropy.CHUNK_BYTES)  # of logits, and of their gradient

    rows = lambda *sizes: dict(zip(("weights", "gradients", "activations", "working set"), sizes, strict=True))  # noqa: E731
    return {
        "the head": rows(held + ends, whole["embedding"] + added, saved, 2 * chunk),
        "backward through the blocks": rows(
            held + (layer if one_by_one else ends), made + added + layer * early, saved, work
        ),
        "the embedding's gradient": rows(  # a copy of it in float32 or wider, and what that is rounded to
            held + ends * accumulating, made + added, 0, whole["embedding"] * (1 + wide // width_of)
        ),
    }


def fullest(config: RunConfig, plan: Plan, kernel: str) -> str:
    """The phase of a step in which it holds most."""
    phases = _phases(config, plan, kernel)
    return max(phases, key=lambda phase: sum(phases[phase].values()))


def table(config: RunConfig, plan: Plan, kernel: str) -> dict[str, int]:
    """Bytes per device of each thing that a step holds in its fullest phase; STATE of them from step to step."""
    state = per_device(plan, plan.placed_shapes, plan.specs, config.precision.params)
    most = _phases(config, plan, kernel)[fullest(config, plan, kernel)]
    return {"parameters": state, "adam moments": 2 * state} | most


STATE = ("parameters", "adam moments")
"""The rows of `table` that outlive a step."""
