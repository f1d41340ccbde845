"""JSON files of a model's directory."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from spmd_lm.errors import ConfigError


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file.  Raises ConfigError if there is none."""
    try:
        value = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}.") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not JSON: {error}. Download it again.") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: expected an object, got {value!r:.40}. Download it again.")
    return value


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", "utf-8")
