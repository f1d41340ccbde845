"""What import and export share."""

from typing import Any

import jax

from spmd_lm.errors import ConfigError


def require_single_process(verb: str) -> None:
    """Any number of processes can restore a checkpoint; only a single one can import or export it."""
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
