"""Groups of parameters whose optimizer state is not in the devices' memory: `optim.offload`.  A group is fetched,
updated and put back while the next one is on its way.

Only the state of trained matrices and tables is offloaded: vectors are small, and would cost a transfer each."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
from flax.traverse_util import unflatten_dict

from spmd_lm.axes import is_matrix
from spmd_lm.parallel.plan import Parameter, Plan
from spmd_lm.parallel.trees import Tree

GROUP_ELEMENTS = 2**26
"""The most elements of a group on one device, unless one layer of a matrix has more: 768 MiB of float32 masters and two
moments."""


class Group(NamedTuple):
    """Whole parameters, or some layers of one stack.
    paths: keys in the tree of parameters.
    elements: number on one device.
    layers: start and number in each device's part of the stack; None for whole parameters."""

    paths: tuple[tuple[str, ...], ...]
    elements: int
    layers: tuple[int, int] | None = None

    @property
    def tree(self) -> Tree:
        """The paths in nested dicts, for `subset_of`."""
        return unflatten_dict(dict.fromkeys(self.paths, ()))


def can_offload(parameter: Parameter) -> bool:
    """True for what is offloaded if anything is: trained matrices and tables."""
    return parameter.trained and is_matrix(parameter.names)


def offloaded_parameters(plan: Plan) -> tuple[Parameter, ...]:
    """Parameters whose optimizer state is offloaded, if optim.offload says so."""
    return tuple(filter(can_offload, plan.parameters))


def weight_dtype(compute: str, params: str) -> str:
    """The dtype of offloaded weights on devices: the compute dtype, if that is smaller than the masters'."""
    return compute if jnp.dtype(compute).itemsize < jnp.dtype(params).itemsize else params


def groups_of(parameters: Sequence[Parameter], stages: int, *, split: bool = True) -> tuple[tuple[Group, ...], ...]:
    """Groups of at most GROUP_ELEMENTS: for each stack that has more, those of its layers; others together.
    stages: the pipeline's.  split: split stacks; else a group may have more, if it is a parameter by itself."""
    groups, whole = [], list[Parameter]()
    for each in parameters:
        if split and each.elements > GROUP_ELEMENTS and each.names[0] == "layers":
            groups.append(_parts_of_stack(each, each.shape[0] // stages))
            continue
        if whole and _elements(whole) + each.elements > GROUP_ELEMENTS:
            groups.append((_of_whole(whole),))
            whole = []
        whole.append(each)
    return (*groups, (_of_whole(whole),)) if whole else tuple(groups)


def _elements(parameters: Sequence[Parameter]) -> int:
    return sum(each.elements for each in parameters)


def _of_whole(parameters: Sequence[Parameter]) -> Group:
    return Group(tuple(each.path for each in parameters), _elements(parameters))


def _parts_of_stack(stack: Parameter, layers: int) -> tuple[Group, ...]:
    each = stack.elements // layers
    parts = math.ceil(layers / max(1, GROUP_ELEMENTS // each))
    number = math.ceil(layers / parts)  # of equal size, so that one program serves all of them, or all but the last
    sizes = ((start, min(number, layers - start)) for start in range(0, layers, number))
    return tuple(Group((stack.path,), size * each, (start, size)) for start, size in sizes)
