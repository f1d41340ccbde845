"""Types of configuration values: numbers in ranges, valid paths."""

import re
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field
from pydantic_core import PydanticCustomError

from spmd_lm.addresses import bucket_problem, elsewhere, is_bucket

Partitioner = Literal["types", "manual"]
Dtype = Literal["bfloat16", "float16", "float32", "float64"]
FakeQuantKind = Literal["none", "int8", "int4"]
MatmulKind = Literal["none", "fp8", "int8"]
Bits = Literal["int8", "int4", "int3", "nf4"]
MOST = 2**30  # devices index and count in 32 bits, padding included
Count = Annotated[int, Field(ge=1, le=MOST)]
CountOrZero = Annotated[int, Field(ge=0, le=MOST)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
DropoutRate = Annotated[float, Field(ge=0, le=0.999)]  # kept values are divided by 1 - rate, in 16 bits too


def valid_text(text: str, in_bucket: bool = False) -> str:
    """Checks that a text has no NUL, is UTF-8, and is not a remote address.  in_bucket: it may be one in a bucket."""
    if "\0" in text:
        raise PydanticCustomError("text_nul", "expected text without NUL characters")
    if not text.isascii() and any("\ud800" <= character <= "\udfff" for character in text):  # bytes that are not UTF-8
        raise PydanticCustomError("text_encoding", "expected text in UTF-8")
    if problem := bucket_problem(text) if in_bucket and is_bucket(text) else elsewhere(text):
        raise PydanticCustomError("elsewhere", "{problem}", {"problem": problem})
    return text


def valid_path(path: str) -> str:
    """Checks that a file system can hold the path, not that it can be written."""
    valid_text(path)
    try:
        parts = Path(path).expanduser().parts
    except RuntimeError:
        raise PydanticCustomError("path_home", "expected ~ or the ~name of a user of this machine") from None
    if any(len(part.encode()) > 255 for part in parts):
        raise PydanticCustomError("path_length", "expected names of at most 255 bytes between slashes")
    return path


def without_repeats(names: list[str]) -> list[str]:
    if len(set(names)) < len(names):
        raise PydanticCustomError("repeats", "expected each name once")
    return names


Bias = Literal["qkv", "out", "mlp", "norm", "head"]
Biases = Annotated[
    tuple[Bias, ...],
    BeforeValidator(lambda names: tuple(without_repeats(names)) if isinstance(names, list) else names),
]
"""Parts of a model that have biases; a tuple, because configurations are hashed."""


PathOrBucket = Annotated[str, AfterValidator(lambda path: path if is_bucket(path) else valid_path(path))]
"""A path, or s3://BUCKET/KEY or gs://BUCKET/KEY; its section lists it in `in_buckets`."""

ValidPath = Annotated[str, AfterValidator(valid_path)]


def _valid_module(text: str) -> str:
    if not re.fullmatch(r".+\.py:[A-Za-z_]\w*(@[0-9a-f]{16})?", text, re.DOTALL):
        raise PydanticCustomError("module", "expected a Python file and a name in it, as in block.py:MyBlock")
    return text


OwnModule = Annotated[ValidPath, AfterValidator(_valid_module)]
"""A user-defined class or function: config/own_modules.py."""
