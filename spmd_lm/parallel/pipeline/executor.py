"""Loss and gradients of one step: microbatches through the stages of a pipeline, as a schedule says.

One stage is a pipeline whose microbatches are gradient accumulation.  Several tick together: in each tick a stage takes
in what its neighbours sent in the last one, goes forward through a chunk of its layers, and backward through another.
Between the two it keeps the chunk's input alone, and runs the chunk again when its gradient comes.  Idle halves of a
tick are conditions that cost nothing; no collective inside one spans `pipe`."""

import jax
import jax.numpy as jnp
from jax import lax

from spmd_lm.axes import MODEL, PIPE
from spmd_lm.parallel.pipeline.schedule import IDLE, Schedule, steps
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
        loss, grads = Pipeline(plan, pieces, schedule, weights, batch).gradients(*zero)
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


class Pipeline:
    """One stage's side of a pipeline, inside a step: what it keeps from tick to tick, and what it does in one."""

    def __init__(self, plan: Plan, pieces: Pieces, schedule: Schedule, weights: Weights, batch: Tree):
        self.pieces, self.weights, self.batch = pieces, weights, batch
        self.stages, self.table = schedule.stages, steps(schedule)
        self.layers = jax.tree.leaves(weights.source["blocks"])[0].shape[0] // schedule.chunks
        self.here = lax.axis_index(PIPE)
        self.whole = weights.stage(pieces, weights.source)
        self.like = jax.eval_shape(lambda: self.whole.embed(self.part(0)))
        self.messages = Messages(plan, self.like, wraps=schedule.chunks > 1)

    def part(self, microbatch: jax.Array | int) -> Tree:
        take = lambda x: lax.dynamic_index_in_dim(x, microbatch, 0, keepdims=False)  # noqa: E731
        return jax.tree.map(take, self.batch)

    def chunk(self, chunk: jax.Array) -> tuple[Weights, jax.Array]:
        """Its weights, and the number of its first layer in the model."""
        return self.weights.chunk(chunk * self.layers, self.layers), (chunk * self.stages + self.here) * self.layers

    def row(self, rows: Tree) -> Tree:
        """What this stage does, of what all do."""
        return jax.tree.map(lambda column: column[self.here], rows)

    def slots(self, number: int) -> jax.Array:
        return jnp.zeros((number, *self.like.shape), self.like.dtype)

    def keep(self, slots: jax.Array, at: jax.Array, message: jax.Array) -> jax.Array:
        """`slots` with what has come from a neighbour, if anything has."""
        put = lambda slots: slots.at[at].set(self.messages.unpack(message))  # noqa: E731
        return lax.cond(at != IDLE, put, lambda slots: slots, slots)

    # ---- forward

    def enter(self, do: Tree, inputs: jax.Array) -> jax.Array:
        """The input of a unit: from the embedding, or from where it is kept."""
        embed = lambda: self.whole.embed(self.part(do["microbatch"]))  # noqa: E731
        return lax.cond(do["enters"], embed, lambda: inputs[do["slot"]])

    def through(self, do: Tree, x: jax.Array) -> jax.Array:
        """The message to the next stage."""
        chunk, first = self.chunk(do["chunk"])
        stage = chunk.stage(self.pieces, chunk.source)
        return self.messages.pack(stage.layers(x, self.part(do["microbatch"]), first)[0])

    def forward(self, do: Tree, inputs: jax.Array) -> tuple[jax.Array, jax.Array]:
        """(inputs, message).  The last stage does nothing: its backward begins with its forward."""
        x = self.enter(do, inputs)
        message = lax.cond(do["leaves"], self.messages.none, lambda: self.through(do, x))
        return inputs.at[do["slot"]].set(x), message

    def finish(self, do: Tree, source: Tree, x: jax.Array) -> jax.Array:
        """The last stage's part of the loss, and the head's."""
        chunk, first = self.chunk(do["chunk"])
        part, stage = self.part(do["microbatch"]), chunk.stage(self.pieces, source)
        y, losses = stage.layers(x, part, first)
        return losses + stage.head(y, part)

    # ---- backward

    def pull(self, do: Tree, x: jax.Array, cotangent: jax.Array, ends: Tree) -> tuple[jax.Array, Tree, jax.Array, Tree]:
        """(losses, gradients of the chunk's layers and of x, `ends` with what there is of theirs)."""
        chunk, first = self.chunk(do["chunk"])

        def last():
            loss, pull = jax.vjp(lambda source, x: self.finish(do, source, x), chunk.source, x)
            d_source, d_x = pull(jnp.ones_like(loss))
            return loss, d_source["blocks"], d_x, _plus(ends, d_source["ends"])

        def middle():
            def f(blocks, x):
                stage = chunk.stage(self.pieces, chunk.source | {"blocks": blocks})
                return stage.layers(x, self.part(do["microbatch"]), first)

            (_, losses), pull = jax.vjp(f, chunk.source["blocks"], x)
            return losses, *pull((cotangent, jnp.ones_like(losses))), ends

        return lax.cond(do["leaves"], last, middle)

    def start(self, do: Tree, d_x: jax.Array, ends: Tree) -> Tree:
        """`ends` with the embedding's gradients, on the stage where there are some."""

        def embedded():
            embed = lambda ends: self.weights.stage(self.pieces, self.weights.source | {"ends": ends}).embed(  # noqa: E731
                self.part(do["microbatch"])
            )
            (d_ends,) = jax.vjp(embed, self.weights.source["ends"])[1](d_x)
            return _plus(ends, d_ends)

        return lax.cond(do["enters"], embedded, lambda: ends)

    def backward(
        self, do: Tree, inputs: jax.Array, cotangents: jax.Array, loss: jax.Array, total: Tree
    ) -> tuple[jax.Array, Tree, jax.Array]:
        """(loss, total, message): both sums with this unit's, and the gradient for the stage before."""
        x, cotangent = inputs[do["slot"]], cotangents[do["gradient_slot"]]
        losses, d_blocks, d_x, ends = self.pull(do, x, cotangent, total["ends"])
        ends = self.start(do, d_x, ends)
        at = do["chunk"] * self.layers

        def add(t, d):
            old = lax.dynamic_slice_in_dim(t, at, self.layers, 0)
            return lax.dynamic_update_slice_in_dim(t, old + d.astype(t.dtype), at, 0)

        blocks = jax.tree.map(add, total["blocks"], d_blocks)
        return loss + losses, {"blocks": blocks, "ends": ends}, self.messages.pack(d_x)

    # ---- all of it

    def gradients(self, loss: jax.Array, total: Tree) -> tuple[jax.Array, Tree]:
        """Loss and gradients of the source, on this stage.  loss, total: zeros like them."""
        none = self.messages.none

        def tick(carry, rows):
            activation, gradient, inputs, cotangents, loss, total = carry
            ahead, back = self.row(rows)
            inputs = self.keep(inputs, ahead["arrives"], activation)
            cotangents = self.keep(cotangents, back["arrives"], gradient)
            inputs, activation = lax.cond(ahead["on"], lambda: self.forward(ahead, inputs), lambda: (inputs, none()))
            loss, total, gradient = lax.cond(
                back["on"], lambda: self.backward(back, inputs, cotangents, loss, total), lambda: (loss, total, none())
            )
            sent = self.messages.send(activation, 1), self.messages.send(gradient, -1)
            return (*sent, inputs, cotangents, loss, total), None

        kept = self.slots(self.table.inputs), self.slots(self.table.cotangents)
        carry, _ = lax.scan(tick, (none(), none(), *kept, loss, total), (self.table.forward, self.table.backward))
        return carry[-2:]

    def loss(self) -> jax.Array:
        """Of all microbatches, on this stage; nothing is kept for backward."""
        busy = self.table.forward["on"].any(1)

        def tick(carry, rows):
            activation, inputs, loss = carry
            do = self.row(rows)
            inputs = self.keep(inputs, do["arrives"], activation)

            def work():
                x = self.enter(do, inputs)
                last = lambda: (self.finish(do, self.chunk(do["chunk"])[0].source, x), self.messages.none())  # noqa: E731
                middle = lambda: (jnp.zeros_like(loss), self.through(do, x))  # noqa: E731
                return lax.cond(do["leaves"], last, middle)

            more, activation = lax.cond(do["on"], work, lambda: (jnp.zeros_like(loss), self.messages.none()))
            return (self.messages.send(activation, 1), inputs, loss + more), None

        zero = jnp.zeros((), jnp.promote_types(self.weights.compute, jnp.float32))
        carry = self.messages.none(), self.slots(self.table.inputs), zero
        (_, _, loss), _ = lax.scan(tick, carry, jax.tree.map(lambda column: column[busy], self.table.forward))
        return loss


def summed_loss(plan: Plan, pieces: Pieces, schedule: Schedule, weights: Weights, batch: Tree) -> jax.Array:
    """Of all microbatches of a batch, over all its shards, without gradients."""
    if schedule.stages > 1:
        loss = Pipeline(plan, pieces, schedule, weights, batch).loss()
    else:
        loss = lax.map(weights.stage(pieces, weights.source).loss, batch).sum()
    return plan.batch_sum(plan.stage_sum(loss))
