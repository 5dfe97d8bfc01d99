"""On what do MLP gates rest, model after model: the static statistics at four depths, one row a model and layer.

Measures the paper's eight-model scan (spec part B, scan) on any models that transformer-lens knows. Each model's rows
are kept as they come, in a folder beside the runs: the same command started again goes on where it stopped, and models
measured one by one are gathered by one last command that names them all. A model that cannot be measured is a row
with the reason.

Examples:
    satlens reference-scan reference-transformer path/to/gpt2-medium path/to/pythia-410m-deduped
    satlens reference-scan models/* --text corpus.jsonl --tokens 20000 --device cuda --same-docs
"""

import gc
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
import tyro

from satlens.errors import SatlensError, UserError
from satlens.log import say
from satlens.reading import Reading, begin_run, process_place

VERB = "reference-scan"


@dataclass(frozen=True, kw_only=True)
class Config:
    """Flags of `satlens reference-scan`."""

    models: tyro.conf.Positional[tuple[str, ...]]
    """Model folders, or shipped names."""
    depths: tuple[float, ...] = (0.2, 0.35, 0.5, 0.65)
    """Fractions of the depth; layers are int(fraction * layers), as in the paper."""
    twins: int = 0
    """Random-init twins of each model to measure beside it."""
    same_docs: bool = False
    """Fit the means on the documents that are evaluated, as the paper does."""
    reading: Annotated[Reading, tyro.conf.arg(name="")] = field(default_factory=Reading)
    """Text and machine settings."""

    def __post_init__(self) -> None:
        if not self.models:
            raise UserError("give at least one model to scan")
        if bad := [depth for depth in self.depths if not 0 <= depth < 1]:
            raise UserError(f"a depth is a fraction from 0 to below 1, got {bad[0]}")
        if self.twins < 0:
            raise UserError(f"a number of twins cannot be {self.twins}")


def run(config: Config) -> Path | None:
    """Measure every model; returns the run directory.

    Raises:
        UserError: many processes (start one command a model instead: their rows are kept and gathered).
        SatlensError: not one of the models could be measured.
    """
    from satlens.carried.pieces import attempt

    if process_place()[1] > 1:
        raise UserError(f"{VERB} runs in one process: start one a model, then one that names them all")
    out = begin_run(VERB, config, config.reading)
    assert out is not None
    scans, models = [], []
    for model, name in labels(config.models).items():
        rows, reason = attempt(name, partial(measure, model, name, config))
        scans += rows.get("scan", [])
        models += rows.get("models", [])
        if reason:
            scans.append({"model": name, "status": "failed", "reason": reason})
            models.append({"model": name, "status": "failed", "reason": reason})
        out.log("model", name=name, status=reason or "measured")
    if not any(row["status"] == "measured" for row in scans):
        raise SatlensError(f"none of {len(config.models)} models could be measured: {scans[0]['reason']}")
    return finish(out, pd.DataFrame(scans), pd.DataFrame(models), config)


def labels(models: tuple[str, ...]) -> dict[str, str]:
    """What each model is called: its folder's name, with as many folders above it as tell it from the others."""
    parts = {model: Path(model).parts for model in models}
    names = {model: Path(model).name for model in models}
    for depth in range(2, 1 + max(map(len, parts.values()))):
        taken = list(names.values())
        names = {
            model: "/".join(parts[model][-depth:]) if taken.count(name) > 1 else name
            for model, name in names.items()
        }
    return names


def measure(model: str, name: str, config: Config) -> dict[str, list[dict[str, Any]]]:
    """Rows of ``scan`` and ``models`` for one model, called ``name``, and its twins.

    Raises:
        UserError, SatlensError: the model, its tokenizer or the documents cannot be used.
    """
    from satlens.carried.documents import documents
    from satlens.carried.opening import open_reader
    from satlens.carried.pieces import attempt

    reading = config.reading
    reader = open_reader(model, reading)
    sets = documents(reader, reading, same=config.same_docs)
    rows: dict[str, list[dict[str, Any]]] = {"scan": [], "models": []}
    for number in range(config.twins + 1):
        called = f"{name} twin {number}" if number else name
        kept = partial(measure_kept, called, reader, number, sets, config)
        found, reason = attempt(called, kept) if number else (kept(), "")
        found = found or {table: [{"status": "failed", "reason": reason}] for table in rows}
        for table, part in found.items():
            rows[table] += [{"model": called, **row, "twin": number or None} for row in part]
    del reader
    gc.collect()
    return rows


def measure_kept(
    called: str, reader: Any, number: int, sets: Any, config: Config
) -> dict[str, list[dict[str, Any]]]:
    """Rows of a model, or of its ``number``-th twin, from the folder of pieces if they are there."""
    from satlens.carried.opening import twin
    from satlens.carried.pieces import piece

    reading = config.reading
    subject = twin(reader, number) if number else reader
    identity = {
        "verb": VERB,
        "weights": reader.facts["digest"],
        "twin": number,
        "documents": [sets.fit.digest(), sets.evaluate.digest()],
        "depths": config.depths,
        "precision": reading.dtype,
        "seed": reading.seed,
        "resamples": reading.resamples,
    }
    rows, old = piece(reading.runs / "pieces", identity, partial(measure_one, subject, sets, config))
    say(f"{called}: {'kept from before' if old else 'measured'}")
    return rows


def measure_one(reader: Any, sets: Any, config: Config) -> dict[str, list[dict[str, Any]]]:
    """Rows of one opened model: both passes, then the static table at the depths asked for."""
    from satlens.carried.statics import depths, measure
    from satlens.carried.summary import layer_rows, layer_tables

    reading = config.reading
    statics = measure(reader, sets, reading.batch_size, depths(reader.n_layers, config.depths))
    table = layer_rows(layer_tables(statics, reading.resamples, reading.seed), reader.n_layers)
    facts = model_row(reader, statics, sets)
    table["status"], table["reason"] = "measured", ""
    return {"scan": table.to_dict("records"), "models": [{**facts, "status": "measured", "reason": ""}]}


def model_row(reader: Any, statics: Any, sets: Any) -> dict[str, Any]:
    """What a reader of the table must know of a model: what its gates are and how its block is laid out."""
    read, entry = reader.reads[0], statics.entries[0]
    return {
        "architecture": reader.facts["architecture"],
        "digest": reader.facts["digest"],
        "n_parameters": reader.facts.get("n_parameters"),
        "n_layers": reader.n_layers,
        "d_model": reader.d_model,
        "n_gates": read.n_gates,
        "gate": read.name,
        "activation": read.activation,
        "gated": read.gated,
        "gate_bias": read.bias is not None,
        "block": entry.block,
        "norm": None if entry.norm is None else entry.norm.name,
        "weights": reader.facts.get("weights"),
        "n_fit": sets.fit.n_documents,
        "n_documents": sets.evaluate.n_documents,
        "n_tokens": int(sets.evaluate.far_counts.sum()),
        "documents": sets.evaluate.digest(),
    }


def finish(out: Any, scan: pd.DataFrame, models: pd.DataFrame, config: Config) -> Path:
    """Write tables and the figure, and make the run whole."""
    from analyses.figures.reference_scan import FIGURES
    from satlens.carried.summary import UNITS

    tables = {"scan": scan, "models": models}
    out.table("scan", scan, {name: unit for name, unit in UNITS.items() if name in scan})
    out.table("models", models)
    measured = models[models["status"] == "measured"]
    first = measured.iloc[0]
    info = {
        "n_models": int(measured["twin"].isna().sum()),
        "n_failed": int((models["status"] == "failed").sum()),
        "n_tokens": int(first["n_tokens"]),
        "n_documents": int(first["n_documents"]),
    }
    for name, figure in FIGURES.items():
        out.figure(name, figure(tables, info))
    return out.finish(
        {**info, **headline(scan)},
        model={"models": measured[["model", "architecture", "digest"]].to_dict("records")},
        data={"text": config.reading.text, "n_documents": info["n_documents"], "n_tokens": info["n_tokens"]},
    )


def headline(scan: pd.DataFrame) -> dict[str, Any]:
    """Where resting terms are negative, and where couplings outweigh biases, over all measured layers."""
    rows = scan[(scan["status"] == "measured") & scan["twin"].isna()]
    return {
        "layers": len(rows),
        "layers_resting_below_0": int((rows["resting"] < 0).sum()),
        "layers_with_biases": int(rows["ratio"].notna().sum()),
        "layers_coupling_above_bias": int((rows["ratio"] > 1).sum()),
    }
