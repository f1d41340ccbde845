"""Runs one stage's side of a pipeline schedule, tick by tick.

In each tick a stage runs at most one chunk of its layers forward and one backward, usually of different microbatches.
What backward computed travels during the next tick's forward half, what forward computed during the backward half that
follows; both arrive within a tick, because a GPU's compiler puts off a permute that nothing in its tick waits for.
Between a task's forward and its backward a stage saves only the chunk's input, and runs the chunk again for its
gradients, whatever the remat policy inside; only the last chunk runs once, except in breadth-first schedules.  Idle
halves of a tick are skipped by a conditional (`cond_in_place`), but their stage takes part in the permutes; no
collective inside a conditional spans `pipe`.

A breadth-first schedule runs all microbatches through a chunk before the next.  So in training, weights that ZeRO
shards are gathered once per chunk and direction, and gradients scattered once per chunk.  Its forward is over before
backward begins: in between the last stage runs the head, and afterwards the first one the embedding's backward, each
for all microbatches."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from spmd_lm.axes import PIPE
from spmd_lm.parallel.compiler_workarounds import as_loop_reads, update_if
from spmd_lm.parallel.layers_loop import Losses
from spmd_lm.parallel.pipeline.schedule import IDLE, Schedule, TaskFields, schedule_table
from spmd_lm.parallel.pipeline.transfer import StageTransfer
from spmd_lm.parallel.sharded_model import ShardedModel, SplitParams
from spmd_lm.parallel.trees import Tree, merge, subset_of, tree_add, tree_add_subset

T = TypeVar("T")
TaskTable = TaskFields[np.ndarray]  # of all stages, in one half of a range of ticks
StageTask = TaskFields[Array]  # of this stage, in one half of one tick: scalars


class Carry(NamedTuple):
    """State that a stage carries from tick to tick.  inputs: slots for inputs of chunks, from their arrival until their
    backward.  output_grads: slots for gradients of chunks' outputs, from their arrival until their backward.  gradient:
    sent at the start of the next tick.  losses, grads: the sums so far.

    Breadth-first schedules only.  end_activations: for each microbatch, on the last stage the last block's output, then
    its gradient; on the first stage the gradient of the embedding's output.  chunk_params, chunk_grads: the gathered
    weights of the current chunk and their gradients, where ZeRO scatters per chunk.  next_params: the gathered weights
    of the next chunk, where they are gathered ahead."""

    inputs: Any = None
    output_grads: Any = None
    gradient: Any = None
    losses: Any = None
    grads: Any = None
    end_activations: Any = None
    chunk_params: Any = None
    chunk_grads: Any = None
    next_params: Any = None


FORWARD_ONLY, BACKWARD_ONLY = ("inputs",), ("gradient", "output_grads", "grads", "chunk_grads")
"""Fields that only the forward halves of ticks change, and only the backward halves."""


class TaskResult(NamedTuple):
    """to_send: to the neighbour.  input: of a forward task; saved where it came from the embedding.
    end_activation: for Carry.end_activations; the output of a forward task, the gradient of a backward task's input.
    next_params: as in Carry."""

    to_send: Array
    input: Any
    losses: Losses
    grads: Any = None
    chunk_grads: Any = None
    end_activation: Any = None
    next_params: Any = None


RunTask = Callable[[TaskResult], TaskResult]
"""run(so_far): a task's result.  so_far: that of an idle half.  Sums continue from it, not from a Carry: cond_in_place
updates in place what it is given."""


class Pipeline:
    """microbatches: leaves [microbatches, ...]."""

    def __init__(self, model: ShardedModel, schedule: Schedule, microbatches: Tree):
        self.model, self.plan, self.microbatches = model, model.plan, microbatches
        self.stages, self.table = schedule.stages, schedule_table(schedule)
        self.periods_per_chunk = jax.tree.leaves(model.shards.blocks)[0].shape[0] // schedule.chunks
        self.breadth_first = schedule.kind == "breadth_first"
        self.trains_embedding = bool(jax.tree.leaves(model.fns.embed_params(model.grad_argument.rest)))
        self.scatters_per_chunk = self.plan.zero.scatter_per == "chunk"
        self.stage = lax.axis_index(PIPE)
        self.activation_shape = jax.eval_shape(lambda: model.embed(self.microbatch(0)))  # an activation
        self.transfer = StageTransfer(self.plan, self.activation_shape, wraps=schedule.chunks > 1)

    def gradients(self, losses: Losses, grads: SplitParams) -> tuple[Losses, SplitParams]:
        """Losses, and gradients of `model.grad_argument`, on this stage.  losses, grads: zeros like them."""
        carry = self.start(losses, grads)
        for i, phase in enumerate(self.table.phases):
            if self.breadth_first and i and not self.plan.trains_below_head:
                break
            carry = self.run_ticks(carry, *phase)
            if self.breadth_first:  # phase 0 is forward, phase 1 backward
                carry = self.embedding_of_all_microbatches(carry) if i else self.head_of_all_microbatches(carry)
        return carry.losses, carry.grads

    def evaluate(self, zeros: Losses) -> Losses:
        """The sum over all microbatches of the head's results and the layers' losses, on this stage; nothing is saved
        for backward.  zeros: of the result's structure."""
        carry = Carry(inputs=self.slots(self.table.input_slots), losses=zeros)
        busy = self.table.forward.active.any(1)
        return self.run_ticks(carry, self.table.forward.at_ticks(busy), None, self.evaluate_task).losses

    def start(self, losses: Losses, grads: SplitParams) -> Carry:
        inputs, output_grads = self.slots(self.table.input_slots), self.slots(self.table.output_grad_slots)
        carry = Carry(inputs, output_grads, self.transfer.zeros(), losses, grads)
        if self.breadth_first:
            carry = carry._replace(end_activations=self.slots(jax.tree.leaves(self.microbatches)[0].shape[0]))
        if self.scatters_per_chunk:
            zeros = jax.tree.map(jnp.zeros_like, jax.eval_shape(self.gather_chunk, jnp.int32(0)))
            params = self.gather_chunk(jnp.int32(0)) if self.plan.prefetch_chunks else zeros
            trained = self.model.trained_blocks(params)
            chunk_grads = jax.tree.map(lambda w, t: jnp.zeros(w.shape, t.dtype), trained, grads.blocks)
            carry = carry._replace(chunk_params=params, chunk_grads=chunk_grads)
            carry = carry._replace(next_params=zeros) if self.plan.prefetch_chunks else carry
        return carry

    def run_ticks(
        self, carry: Carry, forward: TaskTable | None, backward: TaskTable | None, forward_task: Callable | None = None
    ) -> Carry:
        """Runs the ticks of a phase.  Fields that none of them changes stay out of the scan's carry, which copies."""
        unchanged = () if forward and backward else BACKWARD_ONLY if forward else FORWARD_ONLY
        fixed = {name: getattr(carry, name) for name in unchanged}
        absent = dict.fromkeys(unchanged)

        def tick(looping: Carry, tasks: tuple[TaskTable | None, TaskTable | None]) -> tuple[Carry, None]:
            carry, (forward, backward) = looping._replace(**fixed), map(self.at_stage, tasks)
            if backward:
                carry = carry._replace(gradient=self.transfer.send(carry.gradient, -1))
            if forward:
                carry, activation = self.forward_half(forward, carry, forward_task or self.forward_task)
            if backward:
                carry = self.backward_half(backward, carry)
            if forward:
                inputs = self.receive("forward", carry.inputs, forward.receive_slot, activation)
                carry = carry._replace(inputs=inputs)
            return carry._replace(**absent), None

        looping, _ = lax.scan(tick, carry._replace(**absent), (forward, backward))
        return looping._replace(**fixed)

    # ---- forward

    def forward_half(self, task: StageTask, carry: Carry, run: Callable[..., TaskResult]) -> tuple[Carry, Array]:
        """`carry` after it, and what arrives meanwhile from the stage before."""
        carry = self.load_chunk("forward", task, carry)
        x = carry.inputs[task.input_slot]
        output = None if carry.end_activations is None else jnp.zeros_like(self.activation_shape)
        so_far = TaskResult(
            self.transfer.zeros(), jnp.zeros_like(self.activation_shape), carry.losses, end_activation=output
        )
        carry, result = self.run_task("forward", task, carry, partial(run, task, carry, x), so_far)
        inputs = self.write(carry.inputs, task.input_slot, result.input, task.active & task.from_embedding)
        carry = carry._replace(inputs=inputs, losses=result.losses)
        if carry.end_activations is not None:
            carry = self.write_end(carry, task, result, task.to_head)
        return carry, self.transfer.send(result.to_send, 1)

    def forward_task(self, task: StageTask, carry: Carry, x: Array, so_far: TaskResult) -> TaskResult:
        x, transfer = self.task_input(task, x), self.transfer
        run = partial(self.chunk_forward, task, carry, x)
        if self.breadth_first:
            y, losses = run()
            if not self.plan.trains_below_head:  # there is no backward to count them
                so_far = so_far._replace(losses=tree_add_subset(so_far.losses, losses))
            return so_far._replace(to_send=transfer.pack(y), input=x, end_activation=y)
        # The last chunk is not run ahead: its backward starts with its forward.
        to_send = self.cond("forward_to_head", task.to_head, transfer.zeros, lambda: transfer.pack(run()[0]))
        return so_far._replace(to_send=to_send, input=x)

    def evaluate_task(self, task: StageTask, carry: Carry, x: Array, so_far: TaskResult) -> TaskResult:
        x = self.task_input(task, x)
        y, losses = self.chunk_forward(task, carry, x)
        losses = tree_add_subset(so_far.losses, losses)

        def with_head() -> Losses:
            return tree_add_subset(losses, self.model.head(y, self.microbatch(task.microbatch)))

        total = self.cond("forward_to_head", task.to_head, with_head, lambda: losses)
        return so_far._replace(to_send=self.transfer.pack(y), input=x, losses=total)

    def task_input(self, task: StageTask, x: Array) -> Array:
        """The embedding's output where the task starts there, otherwise x."""
        name, embed = "forward_from_embedding", self.model.embed
        return self.cond(name, task.from_embedding, lambda: embed(self.microbatch(task.microbatch)), lambda: x)

    def chunk_forward(self, task: StageTask, carry: Carry, x: Array) -> tuple[Array, Losses]:
        return self.chunk_model(task, carry).layers(x, self.microbatch(task.microbatch), self.first_layer(task))

    # ---- backward

    def backward_half(self, task: StageTask, carry: Carry) -> Carry:
        carry = self.load_chunk("backward", task, carry)
        output_grads = self.receive("backward", carry.output_grads, task.receive_slot, carry.gradient)
        carry = carry._replace(output_grads=output_grads)
        grads = None if self.scatters_per_chunk else carry.grads
        so_far = TaskResult(self.transfer.zeros(), None, carry.losses, grads, carry.chunk_grads)
        so_far = so_far._replace(end_activation=jnp.zeros_like(self.activation_shape)) if self.breadth_first else so_far
        carry, result = self.run_task("backward", task, carry, partial(self.backward_task, task, carry), so_far)
        carry = carry._replace(gradient=result.to_send, losses=result.losses, chunk_grads=result.chunk_grads)
        if self.breadth_first:
            carry = self.write_end(carry, task, result, task.from_embedding)
        return self.scatter_chunk(task, carry) if self.scatters_per_chunk else carry._replace(grads=result.grads)

    def backward_task(self, task: StageTask, carry: Carry, so_far: TaskResult) -> TaskResult:
        x, d_y = carry.inputs[task.input_slot], carry.output_grads[task.output_grad_slot]
        microbatch, model = self.microbatch(task.microbatch), self.chunk_model(task, carry)
        # The backward of a single layer follows at once: saves one gather.
        if self.periods_per_chunk == self.model.fns.period.layers == 1 and not self.scatters_per_chunk:
            model = model.with_gathered_blocks()
        y, layer_losses, accumulate_grads = model.vjp_layers(x, microbatch, self.first_layer(task))
        losses, grads, chunk_grads = so_far.losses, so_far.grads, so_far.chunk_grads
        if self.breadth_first:
            d_y = jnp.where(task.to_head, carry.end_activations[task.microbatch], d_y)
        else:
            losses, d_y, rest = self.head_vjp(task, y, d_y, losses, grads.rest)
        losses = tree_add_subset(losses, layer_losses)
        if self.scatters_per_chunk:
            chunk_grads, d_x = accumulate_grads(d_y, chunk_grads, 0, overwrite=task.first_of_chunk)
            chunk_grads = as_loop_reads(chunk_grads, self.plan.platform)
        else:
            blocks, d_x = accumulate_grads(d_y, grads.blocks, task.chunk * self.periods_per_chunk)
            grads = SplitParams(blocks, grads.rest if self.breadth_first else self.embedding_vjp(task, d_x, rest))
        to_send, end_activation = self.transfer.pack(d_x), d_x if self.breadth_first else None
        return TaskResult(to_send, None, losses, grads, chunk_grads, end_activation)

    def head_vjp(self, task: StageTask, y: Array, d_y: Array, losses: Losses, rest: Tree) -> tuple[Losses, Array, Tree]:
        """(losses plus the head's, gradient of y, `rest` plus the head's gradients) where y goes to the head; otherwise
        the arguments."""

        def head(rest: Tree, y: Array) -> Losses:
            return self.with_rest(rest).head(y, self.microbatch(task.microbatch))

        def update(old: tuple[Losses, Array, Tree]) -> tuple[Losses, Array, Tree]:
            losses, _, rest = old
            head_losses, vjp = jax.vjp(head, self.model.grad_argument.rest, y)
            d_rest, d_y = vjp(jax.tree.map(jnp.ones_like, head_losses))
            return tree_add_subset(losses, head_losses), d_y, tree_add(rest, d_rest)

        return self.cond_in_place("backward_to_head", task.to_head, update, (losses, d_y, rest))

    def embedding_vjp(self, task: StageTask, d_x: Array, rest: Tree) -> Tree:
        """`rest` plus the embedding's gradients, where the task's input came from it."""

        def embed(rest: Tree) -> Array:
            return self.with_rest(rest).embed(self.microbatch(task.microbatch))

        def update(total: Tree) -> Tree:
            return tree_add(total, *jax.vjp(embed, self.model.grad_argument.rest)[1](d_x))

        if not self.trains_embedding:
            return rest
        return self.cond_in_place("backward_from_embedding", task.from_embedding, update, rest)

    def with_rest(self, rest: Tree) -> ShardedModel:
        return self.model.with_grad_argument(self.model.grad_argument._replace(rest=rest))

    # ---- chunks

    def first_layer(self, task: StageTask) -> Array:
        """The index of the chunk's first layer, or period, among all of the model's."""
        return (task.chunk * self.stages + self.stage) * self.periods_per_chunk

    def chunk_model(self, task: StageTask, carry: Carry) -> ShardedModel:
        if carry.chunk_params is not None:
            return self.model.with_unsharded_gradients(carry.chunk_params)
        return self.model.chunk(task.chunk * self.periods_per_chunk, self.periods_per_chunk)

    def gather_chunk(self, chunk: Array) -> Tree:
        return self.model.chunk(chunk * self.periods_per_chunk, self.periods_per_chunk).gather_blocks()

    def run_task(
        self, half: str, task: StageTask, carry: Carry, run: RunTask, idle: TaskResult
    ) -> tuple[Carry, TaskResult]:
        """Runs a half of a tick.  With prefetch_chunks the last task of a chunk gathers the weights of the next one in
        its own branch: compilers overlap nothing across the border of a conditional."""
        if carry.next_params is None:
            return carry, self.cond_in_place(f"{half}_active", task.active, run, idle)

        def run_and_gather(so_far: TaskResult) -> TaskResult:
            params = self.gather_chunk(task.chunk + (1 if half == "forward" else -1))
            return run(so_far)._replace(next_params=params)

        result = self.cond_in_place(f"{half}_same_chunk_next", task.same_chunk_next, run, idle)
        result = result._replace(next_params=carry.next_params)
        result = self.cond_in_place(f"{half}_new_chunk_next", task.new_chunk_next, run_and_gather, result)
        next_params, params = result.next_params, carry.chunk_params
        # A copy: a TPU's compiler would copy the weights in every tick if they were gathered in their place.
        params = self.cond_in_place(f"{half}_new_chunk_next", task.new_chunk_next, lambda _: next_params, params)
        return carry._replace(chunk_params=params, next_params=next_params), result

    def load_chunk(self, half: str, task: StageTask, carry: Carry) -> Carry:
        """`carry` with the weights of the task's chunk gathered, where that is done per chunk, and not ahead."""
        if (params := carry.chunk_params) is None or self.plan.prefetch_chunks:
            return carry
        name = f"{half}_new_chunk"
        params = self.cond_in_place(name, task.new_chunk, lambda _: self.gather_chunk(task.chunk), params)
        return carry._replace(chunk_params=params)

    def scatter_chunk(self, task: StageTask, carry: Carry) -> Carry:
        """`carry` with the gradients of a chunk scattered into `grads`, once they are summed over all microbatches."""

        def write_leaf(total: Array, shard: Array) -> Array:
            shard, first = shard.astype(total.dtype), task.chunk * self.periods_per_chunk
            return lax.dynamic_update_slice_in_dim(total, shard, first, 0)

        def write(blocks: Tree) -> Tree:
            shards = self.model.scatter(carry.chunk_grads, self.model.sharded_names.blocks)
            return jax.tree.map(write_leaf, blocks, shards)

        blocks = self.cond_in_place("backward_last_of_chunk", task.last_of_chunk, write, carry.grads.blocks)
        return carry._replace(grads=carry.grads._replace(blocks=blocks))

    # ---- head and embedding of a breadth-first schedule

    def head_of_all_microbatches(self, carry: Carry) -> Carry:
        """`carry` with the head's losses and gradients, and the gradients of the last stage's outputs."""

        def run(params: Tree, trained: Tree, y: Array, microbatch: Tree) -> tuple[Losses, Tree, Array]:
            def head(trained: Tree, y: Array) -> Losses:
                return self.model.fns.head(merge(params, trained), y, microbatch)

            losses, vjp = jax.vjp(head, trained, y)
            return losses, *vjp(jax.tree.map(jnp.ones_like, losses))

        last, select = self.stages - 1, self.model.fns.head_params
        return self.vjp_over_microbatches("head_of_all_microbatches", last, select, run, carry)

    def embedding_of_all_microbatches(self, carry: Carry) -> Carry:
        """`carry` with the embedding's gradients."""

        def run(params: Tree, trained: Tree, d_x: Array, microbatch: Tree) -> tuple[Losses, Tree, Array]:
            _, vjp = jax.vjp(lambda trained: self.model.fns.embed(merge(params, trained), microbatch), trained)
            return {}, *vjp(d_x), d_x

        if not self.trains_embedding:
            return carry
        return self.vjp_over_microbatches("embedding_of_all_microbatches", 0, self.model.fns.embed_params, run, carry)

    def vjp_over_microbatches(
        self, name: str, stage: int, select: Callable[[Tree], Tree], run: Callable[..., tuple], carry: Carry
    ) -> Carry:
        """`carry` after the embedding or the head has run backward on its stage, for all microbatches.

        select: takes what it reads from SplitParams.rest.  run: (its params, those of them that are trained, its entry
        of end_activations, microbatch) -> (losses, gradients of the trained ones, the new entry)."""
        params, total_grads = select(self.model.gathered.rest), select(carry.grads.rest)
        trained = subset_of(params, total_grads)
        zeros = jax.tree.map(lambda w, t: jnp.zeros(w.shape, t.dtype), trained, total_grads)
        unchanged = carry.losses, carry.end_activations, carry.grads.rest

        def add_microbatch(total: tuple[Losses, Tree], inputs: tuple) -> tuple[tuple[Losses, Tree], Array]:
            losses, grads, d_activations = run(params, trained, *inputs)
            return (tree_add_subset(total[0], losses), tree_add(total[1], grads)), d_activations

        def run_all() -> tuple[Losses, Array, Tree]:
            inputs = carry.end_activations[:-1], self.microbatches
            (losses, grads), d_activations = lax.scan(add_microbatch, (carry.losses, zeros), inputs)
            if self.model.scatters_in_backward:
                grads = self.model.scatter(grads, select(self.model.sharded_names.rest))
            rest = tree_add_subset(carry.grads.rest, grads)
            return losses, carry.end_activations.at[:-1].set(d_activations), rest

        losses, activations, rest = self.cond(name, self.stage == stage, run_all, lambda: unchanged)
        return carry._replace(losses=losses, end_activations=activations, grads=carry.grads._replace(rest=rest))

    def cond(self, name: str, predicate: Array, true_fn: Callable[[], T], false_fn: Callable[[], T]) -> T:
        """lax.cond in a named scope that audit can find (ScheduleTable.execution_counts); a select if idle stages run,
        for devices that must not diverge."""
        with jax.named_scope(f"when_{name}"):
            if not self.plan.run_idle_stages:
                return lax.cond(predicate, true_fn, false_fn)
            return jax.tree.map(lambda a, b: jnp.where(predicate, a, b), true_fn(), false_fn())

    def cond_in_place(self, name: str, predicate: Array, update: Callable[[T], T], value: T) -> T:
        """update(value) if `predicate` holds, otherwise `value`; for large values.  A TPU's compiler updates both of
        these in place, and needs less memory around a conditional."""
        if self.plan.run_idle_stages or self.plan.platform == "tpu":
            return self.cond(name, predicate, lambda: update(value), lambda: value)
        with jax.named_scope(f"when_{name}"):
            return update_if(predicate, update, value)

    # ---- microbatches and slots

    def microbatch(self, index: Array | int) -> Tree:
        return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, index, 0, keepdims=False), self.microbatches)

    def at_stage(self, tasks: TaskTable | None) -> StageTask | None:
        return jax.tree.map(lambda column: column[self.stage], tasks)

    # Slots are read and written outside conditionals: inside, a GPU's compiler copies all of them in every tick.

    def slots(self, number: int) -> Array:
        """Slots for `number` activations, and one more, which is written and never read."""
        return jnp.zeros((number + 1, *self.activation_shape.shape), self.activation_shape.dtype)

    def write(self, slots: Array, slot: Array, x: Array, predicate: Array | bool = True) -> Array:
        """`slots` with x in `slot`; unchanged where that is IDLE or the predicate is false."""
        return slots.at[jnp.where((slot != IDLE) & predicate, slot, slots.shape[0] - 1)].set(x)

    def write_end(self, carry: Carry, task: StageTask, result: TaskResult, at_end: Array) -> Carry:
        slots = self.write(carry.end_activations, task.microbatch, result.end_activation, task.active & at_end)
        return carry._replace(end_activations=slots)

    def receive(self, half: str, slots: Array, slot: Array, received: Array) -> Array:
        """`slots` with what has arrived from a neighbour, if anything has."""
        if not self.transfer.sends_unsplit:
            unpack, zeros = partial(self.transfer.unpack, received), partial(jnp.zeros_like, self.activation_shape)
            received = self.cond(f"{half}_receives", slot != IDLE, unpack, zeros)
        return self.write(slots, slot, received)
