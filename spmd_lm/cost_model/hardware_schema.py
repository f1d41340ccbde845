"""Schema of a table of hardware: hardware.yaml, which explains its keys, or a file of bench --calibrate."""

from typing import Annotated, Any

from pydantic import AfterValidator, Field, ValidationError
from pydantic_core import PydanticCustomError

from spmd_lm.config.section import Section
from spmd_lm.config.types import Count, CountOrZero

LEAST, MOST = 1e-9, 1e12  # bounds of any figure, in the table's units: beyond them seconds are 0 or NaN
Positive = Annotated[float, Field(ge=LEAST, le=MOST)]
NotNegative = Annotated[float, Field(ge=0, le=MOST)]
Share = Annotated[float, Field(ge=LEAST, le=1)]


def with_16_bits(peaks: dict[str, float]) -> dict[str, float]:
    if not peaks.keys() & {"bfloat16", "float16"}:
        raise PydanticCustomError("peak", "bfloat16 or float16 is missing")
    return peaks


class MemoryRow(Section):
    size: Positive
    bandwidth: Positive
    share: Share


class ProductsRow(Section):
    limit: Share
    half_inner: NotNegative
    attention: Share
    tile: Annotated[list[Count], Field(min_length=2, max_length=2)]


class CompiledRow(Section):
    products: Share
    attention: Share
    fused: Share


class LatencyRow(Section):
    start: NotNegative
    link: NotNegative
    network: NotNegative


class PeakRow(Section):
    """Hardware of which only the peak is known."""

    device_kind: Annotated[str, Field(pattern=r"\S")]
    peak: Annotated[dict[str, Positive], AfterValidator(with_16_bits)]
    source: str


class HardwareRow(PeakRow):
    """Hardware whose speed is modelled."""

    efficiency: Share
    memory: MemoryRow
    on_chip: dict[str, Count] | None = None
    cores: Count
    products: ProductsRow
    compiled: CompiledRow | None = None
    link: Positive
    closes_at: CountOrZero = 0
    network: Positive | None = None
    host: Positive | None = None
    host_memory: Positive | None = None
    latency: LatencyRow
    devices_per_host: CountOrZero = 0
    kernel_overhead: NotNegative | None = None


def problem_of(row: Any) -> str:
    """The first wrong key of a row, and what it must be; '' for a valid row."""
    if not isinstance(row, dict):
        return "must be keys and values"
    try:
        (PeakRow if row.keys() <= PeakRow.model_fields.keys() else HardwareRow).model_validate(row)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        return f"{key}: {first['msg'].lower()}, got {first['input']!r:.40}"
    return ""
