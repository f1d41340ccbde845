"""JSON values that know where they stand in their file, so that errors can say so."""

import dataclasses
import json
from typing import Any, TypeVar

from spmd_lm.data.text_files import Document
from spmd_lm.errors import DataError

T = TypeVar("T")

TYPE_NAMES = {str: "a string", int: "an integer", bool: "true or false", list: "a list", dict: "an object"}


@dataclasses.dataclass(frozen=True, slots=True)
class JsonNode:
    """A JSON value; the accessors raise DataError if it is not of the expected type."""

    value: Any
    file: str  # with the line, in JSON Lines
    path: str  # from the root, as in `data[0].title`
    schema: str  # a sentence that describes the root, for error messages

    @classmethod
    def parse(cls, text: str, document: Document, schema: str, line: int | None = None) -> "JsonNode":
        """The root of a JSON text.  line: its line in the document, in JSON Lines."""
        try:
            value = json.loads(text)
        except json.JSONDecodeError as error:
            at = (line or 1) + error.lineno - 1
            raise DataError(
                f"{document.path}: line {at}: not JSON: {error.msg} at column {error.colno}. {schema}"
            ) from None
        except (ValueError, RecursionError) as error:
            raise DataError(f"{document.path}: line {line or 1}: not JSON: {error}. {schema}") from None
        return cls(value, f"{document.path}: line {line}" if line else str(document.path), "", schema)

    @property
    def location(self) -> str:
        return f"{self.file}: {self.path}" if self.path else self.file

    def error(self, problem: str, fix: str = "") -> DataError:
        return DataError(f"{self.location}: {problem}. {fix or self.schema}")

    def to(self, expected: type[T]) -> T:
        """The value, if it is of exactly this type; strings must also be encodable as UTF-8."""
        if type(self.value) is not expected:
            raise self.error(f"expected {TYPE_NAMES[expected]}, got {self.value!r:.40}")
        if isinstance(self.value, str):
            try:
                self.value.encode()
            except UnicodeEncodeError as error:
                surrogate = self.value[error.start]
                raise self.error(f"unpaired surrogate {surrogate!r}", "Write the whole character.") from None
        return self.value

    def has(self, key: str) -> bool:
        return key in self.to(dict)

    def __getitem__(self, key: str) -> "JsonNode":
        if not self.has(key):
            raise self.error(f"no key {key!r}")
        return JsonNode(self.value[key], self.file, f"{self.path}.{key}".removeprefix("."), self.schema)

    def elements(self) -> "list[JsonNode]":
        values = self.to(list)
        return [JsonNode(value, self.file, f"{self.path}[{i}]", self.schema) for i, value in enumerate(values)]
