"""The V1 part of reports/example: dictionaries, judges, labels, category gating and flow of the reference pair."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pandas as pd

from analyses import categories, flow, gates
from sae import calibrate_command, label_command, train_command
from sae.funnel import Thresholds
from sae.judges import JudgeSettings
from satlens.reading import Reading
from satlens.run import FinishedRun, open_run

PAIR = ("reference-satformer", "reference-transformer")
SEEDS = (0, 1, 2)


def describe(runs: Path, check_tokens: int) -> None:
    """Dictionaries at the paper's setting, three seeds of each model; the rules' calibration and labels; and so on."""
    labels = []
    for name in PAIR:
        out = runs / "dictionaries" / name
        trained = train_command.Config(model=name, seeds=SEEDS, out=out, reading=Reading(tokens=0, runs=runs))
        _, *folders = train_command.run(trained)
        labels += [label_command.run(label_command.Config(sae=folder, runs=runs)) for folder in folders]
    first = runs / "dictionaries" / PAIR[0] / "seed-0"
    calibrate_command.run(calibrate_command.Config(sae=first, runs=runs))
    follow(runs, labels, check_tokens)


def follow(runs: Path, labels: list[Path], check_tokens: int) -> None:
    """Where gate and heads let the labelled features in, on all of the text; its gates run is kept apart."""
    whole = gates.run(gates.Config(reading=Reading(tokens=0, runs=runs / "whole-text")))
    categories.run(
        categories.Config(model=PAIR[0], labels=tuple(labels), gates=whole, baseline=PAIR[1], runs=runs)
    )
    flow.run(
        flow.Config(
            model=PAIR[0],
            sae=runs / "dictionaries" / PAIR[0] / "seed-0",
            labels=labels[0],
            gates=whole,
            check_heads=8,
            check_tokens=check_tokens,
            reading=Reading(tokens=0, runs=runs),
        )
    )


def ask(runs: Path, base_url: str, limit: int) -> None:
    """Calibrate the judge at ``base_url``, read by its probabilities, and let it label ``limit`` latents of each model.

    One calibration serves both: they share the vocabulary. Its placebos are shuffled sets of the first dictionary.
    """
    judge = JudgeSettings(
        judge="server",
        base_url=base_url,
        read="expected",
        concurrency=16,
        timeout=600,
        cache=runs / "answers.jsonl",
    )
    first = [runs / "dictionaries" / name / "seed-0" for name in PAIR]
    settings = calibrate_command.Config(judge=judge, sae=first[0], per_category=4, flips=20, runs=runs)
    calibration = calibrate_command.run(settings)
    if open_run(calibration).manifest.summary["threshold"] is None:
        return  # no score keeps placebos out, so its labels would mean nothing
    for folder in first:
        funnel = Thresholds(limit=limit)
        label_command.run(
            label_command.Config(sae=folder, judge=judge, funnel=funnel, calibration=calibration, runs=runs)
        )


def newest(folder: Path) -> list[FinishedRun]:
    """The newest finished run for each verb, model, seed and judge, in reading order."""
    found: dict[tuple[Any, ...], FinishedRun] = {}
    for verb in ("sae", "judge", "sae-label", "categories", "flow"):
        for path in sorted(folder.glob(f"{verb}-2*")):
            if (path / "manifest.json").exists():
                run = open_run(path)
                summary = run.manifest.summary
                judge = summary.get("judge")
                found[(verb, summary["model"], summary.get("sae_seed"), judge)] = run
    return list(found.values())


def shown(runs: list[FinishedRun]) -> list[FinishedRun]:
    """Those that get a section of the page: of the labels only the first seed's, the others stand in Fig. 9."""
    return [run for run in runs if run.manifest.verb != "sae-label" or run.manifest.summary["sae_seed"] == 0]


def block(runs: list[FinishedRun]) -> str:
    """The V1 part of the README, from the runs' own tables."""
    lines = [
        "| what the dictionary is measured on | " + " | ".join(PAIR) + " |",
        "|---|---|---|",
        *(f"| {words} | {' | '.join(cells)} |" for words, cells in quality(runs)),
        "",
        *sentences(runs),
    ]
    return "\n".join(lines) + "\n"


def quality(runs: list[FinishedRun]) -> Iterable[tuple[str, list[str]]]:
    """Rows of the table: FVE on four sets of weights for the dictionary, and what simpler means reach."""
    tables = [one(runs, "sae", name).tables["dictionaries"] for name in PAIR]
    for words, method, fit, column in (
        ("FVE, training counts", "sae", "all types", "fve_train"),
        ("FVE, held-out counts", "sae", "all types", "fve_heldout"),
        ("FVE, each token type once", "sae", "all types", "fve_types"),
        ("FVE, token types withheld from training", "sae", "some withheld", "fve_types_withheld"),
        ("the same, PCA with as many numbers a vector", "pca-k", "some withheld", "fve_types_withheld"),
        ("the same, k-means with as many centres", "k-means", "some withheld", "fve_types_withheld"),
        ("dead latents of 4,096", "sae", "all types", "dead"),
    ):
        rows = [t[(t["method"] == method) & (t["fit"] == fit)][column].astype(float) for t in tables]
        yield words, [spread(row) for row in rows]


def sentences(runs: list[FinishedRun]) -> list[str]:
    """What the runs say, in words made from their numbers."""
    sat = one(runs, "sae", PAIR[0]).manifest.summary
    gating = one(runs, "categories", PAIR[0]).manifest.summary
    moved = one(runs, "flow", PAIR[0]).manifest.summary
    layers = gating["semantic_minus_structural_layers_surely_above_0_and_null"]
    return [
        f"- {sat['latents_on_at_most_2_types']:,} of {sat['d_sae']:,} latents of SATFormer's first dictionary answer "
        "to one or two token types; without them its FVE on the counted text falls by "
        f"{sat['fve_held_by_latents_on_at_most_2_types']:.2f}.",
        "- With V1 replaced by the dictionary's reconstruction, "
        f"{measured(sat['loss_recovered'])} of what zeroing V1 costs is recovered.",
        *labelled(runs),
        f"- Labelled semantic minus structural, mean alpha in the last layer: "
        f"{measured(gating['semantic_minus_structural_layer_7'])}; layers where the difference is surely above 0 and "
        f"above what token frequency explains: {', '.join(map(str, layers)) or 'none'}.",
        f"- Labelled features explain {share_labelled(moved):.1%} of the V1 intake of all heads; unlabelled latents "
        f"{moved['share_of_intake_unlabelled']['estimate']:.1%}, reconstruction error "
        f"{moved['share_of_intake_error']['estimate']:.1%}.",
        f"- Flow scores against direct removal of the latent from that head's V1: rank correlation "
        f"{measured(moved['spearman_of_score_and_logit_change'])} with the change of logits, "
        f"{measured(moved['spearman_of_score_and_delta_nll'])} with the change of NLL.",
    ]


def labelled(runs: list[FinishedRun]) -> list[str]:
    """Counts of accepted features beside what each judge's calibration says they are worth."""
    lines = []
    judges = list(dict.fromkeys(r.manifest.summary["judge"] for r in runs if r.manifest.verb == "judge"))
    for judge in judges:
        calibration = next(
            r for r in runs if r.manifest.verb == "judge" and r.manifest.summary["judge"] == judge
        )
        found = calibration.manifest.summary
        labels = [
            r.manifest
            for r in runs
            if r.manifest.verb == "sae-label" and r.manifest.summary["judge"] == judge
        ]
        counts = []
        for name in PAIR:
            mine = [accepted(m) for m in labels if m.summary["model"] == name]
            counts.append(f"{name} {', '.join(mine) or 'none asked'}")
        lines.append(
            f"- Judge {judge}: accepted features by seed: {'; '.join(counts)}. Its calibration: area under the ROC "
            f"{measured(found['auc_rules'])} on sets that rules decide, {measured(found['auc_known'])} on words that "
            "belong together by meaning. The paper's 7 of 10 lets through "
            f"{measured(found['paper_false_retention'])} of placebos, "
            f"{measured(found['paper_true_retention_rules'])} of the first and "
            f"{measured(found['paper_true_retention_known'])} of the second; the calibrated "
            f"{found['threshold']:.3g} lets through {measured(found['false_retention'])}, "
            f"{measured(found['true_retention_rules'])} and {measured(found['true_retention_known'])}."
        )
    return lines


def accepted(manifest: Any) -> str:
    """How many were accepted, and of how many where not all were asked about."""
    limit = manifest.config["funnel"]["limit"]
    return str(manifest.summary["accepted"]) + (f" of {limit} asked about" if limit else "")


def share_labelled(summary: dict[str, Any]) -> float:
    """Of the V1 intake of all heads."""
    return float(
        sum(
            summary[f"share_of_intake_{kind}"]["estimate"]
            for kind in ("semantic", "functional", "structural")
        )
    )


def one(runs: list[FinishedRun], verb: str, model: str) -> FinishedRun:
    """The run of this verb and model."""
    return next(r for r in runs if r.manifest.verb == verb and r.manifest.summary["model"] == model)


def measured(number: dict[str, Any]) -> str:
    """A summary's number with its interval."""
    if number["low"] is None:
        return f"{number['estimate']:.3g}"
    return f"{number['estimate']:.3g} [{number['low']:.3g}, {number['high']:.3g}]"


def spread(values: pd.Series) -> str:
    """The mean over seeds, and their range."""
    digits = (lambda x: f"{x:,.0f}") if values.abs().max() > 2 else (lambda x: f"{x:.4f}")
    if len(values) == 1:
        return digits(values.iloc[0])
    return f"{digits(values.mean())} ({digits(values.min())} to {digits(values.max())})"
