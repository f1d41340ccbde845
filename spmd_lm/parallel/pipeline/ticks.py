"""One stage's side of a pipeline, tick by tick.

In each tick a stage takes in what its neighbours sent in the last one, goes forward through a chunk of its layers, and
backward through another.  Between the two it keeps the chunk's input alone, and runs the chunk again when its gradient
comes.  Idle halves of a tick are conditions that cost nothing; no collective inside one spans `pipe`."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from spmd_lm.axes import PIPE
from spmd_lm.parallel.pipeline.messages import Messages
from spmd_lm.parallel.pipeline.schedule import IDLE, Schedule
from spmd_lm.parallel.pipeline.schedule_table import steps
from spmd_lm.parallel.pipeline.stages import Losses, Pieces, Stage, Tree, Weights, merged, plus
from spmd_lm.parallel.plan import Plan


class Pipeline:
    """What a stage keeps from tick to tick, and what it does in one.

    kept: activation, gradient, the messages on their way; inputs, cotangents, slots for what waits; losses and total,
    the sums so far."""

    def __init__(self, plan: Plan, pieces: Pieces, schedule: Schedule, weights: Weights, batch: Tree):
        self.pieces, self.weights, self.batch = pieces, weights, batch
        self.stages, self.table = schedule.stages, steps(schedule)
        self.layers = jax.tree.leaves(weights.source["blocks"])[0].shape[0] // schedule.chunks
        self.here, self.run_idle_stages, self.in_place = (
            lax.axis_index(PIPE),
            plan.run_idle_stages,
            plan.platform == "tpu",
        )
        self.whole = weights.stage(pieces, weights.source)
        self.like = jax.eval_shape(lambda: self.whole.embed(self.part(0)))
        self.messages = Messages(plan, self.like, wraps=schedule.chunks > 1)

    def when(self, name: str, on: jax.Array, yes: Callable[[], Tree], no: Callable[[], Tree]) -> Tree:
        """A condition, which whoever reads the compiled program can tell by its name (Steps.runs); or both of its
        branches and a choice, where devices that part ways are a problem."""
        with jax.named_scope(f"when_{name}"):
            if not self.run_idle_stages:
                return lax.cond(on, yes, no)
            return jax.tree.map(lambda a, b: jnp.where(on, a, b), yes(), no())

    def maybe(self, name: str, on: jax.Array, change: Callable[[Tree], Tree], value: Tree) -> Tree:
        """change(value) where `on` is true, else `value`, for what is large.

        A GPU's compiler copies what goes through a condition, in both branches and once more behind it, but changes in
        place what a loop carries: hence a loop of one turn or none.  A TPU's does both in place, and holds less around
        a condition."""
        if self.run_idle_stages or self.in_place:
            return self.when(name, on, lambda: change(value), lambda: value)
        again = lambda carry: (jnp.zeros_like(on), change(carry[1]))  # noqa: E731
        with jax.named_scope(f"when_{name}"):
            return lax.while_loop(lambda carry: carry[0], again, (on, value))[1]

    def part(self, microbatch: jax.Array | int) -> Tree:
        take = lambda x: lax.dynamic_index_in_dim(x, microbatch, 0, keepdims=False)  # noqa: E731
        return jax.tree.map(take, self.batch)

    def row(self, rows: Tree) -> Tree:
        """What this stage does, of what all do."""
        return jax.tree.map(lambda column: column[self.here], rows)

    # Slots are read and written outside conditions: within, a GPU's compiler lays all of them out anew in every tick.

    def slots(self, number: int) -> jax.Array:
        """For `number` activations; and one more, for what nobody reads."""
        return jnp.zeros((number + 1, *self.like.shape), self.like.dtype)

    def put(self, slots: jax.Array, at: jax.Array, x: jax.Array, on: jax.Array | bool = True) -> jax.Array:
        """`slots` with x; where `at` is IDLE, or `on` is not true, as they were."""
        return slots.at[jnp.where((at != IDLE) & on, at, slots.shape[0] - 1)].set(x)

    def keep(self, name: str, slots: jax.Array, at: jax.Array, message: jax.Array) -> jax.Array:
        """`slots` with what has come from a neighbour, if anything has."""
        if self.messages.whole:
            return self.put(slots, at, message)
        unpack = lambda: self.messages.unpack(message)  # noqa: E731
        return self.put(slots, at, self.when(f"{name}_arrives", at != IDLE, unpack, self.nothing))

    def nothing(self) -> jax.Array:
        return jnp.zeros(self.like.shape, self.like.dtype)

    def chunk(self, do: Tree, kept: Tree) -> Weights:
        return self.weights.chunk(do["chunk"] * self.layers, self.layers)

    def first(self, do: Tree) -> jax.Array:
        """The number of the chunk's first layer in the model."""
        return (do["chunk"] * self.stages + self.here) * self.layers

    def with_ends(self, ends: Tree) -> Stage:
        return self.weights.stage(self.pieces, self.weights.source | {"ends": ends})

    # ---- forward

    def enter(self, do: Tree, x: jax.Array) -> jax.Array:
        """The input of a unit: from the embedding, or x, from where it is kept."""
        embed = lambda: self.whole.embed(self.part(do["microbatch"]))  # noqa: E731
        return self.when("forward_enters", do["enters"], embed, lambda: x)

    def through(self, do: Tree, kept: Tree, x: jax.Array) -> tuple[jax.Array, Losses]:
        """x through the layers of a chunk; their losses."""
        chunk = self.chunk(do, kept)
        return chunk.stage(self.pieces, chunk.source).layers(x, self.part(do["microbatch"]), self.first(do))

    def forward(self, do: Tree, kept: Tree) -> Tree:
        """What leaves the pipeline is not run ahead: its backward begins with its forward."""
        x = self.enter(do, kept["input"])
        through = lambda: self.messages.pack(self.through(do, kept, x)[0])  # noqa: E731
        message = self.when("forward_leaves", do["leaves"], self.messages.none, through)
        return {"entered": x, "activation": message}

    # ---- backward

    def backward(self, do: Tree, kept: Tree) -> Tree:
        chunk, total = self.chunk(do, kept), kept["total"]
        if self.layers == 1:  # between its forward and its backward lies nothing for which to give it up
            chunk = chunk.fetched()
        stage = chunk.stage(self.pieces, chunk.source)
        y, losses, pull = stage.pulled(kept["input"], self.part(do["microbatch"]), self.first(do))
        last, d_y, ends = self.end(do, y, kept["losses"], kept["cotangent"], total["ends"])
        blocks, d_x = pull(d_y, total["blocks"], do["chunk"] * self.layers)
        total = {"blocks": blocks, "ends": self.begin(do, d_x, ends)}
        return {"losses": merged(last, losses), "total": total, "gradient": self.messages.pack(d_x)}

    def end(
        self, do: Tree, y: jax.Array, losses: Losses, cotangent: jax.Array, ends: Tree
    ) -> tuple[Losses, jax.Array, Tree]:
        """(losses with the head's, gradient of y, `ends` with the head's) on the last stage; on others as they came."""

        def last(old):
            head = lambda ends, y: self.with_ends(ends).head(y, self.part(do["microbatch"]))  # noqa: E731
            made, pull = jax.vjp(head, self.weights.source["ends"], y)
            d_ends, d_y = pull(jax.tree.map(jnp.ones_like, made))
            return merged(old[0], made), d_y, plus(old[2], d_ends)

        return self.maybe("backward_leaves", do["leaves"], last, (losses, cotangent, ends))

    def begin(self, do: Tree, d_x: jax.Array, ends: Tree) -> Tree:
        """`ends` with the embedding's gradients, on the stage where there are some."""
        embedded = lambda ends: self.embedded(self.part(do["microbatch"]), d_x, ends)  # noqa: E731
        return self.maybe("backward_enters", do["enters"], embedded, ends)

    def embedded(self, part: Tree, d_x: jax.Array, ends: Tree) -> Tree:
        embed = lambda ends: self.with_ends(ends).embed(part)  # noqa: E731
        (d_ends,) = jax.vjp(embed, self.weights.source["ends"])[1](d_x)
        return plus(ends, d_ends)

    # ---- all of it

    def start(self, losses: Losses) -> Tree:
        """What is kept before the first tick, for forward."""
        return {"activation": self.messages.none(), "inputs": self.slots(self.table.inputs), "losses": losses}

    def start_back(self, total: Tree) -> Tree:
        """The same for backward."""
        return {
            "gradient": self.messages.none(),
            "cotangents": self.slots(self.table.cotangents),
            "total": total,
        }

    def go(self, do: Tree, kept: Tree, work: Callable[[Tree, Tree], Tree]) -> Tree:
        """The forward half of a tick."""
        inputs = self.keep("forward", kept["inputs"], do["arrives"], kept["activation"])
        now = kept | {"input": inputs[do["slot"]]}
        idle = {"activation": self.messages.none(), "entered": self.nothing(), "losses": kept["losses"]}
        new = self.half("forward_on", do, work, now, idle)
        entered = self.put(inputs, do["slot"], new.pop("entered"), do["on"] & do["enters"])
        return kept | new | {"inputs": entered}

    def come_back(self, do: Tree, kept: Tree) -> Tree:
        """The backward half."""
        cotangents = self.keep("backward", kept["cotangents"], do["arrives"], kept["gradient"])
        now = kept | {"input": kept["inputs"][do["slot"]], "cotangent": cotangents[do["gradient_slot"]]}
        idle = {"gradient": self.messages.none(), "total": kept["total"], "losses": kept["losses"]}
        return kept | {"cotangents": cotangents} | self.half("backward_on", do, self.backward, now, idle)

    def half(self, name: str, do: Tree, work: Callable[[Tree, Tree], Tree], kept: Tree, idle: Tree) -> Tree:
        """What `work` makes, of what is as `idle` without it."""
        return self.maybe(name, do["on"], lambda old: old | work(do, kept | old), idle)

    def tick(self, kept: Tree, rows: tuple[Tree | None, Tree | None]) -> tuple[Tree, None]:
        """One of a phase: a half that no stage has in it is None."""
        ahead, back = (rows and self.row(rows) for rows in rows)
        kept = self.go(ahead, kept, self.forward) if ahead else kept
        kept = self.come_back(back, kept) if back else kept
        if ahead:
            kept = kept | {"activation": self.messages.send(kept["activation"], 1)}
        if back:
            kept = kept | {"gradient": self.messages.send(kept["gradient"], -1)}
        return kept, None

    def run(self, kept: Tree, ahead: Tree | None, back: Tree | None) -> Tree:
        """The ticks of a phase.  What none of them changes is no part of the loop, which would copy it."""
        fixed = set() if ahead and back else {"gradient", "cotangents", "total"} if ahead else {"activation", "inputs"}
        changed = {name: value for name, value in kept.items() if name not in fixed}

        def tick(changed, rows):
            new, _ = self.tick(kept | changed, rows)
            return {name: new[name] for name in changed}, None

        return kept | lax.scan(tick, changed, (ahead, back))[0]

    def gradients(self, losses: Losses, total: Tree) -> tuple[Losses, Tree]:
        """Losses and gradients of the source, on this stage.  losses, total: zeros like them."""
        kept = self.start(losses) | self.start_back(total)
        for phase in self.table.phases:
            kept = self.run(kept, *phase)
        return kept["losses"], kept["total"]

    def sums(self, none: Losses) -> Losses:
        """What the head makes of all microbatches, and the layers' losses, on this stage; nothing is kept for backward.
        none: zeros like it."""

        def work(do, kept):
            x = self.enter(do, kept["input"])
            y, losses = self.through(do, kept, x)
            so_far = merged(kept["losses"], losses)
            last = lambda: merged(so_far, self.whole.head(y, self.part(do["microbatch"])))  # noqa: E731
            losses = self.when("forward_leaves", do["leaves"], last, lambda: so_far)
            return {"losses": losses, "activation": self.messages.pack(y), "entered": x}

        def tick(kept, rows):
            kept = self.go(self.row(rows), kept, work)
            return kept | {"activation": self.messages.send(kept["activation"], 1)}, None

        busy = self.table.forward["on"].any(1)
        rows = jax.tree.map(lambda column: column[busy], self.table.forward)
        kept, _ = lax.scan(tick, self.start(none), rows)
        return kept["losses"]
