import itertools
import json
from pathlib import Path

import numpy as np
import pytest

from spmd_lm.analysis.scaling_law import fit
from spmd_lm.config import syntax
from spmd_lm.config.load import load
from spmd_lm.errors import FitError
from tests.parameter_count import parameters_by_formula

SWEEP = Path(__file__).parents[2] / "configs" / "sweeps" / "loss-scaling.yaml"
LAWS = {  # E, A, B, alpha, beta
    "chinchilla": (1.69, 406.4, 410.7, 0.34, 0.28),  # arXiv:2203.15556
    "its replication": (1.82, 482.0, 2085.4, 0.348, 0.366),  # arXiv:2404.10102
    "bytes": (0.8, 30.0, 115.0, 0.35, 0.4),
    "bytes, steep in size": (0.5, 70.0, 22.0, 0.5, 0.25),
    "bytes, steep in tokens": (1.2, 6.0, 420.0, 0.25, 0.5),
}
laws = pytest.mark.parametrize("law", LAWS.values(), ids=LAWS)


def shipped_grid() -> tuple[np.ndarray, np.ndarray]:
    """Parameters and tokens of the shipped sweep's cells."""
    sweep, _ = syntax.read(SWEEP.read_text())
    columns = ([[(key, value) for value in values] for key, values in group.items()] for group in sweep["zip"])
    sizes, budgets = ([*zip(*each, strict=True)] for each in columns)
    configs = []
    for size, budget in itertools.product(sizes, budgets):
        values = sweep["grid"] | dict(size) | dict(budget)
        overrides = [f"{key}={json.dumps(value)}" for key, value in values.items() if key != "id"]
        configs.append(load(SWEEP.parent / sweep["config"], overrides))
    tokens = [config.train.steps * config.train.batch * config.model.context for config in configs]
    return np.array([*map(parameters_by_formula, configs)], float), np.array(tokens, float)


SMALL = tuple(each.ravel() for each in np.meshgrid(np.geomspace(1e4, 1e6, 5), np.geomspace(1e5, 3.2e6, 3)))


def losses_of(law, grid, noise=0.0, seed=0):
    e, a, b, alpha, beta = law
    n, d = grid
    exact = e + a / n**alpha + b / d**beta
    return exact * (1 + noise * np.random.default_rng(seed).standard_normal(len(n)))


def bands(law, grid, sets, replicates=1000):
    """Of how many generated sets the band holds alpha and beta, and the bands' median widths."""
    fits = [fit(*grid, losses_of(law, grid, 0.01, seed), replicates=replicates) for seed in range(sets)]
    low, high = ([[getattr(f.alpha, end), getattr(f.beta, end)] for f in fits] for end in ("low", "high"))
    held = (np.array(low) <= law[3:]) & (law[3:] <= np.array(high))
    return held.sum(0), np.median(np.subtract(high, low), 0)


@laws
def test_losses_without_noise_return_their_law(law):
    fitted = fit(*SMALL, losses_of(law, SMALL), replicates=10)
    values = [getattr(fitted, name).value for name in ("E", "A", "B", "alpha", "beta")]
    np.testing.assert_allclose(values, law, rtol=1e-3)
    assert fitted.residual < 1e-6 and fitted.points == 15 and not fitted.outliers


def test_bands_hold_the_true_exponents():
    """15 points leave 10 degrees of freedom: bands that ignore that hold them in 8 of 10 sets."""
    held, widths = bands(LAWS["chinchilla"], SMALL, sets=40, replicates=200)
    assert (held >= 36).all() and (widths < 0.15).all()


@pytest.mark.slow
@laws
def test_bands_hold_the_true_exponents_of_the_shipped_sweep(law):
    """95 of 100 are expected; fewer than 88 have a probability of 0.2%."""
    held, widths = bands(law, shipped_grid(), sets=100)
    assert (held >= 88).all() and (widths <= 0.15).all()


def test_the_shipped_sweep_spans_what_the_exponents_need():
    n, d = shipped_grid()
    assert len(np.unique(n)) >= 5 and len(np.unique(d)) >= 3
    assert n.max() / n.min() > 100 and d.max() / d.min() >= 64


@pytest.mark.parametrize("diverged", [0, 7, 14])
def test_a_diverged_run_is_left_out_and_named(diverged):
    losses = losses_of(LAWS["bytes"], SMALL, 0.01)
    losses[diverged] *= 1.5
    fitted = fit(*SMALL, losses, replicates=50)
    assert fitted.outliers == (diverged,) and fitted.points == 14
    others = fit(*(np.delete(each, diverged) for each in (*SMALL, losses)), replicates=50)
    assert fitted.alpha == pytest.approx(others.alpha, rel=1e-4)
    assert fitted.residual == pytest.approx(others.residual, rel=1e-4)


def test_a_prediction_is_the_law_s_and_its_band_widens_away_from_the_points():
    fitted = fit(*SMALL, losses_of(LAWS["bytes"], SMALL, 0.01), replicates=200)
    sizes, tokens = np.array([1e5, 1e9]), np.array([[5e5], [1e10]])
    loss = fitted.predict(sizes, tokens)
    f = fitted
    expected = f.E.value + f.A.value / sizes**f.alpha.value + f.B.value / tokens**f.beta.value
    np.testing.assert_allclose(loss.value, expected, rtol=1e-12)
    assert (loss.low < loss.value).all() and (loss.value < loss.high).all()
    widths = loss.high - loss.low
    assert widths[0, 0] < 0.03 * loss.value[0, 0] and widths[1, 1] > 3 * widths[0, 0]
    assert fitted.predict(1e5, 5e5).value == pytest.approx(loss.value[0, 0])


def test_compute_is_divided_by_the_ratio_of_the_exponents():
    fitted = fit(*SMALL, losses_of(LAWS["chinchilla"], SMALL, 0.01), replicates=50)
    alpha, beta = fitted.alpha.value, fitted.beta.value
    assert fitted.a.value == pytest.approx(beta / (alpha + beta)) and fitted.a.value + fitted.b.value == 1
    assert fitted.a.low < fitted.a.value < fitted.a.high
    assert fitted.a.low == pytest.approx(1 - fitted.b.high)


def test_the_same_seed_gives_the_same_bands():
    losses = losses_of(LAWS["bytes"], SMALL, 0.01)
    first, again, other = (fit(*SMALL, losses, replicates=50, seed=seed).alpha for seed in (0, 0, 1))
    assert first == again and first.value == other.value and first.low != other.low


N, D = SMALL
LOSSES = losses_of(LAWS["bytes"], SMALL, 0.01)


def but(values, run, value):
    return [*values[:run], value, *values[run + 1 :]]


@pytest.mark.parametrize(
    ("points", "message"),
    [
        ((N[:5], D[:5], LOSSES[:5]), r"5 runs, but its 5 parameters and the noise need 6 or more\. Add sizes"),
        ((N[:5], D, LOSSES), "5 sizes, 15 token counts and 15 losses"),
        ((np.full(15, 1e5), D, LOSSES), r"1 size in 15 runs, but alpha needs 3 or more\. Vary model.width"),
        ((N, np.full(15, 1e6), LOSSES), r"1 token budget in 15 runs, but beta needs 3 or more\. Vary train.steps"),
        ((N, np.where(D > 2e5, 1e6, 2e5), LOSSES), "2 token budgets in 15 runs"),
        ((N, D, but(LOSSES, 3, np.nan)), "the loss of run 3 is nan. The run diverged"),
        ((N, D, but(LOSSES, 0, np.inf)), "the loss of run 0 is inf"),
        ((but(N, 1, 0), D, LOSSES), "the number of parameters of run 1 is 0"),
        ((N, -D, LOSSES), "the number of tokens of run 0 is -100000"),
    ],
)
def test_points_that_determine_no_law_are_refused(points, message):
    with pytest.raises(FitError, match=message):
        fit(*points)
