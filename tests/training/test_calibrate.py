"""Measured speeds: by programs that read, write and multiply what is counted, written as rows of a table, read back,
and taken before published ones."""

import copy
import math
import os
import re
from importlib.resources import files
from types import SimpleNamespace

import jax
import pytest
import yaml
from jax.experimental.compilation_cache.compilation_cache import reset_cache

from spmd_lm.analysis.compiled_flops import compiled_flops
from spmd_lm.analysis.hlo import HloModule
from spmd_lm.analysis.memory_traffic import KernelSpeeds, memory_traffic
from spmd_lm.analysis.topology import is_installed, parse_topology
from spmd_lm.cli import main
from spmd_lm.cost_model.hardware import GIB, find_hardware, read_hardware
from spmd_lm.errors import ConfigError
from spmd_lm.planning.search import make_target, make_targets
from spmd_lm.runtime.outputs import require_replaceable
from spmd_lm.training import calibrate

CONFIG = """
model: {layers: 2, width: 64, heads: 4, context: 64, vocab: 256}
data: {source: synthetic}
optim: {lr: 1.0e-3}
precision: {compute: float32}
train: {steps: 10, batch: 8}
run: {simulate_devices: 8}
"""


@pytest.mark.slow
def test_what_was_measured_is_read_back(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(calibrate, "REPEATS", 1)
    monkeypatch.setattr(calibrate, "ELEMENTS", 2**16)
    (tmp_path / "run.yaml").write_text(CONFIG)
    table = tmp_path / "cpu.yaml"
    assert main(["bench", str(tmp_path / "run.yaml"), "--calibrate", str(table)]) == 0
    assert "GFLOP/s a device" in capsys.readouterr().out
    measured = read_hardware(table)
    hardware = find_hardware("cpu", measured)
    figures = (hardware.peaks["float32"], hardware.memory.size, hardware.memory.bandwidth, hardware.links.link)
    assert all(0 < figure < math.inf for figure in (*figures, hardware.kernel_overhead, hardware.links.latency.start))
    assert 1e6 < hardware.peaks["float32"] < 1e13 and hardware.products.half_inner >= 0
    target = make_target(parse_topology("cpu:8"), measured)
    assert target.hardware.devices_per_host == 8 and target.profile.idle_is_free
    assert find_hardware("NVIDIA H100 80GB HBM3", measured) == find_hardware("NVIDIA H100 80GB HBM3")
    line = ["plan", str(tmp_path / "run.yaml"), "--search", "--topology", "cpu:8", "--top", "0"]
    assert main([*line, "--hardware", str(table)]) == 0 and "cpu:8" in capsys.readouterr().out


@pytest.fixture(params=["cpu:2", "h200:1x1", "h200:1x2"])
def here(request):
    """Devices that need not be here."""
    topology = parse_topology(request.param)
    if topology.platform == "gpu" and not is_installed("jax_plugins.xla_cuda13"):
        pytest.skip(f"jax_plugins.xla_cuda13 is not installed: nothing compiles for {request.param}")
    jax.config.update("jax_enable_compilation_cache", False)  # what is compiled for others cannot be loaded from it
    reset_cache()  # jax asks once whether there is one
    yield calibrate.Calibration("bfloat16", topology.devices())
    jax.config.update("jax_enable_compilation_cache", True)
    reset_cache()


def compiled(here, body, *shapes):
    return HloModule(here.compiled(body, *shapes).as_text())


def kernels_of(module, least):
    """(count, bytes read, bytes written) of kernels that move `least` bytes or more.  A CPU's loop has a counter."""
    rows = memory_traffic(module, KernelSpeeds(1e12, 1e12))["kernels"]
    return [(row["count"], row["read"], row["written"]) for row in rows if row["bytes"] >= least * row["count"]]


def test_a_pass_reads_and_writes_its_array_and_nothing_else(here):
    """A pass is one kernel, without a copy."""
    size = 2 * 2**22  # bytes of a device's array
    for passes in (calibrate.FEW, calibrate.MANY):
        module = compiled(here, here.passes(passes), (2**22,))
        assert kernels_of(module, 0) == [(passes, size, size)]


def test_small_kernels_are_as_many_as_are_counted(here):
    """A GPU's program has no loop, whose counters and conditions are kernels."""
    for times in (5, 9):
        module = compiled(here, here.small_kernels(times), (8,))
        assert kernels_of(module, 0 if here.platform == "gpu" else 17) == [(times, 16, 16)]


def test_products_are_those_that_are_counted(here):
    """Their order is kept: a matrix by its own transpose first would be fewer FLOPs."""
    rows, inner = 1024, 256
    for pairs in (calibrate.FEW_PAIRS, calibrate.MANY_PAIRS):
        module = compiled(here, calibrate.products(pairs), (rows, inner), (inner, rows))
        assert compiled_flops(module) == pairs * 2 * 2 * rows * rows * inner
        assert not any(i.opcode in ("while", "copy") for i in module.computations[module.entry])


def test_what_is_multiplied_is_random_and_stays_as_large():
    here = calibrate.Calibration("float32")
    left, right = here.random_array((64, 32)), here.random_array((32, 64))
    assert len({*left.ravel().tolist()}) > 0.9 * left.size and left.sharding == here.sharding
    largest = abs(here.compiled(calibrate.products(5), (64, 32), (32, 64))(left, right)).max()
    assert 1e-3 < largest < 1e3


@pytest.mark.parametrize(
    ("stats", "driver", "environment", "gib"),
    [
        ({"bytes_limit": 60 * GIB}, 80 * GIB, {}, 80),
        ({"bytes_limit": 60 * GIB}, None, {}, 80),  # three quarters
        ({"bytes_limit": 72 * GIB}, None, {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.9"}, 80),
        (None, None, {"XLA_PYTHON_CLIENT_ALLOCATOR": "platform"}, 79.109),  # the table's
        ({"bytes_limit": 60 * GIB}, None, {"XLA_PYTHON_CLIENT_ALLOCATOR": "cuda_async"}, 79.109),
    ],
)
def test_a_gpu_has_more_memory_than_jax_allocates(monkeypatch, stats, driver, environment, gib):
    gpus = [gpu_named("NVIDIA H100 80GB HBM3", stats)] * 2
    assert measured_memory(monkeypatch, gpus, driver, environment) == pytest.approx(gib * GIB)


def test_a_gpu_of_unknown_memory_is_told(monkeypatch):
    with pytest.raises(ConfigError, match=r"neither jax nor CUDA's driver .* Unset XLA_PYTHON_CLIENT_ALLOCATOR"):
        measured_memory(
            monkeypatch, [gpu_named("NVIDIA RTX 1", None)], None, {"XLA_PYTHON_CLIENT_ALLOCATOR": "platform"}
        )


def gpu_named(kind, stats):
    return SimpleNamespace(platform="gpu", device_kind=kind, local_hardware_id=0, memory_stats=lambda: stats)


def measured_memory(monkeypatch, devices, driver, environment):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(calibrate, "gpu_memory", lambda _: driver)
    return calibrate.memory_size(devices)


def test_kernels_of_compiled_steps_reach_what_the_table_says():
    """The measured speeds of products and copies do not matter."""
    known = find_hardware("NVIDIA H200")
    shares = calibrate.of_measured(known, 790e12, 4.3e12)
    assert shares["fused"] * 4.3e12 == pytest.approx(known.compiled.fused * known.memory.bandwidth)
    assert shares["attention"] * 790e12 == pytest.approx(known.compiled.attention * known.peak_flops)
    assert shares["products"] <= 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "cannot be read"),
        ("[]: {", "not a table"),
        ("a: 1", "not a table"),
        ("[]", "it has no rows"),
        ("[3]", "row 1, must be keys and values"),
        ("[" * 3000, "not a table"),
    ],
)
def test_another_file_is_no_table_of_hardware(tmp_path, text, message):
    if text is not None:
        (tmp_path / "cpu.yaml").write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_hardware(tmp_path / "cpu.yaml")


PUBLISHED = yaml.safe_load(files("spmd_lm.cost_model").joinpath("hardware.yaml").read_text())


def test_the_table_itself_is_one(tmp_path):
    (tmp_path / "all.yaml").write_text(yaml.safe_dump(PUBLISHED))
    assert len(read_hardware(tmp_path / "all.yaml")) == len(PUBLISHED) > 10


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("device_kind", 5),
        ("device_kind", " "),
        ("cores", None),
        ("link", 0),
        ("link", math.nan),
        ("kernel_overhead", -1),
        ("peak", {"float32": 60}),
        ("memory.bandwidth", 0),
        ("memory.size", -79),
        ("products.tile", 256),
        ("products.tile", [256, 0]),
        ("products.limit", "0.8"),
        ("latency.speed", 1),
        ("memory.size", 1e300),
        ("products.limit", 1e-320),
    ],
)
def test_a_row_that_makes_no_sense_names_its_key(key, value, tmp_path):
    (row,) = (copy.deepcopy(row) for row in PUBLISHED if row["device_kind"] == "nvidia h100")
    *within, last = key.split(".")
    (row[within[0]] if within else row)[last] = value
    (tmp_path / "gpu.yaml").write_text(yaml.safe_dump([row]))
    with pytest.raises(ConfigError, match=rf"row 1, {re.escape(key)}.*Write one with spmd-lm bench") as refused:
        read_hardware(tmp_path / "gpu.yaml")
    assert "\n" not in str(refused.value)


def test_a_row_without_links_is_told_what_is_missing(tmp_path):
    (row,) = (copy.deepcopy(row) for row in PUBLISHED if row["device_kind"] == "nvidia h100")
    del row["link"]
    (tmp_path / "gpu.yaml").write_text(yaml.safe_dump([row]))
    with pytest.raises(ConfigError, match="row 1, link: field required"):
        read_hardware(tmp_path / "gpu.yaml")


def test_what_was_measured_comes_before_what_is_published(tmp_path):
    """jax may write its name otherwise, or shorter."""
    (row,) = (row for row in PUBLISHED if row["device_kind"] == "nvidia h100")
    table = tmp_path / "gpu.yaml"
    for kind in ("NVIDIA H100", " nvidia"):
        table.write_text(yaml.safe_dump([row | {"device_kind": kind, "source": "here"}]))
        (target,) = make_targets([parse_topology("h100:1x8")], table)
        assert target.hardware.source == "here"
    message = r"its rows are of 'nvidia', and of no --topology. Add one whose device_kind is tpu v5 lite"
    with pytest.raises(ConfigError, match=message):
        make_targets([parse_topology("v5e:2x2")], table)


def test_what_a_row_leaves_out_may_be_null(tmp_path):
    (row,) = (copy.deepcopy(row) for row in PUBLISHED if row["device_kind"] == "nvidia h100")
    (tmp_path / "gpu.yaml").write_text(yaml.safe_dump([row | {"network": None, "kernel_overhead": None}]))
    (hardware,) = read_hardware(tmp_path / "gpu.yaml")
    assert hardware.links.network is hardware.kernel_overhead is None


def test_a_pipe_is_not_read_for_a_table(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="cannot be read: it is not a regular file"):
        read_hardware(tmp_path / "pipe")


def test_only_a_measured_table_is_replaced(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(calibrate, "calibrate", lambda _: pytest.fail("measured"))
    (tmp_path / "run.yaml").write_text(CONFIG)
    assert main(["bench", str(tmp_path / "run.yaml"), "--calibrate", str(tmp_path / "run.yaml")]) == 2
    assert "is there, and not from an earlier --calibrate" in capsys.readouterr().err
    table = tmp_path / "cpu.yaml"
    for size in (1, 2):
        calibrate.write_row({"size": size}, table)
        require_replaceable("--calibrate", table, calibrate.MEASURED)
    assert table.read_text().endswith("- size: 2\n") and len([*tmp_path.iterdir()]) == 2


def test_a_table_that_cannot_be_written_is_told_before_it_is_measured(tmp_path, capsys):
    (tmp_path / "run.yaml").write_text(CONFIG)
    assert main(["bench", str(tmp_path / "run.yaml"), "--calibrate", "/nowhere/cpu.yaml"]) == 2
    assert "--calibrate /nowhere/cpu.yaml: cannot be written" in capsys.readouterr().err
