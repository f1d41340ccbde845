"""A jaxpr as operations on values: calls are inlined, equal operations merged, and those that nothing reads dropped, as
every compiler does; and which of them one kernel computes."""

import copy
import dataclasses
import functools
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.extend.core import Literal, Primitive

from spmd_lm.cost_model.wire import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, COLLECTIVE_PERMUTE, REDUCE_SCATTER

CALLS = {
    *("checkpoint", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call", "jit", "pjit"),
    *("remat", "remat2", "shard_map"),
}
ALIASES = {"optimization_barrier", "copy", "copy_p", "name", "sharding_constraint", "layout_constraint"}
"""Primitives whose results are their operands."""
VIEWS = {"broadcast_in_dim", "convert_element_type", "reshape", "squeeze", "expand_dims"}
"""Primitives whose results, unless they are smaller, are not written to memory: what reads them reads their operand."""
IN_PLACE = {"dynamic_update_slice"}
"""Primitives that change a part of their operand, in its place."""
KIND_OF_PRIMITIVE = {
    "psum": ALL_REDUCE,
    "psum_invariant": ALL_REDUCE,
    "pmax": ALL_REDUCE,
    "pmin": ALL_REDUCE,
    "all_gather": ALL_GATHER,
    "all_gather_invariant": ALL_GATHER,
    "all_to_all": ALL_TO_ALL,
    "reduce_scatter": REDUCE_SCATTER,
    "ppermute": COLLECTIVE_PERMUTE,
}
"""Kinds of collectives by jax's primitives."""
save_p = Primitive("save")
"""An identity, on what forward saves for backward."""
save_p.multiple_results = True
save_p.def_abstract_eval(lambda *arrays: arrays)
PRODUCTS = {"dot_general", "ragged_dot_general", "conv_general_dilated"}
KERNELS = KIND_OF_PRIMITIVE.keys() | PRODUCTS | {"fused_attention", "fused_attention_vjp"}
"""Primitives that no compiler fuses with one another."""


@dataclasses.dataclass(eq=False)
class Value:
    """An array.

    roots: the arguments of the jaxpr, by the names that its caller gave them, that it depends on.
    backward: whether it depends on what is saved, or on what backward begins with.
    level: the number of kernels on the longest path to it.
    base: the value that memory holds in its place: itself, unless it is a view."""

    shape: tuple[int, ...]
    itemsize: int
    roots: frozenset[str] = frozenset()
    backward: bool = False
    level: int = 0
    view_of: "Value | None" = None

    @property
    def base(self) -> "Value":
        return self.view_of or self

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.itemsize


@dataclasses.dataclass(eq=False)
class Operation:
    equation: Any
    inputs: list[Value]
    outputs: list[Value]

    @property
    def backward(self) -> bool:
        return self.outputs[0].backward

    @functools.cached_property
    def is_kernel(self) -> bool:
        return self.equation.primitive.name in KERNELS or next(inner_jaxprs(self.equation), None) is not None


class Kernel(NamedTuple):
    """A primitive of KERNELS, or elementwise operations fused into one, with what it reads and writes in memory."""

    operations: list[Operation]
    read: list[Value]
    written: list[Value]


class Dataflow:
    """operations: the jaxpr's, in its order.
    outputs: its results.
    saved: values that forward saves, by the values that stand for them in backward.
    named: values that checkpoint_name has named.
    arguments: the jaxpr's, and a device's shards of them."""

    def __init__(self, closed: Any, roots: list[str], *, gradient: str):
        """roots: the name of each argument.  gradient: the one of these that backward begins with."""
        self.operations: list[Operation] = []
        self.saved: dict[Value, Value] = {}
        self.named = defaultdict[str, list[Value]](list)
        self._known: dict[Any, list[Value]] = {}
        self.arguments = [
            _value(variable.aval, frozenset({root}), root == gradient)
            for variable, root in zip(closed.jaxpr.invars, roots, strict=True)
        ]
        self.outputs = self._inline(closed.jaxpr, self.arguments)
        self._drop_unread()
        self._known.clear()

    def _drop_unread(self) -> None:
        alive = set(self.outputs)
        for operation in reversed(self.operations):
            if not alive.isdisjoint(operation.outputs):
                alive.update(operation.inputs)
                alive.update(self.saved[value] for value in operation.inputs if value in self.saved)
        self.operations = [each for each in self.operations if not alive.isdisjoint(each.outputs)]
        self.saved = {value: source for value, source in self.saved.items() if value in alive}

    def recomputed(self, kept: Iterable[Value]) -> "Dataflow":
        """The same, where forward saves its arguments and what is `kept`, and backward recomputes the rest."""
        flow, kept = copy.copy(self), set(kept)
        flow.saved = {}
        forward = [operation for operation in self.operations if not operation.backward]
        needed = set(self.saved.values())
        for operation in reversed(forward):
            if not needed.isdisjoint(set(operation.outputs) - kept):
                needed.update(operation.inputs)
        again: dict[Value, Value] = {}

        def read_back(value: Value) -> Value:
            if value not in again:
                again[value] = dataclasses.replace(value, backward=True, view_of=None)
                flow.saved[again[value]] = value
            return again[value]

        repeated = []
        for operation in forward:
            if not needed.isdisjoint(set(operation.outputs) - kept):
                inputs = list(map(read_back, operation.inputs))
                for value in operation.outputs:
                    base = inputs[0].base if value.view_of else None
                    again.setdefault(value, dataclasses.replace(value, backward=True, view_of=base))
                repeated.append(Operation(operation.equation, inputs, [again[value] for value in operation.outputs]))
        backward = []
        for operation in self.operations:
            if operation.backward:
                inputs = [read_back(self.saved[x]) if x in self.saved else x for x in operation.inputs]
                backward.append(Operation(operation.equation, inputs, operation.outputs))
        flow.operations = [*forward, *repeated, *backward]
        flow._drop_unread()
        return flow

    def _inline(self, jaxpr: Any, arguments: list[Value]) -> list[Value]:
        values = dict(zip(jaxpr.invars, arguments, strict=True))
        values |= {variable: _value(variable.aval) for variable in jaxpr.constvars}

        def read(variable: Any) -> Value:
            return self._literal(variable) if isinstance(variable, Literal) else values[variable]

        for equation in jaxpr.eqns:
            results = self._apply(equation, list(map(read, equation.invars)))
            values |= zip(equation.outvars, results, strict=True)
        return list(map(read, jaxpr.outvars))

    def _literal(self, literal: Literal) -> Value:
        return self._known.setdefault((str(literal.aval), str(literal.val)), [_value(literal.aval)])[0]

    def _apply(self, equation: Any, inputs: list[Value]) -> list[Value]:
        name, params = equation.primitive.name, equation.params
        backward = any(value.backward for value in inputs)
        if name in CALLS:
            inner = params.get("jaxpr", params.get("call_jaxpr"))
            inner = getattr(inner, "jaxpr", inner)
            if name == "shard_map":  # whose arguments are a device's shards
                inputs = [_value(to.aval, x.roots, x.backward) for to, x in zip(inner.invars, inputs, strict=True)]
                self.arguments += inputs
            return self._inline(inner, inputs)
        if name == "cond":
            return self._inline(costliest(params["branches"]).jaxpr, inputs[1:])
        if name == save_p.name:
            return [self._save(value) for value in inputs]
        if name == "name":
            self.named[params["name"]] += inputs
        if name in ALIASES:
            return inputs
        key = name, backward, tuple(map(id, inputs)), _hashable(params)
        if name in KIND_OF_PRIMITIVE or key not in self._known:
            operation = Operation(equation, inputs, [])
            roots = frozenset().union(*(value.roots for value in inputs))
            level = max((value.level for value in inputs), default=0) + operation.is_kernel
            operation.outputs += [_value(variable.aval, roots, backward, level) for variable in equation.outvars]
            if name in VIEWS | IN_PLACE and operation.outputs[0].bytes >= inputs[0].base.bytes:
                operation.outputs[0].view_of = inputs[0].base
            if equation.primitive is lax.scan_p:  # what it carries stays in its place
                first, size = params["num_consts"], params["num_carry"]
                for x, out in zip(inputs[first : first + size], operation.outputs[:size], strict=True):
                    out.view_of = x.base if x.roots else None
            self.operations.append(operation)
            self._known[key] = operation.outputs
        return self._known[key]

    def _save(self, source: Value) -> Value:
        (value,) = self._known.setdefault((save_p.name, source), [dataclasses.replace(source, backward=True)])
        self.saved[value] = source
        return value

    def kernels(self, operations: list[Operation]) -> list[Kernel]:
        """The kernels of `operations`, in an order in which they can run.  Elementwise operations are fused where one
        reads another and both have one level: see `_levels`."""
        group_of = dict(zip(operations, ([operation] for operation in operations), strict=True))
        level = self._levels(operations)
        made_by = {value: operation for operation in operations for value in operation.outputs}
        for operation in operations:
            for value in operation.inputs if not operation.is_kernel else ():
                other = made_by.get(value)
                if other and not other.is_kernel and level[other] == level[operation]:
                    mine, theirs = group_of[operation], group_of[other]
                    if mine is not theirs:
                        theirs += mine
                        group_of |= dict.fromkeys(mine, theirs)
        groups = list({id(group): group for group in group_of.values()}.values())
        order = {operation: i for i, operation in enumerate(operations)}
        groups.sort(key=lambda group: max(order[operation] for operation in group))
        readers = defaultdict[Value, set[int]](set)
        for operation in self.operations:
            for value in operation.inputs:
                readers[value.base].add(id(group_of.get(operation)))
        results = {value.base for value in self.outputs}
        kernels = []
        for group in groups:
            own = dict.fromkeys(value for operation in group for value in operation.outputs)
            read = dict.fromkeys(value.base for operation in group for value in operation.inputs)
            written = [value for value in own if value.base is value]
            written = [value for value in written if value in results or readers[value] - {id(group)}]
            kernels.append(Kernel(group, [value for value in read if value not in own], written))
        return kernels

    def _levels(self, operations: list[Operation]) -> dict[Operation, int]:
        """Kernels on the longest path to each; or its readers' level, if all are elementwise and share one."""
        readers = defaultdict[Value, list[Operation]](list)
        for operation in self.operations:
            for value in operation.inputs:
                readers[value].append(operation)
        levels: dict[Operation, int] = {}
        results = set(self.outputs)
        for operation in reversed(operations):
            levels[operation] = operation.outputs[0].level
            if operation.is_kernel or not results.isdisjoint(operation.outputs):
                continue
            reading = [each for value in operation.outputs for each in readers[value]]
            if not any(each.is_kernel or each not in levels for each in reading):
                later = {levels[each] for each in reading}
                levels[operation] = later.pop() if len(later) == 1 else levels[operation]
        return levels


def _value(aval: Any, *rest: Any) -> Value:
    return Value(aval.shape, aval.dtype.itemsize, *rest)


def _hashable(params: dict[str, Any]) -> Any:
    """A key that is equal for equal parameters of a primitive."""
    key = tuple(sorted(params.items(), key=lambda item: item[0]))
    try:
        return key, hash(key)
    except TypeError:  # as those of a user's own kernel
        return id(params)


def inner_jaxprs(equation: Any) -> Iterator[Any]:
    for each in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
        inner = getattr(each, "jaxpr", each)
        if hasattr(inner, "eqns"):
            yield inner


def costliest(branches: Iterable[Any]) -> Any:
    """The branch of a conditional that multiplies most; of equal ones the last, platform_dependent's default."""

    def multiplications(branch: Any) -> int:
        each = [pair for equation in branch.jaxpr.eqns for pair in equations(equation)]
        return sum(times * _multiplications(e) for e, times in each if e.primitive.name in PRODUCTS)

    return max(reversed(list(branches)), key=multiplications)


def _multiplications(product: Any) -> int:
    left, right = (each.aval.shape for each in product.invars[:2])
    if product.primitive.name == "dot_general":
        inner = math.prod(left[dim] for dim in product.params["dimension_numbers"][0][0])
    else:  # the features of a convolution are its kernel's first dimension
        inner = left[-1] if product.primitive.name == "ragged_dot_general" else math.prod(right[1:])
    return product.outvars[0].aval.size * inner


def equations(equation: Any) -> Iterator[tuple[Any, int]]:
    """(equation, times that it runs), for this one and all that are nested in it."""
    yield equation, 1
    times = equation.params["length"] if equation.primitive is lax.scan_p else 1
    branches = equation.params.get("branches")
    for inner in [costliest(branches).jaxpr] if branches else inner_jaxprs(equation):
        for each in inner.eqns:
            yield from ((nested, times * count) for nested, count in equations(each))
