"""What fits a GPU is what jax allocates of it, of which its environment says how much."""

import pytest

from spmd_lm.analysis.topology import parse_topology
from spmd_lm.cli import main
from spmd_lm.cost_model import memory
from spmd_lm.cost_model.hardware import GIB, find_hardware
from spmd_lm.errors import ConfigError
from spmd_lm.planning import preflight, search_report
from spmd_lm.planning.capacity import Capacity, capacity_of
from spmd_lm.planning.plan_report import describe, plan_on, summary
from spmd_lm.planning.search import ROOM, make_target, search
from spmd_lm.runtime.gpu_memory import FRACTION
from tests.helpers import make_config

MODEL = {"layers": 24, "width": 4096, "heads": 32, "context": 1024, "vocab": 51_200, "dropout": 0.0}
PRECISION = {"params": "float32", "compute": "bfloat16", "reduce": "float32"}
H200 = 139.8 * GIB


def run(layers, **sections):
    return make_config(
        model=MODEL | {"layers": layers, "attention_dropout": 0.0}, precision=PRECISION, train={"batch": 8}, **sections
    )


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    """Of one who set nothing."""
    for name in (FRACTION, "XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_ALLOCATOR", "XLA_PYTHON_CLIENT_PREALLOCATE"):
        monkeypatch.delenv(name, raising=False)


def test_a_tpu_and_simulated_devices_have_all_that_there_is(monkeypatch):
    monkeypatch.setenv(FRACTION, "most")
    assert capacity_of(find_hardware("TPU v5"), "tpu") == Capacity(95 * GIB, 95 * GIB, 95 * GIB)
    assert capacity_of(None, "cpu") is None


@pytest.mark.parametrize(
    ("settings", "usable", "setting"),
    [
        ({}, 0.75, f"{FRACTION}=0.92"),
        ({FRACTION: "0.5"}, 0.5, f"{FRACTION}=0.92"),
        ({FRACTION: "0.92"}, 0.92, ""),
        ({FRACTION: "0.95"}, 0.95, ""),
        ({"XLA_CLIENT_MEM_FRACTION": "0.5"}, 0.5, "XLA_CLIENT_MEM_FRACTION=0.92"),
        ({"XLA_PYTHON_CLIENT_ALLOCATOR": "platform"}, 1.0, ""),
        ({"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}, 0.75, f"{FRACTION}=0.92"),
    ],
)
def test_a_gpu_has_what_jax_allocates(monkeypatch, settings, usable, setting):
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    capacity = capacity_of(find_hardware("NVIDIA H200"), "gpu")
    assert (capacity.device, capacity.usable, capacity.setting) == (H200, pytest.approx(usable * H200), setting)
    assert capacity.larger == pytest.approx(max(0.92, usable) * H200)


def test_a_remedy_is_told_only_where_it_helps():
    capacity = capacity_of(find_hardware("NVIDIA H200"), "gpu")
    needed = [100 * GIB, 104.84 * GIB, 105 * GIB, 128 * GIB, 129 * GIB]
    assert [capacity.remedy(each) for each in needed] == [None, None, *[f"{FRACTION}=0.92"] * 2, None]


def test_a_plan_says_how_it_fits(monkeypatch):
    topology, config = parse_topology("h200:1x1"), run(30)
    found = describe(config, topology=topology)
    assert found["capacity"] < sum(found["memory"].values()) < 0.92 * H200 and found["remedy"] == f"{FRACTION}=0.92"
    told = f"of the 104.9 GiB that jax allocates of the 139.8 GiB of a device; to fit it needs {FRACTION}=0.92"
    assert told in summary(found)
    monkeypatch.setenv(FRACTION, "0.92")
    found = describe(config, topology=topology)
    assert found["remedy"] is None and found["capacity"] == pytest.approx(0.92 * H200)
    assert "of the 128.6 GiB that jax allocates of the 139.8 GiB of a device\n" in summary(found) + "\n"
    assert "of the 95.0 GiB that a device has" in summary(describe(config, topology=parse_topology("v5p:1x1x1")))


def test_a_search_keeps_to_what_jax_allocates(monkeypatch):
    target, config = make_target(parse_topology("h200:1x2")), run(60)
    found = search(config, [target])
    largest = max(layout.memory for layout in found.fitting)
    assert largest <= ROOM * 0.75 * H200 and found.remediable
    report = search_report.describe(found, found.fastest(), [], None)
    remedy = report["remedy"]
    assert (remedy["setting"], remedy["layouts"]) == (f"{FRACTION}=0.92", len(found.remediable))
    assert f"memory  with {FRACTION}=0.92 {len(found.remediable):,} more fit" in search_report.render(report)
    monkeypatch.setenv(FRACTION, "0.92")
    more = search(config, [make_target(parse_topology("h200:1x2"))])
    assert len(more.fitting) == len(found.fitting) + len(found.remediable) and not more.remediable
    assert "FRACTION" not in search_report.render(search_report.describe(more, more.fastest(), [], None))


def test_a_search_that_finds_nothing_says_what_would_fit():
    with pytest.raises(ConfigError, match=rf"Set {FRACTION}=0.92, with which [\d,]+ fit, or search on more devices"):
        search(run(88), [make_target(parse_topology("h200:1x1"))]).fastest()
    with pytest.raises(ConfigError, match=r"on h200:1x1\. Search on more devices"):
        search(run(140), [make_target(parse_topology("h200:1x1"))]).fastest()


@pytest.mark.parametrize(
    ("line", "setting"), [(["plan"], "most"), (["plan", "--search"], "92"), (["preflight"], "0"), (["plan"], "nan")]
)
@pytest.mark.usefixtures("in_this_process")
def test_a_fraction_that_is_none_is_told(tmp_path, capsys, monkeypatch, line, setting):
    (tmp_path / "run.yaml").write_text(CONFIG)
    verb, *options = line
    monkeypatch.setenv(FRACTION, setting)
    assert main([verb, str(tmp_path / "run.yaml"), *options, "--topology", "h100:1x1"]) == 2
    told = capsys.readouterr().err
    assert f"{FRACTION}={setting}: " in told and "Set it to 0.92, or unset it" in told and told.count("\n") == 1


CONFIG = """
model: {layers: 4, width: 256, heads: 8, context: 128, vocab: 512, dropout: 0, attention_dropout: 0}
data: {source: synthetic}
optim: {lr: 1.0e-3}
train: {steps: 10, batch: 16}
"""


@pytest.mark.parametrize(
    ("peak", "fits", "remedy"), [(100, True, None), (120, False, f"{FRACTION}=0.92"), (135, False, None)]
)
def test_preflight_judges_a_peak_by_what_jax_allocates(monkeypatch, peak, fits, remedy):
    config, target = run(2), make_target(parse_topology("h200:1x1"))
    plan = plan_on(config, target.topology)
    found = preflight._memory(config, plan, target, {"temporaries": 0, "peak": peak * GIB, "arguments": 0})
    assert (found["capacity"], found["device"]) == (int(0.75 * H200), int(H200))
    assert (found["peak"] <= found["capacity"], found["remedy"]) == (fits, remedy)


def test_what_a_step_computes_at_a_time_does_not_depend_on_it(monkeypatch):
    """Processes that differ in it would run other programs."""
    config = run(24, parallel={"microbatches": 2})
    plan = plan_on(config, parse_topology("h200:1x1"))
    without = memory.tokens_per_chunk(config, plan)
    assert without
    for value in ("0.3", "0.92"):
        monkeypatch.setenv(FRACTION, value)
        assert memory.tokens_per_chunk(config, plan) == without
