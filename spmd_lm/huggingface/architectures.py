"""Hugging Face's architectures as values: where they store each of our parameters, and what each key of config.json
means here.  families/ has their tables.

Our matrices are [width, other], whichever of the two is the input, with all layers of a kind stacked in front.  Hugging
Face has one tensor per layer: torch's Linear is [out, in], GPT-2's Conv1D is [in, out].  Nothing here reads a file or
touches an array."""

import itertools
import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from spmd_lm.config.layers import layer_path
from spmd_lm.config.schema import Model

Shape = tuple[int, ...]
Index = tuple[tuple[int, int], ...]  # [start, stop) along each dimension

LAYER = "{layer}"  # stands for the layer's number in the names of tensors
EXPECTED = {bool: "true or false", float: "a number", int: "an integer"}
OUTPUT_EMBEDDING = "head.tokens"  # a model with tied embeddings does not have it, although its files may


@dataclass(frozen=True)
class WeightMapping:
    """Where Hugging Face stores one parameter of ours.

    param: path in our parameter tree, without the place in a period.  tensor: name of the tensor, with LAYER if there
    is one per layer; where several parameters name one, it concatenates them along their last dimension, in the order
    of the table.  transposed: the tensor has the parameter's two dimensions swapped.  by_head: it concatenates head by
    head."""

    param: str
    tensor: str
    transposed: bool = False
    by_head: bool = False


@dataclass(frozen=True)
class TensorPart:
    """One parameter's part of a tensor.  param: its path.  layer: its entry of the parameter's stack; None where it is
    no stack.  shape: of the part, as the parameter has it.  start: where in the tensor it begins, along its last
    dimension, counted in one group."""

    param: str
    layer: int | None
    shape: Shape
    start: int = 0


@dataclass(frozen=True)
class HFTensor:
    """A tensor, and the parts that it concatenates, once in each of `groups`."""

    name: str
    parts: tuple[TensorPart, ...]
    transposed: bool = False
    groups: int = 1

    @property
    def shape(self) -> Shape:
        *leading, _ = self.parts[0].shape
        shape = (*leading, sum(part.shape[-1] for part in self.parts))
        return shape[::-1] if self.transposed else shape

    def index(self, part: TensorPart, index: Index) -> Index:
        """The slice of the tensor that has the slice `index` of a part; of several groups, all of each one that has
        some of it."""
        *leading, bounds = index
        if self.groups == 1:
            along = part.start + bounds[0], part.start + bounds[1]
        else:
            first, end = self._groups(part, bounds)
            size = self._group_size
            along = first * size, end * size
        found = (*leading, along)
        return found[::-1] if self.transposed else found

    def pick(self, part: TensorPart, index: Index, read: np.ndarray) -> np.ndarray:
        """The slice `index` of a part, of what `self.index` reads."""
        value = read.T if self.transposed else read
        if self.groups == 1:
            return value
        (start, stop), size = index[-1], part.shape[-1] // self.groups
        first, _ = self._groups(part, (start, stop))
        grouped = value.reshape(*value.shape[:-1], -1, self._group_size)[..., part.start : part.start + size]
        return grouped.reshape(*value.shape[:-1], -1)[..., start - first * size : stop - first * size]

    def join(self, values: Iterable[np.ndarray]) -> np.ndarray:
        """The tensor, of the values of all parts."""
        grouped = [value.reshape(*value.shape[:-1], self.groups, -1) for value in values]
        joined = np.concatenate(grouped, axis=-1) if len(grouped) > 1 else grouped[0]
        value = joined.reshape(*joined.shape[:-2], -1)
        return value.T if self.transposed else value

    @property
    def _group_size(self) -> int:
        return sum(part.shape[-1] for part in self.parts) // self.groups

    def _groups(self, part: TensorPart, bounds: tuple[int, int]) -> tuple[int, int]:
        """The first group that has some of [start, stop), and the one after the last."""
        size = part.shape[-1] // self.groups
        return bounds[0] // size, -(-bounds[1] // size)


@dataclass(frozen=True)
class ConfigKey:
    """A key of config.json and the key of our section `model` that means the same.

    default: what a config.json without the key means.  choices: for keys with named values, each of Hugging Face's
    names and ours.  kind: of the value; by default the default's, and an integer where that is None."""

    hf_key: str
    model_key: str
    default: Any
    choices: Mapping[str, str] = field(default_factory=dict)
    kind: type | None = None

    def read(self, hf_config: Mapping[str, Any], errors: list[str]) -> Any:
        """The value as our `model` has it; adds to `errors` if it is not of the key's type."""
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
    """Keys of config.json that mean something together, as those of rotary positions do.

    names: of the keys that are known.  read(config.json, sizes, errors): the keys of our section `model` that
    they mean; sizes has those that the table's ConfigKey entries have read, and problems are added to errors.
    write(model): the same keys of config.json.  unread(config.json): names nested inside of these keys that `read`
    does not look at."""

    names: tuple[str, ...]
    read: Callable[[Mapping[str, Any], Mapping[str, Any], list[str]], dict[str, Any]]
    write: Callable[[Model], dict[str, Any]]
    unread: Callable[[Mapping[str, Any]], Iterable[str]] | None = None


@dataclass(frozen=True)
class Architecture:
    """Model classes whose weights and configuration read alike.

    model_type: as in config.json.  classes: most common first, each with the objective whose heads it has.  weights:
    the embedding's, then the layers', then the head's.  fixed: keys of our section `model` that are the same for all
    such models, where that is not our default.  required: keys of config.json that change what they compute, each with
    the only value that we support, which is also the default.  legacy_names: parts of tensor names, each with an older
    spelling that is read too.  buffers: tensors that are not parameters, or duplicate one."""

    model_type: str
    classes: Mapping[str, Mapping[str, Any]]
    weights: tuple[WeightMapping, ...]
    config_keys: tuple[ConfigKey, ...]
    key_groups: tuple[ConfigKeys, ...] = ()
    fixed: Mapping[str, Any] = field(default_factory=dict)
    required: Mapping[str, Any] = field(default_factory=dict)
    legacy_names: Mapping[str, str] = field(default_factory=dict)
    buffers: tuple[str, ...] = ()

    def spellings(self, name: str) -> list[str]:
        """A tensor's name, then its older spellings."""
        return [name, *(name.replace(new, old) for new, old in self.legacy_names.items() if new in name)]

    def tensor_of(self, param: str) -> str | None:
        """The tensor that stores a parameter which is no stack."""
        return next((mapping.tensor for mapping in self.weights if mapping.param == param), None)

    def tensors(self, param_shapes: Mapping[str, Shape], heads: int = 1) -> list[HFTensor]:
        """The tensors of a model with these canonical parameters: embeddings, then layer by layer, then the head.
        heads: the model's."""
        tensors: dict[str, list[WeightMapping]] = {}
        for mapping in self._present(param_shapes):
            tensors.setdefault(mapping.tensor, []).append(mapping)
        result = []
        for stacked, names in itertools.groupby(tensors, lambda name: LAYER in name):
            for layer, name in itertools.product(range(_layers(param_shapes)) if stacked else [None], names):
                result.append(_tensor(name, tensors[name], layer, param_shapes, heads))
        return result

    def _present(self, param_shapes: Mapping[str, Shape]) -> list[WeightMapping]:
        """The mappings of these parameters, which have to have one each."""
        known = {_place(param)[1] for param in param_shapes}
        present = [mapping for mapping in self.weights if mapping.param in known]
        assert {mapping.param for mapping in present} == known, known ^ {mapping.param for mapping in present}
        return present

    def buffer_names(self, names: Iterable[str], param_shapes: Mapping[str, Shape]) -> set[str]:
        """Those of these tensor names that hold no parameter, or one that another tensor holds as well."""
        output = {mapping.tensor for mapping in self.weights if mapping.param == OUTPUT_EMBEDDING}
        templates = (*self.buffers, *(output if OUTPUT_EMBEDDING not in param_shapes else ()))
        spellings = (spelling for template in templates for spelling in self.spellings(template))
        pattern = re.compile("|".join(re.escape(each).replace(re.escape(LAYER), r"\d+") for each in spellings))
        return {name for name in names if pattern.fullmatch(name)}

    def unused_head_names(self, names: Iterable[str], param_shapes: Mapping[str, Shape]) -> set[str]:
        """Those of these tensor names that hold heads which this model, by its objective, lacks."""
        present = {*param_shapes, OUTPUT_EMBEDDING}
        return {mapping.tensor for mapping in self.weights if mapping.param not in present}.intersection(names)


def _layers(param_shapes: Mapping[str, Shape]) -> int:
    """How many layers these parameters are of: all that are stacked at the places of a period."""
    stacks = {_place(path)[0]: shape[0] for path, shape in param_shapes.items() if path.startswith("blocks.")}
    return sum(stacks.values())


def _place(param: str) -> tuple[int, str]:
    """The place in a period of a parameter, and its path without it."""
    place, path = layer_path(tuple(param.split(".")))
    return place, ".".join(path)


def _tensor(
    name: str, mappings: Iterable[WeightMapping], layer: int | None, param_shapes: Mapping[str, Shape], heads: int
) -> HFTensor:
    """The tensor of this layer, which is an entry of the stacks at its place in the period."""
    paths = {_place(path): path for path in param_shapes}
    period = 1 + max(place for place, _ in paths)
    parts: list[TensorPart] = []
    for mapping in mappings:
        groups = heads if mapping.by_head else 1
        path = paths[0 if layer is None else layer % period, mapping.param]
        shape = param_shapes[path] if layer is None else param_shapes[path][1:]
        start = sum(part.shape[-1] for part in parts) // groups
        parts.append(TensorPart(path, None if layer is None else layer // period, shape, start))
    return HFTensor(name.format(layer=layer), tuple(parts), mapping.transposed and len(shape) > 1, groups)


# --- what several tables have


def linear(param: str, module: str, **storage: Any) -> tuple[WeightMapping, WeightMapping]:
    """A matrix and its bias.  storage: how the tensors store them."""
    matrix = WeightMapping(param, f"{module}.weight", **storage)
    return matrix, WeightMapping(f"{param}_bias", f"{module}.bias", **storage)


def norm(param: str, module: str) -> tuple[WeightMapping, WeightMapping]:
    """A LayerNorm's scale and bias."""
    return WeightMapping(f"{param}.scale", f"{module}.weight"), WeightMapping(f"{param}.bias", f"{module}.bias")


GELU_NAMES = {"gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh"}

# Keys of config.json that generation needs.
SPECIAL_TOKEN_KEYS = ("bos_token_id", "eos_token_id", "pad_token_id")

# Keys of config.json that do not change what a model computes from its parameters.
IGNORED_KEYS = {
    *SPECIAL_TOKEN_KEYS,
    *("_name_or_path", "architectures", "model_type", "transformers_version", "torch_dtype", "dtype", "id2label"),
    *("label2id", "problem_type", "task_specific_params", "output_attentions", "output_hidden_states", "return_dict"),
    *("use_cache", "initializer_range", "gradient_checkpointing", "classifier_dropout", "chunk_size_feed_forward"),
    *("is_encoder_decoder", "summary_type", "summary_use_proj", "summary_activation", "summary_proj_to_labels"),
    *("summary_first_dropout", "n_ctx", "pretraining_tp", "_attn_implementation", "directionality"),
    *("pooler_fc_size", "pooler_num_attention_heads", "pooler_num_fc_layers", "pooler_size_per_head", "pooler_type"),
}
