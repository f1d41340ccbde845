import pytest

from spmd_lm.config.expert_products import choose_product
from tests.helpers import FLOAT32, make_config

BFLOAT16 = FLOAT32 | {"compute": "bfloat16"}


@pytest.mark.parametrize(
    ("platform", "moe", "precision", "parallel", "product", "why"),
    [
        ("tpu", {}, BFLOAT16, {}, "megablox", "grouped product for tpu"),
        ("tpu", {}, FLOAT32, {"model": 2}, "megablox", "grouped product for tpu"),
        ("tpu", {}, {"compute": "float64"}, {}, "buffers", "not precision.compute=float64"),
        ("tpu", {}, BFLOAT16, {"expert": 2}, "buffers", "parallel.expert=2 sends has a fixed size"),
        ("tpu", {"capacity": 4.0}, BFLOAT16, {}, "buffers", "a capacity"),
        ("gpu", {}, BFLOAT16, {}, "buffers", "no grouped product for gpu"),
        ("cpu", {}, BFLOAT16, {}, "buffers", "no grouped product for cpu"),
    ],
)
def test_the_chosen_product_and_why(platform, moe, precision, parallel, product, why):
    mlp = {"kind": "moe", "experts": 8, "capacity": "none"} | moe
    config = make_config(model={"mlp": mlp}, precision=precision, parallel={"data": 1} | parallel)
    choice = choose_product(config, platform)
    assert choice.product == product and why in choice.why


def test_a_dense_model_has_no_product():
    assert choose_product(make_config(precision=BFLOAT16), "tpu") == ("buffers", "no experts")
