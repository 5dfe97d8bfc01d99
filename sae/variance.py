"""How much of V1 a reconstruction keeps: the fraction of variance explained, one formula for every set of weights.

``FVE = 1 - sum_i w_i |x_i - xhat_i|^2 / sum_i w_i |x_i - m|^2`` with ``m = sum_i w_i x_i / sum_i w_i``, over token
ids i. The weights say what it is about: how often a text has each token (spec part A), or 1 for each type of a set. The
mean is always that of the same weights, so predicting it scores 0 and a perfect reconstruction 1; worse is negative.
"""

from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from satlens.bootstrap import Interval, Weights, statistic_interval
from satlens.errors import SatlensError

_CHUNK_VALUES = 1 << 22


class Sums(NamedTuple):
    """Both sums of the formula, by document: enough to resample documents without the vectors."""

    residual: np.ndarray
    """``sum w |x - xhat|^2`` of each document."""
    total: np.ndarray
    """``sum w |x - m|^2`` of each document; ``m`` is the mean over all documents together."""


def squared_error(
    rows: Float[Tensor, "type d_in"], other: Float[Tensor, "type d_in"] | Float[Tensor, " d_in"]
) -> Float[Tensor, " type"]:
    """``|x - y|^2`` of each row in float64; ``other`` is a row for each, or one vector for all."""
    step = max(1, _CHUNK_VALUES // rows.shape[1])
    parts = []
    for start in range(0, len(rows), step):
        part = other if other.ndim == 1 else other[start : start + step]
        parts.append((rows[start : start + step].double() - part.double()).square_().sum(1))
    return torch.cat(parts)


def weighted_mean(rows: Float[Tensor, "type d_in"], weights: Tensor) -> Float[Tensor, " d_in"]:
    """``sum w x / sum w`` in float64.

    Raises:
        SatlensError: no weight at all, so there is no mean.
    """
    w = weights.to(rows.device).double()
    if not float(w.sum()) > 0:
        raise SatlensError("no token has any weight, so there is no mean and no variance to explain")
    total = torch.zeros(rows.shape[1], dtype=torch.float64, device=rows.device)
    step = max(1, _CHUNK_VALUES // rows.shape[1])
    for start in range(0, len(rows), step):
        total += w[start : start + step] @ rows[start : start + step].double()
    return total / w.sum()


def fve(rows: Float[Tensor, "type d_in"], made: Float[Tensor, "type d_in"], weights: Tensor) -> float:
    """Fraction of variance explained of ``rows`` by ``made``; NaN when the rows with weight are all alike.

    sae-lens's `ExplainedVarianceCalculator` computes the same over repeated rows, from raw moments; it differs by
    rounding, and calls variance below 1e-10 explained (1) or not (0) where this has no answer.

    Raises:
        SatlensError: no weight at all.
    """
    w = weights.to(rows.device).double()
    total = float(w @ squared_error(rows, weighted_mean(rows, weights)))
    # rows that differ by less than float32 rounding have no variance, only noise
    noise = 1e-12 * float(w @ squared_error(rows, torch.zeros_like(rows[0])))
    return 1 - float(w @ squared_error(rows, made)) / total if total > noise else float("nan")


def sums_by_document(
    documents: list[np.ndarray],
    residual: Float[Tensor, " type"],
    total: Float[Tensor, " type"],
) -> Sums:
    """Both sums for each document, from the squared errors of each token id."""
    errors = torch.stack([residual, total], dim=1).cpu().numpy()
    sums = np.array([errors[ids].sum(0) for ids in documents])
    return Sums(sums[:, 0], sums[:, 1])


def fve_interval(sums: Sums, weights: Weights) -> Interval:
    """FVE with its bootstrap interval over documents: sums are drawn and then divided, the mean stays as it is."""
    return statistic_interval(sums.residual, sums.total, weights, _explained)


def _explained(ratio: Any) -> Any:
    return 1 - ratio
