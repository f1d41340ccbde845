"""Slots of experts, by a loop over tokens; what goes there and comes back, its gradient, and grouped products."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spmd_lm.config.mlp import MoE
from spmd_lm.errors import ConfigError
from spmd_lm.ops.experts import (
    GROUPED,
    Tiles,
    biases_of_rows,
    combine,
    dispatch,
    make_routes,
    matmul_of_each,
    row_tile,
    sort_by_expert,
)


def slots_by_hand(chosen, experts, group, capacity):
    """The slot of each choice, [tokens, k]; the number of slots for none."""
    (tokens, k), groups = chosen.shape, len(chosen) // group
    slots, taken = np.full(chosen.shape, experts * groups * capacity), np.zeros((experts, groups), int)
    for rank in range(k):
        for token in range(tokens):
            expert, of = chosen[token, rank], token // group
            if expert < experts and taken[expert, of] < capacity:
                slots[token, rank] = (expert * groups + of) * capacity + taken[expert, of]
                taken[expert, of] += 1
    return slots


@pytest.mark.parametrize(
    ("experts", "k", "group", "capacity"), [(4, 2, 6, 2), (4, 1, 12, 1), (3, 3, 4, 4), (8, 2, 3, 1)]
)
def test_slots_are_those_of_a_loop(experts, k, group, capacity):
    r = np.random.default_rng(experts)
    chosen = np.stack([r.permutation(experts)[:k] for _ in range(12)]).astype(np.int32)
    chosen[[2, 7]] = experts  # padding
    routes = make_routes(jnp.asarray(chosen), experts, group, capacity)
    wanted = slots_by_hand(chosen, experts, group, capacity)
    assert routes.slot_of.tolist() == wanted.tolist()
    size = experts * (12 // group) * capacity
    found = [np.argwhere((wanted == slot).any(1)).ravel() for slot in range(size)]
    assert routes.token_in.tolist() == [each[0] if len(each) else 12 for each in found]
    assert int(routes.dropped) == ((wanted == size) & (chosen < experts)).sum()
    in_groups = chosen.reshape(-1, group * k)
    assert routes.counts.tolist() == [[(row == e).sum() for e in range(experts)] for row in in_groups]


def test_tokens_go_and_come_back():
    """And gradients are those of indexing."""
    r = np.random.default_rng(0)
    chosen, x = r.integers(0, 4, (8, 1), np.int32), r.standard_normal((8, 3)).astype(np.float32)
    chosen = jnp.asarray(np.concatenate([chosen, (chosen + 1) % 4], 1))
    gates, routes = jnp.asarray(r.uniform(0, 1, (8, 2)).astype(np.float32)), make_routes(chosen, 4, 8, 3)

    def ours(x, gates):
        return combine(jnp.sin(dispatch(x, routes)), gates, routes)

    def plain(x, gates):
        kept = (routes.slot_of < 12)[..., None]
        return (jnp.sin(x)[:, None] * gates[..., None] * kept).sum(1)

    arguments, g = (jnp.asarray(x), gates), jnp.asarray(r.standard_normal((8, 3)), jnp.float32)
    (y, vjp), (wanted, wanted_vjp) = (jax.vjp(f, *arguments) for f in (ours, plain))
    for got, want in zip((y, *vjp(g)), (wanted, *wanted_vjp(g)), strict=True):
        np.testing.assert_allclose(got, want, atol=1e-6)


def test_capacity_is_that_of_decimals():
    """1.1 x 1 x 100 / 10 is 11.000000000000002 in binary."""
    cases = [
        (1.1, 1, 100, 10, 11),
        (1.25, 2, 4096, 8, 1280),
        (1.0, 2, 7, 4, 4),
        (4.0, 2, 6, 4, 6),
        ("none", 2, 6, 4, 6),
    ]
    for capacity, k, tokens, experts, wanted in cases:
        assert MoE(kind="moe", experts=experts, per_token=k, capacity=capacity).slots(tokens) == wanted


def test_slots_can_be_counted():
    with pytest.raises(ConfigError, match=r"2,147,483,648 slots .* Use fewer tokens"):
        jax.eval_shape(lambda x: make_routes(x, 2048, 2**20, 2**20), jax.ShapeDtypeStruct((2**20, 2), jnp.int32))


EXPERTS, K, UNUSED = 5, 2, 2


def choices(tokens: int) -> jax.Array:
    """Without one expert, and with padding."""
    r = np.random.default_rng(tokens)
    chosen = np.stack([r.permutation([e for e in range(EXPERTS) if e != UNUSED])[:K] for _ in range(tokens)])
    chosen[[1, tokens // 2]] = EXPERTS
    return jnp.asarray(chosen, jnp.int32)


def test_sorted_slots_are_those_of_a_sort():
    chosen = choices(20)
    routes, sizes = sort_by_expert(chosen, EXPERTS, 10, 16)
    flat = np.asarray(chosen).ravel()
    order = sorted(range(40), key=lambda i: (flat[i], i))
    assert routes.token_in.tolist() == [i // K if flat[i] < EXPERTS else 20 for i in order] + [20] * 8
    for (token, rank), expert in np.ndenumerate(chosen):
        slot = int(routes.slot_of[token, rank])
        assert slot == (order.index(token * K + rank) if expert < EXPERTS else 48)
    wanted = [(flat == e).sum() for e in range(EXPERTS)]
    assert sizes.tolist() == [*wanted[:-1], wanted[-1] + 48 - sum(wanted)] and wanted[UNUSED] == 0
    assert routes.counts.tolist() == [[(part == e).sum() for e in range(EXPERTS)] for part in (flat[:20], flat[20:])]
    assert int(routes.dropped) == 0


@pytest.mark.parametrize(
    ("product", "tokens", "widths"),
    [
        pytest.param("megablox", 75, (24, 40), marks=pytest.mark.slow),
        ("traced", 75, (24, 40)),
        pytest.param("megablox", 331, (136, 1100), marks=pytest.mark.slow),
    ],
)
def test_a_grouped_product_is_that_of_buffers(product, tokens, widths):
    """With its gradients, to 1e-5 of the largest: groups of odd sizes, an empty one, rows that no tile divides."""
    r, (width, hidden), chosen = np.random.default_rng(1), widths, choices(tokens)
    shapes = (tokens, width), (EXPERTS, width, hidden), (EXPERTS, hidden), (EXPERTS, width, hidden), (tokens, K)
    arguments = [jnp.asarray(r.standard_normal(shape), jnp.float32) for shape in shapes]
    options = {"interpret": True} if product == "megablox" else {}

    def grouped(x, up, bias, down, gates):
        routes, sizes = sort_by_expert(chosen, EXPERTS, tokens, GROUPED[product].row_tile(chosen.size, EXPERTS))
        expert_of = jnp.repeat(jnp.arange(EXPERTS), sizes, total_repeat_length=len(routes.token_in))
        matmul = functools.partial(GROUPED[product].matmul, sizes=sizes, **options)
        h = jnp.sin(matmul(dispatch(x, routes), up) + biases_of_rows(bias, expert_of))
        return combine(matmul(h, down, transpose=True), gates, routes)

    def in_buffers(x, up, bias, down, gates):
        routes = make_routes(chosen, EXPERTS, tokens, tokens)
        h = jnp.sin(matmul_of_each(dispatch(x, routes).reshape(EXPERTS, tokens, -1), up) + bias[:, None])
        return combine(matmul_of_each(h, down, transpose=True).reshape(-1, width), gates, routes)

    g = jnp.asarray(r.standard_normal((tokens, width)), jnp.float32)
    (y, vjp), (wanted, wanted_vjp) = (jax.vjp(jax.jit(f), *arguments) for f in (grouped, in_buffers))
    for got, want in zip((y, *vjp(g)), (wanted, *wanted_vjp(g)), strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-5 * np.abs(want).max())


def test_tiles():
    assert Tiles(512, 2)(8192, 4096, 1792) == (512, 1024, 896)
    assert Tiles(128, 4)(256, 4096, 40) == (128, 512, 40)
    assert [row_tile(rows, 8) for rows in (512 * 8 - 1, 512 * 8)] == [128, 512]
