"""The carried direction at rest: the object itself, and what gates rest on."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from satlens.plots import theme

DRAWN = 100
"""Gates of a layer that the scatter of single gates shows."""
Tables = Mapping[str, pd.DataFrame]
Info = Mapping[str, Any]

NORMS = {"stream_norm": "stream |x|", "m_norm": "mean |m|", "b_norm": "read mean |b|"}


def carried_object(tables: Tables, info: Info) -> go.Figure:
    """Share of the stream along m^, norms, stability and rotation, by layer (spec part B: share, rotation)."""
    table, n_layers = tables["carried_object"], info["n_layers"]
    titles = (
        "share of the stream along m^",
        "mean norms",
        "cosine between means of m",
        "cosine of m^ between layers",
    )
    fig = make_subplots(2, 2, horizontal_spacing=0.13, vertical_spacing=0.22, subplot_titles=titles)
    line(fig, table, "share", "share", 0, 1, 1)
    for index, (column, name) in enumerate(NORMS.items(), start=1):
        line(fig, table, column, name, index, 1, 2, legend=True)
    _stability(fig, tables["carried_stability"])
    _rotation(fig, tables["carried_rotation"], n_layers)
    for row, col in ((1, 1), (1, 2), (2, 1)):
        layers(fig, n_layers, row, col)
    fig.update_yaxes(title_text="mean of (x·m^)/|x|", rangemode="tozero", row=1, col=1)
    known = np.concatenate([theme.floats(table[name]) for name in NORMS])
    theme.log_axis(fig, known, "length", row=1, col=2)
    fig.update_yaxes(title_text="cosine", row=2, col=1)
    fig.update_annotations(font_size=13)
    styled = theme.style(
        fig,
        "The carried direction: its share of the stream, its length, its stability",
        subtitle(info, table, "share"),
        "m is the mean stream at a layer's input over far positions (from 16 on) of the fit documents, m^ its unit "
        "vector; b is the mean of what the gate linear reads. Top left: how much of each position's stream lies along "
        "m^. Top right: mean length of the stream, and lengths of m and b. Bottom left: cosine between the means of "
        "random halves of the documents (band: 95 % of 200 halvings) and between kinds of text (band: bootstrap). "
        "Bottom right: cosine of m^ between layers.",
        width=1040,
        height=860,
    )
    # what the lines of the lower left panel are stands above it, not above the whole figure
    panel = {"x": 0, "y": fig.layout.yaxis3.domain[1] + 0.035, "yanchor": "bottom", "orientation": "h"}
    styled.update_layout(legend2=panel, legend_x=fig.layout.xaxis2.domain[0])
    return clear_of_titles(styled)


def carried_resting(tables: Tables, info: Info) -> go.Figure:
    """Medians of coupling and bias, dominance, duty and firing, by layer (spec part B: decomposition)."""
    table = _mlp(tables["carried_resting"])
    middle = (
        "gates held by the coupling" if info.get("gate_bias") else "gates resting below 0 (no biases here)"
    )
    titles = ("resting term, median gate", middle, "gates that are on")
    fig = make_subplots(1, 3, horizontal_spacing=0.09, subplot_titles=titles)
    line(fig, table, "coupling", "coupling w·b", 0, 1, 1, legend=True)
    if info.get("gate_bias"):
        blank = np.full(len(table), np.nan)
        theme.series(
            fig,
            table["layer"],
            table["bias"],
            blank,
            blank,
            "bias beta",
            1,
            place={"row": 1, "col": 1},
            line=True,
        )
        line(fig, table, "dominance", "of all gates", 2, 1, 2, legend=True)
        line(fig, table, "dominance_resting", "of gates resting below 0", 3, 1, 2, legend=True)
        fig.update_yaxes(
            title_text="share with |w·b| > |beta|", range=[0, 1.03], tickformat=".0%", row=1, col=2
        )
    else:
        blank = np.full(len(table), np.nan)
        theme.series(
            fig,
            table["layer"],
            table["negative"],
            blank,
            blank,
            "resting below 0",
            2,
            place={"row": 1, "col": 2},
        )
        fig.update_yaxes(
            title_text="share of gates resting below 0", range=[0, 1.03], tickformat=".0%", row=1, col=2
        )
    line(fig, table, "duty", "duty, mean gate", 4, 1, 3, legend=True)
    line(fig, table, "firing_05", "firing above 0.5", 5, 1, 3, legend=True)
    for col in (1, 2, 3):
        layers(fig, info["n_layers"], 1, col)
    fig.update_yaxes(title_text="pre-activation", row=1, col=1)
    theme.zero_line(fig, row=1, col=1)
    fig.update_yaxes(
        title_text="share of gates and positions", rangemode="tozero", tickformat=".0%", row=1, col=3
    )
    fig.update_annotations(font_size=13)
    styled = theme.style(
        fig,
        "What MLP gates rest on",
        subtitle(info, table, "duty"),
        "A gate's mean pre-activation is exactly w·b + beta: its coupling to the mean of what it reads, and its bias. "
        "Left: medians over gates. Middle: share of gates whose coupling outweighs their bias"
        + (
            ", among all gates and among those that rest below 0. "
            if info.get("gate_bias")
            else " (none here); "
        )
        + "Right: duty is the share of far positions with a pre-activation above 0, firing the share of gates and "
        "positions with a post-activation above 0.5"
        + (" (before the up-projection)." if info.get("gated") else "."),
        width=1100,
        height=440,
    )
    return clear_of_titles(styled)


def carried_duty(tables: Tables, info: Info) -> go.Figure:
    """Duty of single gates against their resting term, up to eight layers; SATFormer's own gates beside them."""
    gates = _thinned(tables["carried_gates"])
    chosen = spread(sorted(_mlp(gates)["layer"].unique()), 8)
    columns = min(4, len(chosen))
    rows, own = -(-len(chosen) // columns), bool((gates["kind"] == "value").any())
    fig = make_subplots(
        rows, columns, shared_xaxes="all", shared_yaxes="all", horizontal_spacing=0.025,
        vertical_spacing=0.3 / (rows + 1), subplot_titles=[f"layer {layer}" for layer in chosen],
    )  # fmt: skip
    for number, layer in enumerate(chosen):
        for index, kind in enumerate(("mlp", "value")):
            part = gates[(gates["layer"] == layer) & (gates["kind"] == kind)]
            _cloud(
                fig,
                part,
                kind,
                index,
                number // columns + 1,
                number % columns + 1,
                own and number == len(chosen) - 1,
            )
    fig.update_yaxes(range=[-0.03, 1.03], tickformat=".0%")
    fig.update_yaxes(title_text="duty", col=1)
    fig.update_xaxes(zeroline=True, zerolinecolor=theme.INK, zerolinewidth=1)
    fig.update_annotations(font_size=13)
    for col in range(1, columns + 1):
        fig.update_xaxes(title_text="resting term", row=rows, col=col)
    styled = theme.style(
        fig,
        "Duty of single gates against what they rest on",
        theme.subtitle(
            info["n_tokens"], info["n_documents"], None, named(info), f"{len(gates):,} gates drawn"
        ),
        "Each point is a gate: across, its resting term w·b + beta (b from the fit documents); upwards, the share of "
        "far positions of the evaluated documents at which it is on. That the two go together is near-tautological; "
        "how far below 0 gates rest is what is learned."
        + (
            " Squares are SATFormer's own gates, one a KV head: 1 − duty of a ReLU gate is its share of exact zeros."
            if own
            else ""
        ),
        width=1040,
        height=150 + 230 * rows,
    )
    return clear_of_titles(styled)


def _thinned(gates: pd.DataFrame) -> pd.DataFrame:
    """At most ``DRAWN`` gates a layer and kind, evenly by number: a page holds pictures of many models."""
    parts = [part.iloc[:: -(-len(part) // DRAWN)] for _, part in gates.groupby(["layer", "kind"], sort=False)]
    return pd.concat(parts, ignore_index=True)


def _stability(fig: go.Figure, table: pd.DataFrame) -> None:
    if table.empty:
        fig.add_trace(
            go.Scatter(x=[None], y=[None], showlegend=False), row=2, col=1
        )  # or the panel has no axes
        fig.add_annotation(
            text="one document has no halves", x=0.5, y=0.5, xref="x domain", yref="y domain", showarrow=False,
            font={"color": theme.MUTED, "size": 12}, row=2, col=1,
        )  # fmt: skip
        fig.update_yaxes(range=[0, 1], row=2, col=1)
        return
    for index, ((comparison, first, second), part) in enumerate(
        table.groupby(["comparison", "first", "second"], sort=False)
    ):
        name = "two halves" if comparison == "halves" else f"{first} / {second}"
        line(fig, part, "cosine", name, (0, 4, 5, 6)[min(index, 3)], 2, 1, legend=True)
    fig.update_traces(legend="legend2", row=2, col=1)


def _rotation(fig: go.Figure, table: pd.DataFrame, n_layers: int) -> None:
    values = table.pivot(index="layer", columns="other", values="cosine").to_numpy()
    fig.add_trace(
        go.Heatmap(
            z=values, zmin=-1, zmax=1, colorscale=theme.DIVERGING, xgap=1, ygap=1,
            colorbar={"title": {"text": "cosine", "side": "right"}, "thickness": 12, "outlinewidth": 0, "len": 0.42,
                      "y": 0.2},
            hovertemplate="layers %{y} and %{x}<br>%{z:.3f}<extra></extra>",
        ),
        row=2, col=2,
    )  # fmt: skip
    at = theme.ticks(n_layers, 16)
    fig.update_xaxes(title_text="layer", tickvals=at, showgrid=False, row=2, col=2)
    fig.update_yaxes(title_text="layer", tickvals=at, showgrid=False, row=2, col=2)


def _cloud(
    fig: go.Figure, part: pd.DataFrame, kind: str, index: int, row: int, col: int, legend: bool
) -> None:
    if part.empty:
        return
    names = {"mlp": "MLP gates", "value": "SATFormer's own gates"}
    fig.add_trace(
        go.Scatter(
            x=part["resting"], y=part["duty"], mode="markers", name=names[kind], legendgroup=kind, showlegend=legend,
            marker={"color": theme.QUALITATIVE[index], "symbol": theme.SYMBOLS[index], "size": 4 if index == 0 else 8,
                    "opacity": 0.55 if index == 0 else 1.0},
            customdata=part["gate"],
            hovertemplate="gate %{customdata}<br>resting %{x:.3g}<br>duty %{y:.1%}<extra></extra>",
        ),
        row=row, col=col,
    )  # fmt: skip


def line(
    fig: go.Figure,
    table: pd.DataFrame,
    column: str,
    name: str,
    index: int,
    row: int,
    col: int,
    legend: bool = False,
) -> None:
    """A column by layer with its interval."""
    theme.series(
        fig, table["layer"], table[column], table[f"{column}_low"], table[f"{column}_high"], name, index,
        place={"row": row, "col": col}, showlegend=legend,
    )  # fmt: skip


def errors(table: pd.DataFrame, column: str, colour: str) -> dict[str, Any] | None:
    """Error bars of a column, or None where it has no interval."""
    value, low, high = (theme.floats(table[name]) for name in (column, f"{column}_low", f"{column}_high"))
    if not np.isfinite(low).any():
        return None
    return {
        "type": "data", "symmetric": False, "array": high - value, "arrayminus": value - low, "color": colour,
        "thickness": 1.1, "width": 2,
    }  # fmt: skip


def clear_of_titles(fig: go.Figure) -> go.Figure:
    """Lift the legend above the panels' titles."""
    fig.update_layout(margin={"t": 132}, height=fig.layout.height + 24)
    drawn = fig.layout.height - 132 - theme.template().layout.margin.b
    fig.update_layout(legend={"y": 1 + 26 / drawn})
    return fig


def layers(fig: go.Figure, n_layers: int, row: int, col: int) -> None:
    """A plain layer axis: here layer 0 has gates like any other."""
    at = theme.ticks(n_layers, 12)
    fig.update_xaxes(title_text="layer", range=[-0.6, n_layers - 0.4], tickvals=at, row=row, col=col)


def spread(layers: Sequence[Any], most: int) -> list[int]:
    """At most ``most`` of the layers, evenly."""
    if len(layers) <= most:
        return [int(layer) for layer in layers]
    return [int(layers[i]) for i in np.unique(np.linspace(0, len(layers) - 1, most).astype(int))]


def _mlp(table: pd.DataFrame) -> pd.DataFrame:
    return table[table["kind"] == "mlp"]


def subtitle(info: Info, table: pd.DataFrame, column: str) -> str:
    """The model, how much text was read, and what the bands are."""
    interval = theme.has_interval(table[f"{column}_low"], table[f"{column}_high"])
    return theme.subtitle(info["n_tokens"], info["n_documents"], interval, named(info))


def named(info: Info) -> str:
    """The model, and what its folder says about its weights."""
    return f"{info['model']}: {info['weights']}" if info.get("weights") else str(info["model"])


FIGURES = {
    "carried_object": carried_object,
    "carried_resting": carried_resting,
    "carried_duty": carried_duty,
}
