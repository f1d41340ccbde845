"""The record of a checkpoint: what was saved, and how to tell that it is what is read.

record.json, in the checkpoint's directory, is one line of JSON and the SHA-256 of that line.  It is written once all
else is known to be complete, so a directory without one is no checkpoint."""

import hashlib
from pathlib import Path
from typing import Annotated, Any, Literal, cast

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from spmd_lm.errors import DamagedCheckpointError
from spmd_lm.files import parse_json, read_bytes, write_atomically

RECORD_FILE = "record.json"
MAX_RECORD_BYTES = 2**26  # of it; a thousand arrays in ten thousand files have 1 MB

Meta = dict[str, Any]  # JSON: config, data, versions


Numbers = Literal["bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"]
Floats = Literal["bfloat16", "float16", "float32", "float64"]
NotNegative = Annotated[int, Field(ge=0, lt=2**63)]


class SavedLeaf(BaseModel):
    """One array of the state."""

    model_config = ConfigDict(strict=True, extra="forbid")

    shape: list[NotNegative]  # canonical
    dtype: Numbers | Floats
    fingerprint: str  # of checkpoints/fingerprint.py

    @classmethod
    def of(cls, leaf: Any, fingerprint: str) -> "SavedLeaf":
        return cls(shape=[*leaf.shape], dtype=cast(Any, str(leaf.dtype)), fingerprint=fingerprint)


class _Part(BaseModel):
    """Of a record's meta: the keys that are read of it, if they are there."""

    model_config = ConfigDict(strict=True, extra="allow")


class _Train(_Part):
    log_every: Annotated[int, Field(ge=1)] = 1


class _Model(_Part):
    context: NotNegative = 0


class _Config(_Part):
    run: dict[str, Any] = {}
    model: _Model = _Model()
    objective: dict[str, Any] = {}
    data: dict[str, Any] = {}
    parallel: dict[str, Any] = {}
    train: _Train = _Train()


class _Data(_Part):
    num_samples: NotNegative = Field(alias="samples")
    fingerprint: str


class _Meta(_Part):
    config: _Config
    data: _Data
    start: int = 0
    devices: int = 0


def valid_meta(meta: Meta) -> Meta:
    _Meta.model_validate(meta)
    return meta


class CheckpointRecord(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    step: NotNegative
    run_id: str  # random, of the run that saved it
    meta: Annotated[Meta, AfterValidator(valid_meta)]
    leaves: dict[str, SavedLeaf]  # by path, as in 'params.blocks.attention.query'
    files: dict[str, int]  # bytes, by path in the checkpoint's directory; without the record itself

    def write(self, directory: Path) -> None:
        """Appears complete or not at all."""
        line = self.model_dump_json().encode()
        digest = hashlib.sha256(line).hexdigest().encode()
        write_atomically(directory / RECORD_FILE, line + b"\n" + digest + b"\n")


def read_record(directory: Path) -> CheckpointRecord:
    """The record of the checkpoint in `directory`/STEP.  DamagedCheckpointError if it is missing or was changed, and
    OSError if it cannot be read."""
    path = directory / RECORD_FILE
    try:
        line, _, rest = read_bytes(path, MAX_RECORD_BYTES).partition(b"\n")
        if rest != hashlib.sha256(line).hexdigest().encode() + b"\n":
            raise ValueError("it was changed after it was written")
        record = CheckpointRecord(**parse_json(line))
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
        raise DamagedCheckpointError(directory, f"{RECORD_FILE} is missing") from error
    except (ValueError, TypeError) as error:
        reason = "of another version" if isinstance(error, ValidationError) else error
        raise DamagedCheckpointError(directory, f"{RECORD_FILE}: {reason}") from error
    if str(record.step) != directory.name:
        raise DamagedCheckpointError(directory, f"{RECORD_FILE} is that of step {record.step}")
    return record


def file_sizes(directory: Path) -> dict[str, int]:
    """Bytes of every file below `directory`, by path in it, without its record."""
    files = (path for path in sorted(directory.rglob("*")) if path.is_file())
    return {str(path.relative_to(directory)): path.stat().st_size for path in files if path.name != RECORD_FILE}


def check_files(directory: Path, record: CheckpointRecord) -> None:
    """DamagedCheckpointError, naming the files, if one is missing or is not as long as it was."""
    found = file_sizes(directory)
    wrong = [
        f"{name} has {found[name]:,} of {size:,} bytes" if name in found else f"{name} is missing"
        for name, size in record.files.items()
        if found.get(name) != size
    ]
    if wrong:
        raise DamagedCheckpointError(
            directory, "; ".join(wrong[:3]) + (f" and {len(wrong) - 3} more" if wrong[3:] else "")
        )
