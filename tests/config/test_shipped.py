"""Every file under configs/ is a run that can be planned: as it stands, and laid out over 8 devices."""

from pathlib import Path

import pytest

from spmd_lm.config.load import load
from spmd_lm.config.schema import RunConfig
from spmd_lm.train.describe import describe

SHIPPED = sorted((Path(__file__).parents[2] / "configs").glob("*.yaml"))
PARAMETERS = {"gpt2_124m": 124_439_808}  # as published

shipped = pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)


def planned(path: Path, *overrides: str) -> tuple[RunConfig, dict]:
    config = load(path, overrides)
    return config, describe(config)


@shipped
def test_it_is_planned_as_it_stands(path):
    """On the devices that it simulates, or else on one."""
    devices = load(path).run.simulate_devices or 1
    config, plan = planned(path, f"run.simulate_devices={devices}")
    data = devices // config.parallel.model
    assert plan["mesh"] == {"pipe": 1, "replica": 1, "data": data, "model": config.parallel.model}
    assert plan["parameter_count"] == PARAMETERS.get(path.stem, plan["parameter_count"]) > 0


@shipped
def test_it_is_planned_over_eight_devices(path):
    _, plan = planned(path, "run.simulate_devices=8", "parallel.data=2", "parallel.model=4")
    assert (plan["devices"], plan["mesh"]) == (8, {"pipe": 1, "replica": 1, "data": 2, "model": 4})
    assert plan["parameter_count"] == PARAMETERS.get(path.stem, plan["parameter_count"]) > 0


@shipped
def test_its_last_state_is_kept(path):
    """For eval and generate, which come next."""
    assert load(path).checkpoint.every > 0
