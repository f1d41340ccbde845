"""Loss and gradients of one step: microbatches through the stages of a pipeline, as a schedule says.

One stage is a pipeline whose microbatches are gradient accumulation.  Several tick together: in each tick a stage takes
in what its neighbours sent in the last one, goes forward through a chunk of its layers, and backward through another.
Between the two it keeps the chunk's input alone, and runs the chunk again when its gradient comes.  Idle halves of a
tick are conditions that cost nothing; no collective inside one spans `pipe`."""

import jax
import jax.numpy as jnp
from jax import lax

from spmd_lm.axes import MODEL, PIPE
from spmd_lm.parallel.pipeline.schedule import Schedule, steps
from spmd_lm.parallel.pipeline.stages import Pieces, Tree, Weights
from spmd_lm.parallel.plan import Plan


def gradients(
    plan: Plan,
    pieces: Pieces,
    schedule: Schedule,
    params: Tree,
    batch: Tree,
    *,
    compute: jnp.dtype,
    reduce: jnp.dtype,
    once: bool,
) -> tuple[jax.Array, Tree]:
    """Mean loss of the global batch, and its gradients, reduced over data in dtype `reduce`, laid out as `params` are.

    batch: leaves [microbatches, rows here, ...].  compute: the dtype of the model's arithmetic.  Gradients of
    microbatches are added up in the parameters' own dtype."""
    weights = Weights.of(plan, params, compute, reduce, once)
    wide = jnp.promote_types(compute, jnp.float32)
    own = jnp.result_type(wide, *jax.tree.leaves(params))
    zero = jnp.zeros((), wide), jax.tree.map(lambda w: jnp.zeros(w.shape, own), weights.source)
    if schedule.stages > 1:
        loss, grads = _pipelined(plan, pieces, schedule, weights, batch, *zero)
    else:
        loss, grads = _accumulated(pieces, weights, batch, zero)
    return plan.batch_sum(plan.stage_sum(loss)), weights.reduced(grads)


def _accumulated(pieces: Pieces, weights: Weights, batch: Tree, zero: Tree) -> tuple[jax.Array, Tree]:
    one = jax.value_and_grad(lambda source, part: weights.stage(pieces, source).loss(part))
    if jax.tree.leaves(batch)[0].shape[0] == 1:
        return one(weights.source, jax.tree.map(lambda x: x[0], batch))
    add = lambda total, part: (_plus(total, one(weights.source, part)), None)  # noqa: E731
    return lax.scan(add, zero, batch)[0]


def _plus(total: Tree, new: Tree) -> Tree:
    return jax.tree.map(lambda t, x: t + x.astype(t.dtype), total, new)


class Messages:
    """What goes from stage to stage: one device's part of an activation, an n-th where `model` is n.

    Where the sequence is not split every device of `model` has all of it, and one part each is enough to send
    (arXiv:2104.04473, section 4.1)."""

    def __init__(self, plan: Plan, like: jax.ShapeDtypeStruct, wraps: bool):
        n = plan.layout.model
        self.parts = 1 if plan.sequence or like.shape[1] % n else n
        self.stages, self.wraps = plan.layout.pipe, wraps
        self.shape = (like.shape[0], like.shape[1] // self.parts, *like.shape[2:])
        self.dtype = like.dtype

    def none(self) -> jax.Array:
        return jnp.zeros(self.shape, self.dtype)

    def send(self, x: jax.Array, by: int) -> jax.Array:
        """To the stage `by` places on; what the one as many places back has sent."""
        every = range(self.stages)
        pairs = [(s, (s + by) % self.stages) for s in every if self.wraps or 0 <= s + by < self.stages]
        return lax.ppermute(x, PIPE, pairs)

    def pack(self, x: jax.Array) -> jax.Array:
        if self.parts == 1:
            return x
        return lax.dynamic_slice_in_dim(x, lax.axis_index(MODEL) * self.shape[1], self.shape[1], 1)

    def unpack(self, message: jax.Array) -> jax.Array:
        return message if self.parts == 1 else lax.all_gather(message, MODEL, axis=1, tiled=True)


def _pipelined(
    plan: Plan, pieces: Pieces, schedule: Schedule, weights: Weights, batch: Tree, loss: jax.Array, total: Tree
) -> tuple[jax.Array, Tree]:
    """Loss and gradients of the source, on this stage.  loss, total: zeros like them."""
    here = lax.axis_index(PIPE)
    layers = jax.tree.leaves(weights.source["blocks"])[0].shape[0] // schedule.chunks
    take = lambda i: jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, i, 0, keepdims=False), batch)  # noqa: E731
    stage = weights.stage(pieces, weights.source)
    like = jax.eval_shape(lambda: stage.embed(take(0)))
    empty = jnp.zeros(like.shape, like.dtype)
    messages = Messages(plan, like, wraps=schedule.chunks > 1)
    table = steps(schedule)

    def keep(slots, at, message):
        put = lambda slots: slots.at[at].set(messages.unpack(message))  # noqa: E731
        return lax.cond(at >= 0, put, lambda slots: slots, slots)

    def of_chunk(chunk):
        """Its weights, and the number of its first layer."""
        return weights.chunk(chunk * layers, layers), (chunk * schedule.stages + here) * layers

    def forward(do, inputs):
        part = take(do["microbatch"])
        x = lax.cond(do["enters"], lambda: stage.embed(part), lambda: inputs[do["slot"]])
        chunk, first = of_chunk(do["chunk"])

        def through():
            return messages.pack(chunk.stage(pieces, chunk.source).layers(x, part, first)[0])

        # The last stage's backward begins with its forward.
        return inputs.at[do["slot"]].set(x), lax.cond(do["leaves"], messages.none, through)

    def backward(do, inputs, cotangents, loss, total):
        part, x = take(do["microbatch"]), inputs[do["slot"]]
        chunk, first = of_chunk(do["chunk"])

        def last(ends):
            def f(source, x):
                stage = chunk.stage(pieces, source)
                y, losses = stage.layers(x, part, first)
                return losses + stage.head(y, part)

            value, pull = jax.vjp(f, chunk.source, x)
            d_source, d_x = pull(jnp.ones_like(value))
            return value, d_source["blocks"], d_x, _plus(ends, d_source["ends"])

        def middle(ends):
            f = lambda blocks, x: chunk.stage(pieces, chunk.source | {"blocks": blocks}).layers(x, part, first)  # noqa: E731
            (_, losses), pull = jax.vjp(f, chunk.source["blocks"], x)
            d_blocks, d_x = pull((cotangents[do["gradient_slot"]], jnp.ones_like(losses)))
            return losses, d_blocks, d_x, ends

        def start(ends):
            embed = lambda ends: weights.stage(pieces, weights.source | {"ends": ends}).embed(part)  # noqa: E731
            (d_ends,) = jax.vjp(embed, weights.source["ends"])[1](d_x)
            return _plus(ends, d_ends)

        more, d_blocks, d_x, ends = lax.cond(do["leaves"], last, middle, total["ends"])
        ends = lax.cond(do["enters"], start, lambda ends: ends, ends)
        at = do["chunk"] * layers

        def add(t, d):
            old = lax.dynamic_slice_in_dim(t, at, layers, 0)
            return lax.dynamic_update_slice_in_dim(t, old + d.astype(t.dtype), at, 0)

        blocks = jax.tree.map(add, total["blocks"], d_blocks)
        return loss + more, {"blocks": blocks, "ends": ends}, messages.pack(d_x)

    def tick(carry, row):
        activation, gradient, inputs, cotangents, loss, total = carry
        ahead, back = jax.tree.map(lambda column: column[here], row)
        inputs = keep(inputs, ahead["arrives"], activation)
        cotangents = keep(cotangents, back["arrives"], gradient)
        idle = lambda inputs: (inputs, messages.none())  # noqa: E731
        inputs, activation = lax.cond(ahead["on"], lambda inputs: forward(ahead, inputs), idle, inputs)
        work = lambda loss, total: backward(back, inputs, cotangents, loss, total)  # noqa: E731
        rest = lambda loss, total: (loss, total, messages.none())  # noqa: E731
        loss, total, gradient = lax.cond(back["on"], work, rest, loss, total)
        return (messages.send(activation, 1), messages.send(gradient, -1), inputs, cotangents, loss, total), None

    slots = lambda n: jnp.zeros((n, *empty.shape), empty.dtype)  # noqa: E731
    start = messages.none(), messages.none(), slots(table.inputs), slots(table.cotangents), loss, total
    *_, loss, total = lax.scan(tick, start, (table.forward, table.backward))[0]
    return loss, total
