"""The paper's numbers beside ours: a table from finished runs, blank where a model was not measured.

The published values are the paper's (arXiv 2609.31956) and those of the data files of its public repository. Those of
OPT are read from one token's features instead of positions (its block flattens batch and position), and parameter
shares of Pythia and OPT-350M are taken through another norm than the gate's: there the two columns do not measure the
same.

Example: python reports/reference_direction/compare.py runs/* --out reports/reference_direction
"""

import argparse
from pathlib import Path
from typing import Any

import pandas as pd

from satlens.run import FinishedRun, open_run

HERE = Path(__file__).parent
COLUMNS = {
    "resting_median": "resting",
    "coupling_median": "coupling",
    "bias_median": "bias",
    "negative_share": "negative",
    "dominance": "dominance",
    "ratio": "ratio",
    "rho_duty": "rho_resting",
    "duty_median": "duty_median",
    "duty_mean": "duty",
    "parameter_share": "parameter_share",
}
"""Quantity as published -> column of the scan's table."""
WORDS = {
    "resting_median": "resting term, median gate",
    "coupling_median": "coupling w·b, median gate",
    "bias_median": "bias, median gate",
    "negative_share": "gates with negative resting term",
    "dominance": "gates with coupling above bias",
    "ratio": "median coupling / median bias",
    "rho_duty": "Spearman of resting term and duty",
    "duty_median": "duty, median gate",
    "duty_mean": "duty, mean gate",
    "parameter_share": "parameter share of b",
}


def published() -> pd.DataFrame:
    """``model layer quantity published``, one row a number of the paper's scan."""
    wide = pd.read_csv(HERE / "published.csv")
    long = wide.melt(["model", "layer"], var_name="quantity", value_name="published").dropna()
    long["order"] = long["quantity"].map({name: place for place, name in enumerate(COLUMNS)})
    return long.sort_values(["model", "layer", "order"], kind="stable").drop(columns="order")


def measured(runs: list[FinishedRun]) -> pd.DataFrame:
    """``model layer quantity re-measured low high run``, from every scan among the runs."""
    rows = []
    for run in runs:
        if run.manifest.verb != "reference-scan":
            continue
        table = run.tables["scan"]
        for _, row in table[(table["status"] == "measured") & table["twin"].isna()].iterrows():
            biased = pd.notna(
                row["ratio"]
            )  # without biases every coupling outweighs them, which says nothing
            left = [q for q in COLUMNS if biased or q not in ("dominance", "bias_median")]
            rows += [_row(run, row, quantity, COLUMNS[quantity]) for quantity in left]
    names = ["model", "layer", "quantity", "re-measured", "low", "high", "run"]
    return pd.DataFrame(rows, columns=names).dropna(subset="re-measured")


def _row(run: FinishedRun, row: pd.Series, quantity: str, column: str) -> tuple[Any, ...]:
    ends = (row.get(f"{column}_low"), row.get(f"{column}_high"))
    return (row["model"], int(row["layer"]), quantity, row[column], *ends, run.path.name)


def compared(runs: list[FinishedRun]) -> pd.DataFrame:
    """Both, matched by the last part of the model's name, so that any local folder of that name counts."""
    paper, ours = published(), measured(runs)
    paper["key"] = paper["model"].str.split("/").str[-1].str.lower()
    ours["key"] = ours["model"].str.lower()
    both = paper.merge(
        ours.drop(columns="model").drop_duplicates(["key", "layer", "quantity"], keep="last"),
        on=["key", "layer", "quantity"],
        how="left",
    )
    extra = ours[~ours["key"].isin(paper["key"])].assign(published=float("nan"))
    columns = ["model", "layer", "quantity", "published", "re-measured", "low", "high", "run"]
    return pd.concat([both, extra], ignore_index=True)[columns]


def singles(runs: list[FinishedRun]) -> pd.DataFrame:
    """The paper's other numbers, each looked up in the latest run of its model that has the table it names."""
    rows = []
    for row in pd.read_csv(HERE / "published_single.csv").itertuples():
        key = row.model.split("/")[-1].lower()
        value, low, high, run = None, None, None, None
        for found in runs:
            name = str(found.manifest.model.get("name", "")).lower()
            if name == key and row.table in found.tables:
                value, low, high = _taken(found.tables[row.table].query(row.query), row.column, row.take)
                run = found.path.name
        rows.append((row.model, row.words, row.published, value, low, high, run))
    names = ["model", "quantity", "published", "re-measured", "low", "high", "run"]
    return pd.DataFrame(rows, columns=names)


def _taken(rows: pd.DataFrame, column: str, take: str) -> tuple[float | None, float | None, float | None]:
    """One number of the rows, with its interval where it is a single row's; nothing where no row is asked for."""
    if rows.empty:
        return None, None, None
    if take == "only":
        row = rows.iloc[0]
        return (
            row[column],
            row.get(f"{column}_low", row.get("low")),
            row.get(f"{column}_high", row.get("high")),
        )
    return float(getattr(rows[column], take)()), None, None


def singles_markdown(table: pd.DataFrame) -> str:
    """One list of the other numbers."""
    parts = ["| model | quantity | published / re-measured |", "|---|---|---|"]
    for _, row in table.iterrows():
        parts.append(f"| {row['model']} | {row['quantity']} | {_cell(row.to_frame().T)} |")
    return "\n".join(parts) + "\n"


def as_markdown(table: pd.DataFrame) -> str:
    """One table a model, layers as columns, ``published / re-measured [interval]`` in a cell."""
    parts = []
    for model, rows in table.groupby("model", sort=False):
        layers = sorted(rows["layer"].unique())
        parts += [f"### {model}", "", "| quantity | " + " | ".join(f"layer {n}" for n in layers) + " |"]
        parts += ["|---|" + "---|" * len(layers)]
        for quantity in COLUMNS:
            cells = [_cell(rows[(rows["quantity"] == quantity) & (rows["layer"] == n)]) for n in layers]
            if any(cells):
                parts.append(f"| {WORDS[quantity]} | " + " | ".join(cells) + " |")
        parts.append("")
    return "\n".join(parts)


def _cell(rows: pd.DataFrame) -> str:
    if rows.empty:
        return ""
    row = rows.iloc[0]
    paper = "" if pd.isna(row["published"]) else f"{row['published']:.4g}"
    if pd.isna(row["re-measured"]):
        return f"{paper} / " if paper else ""
    ends = "" if pd.isna(row["low"]) else f" [{row['low']:.3g}, {row['high']:.3g}]"
    return f"{paper} / {row['re-measured']:.4g}{ends}"


def main() -> None:
    """Write comparison.csv and comparison.md."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="*", type=Path)
    parser.add_argument("--out", type=Path, default=HERE)
    given = parser.parse_args()
    runs = [open_run(path) for path in given.runs if (path / "manifest.json").is_file()]
    table, others = compared(runs), singles(runs)
    given.out.mkdir(parents=True, exist_ok=True)
    pd.concat([table, others]).to_csv(given.out / "comparison.csv", index=False)
    head = "Cells are `published / re-measured [95 % interval over documents]`; blank where not measured.\n\n"
    text = head + singles_markdown(others) + "\n" + as_markdown(table)
    (given.out / "comparison.md").write_text(text, encoding="utf-8")
    done = table["re-measured"].notna().sum() + others["re-measured"].notna().sum()
    print(f"{done} of {len(table) + len(others)} numbers re-measured; {given.out / 'comparison.md'}")


if __name__ == "__main__":
    main()
