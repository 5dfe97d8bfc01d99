"""How good is the model at each task, beside what guessing would give, and how well does it predict text."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from satlens.plots import theme

Tables = Mapping[str, pd.DataFrame]
Info = Mapping[str, Any]
SHARES = ("acc", "acc_norm", "contains")
PERPLEXITIES = {
    "word_perplexity": "per word",
    "perplexity": "of the last word",
    "byte_perplexity": "per byte",
}
NAMES = {"acc": "accuracy", "acc_norm": "accuracy, likelihood per byte", "contains": "answer generated"}


def is_share(table: pd.DataFrame) -> pd.Series:
    """Rows that are a share of documents."""
    return table["metric"].isin(SHARES)


def is_perplexity(table: pd.DataFrame) -> pd.Series:
    """Rows that are a perplexity."""
    return table["metric"].isin(list(PERPLEXITIES))


def accuracy(tables: Tables, info: Info) -> go.Figure:
    """Share of documents answered rightly, one row a task, with guessing marked."""
    table = tables["scores"][is_share(tables["scores"])]
    tasks = list(dict.fromkeys(table["task"]))
    both = set(table.loc[table["metric"] == "acc_norm", "task"])
    fig = go.Figure()
    for index, metric in enumerate(SHARES):
        rows = table[table["metric"] == metric]
        if len(rows):
            lift = {"acc": 0.12 * (rows["task"].isin(both)), "acc_norm": -0.12}.get(metric, 0.0)
            places = np.array([tasks.index(task) for task in rows["task"]]) - lift
            _points(fig, rows, list(places), NAMES[metric], index)
    guess = table.dropna(subset="chance").drop_duplicates("task")
    if len(guess):
        fig.add_trace(
            go.Scatter(
                x=theme.floats(guess["chance"]),
                y=[tasks.index(t) for t in guess["task"]],
                mode="markers",
                name="guessing",
                marker={"symbol": "line-ns", "size": 22, "line": {"color": theme.INK, "width": 2}},
                hovertemplate="guessing<br>%{x:.1%}<extra></extra>",
            )
        )
    fig.update_xaxes(title_text="share of documents", tickformat=".0%", rangemode="tozero")
    fig = _rows(fig, tasks)
    return theme.style(
        fig,
        "Task scores",
        _subtitle(table, info),
        "One row a task. Multiple choice counts a document when the right choice is the most likely one, by its summed "
        "log-likelihood (accuracy) or that divided by the choice's bytes; retrieval counts it when the completion "
        "contains the answer. Bars are intervals over documents, the upright line is what guessing among the choices "
        "gives: a score whose interval holds it shows no ability. Completions have no such line.",
        width=820,
        height=230 + 44 * len(tasks),
    )


def perplexity(tables: Tables, info: Info) -> go.Figure:
    """Perplexities, each per its own unit."""
    table = tables["scores"][is_perplexity(tables["scores"])]
    names = [f"{row.task}<br>{PERPLEXITIES[row.metric]}" for row in table.itertuples()]
    fig = go.Figure()
    _points(fig, table, list(range(len(names))), "perplexity", 0)
    ends = pd.concat([table["value"], table["low"], table["high"]])
    theme.log_axis(fig, ends, "perplexity (lower is better)", horizontal=True)
    fig = _rows(fig, names)
    return theme.style(
        fig,
        "Perplexity of benchmark texts",
        _subtitle(table, info),
        "Perplexity per word, per byte, or of a passage's last word: numbers of different units cannot be compared "
        "with each other, but each can with other models', whatever their vocabulary. Bars are intervals over "
        "documents.",
        width=820,
        height=230 + 50 * len(names),
    )


def _points(fig: go.Figure, rows: pd.DataFrame, places: list[float], name: str, index: int) -> None:
    value, low, high = (theme.floats(rows[column]) for column in ("value", "low", "high"))
    colour = theme.QUALITATIVE[index]
    fig.add_trace(
        go.Scatter(
            x=value,
            y=places,
            mode="markers",
            name=name,
            cliponaxis=False,
            marker={"color": colour, "symbol": theme.SYMBOLS[index], "size": 9},
            error_x={
                "type": "data",
                "symmetric": False,
                "array": high - value,
                "arrayminus": value - low,
                "color": colour,
                "thickness": 1.4,
                "width": 4,
            },
            text=[
                f"{task} {ends} of {n:,} documents"
                for task, ends, n in zip(
                    rows["task"], theme.interval_texts(low, high), rows["n_documents"], strict=True
                )
            ],
            hovertemplate=f"{name}<br>%{{x:.4g}} %{{text}}<extra></extra>",
        )
    )


def _rows(fig: go.Figure, names: list[str]) -> go.Figure:
    return fig.update_yaxes(
        tickvals=list(range(len(names))), ticktext=names, range=[len(names) - 0.5, -0.5], title_text="task"
    )


def _subtitle(table: pd.DataFrame, info: Info) -> str:
    counts = table.drop_duplicates("task")["n_documents"].dropna()
    words = [str(info["model"]), "zero-shot", f"{int(counts.sum()):,} documents"]
    if info.get("limit"):
        words.append(f"first {info['limit']:,} of each task only")
    known = theme.has_interval(table["low"], table["high"])
    return theme.subtitle(
        None, None, None, *words, "95 % interval over documents" if known else theme.NO_INTERVAL
    )


FIGURES = {"accuracy": (accuracy, is_share), "perplexity": (perplexity, is_perplexity)}
