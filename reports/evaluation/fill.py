"""Write the measured tables of this folder's README from finished runs of `satlens eval` and `satlens retrieval`.

Example: python reports/evaluation/fill.py runs/eval-* runs/retrieval-*
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from satlens.run import FinishedRun, open_run

README = Path(__file__).parent / "README.md"
BLOCKS = {"eval": "<!-- measured: eval -->", "retrieval": "<!-- measured: retrieval -->"}
END = "<!-- /measured -->"
CONTRASTS = ("answer - context", "answer - answer without context")


def scores(runs: Sequence[FinishedRun]) -> list[str]:
    """One row a task and metric, one column a model."""
    tables = {
        str(run.manifest.summary["model"]): run.tables["scores"]
        .query("status == 'measured'")
        .set_index(["task", "metric"])
        for run in runs
    }
    limit = runs[0].manifest.summary["limit"]
    lines = [
        f"First {limit} documents of each set, {runs[0].manifest.summary['harness']}; brackets are 95 % intervals.",
        "",
        "| task | metric | " + " | ".join(tables) + " | guessing |",
        "|---|---|" + "---|" * len(tables) + "---|",
    ]
    first = next(iter(tables.values()))
    for task, metric in first.index:
        cells = [cell(table.loc[(task, metric)], "value") for table in tables.values()]
        chance = first.loc[(task, metric), "chance"]
        lines.append(
            f"| {task} | {metric} | {' | '.join(cells)} | {'' if pd.isna(chance) else f'{chance:.3g}'} |"
        )
    return lines


def retrieval(run: FinishedRun) -> list[str]:
    """One row a condition: what it costs the answer, the rest of the context, and the answer without its context."""
    info, effects, contrasts = run.manifest.summary, run.tables["effects"], run.tables["effect_contrasts"]
    spans = [span for span in ("answer", "context", "answer without context") if span in set(effects["span"])]
    lines = [
        f"{info['n_items']} scored items of {info['task']} ({info['n_calibration_items']} others give the means). The "
        f"context changes the answer's NLL from {info['nll_answer_without_context']:.2f} to "
        f"{info['nll_answer']:.2f} nats per token. Change of NLL in nats per token:",
        "",
        "| gates replaced | " + " | ".join([*spans, *CONTRASTS]) + " |",
        "|---|" + "---|" * (len(spans) + len(CONTRASTS)),
    ]
    keys = effects[["condition", "layer"]].drop_duplicates()
    for condition, layer in keys.itertuples(index=False):
        if condition == "clean":
            continue
        same = [_rows(table, condition, layer) for table in (effects, contrasts)]
        cells = [cell(same[0][same[0]["span"] == span].iloc[0], "delta_nll") for span in spans]
        cells += [cell(same[1][same[1]["contrast"] == words].iloc[0], "delta_nll") for words in CONTRASTS]
        lines.append(
            f"| {condition if pd.isna(layer) else f'{condition}, layer {layer}'} | {' | '.join(cells)} |"
        )
    return lines


def _rows(table: pd.DataFrame, condition: str, layer: object) -> pd.DataFrame:
    at = table["layer"].isna() if pd.isna(layer) else table["layer"] == layer
    return table[(table["condition"] == condition) & at]


def cell(row: pd.Series, name: str) -> str:
    """A number with its interval."""
    ends = "" if pd.isna(row["low"]) else f" [{row['low']:.3g}, {row['high']:.3g}]"
    return f"{row[name]:.3g}{ends}"


def main() -> None:
    """Fill both blocks."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", type=Path)
    runs = [open_run(path) for path in parser.parse_args().runs]
    found = {verb: [run for run in runs if run.manifest.verb == verb] for verb in BLOCKS}
    made = {"eval": scores(found["eval"]), "retrieval": retrieval(found["retrieval"][-1])}
    text = README.read_text(encoding="utf-8")
    for verb, begin in BLOCKS.items():
        before, rest = text.split(begin)
        text = f"{before}{begin}\n\n" + "\n".join(made[verb]) + f"\n\n{END}{rest.split(END, 1)[1]}"
    README.write_text(text, encoding="utf-8")
    print(README)


if __name__ == "__main__":
    main()
