"""Hugging Face's architectures as data: where they store each of our parameters, and the meaning of config.json's keys.
families/ has their tables.

Our matrices are [width, other], whichever of the two is the input, with all layers of a kind stacked in front, and all
experts after them.  Hugging Face has one tensor per layer and expert: torch's Linear is [out, in], GPT-2's Conv1D is
[in, out].  This module reads no file and touches no array."""

import itertools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from spmd_lm.config.layers import layer_path
from spmd_lm.config.schema import Model

Shape = tuple[int, ...]
Index = tuple[tuple[int, int], ...]  # [start, stop) along each dimension

LAYER = "{layer}"  # placeholder of the layer's number in names of tensors
EXPERT = "{expert}"  # placeholder of the expert's number
EXPECTED = {bool: "true or false", float: "a number", int: "an integer"}
OUTPUT_EMBEDDING = "head.tokens"  # a model with tied embeddings does not have it, although its files may


@dataclass(frozen=True)
class WeightMapping:
    """Location of one of our parameters in Hugging Face's tensors."""

    param: str  # path in our parameter tree, without the place in a period
    tensor: str  # with LAYER if there is one per layer; parameters of one tensor are joined on their last dimension
    transposed: bool = False  # the tensor's two dimensions are swapped
    is_row: bool = False  # the tensor is a matrix of one row, the parameter a vector
    by_head: bool = False  # the tensor's parameters are joined head by head


@dataclass(frozen=True)
class TensorPart:
    """One parameter's part of a tensor."""

    param: str
    at: tuple[int, ...]  # index in a stacked parameter: the layer's, or the layer's and the expert's; else ()
    shape: Shape  # in the parameter's layout, without the stack
    start: int = 0  # offset within one group, in the last dimension before transposing


@dataclass(frozen=True)
class HFTensor:
    """A tensor that consists of `groups`, each a concatenation of equal shares of all parts."""

    name: str
    parts: tuple[TensorPart, ...]
    transposed: bool = False
    groups: int = 1
    is_row: bool = False

    @property
    def shape(self) -> Shape:
        *leading, _ = self.parts[0].shape
        shape = (*leading, sum(part.shape[-1] for part in self.parts))
        return (1, *shape) if self.is_row else shape[::-1] if self.transposed else shape

    def index(self, part: TensorPart, index: Index) -> Index:
        """The tensor's slice that holds the slice `index` of a part; with several groups, whole groups."""
        *leading, bounds = index
        if self.groups == 1:
            along = part.start + bounds[0], part.start + bounds[1]
        else:
            first, end = self._groups(part, bounds)
            size = self._group_size
            along = first * size, end * size
        found = (*leading, along)
        return ((0, 1), *found) if self.is_row else found[::-1] if self.transposed else found

    def pick(self, part: TensorPart, index: Index, read: np.ndarray) -> np.ndarray:
        """The slice `index` of a part, from the values that `self.index` selects."""
        value = read[0] if self.is_row else read.T if self.transposed else read
        if self.groups == 1:
            return value
        (start, stop), size = index[-1], part.shape[-1] // self.groups
        first, _ = self._groups(part, (start, stop))
        grouped = value.reshape(*value.shape[:-1], -1, self._group_size)[..., part.start : part.start + size]
        return grouped.reshape(*value.shape[:-1], -1)[..., start - first * size : stop - first * size]

    def join(self, values: Iterable[np.ndarray]) -> np.ndarray:
        """The tensor, from the values of all parts."""
        grouped = [value.reshape(*value.shape[:-1], self.groups, -1) for value in values]
        joined = np.concatenate(grouped, axis=-1) if len(grouped) > 1 else grouped[0]
        value = joined.reshape(*joined.shape[:-2], -1)
        return value[None] if self.is_row else value.T if self.transposed else value

    @property
    def _group_size(self) -> int:
        return sum(part.shape[-1] for part in self.parts) // self.groups

    def _groups(self, part: TensorPart, bounds: tuple[int, int]) -> tuple[int, int]:
        """The first group that overlaps [start, stop), and the one after the last."""
        size = part.shape[-1] // self.groups
        return bounds[0] // size, -(-bounds[1] // size)


@dataclass(frozen=True)
class ConfigKey:
    """A key of config.json and its counterpart in our section `model`."""

    hf_key: str
    model_key: str
    default: Any  # value if config.json lacks the key
    choices: Mapping[str, str] = field(default_factory=dict)  # named values, Hugging Face's to ours
    kind: type | None = None  # type of the value; by default that of `default`, or int for None

    def read(self, hf_config: Mapping[str, Any], errors: list[str]) -> Any:
        """The value for our `model`; adds to `errors` if it has the wrong type."""
        value = hf_config.get(self.hf_key, self.default)
        if self.choices:
            if isinstance(value, str) and value in self.choices:
                return self.choices[value]
            supported = ", ".join(self.choices)
            errors.append(f"{self.hf_key}={json.dumps(value):.40} is not supported. Supported: {supported}.")
            return None
        if value is None and (self.default is None or self.kind):
            return None
        kind = self.kind or (int if self.default is None else type(self.default))
        types = (int, float) if kind is float else (kind,)
        if type(value) in types and abs(value) < 2**31:
            return kind(value)
        errors.append(f"{self.hf_key}: expected {EXPECTED[kind]}, got {json.dumps(value):.40}.")
        return value


@dataclass(frozen=True)
class ConfigKeys:
    """Keys of config.json that are read together, such as the keys of rotary positions."""

    names: tuple[str, ...]
    # (config.json, keys of `model` read so far, errors) -> further keys of `model`
    read: Callable[[Mapping[str, Any], Mapping[str, Any], list[str]], dict[str, Any]]
    write: Callable[[Model], dict[str, Any]]  # the inverse
    unread: Callable[[Mapping[str, Any]], Iterable[str]] | None = None  # nested names that `read` ignores


@dataclass(frozen=True)
class Architecture:
    """Model classes whose weights and configuration read alike."""

    model_type: str  # in config.json
    classes: Mapping[str, Mapping[str, Any]]  # most common first, each with the objective of its head
    weights: tuple[WeightMapping, ...]  # in order: embedding, layers, head
    config_keys: tuple[ConfigKey, ...]
    key_groups: tuple[ConfigKeys, ...] = ()
    fixed: Mapping[str, Any] = field(default_factory=dict)  # keys of `model` that all share, except for our defaults
    required: Mapping[str, Any] = field(default_factory=dict)  # keys of config.json: only the default is supported
    legacy_names: Mapping[str, str] = field(default_factory=dict)  # parts of tensor names, and their older spellings
    buffers: tuple[str, ...] = ()  # tensors that are not parameters, or duplicate one

    def spellings(self, name: str) -> list[str]:
        """A tensor's name, followed by its older spellings."""
        return [name, *(name.replace(new, old) for new, old in self.legacy_names.items() if new in name)]

    def tensor_of(self, param: str) -> str | None:
        """The tensor of a parameter that is not stacked."""
        return next((mapping.tensor for mapping in self.weights if mapping.param == param), None)

    def tensors(self, param_shapes: Mapping[str, Shape], heads: int = 1) -> list[HFTensor]:
        """The tensors of a model with these canonical parameters: embeddings, then layer by layer, then the head."""
        paths = {_place(path): path for path in param_shapes}
        period = 1 + max(place for place, _ in paths)
        mappings: dict[str, list[WeightMapping]] = {}
        for mapping in self._present(param_shapes):
            mappings.setdefault(mapping.tensor, []).append(mapping)
        result: list[HFTensor] = []
        for stacked, names in itertools.groupby(mappings, lambda name: LAYER in name):
            for layer, name in itertools.product(range(_layers(param_shapes)) if stacked else [None], names):
                place, stack = (0, ()) if layer is None else (layer % period, (layer // period,))
                places = [(mapping, (place, mapping.param)) for mapping in mappings[name]]
                own = [(mapping, paths[each]) for mapping, each in places if each in paths]
                result += _tensors(name, own, layer, stack, param_shapes, heads)
        return result

    def _present(self, param_shapes: Mapping[str, Shape]) -> list[WeightMapping]:
        """The mappings of these parameters; each must have one."""
        known = {_place(param)[1] for param in param_shapes}
        present = [mapping for mapping in self.weights if mapping.param in known]
        assert {mapping.param for mapping in present} == known, known ^ {mapping.param for mapping in present}
        return present

    def buffer_names(self, names: Iterable[str], param_shapes: Mapping[str, Shape]) -> set[str]:
        """The `names` of tensors that have no parameter of their own."""
        output = {mapping.tensor for mapping in self.weights if mapping.param == OUTPUT_EMBEDDING}
        templates = (*self.buffers, *(output if OUTPUT_EMBEDDING not in param_shapes else ()))
        spellings = (spelling for template in templates for spelling in self.spellings(template))
        pattern = re.compile("|".join(re.escape(each).replace(re.escape(LAYER), r"\d+") for each in spellings))
        return {name for name in names if pattern.fullmatch(name)}

    def unused_head_names(self, names: Iterable[str], param_shapes: Mapping[str, Shape]) -> set[str]:
        """The `names` of tensors of heads that this model's objective does not use."""
        present = {*param_shapes, OUTPUT_EMBEDDING}
        return {mapping.tensor for mapping in self.weights if mapping.param not in present}.intersection(names)


def _layers(param_shapes: Mapping[str, Shape]) -> int:
    """Number of layers, stacked over all places of a period."""
    stacks = {_place(path)[0]: shape[0] for path, shape in param_shapes.items() if path.startswith("blocks.")}
    return sum(stacks.values())


def _place(param: str) -> tuple[int, str]:
    """A parameter's place in a period, and its path without it."""
    place, path = layer_path(tuple(param.split(".")))
    return place, ".".join(path)


def _tensors(
    name: str,
    mappings: Sequence[tuple[WeightMapping, str]],
    layer: int | None,
    stack: tuple[int, ...],
    param_shapes: Mapping[str, Shape],
    heads: int,
) -> Iterator[HFTensor]:
    """The layer's tensor of this name, or one per expert; none if it is of a kind without these parameters."""
    if not mappings:
        return
    if EXPERT not in name:
        yield _tensor(name.format(layer=layer), mappings, stack, param_shapes, heads)
        return
    for expert in range(param_shapes[mappings[0][1]][len(stack)]):
        yield _tensor(name.format(layer=layer, expert=expert), mappings, (*stack, expert), param_shapes, heads)


def _tensor(
    name: str,
    mappings: Iterable[tuple[WeightMapping, str]],
    at: tuple[int, ...],
    param_shapes: Mapping[str, Shape],
    heads: int,
) -> HFTensor:
    """The tensor of these parameters, by mapping and path, at an index in their stacks."""
    parts: list[TensorPart] = []
    for mapping, path in mappings:
        groups = heads if mapping.by_head else 1
        shape = param_shapes[path][len(at) :]
        start = sum(part.shape[-1] for part in parts) // groups
        parts.append(TensorPart(path, at, shape, start))
    return HFTensor(name, tuple(parts), mapping.transposed and len(shape) > 1, groups, mapping.is_row)


# --- shared by several tables


def linear(param: str, module: str, **storage: Any) -> tuple[WeightMapping, WeightMapping]:
    """A matrix and its bias.  storage: further fields of WeightMapping."""
    matrix = WeightMapping(param, f"{module}.weight", **storage)
    return matrix, WeightMapping(f"{param}_bias", f"{module}.bias", **storage)


def norm(param: str, module: str) -> tuple[WeightMapping, WeightMapping]:
    return WeightMapping(f"{param}.scale", f"{module}.weight"), WeightMapping(f"{param}.bias", f"{module}.bias")


GELU_NAMES = {"gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh"}

# Keys of config.json that generation needs.
SPECIAL_TOKEN_KEYS = ("bos_token_id", "eos_token_id", "pad_token_id")

# Keys of config.json that do not affect a model's computation.
IGNORED_KEYS = {
    *SPECIAL_TOKEN_KEYS,
    *("_name_or_path", "architectures", "model_type", "transformers_version", "torch_dtype", "dtype", "id2label"),
    *("label2id", "problem_type", "task_specific_params", "output_attentions", "output_hidden_states", "return_dict"),
    *("use_cache", "initializer_range", "gradient_checkpointing", "classifier_dropout", "chunk_size_feed_forward"),
    *("is_encoder_decoder", "summary_type", "summary_use_proj", "summary_activation", "summary_proj_to_labels"),
    *("summary_first_dropout", "n_ctx", "pretraining_tp", "_attn_implementation", "directionality"),
    *("pooler_fc_size", "pooler_num_attention_heads", "pooler_num_fc_layers", "pooler_size_per_head", "pooler_type"),
}
