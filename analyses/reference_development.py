"""When do MLP gates come to rest on the carried direction: all static statistics over training checkpoints.

Beside them stand the loss on the same documents and an induction score, which says when the model learns to copy:
the paper's development study (spec part B, development). Runs of different arms (GELU with bias or SwiGLU, attention
on or off, several seeds) are laid over each other. A run is a folder of `satlens train`, or one of checkpoints named
by their steps. Each checkpoint's numbers are kept as they come, in a folder beside the runs: the same command started
again goes on where it stopped. A checkpoint that cannot be measured is a row with the reason.

Examples:
    satlens reference-development runs/development/gelu-42 runs/development/gelu-noattn-42
    satlens reference-development checkpoints/pythia-410m-deduped --text corpus.jsonl --tokens 8000 --device cuda
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

VERB = "reference-development"
LEFT_OUT = ("carried_gates",)
"""Tables of single gates are not kept for every checkpoint."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """Flags of `satlens reference-development`."""

    training: tyro.conf.Positional[tuple[Path, ...]]
    """Folders of training runs."""
    tokenizer: Path | None = None
    """Folder of the tokenizer, where the runs have none yet."""
    layer: int | None = None
    """Layer that the overview figure shows; left out, the middle one. Tables hold all layers."""
    sequences: int = 32
    """Random sequences behind the induction score."""
    same_docs: bool = False
    """Fit the means on the documents that are evaluated, as the paper does."""
    reading: Annotated[Reading, tyro.conf.arg(name="")] = field(default_factory=Reading)
    """Text and machine settings."""

    def __post_init__(self) -> None:
        if not self.training:
            raise UserError("give at least one training run")
        if self.sequences < 2:
            raise UserError(f"{self.sequences} sequences give no interval; use at least 2")


def run(config: Config) -> Path | None:
    """Measure every checkpoint of every run; returns the run directory.

    Raises:
        UserError: a folder without checkpoints, no tokenizer, or many processes (start one command a training run
            instead: what they measured is kept and gathered by one that names them all).
        SatlensError: not one checkpoint could be measured.
    """
    from satlens.carried.pieces import attempt
    from satlens.training.checkpoints import read_run

    if process_place()[1] > 1:
        raise UserError(f"{VERB} runs in one process: start one a run, then one that names them all")
    runs = [read_run(folder) for folder in config.training]
    if config.tokenizer is None and (bare := [run.name for run in runs if run.tokenizer is None]):
        raise UserError(f"{bare[0]} has no tokenizer yet: give --tokenizer")
    out = begin_run(VERB, config, config.reading)
    assert out is not None
    tables: dict[str, list[dict[str, Any]]] = {"checkpoints": []}
    for training in runs:
        for checkpoint in training.checkpoints:
            place = {"run": training.name, "step": checkpoint.step, "tokens_seen": checkpoint.tokens}
            name = f"{training.name} step {checkpoint.step:,}"
            rows, reason = attempt(name, partial(measure, training, checkpoint, config))
            facts = rows.pop("facts", [{}])[0]
            status = {"status": "failed" if reason else "measured", "reason": reason}
            tables["checkpoints"].append({**place, **_arm(training), **status, **facts})
            for table, part in rows.items():
                tables.setdefault(table, []).extend({**place, **row} for row in part)
            out.log("checkpoint", run=training.name, step=checkpoint.step, status=reason or "measured")
    if "development" not in tables:
        raise SatlensError(f"no checkpoint could be measured: {tables['checkpoints'][0]['reason']}")
    return finish(out, {name: pd.DataFrame(rows) for name, rows in tables.items()}, runs, config)


def measure(training: Any, checkpoint: Any, config: Config) -> dict[str, list[dict[str, Any]]]:
    """Rows of every table for one checkpoint.

    Raises:
        UserError, SatlensError: the checkpoint, its tokenizer or the documents cannot be used.
    """
    from satlens.carried.documents import documents
    from satlens.carried.opening import open_reader
    from satlens.carried.pieces import piece

    reading = config.reading
    reader = open_reader(str(checkpoint.path), reading, config.tokenizer or training.tokenizer)
    sets = documents(reader, reading, same=config.same_docs)
    identity = {
        "verb": VERB,
        "weights": reader.facts["digest"],
        "config": {"mlp": training.mlp, "attention": training.attention, "architecture": reader.facts["architecture"]},
        "documents": [sets.fit.digest(), sets.evaluate.digest()],
        "sequences": config.sequences,
        "precision": reading.dtype,
        "seed": reading.seed,
        "resamples": reading.resamples,
    }  # fmt: skip
    rows, old = piece(reading.runs / "pieces", identity, partial(measure_one, reader, sets, config))
    say(f"{training.name} step {checkpoint.step:,}: {'kept from before' if old else 'measured'}")
    del reader
    gc.collect()
    return rows


def measure_one(reader: Any, sets: Any, config: Config) -> dict[str, list[dict[str, Any]]]:
    """Every table of one opened checkpoint: the static statistics, their headline columns, and induction."""
    from satlens.carried.statics import measure, tables
    from satlens.carried.summary import layer_rows

    reading = config.reading
    statics = measure(reader, sets, reading.batch_size)
    made = tables(statics, reading.resamples, reading.seed)
    kept = {name: table for name, table in made.items() if name not in LEFT_OUT}
    kept["development"] = layer_rows(made, reader.n_layers)
    kept["induction"] = induction_row(reader, config)
    kept["loss"] = loss_row(reader, sets.evaluate, reading)
    facts = {
        "digest": reader.facts["digest"],
        "architecture": reader.facts["architecture"],
        "n_layers": reader.n_layers,
        "n_fit": sets.fit.n_documents,
        "n_documents": sets.evaluate.n_documents,
        "n_tokens": int(sets.evaluate.far_counts.sum()),
        "documents": sets.evaluate.digest(),
    }
    return {"facts": [facts], **{name: table.to_dict("records") for name, table in kept.items()}}


def induction_row(reader: Any, config: Config) -> pd.DataFrame:
    """One row: the best head and its attention, and the loss of both showings, with intervals over sequences."""
    from satlens.bootstrap import document_weights
    from satlens.carried.induction import induction
    from satlens.carried.mean import columns

    reading = config.reading
    found = induction(reader, config.sequences, seed=reading.seed, batch_size=reading.batch_size)
    weights = document_weights(config.sequences, reading.resamples, reading.seed)
    layer, head = found.best()
    row = {
        **columns("induction", found.score(weights)),
        "layer": layer,
        "head": head,
        **columns("loss_drop", found.loss_drop(weights)),
        "nll_first": float(found.first.mean()),
        "nll_second": float(found.second.mean()),
        "n_predictions": found.n_predictions,
        "chance": found.chance,
    }
    return pd.DataFrame([row])


def loss_row(reader: Any, documents: Any, reading: Reading) -> pd.DataFrame:
    """One row: NLL of the evaluated documents, with its interval over them."""
    from satlens.bootstrap import document_weights, ratio_interval
    from satlens.carried.held_out import held_out_nll
    from satlens.carried.mean import columns

    sums, counts = held_out_nll(reader, documents, reading.batch_size)
    weights = document_weights(len(counts), reading.resamples, reading.seed + 1)
    return pd.DataFrame(
        [{**columns("loss", ratio_interval(sums, counts, weights)), "n_predictions": int(counts.sum())}]
    )


def finish(out: Any, tables: dict[str, pd.DataFrame], runs: list[Any], config: Config) -> Path:
    """Write tables and figures, and make the run whole."""
    from analyses.figures.reference_development import FIGURES
    from satlens.carried.order import LEAST_CHANGE, LEAST_OF_OTHERS, order_table
    from satlens.carried.summary import UNITS

    checkpoints, gates = tables["checkpoints"], tables["development"]
    measured = checkpoints[checkpoints["status"] == "measured"]
    n_layers = int(gates["layer"].max()) + 1
    layer = n_layers // 2 if config.layer is None else config.layer
    if layer not in set(gates["layer"]):
        raise UserError(f"no layer {layer}: these models have layers 0 to {n_layers - 1}")
    arms = [{"run": training.name, **_arm(training)} for training in runs]
    tables["order"] = order_table(tables, layer, {arm["run"] for arm in arms if not arm["attention"]})
    units = {
        **UNITS,
        "loss": "nats per token",
        "induction": "attention",
        "loss_drop": "nats per token",
        "tokens_seen": "training tokens",
    }
    for name, table in tables.items():
        out.table(name, table, {column: unit for column, unit in units.items() if column in table})
    first = measured.iloc[0]
    looks = [tuple(arm[key] for key in ("mlp", "attention", "seed")) for arm in arms]
    info = {
        "runs": [{**arm, "distinct": len(set(looks)) == len(looks)} for arm in arms if arm["run"] in set(gates["run"])],
        "layer": layer,
        "n_layers": n_layers,
        "least_change": {"others": LEAST_OF_OTHERS, **LEAST_CHANGE},
        "chance": float(tables["induction"]["chance"].iloc[0]),
        "n_tokens": int(first["n_tokens"]),
        "n_documents": int(first["n_documents"]),
    }  # fmt: skip
    for name, figure in FIGURES.items():
        out.figure(name, figure(tables, info))
    counts = {"checkpoints": len(measured), "failed": int((checkpoints["status"] == "failed").sum())}
    texts = {"n_tokens": info["n_tokens"], "n_documents": info["n_documents"]}
    return out.finish(
        {**texts, **counts, "layer": layer, **headline(tables, layer)},
        model={"checkpoints": measured[["run", "step", "digest"]].to_dict("records")},
        data={"text": config.reading.text, **texts, "digest": first["documents"]},
    )


def headline(tables: dict[str, pd.DataFrame], layer: int) -> dict[str, Any]:
    """Where each run ended, and whether its coupling or its induction score went half its way first."""
    from satlens.carried.order import which_first
    from satlens.run import measured

    out: dict[str, Any] = {}
    for run, table in tables["development"].groupby("run", sort=False):
        last = table[table["layer"] == layer].sort_values("step").iloc[-1]
        loss, copying = (_last(tables[name], str(run)) for name in ("loss", "induction"))
        ends = {
            "loss": loss,
            **dict.fromkeys(("coupling", "duty_median", "share"), last),
            "induction": copying,
        }
        for name, row in ends.items():
            out[f"{run}_{name}"] = measured(row[name], row[f"{name}_low"], row[f"{name}_high"])
        out[f"{run}_first"] = which_first(tables["order"], str(run))
    return out


def _last(table: pd.DataFrame, run: str) -> pd.Series:
    return table[table["run"] == run].sort_values("step").iloc[-1]


def _arm(training: Any) -> dict[str, Any]:
    return {"mlp": training.mlp, "attention": training.attention, "seed": training.seed}
