"""The kinds of layers that a model is made of: each a section of its own, in `model.period`.

A new kind is a section here and a module in models/transformer.py."""

import functools
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PositiveFloat
from pydantic_core import PydanticCustomError

from spmd_lm.config.section import Section
from spmd_lm.config.types import Count


class LayerKind(Section):
    """Keys that are left out are the model's."""

    kind: str
    heads: Count | None = None  # of queries
    kv_heads: Count | None = None  # key/value heads
    mlp_width: Count | None = None  # hidden width of the MLP
    rope_theta: PositiveFloat | None = None  # of rotary positions

    @property
    def own_sizes(self) -> dict[str, Any]:
        """The keys of the model that this layer has otherwise."""
        return {
            key: value for key in LayerKind.model_fields if key != "kind" and (value := getattr(self, key)) is not None
        }


class BlockLayer(LayerKind):
    """Attention to the whole row, or to what of it comes before, and an MLP."""

    kind: Literal["block"] = "block"


class WindowLayer(LayerKind):
    """The same with attention within a window (Mistral 7B, arXiv:2310.06825)."""

    kind: Literal["window"]
    span: Count  # tokens that one attends to: itself and those before it; without a causal mask, as many behind it


def _from_yaml(period: Any) -> Any:
    """Names of kinds as the sections that they stand for; a tuple, because configurations are hashed."""
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
    """The shortest period that makes the same layers."""
    kinds = [period[layer % len(period)] for layer in range(layers)]
    sizes = range(1, len(kinds))
    size = next((n for n in sizes if all(kind == kinds[i % n] for i, kind in enumerate(kinds))), len(kinds))
    return tuple(kinds[:size])
