"""Does V1 help retrieval: gates and the cost of losing them where an answer is read, mentioned and predicted.

Every item is context, cue and answer in one row, its tokens apart as answer, mention (the answer's places in the
context), other context, and rest (the cue). Mean alpha by layer and span; NLL by span clean, with all gates at zero,
all at their mean, and each layer's at its mean, as paired deltas. Two contrasts test the claim: an effect on the answer
minus that on other context, and minus that on the same answer asked without its context (the part of the context's
help that is lost). A treatment that breaks the model altogether loses all of it, so single layers say more than all
gates at once. Means come from every fifth item, which is not scored; intervals are over items.

Examples:
    satlens retrieval reference-satformer --task squad --offline-dir copies --items 200
    satlens retrieval path/to/final --task nq --device cuda
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
import tyro

from satlens.errors import UserError
from satlens.reading import Reading, Subject, begin_run, open_subject, process_place
from satlens.run import Run, measured

CALIBRATES = 5  # every fifth item finds the mean gates
N_TASK_LIMIT = 2048  # longest row of the protocol: 2k tokens of context and answer, and the cue


@dataclass(frozen=True, kw_only=True)
class Config:
    """Flags of `satlens retrieval`."""

    model: tyro.conf.Positional[str] = "reference-satformer"
    """A checkpoint folder, or reference-satformer."""
    task: Literal["triviaqa", "swde", "squad", "nq", "fda", "drop"] = "squad"
    """Retrieval task."""
    items: int = 500
    """Items to use, from the task's start; 0 means all."""
    offline_dir: Path | None = None
    """Folder with a local copy, TASK.jsonl or TASK.parquet; left out, the hub is asked."""
    window: int | None = None
    """Tokens in a row; left out, the model's training context. Contexts are cut around the answer."""
    batch_size: int = 8
    """Rows at once: changes speed and memory, never an answer."""
    device: str = "cpu"
    """Where the model runs: cpu, cuda, cuda:1, mps."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Precision of the model; differences need float32."""
    seed: int = 0
    """Decides how items are resampled."""
    resamples: int = 1000
    """Bootstrap resamples behind each 95 % interval."""
    runs: Path = Path("runs")
    """Folder that finished runs go to."""

    def __post_init__(self) -> None:
        if self.items < 0:
            raise UserError(f"{self.items} items cannot be measured; 0 means all")
        if self.window is not None and self.window < 2:
            raise UserError(f"a context of {self.window} tokens predicts nothing; use at least 2")
        self.reading()  # raises on what no verb accepts

    def reading(self) -> Reading:
        """What this verb shares with those that read text."""
        names = ("window", "batch_size", "device", "dtype", "seed", "resamples", "runs")
        return Reading(**{name: getattr(self, name) for name in names})


@dataclass(frozen=True, kw_only=True)
class Asked:
    """The items as the model reads them."""

    calibration: Any
    rows: Any
    """Scored, with their context."""
    bare: Any
    """The same without it."""
    source: str
    n_items: int


def run(config: Config) -> Path | None:
    """Measure one model on one task; returns the run directory (None in helper processes).

    Raises:
        UserError: no data, no gates, or no item that fits.
    """
    from satlens.evaluation.spans import GatesBySpan

    subject = open_subject(config.model, config.reading())
    if subject.sites.gate_kind is None:
        raise UserError(f"{subject.name} is a {subject.sites.architecture}: it has no gates to measure")
    asked = ask(config, subject)
    out = begin_run("retrieval", config, config.reading())
    known = _pass(config, subject, asked.calibration, [((), GatesBySpan(asked.calibration, subject.sites))])[
        0
    ]
    planned = plan(subject, known)
    gates = measure(config, subject, asked, planned)
    return None if out is None else finish(out, config, subject, asked, gates, planned)


def ask(config: Config, subject: Subject) -> Asked:
    """The task's items as rows, and which of them calibrate.

    Raises:
        UserError: the data cannot be had or does not fit, or fewer than two items are left.
    """
    from satlens.evaluation import cloze, data, spans
    from satlens.evaluation.tasks import TASKS

    task = TASKS[config.task]
    if config.offline_dir is None:
        documents, source = data.hub_documents(task)
    else:
        documents, source = data.local_documents(task, config.offline_dir)
    items = cloze.items_of(documents)[: config.items or None]
    window = min(subject.window, N_TASK_LIMIT)
    bos = subject.tokenizer.bos_token_id if subject.layout.bos else None
    rows = spans.rows_of(items, subject.tokenizer, window, bos)
    if len(rows) < 2:
        raise UserError("means and scores need different items, but only one has its answer in its context")
    every = min(CALIBRATES, len(rows))
    calibrates = np.arange(len(rows)) % every == every - 1
    scored = rows.take(np.flatnonzero(~calibrates))
    return Asked(
        calibration=rows.take(np.flatnonzero(calibrates)),
        rows=scored,
        bare=spans.without_context(items, scored, subject.tokenizer, window, bos),
        source=source,
        n_items=len(items),
    )


def plan(subject: Subject, known: Any) -> list[Any]:
    """Clean, all gates at zero, all at their mean, and each layer's at its mean."""
    import torch

    from satlens.evaluation.span_tables import Planned
    from satlens.interventions import INTERVENTIONS, Calibration

    layers = subject.sites.layers("gate")
    mean = torch.zeros(subject.sites.n_layers, subject.sites.n_kv_heads, dtype=torch.float64)
    mean[list(layers)] = known.sum.sum((0, 1)) / known.count.sum()
    constants = Calibration(mean=mean, sample=torch.zeros(*mean.shape, 1))
    edits = {k: {n: INTERVENTIONS[k](n, None, constants, 0) for n in layers} for k in ("zero", "mean")}
    together = [
        Planned(name=f"all {k}", layer=None, edits=tuple(edits[k].values())) for k in ("zero", "mean")
    ]
    alone = [Planned(name=f"mean {n}", layer=n, edits=(edit,)) for n, edit in edits["mean"].items()]
    return [Planned(name="clean", layer=None, edits=()), *together, *alone]


def measure(config: Config, subject: Subject, asked: Asked, planned: list[Any]) -> Any:
    """Fill the plan's sums, with and without context; the clean gates with it are returned."""
    from satlens.evaluation.spans import GatesBySpan, NllBySpan

    gates = GatesBySpan(asked.rows, subject.sites)
    for rows, extra in ((asked.rows, [((), gates)]), (asked.bare, [])):
        wanted = [(p.edits, NllBySpan(rows)) for p in planned]
        filled = _pass(config, subject, rows, [*extra, *wanted])
        gates = filled[0] if extra else gates
        for p, sums in zip(planned, filled[len(extra) :], strict=True):
            p.sums.append(sums)
    return gates


def _pass(config: Config, subject: Subject, rows: Any, wanted: list[tuple[Any, Any]]) -> list[Any]:
    """One streamed pass; ``wanted`` pairs edits with the accumulator that reads under them."""
    from satlens.log import progress
    from satlens.stream import Condition, gather, stream

    rank, world = process_place()
    conditions = [
        Condition(name=f"condition {place}", edits=edits, accumulators=(accumulator,))
        for place, (edits, accumulator) in enumerate(wanted)
    ]
    with progress(disable=rank != 0) as bar:
        task = bar.add_task("items", total=-(-len(rows) // world))

        def on_batch(batch: Any) -> bool:
            bar.update(task, advance=len(batch.row))
            return True

        stream(
            subject.bridge, subject.sites, rows.batches(config.batch_size, rank, world), conditions, on_batch
        )
    return [gather(condition.accumulators[0]) for condition in conditions]


def finish(out: Run, config: Config, subject: Subject, asked: Asked, gates: Any, planned: list[Any]) -> Path:
    """Write sums by item, tables with intervals and figures, and make the run whole."""
    from analyses.figures.retrieval import FIGURES
    from satlens.bootstrap import document_weights
    from satlens.evaluation import span_tables

    weights = document_weights(len(asked.rows), config.resamples, config.seed)
    sums = span_tables.by_item(asked.rows.numbers, planned)
    out.table("nll_by_item", sums, {p.name.replace(" ", "_"): "nats, summed" for p in planned})
    arrays = {"sum": gates.sum.numpy(), "shut": gates.shut.numpy(), "count": gates.count.numpy()}
    out.tensor("gates_by_item", arrays, {"sum": "alpha, [item span layer kv_head]", "shut": "gates shut"})
    tables = {
        "gates": span_tables.gate_table(gates, weights),
        "gate_contrasts": span_tables.gate_contrasts(gates, weights),
        "effects": span_tables.effects(planned, weights),
        "effect_contrasts": span_tables.effect_contrasts(planned, weights),
    }
    for name, table in tables.items():
        out.table(name, table, {"delta_nll": "nats per token"} if "delta_nll" in table else {"mean": "alpha"})
    info = {
        "model": subject.name,
        "task": config.task,
        "gate": subject.sites.gate_kind,
        "n_layers": subject.sites.n_layers,
        "n_items": len(asked.rows),
        "n_calibration_items": len(asked.calibration),
        "n_left_out": asked.n_items - len(asked.rows) - len(asked.calibration),
        "n_tokens": int(gates.count.sum()),
    }
    for name, figure in FIGURES.items():
        out.figure(name, figure(tables, info))
    first = asked.rows.ids[0, :16].tolist()
    data = {"task": config.task, "source": asked.source, "digest": _digest(asked), "first_ids": first}
    return out.finish({**info, **_headline(tables)}, model=subject.facts, data=data)


def _digest(asked: Asked) -> str:
    """sha256 over the scored rows as the model read them."""
    import hashlib

    rows = asked.rows
    total = hashlib.sha256(rows.ids.numpy().astype("<i8").tobytes())
    total.update(rows.span.numpy().astype("<i8").tobytes())
    return total.hexdigest()


def _headline(tables: dict[str, pd.DataFrame]) -> dict[str, Any]:
    """The numbers a reader wants first."""
    from satlens.evaluation.span_tables import BARE

    found = tables["effects"].set_index(["condition", "span"])
    out: dict[str, Any] = {"nll_answer": found.loc[("clean", "answer"), "nll"]}
    out["nll_answer_without_context"] = found.loc[("clean", BARE), "nll"]
    for condition in ("all zero", "all mean"):
        row = found.loc[(condition, "answer")]
        name = condition.replace(" ", "_")
        out[f"{name}_effect_on_answer"] = measured(
            row["delta_nll"], row["low"], row["high"], "nats per token"
        )
        table = tables["effect_contrasts"]
        for row in table[table["condition"] == condition].to_dict("records"):
            key = f"{name}_effect_on_{row['contrast'].replace(' - ', '_minus_').replace(' ', '_')}"
            out[key] = measured(row["delta_nll"], row["low"], row["high"], "nats per token")
    return out
