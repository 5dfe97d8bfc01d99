"""How far could this number have moved with other documents: percentile bootstrap over per-document sums.

One array of weights is drawn per analysis and handed to every call, so all numbers of a report see the same
resampled documents. That is what makes differences paired: document difficulty cancels before the percentile.
"""

from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from satlens.errors import SatlensError

Floats = NDArray[np.float64]
Weights = NDArray[np.int32]
Statistic = Callable[[Floats], Floats]

_CHUNK_VALUES = 1 << 22
"""Float64 values of a weight chunk held at once (32 MiB)."""


class Interval(NamedTuple):
    """An estimate with its percentile interval; the ends are None for fewer than two documents."""

    estimate: Any
    low: Any
    high: Any


class Delta(NamedTuple):
    """A condition minus its baseline on the same documents, in nats per token and in perplexity."""

    nll: Interval
    perplexity: Interval


def document_weights(n_documents: int, n_resamples: int = 1000, seed: int = 0) -> Weights:
    """How often each document is drawn in each resample: multinomial counts `[resample, document]`.

    Draw once per analysis and pass the result to every call, so that all intervals are paired.
    Raises SatlensError without documents or resamples.
    """
    if n_documents < 1 or n_resamples < 1:
        raise SatlensError(f"a bootstrap needs documents and resamples, got {n_documents} and {n_resamples}")
    generator = np.random.default_rng(seed)
    weights = np.empty((n_resamples, n_documents), dtype=np.int32)
    share = np.full(n_documents, 1.0 / n_documents)
    for rows in _chunks(n_resamples, n_documents):
        weights[rows] = generator.multinomial(n_documents, share, size=rows.stop - rows.start)
    return weights


def resample(sums: ArrayLike, weights: Weights) -> Floats:
    """Totals of per-document sums `[document, ...]` in every resample: `[resample, ...]`, in float64."""
    values = np.asarray(sums, dtype=np.float64)
    if values.shape[0] != weights.shape[1]:
        raise SatlensError(f"sums of {values.shape[0]} documents do not fit weights of {weights.shape[1]}")
    flat = values.reshape(values.shape[0], -1)
    totals = np.empty((weights.shape[0], flat.shape[1]))
    for rows in _chunks(*weights.shape):
        totals[rows] = weights[rows].astype(np.float64) @ flat
    return totals.reshape(weights.shape[0], *values.shape[1:])


def ratio_interval(sums: ArrayLike, counts: ArrayLike, weights: Weights, level: float = 0.95) -> Interval:
    """Mean per counted token, total of `sums [document, ...]` over total of `counts [document]`.

    Sum then divide, so a long document weighs as much as it has tokens. Use it for NLL, gate means, shares.
    """
    return statistic_interval(sums, counts, weights, _identity, level)


def perplexity_interval(nll: ArrayLike, counts: ArrayLike, weights: Weights, level: float = 0.95) -> Interval:
    """Perplexity `exp(sum NLL / sum scored)` from per-document NLL sums in nats (spec part A)."""
    return statistic_interval(nll, counts, weights, np.exp, level)


def delta_interval(
    nll: ArrayLike, baseline: ArrayLike, counts: ArrayLike, weights: Weights, level: float = 0.95
) -> Delta:
    """NLL and perplexity of a condition minus its baseline, both as per-document NLL sums on the same tokens.

    `nll` is `[document, ...]`, `baseline` is `[document]` or broadcasts to it. The difference is taken per
    document before resampling, so equal inputs give exactly 0 with the interval [0, 0]; the perplexity
    difference is `ppl_baseline * (exp(delta_nll) - 1)`, which keeps that exactness.
    """
    values, base = np.asarray(nll, dtype=np.float64), np.asarray(baseline, dtype=np.float64)
    while base.ndim < values.ndim:
        base = base[..., None]
    estimate, samples = resampled_ratios(values - base, counts, weights)
    clean, clean_samples = resampled_ratios(base, counts, weights)
    points = np.exp(clean) * np.expm1(estimate)
    ppl_samples = None if samples is None else np.exp(_present(clean_samples)) * np.expm1(samples)
    return Delta(_interval(estimate, samples, level), _interval(points, ppl_samples, level))


def statistic_interval(
    sums: ArrayLike,
    counts: ArrayLike,
    weights: Weights,
    statistic: Statistic,
    level: float = 0.95,
    discrete: bool = False,
) -> Interval:
    """Interval of any function of the ratios: the CV across heads, a crossover layer.

    `statistic` gets ratios with a leading resample axis `[n, ...]` and returns `[n, ...]`; NaN says
    "undefined here", and such resamples are left out (`resampled_statistic` gives them all).
    `discrete` keeps the ends among observed values (layers).
    """
    estimate, samples = resampled_statistic(sums, counts, weights, statistic)
    return _interval(estimate, samples, level, discrete)


def resampled_statistic(
    sums: ArrayLike, counts: ArrayLike, weights: Weights, statistic: Statistic
) -> tuple[Any, Floats | None]:
    """The statistic on all documents, and in each resample (None where fewer than two documents count)."""
    ratio, samples = resampled_ratios(sums, counts, weights)
    with np.errstate(divide="ignore", invalid="ignore"):
        estimate = np.asarray(statistic(np.asarray(ratio)[None]))[0]
        values = None if samples is None else np.asarray(statistic(samples), dtype=np.float64)
    return _scalar(estimate), values


def resampled_ratios(sums: ArrayLike, counts: ArrayLike, weights: Weights) -> tuple[Any, Floats | None]:
    """The ratio on all documents, and in each resample that drew at least one counted token.

    Raises SatlensError when nothing is counted at all, since then there is no ratio to speak of.
    """
    values, tokens = np.asarray(sums, dtype=np.float64), np.asarray(counts, dtype=np.float64)
    if tokens.ndim != 1 or values.shape[0] != tokens.shape[0]:
        raise SatlensError(f"counts {tokens.shape} must be one number per document of sums {values.shape}")
    if tokens.sum() <= 0:
        raise SatlensError("no document has a counted token, so there is nothing to average")
    estimate = values.sum(axis=0) / tokens.sum()
    if np.count_nonzero(tokens) < 2:
        return _scalar(estimate), None
    totals = resample(tokens, weights)
    drawn = totals > 0
    shape = (-1,) + (1,) * (values.ndim - 1)
    return _scalar(estimate), resample(values, weights)[drawn] / totals[drawn].reshape(shape)


def median_interval(values: ArrayLike, weights: Weights, level: float = 0.95) -> Interval:
    """Median over documents of one value each, `[document, ...]`, with the interval of the median of resamples.

    A document whose value is NaN has none and is left out. The ends are None (NaN in an array) where fewer than two
    documents have a value. The median of an even number is the mean of the middle two, in resamples too.
    """
    array = np.asarray(values, dtype=np.float64)
    flat = array.reshape(array.shape[0], -1)
    if flat.shape[0] != weights.shape[1]:
        raise SatlensError(f"values of {flat.shape[0]} documents do not fit weights of {weights.shape[1]}")
    out = np.array([_median_ends(column, weights, level) for column in flat.T]).T.reshape(3, *array.shape[1:])
    if array.ndim > 1:
        return Interval(out[0], out[1], out[2])
    estimate, low, high = (None if np.isnan(value) else float(value) for value in out)
    return Interval(estimate, low, high)


def _median_ends(column: Floats, weights: Weights, level: float) -> tuple[float, float, float]:
    """Median of one column, and the ends of its interval."""
    known = np.flatnonzero(~np.isnan(column))
    if len(known) < 2:
        return (float(column[known[0]]) if len(known) else np.nan, np.nan, np.nan)
    order = known[np.argsort(column[known], kind="stable")]
    drawn = weights[:, order].cumsum(axis=1)
    drawn = drawn[drawn[:, -1] > 0]
    total = drawn[:, -1:]
    middle = [column[order][(drawn >= place).argmax(axis=1)] for place in ((total + 1) // 2, total // 2 + 1)]
    low, high = percentile_interval((middle[0] + middle[1]) / 2, level)
    return float(np.median(column[known])), low, high


def percentile_interval(samples: Floats, level: float = 0.95, discrete: bool = False) -> tuple[Any, Any]:
    """Lower and upper percentile along the resample axis, over the resamples that have a value.

    Where none has one, a single number gives None and an entry of an array NaN, which tables store as null.
    """
    if not 0 < level < 1:
        raise SatlensError(f"an interval's level is between 0 and 1, got {level}")
    tails = [(1 - level) / 2, (1 + level) / 2]
    flat = samples.reshape(samples.shape[0], -1)
    ends = np.full((2, flat.shape[1]), np.nan)
    defined = np.count_nonzero(~np.isnan(flat), axis=0) > 0
    method: Literal["inverted_cdf", "linear"] = "inverted_cdf" if discrete else "linear"
    ends[:, defined] = np.nanquantile(flat[:, defined], tails, axis=0, method=method)
    if samples.ndim == 1:
        return (float(ends[0, 0]), float(ends[1, 0])) if defined[0] else (None, None)
    low, high = ends.reshape(2, *samples.shape[1:])
    return low, high


def _interval(estimate: Any, samples: Floats | None, level: float, discrete: bool = False) -> Interval:
    low, high = (None, None) if samples is None else percentile_interval(samples, level, discrete)
    if np.ndim(estimate) == 0 and np.isnan(estimate):
        return Interval(None, low, high)
    return Interval(_scalar(estimate), low, high)


def _chunks(n_rows: int, n_columns: int) -> Iterator[slice]:
    step = max(1, _CHUNK_VALUES // max(1, n_columns))
    for start in range(0, n_rows, step):
        yield slice(start, min(start + step, n_rows))


def _scalar(value: Any) -> Any:
    return float(value) if np.ndim(value) == 0 else value


def _present(samples: Floats | None) -> Floats:
    assert samples is not None
    return samples


def _identity(ratios: Floats) -> Floats:
    return ratios
