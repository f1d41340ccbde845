"""The fraction of a GPU's memory that jax allocates, by the variables that jaxlib reads."""

import inspect

import pytest
from jaxlib import xla_client

from spmd_lm.errors import ConfigError
from spmd_lm.runtime.devices import devices_present
from spmd_lm.runtime.gpu_memory import ALLOCATORS, FRACTION, NEW_FRACTION, allocated_share, gpu_memory


@pytest.mark.parametrize(
    ("environment", "share", "variable"),
    [
        ({}, 0.75, FRACTION),
        ({FRACTION: "0.92"}, 0.92, FRACTION),
        ({FRACTION: ".5"}, 0.5, FRACTION),
        ({FRACTION: "1"}, 1.0, FRACTION),
        ({NEW_FRACTION: "0.6"}, 0.6, NEW_FRACTION),  # the other one may not be set beside it
        ({FRACTION: "", NEW_FRACTION: ""}, 0.75, FRACTION),
        ({"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}, 0.75, FRACTION),
        ({"XLA_PYTHON_CLIENT_ALLOCATOR": "BFC", FRACTION: "0.8"}, 0.8, FRACTION),
        ({"XLA_PYTHON_CLIENT_ALLOCATOR": "platform", FRACTION: "0.5"}, 1.0, FRACTION),
        ({"XLA_PYTHON_CLIENT_ALLOCATOR": "cuda_async"}, 1.0, FRACTION),
    ],
)
def test_the_share_is_what_jaxlib_takes(environment, share, variable):
    assert allocated_share(environment) == (share, variable)


@pytest.mark.parametrize("text", ["most", "0", "-0.5", "92", "1.01", "nan", "inf", "0,9"])
@pytest.mark.parametrize("variable", [FRACTION, NEW_FRACTION])
def test_what_is_no_part_of_a_gpu_is_refused(variable, text):
    message = rf"{variable}={text}: .* above 0 and at most 1. Set it to 0.92, or unset it for 0.75"
    with pytest.raises(ConfigError, match=message):
        allocated_share({variable: text})


def test_what_jaxlib_refuses_is_refused():
    with pytest.raises(ConfigError, match=r"are both set, which jax refuses. Unset one"):
        allocated_share({FRACTION: "0.9", NEW_FRACTION: "0.9"})
    with pytest.raises(ConfigError, match=r"XLA_PYTHON_CLIENT_ALLOCATOR=cuda: jax has no such allocator. Unset it"):
        allocated_share({"XLA_PYTHON_CLIENT_ALLOCATOR": "cuda"})


def test_jaxlib_reads_the_variables_of_these_names():
    text = inspect.getsource(xla_client.generate_pjrt_gpu_plugin_options)
    assert {FRACTION, NEW_FRACTION, "XLA_PYTHON_CLIENT_ALLOCATOR"} <= {*text.split("'")}
    assert all(name in ALLOCATORS for name in ("default", "platform", "bfc", "cuda_async", "vmm") if name in text)


def test_jax_does_not_start_on_gpus_with_a_fraction_that_it_would_not_take(monkeypatch):
    """jax would lose its plugin, and run on the CPU."""
    monkeypatch.setenv(FRACTION, "most")
    assert devices_present()[0].platform == "cpu"
    monkeypatch.setattr("spmd_lm.runtime.devices.GPU_FILES", ("/dev/null",))
    with pytest.raises(ConfigError, match=f"{FRACTION}=most"):
        devices_present()


def test_without_a_driver_nothing_tells_a_gpu_s_memory(monkeypatch):
    def missing(name):
        raise OSError(name)

    monkeypatch.setattr("ctypes.CDLL", missing)
    assert gpu_memory(0) is None
