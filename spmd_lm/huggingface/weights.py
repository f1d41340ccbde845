"""Which tensors a model's files have, by the tables in `architectures`: names and shapes, without files or arrays."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from spmd_lm.huggingface.architectures import LAYER, Architecture, Shape, WeightMapping
from spmd_lm.runtime.formatting import abbreviate

OUTPUT_EMBEDDING = "head.tokens"
"""The parameter that a model with tied embeddings does not have, although its files may."""


@dataclass(frozen=True)
class HFTensor:
    """A tensor, and the parameters that it concatenates; only their layer `layer` if they stack all layers."""

    name: str
    shape: Shape
    mappings: tuple[WeightMapping, ...]
    layer: int | None


def hf_tensors(architecture: Architecture, param_shapes: Mapping[str, Shape]) -> list[HFTensor]:
    """The tensors of a model with these canonical parameters: embeddings, then layer by layer, then the head."""
    by_tensor: dict[str, list[WeightMapping]] = {}
    for mapping in architecture.weights:
        if mapping.param in param_shapes:
            by_tensor.setdefault(mapping.tensor, []).append(mapping)
    groups = list(by_tensor.values())
    assert {mapping.param for group in groups for mapping in group} == param_shapes.keys(), param_shapes.keys()

    def make(group: list[WeightMapping], layer: int | None = None) -> HFTensor:
        first = group[0]
        shape = first.tensor_shape(first.layer_shape(param_shapes[first.param]))
        return HFTensor(first.tensor.format(layer=layer), shape, tuple(group), layer)

    num_layers = next(shape[0] for param, shape in param_shapes.items() if param.startswith("blocks."))
    in_layers = [group for group in groups if group[0].stacked]
    embeddings = [make(group) for group in groups if group[0].param.startswith("embedding.")]
    layers = [make(group, layer) for layer in range(num_layers) for group in in_layers]
    head = [make(group) for group in groups if group[0].param.startswith("head.")]
    return [*embeddings, *layers, *head]


def buffer_names(architecture: Architecture, names: Iterable[str], param_shapes: Mapping[str, Shape]) -> set[str]:
    """Those of these tensor names that hold no parameter, or one that another tensor holds as well."""
    templates = [*architecture.buffers]
    if OUTPUT_EMBEDDING not in param_shapes:
        templates += (mapping.tensor for mapping in architecture.weights if mapping.param == OUTPUT_EMBEDDING)
    spellings = (spelling for template in templates for spelling in architecture.spellings(template))
    pattern = re.compile("|".join(re.escape(each).replace(re.escape(LAYER), r"\d+") for each in spellings))
    return {name for name in names if pattern.fullmatch(name)}


def unused_head_names(architecture: Architecture, names: Iterable[str], param_shapes: Mapping[str, Shape]) -> set[str]:
    """Those of these tensor names that hold heads of this architecture which this model, by its objective, lacks."""
    unused = {
        mapping.tensor
        for mapping in architecture.weights
        if mapping.param not in param_shapes and mapping.param != OUTPUT_EMBEDDING
    }
    return {name for name in names if name in unused}


def shape_mismatches(expected: Mapping[str, Shape], found: Mapping[str, Shape]) -> list[str]:
    """Error messages for tensors that are missing, unexpected, or of another shape."""
    missing = [name for name in expected if name not in found]
    unexpected = [name for name in found if name not in expected]
    misshapen = [
        f"{name} is {list(found[name])}, not {list(shape)}"
        for name, shape in expected.items()
        if found.get(name, shape) != shape
    ]
    groups = {"missing": missing, "unexpected": unexpected, "of another shape": misshapen}
    return [f"{len(names)} {problem}: {abbreviate(names)}" for problem, names in groups.items() if names]
