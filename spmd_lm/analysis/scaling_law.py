"""A scaling law fitted to a sweep: the loss after training N parameters on D tokens, with 95% bands.

Chinchilla's form, L(N, D) = E + A / N^alpha + B / D^beta (arXiv:2203.15556, section 3.3), fitted as in its appendix D.2
to log L, as a log-sum-exp of e = log E, a = log A and b = log B.  Differences from the paper:

- Starts.  Given the exponents, the form is linear in E, A and B, so that a grid of exponents alone is enough.
- Loss.  The paper's Huber loss, with a delta of 1e-3, is almost the absolute value: it needs 1.6 times the points that
  least squares needs under normal noise.  Here it only finds the outliers, such as a run that diverged; least squares
  of the others is the fit.
- Bands.  Percentiles of fits to simulated losses, not to resampled points: a sweep has few points, and some samples of
  them determine no exponent.

Shape suffixes: R fits side by side, N points, P the five parameters (e, a, b, alpha, beta)."""

import dataclasses
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike
from scipy.optimize import nnls

from spmd_lm.errors import FitError

NUM_PARAMETERS = 5  # E, A, B, alpha and beta
MIN_POINTS = NUM_PARAMETERS + 1  # the noise is estimated too
HUBER_DELTA = 1e-3  # the paper's
OUTLIER = 6.0  # standard deviations; of 30 points of normal noise one is this far off in 1 of 100 sweeps
EXPONENTS = np.linspace(0.05, 1.2, 8)  # exponents of the starts
MIN_LOG_E = -12.0  # E = 6e-6 nats is nothing, and lower ones change nothing
MAX_ITERATIONS, MAX_STEP = 100, 2.0  # iterations of a fit; change of a parameter in one of them
QUANTILES = 0.025, 0.975


class Estimate(NamedTuple):
    """A value with its 95% band: numbers, or arrays of one shape."""

    value: np.ndarray
    low: np.ndarray
    high: np.ndarray


@dataclasses.dataclass(frozen=True, eq=False)
class ScalingLaw:
    """A fitted law.  N and D are in the units passed to `fit`, losses in nats."""

    E: Estimate  # the loss of an infinite model on infinite data
    A: Estimate
    B: Estimate
    alpha: Estimate
    beta: Estimate
    a: Estimate  # the best N grows as compute^a: beta / (alpha + beta)
    b: Estimate  # the best D grows as compute^b: alpha / (alpha + beta)
    residual: float  # standard deviation of log loss around the fit: the relative error of a run
    points: int  # number of them fitted
    outliers: tuple[int, ...]  # indices of points that were left out, as too far from all others
    replicates_RP: np.ndarray = dataclasses.field(repr=False)  # (e, a, b, alpha, beta) of the simulated fits

    def predict(self, parameters: ArrayLike, tokens: ArrayLike) -> Estimate:
        """The expected loss, with its band, for all pairs of N and D, broadcast against each other.  The band is that
        of the mean over runs; a single run deviates from it by `residual`."""
        log_n, log_d = np.broadcast_arrays(*(np.log(np.asarray(each, float)) for each in (parameters, tokens)))
        exponents = self.alpha.value, self.beta.value
        fitted_P = np.array([*(np.log(each.value) for each in (self.E, self.A, self.B)), *exponents])
        points = log_n.ravel(), log_d.ravel()
        value, losses = (np.exp(_log_loss(theta, *points)[0]) for theta in (fitted_P[None], self.replicates_RP))
        low, high = np.quantile(losses, QUANTILES, axis=0)
        return Estimate(*(each.reshape(log_n.shape) for each in (value[0], low, high)))


def fit(
    parameters: ArrayLike, tokens: ArrayLike, losses: ArrayLike, *, replicates: int = 1000, seed: int = 0
) -> ScalingLaw:
    """The law of runs of N = `parameters` on D = `tokens` that ended with `losses`, arrays of one shape [N].

    replicates: number of simulated sweeps, drawn with `seed`, whose percentiles are the bands.  Raises FitError if the
    points do not determine a law."""
    n, d, loss = (np.asarray(each, float).ravel() for each in (parameters, tokens, losses))
    _check(n, d, loss)
    log_n, log_d, log_loss = np.log(n), np.log(d), np.log(loss)

    inliers = _inliers(log_n, log_d, log_loss)
    _check(n[inliers], d[inliers], loss[inliers])
    points, target = (log_n[inliers], log_d[inliers]), log_loss[None, inliers]
    fits_RP, costs_R = _minimize(_starts(*points, loss[inliers]), *points, target)
    fitted_RP = fits_RP[[costs_R.argmin()]]
    mean = _log_loss(fitted_RP, *points)[0]
    freedom = target.size - NUM_PARAMETERS
    residual = float(np.sqrt(((target - mean) ** 2).sum() / freedom))

    generator = np.random.default_rng(seed)
    # The noise is uncertain too: each simulated sweep draws it, for bands as wide as Student's t.
    noise_R = residual * np.sqrt(freedom / generator.chisquare(freedom, replicates))
    simulated_RN = mean + noise_R[:, None] * generator.standard_normal((replicates, target.size))
    replicates_RP, _ = _minimize(fitted_RP.repeat(replicates, axis=0), *points, simulated_RN)
    bands = np.quantile(_quantities(replicates_RP), QUANTILES, axis=0)
    e, a, b, alpha, beta, best_n, best_d = map(Estimate, _quantities(fitted_RP)[0], *bands)
    outliers = tuple(map(int, np.flatnonzero(~inliers)))
    return ScalingLaw(e, a, b, alpha, beta, best_n, best_d, residual, target.size, outliers, replicates_RP)


def _check(n: np.ndarray, d: np.ndarray, loss: np.ndarray) -> None:
    """Raises FitError if these points determine no law."""
    if not len(n) == len(d) == len(loss):
        raise FitError(f"scaling law: {len(n)} sizes, {len(d)} token counts and {len(loss)} losses. Pass one per run.")
    for name, values, cause in (
        ("loss", loss, "The run diverged or did not finish: leave it out, or lower its optim.lr and train it again"),
        ("number of parameters", n, "Pass the parameters of each run's model"),
        ("number of tokens", d, "Pass the tokens that each run was trained on"),
    ):
        wrong = np.flatnonzero(~(np.isfinite(values) & (values > 0)))
        if len(wrong):
            raise FitError(f"scaling law: the {name} of run {wrong[0]} is {values[wrong[0]]:g}. {cause}.")
    if len(loss) < MIN_POINTS:
        raise FitError(
            f"scaling law: {len(loss)} runs, but its {NUM_PARAMETERS} parameters and the noise need {MIN_POINTS} or "
            f"more. Add sizes or token budgets to the sweep: 5 sizes x 3 budgets is a good start."
        )
    for name, symbol, values, key in (
        ("size", "alpha", n, "model.width"),
        ("token budget", "beta", d, "train.steps"),
    ):
        distinct = len(np.unique(values))
        if distinct < 3:  # A and the exponent are two unknowns, and a third value separates them from E
            raise FitError(
                f"scaling law: {distinct} {name}{'s' * (distinct > 1)} in {len(loss)} runs, but {symbol} needs 3 or "
                f"more. Vary {key} in the sweep."
            )


def _inliers(log_n: np.ndarray, log_d: np.ndarray, log_loss: np.ndarray) -> np.ndarray:
    """bool [N]: False for outliers of a fit with the paper's Huber loss, which they hardly move."""
    fits_RP, costs_R = _minimize(_starts(log_n, log_d, np.exp(log_loss)), log_n, log_d, log_loss[None], HUBER_DELTA)
    errors = np.abs(_log_loss(fits_RP[[costs_R.argmin()]], log_n, log_d)[0][0] - log_loss)
    # Such a fit passes through as many points as it has parameters; these have no noise.
    noise = np.median(np.sort(errors)[NUM_PARAMETERS:]) / 0.6745  # to a standard deviation, for a normal distribution
    return errors <= max(OUTLIER * noise, 1e-9)  # not below rounding, for losses without noise


def _starts(log_n: np.ndarray, log_d: np.ndarray, loss: np.ndarray) -> np.ndarray:
    """[R, P]: the best E, A and B for each pair of exponents, by least squares of the relative error."""
    starts, ones = [], np.ones_like(loss)
    middle_n, middle_d = log_n.mean(), log_d.mean()  # terms are of order 1 there
    for alpha in EXPONENTS:
        for beta in EXPONENTS:
            terms = np.stack([ones, np.exp(-alpha * (log_n - middle_n)), np.exp(-beta * (log_d - middle_d))], axis=1)
            e, a, b = np.log(np.maximum(nnls(terms / loss[:, None], ones)[0], 1e-3))
            starts.append([e, a + alpha * middle_n, b + beta * middle_d, alpha, beta])
    return np.array(starts)


def _log_loss(theta_RP: np.ndarray, log_n: np.ndarray, log_d: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """log L [R, N], and its derivatives [R, N, P]."""
    e, a, b, alpha, beta = theta_RP.T[:, :, None]
    terms = np.stack(np.broadcast_arrays(e, a - alpha * log_n, b - beta * log_d), axis=-1)
    largest = terms.max(axis=-1, keepdims=True)
    shares = np.exp(terms - largest)  # shares of the three terms in L
    total = shares.sum(axis=-1, keepdims=True)
    shares /= total
    slopes = -shares[..., 1] * log_n, -shares[..., 2] * log_d
    return (largest + np.log(total))[..., 0], np.concatenate([shares, np.stack(slopes, axis=-1)], axis=-1)


def _minimize(
    theta_RP: np.ndarray, log_n: np.ndarray, log_d: np.ndarray, target_RN: np.ndarray, delta: float = np.inf
) -> tuple[np.ndarray, np.ndarray]:
    """The least Huber loss of log L - target from each start, and that loss.  delta inf: least squares.

    Levenberg-Marquardt for all fits at once: scipy has it for one, and a thousand of those take seconds."""
    theta_RP, target_RN = theta_RP.copy(), np.broadcast_to(target_RN, (len(theta_RP), target_RN.shape[1]))
    cost_R, damping_R = np.full(len(theta_RP), np.inf), np.full(len(theta_RP), 1e-3)
    gradient_RP, hessian_RPP = np.empty_like(theta_RP), np.empty((*theta_RP.shape, theta_RP.shape[1]))
    active = np.arange(len(theta_RP))  # the fits that have not converged
    proposal = theta_RP
    for _ in range(MAX_ITERATIONS):
        value, slopes = _log_loss(proposal, log_n, log_d)
        error = value - target_RN[active]
        excess = np.maximum(np.abs(error) - delta, 0)
        cost = (error**2 - excess**2).sum(axis=1) / 2
        better = cost <= cost_R[active]
        converged = better & (cost_R[active] - cost <= 1e-9 * cost + 1e-18)

        taken = active[better]
        theta_RP[taken], cost_R[taken] = proposal[better], cost[better]
        weighted = slopes[better] / (1 + excess[better] / delta)[..., None]  # delta / |error| beyond delta
        gradient_RP[taken] = (weighted * error[better][..., None]).sum(axis=1)
        hessian_RPP[taken] = weighted.transpose(0, 2, 1) @ slopes[better]
        damping_R[active] *= np.where(better, 0.2, 5.0)

        active = active[~converged & (damping_R[active] < 1e8)]
        if not len(active):
            break
        damping_RP = damping_R[active, None] * np.einsum("rpp->rp", hessian_RPP[active]) + 1e-12
        damped = hessian_RPP[active] + damping_RP[..., None] * np.eye(NUM_PARAMETERS)
        step = np.linalg.solve(damped, gradient_RP[active][..., None])[..., 0]
        proposal = theta_RP[active] - np.clip(step, -MAX_STEP, MAX_STEP)
        proposal[:, 0] = np.maximum(proposal[:, 0], MIN_LOG_E)
    return theta_RP, cost_R


def _quantities(theta_RP: np.ndarray) -> np.ndarray:
    """[R, 7]: E, A, B, alpha, beta and the exponents of the best N and D, the first fields of ScalingLaw."""
    alpha, beta = theta_RP[:, 3:].T
    best = np.stack([beta, alpha], axis=1) / (alpha + beta)[:, None]
    return np.concatenate([np.exp(theta_RP[:, :3]), theta_RP[:, 3:], best], axis=1)
