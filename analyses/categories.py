"""Does the gate let some kinds of V1 features in more than others (Fig. 6), and which kinds are there (Fig. 9)?

A position belongs to a feature when the feature is active on its token. Mean alpha per feature, then per category:
each feature counts once, or as often as it has positions. Everything comes from a run of satlens gates and from labels,
so no model is run. Intervals resample documents and features together. Beside them stands what token frequency alone
explains: the same means with gate values traded among tokens that occur about as often. Several labels are several
training seeds.

Examples:
    satlens categories reference-satformer --labels runs/sae-label-*
    satlens categories path/to/final --baseline path/to/twin/final --labels runs/sae-label-a runs/sae-label-b
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import tyro

from satlens.errors import UserError
from satlens.run import Run, measured, start_run

DIFFERENCES = (("semantic", "structural"), ("semantic", "functional"))
INTERVAL = "alpha, interval over documents and features"
LEAST_FEATURES = 5
"""Features below which a category gets no interval over features, and so no joint one: a few say little of others.
For a mean over dictionaries they may come from all of them, two at least from each."""
MEAN = "mean"
"""Stands in the column ``seed`` for the mean over several dictionaries."""
UNITS = {
    "mean": "alpha",
    "low": "alpha, joint 95 % interval over documents and features",
    "high": "alpha, joint 95 % interval over documents and features",
    "low_documents": "alpha, over documents only",
    "high_documents": "alpha, over documents only",
    "low_features": "alpha, over features only",
    "high_features": "alpha, over features only",
    "null_low": "alpha, 95 % of permutations of token types of about equal frequency",
    "null_high": "alpha, 95 % of permutations of token types of about equal frequency",
    "seed_low": "alpha, lowest of the dictionaries",
    "seed_high": "alpha, highest of the dictionaries",
    "n_features": "features with at least one position in the text",
    "n_tokens": "positions, once for each feature they belong to",
    "share": "share of the labelled features",
}


@dataclass(frozen=True, kw_only=True)
class Config:
    """Flags of `satlens categories`."""

    model: tyro.conf.Positional[str] = "reference-satformer"
    """The model whose gates are asked about: a checkpoint folder, or reference-satformer."""
    labels: tuple[Path, ...]
    """Runs of satlens sae label: dictionaries of the model, one per training seed, and of --baseline."""
    gates: Path | None = None
    """The run of satlens gates to use; left out, the newest of this model below --runs."""
    baseline: str | None = None
    """A model whose labels stand beside the model's in the distribution over categories."""
    resamples: int = 1000
    """Bootstrap resamples behind each 95 % interval, and permutations behind each null."""
    seed: int = 0
    """Decides the resampling."""
    runs: Path = Path("runs")
    """Folder that finished runs are looked for in and go to."""

    def __post_init__(self) -> None:
        if self.resamples < 100:
            raise UserError(f"an interval from {self.resamples} resamples would be noise; use at least 100")


def run(config: Config) -> Path:
    """Average, resample, write; returns the run directory."""
    from analyses.latents.gating import members, sampled_means
    from analyses.latents.opening import facts_of, open_all
    from satlens.gate_sums import open_gates

    facts, other = facts_of(config.model), facts_of(config.baseline) if config.baseline else None
    if facts["gate"] is None:
        raise UserError(f"{facts['name']} is a {facts['architecture']}: it has no gates to ask about")
    mine, theirs = open_all(config.labels, facts, other)
    gates = open_gates(config.gates, config.runs, facts, f"satlens gates {config.model} --runs {config.runs}")
    known = {str(labels.seed): members(labels.features, labels.activations, gates.count) for labels in mine}
    for labels in mine:
        if not len(known[str(labels.seed)].table):
            raise UserError(
                f"{labels.run.path}: no accepted feature has a position in the text of {gates.run.path}: "
                "run satlens gates on more text"
            )
    out = start_run(config.runs, "categories", config, sys.argv[1:])
    samples = {
        seed: sampled_means(known[seed], gates, config.resamples, config.seed, stream)
        for stream, seed in enumerate(known)
    }
    tables = {
        "category_gating": category_table(samples, known, gates),
        "differences": difference_table(samples, known, gates),
        "category_gating_heads": heads_table(known, gates),
        "feature_gating": feature_table(known, gates),
        "distribution": distribution_table([(facts, mine), *([(other, theirs)] if other else [])]),
    }
    return finish(out, config, tables, known, gates, (facts, other), (mine, theirs))


def category_table(samples: Mapping[str, Any], known: Mapping[str, Any], gates: Any) -> pd.DataFrame:
    """Mean alpha by seed, level, category, weighting and layer, with intervals and null (Fig. 6)."""
    from analyses.latents.gating import GROUPS, WEIGHTINGS

    parts = []
    for group in GROUPS:
        sizes = {seed: [_size(one, gates, group)] for seed, one in known.items()}
        for weighting in WEIGHTINGS:
            have = {seed: found.get((group, weighting)) for seed, found in samples.items()}
            head = {"level": group[0], "category": group[1], "weighting": weighting}
            parts += _by_seed(head, have, sizes, gates)
    return pd.concat(parts, ignore_index=True)


def difference_table(samples: Mapping[str, Any], known: Mapping[str, Any], gates: Any) -> pd.DataFrame:
    """Semantic minus structural and minus functional, per layer, paired within each resample."""
    from analyses.latents.gating import WEIGHTINGS

    parts = []
    for pair in DIFFERENCES:
        sizes = {seed: [_size(one, gates, ("broad", name)) for name in pair] for seed, one in known.items()}
        for weighting in WEIGHTINGS:
            have = {}
            for seed, found in samples.items():
                first, second = (found.get((("broad", name), weighting)) for name in pair)
                have[seed] = first.minus(second) if first and second else None
            head = {"difference": " - ".join(pair), "weighting": weighting}
            parts += _by_seed(head, have, sizes, gates)
    return pd.concat(parts, ignore_index=True)


def _by_seed(
    head: dict[str, Any], have: dict[str, Any], sizes: dict[str, list[tuple[int, int]]], gates: Any
) -> list[pd.DataFrame]:
    """The rows of each seed, and of their mean when there are several (over those that have the category)."""
    from analyses.latents.gating import average

    parts = []
    for seed, sampled in have.items():
        enough = min(n for n, _ in sizes[seed]) >= LEAST_FEATURES
        parts.append(_rows({"seed": seed, **head}, sampled, sizes[seed], enough, gates))
    if len(have) > 1:
        found = [one for one in have.values() if one is not None]
        counts = np.array([[n for n, _ in sizes[seed]] for seed in have])
        enough = bool(counts.min() > 1 and counts.sum(0).min() >= LEAST_FEATURES)
        total = [tuple(size) for size in np.sum(list(sizes.values()), axis=0)]
        mean = average(found) if found else None
        rows = _rows({"seed": MEAN, **head}, mean, total, enough, gates)
        if len(found) > 1:
            means = np.array([one.estimate for one in found])
            rows["seed_low"], rows["seed_high"] = means.min(0), means.max(0)
        parts.append(rows)
    return parts


def _rows(head: dict[str, Any], sampled: Any, sizes: list[Any], enough: bool, gates: Any) -> pd.DataFrame:
    """One row a layer; without ``enough`` features, or two documents, the interval over these is missing."""
    from satlens.bootstrap import percentile_interval

    table = pd.DataFrame({**head, "layer": list(gates.layers)})
    table["mean"] = np.nan if sampled is None else sampled.estimate
    documents = gates.pairs.n_docs > 1
    for kind, names, known in (
        ("joint", ("low", "high"), documents and enough),
        ("documents", ("low_documents", "high_documents"), documents),
        ("features", ("low_features", "high_features"), enough),
        ("null", ("null_low", "null_high"), True),
    ):
        ends = (np.nan, np.nan)
        if sampled is not None and known:
            ends = percentile_interval(getattr(sampled, kind))
        table[names[0]], table[names[1]] = ends
    table["seed_low"], table["seed_high"] = np.nan, np.nan
    table["n_features"], table["n_tokens"] = np.sum(sizes, axis=0)
    return table


def _size(known: Any, gates: Any, group: tuple[str, str]) -> tuple[int, int]:
    """Features of a group, and their positions."""
    rows = known.group(group)
    feature, token = known.tokens(0, len(known.table))
    return len(rows), int(gates.count[token[np.isin(feature, rows)]].sum())


def heads_table(known: Mapping[str, Any], gates: Any) -> pd.DataFrame:
    """Mean alpha by category, layer and KV head (sums by head are stored by token, not by document: no interval)."""
    from analyses.latents.gating import GROUPS, WEIGHTINGS, feature_means

    parts = []
    index = pd.MultiIndex.from_product([gates.layers, range(gates.n_heads)], names=["layer", "kv_head"])
    for seed, one in known.items():
        means, n_tokens = feature_means(one, gates)
        for group in GROUPS:
            rows = one.group(group)
            for weighting in WEIGHTINGS if len(rows) else ():
                weight = np.ones(len(rows)) if weighting == "feature" else n_tokens[rows]
                table = pd.DataFrame(
                    {"mean": np.average(means[rows], 0, weight).ravel()}, index=index
                ).reset_index()
                head = {"seed": seed, "level": group[0], "category": group[1], "weighting": weighting}
                parts.append(table.assign(**head, n_features=len(rows), n_tokens=int(n_tokens[rows].sum())))
    return pd.concat(parts, ignore_index=True)


def feature_table(known: Mapping[str, Any], gates: Any) -> pd.DataFrame:
    """Mean alpha of every feature by layer."""
    from analyses.latents.gating import feature_means

    parts = []
    for seed, one in known.items():
        means, n_tokens = feature_means(one, gates)
        table = one.table.assign(seed=seed, n_tokens=n_tokens)
        table = table.loc[table.index.repeat(len(gates.layers))].reset_index(drop=True)
        parts.append(table.assign(layer=np.tile(gates.layers, len(one.table)), mean=means.mean(2).ravel()))
    return pd.concat(parts, ignore_index=True)


def distribution_table(by_model: Sequence[tuple[Any, Sequence[Any]]]) -> pd.DataFrame:
    """Labelled features by category, for every model and seed; a category nobody has stays, with 0 (Fig. 9)."""
    from sae.taxonomy import BROAD, CATEGORIES

    rows = []
    for model, several in by_model:
        for labels in several:
            total = len(labels.features)
            for level, names in (("fine", CATEGORIES), ("broad", BROAD)):
                column = labels.features["category" if level == "fine" else "broad"]
                for name in names:
                    n = int((column == name).sum())
                    row = (model["name"], str(labels.seed), level, name, CATEGORIES.get(name, name), n)
                    rows.append((*row, n / total if total else np.nan, total))
    columns = ["model", "seed", "level", "category", "broad", "n", "share", "n_features"]
    return pd.DataFrame(rows, columns=columns)


def finish(
    out: Run,
    config: Config,
    tables: dict[str, pd.DataFrame],
    known: Mapping[str, Any],
    gates: Any,
    facts: tuple[Any, Any],
    labels: tuple[list[Any], list[Any]],
) -> Path:
    """Write tables and figures, and make the run whole."""
    from analyses.figures.categories import FIGURES

    for name, table in tables.items():
        out.table(name, table, {column: unit for column, unit in UNITS.items() if column in table})
    info = {
        "model": facts[0]["name"],
        "baseline": facts[1]["name"] if facts[1] else None,
        "gate": gates.kind,
        "n_layers": facts[0]["n_layers"],
        "n_tokens": int(gates.count.sum()),
        "n_documents": int(gates.run.manifest.summary["n_documents"]),
        "judge": labels[0][0].judge,
        "seeds": list(known),
        "n_features_by_seed": {seed: len(one.table) for seed, one in known.items()},
        "without_positions_by_seed": {seed: one.n_unseen for seed, one in known.items()},
    }
    for name, figure in FIGURES.items():
        out.figure(name, figure(tables, info))
    return out.finish(
        {**info, **_headline(tables["differences"])},
        inputs=[gates.run, *(one.run for one in (*labels[0], *labels[1]))],
        model=facts[0],
        baseline=facts[1],
        data=gates.run.manifest.data,
        precision=gates.run.manifest.precision,
    )


def _headline(differences: pd.DataFrame) -> dict[str, Any]:
    """The differences at the last layer, and the layers where one is surely above 0 and above its null."""
    found: dict[str, Any] = {}
    seed = MEAN if (differences["seed"] == MEAN).any() else differences["seed"].iloc[0]
    table = differences[(differences["seed"] == seed) & (differences["weighting"] == "feature")]
    for name, rows in table.groupby("difference", sort=False):
        key = str(name).replace(" - ", "_minus_")
        last = rows.loc[rows["layer"].idxmax()]
        found[f"{key}_layer_{int(last['layer'])}"] = measured(
            last["mean"], last["low"], last["high"], "alpha"
        )
        sure = rows[(rows["low"] > 0) & (rows["mean"] > rows["null_high"])]
        found[f"{key}_layers_surely_above_0_and_null"] = [int(layer) for layer in sure["layer"]]
    return found
