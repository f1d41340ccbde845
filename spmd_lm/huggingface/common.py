"""What import and export share."""

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


def require_single_process(verb: str) -> None:
    """Any number of processes can restore a checkpoint; only a single one can import or export it."""
    import jax  # not needed for errors in a directory

    if jax.process_count() > 1:
        raise ConfigError(
            f"spmd-lm {verb} runs in one process; its checkpoint works with any number. Unset JAX_COORDINATOR_ADDRESS; "
            f"--devices N simulates the devices of a layout."
        )


def format_result(result: dict[str, Any]) -> str:
    """The result of an import or an export, as text."""
    model = f"{result['architecture']} of {result['parameters']:,} parameters, step {result['step']}"
    lines = [f"{result['directory']}: {model}", f"files: {', '.join(result['files'])}"]
    if unread := result.get("unread"):
        lines.append(f"not read: {', '.join(unread)}")
    return "\n".join(lines)
