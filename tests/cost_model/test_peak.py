import types

import jax
import pytest

from spmd_lm.cost_model.flops import peak


def fake_device(kind, platform="gpu"):
    return types.SimpleNamespace(device_kind=kind, platform=platform)


@pytest.mark.parametrize(
    ("device", "dtype", "flops"),
    [
        (fake_device("NVIDIA H100 80GB HBM3"), "bfloat16", 989e12),
        (fake_device("NVIDIA H100 80GB HBM3"), "float32", 989e12 / 2),
        (fake_device("NVIDIA H100 PCIe"), "bfloat16", 756e12),
        (fake_device("NVIDIA A100-SXM4-40GB"), "bfloat16", 312e12),
        (fake_device("TPU v5 lite", "tpu"), "bfloat16", 197e12),  # not the 'TPU v5' that it begins with
        (fake_device("TPU v5", "tpu"), "bfloat16", 459e12),
        (fake_device("TPU v5", "tpu"), "float32", 459e12),
    ],
)
def test_published_peaks(device, dtype, flops):
    assert peak(device, dtype).flops == flops
    assert "published" in peak(device, dtype).source


def test_a_cpu_is_measured_and_shared():
    cpu = jax.devices()[0]
    whole, eighth = peak(cpu, "float32"), peak(cpu, "float32", simulated_devices=8)
    assert 1e8 < whole.flops < 1e14 and eighth.flops == whole.flops / 8
    assert "measured" in whole.source and "float32" in whole.source and whole.flops


def test_an_unpublished_peak_is_none():
    assert peak(fake_device("NVIDIA GeForce RTX 4090"), "bfloat16") is None
    assert peak(fake_device("NVIDIA H100 80GB HBM3"), "float64") is None
