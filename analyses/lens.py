"""At what depth does the model know: perplexity when each layer's residual stream goes straight to the head.

The logit lens of the paper's Fig. 5: final norm and unembedding on the ``stream`` behind every layer, that is on what
the model would end with there: the residual stream, DenseFormer's average, MUDDFormer's residual mix, the sum of
HyperConnections' streams. With a baseline, both models read the same tokens, and the crossover is the first layer
from which the model's NLL stays below the baseline's.

Examples:
    satlens lens reference-satformer --baseline reference-transformer
    satlens lens path/to/final --tokens 500000
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pandas as pd
import tyro

from satlens.reading import (
    Reading,
    Subject,
    begin_run,
    data_facts,
    measure,
    open_subject,
    open_text,
    require_same_text,
)
from satlens.run import Run, measured

RULE = "first layer from which the model's NLL is below the baseline's at every later layer"


@dataclass(frozen=True, kw_only=True)
class Config:
    """Flags of `satlens lens`."""

    model: tyro.conf.Positional[str] = "reference-satformer"
    """A checkpoint folder, or one of reference-satformer and reference-transformer."""
    baseline: str | None = None
    """A second model that reads the same tokens."""
    reading: Annotated[Reading, tyro.conf.arg(name="")] = field(default_factory=Reading)
    """Text and machine settings."""


def run(config: Config) -> Path | None:
    """Measure one model, or two on the same tokens; returns the run directory (None in helper processes)."""
    from satlens.stream import Condition

    subjects = [open_subject(config.model, config.reading)]
    if config.baseline is not None:
        subjects.append(open_subject(config.baseline, config.reading))
        require_same_text(*subjects)
    corpus = open_text(subjects[0], config.reading)
    out = begin_run("lens", config, config.reading)
    lenses = []
    for subject in subjects:
        clean = Condition(name="clean", accumulators=(accumulator(subject, corpus),))
        measure(subject, corpus, [clean], config.reading, f"lens {subject.name}")
        lenses.append(clean.accumulators[0])
    if out is None:
        return None
    return finish(out, subjects, corpus, lenses, config.reading)


def accumulator(subject: Subject, corpus: Any) -> Any:
    """What a pass must keep for this analysis."""
    from satlens.accumulators import LensNll
    from satlens.stream import nll_of

    return LensNll(
        corpus.n_documents, subject.sites, lambda residual, batch: nll_of(subject.bridge, residual, batch)
    )


def finish(out: Run, subjects: list[Subject], corpus: Any, lenses: list[Any], reading: Reading) -> Path:
    """Write per-document sums, perplexities, differences, crossover and figures, and make the run whole."""
    from analyses.figures.lens import FIGURES
    from satlens.bootstrap import document_weights

    count = lenses[0].layers[0].count.numpy()
    sums = [np.stack([layer.nll.numpy() for layer in lens.layers], axis=1) for lens in lenses]
    names = [subject.name for subject in subjects]
    weights = document_weights(corpus.n_documents, reading.resamples, reading.seed)
    tables = {"lens": by_layer(names, sums, count, weights)}
    out.table("lens_by_document", _by_document(names, sums, count, corpus))
    if len(subjects) == 2 and sums[0].shape == sums[1].shape:
        tables["lens_difference"] = difference(sums[0], sums[1], count, weights)
        tables["crossover"] = crossover(sums[0], sums[1], count, weights)
    for name, table in tables.items():
        out.table(name, table, {c: "nats per token" for c in ("nll", "delta_nll") if c in table})
    info = {
        "model": names[0],
        "baseline": names[1] if len(names) > 1 else None,
        "n_layers": subjects[0].sites.n_layers,
        "n_tokens": int(count.sum()),
        "n_documents": int((count > 0).sum()),
    }
    for name, figure in FIGURES.items():
        if name != "difference" or "lens_difference" in tables:
            out.figure(name, figure(tables, info))
    summary = {**info, **_headline(tables, names)}
    facts = {"model": subjects[0].facts, "data": data_facts(subjects[0], corpus, reading)}
    return out.finish(summary, baseline=subjects[1].facts if len(subjects) > 1 else None, **facts)


def by_layer(
    names: list[str], sums: list[np.ndarray], count: np.ndarray, weights: np.ndarray
) -> pd.DataFrame:
    """Perplexity of every model at every layer, with intervals over documents."""
    from satlens.bootstrap import perplexity_interval

    rows = []
    for name, nll in zip(names, sums, strict=True):
        for layer in range(nll.shape[1]):
            ppl = perplexity_interval(nll[:, layer], count, weights)
            mean = nll[:, layer].sum() / count.sum()
            rows.append((name, layer, int(count.sum()), int((count > 0).sum()), mean, *ppl))
    columns = ["model", "layer", "n_tokens", "n_documents", "nll", "perplexity", "low", "high"]
    return pd.DataFrame(rows, columns=columns)


def difference(
    model: np.ndarray, baseline: np.ndarray, count: np.ndarray, weights: np.ndarray
) -> pd.DataFrame:
    """NLL of the model minus the baseline's at each layer, paired on documents."""
    from satlens.bootstrap import delta_interval

    rows = []
    for layer in range(model.shape[1]):
        delta = delta_interval(model[:, layer], baseline[:, layer], count, weights).nll
        rows.append((layer, *delta))
    return pd.DataFrame(rows, columns=["layer", "delta_nll", "low", "high"])


def first_lasting_lead(delta: np.ndarray) -> np.ndarray:
    """First layer from which ``delta`` stays below 0 to the end, NaN where the last is not below 0.

    ``[..., layer]`` to ``[...]``.
    """
    below = delta < 0
    lasting = np.flip(np.logical_and.accumulate(np.flip(below, -1), -1), -1)
    first = np.argmax(lasting, axis=-1).astype(np.float64)
    return np.where(lasting[..., -1], first, np.nan)


def crossover(
    model: np.ndarray, baseline: np.ndarray, count: np.ndarray, weights: np.ndarray
) -> pd.DataFrame:
    """Where the model overtakes the baseline for good: the layer, its interval, and how often there is one."""
    from satlens.bootstrap import resampled_statistic, statistic_interval

    delta = model - baseline
    interval = statistic_interval(delta, count, weights, first_lasting_lead, discrete=True)
    _, values = resampled_statistic(delta, count, weights, first_lasting_lead)
    share = None if values is None else float(np.mean(~np.isnan(values)))
    row = {"layer": interval.estimate, "low": interval.low, "high": interval.high}
    table = pd.DataFrame([{**row, "share_of_resamples_with_crossover": share, "rule": RULE}])
    return table.astype({"layer": "Float64", "low": "Float64", "high": "Float64"})


def _by_document(names: list[str], sums: list[np.ndarray], count: np.ndarray, corpus: Any) -> pd.DataFrame:
    parts = []
    for name, nll in zip(names, sums, strict=True):
        docs, layers = nll.shape
        columns = {"doc": np.repeat(range(docs), layers), "layer": np.tile(range(layers), docs)}
        counts = np.repeat(count, layers).astype(np.int64)
        parts.append(pd.DataFrame({"model": name, **columns, "n_tokens": counts, "nll_sum": nll.ravel()}))
    return pd.concat(parts, ignore_index=True)


def _headline(tables: dict[str, pd.DataFrame], names: list[str]) -> dict[str, Any]:
    """The numbers a reader wants first."""
    out: dict[str, Any] = {}
    for name in names:
        last = tables["lens"][tables["lens"]["model"] == name].iloc[-1]
        out[f"perplexity_{name}"] = measured(last["perplexity"], last["low"], last["high"])
    if "crossover" in tables:
        row = tables["crossover"].iloc[0]
        layer, low, high = (None if pd.isna(row[k]) else float(row[k]) for k in ("layer", "low", "high"))
        out["crossover_layer"] = "none" if layer is None else measured(layer, low, high)
        out["crossover_share_of_resamples"] = row["share_of_resamples_with_crossover"]
        last = tables["lens_difference"].iloc[-1]
        out["final_delta_nll"] = measured(last["delta_nll"], last["low"], last["high"], "nats per token")
    return out
