"""On what do gates rest in one model after another: the static statistics at four depths, model by model."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from satlens.plots import theme

Tables = Mapping[str, pd.DataFrame]
Info = Mapping[str, Any]

LEGEND = {"orientation": "v", "x": 1.02, "y": 1.0, "xanchor": "left", "yanchor": "top"}
"""Beside the panels: many models have no room above them."""
TWIN = "random-init twins"
PANELS = (
    ("resting", "resting term, median gate", "pre-activation"),
    ("ratio", "coupling over bias, medians", "|w·b| / |beta|"),
    ("duty_median", "duty, median gate", "share of far positions"),
    ("share", "m^ in the stream", "share of its norm"),
)


def scan(tables: Tables, info: Info) -> go.Figure:
    """Resting term, coupling against bias, duty and share of the carried direction, by depth and model."""
    table = tables["scan"]
    table = table[table["status"] == "measured"]
    fig = make_subplots(
        2, 2, horizontal_spacing=0.11, vertical_spacing=0.16, subplot_titles=[title for _, title, _ in PANELS]
    )
    own, twins = table[table["twin"].isna()], table[table["twin"].notna()]
    for number, (column, _, unit) in enumerate(PANELS):
        place = {"row": number // 2 + 1, "col": number % 2 + 1}
        for at, (_, rows) in enumerate(twins.groupby("model", sort=False)):
            _twin(fig, rows.sort_values("depth"), column, place, number == at == 0)
        for at, (model, rows) in enumerate(own.groupby("model", sort=False)):
            _line(fig, rows.sort_values("depth"), column, str(model), at, place, number == 0)
        fig.update_yaxes(title_text=unit, **place)
    known = theme.floats(table["ratio"])
    if np.isfinite(known).any():
        theme.log_axis(fig, known, PANELS[1][2], row=1, col=2)
    else:
        _words(fig, "no model here has gate biases", row=1, col=2)
        fig.update_yaxes(showticklabels=False, row=1, col=2)
    fig.update_yaxes(rangemode="tozero", row=1, col=1)
    fig.update_yaxes(rangemode="tozero", row=2)
    deep = max(0.7, 1.03 * float(table["depth"].max()))
    fig.update_xaxes(title_text="depth", range=[-0.02, deep], tickvals=[0, 0.2, 0.35, 0.5, 0.65, 0.8, 1])
    fig.update_annotations(font_size=13)
    failed = tables["scan"].loc[tables["scan"]["status"] == "failed", "model"].unique()
    models = f"{own['model'].nunique()} models"
    return theme.style(
        fig,
        "On what MLP gates rest, model by model",
        theme.subtitle(info.get("n_tokens"), info.get("n_documents"), _interval(table), models),
        "Each point is a layer at a fraction of the model's depth. The resting term is the median over gates of w·b + "
        "beta, the gate's mean pre-activation; the ratio is the median |w·b| over the median |beta|, and exists only "
        "where gates have biases. Duty is the share of far positions with a pre-activation above 0, for the median "
        "gate. The share of m^ is the mean of (x·m^)/|x| over far positions. Every model reads the documents through "
        "its own tokenizer, so tokens differ; the counts are those of the first model. Grey: the same configs with "
        "random weights, whose biases are 0."
        + (f" Not measured: {', '.join(map(str, failed))} (reasons in the table)." if len(failed) else ""),
        width=1180,
        height=800,
    ).update_layout(legend=LEGEND)  # fmt: skip


def _line(
    fig: go.Figure, rows: pd.DataFrame, column: str, model: str, number: int, place: dict[str, int], legend: bool
) -> None:  # fmt: skip
    low, high = (theme.floats(rows[f"{column}_{end}"]) if f"{column}_{end}" in rows else np.full(len(rows), np.nan)
                 for end in ("low", "high"))  # fmt: skip
    values = theme.floats(rows[column])
    colour = theme.QUALITATIVE[number % len(theme.QUALITATIVE)]
    turn = number // len(theme.QUALITATIVE)
    fig.add_trace(
        go.Scatter(
            x=rows["depth"], y=values, mode="lines+markers", name=model, legendgroup=model, showlegend=legend,
            line={"color": colour, "width": 1.8, "dash": ("solid", "dash", "dot")[turn % 3]},
            marker={"color": colour, "size": 8, "symbol": theme.SYMBOLS[number % len(theme.SYMBOLS)]},
            error_y={"type": "data", "symmetric": False, "array": high - values, "arrayminus": values - low,
                     "color": colour, "thickness": 1.2, "width": 3},
            customdata=rows["layer"], text=theme.interval_texts(low, high),
            hovertemplate=f"{model}<br>layer %{{customdata}}<br>%{{y:.4g}} %{{text}}<extra></extra>",
        ),
        **place,
    )  # fmt: skip


def _twin(fig: go.Figure, rows: pd.DataFrame, column: str, place: dict[str, int], legend: bool) -> None:
    """A thin grey line under the models; one entry of the legend stands for all twins."""
    model = str(rows["model"].iloc[0])
    fig.add_trace(
        go.Scatter(
            x=rows["depth"], y=theme.floats(rows[column]), mode="lines", name=TWIN, legendgroup=TWIN,
            showlegend=legend, line={"color": theme.MUTED, "width": 0.9, "dash": "dot"}, opacity=0.7,
            customdata=rows["layer"],
            hovertemplate=f"{model}<br>layer %{{customdata}}<br>%{{y:.4g}}<extra></extra>",
        ),
        **place,
    )  # fmt: skip


def _interval(table: pd.DataFrame) -> bool:
    return theme.has_interval(table["share_low"], table["share_high"])


def _words(fig: go.Figure, text: str, **place: int) -> None:
    fig.add_annotation(
        text=text, x=0.5, y=0.5, xref="x domain", yref="y domain", showarrow=False,
        font={"color": theme.MUTED, "size": 12}, **place,
    )  # fmt: skip


FIGURES = {"scan": scan}
