"""The object itself: how stable the carried direction is, what share of the stream it holds, how it turns."""

from collections.abc import Mapping
from itertools import combinations

import numpy as np
import pandas as pd

from satlens.bootstrap import (
    Floats,
    Interval,
    Weights,
    percentile_interval,
    ratio_interval,
    statistic_interval,
)
from satlens.carried.statics import Statics

GROWTH_FROM = 1 / 16
"""Depth fraction that stream norms are compared with (the paper: layer 2 of 32)."""
N_SPLITS = 200
"""Random halvings of the documents."""
CHUNK = 50
"""Resamples of all layers' means held at once."""


def object_table(statics: Statics, fit: Weights, evaluate: Weights) -> pd.DataFrame:
    """Per layer: share of the stream along m^, stream norm and growth, norm of m and of b, their cosine.

    ``share`` is the mean over far positions of ``(x.m^)/|x|``, with m^ from the fit documents (spec part B, share).
    """
    sums, count = statics.evaluate, statics.evaluate["count"]
    start = max(1, int(statics.n_layers * GROWTH_FROM)) if statics.n_layers > 1 else 0
    norm_start = sums["norm"][:, start].sum()
    rows = []
    for layer in range(statics.n_layers):
        share = ratio_interval(sums["share"][:, layer], count, evaluate)
        norm = ratio_interval(sums["norm"][:, layer], count, evaluate)
        m, b = (statics.fit[role][:, layer] for role in ("resid", "read"))
        m_norm = statistic_interval(m, statics.fit["count"], fit, _length)
        b_norm = statistic_interval(b, statics.fit["count"], fit, _length)
        rows.append(
            {
                "layer": layer,
                **columns("share", share),
                "share_abs": sums["size"][:, layer].sum() / count.sum(),
                **columns("stream_norm", norm),
                "growth": sums["norm"][:, layer].sum() / norm_start if norm_start else np.nan,
                **columns("m_norm", m_norm),
                **columns("b_norm", b_norm),
                "cos_b_m": cosine(m.sum(0), b.sum(0)),
                "n_tokens": int(count.sum()),
            }
        )
    return pd.DataFrame(rows)


def stability_table(statics: Statics, evaluate: Weights, seed: int) -> pd.DataFrame:
    """Cosine of m between halves of the documents, and between kinds of text (spec part B, stability).

    ``halves``: the mean over ``N_SPLITS`` random halvings of the fit documents, low and high the range of 95 % of
    them (a bootstrap would repeat documents and understate it). ``kinds``: between means of the evaluated documents of
    two kinds with at least two documents each, with a bootstrap interval; ``within`` is the cosine between halves of
    the smaller kind alone, below which a difference between kinds means little.
    """
    generator = np.random.default_rng(seed)
    rows = _half_rows(statics.fit["resid"], np.arange(len(statics.fit["count"])), generator)
    kinds = np.array(statics.kinds)
    many = [kind for kind in dict.fromkeys(statics.kinds) if (kinds == kind).sum() >= 2]
    within = {
        kind: _half_rows(statics.evaluate["resid"], np.flatnonzero(kinds == kind), generator) for kind in many
    }
    for first, second in combinations(many, 2):
        rows += _kind_rows(statics, evaluate, kinds, first, second, within)
    names = [
        "layer",
        "comparison",
        "first",
        "second",
        "cosine",
        "cosine_low",
        "cosine_high",
        "within",
        "n_first",
    ]
    return pd.DataFrame(rows, columns=[*names, "n_second"])


def _half_rows(sums: Floats, places: np.ndarray, generator: np.random.Generator) -> list[dict[str, object]]:
    """One row a layer: cosines between the means of random halves of some documents."""
    half = len(places) // 2
    if not half:
        return []
    chosen = np.zeros((N_SPLITS, len(sums)))
    for split in range(N_SPLITS):
        order = generator.permutation(places)
        chosen[split, order[:half]], chosen[split, order[half:]] = 1, -1
    rows: list[dict[str, object]] = []
    for layer in range(sums.shape[1] - 1):
        m = sums[:, layer]
        both = np.stack([(chosen == side).astype(np.float64) @ m for side in (1, -1)], axis=1)
        found = _pair_cosine(both)
        low, high = percentile_interval(found)
        counts = {"n_first": half, "n_second": len(places) - half}
        ends = {"cosine": float(found.mean()), "cosine_low": low, "cosine_high": high}
        rows.append(
            {"layer": layer, "comparison": "halves", "first": "half", "second": "rest", **ends, **counts}
        )
    return rows


def rotation_table(statics: Statics, fit: Weights) -> pd.DataFrame:
    """``cos(m^_L, m^_L')`` for every pair of layers (spec part B, rotation)."""
    means = statics.fit["resid"][:, :-1]
    estimate = _gram(means.sum(0)[None])[0]
    low = high = np.full_like(estimate, np.nan)
    if len(means) > 1:
        flat = means.reshape(len(means), -1)
        parts = [
            _gram((fit[at : at + CHUNK].astype(np.float64) @ flat).reshape(-1, *means.shape[1:]))
            for at in range(0, len(fit), CHUNK)
        ]
        low, high = percentile_interval(np.concatenate(parts))
    first, second = np.indices(estimate.shape)
    return pd.DataFrame(
        {
            "layer": first.ravel(),
            "other": second.ravel(),
            "cosine": estimate.ravel(),
            "cosine_low": low.ravel(),
            "cosine_high": high.ravel(),
        }
    )


def columns(name: str, interval: Interval) -> dict[str, float | None]:
    """A number and the ends of its interval, as three columns."""
    return {name: interval.estimate, f"{name}_low": interval.low, f"{name}_high": interval.high}


def cosine(one: Floats, other: Floats) -> float:
    """Cosine of two vectors; NaN where one has no length."""
    length = float(np.linalg.norm(one) * np.linalg.norm(other))
    return float(one @ other) / length if length else float("nan")


def _kind_rows(
    statics: Statics,
    weights: Weights,
    kinds: np.ndarray,
    first: str,
    second: str,
    within: Mapping[str, list[dict[str, object]]],
) -> list[dict[str, object]]:
    """One row a layer: cosine between the means of two kinds, all documents resampled together."""
    one, other = kinds == first, kinds == second
    smaller = first if one.sum() <= other.sum() else second
    rows: list[dict[str, object]] = []
    for layer in range(statics.n_layers):
        m = statics.evaluate["resid"][:, layer]
        both = np.stack([m * one[:, None], m * other[:, None]], axis=1)
        found = statistic_interval(both, statics.evaluate["count"], weights, _pair_cosine)
        counts = {"n_first": int(one.sum()), "n_second": int(other.sum())}
        row = {"layer": layer, "comparison": "kinds", "first": first, "second": second, **counts}
        rows.append({**row, **columns("cosine", found), "within": within[smaller][layer]["cosine"]})
    return rows


def _length(means: Floats) -> Floats:
    out: Floats = np.linalg.norm(means, axis=-1)
    return out


def _pair_cosine(means: Floats) -> Floats:
    """``[n 2 d_model]`` to ``[n]``: where a resample holds no document of a group, there is no cosine."""
    lengths = np.linalg.norm(means, axis=-1).prod(-1)
    inner = np.einsum("nd,nd->n", means[:, 0], means[:, 1])
    return np.divide(inner, lengths, out=np.full_like(inner, np.nan), where=lengths > 0)


def _gram(means: Floats) -> Floats:
    """``[n layer d_model]`` to the cosines of every two layers ``[n layer layer]``."""
    units = means / np.linalg.norm(means, axis=-1, keepdims=True)
    return np.einsum("nld,nkd->nlk", units, units)
