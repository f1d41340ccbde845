"""Watchers of `make mutants`: parity and audit of layouts that use every collective."""

import jax
import numpy as np
import pytest

from spmd_lm.analysis import topology
from spmd_lm.config.schema import RunConfig
from spmd_lm.planning.audit import audit, render
from tests import reference
from tests.helpers import (
    ORIGINAL_BERT,
    TASKS,
    assert_close,
    assert_replicated,
    assert_states_close,
    canonical,
    device_batch,
    host_batch,
    make_config,
    partitioned,
    program,
    run_of,
    trained,
    trained_reference,
)

pytestmark = [pytest.mark.mutants, pytest.mark.slow]

RUNS = [
    ("replica2-data2-model2-sequence-zero3", 2, "scan", "full"),
    ("data4-model2", 1, "scan", "none"),
    ("data4-model2-sequence", 2, "scan", "none"),
    ("data8-zero1", 1, "unrolled", "none"),
    ("data4-model2-zero2", 2, "scan", "none"),
]


def config(run: tuple | None = None, warmup: int = 0, partitioner: str = "manual") -> RunConfig:
    """Without a warm-up the learning rate falls from the second step on."""
    optim = {"warmup": warmup}
    return partitioned(run_of(*run, optim=optim), partitioner) if run else make_config(optim=optim)


PARTITIONERS = ("types", "manual")


@pytest.mark.parametrize("partitioner", PARTITIONERS)
@pytest.mark.parametrize("run", RUNS, ids=str)
def test_parity(run, partitioner, x64):
    warmup = 2 if run == RUNS[0] else 0
    got, want = trained(config(run, warmup, partitioner)), trained_reference(config(None, warmup))
    for figures in ("losses", "norms", "rates"):
        assert getattr(got, figures) == pytest.approx(getattr(want, figures), rel=1e-12)
    assert_states_close(got.last, want.last, 1e-11)


OBJECTIVES = TASKS | {"masked language model": {"objective": {"kind": "masked_lm"}}}
OF_BERT = {"model": ORIGINAL_BERT, "optim": {"freeze": "blocks.0.mlp.*", "eps": 1e-6}}


def of_bert(objective: str, partitioner: str) -> RunConfig:
    microbatches = 1 if objective == "multiple choice" else 2  # of 4 questions with 4 rows each
    run = run_of("data4-model2-sequence", microbatches, **OBJECTIVES[objective] | OF_BERT)
    return partitioned(run, partitioner)


@pytest.mark.parametrize("partitioner", PARTITIONERS)
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_parity_of_what_is_judged(objective, partitioner, x64):
    got, want = (
        trained(of_bert(objective, partitioner)),
        trained_reference(make_config(**OBJECTIVES[objective] | OF_BERT)),
    )
    assert got.losses == pytest.approx(want.losses, rel=1e-12)
    assert_close(got.last.params, want.last.params, 1e-11)


@pytest.mark.parametrize("partitioner", PARTITIONERS)
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_all_devices_are_told_the_reference_s(objective, partitioner, x64):
    p = program(of_bert(objective, partitioner))
    params, batch, host = p.init().params, device_batch(p, 0), host_batch(p.config, 0)
    sums, logits = p.evaluate(params, batch), p.forward(params, batch)
    assert_replicated((sums, logits))
    first = jax.tree.map(np.float64, canonical(p, p.init()).params)
    for name, want in reference.predictions(first, p.config, host).items():
        if name in ("masked_lm", "sentence_order"):
            loss, correct, weight = map(float, sums[name])
            labels = host.targets if name == "masked_lm" else host.labels
            weights = host.loss_weights if name == "masked_lm" else host.label_weights
            nll = -np.take_along_axis(np.asarray(jax.nn.log_softmax(want)), labels[..., None], -1)[..., 0]
            hits = np.asarray(want).argmax(-1) == labels
            expected = [(weights * x).sum(dtype=np.float64) for x in (nll, hits, np.ones_like(weights))]
            assert [loss, correct, weight] == pytest.approx(expected, rel=1e-12), name
        else:
            (got,) = sums.values()
            np.testing.assert_allclose(np.asarray(got).reshape(want.shape), want, rtol=0, atol=1e-12)


@pytest.mark.parametrize("partitioner", PARTITIONERS)
@pytest.mark.parametrize("run", RUNS[:1], ids=str)
def test_evaluation(run, partitioner, x64):
    p, b = program(config(run, partitioner=partitioner)), host_batch(make_config(), 0)
    ((loss_sum, _, weight),) = p.evaluate(p.init().params, device_batch(p, 0)).values()
    params = jax.tree.map(np.float64, trained_reference(config()).first.params)
    want = reference.loss(params, p.config, b)
    assert float(weight) == pytest.approx(b.loss_weights.sum(dtype=np.float64), rel=1e-12)
    assert float(loss_sum) / float(weight) == pytest.approx(float(want), rel=1e-12)
    logits = np.asarray(p.forward(p.init().params, device_batch(p, 0))["tokens"])[..., : p.config.model.vocab]
    wanted = np.asarray(reference.logits(params, p.config.model, b.tokens))
    np.testing.assert_allclose(logits.reshape(wanted.shape), wanted, rtol=0, atol=1e-12)


def with_experts() -> RunConfig:
    moe = {"kind": "moe", "experts": 4, "capacity": 1.0, "group": 8, "shared": 24, "shared_gate": True}
    parallel = {"data": 2, "expert": 2, "model": 2, "sequence": True, "zero": 3, "microbatches": 2}
    return make_config(model={"layers": 2, "mlp": moe}, parallel=parallel | {"partitioner": "manual"})


def test_parity_of_experts(x64):
    got, want = trained(with_experts()), trained_reference(with_experts())
    for figures in ("losses", "norms", "rates", "dropped"):
        assert getattr(got, figures) == pytest.approx(getattr(want, figures), rel=1e-12)
    assert_states_close(got.last, want.last, 1e-11)


@pytest.mark.parametrize("partitioner", PARTITIONERS)
@pytest.mark.parametrize("run", RUNS, ids=str)
def test_communication(run, partitioner, x64):
    result = audit(config(run, partitioner=partitioner), topology.parse_topology("cpu:8"))
    assert result["missing_bytes"] + result["excess_bytes"] <= 256, render(result)
