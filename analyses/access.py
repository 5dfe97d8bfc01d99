"""How much first-layer value reaches layer n: V1 beside the layer's own values, across SATFormer and ResFormer.

A layer attends to c1 V1 + c2 V: c1 is SATFormer's gate alpha (c2 is 1) or ResFormer's lambda_1 (c2 is lambda_2). Two
measures a layer: the mean coefficient of V1 relative to that of the layer's own values, mean c1 / mean c2, and the
share of length |c1 V1| / (|c1 V1| + |c2 V|), its mean over positions and KV heads; 95 % intervals are over documents.
All models read the same tokens.

Examples:
    satlens access reference-satformer path/to/resformer/final
    satlens access path/to/final --text corpus.jsonl --tokens 1000000
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pandas as pd
import tyro

from satlens.errors import UserError
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

UNITS = {
    "coefficient": "mean coefficient of V1 / mean coefficient of the layer's own values",
    "share": "mean of |c1 V1| / (|c1 V1| + |c2 V|)",
}


@dataclass(frozen=True, kw_only=True)
class Config:
    """Flags of `satlens access`."""

    models: tyro.conf.Positional[tuple[str, ...]] = ("reference-satformer",)
    """Checkpoint folders or shipped names of models that mix first-layer values."""
    reading: Annotated[Reading, tyro.conf.arg(name="")] = field(default_factory=Reading)
    """Text and machine settings."""

    def __post_init__(self) -> None:
        if not self.models:
            raise UserError("nothing to measure: name at least one model")


def run(config: Config) -> Path | None:
    """Measure every model on the same tokens; returns the run directory (None in helper processes).

    Raises:
        UserError: a model that has no access to first-layer values, or models that read other tokens.
    """
    from satlens.stream import Condition

    subjects = [open_subject(model, config.reading) for model in config.models]
    for subject in subjects:
        if subject.sites.gate_kind is None:
            raise UserError(subject.sites.why_no_gate(subject.name))
        require_same_text(subjects[0], subject)
    names = labels(subjects)
    corpus = open_text(subjects[0], config.reading)
    out = begin_run("access", config, config.reading)
    sums = []
    for subject in subjects:
        clean = Condition(name="clean", accumulators=(accumulator(subject, corpus),))
        measure(subject, corpus, [clean], config.reading, f"access {subject.name}")
        sums.append(clean.accumulators[0])
    if out is None:
        return None
    return finish(out, subjects, names, corpus, sums, config.reading)


def accumulator(subject: Subject, corpus: Any) -> Any:
    """What a pass must keep for this analysis."""
    from satlens.accumulators import FirstValueIntake

    return FirstValueIntake(corpus.n_documents, subject.sites)


def labels(subjects: Sequence[Subject]) -> list[str]:
    """Names that tell the models apart: folders of one name get that of the folder above them.

    Raises:
        UserError: still two alike (the same model twice, say).
    """
    often = Counter(subject.name for subject in subjects)
    names = [
        subject.name if often[subject.name] == 1 else f"{subject.path.resolve().parent.name}/{subject.name}"
        for subject in subjects
    ]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise UserError(f"two models are called {twice}: name each model once, in folders of different names")
    return names


def finish(
    out: Run, subjects: list[Subject], names: list[str], corpus: Any, sums: list[Any], reading: Reading
) -> Path:
    """Write per-document sums, the table with intervals and the figure, and make the run whole."""
    from analyses.figures.access import FIGURES
    from satlens.bootstrap import document_weights

    weights = document_weights(corpus.n_documents, reading.resamples, reading.seed)
    parts = [
        by_layer(name, subject, kept.gated, kept.sums.numpy(), kept.count.numpy(), weights)
        for name, subject, kept in zip(names, subjects, sums, strict=True)
    ]
    tables = {"access": pd.concat(parts, ignore_index=True)}
    out.table("access", tables["access"], UNITS)
    kept = [
        by_document(name, one.gated, one.sums.numpy(), one.count.numpy())
        for name, one in zip(names, sums, strict=True)
    ]
    out.table("access_by_document", pd.concat(kept, ignore_index=True))
    facts = ("architecture", "n_layers", "d_model", "n_parameters", "digest")
    rows = [
        {"model": name, **{k: s.facts[k] for k in facts}} for name, s in zip(names, subjects, strict=True)
    ]
    out.table("models", pd.DataFrame(rows))
    count = sums[0].count
    info = {
        "models": names,
        "n_layers": max(subject.sites.n_layers for subject in subjects),
        "n_tokens": int(count.sum()),
        "n_documents": int((count > 0).sum()),
    }
    for name, figure in FIGURES.items():
        out.figure(name, figure(tables, info))
    summary = {**info, **_headline(tables["access"])}
    return out.finish(summary, model=subjects[0].facts, data=data_facts(subjects[0], corpus, reading))


def by_layer(
    name: str, subject: Subject, layers: list[int], sums: np.ndarray, count: np.ndarray, weights: np.ndarray
) -> pd.DataFrame:
    """Relative coefficient and share of length of V1 at each layer, with intervals over documents."""
    from satlens.bootstrap import ratio_interval, statistic_interval

    coefficient = statistic_interval(sums[..., :2], count, weights, relative)
    share = ratio_interval(sums[..., 2], count, weights)
    columns: dict[str, Any] = {"model": name, "gate": subject.sites.gate_kind, "layer": layers}
    for prefix, what, interval in (("", "coefficient", coefficient), ("share_", "share", share)):
        ends = {what: interval.estimate, f"{prefix}low": interval.low, f"{prefix}high": interval.high}
        columns |= {key: np.nan if value is None else value for key, value in ends.items()}
    return pd.DataFrame({**columns, "n_tokens": int(count.sum()), "n_documents": int((count > 0).sum())})


def relative(means: np.ndarray) -> np.ndarray:
    """Mean coefficient of V1 over that of the own values, NaN where that is 0: ``[..., 2]`` to ``[...]``."""
    first, own = means[..., 0], means[..., 1]
    return np.divide(first, own, out=np.full_like(first, np.nan), where=own != 0)


def by_document(name: str, layers: list[int], sums: np.ndarray, count: np.ndarray) -> pd.DataFrame:
    """Sums over the document's positions of the three means over heads, one row a document and layer."""
    index = pd.MultiIndex.from_product([range(len(count)), layers], names=["doc", "layer"])
    columns = {key: sums[..., at].ravel() for at, key in enumerate(("first", "own", "share"))}
    table = pd.DataFrame(columns, index=index).reset_index()
    table.insert(0, "model", name)
    return table.assign(n_tokens=np.repeat(count, len(layers)).astype(np.int64))


def _headline(table: pd.DataFrame) -> dict[str, Any]:
    """The numbers a reader wants first: where V1's share is largest in each model."""
    out: dict[str, Any] = {}
    for name, rows in table.groupby("model", sort=False):
        most = rows.loc[rows["share"].idxmax()]
        ends = (None if pd.isna(most[end]) else most[end] for end in ("share_low", "share_high"))
        out[f"{name}_largest_share_layer_{int(most['layer'])}"] = measured(most["share"], *ends, "of length")
    return out
