"""What devices that share rows compute and hold, by a layer's trace."""

import jax
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from spmd_lm.cost_model.dataflow import equations, inner_jaxprs
from spmd_lm.cost_model.layer_trace import LayerTrace, trace_layer
from spmd_lm.ops import attention as attention_module
from spmd_lm.ops.attention import attention
from spmd_lm.ops.attention_spec import AttentionSpec
from spmd_lm.resolve import abstract_plan
from tests.helpers import FLOAT32, make_config
from tests.ops.test_ring_attention import replaced

WIDTH, HEADS = 256, 8
BLOCK = AttentionSpec.block


def traced(kernel: str, time: int, **parallel) -> LayerTrace:
    model = {"layers": 2, "width": WIDTH, "heads": HEADS, "context": time, "dropout": 0.0}
    config = make_config(
        model=model | {"attention_dropout": 0.0},
        parallel={"data": 4 // parallel.get("context", 1)} | parallel,
        precision=FLOAT32,
    )
    return trace_layer(config, abstract_plan(config, 4, "gpu", ""), kernel=kernel)


def of_scores(one: LayerTrace) -> tuple[float, float]:
    """FLOPs of attention's matmuls, forward and backward, for one row."""
    return tuple(
        each.attention_flops + sum(p.times * p.product.flops for p in each.products if p.per_row == "batch")
        for each in one[:2]
    )


@pytest.mark.parametrize("devices", [2, 4])
def test_every_device_of_a_causal_ring_computes_as_many_scores(devices):
    """Whole blocks of chunks: its own three, and two of each other device's."""
    tokens = 2 * BLOCK
    ring = traced("chunked", devices * tokens, context=devices, context_attention="ring")
    a_product = 2 * (2 * devices + 1) * (tokens / 2) ** 2 * WIDTH
    assert of_scores(ring) == (2 * a_product, 5 * a_product)
    fused = traced("cudnn", devices * tokens, context=devices, context_attention="ring")
    hidden = 2 * (tokens / 2) ** 2 / 2 * 2 * WIDTH  # half of two chunks with themselves
    assert of_scores(fused) == (2 * (a_product - hidden), 5 * (a_product - hidden))


def test_devices_with_some_heads_compute_a_rows_scores_with_these():
    whole, some = (traced("cudnn", 1024, **each) for each in ({}, {"context": 4, "context_attention": "heads"}))
    assert [n / 4 for n in of_scores(whole)] == [*of_scores(some)]


def test_blocks_of_scores_count_whole_and_go_through_memory():
    """Of four blocks of a row's scores three have visible pairs."""
    one, fused = traced("chunked", 2 * BLOCK), traced("cudnn", 2 * BLOCK)
    assert of_scores(one)[0] == 2 * 2 * 3 * BLOCK**2 * WIDTH
    assert of_scores(fused)[0] == 2 * 2 * 2 * BLOCK**2 * WIDTH
    block = HEADS * BLOCK**2 * 4
    assert block < one.forward.peak - fused.forward.peak < 3 * block
    assert one.forward.traffic - fused.forward.traffic > 3 * 2 * block


@pytest.mark.parametrize(("form", "arrays"), [("heads", 1), ("ring", 0)])
def test_activations_are_divided(form, arrays):
    """Heads have what attention returns twice: before its exchange and after."""
    alone, shared = traced("cudnn", 4096), traced("cudnn", 4096, context=4, context_attention=form)
    assert shared.saved == pytest.approx(alone.saved / 4 + arrays * 1024 * WIDTH * 4, rel=0.005)


def sends_of_what_came_in() -> list[list[bool]]:
    """For each loop over the hops of a causal ring, forward and backward: whether each of its sends is of an array that
    the turn began with, and not of what its kernels computed."""
    model = {"width": WIDTH, "heads": HEADS, "context": 1024}
    config = make_config(model=model, parallel={"data": 1, "context": 4, "context_attention": "ring"})
    plan = abstract_plan(config, 4, "gpu", "")
    spec, tokens = AttentionSpec(HEADS, HEADS, kernel="traced"), P(None, "context")

    def both(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, ...]:
        return jax.vjp(lambda *x: attention(*x, spec), q, k, v)[1](q)

    x = jax.ShapeDtypeStruct((1, 1024, WIDTH), "float32")
    (outer,) = jax.make_jaxpr(plan.shard_map(both, (tokens,) * 3, (tokens,) * 3))(x, x, x).eqns
    found = [each for equation in next(inner_jaxprs(outer)).eqns for each, _ in equations(equation)]
    turns = [each.params["jaxpr"].jaxpr for each in found if each.primitive is lax.scan_p]
    return [[e.invars[0] in turn.invars for e in turn.eqns if e.primitive.name == "ppermute"] for turn in turns]


def test_what_a_ring_sends_does_not_wait_for_its_kernels():
    """Keys, values and their gradients leave as they came in: sends may run beside the kernel's calls."""
    assert sends_of_what_came_in() == [[True] * 2, [True] * 4]


LATE = {
    "keys and values": (
        "return (self.send(kv), turn(carry, kv, (self.device - n) % self.devices)), None",
        """kv, carry = lax.optimization_barrier((kv, turn(carry, kv, (self.device - n) % self.devices)))
            return (self.send(kv), carry), None""",
        [[False] * 2, [True] * 2 + [False] * 2],
    ),
    "gradients": ("return d_q, d_kv\n", "return d_q, ring.send(d_kv)\n", [[True] * 2, [True] * 4 + [False] * 2]),
}


@pytest.mark.parametrize("late", LATE)
def test_a_send_after_the_kernels_is_told(late, monkeypatch):
    *replacement, found = LATE[late]
    monkeypatch.setattr(attention_module, "ring_attention", replaced(*replacement))
    assert sends_of_what_came_in() == found
