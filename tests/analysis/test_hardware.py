import types

import jax
import pytest

from spmd_lm.analysis.hardware import peak


def device(kind, platform="gpu"):
    return types.SimpleNamespace(device_kind=kind, platform=platform)


@pytest.mark.parametrize(
    ("found", "dtype", "flops"),
    [
        (device("NVIDIA H100 80GB HBM3"), "bfloat16", 989e12),
        (device("NVIDIA H100 80GB HBM3"), "float32", 989e12 / 2),
        (device("NVIDIA H100 PCIe"), "bfloat16", 756e12),
        (device("NVIDIA A100-SXM4-40GB"), "bfloat16", 312e12),
        (device("TPU v5 lite", "tpu"), "bfloat16", 197e12),  # not the 'TPU v5' that it begins with
        (device("TPU v5", "tpu"), "bfloat16", 459e12),
        (device("TPU v5", "tpu"), "float32", 459e12),
    ],
)
def test_published_peaks(found, dtype, flops):
    assert peak(found, dtype).flops == flops
    assert "published" in peak(found, dtype).source


def test_an_unknown_device_is_measured_and_shared():
    cpu = jax.devices()[0]
    whole, eighth = peak(cpu, "float32"), peak(cpu, "float32", share=8)
    assert 1e8 < whole.flops < 1e14 and eighth.flops == whole.flops / 8
    assert "measured" in whole.source and "float32" in whole.source and whole.flops


def test_what_nobody_publishes_is_not_guessed():
    assert peak(device("NVIDIA GeForce RTX 4090"), "bfloat16") is None
    assert peak(device("NVIDIA H100 80GB HBM3"), "float64") is None
