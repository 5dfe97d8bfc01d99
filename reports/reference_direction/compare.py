"""The paper's numbers beside ours: a table from finished runs, blank where a model was not measured.

Published values come from the paper (arXiv 2609.31956) and from the data files of its public repository; the column
`source` of both lists says which. Re-measured are runs of `satlens reference`, `reference-scan` and `reference-causal`.
Three published columns do not measure what their name says, see README.md: OPT, parameter shares, cosines of b.

Example: python reports/reference_direction/compare.py runs/* --out reports/reference_direction
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from satlens.carried.summary import layer_rows
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
"""Quantity as published -> column of the static table."""
TAKES: dict[str, Callable[[np.ndarray], float]] = {
    "min": np.min,
    "max": np.max,
    "sum": np.sum,
    "mean": np.mean,
    "growth": lambda values: values[-1] / values[0],
    "median of sizes": lambda values: float(np.median(np.abs(values))),
}
"""What is made of several rows; ``only`` is the one row there is, with its interval."""
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


HEAD = """# The paper's numbers beside ours

Cells are `published / re-measured [95 % interval over documents]`, nothing after the stroke where a model was not
measured. Made by `compare.py`; `comparison.csv` has every number with its source and its run.

"""


def published() -> pd.DataFrame:
    """``model layer source quantity published``, one row a number of the paper's scan."""
    wide = pd.read_csv(HERE / "published.csv")
    long = wide.melt(["model", "layer", "source"], var_name="quantity", value_name="published").dropna()
    long["order"] = long["quantity"].map({name: place for place, name in enumerate(COLUMNS)})
    return long.sort_values(["model", "layer", "order"], kind="stable").drop(columns="order")


def measured(runs: list[FinishedRun]) -> pd.DataFrame:
    """``model layer quantity re-measured low high run``, from the static tables among the runs, later ones last."""
    rows = []
    for run in runs:
        for row in static_rows(run).to_dict("records"):
            # without biases every coupling outweighs them, which says nothing
            left = [q for q in COLUMNS if pd.notna(row["ratio"]) or q not in ("dominance", "bias_median")]
            rows += [_row(run, row, quantity, COLUMNS[quantity]) for quantity in left]
    names = ["model", "layer", "quantity", "re-measured", "low", "high", "run"]
    return pd.DataFrame(rows, columns=names).dropna(subset="re-measured")


def static_rows(run: FinishedRun) -> pd.DataFrame:
    """One row a model and layer: those of a scan, or the same made from one model's static tables."""
    if run.manifest.verb == "reference-scan":
        table = run.tables["scan"]
        return table[(table["status"] == "measured") & table["twin"].isna()]
    if run.manifest.verb != "reference":
        return pd.DataFrame()
    table = layer_rows(run.tables, int(run.manifest.summary["n_layers"]))
    return table.assign(model=run.manifest.model["name"])


def _row(run: FinishedRun, row: dict[str, Any], quantity: str, column: str) -> tuple[Any, ...]:
    ends = (row.get(f"{column}_low"), row.get(f"{column}_high"))
    return (row["model"], int(row["layer"]), quantity, row[column], *ends, run.path.name)


def compared(runs: list[FinishedRun]) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Both, matched by the last part of the model's name, so that any local folder of that name counts; and the rest.

    The rest are models that the paper does not have, and layers of its models that it has no number of.
    """
    paper, ours = published(), measured(runs)
    paper["key"] = paper["model"].str.split("/").str[-1].str.lower()
    ours["key"] = ours["model"].str.lower()
    names = ["key", "layer", "quantity"]
    ours = ours.drop_duplicates(names, keep="last")
    both = paper.merge(ours.drop(columns="model"), on=names, how="left")
    columns = ["model", "layer", "quantity", "published", "re-measured", "low", "high", "run", "source"]
    return both[columns], ours[~ours["key"].isin(paper["key"])].drop(columns="key")


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
        rows.append((row.model, row.words, row.published, value, low, high, run, row.source))
    names = ["model", "quantity", "published", "re-measured", "low", "high", "run", "source"]
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
    values = rows[column].to_numpy(dtype=float)
    return float(TAKES[take](values)), None, None


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


def extra_markdown(table: pd.DataFrame) -> str:
    """One table of all models that the paper does not have: a row a model and layer, without intervals."""
    wide = table.pivot(index=["model", "layer"], columns="quantity", values="re-measured")
    order = pd.MultiIndex.from_frame(table[["model", "layer"]].drop_duplicates())
    wide = wide.reindex(order)[[name for name in COLUMNS if name in wide]]
    parts = ["| model | layer | " + " | ".join(WORDS[name] for name in wide) + " |"]
    parts.append("|---|" + "---|" * (1 + wide.shape[1]))
    for (model, layer), row in wide.iterrows():
        cells = ["" if pd.isna(value) else f"{value:.4g}" for value in row]
        parts.append(f"| {model} | {layer} | " + " | ".join(cells) + " |")
    return "\n".join(parts) + "\n"


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
    (table, extra), others = compared(runs), singles(runs)
    given.out.mkdir(parents=True, exist_ok=True)
    pd.concat([table, others, extra]).to_csv(given.out / "comparison.csv", index=False)
    text = HEAD + singles_markdown(others) + "\n" + as_markdown(table)
    if len(extra):
        text += "\n### Models that the paper does not have\n\n" + extra_markdown(extra)
    (given.out / "comparison.md").write_text(text, encoding="utf-8")
    done = table["re-measured"].notna().sum() + others["re-measured"].notna().sum()
    print(
        f"{done} of {len(table) + len(others)} published numbers re-measured; {given.out / 'comparison.md'}"
    )


if __name__ == "__main__":
    main()
