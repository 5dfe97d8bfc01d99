"""Which V1 latents does each head re-read, and where do they go: gate x activation x decoder row x output map.

Intake of a latent by a head: alpha times activation times the length of its decoder row there, per position. Score:
intake times the size (over the vocabulary) of its logits along the direct path from that head, which leaves out later
layers and the final norm's scale. A head's intake is also split without remainder into labelled features by kind,
unlabelled latents, decoder bias and reconstruction error. Scores are then checked: latents are taken out of V1 as one
head reads it, beside random latents that are about as frequent, and the change of logits and NLL is measured.

Examples:
    satlens flow reference-satformer --sae runs/dictionaries/reference-satformer-v1/seed-0 --labels runs/sae-label-b
    satlens flow path/to/final --sae SAE --labels RUN --check-heads 8 --check-tokens 100000
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pandas as pd
import tyro

from satlens.errors import UserError
from satlens.log import say
from satlens.reading import Reading, Subject, begin_run, data_facts, measure, open_subject, open_text
from satlens.run import Run, measured

UNITS = {
    "share": "share of the head's V1 intake, as length along V1",
    "length": "mean of alpha x length of V1",
    "intake": "mean of alpha x activation x length of the decoder row",
    "logit_size": "standard deviation of direct-path logits over the vocabulary, per unit of intake",
    "score": "mean of alpha x activation x standard deviation of direct-path logits",
    "positions": "positions where the latent is active",
    "part_of_latent": "share of the latent's scores over all heads",
    "logit_change": "mean standard deviation over the vocabulary of the change of logits",
    "delta_nll": "nats per token",
    "spearman": "rank correlation",
}


@dataclass(frozen=True, kw_only=True)
class Config:
    """Flags of `satlens flow`."""

    model: tyro.conf.Positional[str] = "reference-satformer"
    """A checkpoint folder, or reference-satformer."""
    sae: Path
    """Folder of the V1 dictionary."""
    labels: Path
    """The run of satlens sae label that labelled it."""
    gates: Path | None = None
    """The run of satlens gates to use; left out, the newest of this model below --runs."""
    check_heads: int = 4
    """Heads whose strongest latents are taken away to check the scores; 0 checks nothing."""
    check_latents: int = 3
    """Latents to take away from each, and as many random ones of about equal frequency."""
    check_tokens: int = 20_000
    """Text tokens of the check, which is a pass for every removal."""
    reading: Annotated[Reading, tyro.conf.arg(name="")] = field(default_factory=Reading)
    """Text and machine settings; on the text of the gates run, shares of intake get intervals."""

    def __post_init__(self) -> None:
        if self.check_heads < 0 or self.check_latents < 1 or self.check_tokens < 1:
            raise UserError("--check-heads must be at least 0, --check-latents and --check-tokens at least 1")


def run(config: Config) -> Path | None:
    """Trace and check the flow of V1 latents in one model; returns the run directory (None in helper processes)."""
    from analyses.latents.check import conditions, plan
    from analyses.latents.traced import trace

    subject = open_subject(config.model, config.reading)
    inputs = open_inputs(config, subject)
    corpus = open_text(subject, config.reading)
    out = begin_run("flow", config, config.reading)
    flow = trace(subject.bridge, subject.sites, subject.tokenizer, *inputs)
    by_document = intake_by_document(subject, corpus, flow, config.reading)
    chosen = plan(flow, config.check_heads, config.check_latents, config.reading.seed)
    checked = corpus.first_tokens(config.check_tokens)
    clean, checks = conditions(flow, chosen, subject.bridge, subject.sites, checked.n_documents)
    if checks:
        measure(subject, checked, [clean, *(c.condition for c in checks)], config.reading, "latents removed")
    if out is None:
        return None
    return finish(out, config, subject, corpus, flow, by_document, (clean, checks))


def intake_by_document(subject: Subject, corpus: Any, flow: Any, reading: Reading) -> np.ndarray | None:
    """Every head's intake by part and document, which sums stored by token cannot tell.

    None where the text is not the one that the gates run read: its intervals would be those of other numbers.
    """
    from analyses.latents.removal import PartsByDocument
    from analyses.latents.traced import token_parts
    from satlens.stream import Condition

    if corpus.digest() != flow.gates.run.manifest.data["digest"]:
        say("note: shares of intake have no interval, as this text is not the one of the gates run")
        return None
    parts = PartsByDocument(corpus.n_documents, flow.gates.layers, token_parts(flow))
    clean = Condition(name="clean", accumulators=(parts,))
    measure(subject, corpus, [clean], reading, "V1 intake")
    total: np.ndarray = clean.accumulators[0].total.numpy()
    return total


def open_inputs(config: Config, subject: Subject) -> tuple[Any, Any, Any]:
    """Dictionary, labels and gate sums, all of this model.

    Raises:
        UserError: the model has no gates, the dictionary is not one of its V1, or a digest differs.
    """
    from sae.dictionary import open_dictionary
    from sae.labels import open_labels
    from satlens.gate_sums import open_gates

    if subject.sites.gate_kind is None:
        raise UserError(f"{subject.name} is a {subject.sites.architecture}: no head of it reads V1 again")
    dictionary = open_dictionary(config.sae)
    if not dictionary.is_v1:
        raise UserError(
            f"{config.sae} is a dictionary of {dictionary.facts['site']}: heads re-read v1, give one of it"
        )
    dictionary.require_model(subject.facts)
    labels = open_labels(config.labels)
    labels.require(model_digest=subject.facts["digest"], sae_digest=dictionary.digest)
    runs = config.reading.runs
    command = f"satlens gates {config.model} --runs {runs}"
    return dictionary, labels, open_gates(config.gates, runs, subject.facts, command)


def finish(
    out: Run,
    config: Config,
    subject: Subject,
    corpus: Any,
    flow: Any,
    by_document: np.ndarray | None,
    check: tuple[Any, list[Any]],
) -> Path:
    """Write tables and figures, and make the run whole."""
    from analyses.figures.flow import FIGURES
    from satlens.bootstrap import document_weights

    reading = config.reading
    weights = document_weights(corpus.n_documents, reading.resamples, reading.seed)
    tables = all_tables(flow, by_document, weights, check, reading)
    for name, table in tables.items():
        out.table(name, table, {column: unit for column, unit in UNITS.items() if column in table})
    info = {
        "model": subject.name,
        "gate": flow.gates.kind,
        "judge": flow.labels.judge,
        "n_layers": subject.sites.n_layers,
        "n_latents": flow.dictionary.d_sae,
        "n_features": len(flow.labels.features),
        "n_tokens": int(flow.gates.count.sum()),
        "n_documents": int(flow.gates.run.manifest.summary["n_documents"]),
        "sae": config.sae.name,
        "sae_digest": flow.dictionary.digest,
        "sae_seed": flow.dictionary.facts["seed"],
    }
    if check[1]:
        count = check[0].accumulators[0].count
        info |= {"n_tokens_check": int(count.sum()), "n_documents_check": int((count > 0).sum())}
    for name, figure in FIGURES.items():
        if name not in NEEDS_CHECK or check[1]:
            out.figure(name, figure(tables, info))
    return out.finish(
        {**info, **headline(flow, by_document, weights, tables)},
        inputs=[flow.gates.run, flow.labels.run],
        model=subject.facts,
        data=data_facts(subject, corpus, reading),
    )


def all_tables(
    flow: Any,
    by_document: np.ndarray | None,
    weights: np.ndarray,
    check: tuple[Any, list[Any]],
    reading: Reading,
) -> dict[str, pd.DataFrame]:
    """Shares, strongest latents and heads, and what the check measured if there was one."""
    from analyses.latents import traced
    from analyses.latents.check import check_table, correlations
    from satlens.bootstrap import document_weights

    tables = {
        "head_shares": traced.shares_table(flow, by_document, weights),
        "top_latents": traced.top_latents(flow),
        "top_heads": traced.top_heads(flow),
        "strongest_latents": traced.strongest_everywhere(flow),
    }
    clean, checks = check
    if checks:
        drawn = document_weights(len(clean.accumulators[0].count), reading.resamples, reading.seed)
        tables["flow_check"] = check_table(flow, clean, checks, drawn)
        tables["flow_correlation"] = correlations(tables["flow_check"], clean, checks, drawn, reading.seed)
    return tables


NEEDS_CHECK = ("check",)
"""Figures that show what taking latents away did."""


def headline(
    flow: Any, by_document: Any, weights: np.ndarray, tables: dict[str, pd.DataFrame]
) -> dict[str, Any]:
    """What all heads take in together, by part, and how well scores predict effects."""
    from analyses.latents.traced import PARTS, head_shares
    from satlens.bootstrap import percentile_interval, resample

    length = np.abs(flow.whole.length.numpy())
    whole = np.nansum(head_shares(flow) * length[..., None], axis=(0, 1)) / length.sum()
    low = high = [None] * len(PARTS)
    if by_document is not None and len(by_document) > 1:
        sums = resample(by_document.sum((1, 2)), weights)
        low, high = percentile_interval(sums / sums.sum(1, keepdims=True))
    found = {
        f"share_of_intake_{part}": measured(whole[at], low[at], high[at], "of the V1 intake of all heads")
        for at, part in enumerate(PARTS)
    }
    for row in tables["flow_correlation"].itertuples() if "flow_correlation" in tables else ():
        key = f"spearman_of_{row.predictor}_and_{row.effect}"
        found[key] = {**measured(row.spearman, row.low, row.high, f"over {row.n_removals} removals")}
    return found
