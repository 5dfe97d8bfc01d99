"""What the figures of the carried direction's interventions share: panels of layers, curves, ranges over draws."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from satlens.plots import theme

Tables = Mapping[str, pd.DataFrame]
Info = Mapping[str, Any]

MOST_PANELS = 5
"""Layers drawn as panels of one figure; of more, this many are chosen, evenly spaced."""


def panels(layers: Any) -> list[int]:
    """The layers drawn as panels: all, or ``MOST_PANELS`` evenly spaced."""
    known = sorted({int(layer) for layer in layers})
    if len(known) <= MOST_PANELS:
        return known
    return [known[round(at)] for at in np.linspace(0, len(known) - 1, MOST_PANELS)]


def layer_grid(rows: int, layers: Sequence[int]) -> go.Figure:
    """A column of panels for each layer, titled with it; axes are shared along rows and columns."""
    titles = [f"layer {layer}" for layer in layers] + [""] * (len(layers) * (rows - 1))
    return make_subplots(
        rows, len(layers), shared_xaxes="all", shared_yaxes="rows", horizontal_spacing=0.02, vertical_spacing=0.07,
        subplot_titles=titles,
    )  # fmt: skip


def range_over_draws(
    fig: go.Figure, table: pd.DataFrame, x: str, y: str, name: str, place: dict[str, int], legend: bool,
    colour: str = theme.MUTED, mean: bool = True,
) -> None:  # fmt: skip
    """The range over draws at each x as a band, and their mean as a thin line."""
    found = table.groupby(x)[y].agg(["min", "max", "mean"]).sort_index()
    at = found.index.to_numpy(float)
    fig.add_trace(
        go.Scatter(
            x=np.concatenate([at, at[::-1]]), y=np.concatenate([found["max"], found["min"][::-1]]), fill="toself",
            fillcolor=theme.rgba(colour, 0.22), mode="lines", line={"width": 0}, hoverinfo="skip", name=name,
            legendgroup=name, showlegend=legend,
        ),
        **place,
    )  # fmt: skip
    if mean:
        fig.add_trace(
            go.Scatter(
                x=at, y=found["mean"], mode="lines", line={"color": colour, "width": 1.2}, legendgroup=name,
                showlegend=False, name=name, hovertemplate=f"{name}, mean<br>%{{x}}<br>%{{y:.4g}}<extra></extra>",
            ),
            **place,
        )  # fmt: skip


def curve(
    fig: go.Figure, table: pd.DataFrame, x: str, y: str, name: str, index: int, place: dict[str, int], legend: bool,
    dash: str = "solid",
) -> None:  # fmt: skip
    """One curve with error bars where the table has an interval."""
    colour = theme.QUALITATIVE[index % len(theme.QUALITATIVE)]
    values = theme.floats(table[y])
    nothing = np.full(len(values), np.nan)
    low, high = (
        theme.floats(table[f"{y}_{end}"]) if f"{y}_{end}" in table else nothing for end in ("low", "high")
    )
    fig.add_trace(
        go.Scatter(
            x=table[x], y=values, mode="lines+markers", name=name, legendgroup=name, showlegend=legend,
            line={"color": colour, "width": 1.8, "dash": dash},
            marker={"color": colour, "symbol": theme.SYMBOLS[index % len(theme.SYMBOLS)], "size": 7},
            error_y={"type": "data", "symmetric": False, "array": high - values, "arrayminus": values - low,
                     "color": colour, "thickness": 1.2, "width": 3},
            text=theme.interval_texts(low, high),
            hovertemplate=f"{name}<br>%{{x}}<br>%{{y:.4g}} %{{text}}<extra></extra>",
        ),
        **place,
    )  # fmt: skip


def legend_key(fig: go.Figure, name: str, colour: str, symbol: str) -> None:
    """An entry of the legend without a point."""
    fig.add_trace(
        go.Scatter(
            x=[None], y=[None], mode="markers", name=name, marker={"color": colour, "symbol": symbol, "size": 8}
        ),
        row=1, col=1,
    )  # fmt: skip


def chosen_words(table: pd.DataFrame, layers: Sequence[int]) -> str:
    """For captions: that not all layers are drawn, where that is so."""
    total = table["layer"].nunique()
    return (
        ""
        if total == len(layers)
        else f" {len(layers)} of {total} edited layers are drawn; the table has all."
    )


def words_below(info: Info, table: pd.DataFrame, measure: str, interval: bool = True) -> str:
    """The subtitle: model, where m^ comes from, tokens and interval."""
    known = theme.has_interval(table[f"{measure}_low"], table[f"{measure}_high"]) if interval else None
    words = "m^ fitted on the same documents" if info["same_documents"] else "m^ fitted on other documents"
    return theme.subtitle(info["n_tokens"], info["n_documents"], known, info["model"], words)


def titled_panels(fig: go.Figure, size: int = 13) -> go.Figure:
    """Titles of panels in a size that does not compete, and the legend lifted above them (after ``theme.style``)."""
    inner = fig.layout.height - fig.layout.margin.t - 64
    fig.update_annotations(font_size=size)
    fig.update_layout(margin={"t": fig.layout.margin.t + 22}, height=fig.layout.height + 22)
    return fig.update_layout(legend={"y": 1 + 26 / inner})
