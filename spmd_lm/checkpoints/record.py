"""The record of a checkpoint: its contents, and the means to verify them.

record.json, in the checkpoint's directory, is one line of JSON and the SHA-256 of that line.  It is written last, so a
directory without it is not a checkpoint."""

import hashlib
import math
import re
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from spmd_lm.config.data_sections import RULES
from spmd_lm.errors import CheckpointError, DamagedCheckpointError
from spmd_lm.files import parse_json, read_bytes, walk_files, write_atomically
from spmd_lm.runtime.formatting import abbreviate
from spmd_lm.runtime.metrics import RunId

RECORD_FILE = "record.json"
MAX_RECORD_BYTES = 2**26  # a thousand arrays in ten thousand files take 1 MB

Meta = dict[str, Any]  # JSON: config, data, versions


MAX_LEAVES = 10_000
LeafPath = Annotated[str, Field(pattern=r"^[A-Za-z0-9_]+(\.[A-Za-z0-9_]+)*$", max_length=1000)]


class SavedLeaf(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    shape: Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Field(max_length=32)]  # canonical
    dtype: Annotated[str, Field(pattern=r"^(bool|(u?int|float)(8|16|32|64)|bfloat16)$")]
    fingerprint: Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]  # by parallel/fingerprint.py

    @property
    def size(self) -> int:
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize


class CheckpointRecord(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    step: Annotated[int, Field(ge=0)]
    run_id: RunId  # of the run that saved it
    meta: Meta
    leaves: Annotated[dict[LeafPath, SavedLeaf], Field(max_length=MAX_LEAVES)]
    files: dict[str, int]  # bytes, by path in the checkpoint's directory; without the record itself

    @field_validator("meta")
    @classmethod
    def _holds_a_position(cls, meta: Meta) -> Meta:
        config, data = meta.get("config"), meta.get("data")
        if not (isinstance(config, dict) and all(isinstance(section, dict) for section in config.values())):
            raise ValueError("config: expected sections")
        if not (
            isinstance(data, dict) and type(data.get("samples")) is int and isinstance(data.get("fingerprint"), str)
        ):
            raise ValueError("data: expected samples and a fingerprint")
        if data.get("rules", 1) not in (1, RULES):
            raise ValueError(f"data.rules: expected 1 or {RULES}")
        return meta

    @field_validator("leaves")
    @classmethod
    def _are_leaves(cls, leaves: dict[str, SavedLeaf]) -> dict[str, SavedLeaf]:
        nodes = {path[: dot.start()] for path in leaves for dot in re.finditer(r"\.", path)}
        if both := nodes & leaves.keys():
            raise ValueError(f"{min(both)}: a leaf has leaves")
        return leaves

    @property
    def size(self) -> int:
        """Bytes of its arrays, before compression."""
        return sum(leaf.size for leaf in self.leaves.values())

    def write(self, directory: Path) -> None:
        """Writes atomically."""
        line = self.model_dump_json().encode()
        digest = hashlib.sha256(line).hexdigest().encode()
        write_atomically(directory / RECORD_FILE, line + b"\n" + digest + b"\n")


def read_record(directory: Path) -> CheckpointRecord:
    """The record of the checkpoint in `directory`, named STEP.  Raises DamagedCheckpointError if it is missing, changed
    or of another step, CheckpointError if it is intact but of another version, and OSError if it cannot be read."""
    path = directory / RECORD_FILE
    try:
        line, _, rest = read_bytes(path, MAX_RECORD_BYTES).partition(b"\n")
        if rest != hashlib.sha256(line).hexdigest().encode() + b"\n":
            raise ValueError("it was changed after it was written")
        record = CheckpointRecord(**parse_json(line))
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
        raise DamagedCheckpointError(directory, f"{RECORD_FILE} is missing") from error
    except ValidationError as error:  # the digest is right
        fault = error.errors()[0]
        where = f"{'.'.join(map(str, fault['loc'])):.100}: {fault['msg']}"
        what = f"{path} is not a record of this version of spmd_lm ({where}). Nothing was changed"
        raise CheckpointError(f"{what}: use the version that wrote it, or choose another run.") from error
    except (ValueError, TypeError) as error:
        raise DamagedCheckpointError(directory, f"{RECORD_FILE}: {error}") from error
    if str(record.step) != directory.name:
        raise DamagedCheckpointError(directory, f"{RECORD_FILE} is that of step {record.step}")
    return record


def file_sizes(directory: Path) -> dict[str, int]:
    """Bytes of every file below `directory` except the record, by relative path."""
    files = (path for path in walk_files(directory) if path.name != RECORD_FILE)
    return {str(path.relative_to(directory)): path.stat().st_size for path in files}


def check_files(directory: Path, record: CheckpointRecord) -> None:
    """Raises DamagedCheckpointError, naming the files, if one is missing or has another size."""
    found = file_sizes(directory)
    wrong = [
        f"{name} has {found[name]:,} of {size:,} bytes" if name in found else f"{name} is missing"
        for name, size in record.files.items()
        if found.get(name) != size
    ]
    if wrong:
        raise DamagedCheckpointError(directory, abbreviate(wrong))
