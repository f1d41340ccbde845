"""GPTQ (arXiv:2210.17323): codes of a matrix one input after the other, each of whose errors the inputs after it
make up for, as far as the inputs of a calibration text vary together.  Two refinements are of the authors' code: inputs
with the largest squares come first, and scales are searched, before all, so that groups stay neighbours.

In float64 on the host: an inverse of a matrix of all inputs needs it."""

from typing import NamedTuple

import numpy as np
from scipy.linalg import solve_triangular

from spmd_lm.ops.few_bits import LARGEST_CODE, NF4, Coding

DAMPING = 0.01  # of the mean of the Gram matrix's diagonal, added to it
PART = 128  # inputs whose errors reach those beyond them together
SHARES = np.linspace(1, 0.6, 9)  # of a group's largest magnitude: a smaller scale cuts it, and rounds the others less


class Quantized(NamedTuple):
    """codes: [inputs, outputs], multiples of scales, or indices in NF4.  absmax: the magnitude that a group's largest
    code stands for, float32 [groups, outputs]."""

    codes: np.ndarray
    absmax: np.ndarray


def gptq(w: np.ndarray, gram: np.ndarray, coding: Coding) -> Quantized:
    """Quantizes w [inputs, outputs], inputs with the largest squares first.  gram: X'X of its inputs X [tokens,
    inputs]."""
    size, order = coding.group or len(w), np.argsort(-np.diag(gram), kind="stable")
    absmax = _best_scales(w, np.diag(gram), coding)
    scales, factor = np.repeat(absmax, size, 0)[order], _inverse_factor(gram[np.ix_(order, order)])
    left, codes = w.astype(np.float64)[order], np.empty(w.shape, np.int8)
    for start in range(0, len(w), PART):
        stop = min(start + PART, len(w))
        errors = np.empty((stop - start, w.shape[1]))
        for i in range(start, stop):
            codes[order[i]], value = nearest(coding, left[i], scales[i])
            errors[i - start] = (left[i] - value) / factor[i, i]
            left[i + 1 : stop] -= np.outer(factor[i, i + 1 : stop], errors[i - start])
        left[stop:] -= factor[start:stop, stop:].T @ errors
    return Quantized(codes, absmax)


def round_to_nearest(w: np.ndarray, coding: Coding) -> Quantized:
    """Quantizes w [inputs, outputs], each entry for itself."""
    groups = _groups(w, coding)
    absmax = np.abs(groups).max(1).astype(np.float32)
    return Quantized(nearest(coding, groups, absmax[:, None])[0].reshape(w.shape), absmax)


def _best_scales(w: np.ndarray, weight: np.ndarray, coding: Coding) -> np.ndarray:
    """For each group the absmax, of some shares of its largest magnitude, with the least squared error of rounding.
    weight: of each input's errors."""
    groups, weight = _groups(w.astype(np.float64), coding), _groups(weight[:, None], coding)
    largest = np.abs(groups).max(1)
    tried = [(share * largest).astype(np.float32) for share in SHARES]
    values = (nearest(coding, groups, absmax[:, None])[1] for absmax in tried)
    errors = [(weight * (groups - value) ** 2).sum(1) for value in values]
    return np.take_along_axis(np.stack(tried), np.argmin(errors, 0)[None], 0)[0]


def _groups(x: np.ndarray, coding: Coding) -> np.ndarray:
    """x [inputs, ...] as [groups, inputs of a group, ...]."""
    return x.reshape(-1, coding.group or len(x), *x.shape[1:])


def _inverse_factor(gram: np.ndarray) -> np.ndarray:
    """The upper triangular U with U'U the inverse of the damped Gram matrix."""
    gram = gram + DAMPING * (np.diag(gram).mean() or 1.0) * np.eye(len(gram))
    root = np.linalg.cholesky(gram[::-1, ::-1])[::-1, ::-1]  # upper, and gram = root root'
    return solve_triangular(root, np.eye(len(gram)))


def nearest(coding: Coding, w: np.ndarray, absmax: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The nearest codes of w, and their values.  absmax: broadcasts with w."""
    share = w / np.where(absmax == 0, 1, absmax)
    if coding.bits == "nf4":
        codes = np.searchsorted((NF4[1:].astype(np.float64) + NF4[:-1]) / 2, share)
    else:
        most = LARGEST_CODE[coding.bits]
        codes = np.clip(np.rint(most * share), -most, most)
    codes = codes.astype(np.int8)
    return codes, _values(coding, codes, absmax)


def decode(coding: Coding, quantized: Quantized) -> np.ndarray:
    """The matrix that these codes stand for, float32 [inputs, outputs]."""
    codes, absmax = quantized
    return _values(coding, _groups(codes, coding), absmax[:, None]).reshape(codes.shape)


def _values(coding: Coding, codes: np.ndarray, absmax: np.ndarray) -> np.ndarray:
    return NF4[codes] * absmax if coding.bits == "nf4" else codes * (absmax / np.float32(LARGEST_CODE[coding.bits]))


def squared_error(w: np.ndarray, value: np.ndarray, gram: np.ndarray) -> float:
    """|X (w - value)|², which GPTQ makes small."""
    off = w.astype(np.float64) - value
    return float((off * (gram @ off)).sum())
