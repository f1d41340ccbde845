"""XLA's compiler options, by setting and hardware."""

import itertools

import pytest

from spmd_lm.config.load import load
from spmd_lm.errors import ConfigError
from spmd_lm.runtime.xla_options import options_for, table

V5P = {"platform": "tpu", "kind": "TPU v5"}
DETERMINISTIC = "xla_gpu_deterministic_ops"
OFFLOAD = "xla_tpu_enable_sparse_core_collective_offload_all_gather"
ABSENT_H100 = {"platform": "gpu", "kind": "NVIDIA H100 80GB HBM3", "absent": True}


def names(setting, deterministic=False, **hardware) -> dict:
    return options_for(setting, deterministic=deterministic, **hardware).values


def test_every_row_says_why_and_where_that_was_seen():
    assert table()
    for row in table():
        assert row.platform in ("cpu", "gpu", "tpu") and row.options and (row.absent or row.present)
        assert row.reason and row.measured and row.compilers and row.source
        assert not any(name.startswith("-") for name in row.options)


def test_no_hardware_has_an_option_twice():
    for row in table():
        for kind, absent in itertools.product(row.kinds or [""], (False, True)):
            options = options_for("auto", row.platform, kind, absent=absent).options
            assert len({option.name for option in options}) == len(options)


def test_auto_is_the_table_s_for_this_hardware():
    assert "xla_gpu_autotune_level" in names("auto", **ABSENT_H100)
    assert names("auto", **ABSENT_H100 | {"absent": False}) == {"xla_gpu_dot_merger_threshold_mb": 0}
    assert not names("auto", platform="cpu", kind="cpu", absent=False)


def test_options_that_need_an_environment_are_set_where_it_is(monkeypatch):
    monkeypatch.delenv("LIBTPU_INIT_ARGS", raising=False)
    here, absent = (options_for("auto", **V5P, absent=absent) for absent in (False, True))
    assert not here.options and OFFLOAD in absent.values
    add = "add --deepsea_chip_config_name=megachip_tccontrol to LIBTPU_INIT_ARGS of every process before it starts"
    assert here.advice[0].startswith(f"xla     options are not set: {add}") and len(here.advice) == 1
    assert absent.advice[0].startswith(f"xla     where this runs, {add}") and len(absent.advice) == 1
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--xla_a=1 --deepsea_chip_config_name=megachip_tccontrol")
    for each in (False, True):
        chosen = options_for("auto", **V5P, absent=each)
        assert OFFLOAD in chosen.values and not chosen.advice
    assert options_for("none", **V5P, absent=False).lines == []


@pytest.mark.parametrize(
    ("arguments", "set_"),
    [
        ("-deepsea_chip_config_name=megachip_tccontrol", True),
        ("'--deepsea_chip_config_name=megachip_tccontrol' --xla_a=1", True),
        ("--deepsea_chip_config_name=megachip_tccontrol --deepsea_chip_config_name=default", False),
        ("--deepsea_chip_config_name=default --deepsea_chip_config_name=megachip_tccontrol", True),
        ("--deepsea_chip_config_name", False),
        ("--xla_a='", False),
    ],
)
def test_libtpu_s_arguments_are_read_as_libtpu_reads_them(monkeypatch, arguments, set_):
    monkeypatch.setenv("LIBTPU_INIT_ARGS", arguments)
    assert bool(options_for("auto", **V5P, absent=False).options) is set_


def test_a_kind_is_not_the_one_that_its_name_begins_with():
    assert not names("auto", platform="tpu", kind="TPU v5 lite", absent=True)
    assert OFFLOAD in names("auto", platform="tpu", kind="TPU v6 lite", absent=True)


def test_none_and_options_of_one_s_own_replace_the_table():
    assert names("none", **V5P, absent=True) == {}
    assert names({"xla_a": 1}, **V5P, absent=True) == {"xla_a": 1}


def test_what_a_compiler_cannot_do_without_is_always_set():
    """Explicit settings override it."""
    required = {"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False}
    assert names("none", **ABSENT_H100) == required and not names("none", **ABSENT_H100 | {"absent": False})
    assert names({"xla_a": 1}, **ABSENT_H100) == required | {"xla_a": 1}
    assert names({"xla_gpu_autotune_level": 2}, **ABSENT_H100) == required | {"xla_gpu_autotune_level": 2}


@pytest.mark.parametrize("setting", ["auto", "none", {"xla_a": 1}])
def test_determinism_is_set_where_a_run_asks_for_it_whatever_its_own_options_are(setting):
    for absent in (False, True):
        hardware = ABSENT_H100 | {"absent": absent}
        plain, deterministic = (names(setting, deterministic=each, **hardware) for each in (False, True))
        assert deterministic == plain | {"xla_gpu_deterministic_ops": True} and DETERMINISTIC not in plain
        said = options_for(setting, deterministic=True, **hardware)
        assert said.deterministic == {DETERMINISTIC: True} and any(DETERMINISTIC in line for line in said.lines)
    for platform, kind in (("cpu", "cpu"), ("tpu", "TPU v5 lite")):
        said = options_for(setting, platform, kind, absent=False, deterministic=True)
        assert DETERMINISTIC not in said.values and said.deterministic == {}


def test_options_are_set_in_a_file_or_on_the_command_line():
    config = load("configs/debug.yaml", ["run.compiler_options={xla_a: true, xla_b: 3}"])
    assert config.run.compiler_options == {"xla_a": True, "xla_b": 3}


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ("fast", ": expected auto, none or {name: value}, got 'fast'. Did you mean 'auto'?"),
        ("3", ": expected auto, none or {name: value}, got 3."),
        ("{a: 1, b: {c: 1}}", ".b: expected true or false, a whole number, a number or text, got a mapping."),
        ("{a: }", ".a: expected true or false, a whole number, a number or text, got nothing."),
        ("{1: 2}", '.1: expected text, got 1. Quote it: "1".'),
    ],
)
def test_wrong_options_are_refused(value, problem):
    with pytest.raises(ConfigError) as error:
        load("configs/debug.yaml", [f"run.compiler_options={value}"])
    assert str(error.value) == f"command line: run.compiler_options{problem}"
