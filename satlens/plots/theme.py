"""What every figure has in common: template, colours, subtitle, intervals and the greyed layer 0.

Magnitudes get one blue hue, differences a blue-white-red scale centred on 0, categories Okabe-Ito colours;
all three stay apart in the common colour-vision deficiencies.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go

INK = "#1f2430"
MUTED = "#5c6370"
GRID = "#e3e6eb"
GREYED = "#e9eaec"
SEQUENTIAL = [[0.0, "#f3f7fc"], [0.25, "#b9d3ea"], [0.5, "#6ba3d0"], [0.75, "#2a6faf"], [1.0, "#08306b"]]
DIVERGING = [[0.0, "#1b5a9c"], [0.25, "#86b6d9"], [0.5, "#f7f7f7"], [0.75, "#eb9a78"], [1.0, "#a32035"]]
QUALITATIVE = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000"]
SYMBOLS = ["circle", "square", "diamond", "triangle-up", "cross", "x", "star"]
FONT = "'Helvetica Neue', Helvetica, Arial, 'Liberation Sans', sans-serif"
NO_INTERVAL = "no interval: fewer than two documents"


def template() -> go.layout.Template:
    """The "satlens" template: white paper, dark ink, thin grid, margins wide enough for two-line titles."""
    axis = {
        "gridcolor": GRID,
        "linecolor": "#9aa0ab",
        "zeroline": False,
        "showline": True,
        "ticks": "outside",
        "ticklen": 4,
        "tickcolor": "#9aa0ab",
        "title": {"font": {"size": 13}, "standoff": 8},
        "automargin": True,
    }
    layout = go.Layout(
        font={"family": FONT, "size": 12, "color": INK},
        paper_bgcolor="#ffffff",
        plot_bgcolor="#ffffff",
        colorway=QUALITATIVE,
        colorscale={"sequential": SEQUENTIAL, "diverging": DIVERGING},
        title={
            "x": 0.0,
            "xref": "container",
            "xanchor": "left",
            "y": 1.0,
            "yref": "container",
            "yanchor": "top",
            "pad": {"l": 16, "t": 14},
            "font": {"size": 17},
            "subtitle": {"font": {"size": 12, "color": MUTED}},
        },
        margin={"l": 72, "r": 36, "t": 108, "b": 64},
        xaxis=axis,
        yaxis=axis,
        legend={
            "orientation": "h",
            "x": 0.0,
            "xanchor": "left",
            "y": 1.02,
            "yanchor": "bottom",
            "bgcolor": "rgba(0,0,0,0)",
        },
        hoverlabel={"bgcolor": "#ffffff", "font": {"family": FONT, "color": INK}},
        hovermode="closest",
    )
    return go.layout.Template(layout=layout)


def style(
    fig: go.Figure, title: str, subtitle: str, caption: str, width: int = 860, height: int = 480
) -> go.Figure:
    """Give a figure its template, size, title and caption; the caption rides in `layout.meta["caption"]`.

    Traces get fixed ids, so that the same tables always give the same bytes.
    """
    named = sum(1 for trace in fig.data if trace.name and trace.showlegend is not False) > 1
    legend = named or any(trace.showlegend for trace in fig.data)
    fig.update_layout(
        template=template(),
        margin={"t": 108 if legend else 96},
        showlegend=legend,
        title={"text": title, "subtitle": {"text": subtitle}},
        meta={"caption": caption},
        width=width,
        height=height,
    )
    for number, trace in enumerate(fig.data):
        trace.uid = f"t{number}"
    return fig


def subtitle(n_tokens: int | None, n_documents: int | None, interval: bool | None, *extra: str) -> str:
    """How much text stands behind a figure and what its bands are; `interval=None` where none belongs."""
    parts = list(extra)
    if n_tokens is not None and n_documents is not None:
        parts.append(f"{n_tokens:,} tokens in {n_documents:,} document{'' if n_documents == 1 else 's'}")
    elif n_tokens is not None:
        parts.append(f"{n_tokens:,} tokens")
    if interval is not None:
        parts.append("95 % bootstrap interval over documents" if interval else NO_INTERVAL)
    return " · ".join(parts)


def has_interval(low: Any, high: Any) -> bool:
    """Whether any row has both ends."""
    return bool((np.isfinite(floats(low)) & np.isfinite(floats(high))).any())


def floats(values: Any) -> np.ndarray[Any, np.dtype[np.float64]]:
    """A table column as float64, nulls as NaN."""
    if hasattr(values, "to_numpy"):
        return np.asarray(values.to_numpy(dtype="float64", na_value=np.nan))
    return np.array([np.nan if value is None else value for value in values], dtype=np.float64)


def series(
    fig: go.Figure,
    x: Any,
    y: Any,
    low: Any,
    high: Any,
    name: str,
    index: int = 0,
    *,
    bars: bool = False,
    offset: float = 0.0,
    line: bool = True,
    unit: str = "",
    place: Mapping[str, int] | None = None,
    showlegend: bool = True,
) -> None:
    """Add one curve with its interval, as a band or as error bars; without an interval, the curve alone.

    `index` picks colour and symbol together, so that curves can be told apart without colour. `offset` moves
    points sideways where several share a layer; the hover text still shows the true layer.
    """
    place = dict(place or {})
    layers, values, bottom, top = floats(x), floats(y), floats(low), floats(high)
    colour = QUALITATIVE[index % len(QUALITATIVE)]
    known = np.isfinite(bottom) & np.isfinite(top)
    if known.any() and not bars:
        band = go.Scatter(
            x=np.concatenate([layers[known], layers[known][::-1]]),
            y=np.concatenate([top[known], bottom[known][::-1]]),
            fill="toself",
            fillcolor=rgba(colour, 0.18),
            mode="lines",
            line={"width": 0},
            hoverinfo="skip",
            showlegend=False,
            legendgroup=name,
        )
        fig.add_trace(band, **place)
    errors = None
    if known.any() and bars:
        errors = {
            "type": "data",
            "symmetric": False,
            "array": top - values,
            "arrayminus": values - bottom,
            "color": colour,
            "thickness": 1.4,
            "width": 3,
        }
    fig.add_trace(
        go.Scatter(
            x=layers + offset,
            y=values,
            error_y=errors,
            name=name,
            legendgroup=name,
            showlegend=showlegend,
            mode="lines+markers" if line else "markers",
            line={"color": colour, "width": 1.2 if bars else 2},
            marker={"color": colour, "symbol": SYMBOLS[index % len(SYMBOLS)], "size": 7},
            text=interval_texts(bottom, top),
            customdata=layers,
            hovertemplate=f"{name}<br>layer %{{customdata:d}}<br>%{{y:.4g}}{unit} %{{text}}<extra></extra>",
        ),
        **place,
    )


def interval_texts(low: Any, high: Any) -> list[str]:
    """ "[low, high]" of each row for hover texts, empty where there is none."""
    pairs = zip(floats(low), floats(high), strict=True)
    return [f"[{a:.4g}, {b:.4g}]" if np.isfinite(a) and np.isfinite(b) else "" for a, b in pairs]


def layer_axis(fig: go.Figure, n_layers: int, title: str = "layer", most: int = 24, **place: Any) -> None:
    """An x axis of layers 0..n-1 with integer ticks that do not crowd; layer 0 is named after V1."""
    values = ticks(n_layers, most)
    words = ["0<br>(V1)", *[str(value) for value in values[1:]]]
    fig.update_xaxes(
        title_text=title,
        range=[-0.6, n_layers - 0.4],
        tickmode="array",
        tickvals=values,
        ticktext=words,
        **place,
    )


def matrix_axes(fig: go.Figure, n_layers: int, n_heads: int) -> None:
    """Integer axes of a layer by KV-head heatmap; layers grow upwards, as the residual stream does."""
    fig.update_xaxes(
        title_text="KV head",
        tickvals=ticks(n_heads),
        range=[-0.5, n_heads - 0.5],
        showgrid=False,
        showline=False,
    )
    fig.update_yaxes(
        title_text="layer",
        tickvals=ticks(n_layers, 48),
        range=[-0.5, n_layers - 0.5],
        showgrid=False,
        showline=False,
    )


def side_label(fig: go.Figure, text: str, above: bool) -> None:
    """Say at the right edge which side of 0 means what."""
    fig.add_annotation(
        x=1,
        xref="x domain",
        xanchor="right",
        y=1 if above else 0,
        yref="y domain",
        yanchor="top" if above else "bottom",
        text=("▲ " if above else "▼ ") + text,
        showarrow=False,
        font={"color": MUTED, "size": 11},
    )


def log_axis(
    fig: go.Figure, values: Any, title: str, percent: bool = False, horizontal: bool = False, **place: Any
) -> None:
    """A logarithmic y axis (x if ``horizontal``) whose ticks are whole labels (1, 2, 5, 10 ... or powers of ten)."""
    positive = floats(values)
    positive = positive[np.isfinite(positive) & (positive > 0)]
    low, high = (positive.min(), positive.max()) if positive.size else (0.1, 1.0)
    decades = range(int(np.floor(np.log10(low))), int(np.ceil(np.log10(high))) + 1)
    steps = (1, 2, 5) if len(decades) < 6 and not percent else (1,)
    at = [step * 10.0**decade for decade in decades for step in steps]
    words = [f"{100 * value:.10g} %" if percent else f"{value:,.10g}" for value in at]
    pad = 0.06 * max(np.log10(high / low), 0.2)
    ends = [decades[0], 0.1] if percent else [np.log10(low) - pad, np.log10(high) + pad]
    update = fig.update_xaxes if horizontal else fig.update_yaxes
    update(type="log", title_text=title, tickvals=at, ticktext=words, range=ends, **place)


def ticks(n: int, most: int = 24) -> list[int]:
    """Every index below `n`, or every 2nd, 3rd, ... when there are too many to read."""
    return list(range(0, n, max(1, -(-n // most))))


def grey_layer_zero(fig: go.Figure, label: str = "layer 0<br>produces V1", horizontal: bool = False) -> None:
    """Shade layer 0, which has no gate because its values are V1; `horizontal` when layers are rows."""
    add = fig.add_hrect if horizontal else fig.add_vrect
    ends = {"y0": -0.5, "y1": 0.5} if horizontal else {"x0": -0.5, "x1": 0.5}
    add(**ends, fillcolor=GREYED, line_width=0, layer="below")
    if not label:
        return
    if horizontal:
        fig.add_annotation(
            x=0.5, xref="x domain", y=0, text=label, showarrow=False, font={"color": MUTED, "size": 11}
        )
    else:
        fig.add_annotation(
            x=0,
            y=0.98,
            yref="y domain",
            text=label,
            textangle=-90,
            yanchor="top",
            showarrow=False,
            font={"color": MUTED, "size": 10},
        )


def zero_line(fig: go.Figure, **place: Any) -> None:
    """The line of no change, always in view."""
    fig.update_yaxes(zeroline=True, zerolinecolor=INK, zerolinewidth=1.2, rangemode="tozero", **place)


def heatmap(
    values: np.ndarray[Any, np.dtype[np.float64]],
    unit: str,
    diverging: bool = False,
    text: Sequence[Sequence[str]] | None = None,
) -> go.Heatmap:
    """Layers as rows, KV heads as columns; missing cells (layer 0) stay empty."""
    finite = values[np.isfinite(values)]
    most = float(np.abs(finite).max()) if finite.size and np.abs(finite).max() > 0 else 1.0
    low, high = (-most, most) if diverging else (0.0, most)
    return go.Heatmap(
        z=values,
        x=list(range(values.shape[1])),
        y=list(range(values.shape[0])),
        zmin=low,
        zmax=high,
        colorscale=DIVERGING if diverging else SEQUENTIAL,
        xgap=1,
        ygap=1,
        text=text,
        hoverongaps=False,
        colorbar={"title": {"text": unit, "side": "right"}, "thickness": 14, "outlinewidth": 0},
        hovertemplate="layer %{y}, KV head %{x}<br>%{z:.4g} %{text}<extra></extra>",
    )


def rgba(colour: str, opacity: float) -> str:
    """A hex colour seen through: for bands."""
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({red},{green},{blue},{opacity})"
