"""Which of several models predicts best, and were they made alike: NLL on the same tokens, paired to the first.

Models that differ in their seed alone are one group: its number is the mean over seeds, its interval a bootstrap over
documents, and the seeds' own numbers stand beside it, since documents say nothing about training again. What
was not equal (data, order, tokens, recipe, parameters by more than 2 %) is flagged. With the trainer's logs beside the
models, held-out loss is drawn against tokens, and with `--bench` against time, in units of the first model's
(paper, Fig. 2, Table 4, Fig. 7, Table 6).

Examples:
    satlens compare runs/studies/transformer-4*/final runs/studies/satformer-4*/final
    satlens compare runs/studies/*/final --bench runs/bench-train-... --tokens 0
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pandas as pd
import tyro

from satlens.errors import UserError
from satlens.log import say
from satlens.reading import (
    Reading,
    begin_run,
    data_facts,
    measure,
    open_subject,
    open_text,
    require_same_text,
)
from satlens.run import Run, measured

ALIKE = 0.02
"""Parameter counts may differ by this share before they are flagged."""
OF_THE_MODEL = ("seed", "arch", "model")
"""Fields of a recipe in which compared models may differ."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """Flags of `satlens compare`."""

    models: tyro.conf.Positional[tuple[str, ...]]
    """Checkpoint folders; the first one's group is what the others are compared with."""
    bench: Path | None = None
    """A run of `satlens bench train` on the same architectures: draws loss against time too."""
    reading: Annotated[Reading, tyro.conf.arg(name="")] = field(default_factory=Reading)
    """Text and machine settings."""

    def __post_init__(self) -> None:
        if len(self.models) < 2:
            raise UserError("a comparison needs at least two models")
        if len(set(self.models)) < len(self.models):
            raise UserError("a model is named twice: a difference to itself would look like a finding")


def run(config: Config) -> Path | None:
    """Measure every model on the same tokens; returns the run directory (None in helper processes)."""
    from satlens.accumulators import NllByDocument
    from satlens.stream import Condition

    ratios = {} if config.bench is None else time_ratios(config.bench)
    first = open_subject(config.models[0], config.reading)
    corpus = open_text(first, config.reading)
    out = begin_run("compare", config, config.reading)
    models, sums = [], []
    for place, name in enumerate(config.models):
        subject = first if place == 0 else open_subject(name, config.reading)
        require_same_text(first, subject)
        clean = Condition(name="clean", accumulators=(NllByDocument(corpus.n_documents),))
        measure(subject, corpus, [clean], config.reading, name)
        models.append(describe(name, subject.facts))
        sums.append(clean.accumulators[0])
    if out is None:
        return None
    nll = np.stack([kept.nll.numpy() for kept in sums], axis=1)
    return finish(out, first, corpus, models, nll, sums[0].count.numpy(), ratios, config)


def describe(name: str, facts: dict[str, Any]) -> dict[str, Any]:
    """What was equal between models and what was not, and which group this one is of."""
    own = facts["checkpoint"]
    recipe = dict(own.get("recipe", {}))
    folder = Path(name)
    title = folder.parent.name if folder.name == "final" else folder.name
    seed = recipe.get("seed")
    group = title.removesuffix(f"-{seed}") if seed is not None else title
    return {
        "model": title,
        "group": group,
        "architecture": facts["architecture"],
        "seed": seed,
        "parameters": facts["n_parameters"],
        "tokens_seen": own.get("tokens_seen"),
        "steps": own.get("steps"),
        "lr": recipe.get("lr"),
        "data": (own.get("data_sha256") or {}).get("train"),
        "digest": facts["digest"],
        "log": str(folder.parent / "log.jsonl") if folder.name == "final" else None,
        "rest": {key: value for key, value in recipe.items() if key not in OF_THE_MODEL},
    }


def unequal(models: list[dict[str, Any]]) -> list[str]:
    """For each model, in what it was not made like the first, in words; empty where nothing differs."""
    first = models[0]
    seeds = {
        group: {m["seed"] for m in models if m["group"] == group} for group in {m["group"] for m in models}
    }
    flags = []
    for model in models:
        found = []
        if abs(model["parameters"] / first["parameters"] - 1) > ALIKE:
            found.append(f"parameters {100 * (model['parameters'] / first['parameters'] - 1):+.1f} %")
        for key, words in (("tokens_seen", "tokens"), ("steps", "steps"), ("data", "data")):
            if model[key] != first[key]:
                found.append(words)
        found += [
            key
            for key in sorted({*first["rest"], *model["rest"]})
            if model["rest"].get(key) != first["rest"].get(key)
        ]
        if seeds[model["group"]] != seeds[first["group"]]:
            found.append("seeds")
        flags.append(", ".join(found))
    return flags


def side_by_side(row: dict[str, Any], flags: str) -> str:
    """One model in a line, to be read under the others'."""
    known = {
        "tokens": None if row["tokens_seen"] is None else f"{row['tokens_seen']:,}",
        "seed": row["seed"],
        "data and order": None if row["data"] is None else str(row["data"])[:8],
    }
    facts = ", ".join(f"{name} {value}" for name, value in known.items() if value is not None)
    alike = f"not alike: {flags}" if flags else "made like the first"
    return (
        f"{row['model']}: {row['parameters']:,} parameters" + (f", {facts}" if facts else "") + f"; {alike}"
    )


def groups_table(
    models: list[dict[str, Any]], nll: np.ndarray, count: np.ndarray, weights: Any
) -> pd.DataFrame:
    """One row a group: NLL and perplexity, and NLL minus the first group's, paired by document, seeds averaged."""
    from satlens.bootstrap import delta_interval, perplexity_interval, ratio_interval

    names = list(dict.fromkeys(model["group"] for model in models))
    members = {name: [i for i, model in enumerate(models) if model["group"] == name] for name in names}
    base = nll[:, members[names[0]]].mean(1)
    rows = []
    for name, places in members.items():
        mean = nll[:, places].mean(1)
        alone = nll[:, places].sum(0) / count.sum()
        loss, ppl = ratio_interval(mean, count, weights), perplexity_interval(mean, count, weights)
        delta = delta_interval(mean, base, count, weights).nll
        row: dict[str, Any] = {
            "group": name,
            "architecture": models[places[0]]["architecture"],
            "seeds": len(places),
        }
        for column, found in (("nll", loss), ("perplexity", ppl), ("delta_nll", delta)):
            row |= {column: found.estimate, f"{column}_low": found.low, f"{column}_high": found.high}
        ends = {"nll_seed_low": alone.min(), "nll_seed_high": alone.max()}
        rows.append(
            {**row, **ends, "parameters": models[places[0]]["parameters"], "n_tokens": int(count.sum())}
        )
    return pd.DataFrame(rows)


def curves_table(models: list[dict[str, Any]], ratios: dict[str, float]) -> pd.DataFrame:
    """Held-out loss over training from the trainer's logs; ``time`` is in the first model's tokens, if it is known."""
    import json

    rows = []
    for model in models:
        if model["log"] is None or not Path(model["log"]).is_file():
            continue
        per_step = (model["tokens_seen"] or 0) / (model["steps"] or 1)
        for line in Path(model["log"]).read_text(encoding="utf-8").splitlines():
            entry = json.loads(line)
            if "val_loss" in entry:
                tokens = entry["step"] * per_step
                ratio = ratios.get(model["architecture"], np.nan) / ratios.get(
                    models[0]["architecture"], np.nan
                )
                rows.append(
                    (model["model"], model["group"], entry["step"], tokens, tokens * ratio, entry["val_loss"])
                )
    table = pd.DataFrame(rows, columns=["model", "group", "step", "tokens", "time", "val_loss"])
    return table.drop_duplicates(["model", "step"], keep="last")  # a resumed run logs some steps again


def time_ratios(bench: Path) -> dict[str, float]:
    """Model type -> step time over the first model's, from a run of `satlens bench train`.

    Raises:
        UserError: another kind of run.
    """
    from satlens.run import open_run
    from satlens.training.preset import preset

    found = open_run(bench)
    if found.manifest.verb != "bench-train":
        raise UserError(
            f"{bench} is a run of {found.manifest.verb}: --bench takes one of `satlens bench train`"
        )
    table = found.tables["efficiency"]
    table = table[table["status"] == "measured"]
    return {
        preset(found.manifest.config["preset"], row["model"])["arch"]: float(row["time_ratio"])
        for row in table.to_dict("records")
    }


def finish(
    out: Run,
    subject: Any,
    corpus: Any,
    models: list[dict[str, Any]],
    nll: np.ndarray,
    count: np.ndarray,
    ratios: dict[str, float],
    config: Config,
) -> Path:
    """Write tables and figures, and make the run whole."""
    from analyses.figures.compare import FIGURES
    from satlens.bootstrap import document_weights

    reading = config.reading
    weights = document_weights(corpus.n_documents, reading.resamples, reading.seed)
    listed = pd.DataFrame([{k: v for k, v in model.items() if k not in ("rest", "log")} for model in models])
    listed["nll"] = nll.sum(0) / count.sum()
    listed["unequal"] = unequal(models)
    for model, flags in zip(models, listed["unequal"], strict=True):
        say(side_by_side(model, flags))
    tables = {
        "models": listed,
        "groups": groups_table(models, nll, count, weights),
        "curves": curves_table(models, ratios),
    }
    by_document = pd.DataFrame({"doc": range(corpus.n_documents), "source": corpus.names, "n_tokens": count})
    by_document = pd.concat([by_document, pd.DataFrame(nll, columns=listed["model"])], axis=1)
    out.table("nll_by_document", by_document, {name: "nats, summed" for name in listed["model"]})
    units = {"nll": "nats per token", "delta_nll": "nats per token", "val_loss": "nats per token"}
    for name, table in tables.items():
        out.table(name, table, {column: unit for column, unit in units.items() if column in table})
    groups = tables["groups"]
    flagged = listed[listed["unequal"] != ""]
    info = {
        "base": groups.iloc[0]["group"],
        "n_models": len(models),
        "n_tokens": int(count.sum()),
        "n_documents": int((count > 0).sum()),
        "unequal": dict(zip(flagged["model"], flagged["unequal"], strict=True)),
    }
    for name, figure in FIGURES.items():
        if name == "delta" or len(tables["curves"]):
            out.figure(name, figure(tables, info))
    numbers = {
        f"{row['group']}_delta_nll": measured(
            row["delta_nll"], row["delta_nll_low"], row["delta_nll_high"], "nats"
        )
        for row in groups.iloc[1:].to_dict("records")
    }
    facts = {"models": listed[["model", "architecture", "digest"]].to_dict("records")}
    return out.finish({**info, **numbers}, model=facts, data=data_facts(subject, corpus, reading))
