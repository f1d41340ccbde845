"""Defaults of prefetch and collective matmul: the runs that get them."""

import pytest

from spmd_lm.config.overlap import BRANCHES, LEAST_TOKENS, collective_matmul_branches, prefetches
from tests.helpers import make_config

H100, PLENTY = "NVIDIA H100 80GB HBM3", 4 * LEAST_TOKENS
IN_PARTS = {"model": 4, "sequence": True}


@pytest.mark.parametrize(
    ("setting", "parallel", "platform", "expected"),
    [
        ("auto", {"zero": 3}, "gpu", True),
        ("auto", {"zero": 3}, "tpu", False),
        ("auto", {"zero": 3, "pipe": 2}, "gpu", False),
        ("auto", {"zero": 2}, "gpu", False),
        ("on", {"zero": 3}, "tpu", True),
        ("on", {"zero": 3, "pipe": 2}, "cpu", True),
        ("off", {"zero": 3}, "gpu", False),
    ],
)
def test_prefetch_is_automatic_on_gpus_without_a_pipeline(setting, parallel, platform, expected):
    config = make_config(model={"layers": 8}, parallel={"prefetch": setting} | parallel)
    assert prefetches(config, platform) is expected


@pytest.mark.parametrize(
    ("setting", "parallel", "kind", "tokens", "expected"),
    [
        ("auto", IN_PARTS, H100, PLENTY, BRANCHES),
        ("auto", IN_PARTS, "NVIDIA H200 141GB HBM3e", PLENTY, BRANCHES),
        ("auto", IN_PARTS, H100, PLENTY - 1, ()),
        ("auto", IN_PARTS, "NVIDIA A100-SXM4-80GB", PLENTY, ()),
        ("auto", IN_PARTS, "TPU v5", PLENTY, ()),
        ("auto", IN_PARTS | {"sequence": False}, H100, PLENTY, ()),
        ("auto", IN_PARTS | {"partitioner": "types"}, H100, PLENTY, ()),
        ("on", IN_PARTS, "cpu", 1, BRANCHES),
        ("on", IN_PARTS, "TPU v5", 1, ("mlp",)),
        ("off", IN_PARTS, H100, PLENTY, ()),
    ],
)
def test_products_are_in_parts_automatically_where_a_step_is_shorter_for_it(setting, parallel, kind, tokens, expected):
    config = make_config(parallel={"collective_matmul": setting} | parallel)
    platform = "tpu" if kind.startswith("TPU") else "gpu"
    assert collective_matmul_branches(config, platform, kind, tokens) == expected


@pytest.mark.parametrize(("kind", "platform"), [(H100, "gpu"), ("TPU v5", "tpu")])
def test_products_of_experts_are_not_in_parts(kind, platform):
    """Their rows are slots of buffers; attention's may still be."""
    config = make_config(model={"mlp": {"kind": "moe", "experts": 4}}, parallel=IN_PARTS | {"collective_matmul": "on"})
    assert collective_matmul_branches(config, platform, kind, PLENTY) == ("attention",)
