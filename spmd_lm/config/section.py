"""The base of all sections of a YAML file: a strict, frozen model, and its keys as the file spells them."""

from typing import Any, ClassVar, get_args

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator
from pydantic.fields import FieldInfo

from spmd_lm.config.types import valid_text


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, populate_by_name=True, allow_inf_nan=False)

    in_buckets: ClassVar[frozenset[str]] = frozenset()  # keys whose paths may be addresses in buckets

    @field_validator("*")
    @classmethod
    def _texts_are_valid(cls, value: Any, key: ValidationInfo) -> Any:
        """On every key, so that new paths need no check of their own."""
        for text in value if isinstance(value, list | tuple) else [value]:
            if isinstance(text, str):
                valid_text(text, in_bucket=key.field_name in cls.in_buckets)
        return value


def sections_within(field: FieldInfo | None) -> list[type[Section]]:
    """The section types of a key's value, or of its list's items."""
    types: list[Any] = [field.annotation] if field else []
    for each in types:
        types += get_args(each)
    return [each for each in types if isinstance(each, type) and issubclass(each, Section)]


def kind_of(section: type[Section]) -> str:
    """The value of `kind` that selects this section."""
    return get_args(section.model_fields["kind"].annotation)[0]


def yaml_fields(section: type[Section]) -> dict[str, FieldInfo]:
    """The section's fields, by their YAML keys."""
    return {field.alias or name: field for name, field in section.model_fields.items()}
