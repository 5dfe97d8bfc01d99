"""How good is the model at tasks: zero-shot and retrieval benchmarks through lm-evaluation-harness, with intervals.

The paper's sets are `zero-shot` (Table 5) and `retrieval` (Table 2: the cloze protocol of Arora et al. 2024, contexts
cut to 2k tokens around the answer); single tasks go by name. Nothing is fetched when --offline-dir is given; a data set
that cannot be had becomes a row that says why, and the others are measured. Needs `pip install 'satlens[eval]'`.

Examples:
    satlens eval reference-satformer --tasks lambada piqa --offline-dir copies --limit 200
    satlens eval path/to/final --tasks zero-shot retrieval --device cuda
"""

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pandas as pd
import tyro

from satlens import reference
from satlens.errors import UserError
from satlens.log import say
from satlens.reading import Reading, begin_run, process_place
from satlens.run import Run, measured, plain


@dataclass(frozen=True, kw_only=True)
class Config:
    """Flags of `satlens eval`."""

    model: tyro.conf.Positional[str] = "reference-satformer"
    """A checkpoint folder, or one of reference-satformer and reference-transformer."""
    tasks: tuple[str, ...] = ("zero-shot",)
    """Task sets (zero-shot, retrieval) and single tasks."""
    limit: int | None = None
    """Documents of each task to use, from its start: for quick looks; left out, all."""
    offline_dir: Path | None = None
    """Folder of local copies, one NAME.jsonl or NAME.parquet a task; left out, the hub is asked."""
    window: int | None = None
    """The model's context in tokens; left out, the one it was trained with."""
    batch_size: int = 8
    """Rows at once: changes speed and memory, never an answer."""
    device: str = "cpu"
    """Where the model runs: cpu, cuda, cuda:1, mps."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Precision of the model."""
    seed: int = 0
    """Decides how documents are resampled."""
    resamples: int = 1000
    """Bootstrap resamples behind each 95 % interval."""
    runs: Path = Path("runs")
    """Folder that finished runs go to."""

    def __post_init__(self) -> None:
        if self.limit is not None and self.limit < 1:
            raise UserError(f"a limit of {self.limit} documents measures nothing; use at least 1")
        if self.window is not None and self.window < 2:
            raise UserError(f"a context of {self.window} tokens predicts nothing; use at least 2")
        self.reading()  # raises on what no verb accepts

    def reading(self) -> Reading:
        """What this verb shares with those that read text."""
        names = ("window", "batch_size", "device", "dtype", "seed", "resamples", "runs")
        return Reading(**{name: getattr(self, name) for name in names})


def run(config: Config) -> Path:
    """Measure one model on tasks; returns the run directory.

    Raises:
        UserError: an unknown task, no harness, a local copy that does not fit, or no task that could be measured.
    """
    from satlens.evaluation import harness
    from satlens.evaluation.tasks import named

    if not sys.stderr.isatty():  # the bars of the libraries beneath are for people
        os.environ.setdefault("TQDM_DISABLE", "1")
    tasks = named(config.tasks)
    if process_place()[1] > 1:
        raise UserError("satlens eval runs in one process: start it without torchrun or accelerate launch")
    harness.require_harness()
    opened = open_model(config)
    ready, rows = prepare(config, tasks, opened)
    out = begin_run("eval", config, config.reading())
    assert out is not None
    return finish(out, config, opened, *measure(config, ready, rows, opened))


@dataclass(frozen=True, kw_only=True)
class Opened:
    """A model as the harness gets it, and the facts for the manifest."""

    name: str
    lm: Any
    tokenizer: Any
    window: int
    facts: dict[str, Any]


def open_model(config: Config) -> Opened:
    """The model without a bridge: the harness runs it as it is, whatever its architecture.

    Raises:
        UserError: the checkpoint, its tokenizer, or the device cannot be used.
    """
    import torch

    from satlens.checkpoint import load_model, load_tokenizer, model_facts
    from satlens.evaluation.harness import backend

    path = reference.resolve(config.model)
    facts = model_facts(path)
    try:
        model = load_model(path, dtype=getattr(torch, config.dtype), device=config.device)
    except (AssertionError, RuntimeError) as error:
        if config.device == "cpu":
            raise
        raise UserError(f"cannot use device {config.device}: {str(error).splitlines()[0]}") from error
    trained = model.config.max_position_embeddings
    window = config.window or trained
    if window > trained:
        say(f"note: a context of {window} tokens is longer than the {trained} this model was trained on")
    tokenizer = load_tokenizer(path)
    name = reference.title(config.model)
    lm = backend(model, tokenizer, facts["layout"], window, config.batch_size)
    used = {"name": name, "precision": config.dtype, "context_used": window}
    return Opened(name=name, lm=lm, tokenizer=tokenizer, window=window, facts={**facts, **used})


def prepare(config: Config, tasks: list[Any], opened: Opened) -> tuple[list[Any], list[dict[str, Any]]]:
    """``(tasks with their data, rows of those whose data cannot be had)``, before anything is measured.

    Raises:
        UserError: a document that does not fit its task or the model, or no data for any task.
    """
    from satlens.evaluation import data, harness

    ready, rows = [], []
    for task in tasks:
        documents, source = None, task.hub
        try:
            if config.offline_dir is not None:
                documents, source = data.local_documents(task, config.offline_dir)
            elif task.cloze:
                documents, source = data.hub_documents(task)
            built = harness.build(task, documents, opened.tokenizer, opened.window)
            harness.check_lengths(built, opened.lm, config.limit)
        except data.Unavailable as reason:
            rows.append(
                {"task": task.name, "status": "no data", "reason": plain(str(reason)), "source": source}
            )
            continue
        ready.append((task, built, source))
    if not ready:
        raise UserError(f"no task could be measured; {rows[0]['task']}: {rows[0]['reason']}")
    for row in rows:
        say(f"note: {row['task']} is left out: {row['reason']}")
    return ready, rows


def measure(
    config: Config, ready: list[Any], rows: list[dict[str, Any]], opened: Opened
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """``(scores, documents)``: one row a task and metric, and one a document and metric."""
    from satlens.evaluation import harness, scores

    parts, documents = [], []
    for task, built, source in ready:
        say(f"{task.name} ...")
        opened.lm.n_cut = 0
        reported, records = harness.answer(built, opened.lm, config.limit)
        values = scores.by_document(task.name, records)
        guess = scores.chance(records) if built.OUTPUT_TYPE == "multiple_choice" else None
        table = scores.summarise(values, reported, guess, config.resamples, config.seed)
        table.insert(0, "task", task.name)
        facts = {"n_available": len(built.eval_docs), "n_cut": opened.lm.n_cut, "source": source}
        facts["digest"] = scores.digest(records)
        table = table.assign(in_paper=table["metric"].isin(task.paper), version=str(built.VERSION), **facts)
        parts.append(table.assign(status="measured", reason=None))
        documents.append(values)
    left_out = pd.DataFrame(rows, columns=parts[0].columns)
    together = pd.concat([part.astype(object) for part in (*parts, left_out)], ignore_index=True)
    kinds = dict.fromkeys(("value", "stderr", "low", "high", "chance"), "Float64")
    kinds |= {**dict.fromkeys(("n_documents", "n_available", "n_cut"), "Int64"), "in_paper": "boolean"}
    return together.astype(kinds), pd.concat(documents, ignore_index=True)


def finish(out: Run, config: Config, opened: Opened, table: pd.DataFrame, documents: pd.DataFrame) -> Path:
    """Write scores, documents and figures, and make the run whole."""
    import importlib.metadata

    from analyses.figures.eval import FIGURES

    out.table("scores", table, {"chance": "accuracy of guessing", "stderr": "of value"})
    out.table("documents", documents, {"weight": "what value counts in the mean: 1, words or bytes"})
    info = {"model": opened.name, "limit": config.limit, "context": opened.window}
    for name, (figure, wanted) in FIGURES.items():
        if wanted(table).any():
            out.figure(name, figure({"scores": table}, info))
    done = table[table["status"] == "measured"]
    summary: dict[str, Any] = {
        **info,
        "harness": f"lm-eval {importlib.metadata.version('lm_eval')}",
        "shots": 0,
        "n_tasks": int(done["task"].nunique()),
        "left_out": sorted(set(table["task"]) - set(done["task"])),
    }
    for row in done[done["in_paper"].fillna(False)].itertuples():
        summary[f"{row.task}_{row.metric}"] = measured(row.value, _plain(row.low), _plain(row.high))
    first = int(opened.lm.prefix_token_id)
    data = {
        "tasks": {row.task: {"source": row.source, "digest": row.digest} for row in done.itertuples()},
        "bos": opened.facts["layout"]["bos"],
        "prefix_of_texts_without_context": opened.tokenizer.convert_ids_to_tokens(first),
        "too_long": "cut from the left",
    }
    return out.finish(summary, model=opened.facts, data=data)


def _plain(value: Any) -> float | None:
    return None if pd.isna(value) else float(value)
