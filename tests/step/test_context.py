"""Rows that several devices share are the same run as on one device, whichever way attention reaches over them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spmd_lm.axes import TIME
from spmd_lm.generation.generate import Generator
from spmd_lm.generation.sampling import Sampling
from spmd_lm.models import context, experts, transformer
from spmd_lm.ops import attention, ring_attention
from spmd_lm.ops.collectives import local_slice
from spmd_lm.step import train_step
from spmd_lm.step.program import Program
from tests.helpers import (
    ORIGINAL_BERT,
    TASKS,
    alone,
    assert_same_run,
    degrees,
    device_batch,
    make_config,
    program,
    train_steps,
    trained,
    trained_reference,
)

pytestmark = pytest.mark.usefixtures("x64")

GPT = {"attention_dropout": 0.1}
LLAMA = {"kv_heads": 2, "positions": "rotary", "norm_type": "rms", "activation": "swiglu", "attention_dropout": 0.1}
UNDROPPED = {"attention_dropout": 0.0}  # random bits are half of what is compiled of a causal ring
MASKED = {"objective": {"kind": "masked_lm", "sentence_order": True}, "optim": {"eps": 1e-6}}
MOE = {"kind": "moe", "experts": 4, "capacity": 1.0, "group": 2}

PACKED = {"data": {"source": "tokens", "path": "never opened", "pack": True}}

HEADS, RING = ({"context_attention": form} for form in ("heads", "ring"))
IDLE = {"run_idle_stages": True}
RUNS = {
    "ring of 4, packed, sequence, ZeRO-3": (
        {"context": 4, "model": 2, "sequence": True, "zero": 3, "microbatches": 2} | RING,
        LLAMA | UNDROPPED,
        PACKED,
    ),
}
MORE = {
    "context 2 x model 2, sequence, ZeRO-3": (
        {"context": 2, "model": 2, "sequence": True, "zero": 3, "microbatches": 2} | HEADS,
        LLAMA,
        PACKED,
    ),
    "masked, context 4": ({"context": 4, "zero": 1} | HEADS, ORIGINAL_BERT, MASKED),
    "packed, learned positions": ({"context": 2, "zero": 1, "microbatches": 2} | HEADS, GPT, PACKED),
    "context 8": ({"context": 8} | HEADS, GPT, {}),
    "fewer kv heads than devices": ({"context": 4, "data": 2, "zero": 2} | HEADS, LLAMA | {"kv_heads": 1}, {}),
    "kv heads that model does not divide": ({"context": 2, "model": 4, "zero": 1} | HEADS, LLAMA, {}),
    "pipe 2 x data 2 x context 2": (
        {"pipe": 2, "data": 2, "context": 2, "zero": 2, "microbatches": 2} | HEADS,
        LLAMA,
        {"remat": {"policy": "full"}},
    ),
    "breadth first": (
        {"pipe": 2, "chunks": 2, "context": 2, "zero": 3, "microbatches": 4, "schedule": "breadth_first"} | HEADS,
        GPT | {"layers": 4},
        {},
    ),
    "replica 2 x data 2 x context 2, prefetch": (
        {"replica": 2, "data": 2, "context": 2, "zero": 3, "prefetch": "on"} | HEADS,
        GPT,
        {},
    ),
    "remat selective, unrolled": (
        {"context": 2, "data": 2, "model": 2} | HEADS,
        GPT | {"scan": False},
        {"remat": {"policy": "selective"}},
    ),
    "collective matmul": (
        {"context": 2, "model": 4, "sequence": True, "zero": 1, "collective_matmul": "on"} | HEADS,
        LLAMA,
        {},
    ),
    "windows and caps": (
        {"context": 2, "data": 2} | HEADS,
        {"period": ["block", {"kind": "window", "span": 3}], "attention_softcap": 0.01},  # scores are as large
        {},
    ),
    "experts": (
        {"context": 2, "expert": 2, "model": 2, "sequence": True, "zero": 3} | HEADS,
        {"mlp": MOE | {"group": 4, "shared": 24}},
        {},
    ),
    "experts, dropless, padding": (
        {"context": 4, "expert": 2} | HEADS,
        ORIGINAL_BERT | {"mlp": MOE | {"capacity": "none", "group": None}},
        MASKED,
    ),
    "masked, sequence, ZeRO-3": (
        {"context": 2, "model": 2, "data": 2, "sequence": True, "zero": 3} | HEADS,
        ORIGINAL_BERT,
        MASKED,
    ),
    **{
        task: ({"context": 2, "model": 2, "sequence": True, "microbatches": 2} | HEADS, ORIGINAL_BERT, sections)
        for task, sections in TASKS.items()
    },
    "ring of 2, packed, sequence, ZeRO-3": (
        {"context": 2, "model": 2, "data": 2, "sequence": True, "zero": 3, "microbatches": 2} | RING,
        LLAMA,
        PACKED,
    ),
    "ring of 2, learned positions": ({"context": 2, "zero": 1, "microbatches": 2} | RING, GPT, PACKED),
    "ring of 8, learned positions": ({"context": 8, "zero": 2} | RING, GPT, {}),
    "ring of 8, packed": ({"context": 8, "zero": 3} | RING, LLAMA, PACKED),
    "ring, masked": ({"context": 4, "zero": 1} | RING, ORIGINAL_BERT, MASKED),
    "ring, masked, sequence, ZeRO-3": (
        {"context": 2, "model": 2, "data": 2, "sequence": True, "zero": 3} | RING,
        ORIGINAL_BERT | {"attention_dropout": 0.1},
        MASKED,
    ),
    "ring, kv heads that model does not divide": ({"context": 2, "model": 4, "zero": 1} | RING, LLAMA | UNDROPPED, {}),
    "ring, pipe 2 x data 2": (
        {"pipe": 2, "data": 2, "context": 2, "zero": 2, "microbatches": 2} | IDLE | RING,
        LLAMA | UNDROPPED,
        {"remat": {"policy": "full"}} | PACKED,
    ),
    "ring, breadth first": (
        {"pipe": 2, "chunks": 2, "context": 4, "zero": 3, "microbatches": 4, "schedule": "breadth_first"} | IDLE | RING,
        UNDROPPED | {"layers": 4},
        {"optim": {"eps": 1e-6}},  # a unit's first gradient is rounding alone
    ),
    "ring, replica 2 x data 2, prefetch": (
        {"replica": 2, "data": 2, "context": 2, "zero": 3, "prefetch": "on"} | RING,
        UNDROPPED,
        {},
    ),
    "ring, remat selective, unrolled": (
        {"context": 2, "data": 2, "model": 2} | RING,
        UNDROPPED | {"scan": False},
        {"remat": {"policy": "selective"}},
    ),
    "ring, remat full": ({"context": 4, "zero": 3} | RING, LLAMA | UNDROPPED, {"remat": {"policy": "full"}} | PACKED),
    "ring, collective matmul": (
        {"context": 2, "model": 4, "sequence": True, "zero": 1, "collective_matmul": "on"} | RING,
        LLAMA | UNDROPPED,
        {},
    ),
    "ring, experts in half a shard": (
        {"context": 2, "expert": 2, "model": 2, "sequence": True, "zero": 3} | RING,
        UNDROPPED | {"mlp": MOE | {"group": 4, "shared": 24}},
        {},
    ),
    "ring, experts, dropless, padding": (
        {"context": 4, "expert": 2} | RING,
        ORIGINAL_BERT | {"mlp": MOE | {"capacity": "none", "group": None}},
        MASKED,
    ),
    **{
        f"ring, {task}": ({"context": 4, "model": 2, "sequence": True, "microbatches": 2} | RING, ORIGINAL_BERT, each)
        for task, each in TASKS.items()
    },
}


def config_of(parallel: dict, model: dict, **sections):
    return make_config(
        model={"layers": 2} | model, parallel={"data": 1, "partitioner": "manual"} | parallel, **sections
    )


@pytest.mark.parametrize(
    ("parallel", "model", "sections"),
    [*RUNS.values(), *(pytest.param(*run, marks=pytest.mark.slow) for run in MORE.values())],
    ids=[*RUNS, *MORE],
)
def test_a_layout_computes_the_reference(parallel, model, sections):
    config = config_of(parallel, model, **sections)
    assert_same_run(trained(config), trained_reference(alone(config)))


FORMS = pytest.mark.parametrize("form", [pytest.param(HEADS, id="heads"), pytest.param(RING, id="ring")])


def assert_close(got, want, tolerance: float = 1e-12) -> None:
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        a, b = np.asarray(a), np.asarray(b)
        np.testing.assert_allclose(a.reshape(b.shape), b, rtol=tolerance, atol=tolerance)


@pytest.mark.slow
@FORMS
@pytest.mark.parametrize(
    ("model", "sections"),
    [(LLAMA, {}), (LLAMA, PACKED), (ORIGINAL_BERT, MASKED), *((ORIGINAL_BERT, each) for each in TASKS.values())],
    ids=["causal", "packed", "masked", *TASKS],
)
def test_evaluation_and_logits_are_one_device_s(form, model, sections):
    layout = {"context": 2, "model": 2, "sequence": True, "zero": 3, "microbatches": 2}
    config = config_of(form | layout, model, **sections)
    (p, one), batches = map(program, (config, alone(config))), []
    params, whole = p.init().params, one.init().params
    batches = device_batch(p, 0), device_batch(one, 0)
    assert_close(p.evaluate(params, batches[0]), one.evaluate(whole, batches[1]))
    vocab = (*(slice(None),) * 3, slice(config.model.vocab))  # of a padded one
    logits = [
        {name: x[vocab] if name == "tokens" else x for name, x in each.forward(weights, batch).items()}
        for each, weights, batch in zip((p, one), (params, whole), batches, strict=True)
    ]
    assert_close(*logits)
    if config.objective.predicts_tokens:
        assert_close(p.score(params, batches[0]), one.score(whole, batches[1]))


@pytest.mark.slow
@FORMS
def test_a_prompt_longer_than_a_device_s_share_is_continued(form):
    config = config_of(form | {"context": 4, "model": 2, "sequence": True, "zero": 3}, LLAMA)
    prompts, texts = [np.arange(n) * 7 % 61 for n in (13, 3)], []
    for p in map(program, (config, alone(config))):
        params = jax.tree.map(lambda w: 8 * w, p.init().params)
        texts.append(Generator(p, 2, Sampling(tokens=6, greedy=True)).generate(params, prompts))
    for got, want in zip(*texts, strict=True):
        assert got.tolist() == want.tolist()


# ---- faults that context parallelism is known for; each is told


def positions_begin_anew_on_each_device(patch):
    patch.setattr(transformer, "row_positions", lambda size, name: jnp.arange(size, dtype=jnp.int32))


def documents_are_a_device_s(patch):
    local = train_step.local_batch

    def of_first_tokens(batch):
        cut = local(batch)
        return cut.__class__(**{**vars(cut), "row_segments": jnp.tile(cut.segments, (1, 1, 2))})

    patch.setattr(train_step, "local_batch", of_first_tokens)


def labels_count_on_every_device(patch):
    patch.setattr(context, "on_first", lambda x: x)


def dropout_of_heads_is_numbered_by_device(patch):
    patch.setattr(attention, "local_slice", lambda x, name, dim: x[: len(x) // 2])


def keys_are_repeated_side_by_side(patch):
    patch.setattr(attention, "repeat_heads", lambda x: jnp.tile(x, (1, 1, 2, 1)))


def balance_is_a_device_s(patch):
    patch.setattr(experts, "psum", lambda x, name: x)


def chunks_of_a_ring_lie_in_order(patch):
    patch.setattr(ring_attention, "time_positions", lambda size, device: device * size + jnp.arange(size))


def tokens_of_a_ring_are_taken_in_order(patch):
    patch.setattr(context, "own_tokens", lambda x, dim: local_slice(x, TIME, dim % x.ndim))


FAULTS = [
    (positions_begin_anew_on_each_device, HEADS, GPT, {}),
    (positions_begin_anew_on_each_device, RING, GPT, {}),
    (documents_are_a_device_s, HEADS, GPT, PACKED),
    (documents_are_a_device_s, RING, GPT, PACKED),
    (labels_count_on_every_device, HEADS, ORIGINAL_BERT, MASKED),
    (labels_count_on_every_device, RING, ORIGINAL_BERT, MASKED),
    (dropout_of_heads_is_numbered_by_device, HEADS, GPT, {}),
    (keys_are_repeated_side_by_side, HEADS, LLAMA | {"kv_heads": 4}, {}),
    (balance_is_a_device_s, HEADS, {"mlp": MOE}, {}),
    (balance_is_a_device_s, RING, {"mlp": MOE}, {}),
    (chunks_of_a_ring_lie_in_order, RING, GPT, {}),
    (tokens_of_a_ring_are_taken_in_order, RING, GPT, {}),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "form", "model", "sections"),
    FAULTS,
    ids=[f"{each[0].__name__}-{each[1]['context_attention']}" for each in FAULTS],
)
def test_a_fault_is_told(fault, form, model, sections, monkeypatch):
    config = config_of(form | {"context": 2, "zero": 1}, model, **sections)
    want = trained_reference(config)
    fault(monkeypatch)
    with pytest.raises(AssertionError):
        assert_same_run(train_steps(Program(config, jax.devices()[: degrees(config).devices])), want)
