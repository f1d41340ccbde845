"""The kinds of layers in `model.period`, one section each.

A new kind is a section here; unless it is a `Block` with other sizes, models/language_model.py must also make a module
for it."""

import functools
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PositiveFloat
from pydantic_core import PydanticCustomError

from spmd_lm.config.mlp import MLPKind
from spmd_lm.config.rope import RopeScaling
from spmd_lm.config.section import Section
from spmd_lm.config.types import Count


class LayerKind(Section):
    """One kind of layer; keys that are left out take the model's values."""

    kind: str
    heads: Count | None = None  # default: model.heads; query heads
    kv_heads: Count | None = None  # default: model.kv_heads; key/value heads
    head_width: Count | None = None  # default: model.head_width; width of each head
    mlp_width: Count | None = None  # default: model.mlp_width; hidden width of the MLP
    mlp: MLPKind | None = None  # default: model.mlp
    rope_theta: PositiveFloat | None = None  # default: model.rope_theta; base of rotary positions
    rope_scaling: RopeScaling | None = None  # default: model.rope_scaling

    @property
    def as_written(self) -> str | dict[str, Any]:
        """The kind's name, or a mapping if it overrides keys."""
        keys = self.model_dump(exclude_none=True)
        return keys if len(keys) > 1 else self.kind

    @property
    def own_sizes(self) -> dict[str, Any]:
        """The model's keys that this kind overrides."""
        keys = [key for key in LayerKind.model_fields if key != "kind"]
        return {key: value for key in keys if (value := getattr(self, key)) is not None}


class BlockLayer(LayerKind):
    """Full attention, causal in a GPT, and an MLP."""

    kind: Literal["block"] = "block"


class WindowLayer(LayerKind):
    """A block with attention within a window (Mistral 7B, arXiv:2310.06825)."""

    kind: Literal["window"]
    span: Count  # tokens that each attends to: itself and those before it; without a causal mask, as many after it


def _from_yaml(period: Any) -> Any:
    """Replaces names of kinds by their sections; a tuple, because configurations are hashed."""
    if not isinstance(period, list | tuple):
        return period
    if not period:
        raise PydanticCustomError("empty", "expected at least one kind of layer")
    return tuple({"kind": each} if isinstance(each, str) else each for each in period)


LayerKinds = Annotated[
    tuple[Annotated[BlockLayer | WindowLayer, Field(discriminator="kind")], ...],
    BeforeValidator(_from_yaml),
]


@functools.lru_cache(maxsize=64)
def shortest(period: tuple[LayerKind, ...], layers: int) -> tuple[LayerKind, ...]:
    return tuple(shortest_period([period[layer % len(period)] for layer in range(layers)]))


def layer_path(path: tuple[str, ...]) -> tuple[int, tuple[str, ...]]:
    """The layer's index in its period, and the path without it: (1, blocks.mlp.up) for blocks.1_window.mlp.up."""
    if len(path) > 1 and path[1][0].isdigit():
        return int(path[1].partition("_")[0]), (path[0], *path[2:])
    return 0, path


def path_in_block(param: str) -> str:
    """The path within a block: attention.query for blocks.attention.query and blocks.0_window.attention.query."""
    return ".".join(layer_path(tuple(param.split(".")))[1][1:])


def shortest_period(layers: Sequence[Any]) -> list[Any]:
    """The shortest period whose repetition gives these layers; the last repeat may be cut short."""
    return next(([*layers[:n]] for n in range(1, len(layers) + 1) if layers[n:] == layers[:-n]), [])
