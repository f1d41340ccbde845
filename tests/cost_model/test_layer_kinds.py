"""What layers of several kinds cost: means of what adds up, the most of what is held one after the other."""

import pytest

from spmd_lm.analysis.topology import parse_topology
from spmd_lm.cost_model import memory
from spmd_lm.cost_model.compute_time import layer_seconds
from spmd_lm.cost_model.hardware import find_hardware
from spmd_lm.cost_model.kernels import Kernels
from spmd_lm.planning.preflight import fused_attention_flops
from spmd_lm.resolve import abstract_plan
from tests.helpers import FLOAT32, make_config

SIZES = {"layers": 3, "width": 64, "context": 128, "attention_dropout": 0.0}
WIDE = {"kind": "block", "mlp_width": 1024}
PRECISION = FLOAT32 | {"compute": "bfloat16"}


def planned(period, **sections):
    config = make_config(model=SIZES | {"period": period}, parallel={"data": 1}, precision=PRECISION, **sections)
    return config, abstract_plan(config, 1, "gpu", parse_topology("h100:1x8").device_kind)


PLANS = {"narrow": planned(None), "wide": planned([WIDE]), "both": planned([WIDE, "block"])}
"""Two of the three layers of `both` are wide."""


def test_what_is_saved_adds_up_and_what_is_held_does_not():
    narrow, wide, both = (memory.saved_activations(*PLANS[name]) for name in PLANS)
    assert both == pytest.approx((2 * wide + narrow) / 3) and wide > narrow
    narrow, wide, both = (memory.fullest_point(*PLANS[name]) for name in PLANS)
    assert {point.name for point in (narrow, wide, both)} == {memory.BLOCKS}
    assert both.workspace == wide.workspace > narrow.workspace
    weights = [memory.table(*PLANS[name])["parameters"] for name in PLANS]
    assert weights[2] - weights[0] == pytest.approx(2 / 3 * (weights[1] - weights[0]))


def test_seconds_are_the_mean_of_the_layers():
    kernels = Kernels(find_hardware("NVIDIA H100 80GB HBM3"), "bfloat16", 0.9, 0.0)
    narrow, wide, both = (layer_seconds(*PLANS[name], kernels) for name in PLANS)
    assert both == pytest.approx([(2 * w + n) / 3 for w, n in zip(wide, narrow, strict=True)])
    assert wide.forward > narrow.forward and wide.backward > narrow.backward


def test_a_fused_kernel_skips_what_a_window_hides():
    full, windows = (fused_attention_flops(*planned(period)) for period in (None, [{"kind": "window", "span": 16}]))
    half = fused_attention_flops(*planned([{"kind": "window", "span": 16}, "block"]))
    assert windows / full == pytest.approx((16 * 128 - 16 * 15 / 2) / 128**2 / 0.5)
    assert half == pytest.approx((2 * windows + full) / 3)


def test_prefetch_holds_a_period_at_a_time():
    """Its first layer, and of the next one's."""

    def in_use(period):
        sections = {"model": SIZES | {"layers": 8, "period": period}, "precision": PRECISION}
        config = make_config(parallel={"data": 8, "zero": 3, "prefetch": "on"}, **sections)
        return memory._Step(config, abstract_plan(config, 8, "gpu", "")).in_use

    layer = in_use(["block"])
    assert in_use([{"kind": "window", "span": 8}, "block"]) > 1.5 * layer
