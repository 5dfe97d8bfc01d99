"""Label a V1 dictionary: which latents are features a judge finds coherent, and of which of ten categories.

The funnel of the paper (App. C.1): activity and density, MonoScore, purity of two token sets, category. Judges: rules
(deterministic, no model), server (any OpenAI-compatible endpoint, such as vllm serve), vllm (in this process). Killed
or repeated, the command asks nothing twice.

Examples:
    satlens sae label runs/dictionaries/reference-satformer-v1/seed-0
    satlens sae label SAE --judge server --base-url http://127.0.0.1:8000/v1 --calibration runs/judge-...
    satlens sae label SAE --judge server --limit 200
"""

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from sae.funnel import Thresholds
from sae.judges import JudgeSettings, make_judge
from satlens import reference
from satlens.errors import UserError
from satlens.run import FinishedRun, Run, measured, open_run, plain, start_run

if TYPE_CHECKING:
    import pandas as pd

    from sae.dictionary import Dictionary
    from sae.judges import Judge
    from satlens.reading import Subject

UNITS = {
    "n_active": "positions",
    "density": "share of positions",
    "mono_score": "cosine",
    "act": "activation",
    "share": "share of latents",
    "score_a": "purity 0-10",
    "score_b": "purity 0-10",
    "score": "purity 0-10",
}


@dataclass(frozen=True, kw_only=True)
class Config:
    """Flags of `satlens sae label`."""

    sae: tyro.conf.Positional[Path]
    """Folder of a trained V1 dictionary (a seed that satlens sae train made)."""
    judge: Annotated[JudgeSettings, tyro.conf.arg(name="")] = field(default_factory=JudgeSettings)
    """Who is asked."""
    funnel: Annotated[Thresholds, tyro.conf.arg(name="")] = field(default_factory=Thresholds)
    """What a latent must pass."""
    calibration: Path | None = None
    """Run of satlens judge calibrate with this judge: its threshold takes the place of --min-score."""
    model: str | None = None
    """The model of the dictionary; left out, the shipped one that it was trained on."""
    prefilter: bool = True
    """Accept without asking where rules put all tokens of both sets into one category (any judge but the rules)."""
    device: str = "cpu"
    """Where the dictionary and the model run."""
    seed: int = 0
    """Decides which latents --limit draws, and the resampling."""
    resamples: int = 1000
    """Bootstrap resamples behind each 95 % interval."""
    runs: Path = Path("runs")
    """Folder that finished runs go to."""

    def __post_init__(self) -> None:
        if self.resamples < 100:
            raise UserError(f"an interval from {self.resamples} resamples would be noise; use at least 100")


def run(config: Config) -> Path:
    """Label one dictionary; returns the run directory.

    Raises:
        UserError: no V1 dictionary, another model's, a judge that cannot be asked, a calibration of another judge.
        SatlensError: none of the judge's answers could be used.
    """
    from sae.dictionary import open_dictionary

    dictionary = open_dictionary(config.sae, config.device)
    if not dictionary.is_v1 or dictionary.counts is None:
        raise UserError(
            f"{config.sae} reads {dictionary.facts['site']}, not V1: labels need a list of the tokens each latent is "
            "active on, which only V1 has; train one with satlens sae train --site v1"
        )
    judge = make_judge(config.judge)
    try:
        judge.check()
        calibration = None
        if config.calibration is not None:
            calibration = open_calibration(config.calibration, judge.facts, config.funnel.set_size)
        subject = open_model(config, dictionary)
        out = start_run(config.runs, "sae-label", config, sys.argv[1:])
        return label(out, config, dictionary, subject, judge, calibration)
    finally:
        judge.close()


def open_model(config: Config, dictionary: "Dictionary") -> "Subject":
    """The model that the dictionary was trained on.

    Raises:
        UserError: it does not ship and none was named, or the one named is another.
    """
    from satlens.reading import Reading, open_subject

    name = config.model or dictionary.facts["model"]["name"]
    if config.model is None and name not in reference.MODELS:
        raise UserError(
            f"{config.sae} was trained on {name}, which does not ship: give its folder with --model"
        )
    subject = open_subject(name, Reading(device=config.device))
    dictionary.require_model(subject.facts)
    return subject


def open_calibration(path: Path, facts: dict[str, Any], set_size: int) -> FinishedRun:
    """A finished calibration of this very judge, on sets of this size, that found a threshold.

    Raises:
        UserError: another verb's run, another judge, other set sizes, or no threshold.
    """
    found = open_run(path)
    if found.manifest.verb != "judge":
        raise UserError(f"{path} is a run of {found.manifest.verb}, not of satlens judge calibrate")
    summary, mine = found.manifest.summary, plain(facts)
    theirs = summary["judge_facts"]
    if theirs != mine:
        keys = sorted(set(theirs) | set(mine))
        words = [
            f"{key} {theirs.get(key)}, not {mine.get(key)}"
            for key in keys
            if theirs.get(key) != mine.get(key)
        ]
        raise UserError(f"{path} calibrates another judge ({'; '.join(words)}): calibrate this one first")
    if summary["set_size"] != set_size:
        raise UserError(
            f"{path} was made with sets of {summary['set_size']} tokens, and a score means something else with "
            f"{set_size}: calibrate with --set-size {set_size}"
        )
    if summary["threshold"] is None:
        raise UserError(
            f"{path} found no score that keeps the false retention at {summary['target']:.3g}: this judge cannot tell "
            "coherent sets from placebos, read it another way (--read) or take another"
        )
    return found


def label(
    out: Run,
    config: Config,
    dictionary: "Dictionary",
    subject: "Subject",
    judge: "Judge",
    calibration: FinishedRun | None,
) -> Path:
    """Tables and figures into ``out``, and the run made whole."""
    from sae.asking import report_errors
    from sae.figures.labels import FIGURES

    assert dictionary.counts is not None
    calibrated = None if calibration is None else calibration.manifest.summary["threshold"]
    min_score = config.funnel.min_score if calibrated is None else calibrated
    tables = label_tables(out, config, dictionary, subject, judge, min_score)
    for name, table in tables.items():
        out.table(name, table, {column: unit for column, unit in UNITS.items() if column in table})
    report_errors(tables["answers"])
    facts = {
        "model": subject.name,
        "sae": dictionary.path.name,
        "sae_digest": dictionary.digest,
        "sae_seed": dictionary.facts["seed"],
        "n_tokens": int(dictionary.counts.total.sum()),
    }
    summary = {**facts, **summarise(config, judge.facts, tables, calibration, min_score)}
    for name, figure in FIGURES.items():
        out.figure(name, figure(tables, summary))
    data = {**dictionary.facts["data"], "n_tokens": facts["n_tokens"]}
    inputs: list[Any] = [{"dictionary": dictionary.path.name, "digest": dictionary.digest}]
    inputs += [] if calibration is None else [calibration]
    return out.finish(summary, inputs, model=subject.facts, data=data)


def label_tables(
    out: Run,
    config: Config,
    dictionary: "Dictionary",
    subject: "Subject",
    judge: "Judge",
    min_score: float,
) -> "dict[str, pd.DataFrame]":
    """Features from the V1 table, the funnel, and the judge's answers; all that `label` stores."""
    from sae.features import activations_table, input_embeddings, latent_features, mono_score
    from sae.funnel import distribution, funnel_table, screen
    from sae.label import judge_latents, latent_table, sets_table
    from sae.labels import ACCEPTED
    from sae.table import v1_rows

    assert dictionary.counts is not None
    counts = dictionary.counts.total
    features = latent_features(dictionary, v1_rows(subject.bridge), counts)
    mono = mono_score(features, input_embeddings(subject.bridge), counts)
    latents = screen(latent_table(features, mono), config.funnel, config.seed)
    judged = latents.loc[latents["verdict"].isna(), "latent"].tolist()
    sets = sets_table(features, judged, counts, config.funnel.set_size, subject.tokenizer)
    prefilter = config.prefilter and judge.facts["judge"] != "rules"
    latents, answers = judge_latents(latents, sets, judge, min_score, prefilter, out.log)
    accepted = latents.loc[latents["verdict"] == ACCEPTED, "latent"].tolist()
    return {
        "features": latents.drop(columns="has_sets"),
        "funnel": funnel_table(latents),
        "sets": sets,
        "activations": activations_table(features, accepted),
        "distribution": distribution(latents, config.resamples, config.seed),
        "answers": answers,
    }


def summarise(
    config: Config,
    facts: dict[str, Any],
    tables: "dict[str, pd.DataFrame]",
    calibration: FinishedRun | None,
    min_score: float,
) -> dict[str, Any]:
    """How many latents met which fate, by whose word, at what threshold and cost."""
    from sae.asking import judge_name, spent
    from sae.funnel import accepted_share, verdicts

    latents = tables["features"]
    share = accepted_share(latents, config.resamples, config.seed)
    top = int(latents["stage"].isin(["sample", "consistency", "category"]).sum())
    least, most = (None if end is None else top * end for end in (share.low, share.high))
    expected = None if share.estimate is None else top * share.estimate
    source = "the paper" if min_score == Thresholds().min_score else "--min-score"
    return {
        "judge": judge_name(facts),
        "judge_facts": facts,
        "n_latents": len(latents),
        "mean_density": float(latents["density"].mean()),
        **verdicts(latents),
        "accepted_by_rules": int((latents["decided_by"] == "rules").sum()),
        "accepted_share_of_judged": measured(*share, "of latents with a verdict"),
        "accepted_if_all_were_asked": measured(expected, least, most, "expected at this share"),
        "min_score": min_score,
        "min_score_from": source if calibration is None else f"calibration {calibration.path.name}",
        **spent(tables["answers"]),
        **({} if calibration is None else trust(calibration)),
    }


def trust(calibration: FinishedRun) -> dict[str, Any]:
    """How far the calibration says this judge can be trusted: the numbers that belong beside its counts."""
    summary = calibration.manifest.summary
    kept = ("auc_rules", "auc_known", "false_retention", "true_retention_rules", "true_retention_known")
    return {f"calibration_{name}": summary[name] for name in kept}
