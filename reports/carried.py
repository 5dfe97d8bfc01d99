"""The carried direction in reports/example: statics and interventions of the reference pair, and the README's words."""

from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from analyses import reference, reference_causal
from satlens.reading import Reading
from satlens.run import FinishedRun, open_run

PAIR = ("reference-satformer", "reference-transformer")


def describe(runs: Path, tokens: int) -> None:
    """Statics on all of the shipped text, every experiment on ``tokens`` of it, for both models."""
    experiments = tuple(reference_causal.EXPERIMENTS)
    for model in PAIR:
        reference.run(reference.Config(model=model, reading=Reading(tokens=0, runs=runs)))
        wanted = tuple(name for name in experiments if name != "gate" or model == PAIR[0])
        reference_causal.run(
            reference_causal.Config(
                model=model, experiments=wanted, reading=Reading(tokens=tokens, runs=runs)
            )
        )


def newest(folder: Path) -> list[FinishedRun]:
    """The newest finished run of each verb and model, in reading order."""
    found: dict[tuple[str, str], FinishedRun] = {}
    for verb in ("reference", "reference-causal"):
        for path in sorted(folder.glob(f"{verb}-2*")):
            if (path / "manifest.json").exists():
                run = open_run(path)
                if (model := run.manifest.summary["model"]) in PAIR:
                    found[(verb, model)] = run
    return [found[verb, model] for verb in ("reference", "reference-causal") for model in PAIR]


def block(runs: Sequence[FinishedRun]) -> str:
    """The carried direction's part of the README, from the runs' own tables."""
    statics, causal = runs[:2], runs[2:]
    info = statics[0].manifest.summary
    lines = [
        f"Statics: {info['n_tokens']:,} positions in {info['n_documents']} documents that no mean was fitted on; "
        f"interventions: {causal[0].manifest.summary['n_tokens']:,} positions in "
        f"{causal[0].manifest.summary['n_documents']}.",
        "",
        *static_table(statics),
        "",
        *dose_table(causal),
        "",
        *sentences(statics, causal),
    ]
    return "\n".join(lines) + "\n"


def static_table(statics: Sequence[FinishedRun]) -> list[str]:
    """Per layer and model: the stream's share along m^, where the median gate rests, and how often gates are on."""
    heads = [f"{words}, {run.manifest.summary['model'].removeprefix('reference-')}"
             for words in ("share of the stream along m^", "resting term, median MLP gate", "duty, mean MLP gate")
             for run in statics]  # fmt: skip
    lines = ["| layer | " + " | ".join(heads) + " |", "|---|" + "---|" * len(heads)]
    objects = [run.tables["carried_object"].set_index("layer") for run in statics]
    resting = [run.tables["carried_resting"].query("kind == 'mlp'").set_index("layer") for run in statics]
    for layer in objects[0].index:
        cells = [_cell(table.loc[layer], "share") for table in objects]
        cells += [_cell(table.loc[layer], name) for name in ("resting", "duty") for table in resting]
        lines.append(f"| {layer} | " + " | ".join(cells) + " |")
    return lines


def dose_table(causal: Sequence[FinishedRun]) -> list[str]:
    """Removing m^ at a layer's input: cost and release, and how many times that of controls as large."""
    lines = [
        "| m^ removed at | KL, nats a position | times matched controls | delta NLL, nats | release of firing | "
        "KL, random-init twin |",
        "|---|---|---|---|---|---|",
    ]
    for run in causal:
        table, controls = run.tables["dose"], run.tables["dose_controls"]
        twins = run.tables["twin"]
        removed = table.query("direction == 'reference' and alpha == 0 and not norm_kept")
        for row in removed.to_dict("records"):
            beside = controls.query(
                "layer == @row['layer'] and alpha == 0 and not norm_kept and control == 'matched' and "
                "measure == 'kl_far'"
            ).iloc[0]
            twin = twins.query(
                "layer == @row['layer'] and direction == 'reference' and alpha == 0 and not norm_kept"
            )["kl_far"]
            name = run.manifest.summary["model"].removeprefix("reference-")
            lines.append(
                f"| {name}, layer {row['layer']} | {_cell(row, 'kl_far')} | {_cell(beside, 'ratio')} | "
                f"{_cell(row, 'delta_nll')} | {_cell(row, 'release')} | {twin.min():.3g} to {twin.max():.3g} |"
            )
    return lines


def sentences(statics: Sequence[FinishedRun], causal: Sequence[FinishedRun]) -> list[str]:
    """SATFormer's own gate, and where the prediction fails, in words made from numbers."""
    heads = statics[0].tables["carried_value_gates"]
    below = int((heads["resting"] < 0).sum())
    gate = causal[0].tables["gate"]
    removed, zeroed, only = (
        gate[gate["kind"] == kind].set_index("layer")
        for kind in ("removed", "zeroed", "removed for the gate")
    )
    opened = removed.index[removed["delta_open_low"] > 0].tolist()
    shut = removed.index[removed["delta_open_high"] < 0].tolist()
    lines = [
        f"- SATFormer's own gate: {below} of {len(heads)} gates rest below 0; duty and resting logit correlate at "
        f"{heads['duty'].corr(heads['resting']):.2f} (Pearson), and duty is one minus the share of exact zeros above.",
        f"- With m^ removed at its layer's input the gate surely opens at {_list(opened)} and surely shuts at "
        f"{_list(shut)} (share of open gates, 95 % interval on one side of 0).",
        f"- What that costs, seen by the gate alone: {_range(only)} PPL by layer, against {_range(zeroed)} for zeroing "
        "the gate there.",
    ]
    for run in causal:
        rows = run.tables["prediction"].query("shape == 'empirical' and norm == 'rescaled' and kind == 'mlp'")
        parts = []
        for level, of_level in rows.groupby("level", sort=False):
            worst = of_level.loc[of_level["error"].abs().idxmax()]
            inside = (
                (of_level["predicted"] >= of_level["low"]) & (of_level["predicted"] <= of_level["high"])
            ).mean()
            parts.append(
                f"{level}: off by {of_level['error'].abs().mean():.3g} on average, most at layer {worst['layer']}, "
                f"alpha {worst['alpha']:g} ({worst['predicted']:.3f} for {worst['measured']:.3f}); within the measured "
                f"interval {100 * inside:.0f} % of the time"
            )
        lines.append(
            f"- One clean pass predicts the doses of {run.manifest.summary['model']}: "
            + "; ".join(parts)
            + "."
        )
    return lines


def _cell(row: pd.Series | dict[str, float], name: str) -> str:
    low, high = row[f"{name}_low"], row[f"{name}_high"]
    return f"{row[name]:.3g}" + ("" if pd.isna(low) else f" [{low:.3g}, {high:.3g}]")


def _range(rows: pd.DataFrame) -> str:
    values = rows["delta_ppl"]
    return f"{values.min():.3g} to {values.max():.3g}"


def _list(layers: list[int]) -> str:
    return f"layers {', '.join(map(str, layers))}" if layers else "no layer"
