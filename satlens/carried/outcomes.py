"""Tables of what changes did: means and medians over documents with intervals, and effects against their controls."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from satlens.bootstrap import Floats, Weights, median_interval, percentile_interval, ratio_interval, resample
from satlens.carried.reader import Reader
from satlens.carried.setting import GATES
from satlens.carried.tally import CLEAN, Tally

MEASURES = {
    "kl_final": "nats, KL(clean || changed) at the final position",
    "kl_far": "nats, KL(clean || changed), mean over far positions",
    "delta_nll": "nats per prediction",
    "delta_entropy": "nats per far position",
    "top1": "share of far positions with the clean model's most probable token",
    "release": "share of (gate, far position) pairs above 0.5, minus clean, edited layer",
    "release_hard": "share of (gate, far position) pairs above 1, minus clean, edited layer",
    "delta_duty": "share of (gate, far position) pairs with pre-activation above 0, minus clean, edited layer",
    "delta_open": "share of (KV head, far position) pairs at which SATFormer's gate is open, minus clean, edited layer",
    "delta_alpha": "SATFormer's alpha, mean over KV heads and far positions, minus clean, edited layer",
}
"""Measures of a change and their units; each comes with a mean over documents, a median, and intervals of both."""
VERSUS = ("kl_final", "kl_far", "delta_nll", "release", "delta_duty", "delta_open", "delta_alpha")
"""Measures that are compared with the control distribution."""


def by_document(tally: Tally, reader: Reader) -> dict[str, tuple[Floats, Floats]]:
    """For each measure, sums ``[doc, change]`` and counts ``[doc]`` whose ratio it is."""
    counts = {name: count.numpy() for name, count in tally.counts.items()}
    out = {name: (tally.outputs[name][1:].numpy().T, counts[name[3:]]) for name in ("kl_final", "kl_far")}
    for name, key in (("delta_nll", "nll_scored"), ("delta_entropy", "entropy_far")):
        sums = tally.outputs[key].numpy()
        out[name] = ((sums[1:] - sums[CLEAN]).T, counts[key.rsplit("_", 1)[1]])
    out["top1"] = (tally.outputs["top1_far"][1:].numpy().T, counts["far"])
    gates = tally.probes["gates"].numpy()
    at = [min(change.start, reader.n_layers - 1) for change in tally.changes]
    width = np.array([reader.reads[layer].n_gates for layer in at], dtype=np.float64)
    for name, column in (("release", "fires"), ("release_hard", "fires_hard"), ("delta_duty", "duty")):
        moved = gates[1:, ..., GATES.index(column)] - gates[CLEAN, ..., GATES.index(column)]
        # each change at its own first layer: [change, doc] -> [doc, change]
        sums = moved[np.arange(len(at)), :, at].T / width
        out[name] = (sums, counts["far"])
    return {**out, **_own_gate(tally, at)}


def _own_gate(tally: Tally, at: Sequence[int]) -> dict[str, tuple[Floats, Floats]]:
    """What becomes of SATFormer's own gate at each change's first layer; NaN where that layer has none."""
    if "own" not in tally.probes:
        return {}
    own = tally.probes["own"].numpy()
    heads = own.shape[-1] // 2
    out = {}
    for name, part in (("delta_open", slice(heads)), ("delta_alpha", slice(heads, None))):
        moved = (own[1:, ..., part] - own[CLEAN, ..., part]).mean(-1)
        out[name] = (moved[np.arange(len(at)), :, list(at)].T, tally.counts["far"].numpy())
    return out


def effects_table(tally: Tally, reader: Reader, weights: Weights) -> pd.DataFrame:
    """One row a change: its labels, first layer, and every measure (spec part B, dose-response)."""
    table = pd.DataFrame([{"layer": change.start, **change.labels} for change in tally.changes])
    columns: dict[str, Any] = {}
    for name, (sums, counts) in by_document(tally, reader).items():
        columns |= both(name, sums, counts, weights)
    columns |= _firing(tally, reader)
    columns["altered"] = [place in tally.altered for place in range(len(tally.changes))]
    columns["n_tokens"] = int(tally.counts["far"].sum())
    columns["n_documents"] = int((tally.counts["far"] > 0).sum())
    return pd.concat([table, pd.DataFrame(columns, index=table.index)], axis=1)


def layers_table(tally: Tally, reader: Reader, weights: Weights) -> pd.DataFrame:
    """One row a change and layer from its first on: duty and firing there, minus clean."""
    gates, counts = tally.probes["gates"].numpy(), tally.counts["far"].numpy()
    rows = []
    for line, change in enumerate(tally.changes, start=1):
        at = np.arange(change.start, reader.n_layers)
        width = np.array([reader.reads[layer].n_gates for layer in at])[:, None]
        moved = ratio_interval((gates[line] - gates[CLEAN])[:, at] / width, counts, weights)
        ends = [part_or_nan(part, moved.estimate.shape) for part in moved]
        for index, layer in enumerate(at):
            row = {"edited_layer": change.start, **change.labels, "layer": int(layer)}
            for column, name in enumerate(("delta_duty", "release", "release_hard")):
                row |= dict(zip(_names(name), (float(end[index, column]) for end in ends), strict=True))
            rows.append({**row, "n_tokens": int(counts.sum())})
    return pd.DataFrame(rows)


def both(name: str, sums: Floats, counts: Floats, weights: Weights) -> dict[str, Floats]:
    """Columns of a measure: sum over counts with its interval, and the median over documents with its own."""
    known = np.isfinite(sums).all(0)
    if not known.all():  # a layer without a gate of this kind
        found = both(name, sums[:, known], counts, weights)
        return {key: _spread(values, known) for key, values in found.items()}
    mean = ratio_interval(sums, counts, weights)
    with np.errstate(invalid="ignore", divide="ignore"):
        each = np.where(counts[:, None] > 0, sums / counts[:, None], np.nan)
    middle = median_interval(each, weights)
    shape = sums.shape[1:]
    parts = [part_or_nan(part, shape) for part in (*mean, *middle)]
    return dict(zip((*_names(name), *_names(f"{name}_median")), parts, strict=True))


def against_controls(
    table: pd.DataFrame, tally: Tally, reader: Reader, weights: Weights, keys: Sequence[str]
) -> pd.DataFrame:
    """Each reference row against the controls that share its layer and ``keys``: ratio, its interval, percentile.

    The ratio is of absolute means (a release may fall below 0); its interval resamples documents for both at once. The
    percentile is the share of controls with a smaller absolute mean, ties counted half.
    """
    measures = by_document(tally, reader)
    rows = []
    for place in np.flatnonzero(table["direction"] == "reference").tolist():
        row = table.iloc[place]
        same = np.logical_and.reduce([table[key] == row[key] for key in ("layer", *keys)])
        for control in table.loc[~table["direction"].str.startswith("reference"), "direction"].unique():
            which = np.flatnonzero(same & (table["direction"] == control))
            if not len(which) or not row["altered"]:
                continue
            present = [
                name for name in VERSUS if name in measures and np.isfinite(measures[name][0][:, place]).all()
            ]
            found = {name: versus(*measures[name], place, which, weights) for name in present}
            labels = {"layer": row["layer"], **{key: row[key] for key in keys}, "control": control}
            rows += [
                {**labels, "measure": name, **values, "n_controls": len(which)}
                for name, values in found.items()
            ]
    return pd.DataFrame(rows)


def versus(sums: Floats, counts: Floats, place: int, which: Any, weights: Weights) -> dict[str, float]:
    """The change at ``place`` against those of ``which``, from sums ``[doc change]`` and counts ``[doc]``."""
    means = np.abs(sums.sum(0) / counts.sum())
    reference, controls = means[place], means[which]
    with np.errstate(divide="ignore", invalid="ignore"):
        samples = np.abs(resample(sums[:, [place, *which]], weights))
        ratios = samples[:, 0] / samples[:, 1:].mean(1)
        ratio = reference / controls.mean()
    low, high = (np.nan, np.nan)
    if np.count_nonzero(counts) > 1:
        low, high = (
            np.nan if end is None else end
            for end in percentile_interval(np.where(np.isfinite(ratios), ratios, np.nan))
        )
    return {
        "reference": float(reference),
        "control_mean": float(controls.mean()),
        "control_low": float(controls.min()),
        "control_high": float(controls.max()),
        "ratio": float(ratio) if np.isfinite(ratio) else np.nan,
        "ratio_low": low,
        "ratio_high": high,
        "percentile": 100 * float((controls < reference).mean() + (controls == reference).mean() / 2),
    }  # fmt: skip


def _firing(tally: Tally, reader: Reader) -> dict[str, Floats]:
    """Duty and firing of the clean model and of the change, at the change's first layer, over all documents."""
    gates, total = tally.probes["gates"].sum(1).numpy(), float(tally.counts["far"].sum())
    at = [min(change.start, reader.n_layers - 1) for change in tally.changes]
    width = np.array([reader.reads[layer].n_gates for layer in at]) * total
    lines = np.arange(1, tally.n_lines)
    out = {}
    for name, column in (("duty", 0), ("firing", 1), ("firing_hard", 2)):
        out[name] = gates[lines, at, column] / width
        out[f"{name}_clean"] = gates[CLEAN, at, column] / width
    return out


def arrays(tally: Tally) -> Mapping[str, Floats]:
    """The sums themselves, for resampling without the model: lines are the clean model and the table's rows."""
    return {
        **{f"count_{name}": count.numpy() for name, count in tally.counts.items()},
        **{name: sums.numpy() for name, sums in tally.outputs.items()},
        **{f"probe_{name}": sums.numpy() for name, sums in tally.probes.items()},
    }


def part_or_nan(part: Any, shape: tuple[int, ...]) -> Floats:
    """One part of an interval as an array; no interval (fewer than two documents) is NaN, in tables null."""
    return np.full(shape, np.nan) if part is None else np.asarray(part, dtype=np.float64).reshape(shape)


def _spread(values: Floats, known: Any) -> Floats:
    """Values of the known columns among all, NaN elsewhere."""
    out = np.full(len(known), np.nan)
    out[known] = values
    return out


def _names(name: str) -> tuple[str, str, str]:
    return name, f"{name}_low", f"{name}_high"
