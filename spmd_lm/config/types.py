"""The types of a configuration's values: numbers in their ranges, paths that can be."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

Partitioner = Literal["types", "manual"]
Dtype = Literal["bfloat16", "float16", "float32", "float64"]
MOST = 2**30  # devices index and count in 32 bits, padding included
Count = Annotated[int, Field(ge=1, le=MOST)]
CountOrZero = Annotated[int, Field(ge=0, le=MOST)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
DropoutRate = Annotated[float, Field(ge=0, le=0.999)]  # what is kept is divided by 1 - rate, in 16 bits too


def valid_path(path: str) -> str:
    """The same path, if a file system can hold it; whether it can be written shows when it is written."""
    try:
        parts = Path(path).expanduser().parts
    except RuntimeError:
        raise PydanticCustomError("path_home", "expected ~ or the ~name of a user of this machine") from None
    if "\0" in path:
        raise PydanticCustomError("path_nul", "expected a path without NUL characters")
    if not path.isascii() and any("\ud800" <= character <= "\udfff" for character in path):  # bytes that are no UTF-8
        raise PydanticCustomError("path_encoding", "expected a path in UTF-8")
    if any(len(part.encode()) > 255 for part in parts):
        raise PydanticCustomError("path_length", "expected names of at most 255 bytes between slashes")
    return path


def without_repeats(names: list[str]) -> list[str]:
    if len(set(names)) < len(names):
        raise PydanticCustomError("repeats", "expected each name once")
    return names


ValidPath = Annotated[str, AfterValidator(valid_path)]
