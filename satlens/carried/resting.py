"""What gates rest on: coupling to the carried mean against the bias, how often gates are on, what orders that."""

from collections.abc import Callable

import numpy as np
import pandas as pd
import torch

from satlens.bootstrap import (
    Floats,
    Interval,
    Weights,
    percentile_interval,
    ratio_interval,
    statistic_interval,
)
from satlens.carried.directions import random_units
from satlens.carried.mean import columns
from satlens.carried.reads import GateRead
from satlens.carried.statics import Statics, beta, linearity_error
from satlens.carried.sums import FIRING

N_RANDOM = 16
"""Random directions at the read's norm, orthogonal to b^."""
CHUNK = 100
"""Resamples of all couplings of a layer held at once."""


def resting_table(statics: Statics, fit: Weights, evaluate: Weights) -> pd.DataFrame:
    """Per layer, over its gates: medians of ``w.b`` and beta, dominance, duty and firing (spec part B, decomposition).

    ``dominance`` is the share of gates with ``|w.b| > |beta|`` (the paper's code), ``dominance_resting`` the same
    among gates whose resting term is negative (the paper's words), ``ratio`` the ratio of the medians of the two
    magnitudes (null without biases). Couplings are of the fit documents, duty and firing of the evaluated ones.
    """
    reads = [read for read in (*statics.reads, *statics.value_reads) if read.layer in statics.layers]
    return pd.DataFrame([_resting_row(statics, read, fit, evaluate) for read in reads])


def _resting_row(statics: Statics, read: GateRead, fit: Weights, evaluate: Weights) -> dict[str, object]:
    bias = beta(read)
    names: dict[str, Callable[[Floats], Floats]] = {
        "coupling": lambda c: np.median(c, axis=-1),
        "resting": lambda c: np.median(c + bias, axis=-1),
        "dominance": lambda c: (np.abs(c) > np.abs(bias)).mean(-1),
        "dominance_resting": lambda c: _dominance_among_negative(c, bias),
        "coupling_size": lambda c: np.median(np.abs(c), axis=-1),
    }
    found = _coupling_intervals(statics, read, fit, names)
    weight = read.weight.double().cpu().numpy()
    c, b = couplings(statics, read), read_mean(statics, read)
    lengths = np.linalg.norm(weight, axis=1) * np.linalg.norm(b)
    slices = np.divide(np.abs(c), lengths, out=np.zeros_like(c), where=lengths > 0)
    size = float(np.median(np.abs(bias)))
    error, scale = linearity_error(statics, read)
    return {
        "layer": read.layer,
        "kind": read.kind,
        "n_gates": read.n_gates,
        **{key: value for name, interval in found.items() for key, value in columns(name, interval).items()},
        "bias": float(np.median(bias)),
        "ratio": float(np.median(np.abs(c))) / size if size else np.nan,
        "slice": float(np.median(slices)),
        "negative": float((c + bias < 0).mean()),
        **_duty_columns(statics, read, evaluate),
        "linearity_error": error / scale if scale else 0.0,
        "n_tokens": int(statics.evaluate["count"].sum()),
    }


def _dominance_among_negative(c: Floats, bias: Floats) -> Floats:
    negative = c + bias < 0
    n = negative.sum(-1)
    wins = (negative & (np.abs(c) > np.abs(bias))).sum(-1)
    return np.divide(wins, n, out=np.full(n.shape, np.nan), where=n > 0)


def _duty_columns(statics: Statics, read: GateRead, evaluate: Weights) -> dict[str, object]:
    """Mean and median duty over gates, and the share of (gate, position) pairs that fire."""
    at, count = f"{read.kind}_{read.layer}", statics.evaluate["count"]
    duty = statics.evaluate[f"duty_{at}"]
    out: dict[str, object] = {
        **columns("duty", ratio_interval(duty.mean(1, dtype=np.float64), count, evaluate))
    }
    median = statistic_interval(duty, count, evaluate, lambda d: np.median(d, axis=-1))
    out.update(columns("duty_median", median))
    for place, level in enumerate(FIRING):
        fired = statics.evaluate[f"fired_{at}"][:, place] / read.n_gates
        found = ratio_interval(fired, count, evaluate) if read.elementwise else Interval(None, None, None)
        out.update(columns(f"firing_{level:g}".replace(".", ""), found))
    return out


def gates_table(statics: Statics, most: int = 400) -> pd.DataFrame:
    """Single gates, evenly chosen by number: coupling, bias, resting term, measured mean pre-activation and duty (what
    spec part B's decomposition and rank nulls are taken over)."""
    parts = []
    count = statics.evaluate["count"].sum()
    for read in (*statics.reads, *statics.value_reads):
        if read.layer not in statics.layers:
            continue
        at = f"{read.kind}_{read.layer}"
        gates = np.unique(np.linspace(0, read.n_gates - 1, min(most, read.n_gates)).astype(int))
        c, bias = couplings(statics, read)[gates], beta(read)[gates]
        parts.append(
            pd.DataFrame(
                {
                    "layer": read.layer,
                    "kind": read.kind,
                    "gate": gates,
                    "coupling": c,
                    "bias": bias,
                    "resting": c + bias,
                    "mean_pre": statics.evaluate[f"pre_{at}"][gates] / count,
                    "duty": statics.evaluate[f"duty_{at}"][:, gates].sum(0) / count,
                }
            )
        )
    return pd.concat(parts, ignore_index=True)


def value_gates_table(statics: Statics, fit: Weights, evaluate: Weights) -> pd.DataFrame:
    """SATFormer's own gates, one row a layer and head: resting logit ``W_alpha.b_attn`` and duty.

    For a ReLU gate, duty is 1 minus the share of exact zeros of Fig. 8 (spec part B, the bridge between the papers).
    """
    parts, count = [], statics.evaluate["count"]
    for read in statics.value_reads:
        found = _coupling_intervals(statics, read, fit, {"coupling": lambda c: c})["coupling"]
        bias, at = beta(read), f"{read.kind}_{read.layer}"
        shift = Interval(*(None if end is None else end + bias for end in found))
        duty = ratio_interval(statics.evaluate[f"duty_{at}"], count, evaluate)
        parts.append(
            pd.DataFrame(
                {
                    "layer": read.layer,
                    "kv_head": np.arange(read.n_gates),
                    "coupling": found.estimate,
                    "bias": bias,
                    **_arrays("resting", shift, read.n_gates),
                    "mean_logit": statics.evaluate[f"pre_{at}"] / count.sum(),
                    **_arrays("duty", duty, read.n_gates),
                    "n_tokens": int(count.sum()),
                }
            )
        )
    return pd.concat(parts, ignore_index=True)


def rank_table(statics: Statics, evaluate: Weights, seed: int) -> pd.DataFrame:
    """Spearman correlation of duty with what might order it (spec part B, rank nulls).

    ``resting`` and ``coupling`` against ``random`` (directions at the length of b, orthogonal to it, one row a draw),
    ``read norm`` (|w| alone) and ``bias`` alone. That resting term and duty agree is near-tautological; only the
    random directions say whether the direction matters. A constant has no ranks: null.
    """
    rows = []
    for read in statics.reads:
        if read.layer not in statics.layers:
            continue
        duty, count = statics.evaluate[f"duty_mlp_{read.layer}"], statics.evaluate["count"]
        predictors = _predictors(statics, read, seed)
        ranks = np.stack([average_ranks(values[None])[0] for values in predictors.values()])
        estimate = spearman(ranks, duty.sum(0)[None] / count.sum())[:, 0]
        low, high = np.full_like(estimate, np.nan), np.full_like(estimate, np.nan)
        if np.count_nonzero(count) > 1:
            totals = evaluate.astype(np.float64) @ duty
            samples = spearman(ranks, totals / (evaluate @ count)[:, None])
            low, high = percentile_interval(np.moveaxis(samples, 1, 0))
        for place, name in enumerate(predictors):
            predictor, _, draw = name.partition(":")
            number = int(draw) if draw else None
            rows.append(
                (read.layer, predictor, number, estimate[place], low[place], high[place], read.n_gates)
            )
    return pd.DataFrame(rows, columns=["layer", "predictor", "draw", "rho", "rho_low", "rho_high", "n_gates"])


def _predictors(statics: Statics, read: GateRead, seed: int) -> dict[str, Floats]:
    weight, b = read.weight.double().cpu().numpy(), read_mean(statics, read)
    c, bias = couplings(statics, read), beta(read)
    generator = torch.Generator().manual_seed(seed * 1009 + read.layer)
    random = random_units(torch.from_numpy(b), N_RANDOM, generator).double().numpy() * np.linalg.norm(b)
    out = {"resting": c + bias, "coupling": c, "read norm": np.linalg.norm(weight, axis=1), "bias": bias}
    return {**out, **{f"random:{draw}": weight @ r + bias for draw, r in enumerate(random)}}


def average_ranks(values: Floats) -> Floats:
    """Ranks along the last axis, equal values sharing the mean of theirs."""
    order = np.argsort(values, axis=-1, kind="stable")
    sorted_values = np.take_along_axis(values, order, -1)
    n = values.shape[-1]
    place = np.broadcast_to(np.arange(n), values.shape)
    new = np.ones(values.shape, dtype=bool)
    new[..., 1:] = sorted_values[..., 1:] != sorted_values[..., :-1]
    first = np.maximum.accumulate(np.where(new, place, 0), axis=-1)
    closes = np.ones(values.shape, dtype=bool)
    closes[..., :-1] = new[..., 1:]
    last = np.minimum.accumulate(np.where(closes, place, n - 1)[..., ::-1], axis=-1)[..., ::-1]
    ranks = np.empty(values.shape)
    np.put_along_axis(ranks, order, (first + last) / 2, -1)
    return ranks


def spearman(ranks: Floats, values: Floats) -> Floats:
    """``[predictor gate]`` ranks against ``[n gate]`` values: correlations ``[predictor n]``, NaN for a constant."""
    one, other = ranks - ranks.mean(-1, keepdims=True), average_ranks(values)
    other = other - other.mean(-1, keepdims=True)
    scale = np.linalg.norm(one, axis=-1)[:, None] * np.linalg.norm(other, axis=-1)[None]
    inner = one @ other.T
    return np.divide(inner, scale, out=np.full_like(inner, np.nan), where=scale > 0)


def read_mean(statics: Statics, read: GateRead) -> Floats:
    """``b_L``: the mean of what the gate linear reads, on the fit documents."""
    total: Floats = statics.fit[read.roles[0]][:, read.layer].sum(0)
    return total / statics.fit["count"].sum()


def couplings(statics: Statics, read: GateRead) -> Floats:
    """``w_n.b_L`` of every gate."""
    return read.weight.double().cpu().numpy() @ read_mean(statics, read)


def _coupling_intervals(
    statics: Statics, read: GateRead, fit: Weights, statistics: dict[str, Callable[[Floats], Floats]]
) -> dict[str, Interval]:
    """Statistics of a layer's couplings ``[n gate]`` with intervals, resampling the documents behind ``b``."""
    estimate = couplings(statics, read)[None]
    points = {name: statistic(estimate)[0] for name, statistic in statistics.items()}
    count = statics.fit["count"]
    if np.count_nonzero(count) < 2:
        return {name: Interval(point, None, None) for name, point in points.items()}
    sums, weight = statics.fit[read.roles[0]][:, read.layer], read.weight.double().cpu().numpy()
    samples: dict[str, list[Floats]] = {name: [] for name in statistics}
    for at in range(0, len(fit), CHUNK):
        drawn = fit[at : at + CHUNK].astype(np.float64)
        c = (drawn @ sums) / (drawn @ count)[:, None] @ weight.T
        for name, statistic in statistics.items():
            samples[name].append(statistic(c))
    return {
        name: Interval(points[name], *percentile_interval(np.concatenate(samples[name])))
        for name in statistics
    }


def _arrays(name: str, interval: Interval, n: int) -> dict[str, Floats]:
    ends = {name: interval.estimate, f"{name}_low": interval.low, f"{name}_high": interval.high}
    return {key: np.full(n, np.nan) if value is None else np.asarray(value) for key, value in ends.items()}
