"""What breaks when a gate is taken away: zero, mean, head-mean and resampled gates, by layer, head and cumulatively.

The four replacements form a ladder (paper, Fig. 4 has the first two). zero removes V1; mean keeps one constant per
layer; head-mean one per head; resample keeps each head's distribution but not its timing. Constants and draws come
from calibration documents that are not scored. Deltas are paired on the same tokens, with 95 % intervals. A gate that
is one constant a layer (ResFormer's lambda_1) can only be zeroed.

Examples:
    satlens ablate reference-satformer
    satlens ablate path/to/final --kinds zero --scopes layer head --until-width 0.01
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import numpy as np
import pandas as pd
import tyro

from satlens.errors import UserError
from satlens.log import say
from satlens.reading import (
    Reading,
    Subject,
    begin_run,
    data_facts,
    measure,
    open_subject,
    open_text,
    process_place,
)
from satlens.run import Run, measured

Kind = Literal["zero", "mean", "head-mean", "resample"]
Scope = Literal["layer", "head", "upward", "downward"]
N_DRAWS = 4096  # calibration values per head that resampling draws from
EACH_BATCHES = 16  # batches between two looks at the intervals when --until-width is given


@dataclass(frozen=True, kw_only=True)
class Config:
    """Flags of `satlens ablate`."""

    model: tyro.conf.Positional[str] = "reference-satformer"
    """A checkpoint folder, or reference-satformer."""
    kinds: tuple[Kind, ...] = ()
    """Replacements to try in scope layer; the other scopes use the first one. Left out, all that have a meaning."""
    scopes: tuple[Scope, ...] = ("layer",)
    """layer: one at a time; head: one head at a time; upward: n to last; downward: first to n."""
    layers: tuple[int, ...] = ()
    """Layers to ablate; left out, every gated layer."""
    until_width: float | None = None
    """Stop once every delta-PPL interval is narrower than this (one process only)."""
    reading: Annotated[Reading, tyro.conf.arg(name="")] = field(default_factory=Reading)
    """Text and machine settings."""

    def __post_init__(self) -> None:
        if not self.scopes:
            raise UserError("nothing to do: name at least one of --scopes")


@dataclass(frozen=True, kw_only=True)
class Planned:
    """One condition and what it stands for in the result table."""

    condition: Any
    kind: str
    scope: str
    layer: int
    kv_head: int | None


def run(config: Config) -> Path | None:
    """Ablate one model; returns the run directory (None in helper processes)."""
    from satlens.accumulators import NllByDocument
    from satlens.stream import Condition

    subject = open_subject(config.model, config.reading)
    calibration, scored = split(subject, config.reading)
    known = calibrate(subject, calibration, config.reading)
    clean = Condition(name="clean", accumulators=(NllByDocument(scored.n_documents),))
    planned = plan(config, subject, scored, known)
    stop = _narrow_enough(config, clean, planned) if config.until_width else None
    out = begin_run("ablate", config, config.reading)
    conditions = [clean, *(p.condition for p in planned)]
    measure(subject, scored, conditions, config.reading, "ablations", stop)
    if out is None:
        return None
    return finish(out, subject, (calibration, scored), clean.accumulators[0], planned, known, config.reading)


def split(subject: Subject, reading: Reading) -> tuple[Any, Any]:
    """``(calibration, scored)`` documents, disjoint."""
    from satlens.tokens import split_calibration

    return split_calibration(open_text(subject, reading))


def calibrate(subject: Subject, calibration: Any, reading: Reading) -> Any:
    """Mean alpha and a sample of alpha per layer and head, on the calibration documents (no head is run).

    Raises:
        UserError: the model has no gates.
    """
    import torch

    from satlens.accumulators import GateSample, GateStatistics
    from satlens.interventions import Calibration
    from satlens.stream import Condition

    sites = subject.sites
    if sites.gate_kind is None:
        raise UserError(sites.why_no_gate(subject.name))
    stats = GateStatistics(calibration.n_documents, sites)
    sample = GateSample(sites, calibration.n_tokens, N_DRAWS, reading.seed)
    clean = Condition(name="clean", accumulators=(stats, sample))
    measure(subject, calibration, [clean], reading, "calibration")
    stats, sample = clean.accumulators
    mean = torch.zeros(sites.n_layers, sites.n_kv_heads, dtype=torch.float64)
    mean[list(sites.layers("gate"))] = stats.doc_sum.sum(0) / stats.doc_count.sum()
    return Calibration(mean=mean, sample=sample.result(sites.n_layers))


def plan(config: Config, subject: Subject, corpus: Any, known: Any) -> list[Planned]:
    """Every condition that the flags ask for.

    Raises:
        UserError: a layer without a gate, or a replacement that has no meaning for this kind of gate.
    """
    gated = subject.sites.layers("gate")
    kinds, layers = kinds_for(subject, config.kinds), config.layers or gated
    for layer in layers:
        subject.sites.name("gate", layer)
    heads = range(subject.sites.n_kv_heads)
    seed, main = config.reading.seed, kinds[0]
    wanted: list[tuple[str, str, int, int | None, list[int]]] = []
    for scope in config.scopes:
        for layer in layers:
            if scope == "layer":
                wanted += [(kind, scope, layer, None, [layer]) for kind in kinds]
            elif scope == "head":
                wanted += [(main, scope, layer, head, [layer]) for head in heads]
            else:
                together = [n for n in gated if (n >= layer if scope == "upward" else n <= layer)]
                wanted.append((main, scope, layer, None, together))
    return [_planned(*item, known=known, seed=seed, n_documents=corpus.n_documents) for item in wanted]


def kinds_for(subject: Subject, asked: tuple[Kind, ...]) -> tuple[Kind, ...]:
    """The replacements asked for, or all that have a meaning.

    Raises:
        UserError: one that would put a constant gate's own constant back.
    """
    if subject.sites.gate_kind != "static":
        return asked or get_args(Kind)
    if idle := [kind for kind in asked if kind != "zero"]:
        raise UserError(
            f"{subject.name} is a {subject.sites.architecture}: its gate is one learned constant a layer (lambda_1), "
            f"so {', '.join(idle)} would only put that constant back; use --kinds zero"
        )
    return ("zero",)


def _planned(
    kind: str,
    scope: str,
    layer: int,
    head: int | None,
    layers: list[int],
    known: Any,
    seed: int,
    n_documents: int,
) -> Planned:
    from satlens.accumulators import NllByDocument
    from satlens.interventions import INTERVENTIONS
    from satlens.stream import Condition

    heads = None if head is None else (head,)
    edits = tuple(INTERVENTIONS[kind](n, heads, known, seed) for n in layers)
    name = f"{kind} {scope} {layer}" + ("" if head is None else f" head {head}")
    condition = Condition(name=name, edits=edits, accumulators=(NllByDocument(n_documents),))
    return Planned(condition=condition, kind=kind, scope=scope, layer=layer, kv_head=head)


def finish(
    out: Run,
    subject: Subject,
    corpora: tuple[Any, Any],
    clean: Any,
    planned: list[Planned],
    known: Any,
    reading: Reading,
) -> Path:
    """Write per-document sums, deltas with intervals and figures, and make the run whole."""
    from analyses.figures.ablate import FIGURES
    from satlens.bootstrap import document_weights

    calibration, scored = corpora
    count, base = clean.count.numpy(), clean.nll.numpy()
    sums = {p.condition.name: p.condition.accumulators[0].nll.numpy() for p in planned}
    by_document = pd.DataFrame({"doc": range(scored.n_documents), "source": scored.names, "n_tokens": count})
    by_document["clean"] = base
    by_document = pd.concat([by_document, pd.DataFrame(sums)], axis=1)
    out.table("nll_by_document", by_document, {name: "nats, summed" for name in ("clean", *sums)})
    out.tensor("calibration", {"mean": known.mean.numpy(), "sample": known.sample.numpy()})
    weights = document_weights(scored.n_documents, reading.resamples, reading.seed)
    tables = {
        "baseline": baseline_row(base, count, weights),
        "ablation": deltas(planned, base, count, weights),
    }
    units = {"delta_nll": "nats per token", "delta_ppl": "perplexity", "nll": "nats per token"}
    for name, table in tables.items():
        out.table(name, table, {c: unit for c, unit in units.items() if c in table})
    info = {
        "model": subject.name,
        "gate": subject.sites.gate_kind,
        "n_layers": subject.sites.n_layers,
        "n_tokens": int(count.sum()),
        "n_documents": int((count > 0).sum()),
        "n_calibration_tokens": calibration.n_tokens,
    }
    measured_pairs = {pair for p in planned for pair in ((p.scope, p.kind), (p.scope, None))}
    for name, figure in FIGURES.items():
        if SHOWN[name] & measured_pairs:
            out.figure(name, figure(tables, info))
    summary = {**info, **_headline(tables)}
    return out.finish(summary, model=subject.facts, data=data_facts(subject, scored, reading))


# what a figure shows: it is drawn when one of these (scope, kind) pairs was measured; None stands for any kind
SHOWN = {
    "fig4_layers": {("layer", "zero"), ("layer", "mean")},
    "ladder": {("layer", None)},
    "heads": {("head", None)},
    "cumulative": {("upward", None), ("downward", None)},
}


def baseline_row(nll: np.ndarray, count: np.ndarray, weights: np.ndarray) -> pd.DataFrame:
    """The unchanged model's perplexity with its interval."""
    from satlens.bootstrap import perplexity_interval

    ppl = perplexity_interval(nll, count, weights)
    row = {"nll": nll.sum() / count.sum(), "perplexity": ppl.estimate, "low": ppl.low, "high": ppl.high}
    return pd.DataFrame([{**row, "n_tokens": int(count.sum()), "n_documents": int((count > 0).sum())}])


def deltas(planned: list[Planned], base: np.ndarray, count: np.ndarray, weights: np.ndarray) -> pd.DataFrame:
    """Condition minus clean on the same tokens, in nats and in perplexity, one row a condition."""
    from satlens.bootstrap import delta_interval

    rows = []
    for p in planned:
        nll = p.condition.accumulators[0].nll.numpy()
        delta = delta_interval(nll, base, count, weights)
        mean = nll.sum() / count.sum()
        rows.append(
            {
                "condition": p.kind,
                "scope": p.scope,
                "layer": p.layer,
                "kv_head": p.kv_head,
                "n_tokens": int(count.sum()),
                "n_documents": int((count > 0).sum()),
                "nll": mean,
                "perplexity": float(np.exp(mean)),
                "delta_nll": delta.nll.estimate,
                "delta_nll_low": delta.nll.low,
                "delta_nll_high": delta.nll.high,
                "delta_ppl": delta.perplexity.estimate,
                "delta_ppl_low": delta.perplexity.low,
                "delta_ppl_high": delta.perplexity.high,
            }
        )
    table = pd.DataFrame(rows)
    return table.astype({"kv_head": "Int64"})


def _narrow_enough(config: Config, clean: Any, planned: list[Planned]) -> Callable[[], bool]:
    """Asked after every batch: are all intervals narrower than the user wants?

    Raises:
        UserError: several processes, which would stop at different places.
    """
    from satlens.bootstrap import document_weights

    if process_place()[1] > 1:
        raise UserError("--until-width needs one process: each would stop at another place")
    asked = 0

    def stop() -> bool:
        nonlocal asked
        asked += 1
        count = clean.accumulators[0].count.numpy()
        if asked % EACH_BATCHES or np.count_nonzero(count) < 10:
            return False
        weights = document_weights(len(count), config.reading.resamples, config.reading.seed)
        table = deltas(planned, clean.accumulators[0].nll.numpy(), count, weights)
        widest = float((table["delta_ppl_high"] - table["delta_ppl_low"]).max())
        if widest < (config.until_width or 0):
            say(f"note: stopped early, the widest interval is {widest:.4g} PPL")
            return True
        return False

    return stop


def _headline(tables: dict[str, pd.DataFrame]) -> dict[str, Any]:
    """The numbers a reader wants first."""
    clean, table = tables["baseline"].iloc[0], tables["ablation"]
    out = {"perplexity": measured(clean["perplexity"], clean["low"], clean["high"])}
    for kind, rows in table[table["scope"] == "layer"].groupby("condition", sort=False):
        worst = rows.loc[rows["delta_ppl"].idxmax()]
        ends = (worst["delta_ppl"], worst["delta_ppl_low"], worst["delta_ppl_high"])
        out[f"largest_{kind}_effect_layer_{int(worst['layer'])}"] = measured(*ends, "delta PPL")
    return out
