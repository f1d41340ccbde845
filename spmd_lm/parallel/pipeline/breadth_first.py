"""Breadth-first pipelines (arXiv:2211.05953): all microbatches go through a chunk of layers before the next.

So weights that are cut over `data` are made whole once for each chunk and direction, and its gradients are summed once,
whatever the number of microbatches; where forward ends, the last chunk is at hand for backward.  Forward is over before
backward begins: between the two the last stage does the head, and after both the first one the embedding, each for all
microbatches."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from spmd_lm.parallel.pipeline.stages import Losses, Tree, Weights, merged, plus
from spmd_lm.parallel.pipeline.ticks import Pipeline


class BreadthFirst(Pipeline):
    """kept besides: edges, of each microbatch what leaves the last stage, then its gradient, and on the first stage the
    gradient of what entered.  chunk, made: of the chunk at hand the weights, whole, and their gradients."""

    @property
    def at_hand(self) -> bool:
        """Whether whole weights and gradients are had chunk by chunk."""
        return self.weights.early

    def start(self, losses: Losses) -> Tree:
        kept = super().start(losses) | {"edges": self.slots(jax.tree.leaves(self.batch)[0].shape[0])}
        if self.at_hand:
            kept["chunk"] = jax.tree.map(jnp.zeros_like, jax.eval_shape(self.fetched, jnp.int32(0)))
        return kept

    def fetched(self, chunk: jax.Array) -> Tree:
        return self.weights.chunk(chunk * self.layers, self.layers).whole_blocks()

    def fetch(self, name: str, do: Tree, kept: Tree) -> Tree:
        """`kept` with the weights of the unit's chunk at hand."""
        if not self.at_hand:
            return kept
        fetched = lambda _: self.fetched(do["chunk"])  # noqa: E731
        return kept | {"chunk": self.maybe(f"{name}_fetches", do["fetches"], fetched, kept["chunk"])}

    def chunk(self, do: Tree, kept: Tree) -> Weights:
        return self.weights.holding(kept["chunk"]) if self.at_hand else super().chunk(do, kept)

    # ---- ticks

    def go(self, do, kept, work):
        return super().go(do, self.fetch("forward", do, kept), work)

    def forward(self, do: Tree, kept: Tree) -> Tree:
        x = self.enter(do, kept["input"])
        y, _ = self.through(do, kept, x)
        return {"entered": x, "activation": self.messages.pack(y), "leaving": y}

    def half(self, name, do, work, kept, idle):
        """Edges are slots, and written outside."""
        ahead = name == "forward_on"
        edge, leaves = ("leaving", "leaves") if ahead else ("entering", "enters")
        if self.at_hand and not ahead:
            idle = {"made": kept["made"], **idle}
            del idle["total"]
        new = super().half(name, do, work, kept, idle | {edge: self.nothing()})
        edges = self.put(kept["edges"], do["microbatch"], new.pop(edge), do["on"] & do[leaves])
        return new | {"edges": edges}

    def come_back(self, do, kept):
        kept = super().come_back(do, self.fetch("backward", do, kept))
        return self.complete(do, kept) if self.at_hand else kept

    def backward(self, do: Tree, kept: Tree) -> Tree:
        chunk = self.chunk(do, kept)
        stage = chunk.stage(self.pieces, chunk.source)
        _, losses, pull = stage.pulled(kept["input"], self.part(do["microbatch"]), self.first(do))
        d_y = jnp.where(do["leaves"], kept["edges"][do["microbatch"]], kept["cotangent"])
        if self.at_hand:
            made, d_x = pull(d_y, kept["made"], 0, fresh=do["begins"])
            new = {"made": made}
        else:
            blocks, d_x = pull(d_y, kept["total"]["blocks"], do["chunk"] * self.layers)
            new = {"total": kept["total"] | {"blocks": blocks}}
        return new | {"losses": merged(kept["losses"], losses), "entering": d_x, "gradient": self.messages.pack(d_x)}

    def complete(self, do: Tree, kept: Tree) -> Tree:
        """`kept` with the gradients of a chunk in the total, once they are the sums over all microbatches."""
        total, made = kept["total"], kept["made"]

        def scattered(blocks):
            put = lambda t, d: lax.dynamic_update_slice_in_dim(t, d.astype(t.dtype), do["chunk"] * self.layers, 0)  # noqa: E731
            return jax.tree.map(put, blocks, self.weights.scattered(made, self.weights.kept("blocks")))

        blocks = self.maybe("backward_completes", do["completes"], scattered, total["blocks"])
        return kept | {"total": total | {"blocks": blocks}}

    # ---- both ends

    def end_of(self, name: str, stage: int, of: Callable, run: Callable, kept: Tree) -> Tree:
        """`kept` after `run` has pulled every microbatch's edge back through one end of the model, on its stage.

        of: of a tree of ends, what that end reads.  run: (its weights, edge, part) -> (losses, their gradients,
        the edge's)."""
        losses, edges, total = kept["losses"], kept["edges"], kept["total"]
        weights = of(self.weights.held["ends"])
        zeros = jax.tree.map(lambda w, t: jnp.zeros(w.shape, t.dtype), weights, of(total["ends"]))

        def one(carry, each):
            more, d_weights, edge = run(weights, *each)
            return (merged(carry[0], more), plus(carry[1], d_weights)), edge

        def all_of_them():
            (summed, made), d_edges = lax.scan(one, (losses, zeros), (edges[:-1], self.batch))
            made = self.weights.scattered(made, of(self.weights.kept("ends"))) if self.weights.early else made
            return summed, edges.at[:-1].set(d_edges), merged(total["ends"], made)

        on = self.here == stage
        losses, edges, ends = self.when(name, on, all_of_them, lambda: (losses, edges, total["ends"]))
        return kept | {"losses": losses, "edges": edges, "total": total | {"ends": ends}}

    def head(self, kept: Tree) -> Tree:
        """`kept` with the head's part of the loss and of the total; the gradients of what left the last stage."""

        def run(weights, y, part):
            losses, pull = jax.vjp(lambda weights, y: self.pieces.head(weights, y, part), weights, y)
            return losses, *pull(jax.tree.map(jnp.ones_like, losses))

        return self.end_of("between_leaves", self.stages - 1, self.pieces.last, run, kept)

    def embedding(self, kept: Tree) -> Tree:
        """`kept` with the embedding's part of the total."""

        def run(weights, d_x, part):
            (d_weights,) = jax.vjp(lambda weights: self.pieces.embed(weights, part), weights)[1](d_x)
            return {}, d_weights, d_x

        return self.end_of("after_enters", 0, self.pieces.first, run, kept)

    def gradients(self, losses: Losses, total: Tree) -> tuple[Losses, Tree]:
        ahead, back = self.table.phases
        kept = self.run(self.start(losses), *ahead)
        kept = self.head(kept | self.start_back(total))
        if self.at_hand:
            kept["made"] = jax.tree.map(lambda w, t: jnp.zeros(w.shape, t.dtype), kept["chunk"], total["blocks"])
        kept = self.embedding(self.run(kept, *back))
        return kept["losses"], kept["total"]
