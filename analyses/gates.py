"""Where is the gate open: mean alpha, share of shut gates and spread over heads, by layer, head, token and document.

Measures the paper's Fig. 3 (heatmap) and Fig. 8 (profile, sparsity, variation across heads) with 95 % intervals, and
stores the sums by token id, by document and by both, so that every figure, and what follows from it, can be made and
resampled again without the model. ResFormer's gate is lambda_1, one learned constant a layer.

Examples:
    satlens gates reference-satformer
    satlens gates path/to/final --text corpus.jsonl --tokens 1000000 --device cuda
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pandas as pd
import tyro

from satlens.errors import UserError
from satlens.reading import Reading, Subject, begin_run, data_facts, measure, open_subject, open_text
from satlens.run import Run, measured

PAIR_UNITS = {
    "doc": "document number; beyond 500 documents, number % 500 (documents joined into blocks)",
    "token": "token id",
    "count": "positions of the document that hold the token",
    "sum": "alpha summed over these positions and the KV heads, [pair layer]",
}


@dataclass(frozen=True, kw_only=True)
class Config:
    """Flags of `satlens gates`."""

    model: tyro.conf.Positional[str] = "reference-satformer"
    """A checkpoint folder, or reference-satformer."""
    reading: Annotated[Reading, tyro.conf.arg(name="")] = field(default_factory=Reading)
    """Text and machine settings."""


def run(config: Config) -> Path | None:
    """Measure the gates of one model; returns the run directory (None in helper processes)."""
    from satlens.stream import Condition

    subject = open_subject(config.model, config.reading)
    corpus = open_text(subject, config.reading)
    clean = Condition(name="clean", accumulators=(accumulator(subject, corpus),))
    out = begin_run("gates", config, config.reading)
    measure(subject, corpus, [clean], config.reading, "gates")
    if out is None:
        return None
    return finish(out, subject, corpus, clean.accumulators[0], config.reading)


def accumulator(subject: Subject, corpus: Any) -> Any:
    """What a pass must keep for this analysis.

    Raises:
        UserError: the model has no gates.
    """
    from satlens.accumulators import GateStatistics

    if subject.sites.gate_kind is None:
        raise UserError(subject.sites.why_no_gate(subject.name))
    return GateStatistics(corpus.n_documents, subject.sites)


def finish(out: Run, subject: Subject, corpus: Any, stats: Any, reading: Reading) -> Path:
    """Write sums, tables with intervals and figures, and make the run whole."""
    from analyses.figures.gates import FIGURES
    from satlens.accumulators import CLOSED_RULE
    from satlens.bootstrap import document_weights

    arrays = {name: value.numpy() for name, value in vars(stats).items() if hasattr(value, "numpy")}
    layers = stats.gated
    out.tensor("by_token", {k: arrays[k] for k in ("token_sum", "token_closed", "token_count")})
    out.tensor("by_document_token", stats.pairs.result(), PAIR_UNITS)
    out.table("documents", documents_table(corpus, arrays["doc_count"]))
    out.table("gate_by_document", by_document(arrays, layers))
    weights = document_weights(corpus.n_documents, reading.resamples, reading.seed)
    tables = {
        "gate_heatmap": heatmap(arrays, layers, weights),
        "gate_profile": profile(arrays, layers, weights),
        "gate_histogram": histogram(arrays, layers),
    }
    if stats.kind != "static":  # one constant a layer has no order among tokens
        tables["gate_top_tokens"] = top_tokens(arrays, layers, subject.tokenizer)
    units = {
        "mean": "alpha",
        "low": "alpha",
        "high": "alpha",
        "zero_fraction": "share of positions and heads",
    }
    for name, table in tables.items():
        out.table(name, table, {column: unit for column, unit in units.items() if column in table})
    info = {
        "model": subject.name,
        "gate": stats.kind,
        "closed_rule": CLOSED_RULE[stats.kind],
        "n_layers": subject.sites.n_layers,
        "n_tokens": int(arrays["doc_count"].sum()),
        "n_documents": int((arrays["doc_count"] > 0).sum()),
    }
    for name, figure in FIGURES.items():
        if stats.kind != "static" or name == "fig8_profile":  # nor a distribution, nor heads that differ
            out.figure(name, figure(tables, info))
    summary = {**info, **_headline(tables["gate_profile"], tables["gate_heatmap"])}
    return out.finish(summary, model=subject.facts, data=data_facts(subject, corpus, reading))


def documents_table(corpus: Any, counted: np.ndarray) -> pd.DataFrame:
    """One row a document: its source, length, and tokens counted in this run."""
    columns = {"doc": range(corpus.n_documents), "source": corpus.names, "length": corpus.lengths}
    return pd.DataFrame({**columns, "n_tokens": counted.astype(np.int64)})


def by_document(arrays: dict[str, np.ndarray], layers: list[int]) -> pd.DataFrame:
    """Sums of alpha, alpha squared and shut gates per document, layer and KV head."""
    docs, n_layers, heads = arrays["doc_sum"].shape
    index = pd.MultiIndex.from_product([range(docs), layers, range(heads)], names=["doc", "layer", "kv_head"])
    columns = {name: arrays[f"doc_{name}"].ravel() for name in ("sum", "square", "closed")}
    table = pd.DataFrame(columns, index=index).reset_index()
    table["n_tokens"] = np.repeat(arrays["doc_count"], n_layers * heads).astype(np.int64)
    return table


def heatmap(arrays: dict[str, np.ndarray], layers: list[int], weights: np.ndarray) -> pd.DataFrame:
    """Mean alpha and share of shut gates for each layer and head, with intervals over documents (Fig. 3)."""
    from satlens.bootstrap import ratio_interval

    mean = ratio_interval(arrays["doc_sum"], arrays["doc_count"], weights)
    shut = ratio_interval(arrays["doc_closed"], arrays["doc_count"], weights)
    heads = arrays["doc_sum"].shape[2]
    index = pd.MultiIndex.from_product([layers, range(heads)], names=["layer", "kv_head"])
    columns = {**_columns("", "mean", mean), **_columns("zero_", "zero_fraction", shut)}
    table = pd.DataFrame({k: _flat(v, len(index)) for k, v in columns.items()}, index=index).reset_index()
    table["n_tokens"] = int(arrays["doc_count"].sum())
    return table


def profile(arrays: dict[str, np.ndarray], layers: list[int], weights: np.ndarray) -> pd.DataFrame:
    """Per layer: mean alpha, share of shut gates, coefficient of variation across heads (Fig. 8)."""
    from satlens.bootstrap import ratio_interval, statistic_interval

    count = arrays["doc_count"]
    mean = ratio_interval(arrays["doc_sum"].mean(2), count, weights)
    shut = ratio_interval(arrays["doc_closed"].mean(2), count, weights)
    cv = statistic_interval(arrays["doc_sum"], count, weights, variation_across_heads)
    columns = {
        **_columns("", "mean", mean),
        **_columns("zero_", "zero_fraction", shut),
        **_columns("cv_", "cv", cv),
    }
    table = pd.DataFrame({"layer": layers, **{k: _flat(v, len(layers)) for k, v in columns.items()}})
    table["n_tokens"] = int(count.sum())
    return table


def variation_across_heads(means: np.ndarray) -> np.ndarray:
    """Population standard deviation over heads of the per-head means, divided by their mean; NaN where that is 0.

    ``[..., layer, kv_head]`` to ``[..., layer]`` (spec part A, Fig. 8 right).
    """
    centre = means.mean(-1)
    spread = means.std(-1)
    return np.divide(spread, centre, out=np.full_like(spread, np.nan), where=centre != 0)


def histogram(arrays: dict[str, np.ndarray], layers: list[int]) -> pd.DataFrame:
    """Counts of gate values by logarithmic bin; the row with both edges 0 counts exact zeros."""
    edges = arrays["edges"].astype(np.float64)
    rows = []
    for at, layer in enumerate(layers):
        for head in range(arrays["histogram"].shape[1]):
            rows.append((layer, head, 0.0, 0.0, int(arrays["exact_zero"][at, head])))
            counts = arrays["histogram"][at, head]
            rows += [(layer, head, edges[i], edges[i + 1], int(c)) for i, c in enumerate(counts) if c]
    return pd.DataFrame(rows, columns=["layer", "kv_head", "bin_low", "bin_high", "count"])


def top_tokens(
    arrays: dict[str, np.ndarray], layers: list[int], tokenizer: Any, least: int = 20
) -> pd.DataFrame:
    """The ten token ids with the largest mean alpha in each layer, among those seen at least ``least`` times."""
    seen = np.flatnonzero(arrays["token_count"] >= least)
    rows = []
    for at, layer in enumerate(layers):
        means = arrays["token_sum"][seen, at].mean(1) / arrays["token_count"][seen]
        for rank, place in enumerate(np.argsort(-means, kind="stable")[:10]):
            token = int(seen[place])
            piece = tokenizer.convert_ids_to_tokens(token)
            rows.append((layer, rank, token, piece, float(means[place]), int(arrays["token_count"][token])))
    return pd.DataFrame(rows, columns=["layer", "rank", "token_id", "piece", "mean", "n_tokens"])


def _columns(prefix: str, name: str, interval: Any) -> dict[str, Any]:
    return {name: interval.estimate, f"{prefix}low": interval.low, f"{prefix}high": interval.high}


def _flat(value: Any, n: int) -> Any:
    return np.full(n, np.nan) if value is None else np.asarray(value, dtype=np.float64).ravel()


def _headline(profile: pd.DataFrame, heatmap: pd.DataFrame) -> dict[str, Any]:
    """The numbers a reader wants first."""
    out: dict[str, Any] = {}
    for row in (profile.iloc[0], profile.iloc[-1]):
        at = f"layer_{int(row['layer'])}"
        out[f"{at}_mean_alpha"] = measured(row["mean"], row["low"], row["high"])
        out[f"{at}_share_shut"] = measured(row["zero_fraction"], row["zero_low"], row["zero_high"])
    most = heatmap.loc[heatmap["mean"].idxmax()]
    where = f"layer_{int(most['layer'])}_head_{int(most['kv_head'])}"
    return {**out, f"most_open_head_{where}": measured(most["mean"], most["low"], most["high"], "mean alpha")}
