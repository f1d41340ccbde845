"""Every file under configs/ is a run that can be planned: as it stands, and laid out over 8 devices."""

import math
from pathlib import Path

import pytest

from spmd_lm.config.load import load
from spmd_lm.config.schema import RunConfig
from spmd_lm.train.describe import describe

CONFIGS = Path(__file__).parents[2] / "configs"
SHIPPED = sorted(path for path in CONFIGS.rglob("*.yaml") if path.stem != "base")
PARAMETERS = {"gpt2_124m": 124_439_808}  # as published
BILLIONS = {"ptd-p/1t": 1008.0} | {  # arXiv:2104.04473, table 1
    f"ptd-p/{size}b": size for size in (1.7, 3.6, 7.5, 18.4, 39.1, 76.1, 145.6, 310.1, 529.6)
}

name_of = lambda path: str(path.relative_to(CONFIGS).with_suffix(""))  # noqa: E731
shipped = pytest.mark.parametrize("path", SHIPPED, ids=name_of)


def planned(path: Path, *overrides: str) -> tuple[RunConfig, dict]:
    config = load(path, overrides)
    return config, describe(config)


@shipped
def test_it_is_planned_as_it_stands(path):
    """On the devices that it simulates, or that its degrees make, or else on one."""
    config = load(path)
    p = config.parallel
    degrees = {"pipe": p.pipe, "replica": p.replica, "data": max(p.data, 1), "model": p.model}
    devices = config.run.simulate_devices or math.prod(degrees.values())
    _, plan = planned(path, f"run.simulate_devices={devices}")
    if p.data == -1:
        degrees["data"] = devices // math.prod(degrees.values())
    assert plan["mesh"] == degrees
    assert plan["parameter_count"] == PARAMETERS.get(path.stem, plan["parameter_count"]) > 0
    published = BILLIONS.get(name_of(path))
    assert published is None or plan["parameter_count"] / 1e9 == pytest.approx(published, abs=0.051)


@shipped
def test_it_is_planned_over_eight_devices(path):
    one_stage = ("parallel.pipe=1", "parallel.chunks=1", "parallel.schedule=1f1b", "parallel.microbatches=1")
    _, plan = planned(path, "run.simulate_devices=8", "parallel.data=2", "parallel.model=4", *one_stage)
    assert (plan["devices"], plan["mesh"]) == (8, {"pipe": 1, "replica": 1, "data": 2, "model": 4})
    assert plan["parameter_count"] == PARAMETERS.get(path.stem, plan["parameter_count"]) > 0


@shipped
def test_its_last_state_is_kept(path):
    """For eval and generate, which come next."""
    assert load(path).checkpoint.every > 0
