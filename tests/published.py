"""Public texts and golden values, which are not in the repository: SPMD_LM_DATA says where a machine has them."""

import os
from pathlib import Path

import pytest


def published(name: str) -> Path:
    """The path of one; skips the test without SPMD_LM_DATA."""
    if "SPMD_LM_DATA" not in os.environ:
        pytest.skip(f"SPMD_LM_DATA is not set: {name} is looked for there")
    return Path(os.environ["SPMD_LM_DATA"]) / name
