"""On what do MLP gates rest: the carried mean direction of the stream, how gates couple to it, and what writes it.

The static part of the paper on carried reference directions. Documents stand one a row, at least 64 and at most 256
tokens (--window for fewer), the first 16 never counted. One pass over the even documents fits the means, one over the
odd ones measures the rest; intervals resample documents. No code in a model's folder is run.

The run's tables, named after the rows of part B of the specification:
    carried_object, _stability, _rotation        the mean m of each layer: share of the stream, norms, cosines
    carried_writes, _sources, _constant_share    what every block's mean write adds to m, and how constant it is
    carried_resting, _gates, _rank               w.b against the gate's bias, duty, firing; what orders duty, with nulls
    carried_parameter_share, _ledger             what part of b is parameters, through the norm that the gate reads
    carried_geometry                             m against first-token, sink and outlier directions, with nulls
    carried_value_gates                          SATFormer's own gates, one row a layer and KV head

Examples:
    satlens reference reference-satformer
    satlens reference path/to/pythia-410m --layers 5 8 12 15 --text corpus.jsonl --tokens 20000 --device cuda
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pandas as pd
import tyro

from satlens import reference
from satlens.log import progress
from satlens.reading import Reading, begin_run, process_place, start_processes
from satlens.run import Run, measured

VERB = "reference"
UNITS = {
    "share": "of the stream's norm",
    "stream_norm": "length",
    "m_norm": "length",
    "b_norm": "length",
    "coupling": "pre-activation",
    "bias": "pre-activation",
    "resting": "pre-activation",
    "duty": "share of far positions",
    "rho": "Spearman over gates",
}


@dataclass(frozen=True, kw_only=True)
class Config:
    """Flags of `satlens reference`."""

    model: tyro.conf.Positional[str] = "reference-satformer"
    """Any causal model that transformer-lens knows, as a local folder, or a shipped name."""
    layers: tuple[int, ...] = ()
    """Layers whose gates and geometry are tabled; left out, all layers and four depths."""
    same_docs: bool = False
    """Fit the means on the documents that are evaluated, as the paper does."""
    reading: Annotated[Reading, tyro.conf.arg(name="")] = field(default_factory=Reading)
    """Text and machine settings."""


def run(config: Config) -> Path | None:
    """Measure one model; returns the run directory (None in helper processes)."""
    from satlens.carried.documents import documents
    from satlens.carried.opening import open_reader
    from satlens.carried.statics import checked_layers, measure
    from satlens.stream import gather

    start_processes()
    reading = config.reading
    reader = open_reader(config.model, reading)
    checked_layers(reader, config.layers)
    sets = documents(reader, reading, config.same_docs)
    out = begin_run(VERB, config, reading)
    with progress(disable=process_place()[0] != 0) as bar:
        rows = sets.fit.n_documents + sets.evaluate.n_documents
        task = bar.add_task("means, then gates", total=-(-rows // process_place()[1]))
        statics = measure(
            reader,
            sets,
            reading.batch_size,
            config.layers,
            gather,
            process_place(),
            lambda batch: bar.update(task, advance=len(batch.doc)),
        )
    return None if out is None else finish(out, reader, sets, statics, reading)


def finish(out: Run, reader: Any, sets: Any, statics: Any, reading: Reading) -> Path:
    """Write tables with intervals, tensors and figures, and make the run whole."""
    from analyses.figures import reference as main_figures
    from analyses.figures import reference_own_gates, reference_sources
    from satlens.carried.statics import tables

    made = tables(statics, reading.resamples, reading.seed)
    for name, table in made.items():
        out.table(name, table, {column: unit for column, unit in UNITS.items() if column in table})
    out.table("documents", documents_table(sets))
    for name, arrays in tensors(statics).items():
        out.tensor(name, arrays)
    info = {
        "model": reader.name,
        "n_layers": reader.n_layers,
        "n_tokens": int(sets.evaluate.far_counts.sum()),
        "n_documents": sets.evaluate.n_documents,
        "n_fit_documents": sets.fit.n_documents,
        "same_documents": sets.same,
        "activation": reader.reads[0].activation,
        "gated": reader.reads[0].gated,
        "gate_bias": reader.reads[0].bias is not None,
        "block": statics.entries[0].block,
        "value_gate": reader.value_reads[0].activation if reader.value_reads else None,
        "weights": reader.facts.get("weights"),
    }
    figures = {**main_figures.FIGURES, **reference_own_gates.FIGURES, **reference_sources.FIGURES}
    needs = {**reference_own_gates.NEEDS, **reference_sources.NEEDS}
    for name, figure in figures.items():
        if all(len(made.get(table, ())) for table in needs.get(name, ())):
            out.figure(name, figure(made, info))
    facts = data_facts(sets, reading)
    return out.finish({**info, **headline(made)}, model=dict(reader.facts), data=facts)


def documents_table(sets: Any) -> pd.DataFrame:
    """One row a document: which set, its source and kind, and how many of its positions count."""
    parts = [("fit", sets.fit), ("evaluate", sets.evaluate)]
    return pd.concat(
        [
            pd.DataFrame({"set": name, "source": s.names, "kind": s.kinds, "n_tokens": s.far_counts})
            for name, s in (parts[1:] if sets.same else parts)
        ],
        ignore_index=True,
    )


def tensors(statics: Any) -> dict[str, dict[str, np.ndarray]]:
    """Means of the fit documents, every gate's coupling, bias and duty, and sums by document of what is a number."""
    from satlens.carried.resting import couplings
    from satlens.carried.statics import beta

    fit, evaluate = statics.fit, statics.evaluate
    count = evaluate["count"].sum()
    means = {
        role: fit[role].sum(0) / fit["count"].sum() for role in ("resid", "read", "value_read") if role in fit
    }
    gates: dict[str, np.ndarray] = {}
    for read in (*statics.reads, *statics.value_reads):
        at = f"{read.kind}_{read.layer}"
        gates[f"coupling_{at}"], gates[f"bias_{at}"] = couplings(statics, read), beta(read)
        gates[f"duty_{at}"] = evaluate[f"duty_{at}"].sum(0) / count
        gates[f"mean_pre_{at}"] = evaluate[f"pre_{at}"] / count
    numbers = {
        name: value
        for name, value in evaluate.items()
        if value.ndim <= 2 and len(value) == len(evaluate["count"])
    }
    by_document = {
        name: value for name, value in numbers.items() if not name.startswith(("duty", "pre", "samples"))
    }
    return {"means": means, "gates": gates, "by_document": by_document}


def data_facts(sets: Any, reading: Reading) -> dict[str, Any]:
    """For manifests: both sets' digests and counts, and the first ids of what was evaluated."""
    from satlens.carried.documents import SKIP

    return {
        "text": (reading.text or reference.TEXT).name,
        "digest": sets.evaluate.digest(),
        "fit_digest": sets.fit.digest(),
        "n_documents": sets.evaluate.n_documents,
        "n_fit_documents": sets.fit.n_documents,
        "n_tokens": int(sets.evaluate.far_counts.sum()),
        "longest": max(len(ids) for ids in sets.evaluate.ids),
        "skipped_positions": SKIP,
        "first_ids": sets.evaluate.ids[0][:16].tolist(),
    }


def headline(made: dict[str, pd.DataFrame]) -> dict[str, Any]:
    """The numbers a reader wants first: the middle layer, and where the claims hold."""
    resting = made["carried_resting"]
    gates = resting[resting["kind"] == "mlp"]
    middle = gates.iloc[len(gates) // 2]
    layer = int(middle["layer"])
    object_row = made["carried_object"].set_index("layer").loc[layer]
    rank = made["carried_rank"]
    random = rank[(rank["layer"] == layer) & (rank["predictor"] == "random")]["rho"].abs()
    out: dict[str, Any] = {
        "layers_tabled": len(gates),
        "layers_resting_below_0": int((gates["resting"] < 0).sum()),
        f"layer_{layer}_resting": _measured(middle, "resting", "pre-activation"),
        f"layer_{layer}_coupling": _measured(middle, "coupling", "pre-activation"),
        f"layer_{layer}_bias": float(middle["bias"]),
        f"layer_{layer}_duty": _measured(middle, "duty", "mean gate"),
        f"layer_{layer}_share": _measured(object_row, "share", "of the stream's norm"),
        f"layer_{layer}_rank_of_random_directions": float(random.max()),
        "linearity_error": float(resting["linearity_error"].max()),
    }
    if pd.notna(middle["ratio"]):  # without biases every coupling outweighs them
        out[f"layer_{layer}_dominance"] = _measured(middle, "dominance", "share of gates")
    if "carried_value_gates" in made:
        heads = made["carried_value_gates"]
        out["value_gates"] = len(heads)
        out["value_gates_resting_below_0"] = int((heads["resting"] < 0).sum())
        out["value_gates_mean_duty"] = float(heads["duty"].mean())
        out["value_gates_duty_against_resting"] = float(
            heads["duty"].corr(heads["resting"], method="pearson")
        )
    return out


def _measured(row: Any, name: str, unit: str) -> dict[str, Any]:
    low, high = (
        None if pd.isna(row[f"{name}_{end}"]) else float(row[f"{name}_{end}"]) for end in ("low", "high")
    )
    return measured(float(row[name]), low, high, unit)
