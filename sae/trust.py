"""How far can a judge be trusted: does it tell coherent sets from placebos, at what score, and how surely.

Everything is a function of tables of scores: ``sets`` has one row per set (item, kind, truth, set, n, score, error). An
answer that could not be used has no score and is left out, with its whole item where items are counted.
"""

from collections.abc import Sequence
from math import sqrt
from typing import Any

import numpy as np
import pandas as pd

from sae.taxonomy import CATEGORIES
from satlens.bootstrap import Interval, document_weights, percentile_interval

Z = 1.959963984540054
"""Of a 95 % interval."""


def wilson(hits: int, n: int) -> Interval:
    """A share with its 95 % Wilson score interval, which stays honest at 0 of n, where a bootstrap says [0, 0]."""
    if n == 0:
        return Interval(None, None, None)
    share = hits / n
    centre = (share + Z * Z / (2 * n)) / (1 + Z * Z / n)
    half = Z * sqrt(share * (1 - share) / n + Z * Z / (4 * n * n)) / (1 + Z * Z / n)
    # in exact arithmetic the ends are 0 and 1 here
    return Interval(share, 0.0 if hits == 0 else centre - half, 1.0 if hits == n else centre + half)


def auc(coherent: pd.DataFrame, placebo: pd.DataFrame, resamples: int = 1000, seed: int = 0) -> Interval:
    """Probability that a coherent set outscores a placebo set, ties counting half.

    Interval: bootstrap over items, whose two sets are drawn together because they are no two observations; coherent
    and placebo items are drawn apart. No interval with fewer than two items on either side.
    """
    wins, pairs = _wins(coherent, placebo)
    if not pairs.sum():
        return Interval(None, None, None)
    low = high = None
    if min(wins.shape) > 1:
        up = document_weights(wins.shape[0], resamples, seed).astype(np.float64)
        down = document_weights(wins.shape[1], resamples, seed + 1).astype(np.float64)
        low, high = percentile_interval(((up @ wins) * down).sum(1) / ((up @ pairs) * down).sum(1))
    return Interval(float(wins.sum() / pairs.sum()), low, high)


def roc(coherent: pd.DataFrame, placebo: pd.DataFrame) -> pd.DataFrame:
    """Share of placebo and of coherent sets at or above each score that occurs, from the strictest to 0."""
    good = np.sort(coherent["score"].dropna().to_numpy(dtype=np.float64))
    bad = np.sort(placebo["score"].dropna().to_numpy(dtype=np.float64))
    columns = ["threshold", "false_positive", "true_positive"]
    if not len(good) or not len(bad):
        return pd.DataFrame(columns=columns, dtype=np.float64)
    at = np.unique(np.concatenate([good, bad]))[::-1]
    rates = [1 - np.searchsorted(scores, at, side="left") / len(scores) for scores in (bad, good)]
    table = pd.DataFrame(dict(zip(columns, [at, *rates], strict=True)))
    start = pd.DataFrame({"threshold": [np.nan], "false_positive": [0.0], "true_positive": [0.0]})
    return pd.concat([start, table], ignore_index=True)


def weakest(sets: pd.DataFrame) -> pd.Series:
    """The lower of each item's two scores: the item is retained when it reaches the threshold.

    Items with one set only, or with an answer that could not be used, are left out.
    """
    grouped = sets.groupby("item", sort=False)["score"]
    whole = (grouped.size() == 2) & (grouped.count() == 2)
    return grouped.min()[whole].astype(np.float64)


def retention(sets: pd.DataFrame, threshold: float) -> tuple[Interval, int]:
    """Share of items both of whose sets reach ``threshold``, and how many items that counts."""
    scores = weakest(sets)
    return wilson(int((scores >= threshold).sum()), len(scores)), len(scores)


def choose_threshold(placebo: pd.Series, observed: Sequence[float], most: float) -> float | None:
    """The lowest score that occurs at which at most ``most`` of placebo items are retained; None where none does.

    ``placebo`` are the items' weaker scores, ``observed`` all scores of the calibration. A judge that gives its top
    score to more than ``most`` of the placebos has no threshold.
    """
    values = placebo.to_numpy(dtype=np.float64)
    if not len(values):
        return None
    fit = [at for at in sorted(set(observed)) if np.mean(values >= at) <= most]
    return float(fit[0]) if fit else None


def confusion(truth: Sequence[str], answer: Sequence[str | None]) -> pd.DataFrame:
    """How often each category was answered for each: one row a pair that occurs, errors as answer null."""
    table = pd.DataFrame({"truth": list(truth), "answer": list(answer)}, dtype="object")
    counted = table.groupby(["truth", "answer"], dropna=False).size().reset_index(name="n")
    order = {name: place for place, name in enumerate(CATEGORIES)}
    keys = counted.assign(t=counted["truth"].map(order), a=counted["answer"].map(order))
    out = counted.loc[keys.sort_values(["t", "a"]).index].reset_index(drop=True)
    return out.astype({"truth": "object", "answer": "object", "n": "int64"})


def agreement(
    truth: Sequence[str], answer: Sequence[str | None], resamples: int = 1000, seed: int = 0
) -> tuple[Interval, Interval]:
    """``(accuracy, Cohen's kappa)`` over items that have an answer; kappa's interval is a bootstrap over items.

    Kappa is ``(p_o - p_e) / (1 - p_e)``; it is undefined where both sides use one and the same category throughout.
    """
    names = list(CATEGORIES)
    both = [(names.index(t), names.index(a)) for t, a in zip(truth, answer, strict=True) if a is not None]
    accuracy = wilson(sum(t == a for t, a in both), len(both))
    if not both:
        return accuracy, Interval(None, None, None)
    hot = np.zeros((len(both), len(names), len(names)))
    hot[np.arange(len(both)), [t for t, _ in both], [a for _, a in both]] = 1
    estimate = float(_kappa(hot.sum(0)[None])[0])
    low = high = None
    if len(both) > 1:
        weights = document_weights(len(both), resamples, seed).astype(np.float64)
        samples = _kappa((weights @ hot.reshape(len(both), -1)).reshape(-1, len(names), len(names)))
        low, high = percentile_interval(samples)
    return accuracy, Interval(None if np.isnan(estimate) else estimate, low, high)


def flip_rates(flips: pd.DataFrame, thresholds: dict[str, float | None]) -> list[dict[str, Any]]:
    """Share of answers that change when asked again, by kind (order, repetition) and question.

    A purity flips when it passes a threshold once and not the other time; a category flips when it is another.
    ``flips`` has kind, question, first, again (scores) and category_first, category_again.
    """
    rows = []
    for kind, here in flips.groupby("kind", sort=False):
        scored = here[(here["question"] == "purity")].dropna(subset=["first", "again"])
        for name, at in thresholds.items():
            if at is not None:
                changed = (scored["first"] >= at) != (scored["again"] >= at)
                rows.append(
                    {"kind": kind, "what": f"purity at {name}", **_share(int(changed.sum()), len(scored))}
                )
        moved = (scored["first"] - scored["again"]).abs()
        mean = float(moved.mean()) if len(moved) else None
        rows.append({"kind": kind, "what": "mean change of purity", "estimate": mean, "n": len(scored)})
        told = here[here["question"] == "category"].dropna(subset=["category_first", "category_again"])
        changed = told["category_first"] != told["category_again"]
        rows.append({"kind": kind, "what": "category", **_share(int(changed.sum()), len(told))})
    return rows


def _share(hits: int, n: int) -> dict[str, Any]:
    return {**wilson(hits, n)._asdict(), "n": n}


def _wins(coherent: pd.DataFrame, placebo: pd.DataFrame) -> tuple[np.ndarray, np.ndarray]:
    """For each coherent and placebo item: wins of the one's sets over the other's, and how many were compared."""
    good, bad = coherent.dropna(subset=["score"]), placebo.dropna(subset=["score"])
    a, b = good["score"].to_numpy(dtype=np.float64)[:, None], bad["score"].to_numpy(dtype=np.float64)[None]
    won = (a > b) + 0.5 * (a == b)
    rows, columns = pd.factorize(good["item"])[0], pd.factorize(bad["item"])[0]
    shape = (rows.max(initial=-1) + 1, columns.max(initial=-1) + 1)
    wins, pairs = np.zeros(shape), np.zeros(shape)
    np.add.at(wins, (rows[:, None], columns[None]), won)
    np.add.at(pairs, (rows[:, None], columns[None]), 1.0)
    return wins, pairs


def _kappa(tables: np.ndarray) -> np.ndarray:
    """Cohen's kappa of each ``[n, category, category]`` table of counts; NaN where chance agreement is 1."""
    n = tables.sum((1, 2))
    observed = np.trace(tables, axis1=1, axis2=2) / n
    expected = (tables.sum(2) * tables.sum(1)).sum(1) / n**2
    room = 1 - expected
    return np.divide(observed - expected, room, out=np.full_like(room, np.nan), where=room > 1e-12)
