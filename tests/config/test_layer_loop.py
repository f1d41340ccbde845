"""model.scan, resolved: auto unrolls on GPUs where a loop would copy what it saves."""

import pytest

from spmd_lm.config.layer_loop import choose_loop
from tests.helpers import make_config


def choice(platform="gpu", scan="auto", layers=4, prefetch=False, scatters=False, **sections):
    model = {"layers": layers, "scan": scan} | sections.pop("model", {})
    return choose_loop(make_config(model=model, **sections), platform, prefetch=prefetch, scatters=scatters)


def test_auto_unrolls_on_gpus_alone():
    assert [choice(platform).scan for platform in ("gpu", "tpu", "cpu")] == [False, True, True]
    assert choice(scan=True).scan and not choice("cpu", scan=False).scan
    assert not choice(layers=48).scan and choice(layers=49).scan
    assert not choice("cpu", scan=True, layers=1).scan


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"parallel": {"pipe": 2, "microbatches": 2}}, "pipeline"),
        ({"prefetch": True}, "prefetch"),
        ({"scatters": True}, "scattered"),
        ({"model": {"share_layers": True}}, "share"),
        ({"remat": {"policy": "full"}}, "remat.policy=full"),
        ({"remat": {"policy": "block"}}, "remat.policy=block"),
        ({"layers": 50}, "48 layers"),
    ],
)
def test_auto_keeps_the_loop_where_unrolling_gains_little(options, why):
    assert (found := choice(**options)).scan and why in found.why


@pytest.mark.parametrize("policy", ["none", "selective", "residual"])
def test_what_recomputes_less_is_unrolled(policy):
    assert not choice(remat={"policy": policy}).scan
