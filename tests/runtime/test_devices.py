import os
import subprocess
import sys

import jax
import pytest

from spmd_lm.runtime.compiler_workarounds import COMPILER_STACKS, IN_ORDER, deepen_compiler_stacks


def run(code: str, **environment: str) -> str:
    """Output of a new process."""
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    return done.stdout.strip()


SEEN = "import jax, os; print(jax.device_count(), jax.default_backend(), os.environ['NPROC'], os.environ['XLA_FLAGS'])"
SIMULATE = "from spmd_lm.runtime.devices import simulate_devices; simulate_devices(3); "


def test_jax_sees_the_simulated_devices_and_a_pool_large_enough():
    assert run(SIMULATE + SEEN) == f"3 cpu 64 {IN_ORDER} --xla_force_host_platform_device_count=3"


def test_other_flags_stay_and_the_count_is_replaced():
    flags = "--xla_force_host_platform_device_count=5 --xla_cpu_enable_fast_math=false"
    seen = run(SIMULATE + SEEN, XLA_FLAGS=flags, NPROC="40", JAX_PLATFORMS="tpu")
    assert seen == f"3 cpu 40 --xla_cpu_enable_fast_math=false {IN_ORDER} --xla_force_host_platform_device_count=3"
    own = IN_ORDER.replace("false", "true")
    assert run(SIMULATE + SEEN, XLA_FLAGS=own) == f"3 cpu 64 {own} --xla_force_host_platform_device_count=3"


@pytest.mark.parametrize(
    "own", ["", "--xla_a=1", "--fibers_default_thread_stack_size=65536", "--xla_a='b c' --undefok=xla_a"]
)
def test_a_tpu_s_compiler_has_stacks_and_what_the_user_sets_holds(monkeypatch, own):
    """The last of two equal flags counts."""
    monkeypatch.setenv("LIBTPU_INIT_ARGS", own)
    for _ in range(2):
        deepen_compiler_stacks()
        assert os.environ["LIBTPU_INIT_ARGS"] == f"{COMPILER_STACKS} {own}".rstrip()


ZERO_1 = """
model: {layers: 8, width: 256, heads: 8, context: 128, vocab: 2048, dropout: 0, attention_dropout: 0}
data: {source: synthetic}
parallel: {data: 4, model: 2, zero: 1, microbatches: 2, sequence: true}
precision: {compute: float32}
optim: {lr: 1.0e-3}
train: {steps: 100, batch: 32}
run: {simulate_devices: 8, compilation_cache: none}
"""
WIDE = ["parallel.data=8", "parallel.model=1", "parallel.microbatches=1", "parallel.sequence=false"]
WIDE += ["model.width=512", "model.context=32", "train.batch=16"]


@pytest.mark.slow
@pytest.mark.parametrize("overrides", [[], WIDE], ids=["microbatches", "one-microbatch"])
def test_scatters_of_one_group_do_not_meet(overrides, tmp_path):
    """XLA runs operations of a large step side by side; compiled anew."""
    (tmp_path / "run.yaml").write_text(ZERO_1)
    command = [sys.executable, "-m", "spmd_lm", "bench", str(tmp_path / "run.yaml"), *overrides, "--steps", "4"]
    environment = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-500:]


def test_jax_may_be_imported_already_but_not_started():
    assert run("import jax; " + SIMULATE + "print(jax.device_count())") == "3"


def test_a_jax_that_already_runs_on_other_devices_is_refused():
    code = "import jax; jax.devices(); from spmd_lm.runtime.devices import simulate_devices as s; s(1); s(3)"
    done = subprocess.run([sys.executable, "-c", code], env={"JAX_PLATFORMS": "cpu"}, capture_output=True, text=True)
    assert "ConfigError: run.simulate_devices=3: jax already runs on 1 cpu device(s). " in done.stderr


def test_the_x64_fixture_enables_float64(x64):
    assert jax.numpy.ones(1).dtype == "float64"


@pytest.mark.parametrize("platforms", ["cuda", "rocm"])
def test_devices_that_jax_does_not_find_are_refused_in_a_line(platforms):
    code = "from spmd_lm.errors import ConfigError\nfrom spmd_lm.runtime.devices import devices_present\n"
    code += "try: devices_present()\nexcept ConfigError as error: print(error)"
    said = run(code, JAX_PLATFORMS=platforms, CUDA_VISIBLE_DEVICES="")
    assert said.startswith(f"JAX_PLATFORMS={platforms}: jax does not find these devices: ")
    assert said.endswith(". Unset it, or set it to cpu.") and "\n" not in said and "(set" not in said


AUDIT = """
import sys, types, jax
report = lambda *arguments: {"platform": jax.default_backend()}
sys.modules["spmd_lm.planning.audit"] = types.SimpleNamespace(audit=report, render=str)
from spmd_lm import api
api.run_in_child = lambda target, function, *arguments: function(*arguments)
print(api.audit(api.load_config("configs/debug.yaml"), "h100:1x8")["platform"])
"""


def test_absent_hardware_is_audited_without_the_devices_that_are_here():
    assert run(AUDIT, JAX_PLATFORMS="rocm") == "cpu"
