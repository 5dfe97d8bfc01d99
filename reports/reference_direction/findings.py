"""The findings in README.md: every number from finished runs, the words from here.

Example: python reports/reference_direction/findings.py runs/reference/*
"""

import argparse
from collections.abc import Mapping
from pathlib import Path

import pandas as pd
from compare import static_rows
from opt_defect import demonstration

from satlens.carried.order import which_first
from satlens.run import FinishedRun, open_run

HERE = Path(__file__).parent
BEGIN, END = "<!-- measured: reports/reference_direction/findings.py -->", "<!-- /measured -->"


def main() -> None:
    """Write the block, from the newest run of each kind among those given."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--model", default="smollm2", help="the model whose static numbers are told")
    given = parser.parse_args()
    runs = [open_run(path) for path in sorted(given.runs) if (path / "manifest.json").is_file()]
    text = block(runs, given.model)
    readme = HERE / "README.md"
    whole = readme.read_text(encoding="utf-8")
    before, rest = whole.split(BEGIN, 1)
    readme.write_text(f"{before}{BEGIN}\n{text}{END}{rest.split(END, 1)[1]}", encoding="utf-8")
    print(readme)


def block(runs: list[FinishedRun], model: str) -> str:
    """Markdown of all parts that there are runs for."""
    parts = []
    if (run := newest(runs, "reference-development")) is not None:
        parts.append(development(run))
    if (run := newest(runs, "reference-scan")) is not None:
        parts.append(scan(run))
    if (found := newest_rows(runs, model)) is not None:
        parts.append(static(*found))
    parts.append(opt(demonstration()))
    return "\n".join(parts)


def newest(runs: list[FinishedRun], verb: str) -> FinishedRun | None:
    """The last run of a verb."""
    found = [run for run in runs if run.manifest.verb == verb]
    return max(found, key=lambda run: run.manifest.finished, default=None)


def newest_rows(runs: list[FinishedRun], model: str) -> tuple[FinishedRun, pd.DataFrame] | None:
    """The static table of one model with most layers, from the last run that has it: its own, or a scan."""
    found = []
    for run in runs:
        rows = static_rows(run)
        rows = rows[rows["model"] == model] if len(rows) else rows
        if len(rows):
            found.append((len(rows), run.manifest.finished, run, rows))
    return max(found, key=lambda item: item[:2])[2:] if found else None


def development(run: FinishedRun) -> str:
    """Where every arm ended, and what can be said of the order."""
    summary, tables = run.manifest.summary, run.tables
    layer, copying = int(summary["layer"]), tables["induction"]
    gates = tables["development"]
    gates = gates[gates["layer"] == layer]
    rows = [
        "| run | loss | coupling, median gate | duty, median gate | share of m^ | induction | worth of a repeat |",
        "|---|---|---|---|---|---|---|",
    ]
    for name in gates["run"].unique():
        first, last = (gates[gates["run"] == name].sort_values("step").iloc[at] for at in (0, -1))
        copied = copying[copying["run"] == name].sort_values("step").iloc[-1]
        loss = summary[f"{name}_loss"]
        cells = [
            with_interval(loss["estimate"], loss["low"], loss["high"]),
            f"{first['coupling']:.3f} → {of(last, 'coupling')}",
            f"{first['duty_median']:.3f} → {of(last, 'duty_median')}",
            f"{first['share']:.3f} → {of(last, 'share')}",
            of(copied, "induction"),
            of(copied, "loss_drop"),
        ]
        rows.append(f"| {name} | " + " | ".join(cells) + " |")
    return (
        f"**Development.** {len(gates['run'].unique())} models, {summary['checkpoints']} checkpoints, layer {layer}, "
        f"{summary['n_tokens']:,} evaluated tokens in {summary['n_documents']} documents: untrained → trained, with "
        "95 % intervals over documents (over sequences for copying).\n\n"
        + "\n".join(rows)
        + f"\n\n{order_words(tables)} {arm_words(tables['checkpoints'], gates)}\n"
    )


def order_words(tables: Mapping[str, pd.DataFrame]) -> str:
    """What can be said of coupling and induction in time, and what cannot."""
    order, copying = tables["order"], tables["induction"]
    coupling = order[(order["quantity"] == "coupling") & (order["status"] == "moved")]
    words = (
        f"Couplings went half their way between steps {coupling['before'].min():,} and {coupling['after'].max():,}. "
        if len(coupling)
        else "Couplings did not move. "
    )
    said = {run: which_first(order, run) for run in order["run"].unique()}
    able = order[(order["quantity"] == "induction") & (order["status"] != "attention off")]["run"]
    copied = copying[copying["run"].isin(able)]
    scores = (
        f"Attention spread evenly scores an induction of {copying['chance'].iloc[0]:.3f}, untrained models "
        f"{span(copied.loc[copied['step'] == 0, 'induction'])}, and no checkpoint with attention more than "
        f"{copied['induction'].max():.3f}"
    )
    if all("induction" in said[run] and said[run].startswith("no order") for run in able):
        return (
            words
            + scores
            + ": nothing has learnt to copy at this size, so whether coupling comes before induction "
            "is not decided here."
        )
    return words + scores + ". First came: " + "; ".join(f"{run}: {said[run]}" for run in able) + "."


def arm_words(checkpoints: pd.DataFrame, gates: pd.DataFrame) -> str:
    """What is left of the coupling without attention, MLP by MLP, and how far seeds lie apart."""
    ends = gates.sort_values("step").groupby("run").tail(1)[["run", "coupling"]]
    ends = ends.merge(checkpoints.drop_duplicates("run")[["run", "mlp", "attention"]], on="run")
    arms = ends.groupby(["mlp", "attention"])["coupling"]
    mean, spread = arms.mean(), (arms.max() - arms.min()).max()
    parts = [
        f"{mean[mlp, False] / mean[mlp, True]:.2f} with {mlp} ({mean[mlp, False]:.3f} against {mean[mlp, True]:.3f})"
        for mlp in ends["mlp"].unique()
        if (mlp, True) in mean and (mlp, False) in mean
    ]
    if not parts:
        return ""
    return (
        f"Of the coupling that models with attention end with, those without reach {', '.join(parts)}, means over "
        f"seeds; seeds of an arm lie up to {spread:.3f} apart."
    )


def scan(run: FinishedRun) -> str:
    """How many of the layers of how many models rest below 0."""
    table, summary = run.tables["scan"], run.manifest.summary
    own = table[(table["status"] == "measured") & table["twin"].isna()]
    twins = table[(table["status"] == "measured") & table["twin"].notna()]
    biased, above = summary["layers_with_biases"], summary["layers_coupling_above_bias"]
    text = (
        f"**Scan.** {own['model'].nunique()} models, {summary['layers']} layers: the median gate rests below 0 in "
        f"{summary['layers_resting_below_0']}; where gates have biases ({biased} layers), couplings outweigh them in "
        f"{above}, by {span(own['ratio'], 1)} times (medians). Duty of the median gate is {span(own['duty_median'])}"
    )
    if len(twins):
        text += f"; in random-init twins {span(twins['duty_median'])}, with resting terms from {span(twins['resting'])}"
    failed = table.loc[table["status"] == "failed", "model"].unique()
    return text + (f". Not measured: {', '.join(failed)}.\n" if len(failed) else ".\n")


def static(run: FinishedRun, rows: pd.DataFrame) -> str:
    """The static numbers of one model, over its layers."""
    middle, below = rows.iloc[len(rows) // 2], int((rows["resting"] < 0).sum())
    weights = weights_of(run, str(middle["model"]))
    return (
        f"**{middle['model']}**{f' ({weights})' if weights else ''}. "
        f"{len(rows)} layers, {int(middle['n_tokens']):,} evaluated tokens. The median gate rests "
        f"below 0 in {below} layers; in the middle one ({int(middle['layer'])}) at {of(middle, 'resting')}, with duty "
        f"{of(middle, 'duty_median')}. "
        f"The stream's share along m^ is {span(rows['share'], 2)}, the cosine of m between "
        f"halves of the documents {span(rows['stability'])}. Duty is ordered by the resting term at a Spearman of "
        f"{span(rows['rho_resting'], 2)}, by random directions of the same length at {span(rows['rho_random'], 2)} "
        f"(median size), by the length of the read alone at {span(rows['rho_read_norm'], 2)}.\n"
    )


def weights_of(run: FinishedRun, model: str) -> str | None:
    """What the model's folder says of its weights (quantised, say)."""
    if run.manifest.verb == "reference":
        return run.manifest.model.get("weights")
    return run.tables["models"].set_index("model").loc[model].get("weights")


def opt(table: pd.DataFrame) -> str:
    """Both ways of reading a planted OPT."""
    rows = [
        "| planted OPT | read | resting, median gate | couplings above bias | duty, median gate | Spearman with duty |",
        "|---|---|---|---|---|---|",
    ]
    for row in table.to_dict("records"):
        numbers = [f"{row[name]:.3f}" for name in ("resting", "dominance", "duty", "rho")]
        rows.append(f"| {row['placement']} | {row['read']} | " + " | ".join(numbers) + " |")
    return (
        "**OPT.** Tiny random OPT models whose gates are planted to rest on the carried direction, read as the paper's "
        "script reads them and as they are (`opt_defect.py`). A duty above 1 is no duty: it counts gates of one token "
        "against features of one token.\n\n" + "\n".join(rows) + "\n"
    )


def span(values: pd.Series, digits: int = 3) -> str:
    """``smallest to largest``."""
    return f"{values.min():.{digits}f} to {values.max():.{digits}f}"


def of(row: pd.Series, name: str) -> str:
    """A number of a table's row with its interval."""
    return with_interval(row[name], row[f"{name}_low"], row[f"{name}_high"])


def with_interval(value: float, low: float | None, high: float | None) -> str:
    """``0.123 [0.1, 0.2]``, or the number alone."""
    return f"{value:.3f}" if pd.isna(low) or pd.isna(high) else f"{value:.3f} [{low:.3f}, {high:.3f}]"


if __name__ == "__main__":
    main()
