"""From sums by item and span to tables: gates and effects of each span, and the contrasts that test the claim."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd

from satlens.bootstrap import delta_interval, percentile_interval, ratio_interval, resample
from satlens.evaluation.spans import SPANS, GatesBySpan, NllBySpan

BARE = "answer without context"
"""The answer asked for with nothing to retrieve it from."""


@dataclass(kw_only=True)
class Planned:
    """One way of treating the gates, and the sums it leaves."""

    name: str
    layer: int | None
    edits: tuple[Any, ...]
    sums: list[NllBySpan] = field(default_factory=list)
    """NLL by span with context, then without."""


def _cells(p: Planned) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """``(span, NLL by item, predictions by item)`` of a plan, last the answer without its context."""
    for place, span in enumerate(SPANS):
        yield span, p.sums[0].nll[:, place].numpy(), p.sums[0].count[:, place].numpy()
    yield BARE, p.sums[1].nll[:, 0].numpy(), p.sums[1].count[:, 0].numpy()


def by_item(numbers: Sequence[int], planned: Sequence[Planned]) -> pd.DataFrame:
    """One row an item and span: its document, predictions, and summed NLL under every treatment."""
    parts = []
    cells = [list(_cells(p)) for p in planned]
    for place, (span, _, count) in enumerate(cells[0]):
        columns = {p.name.replace(" ", "_"): cells[n][place][1] for n, p in enumerate(planned)}
        facts = {"item": range(len(count)), "document": list(numbers), "span": span, "n_tokens": count}
        parts.append(pd.DataFrame({**facts, **columns}))
    return pd.concat(parts, ignore_index=True).astype({"n_tokens": "int64"})


def gate_table(gates: GatesBySpan, weights: np.ndarray) -> pd.DataFrame:
    """Mean alpha and share of shut gates for each layer and span, over heads, with intervals over items."""
    rows = []
    for place, span in enumerate(SPANS):
        count = gates.count[:, place].numpy()
        if not count.sum():
            continue
        mean = ratio_interval(gates.sum[:, place].mean(-1).numpy(), count, weights)
        shut = ratio_interval(gates.shut[:, place].mean(-1).numpy(), count, weights)
        for at, layer in enumerate(gates.layers):
            values = [None if x is None else x[at] for x in (*mean, *shut)]
            rows.append((layer, span, *values, int(count.sum())))
    ends = ["mean", "low", "high", "shut", "shut_low", "shut_high"]
    return _floats(pd.DataFrame(rows, columns=["layer", "span", *ends, "n_tokens"]), ends)


def gate_contrasts(gates: GatesBySpan, weights: np.ndarray) -> pd.DataFrame:
    """Mean alpha of answer and mention tokens minus that of other context, by layer."""
    rows = []
    names = list(SPANS)
    base = names.index("context")
    for span in ("answer", "mention"):
        place = names.index(span)
        for at, layer in enumerate(gates.layers):
            first, second = (gates.sum[:, n, at].mean(-1).numpy() for n in (place, base))
            n_first, n_second = (gates.count[:, n].numpy() for n in (place, base))
            found = difference(first, second, n_first, n_second, weights)
            rows.append((layer, f"{span} - context", *found))
    ends = ["mean", "low", "high"]
    return _floats(pd.DataFrame(rows, columns=["layer", "contrast", *ends]), ends)


def effects(planned: Sequence[Planned], weights: np.ndarray) -> pd.DataFrame:
    """NLL and its change for each treatment and span, on the same tokens as clean; clean itself comes first."""
    rows = []
    clean = list(_cells(planned[0]))
    for p in planned:
        for (span, nll, count), (_, base, _) in zip(_cells(p), clean, strict=True):
            if not count.sum():
                continue
            delta = delta_interval(nll, base, count, weights).nll
            rows.append((p.name, p.layer, span, nll.sum() / count.sum(), *delta, int(count.sum())))
    ends = ["nll", "delta_nll", "low", "high"]
    columns = ["condition", "layer", "span", *ends, "n_tokens"]
    return _floats(pd.DataFrame(rows, columns=columns), ends).astype({"layer": "Int64"})


def effect_contrasts(planned: Sequence[Planned], weights: np.ndarray) -> pd.DataFrame:
    """What a treatment costs the answer beyond what it costs other context, and the answer without context."""
    rows = []
    clean = {span: nll for span, nll, _ in _cells(planned[0])}
    for p in planned[1:]:
        cells = {span: (nll - clean[span], count) for span, nll, count in _cells(p)}
        answer, n_answer = cells["answer"]
        for base in ("context", BARE):
            other, n_other = cells[base]
            if n_other.sum():
                found = difference(answer, other, n_answer, n_other, weights)
                rows.append((p.name, p.layer, f"answer - {base}", *found))
    ends = ["delta_nll", "low", "high"]
    table = pd.DataFrame(rows, columns=["condition", "layer", "contrast", *ends])
    return _floats(table, ends).astype({"layer": "Int64"})


def difference(
    first: np.ndarray, second: np.ndarray, n_first: np.ndarray, n_second: np.ndarray, weights: np.ndarray
) -> tuple[float, float | None, float | None]:
    """Mean per token of the first sums minus that of the second, with an interval over the items of both."""
    estimate = first.sum() / n_first.sum() - second.sum() / n_second.sum()
    if len(first) < 2:
        return float(estimate), None, None
    means = []
    for sums, counts in ((first, n_first), (second, n_second)):
        total = resample(counts, weights)
        mean = np.full(len(total), np.nan)
        means.append(np.divide(resample(sums, weights), total, out=mean, where=total > 0))
    return float(estimate), *percentile_interval(means[0] - means[1])


def _floats(table: pd.DataFrame, columns: list[str]) -> pd.DataFrame:
    """Columns that may hold no interval at all, as floats."""
    return table.astype(dict.fromkeys(columns, "float64"))
