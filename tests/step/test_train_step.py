"""The matrix: one run, every layout, against the reference, in float64; collectives written out, and inserted by XLA.

1e-12 for sums, 1e-11 for leaves of the state: three steps of Adam divide what rounding has touched by its own size."""

import itertools

import jax
import numpy as np
import pytest

from spmd_lm.parallel import mesh
from spmd_lm.step.program import Program
from tests import reference
from tests.helpers import (
    FLOAT32,
    LAYOUTS,
    ORIGINAL_BERT,
    TASKS,
    assert_close,
    assert_equal,
    assert_states_close,
    canonical,
    degrees,
    device_batch,
    host_batch,
    make_config,
    partitioned,
    program,
    run_of,
    shard_bytes,
    train_steps,
    trained,
    trained_reference,
)

pytestmark = pytest.mark.usefixtures("x64")

QUICK = [
    ("data4-model2", 1, "scan", "full"),
    ("data2-model4-sequence-zero1", 2, "unrolled", "none"),
]
QUICK_TYPES = [("data4-model2", 1, "scan", "full")]
REMAT = ("none", "full", "selective", "residual")
slow = pytest.mark.slow


LATER = [
    ("data8-zero3", 1, "unrolled", "selective"),
    ("data4-model2", 1, "scan", "none"),
    ("data4-model2-zero2", 2, "scan", "none"),
    ("replica2-data2-model2-sequence-zero3", 2, "scan", "full"),
    ("data8", 2, "unrolled", "none"),
    ("model8", 1, "unrolled", "full"),
    ("data4-model2", 4, "scan", "selective"),
    ("data8-zero1", 1, "scan", "none"),
    ("data2-model4", 2, "unrolled", "selective"),
    ("replica2-data2-model2", 2, "scan", "residual"),
]

OFFLOADED = [
    ("data8-zero3", 1, "scan"),
    ("data2-model4-sequence-zero1", 2, "unrolled"),
    ("replica2-data2-model2-sequence-zero3", 2, "scan"),
    ("data4-model2-zero2", 4, "scan"),
    ("one", 1, "unrolled"),
]


def matrix():
    """The quick cases, some later, of each layout's others two in 24, a diagonal through all layouts, and some whose
    blocks' inputs rest on the host."""
    for partitioner, case in itertools.product(("manual", "types"), OFFLOADED):
        yield pytest.param(partitioner, *case, "offload", marks=slow)
    for (at, layout), (number, how) in itertools.product(
        enumerate(LAYOUTS), enumerate(itertools.product((1, 2, 4), ("scan", "unrolled"), REMAT))
    ):
        case, rows = (layout, *how), 16 // how[0]
        diagonal = (number - 5 * at) % 12 == 0 and rows % degrees(run_of(layout)).batch_shards == 0
        if case in QUICK or case in LATER or diagonal:
            yield pytest.param("manual", *case, marks=() if case in QUICK else slow)
            yield pytest.param("types", *case, marks=() if case in QUICK_TYPES else slow)


def lowered(config) -> str:
    p = program(config)
    return p.train_step.lower(p.abstract_state(), p.abstract_batch()).as_text()


@pytest.mark.parametrize(("remat", "offloads"), [("full", False), ("offload", True)])
def test_the_blocks_inputs_rest_on_the_host_if_asked_to(remat, offloads):
    bound = program(run_of("one", 1, "scan", remat))
    traced = bound.train_step.trace(bound.abstract_state(), bound.abstract_batch())
    assert ("<host>" in str(traced.jaxpr)) == offloads


def assert_same_run(got, want, states=1e-11):
    for figures in ("losses", "norms", "rates"):
        assert getattr(got, figures) == pytest.approx(getattr(want, figures), rel=1e-12), figures
    assert_states_close(got.last, want.last, states)


@pytest.mark.parametrize(("partitioner", "layout", "microbatches", "form", "remat"), [*matrix()])
def test_every_layout_computes_the_reference(partitioner, layout, microbatches, form, remat):
    config = run_of(layout, microbatches, form, remat)
    got, want = trained(partitioned(config, partitioner)), trained_reference(make_config())
    assert want.norms.min() > config.optim.clip > 0
    assert_equal(got.first, want.first)
    assert_same_run(got, want)
    assert_same_run(got, trained(partitioned(config, "manual")))


CERTAIN = {"dropout": 0.0, "attention_dropout": 0.0}
OTHER = {
    "model": CERTAIN | {"tie_embeddings": False, "use_bias": False, "activation": "gelu", "mlp_width": 48, "vocab": 59},
    "optim": {"clip": 0.0, "decay": "linear", "warmup": 1, "weight_decay": 0.01},
}


SEVERAL_AXES = [
    pytest.param({"model": 8, "sequence": True}, {"model": (4, 2)}, marks=slow),
    pytest.param({"model": 8, "sequence": True, "collective_matmul": "on"}, {"model": (2, 4)}, marks=slow),
    pytest.param({"pipe": 2, "model": 4}, {"model": (2, 2)}, marks=slow),
    pytest.param({"data": 4, "model": 2, "zero": 3}, {"data": (2, 2)}, marks=slow),
]


@pytest.mark.parametrize(("parallel", "sizes"), SEVERAL_AXES, ids=str)
def test_an_axis_that_is_several_of_the_mesh_computes_the_reference(parallel, sizes, monkeypatch):
    """A TPU's torus has such axes."""
    want, config = trained_reference(make_config()), make_config(parallel=parallel)
    monkeypatch.setattr(mesh, "_axis_sizes", lambda layout: {axis: (n,) for axis, n in layout.sizes.items()} | sizes)
    bound = Program(config, jax.devices()[: degrees(config).devices])
    assert {f"{axis}{i}" for axis, on in sizes.items() for i in range(len(on))} < bound.plan.sizes.keys()
    assert_same_run(train_steps(bound), want)


@pytest.mark.parametrize(
    "sections", [{}, pytest.param({"model": {"norm_type": "rms"}}, marks=slow)], ids=["layer", "rms"]
)
@pytest.mark.slow
def test_what_a_gpu_computes_in_one_pass_is_the_reference(sections, monkeypatch, as_on_a_gpu):
    """Statistics of norms and normalizers of logits, of a table whose last shard has padding too."""
    got = train_steps(Program(run_of("data2-model4", 2, "unrolled", **sections), jax.devices()))
    assert {each.__name__ for each in as_on_a_gpu} >= {"_in_one_pass", "optimization_barrier"}
    monkeypatch.undo()
    assert_same_run(got, trained_reference(make_config(**sections)))


@pytest.mark.slow
@pytest.mark.parametrize("zero", [1, 2, 3])
def test_degrees_that_divide_nothing_are_padded(zero):
    """3 does not divide a width of 32: shards are of 11 of 33 rows, and no number changes."""
    config = run_of("one", 2, train={"batch": 12})
    parallel = config.parallel.model_copy(update={"data": 3, "model": 2, "zero": zero})
    got = trained(config.model_copy(update={"parallel": parallel}))
    assert_same_run(got, trained_reference(make_config(train={"batch": 12})))


@slow
def test_a_model_without_ties_biases_and_dropout_computes_the_reference():
    got, want = trained(run_of("data4-model2", 2, **OTHER)), trained_reference(make_config(**OTHER))
    assert "tokens" in got.last.params["head"] and "bias" not in got.last.params["head"]["norm"]
    assert_same_run(got, want)


BERT = {"model": ORIGINAL_BERT | {"activation": "gelu"}}
LLAMA = {"norm_type": "rms", "positions": "rotary", "activation": "swiglu", "kv_heads": 4, "mlp_width": 40}
MODELS = {
    "bert": BERT,
    "bert, norms before": {"model": BERT["model"] | {"norm": "pre", "tie_embeddings": False}},
    "llama": {"model": LLAMA | {"use_bias": False, "tie_embeddings": False}},
    "one layer for all": {"model": {"share_layers": True, "layers": 3}},
}
MODELS |= {name: BERT | sections for name, sections in TASKS.items()}
ON = [
    pytest.param("bert", "replica2-data2-model2-sequence-zero3", 2, "scan", "full", marks=slow),
    pytest.param("bert", "data4-model2", 2, "scan", "none", marks=slow),
    pytest.param("bert", "data2-model4-sequence-zero1", 1, "unrolled", "residual", marks=slow),
    pytest.param("bert, norms before", "data2-model4-sequence-zero1", 2, "scan", "selective", marks=slow),
    pytest.param("classification", "data2-model4-sequence-zero1", 2, "scan", "none", marks=slow),
    pytest.param("classification", "data4-model2-zero2", 1, "unrolled", "full", marks=slow),
    pytest.param("multiple choice", "data2-model4-sequence-zero1", 2, "unrolled", "none", marks=slow),
    pytest.param("multiple choice", "data4-model2", 1, "scan", "none", marks=slow),
    pytest.param("span", "data4-model2-sequence", 1, "scan", "none", marks=slow),
    pytest.param("span", "replica2-data2-model2-sequence-zero3", 2, "unrolled", "full", marks=slow),
    ("llama", "data2-model4-zero3", 2, "scan", "selective"),
    pytest.param("llama", "data2-model4-sequence-zero1", 1, "unrolled", "full", marks=slow),
    pytest.param("one layer for all", "data4-model2-zero2", 2, "scan", "none", marks=slow),
    pytest.param("one layer for all", "data8-zero3", 1, "unrolled", "full", marks=slow),
]


@pytest.mark.parametrize(("model", "layout", "microbatches", "form", "remat"), ON)
@pytest.mark.parametrize("partitioner", ["manual", pytest.param("types", marks=slow)])
@pytest.mark.slow
def test_every_model_computes_the_reference(partitioner, model, layout, microbatches, form, remat):
    """Dropout is on, and a batch of BERT's has padding, two types of tokens and two losses."""
    sections = ({"objective": {"kind": "masked_lm"}} if "bert" in model else {}) | MODELS[model]
    config = partitioned(run_of(layout, microbatches, form, remat, **sections), partitioner)
    assert_same_run(trained(config), trained_reference(make_config(**sections)))


@pytest.mark.parametrize(
    ("parallel", "every", "shape"),
    [
        pytest.param({"data": 4, "model": 2, "zero": 3, "sequence": True}, 2, {}, marks=slow),
        pytest.param({"data": 2, "zero": 3}, 2, {"share_layers": True}, marks=slow),
        pytest.param({"data": 2, "zero": 2, "microbatches": 2}, 4, {"scan": False}, marks=slow),
        pytest.param({"pipe": 2, "data": 2, "zero": 3, "microbatches": 4}, 2, {}, marks=slow),
    ],
    ids=str,
)
def test_layers_run_again_in_groups_and_nothing_changes(parallel, every, shape):
    model = {"layers": 4 * parallel.get("pipe", 1)} | shape
    remat = {"policy": "block", "block_size": every}
    config = make_config(model=model, parallel={"data": 1} | parallel, remat=remat, optim={"eps": 1e-6})
    assert config.remat_policy.policy == "block"
    assert_same_run(trained(config), trained_reference(make_config(model=model, optim={"eps": 1e-6})))


@slow
@pytest.mark.parametrize(
    "parallel",
    [
        {"data": 4, "model": 2, "zero": 3},
        pytest.param({"pipe": 2, "data": 2, "microbatches": 2}, marks=pytest.mark.mutants),
    ],
    ids=str,
)
def test_what_is_frozen_stays_and_the_rest_computes_the_reference(parallel):
    """Frozen are two of four layers (with a pipeline, in two chunks a stage), one matrix of another, and the table."""
    frozen = "embedding.* blocks.[02].* blocks.3.mlp.up *norm1.bias"
    if "pipe" in parallel:
        parallel = parallel | {"chunks": 2, "schedule": "interleaved"}
    sections = {"model": {"layers": 4}, "optim": {"freeze": frozen}}
    got = trained(make_config(parallel={"data": 1} | parallel, **sections))
    assert_same_run(got, trained_reference(make_config(**sections)))
    first, last = got.first.params, got.last.params
    assert_equal(last["embedding"], first["embedding"])
    moved = last["blocks"]["mlp"]["down"] != first["blocks"]["mlp"]["down"]
    assert moved.any(axis=(1, 2)).tolist() == [False, True, False, True]


FROZEN = {
    "all but the head": "embedding.* blocks.*",
    "matrices": "embedding.tokens embedding.positions head.tokens *query *key *value *out *up *down",
    "blocks": "blocks.*",
    "embedding and attention": "embedding.* *attention* *norm1*",
}
FREEZING = [
    ("all but the head", "manual", {"data": 4, "model": 2, "zero": 3}),
    ("matrices", "manual", {"pipe": 2, "data": 2, "microbatches": 2, "zero": 2}),
    ("blocks", "types", {"data": 4, "model": 2, "sequence": True, "zero": 1}),
    ("all but the head", "manual", {"pipe": 2, "data": 2, "microbatches": 4, "zero": 3, "chunks": 2,
                                    "schedule": "breadth_first"}),
    ("embedding and attention", "manual", {"pipe": 2, "model": 2, "sequence": True, "microbatches": 4, "chunks": 2,
                                           "schedule": "interleaved"}),
    ("matrices", "manual", {"pipe": 2, "data": 2, "microbatches": 2, "zero": 3, "schedule": "gpipe"}),
    ("matrices", "types", {"data": 2, "model": 2, "replica": 2, "zero": 3}),
    ("embedding and attention", "manual", {"data": 4, "model": 2, "zero": 3, "prefetch": "on"}),
    ("all but the head", "types", {"model": 8, "sequence": True}),
    ("blocks", "manual", {"data": 2, "model": 4, "sequence": True, "zero": 3, "collective_matmul": "on"}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("frozen", "partitioner", "parallel"),
    FREEZING,
    ids=str,
)
@slow
def test_what_is_frozen_has_no_moments_and_the_rest_computes_the_reference(frozen, partitioner, parallel):
    sections = {"model": {"layers": 4, "tie_embeddings": False}, "optim": {"freeze": FROZEN[frozen]}}
    got = trained(partitioned(make_config(parallel={"data": 1} | parallel, **sections), partitioner))
    # Four layers, whose small gradients Adam divides by their size: on one device it is 4e-12.
    assert_same_run(got, trained_reference(make_config(**sections)), states=1e-10)


@slow
def test_an_evaluation_is_the_loss_of_a_step_without_dropout():
    config = run_of("data4-model2", 2, **OTHER)
    p = program(config)
    ((total, _, weight),) = p.evaluate(p.init().params, device_batch(p, 0)).values()
    assert float(weight) == pytest.approx(np.asarray(device_batch(p, 0).loss_weights, np.float64).sum(), rel=1e-12)
    assert float(total / weight) == pytest.approx(trained(config).losses[0], rel=1e-14)


@pytest.mark.parametrize("objective", [pytest.param(each, marks=() if each == "span" else slow) for each in TASKS])
def test_what_is_judged_is_the_reference_s_logits_row_by_row(objective):
    """Logits leave a pipeline's last stage; rows are split over data, the sequence over model; no dropout."""
    parallel = {"pipe": 2, "data": 2, "model": 2, "sequence": True, "microbatches": 2}
    p = program(make_config(parallel=parallel, **MODELS[objective]))
    params = p.init().params
    ((_, got),) = p.evaluate(params, device_batch(p, 0)).items()
    first = canonical(p, p.init()).params
    ((_, want),) = reference.predictions(first, p.config, host_batch(p.config, 0)).items()
    np.testing.assert_allclose(np.asarray(got), np.asarray(want).reshape(got.shape), rtol=0, atol=1e-12)


def test_an_evaluation_has_no_dropout():
    config = run_of("data4-model2")
    p = program(config)
    ((total, _, weight),) = p.evaluate(p.init().params, device_batch(p, 0)).values()
    without = trained_reference(make_config(model=CERTAIN))
    assert float(total / weight) == pytest.approx(without.losses[0], rel=1e-12)
    assert trained(config).losses[0] != pytest.approx(without.losses[0], rel=1e-4)


def test_what_is_computed_again_is_the_same_bit_for_bit():
    none, full = (trained(run_of("data4-model2", remat=remat)) for remat in ("none", "full"))
    assert none.losses[0] == full.losses[0]


@pytest.mark.parametrize(("form", "blocks"), [("scan", 1), ("unrolled", 2)])
def test_remat_computes_again_what_it_says(form, blocks):
    """Counts are of the program given to XLA: of a block's eight products all but the last, or the scores alone."""
    none, selective, full = (
        lowered(run_of("one", 1, form, remat, precision=FLOAT32, model=CERTAIN))
        for remat in ("none", "selective", "full")
    )
    assert selective.count("dot_general") - none.count("dot_general") == 1 * blocks
    assert full.count("dot_general") - none.count("dot_general") == 7 * blocks
    for text in (selective, full):  # without barriers XLA would merge the second time with the first
        added = text.count("optimization_barrier") - none.count("optimization_barrier")
        assert (added > 0) == (form == "unrolled") and added >= 0


def test_a_step_takes_the_memory_of_the_state_it_is_given():
    p = program(run_of("data4-model2"))
    state = p.init()
    assert p.compiled.memory_analysis().alias_size_in_bytes == shard_bytes(state)
    p.step(state, device_batch(p, 0))
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state))


@slow
def test_float32_follows_float64():
    config = run_of("data4-model2", precision=FLOAT32)
    got, want = trained(config), trained_reference(config)
    assert_equal(got.first, want.first)
    assert {leaf.dtype for leaf in jax.tree.leaves(got.last)} == {np.dtype("int32"), np.dtype("float32")}
    assert got.losses == pytest.approx(want.losses, rel=2e-5)
    assert got.norms == pytest.approx(want.norms, rel=2e-5)
    assert_close(got.last.opt_state.mu, want.last.opt_state.mu, 2e-5)


@slow
def test_bfloat16_is_near_and_keeps_its_state_wide():
    config = run_of("data4-model2", precision=FLOAT32 | {"compute": "bfloat16"})
    got, want = trained(config), trained_reference(config)
    assert {leaf.dtype for leaf in jax.tree.leaves(got.last)} == {np.dtype("int32"), np.dtype("float32")}
    assert got.losses == pytest.approx(want.losses, rel=2e-3)
    assert got.norms == pytest.approx(want.norms, rel=2e-2)
