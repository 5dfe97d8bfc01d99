"""Where, how strongly and how selectively does the gate let V1 in (paper Figures 3 and 8)."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from satlens.plots import theme

Tables = Mapping[str, pd.DataFrame]
Info = Mapping[str, Any]


def fig3_heatmap(tables: Tables, info: Info) -> go.Figure:
    """Mean alpha per layer and KV head (paper Figure 3)."""
    table = _gated(tables["gate_heatmap"])
    n_layers, n_heads = int(table["layer"].max()) + 1, int(table["kv_head"].max()) + 1
    values = np.full((n_layers, n_heads), np.nan)
    text = np.full((n_layers, n_heads), "", dtype=object)
    layer, head = table["layer"].to_numpy(int), table["kv_head"].to_numpy(int)
    values[layer, head] = theme.floats(table["mean"])
    text[layer, head] = theme.interval_texts(table["low"], table["high"])
    signed = bool((values[np.isfinite(values)] < 0).any())
    fig = go.Figure(theme.heatmap(values, "mean alpha", diverging=signed, text=text.tolist()))
    theme.matrix_axes(fig, n_layers, n_heads)
    theme.grey_layer_zero(fig, "layer 0 has no gate: it produces V1", horizontal=True)
    return theme.style(
        fig,
        "Mean gate value by layer and KV head",
        _subtitle(info, table),
        "Each cell is the mean of the gate alpha over all counted positions for one layer and one KV head: "
        "how much of layer 0's values V1 that head adds to its own values. Alpha is unitless: 1 adds V1 "
        "once. Hover over a cell for its interval. Row 0 is grey because layer 0 produces V1 and has no "
        "gate.",
        width=max(660, min(1100, 260 + 46 * n_heads)),
        height=max(420, 210 + 30 * n_layers),
    )


def fig8_profile(tables: Tables, info: Info) -> go.Figure:
    """Mean alpha, fraction of exact zeros and CV across heads, by layer (paper Figure 8).

    Only a ReLU gate can be exactly 0, so for the other gates the middle panel is left out; heads of a static gate
    (ResFormer's lambda_1) are all alike, so it has the first panel only.
    """
    table = _gated(tables["gate_profile"]).sort_values("layer")
    n_layers = int(table["layer"].max()) + 1
    static = info.get("gate") == "static"
    panels = [("" if static else "mean alpha", "mean", "low", "high")]
    if _has_zeros(info, table):
        panels.append(("fraction of gates exactly 0", "zero_fraction", "zero_low", "zero_high"))
    if not static:
        panels.append(("CV across KV heads", "cv", "cv_low", "cv_high"))
    fig = make_subplots(
        cols=len(panels), horizontal_spacing=0.09, subplot_titles=[panel[0] for panel in panels]
    )
    for column, (title, value, low, high) in enumerate(panels, start=1):
        place = {"row": 1, "col": column}
        theme.series(
            fig, table["layer"], table[value], table[low], table[high], title, place=place,
            showlegend=False,
        )  # fmt: skip
        theme.layer_axis(fig, n_layers, most=12, **place)
    fig.update_yaxes(rangemode="tozero")
    fig.update_yaxes(title_text="lambda_1 (unitless)" if static else "alpha (unitless)", row=1, col=1)
    if len(panels) == 3:
        fig.update_yaxes(
            title_text="share of (position, head) pairs",
            range=[0, 1.02],
            tickvals=[0, 0.25, 0.5, 0.75, 1],
            ticktext=["0 %", "25 %", "50 %", "75 %", "100 %"],
            row=1,
            col=2,
        )
    if not static:
        fig.update_yaxes(title_text="std / mean of head means", row=1, col=len(panels))
    fig.update_annotations(font_size=13)
    theme.grey_layer_zero(fig, label="")
    if static:
        return theme.style(
            fig,
            "Learned coefficient of V1 by layer",
            _subtitle(info, table),
            "The gate is lambda_1, one learned constant a layer, the same for every token and head: how much of layer "
            "0's values V1 a layer adds. Layer 0, shaded, produces V1 and has no gate.",
            width=660,
            height=430,
        )
    zeros = "The middle panel is the share of (position, head) pairs whose gate is exactly 0. "
    return theme.style(
        fig,
        "Gate profile by layer",
        _subtitle(info, table),
        "Left: the mean of alpha over positions and KV heads. "
        + (zeros if len(panels) == 3 else "")
        + "Right: the coefficient of variation across heads, that is the population standard deviation of "
        "the per-head means divided by their mean; 0 means that all heads use V1 alike. Layer 0, shaded, "
        "produces V1 and has no gate.",
        width=1040 if len(panels) == 3 else 760,
        height=430,
    )


def distribution(tables: Tables, info: Info) -> go.Figure:
    """How gate values are spread within each layer: share of pairs per bin, zeros stated apart."""
    table = _gated(tables["gate_histogram"])
    layers = sorted(int(layer) for layer in table["layer"].unique())
    shares = {layer: _layer_shares(table[table["layer"] == layer]) for layer in layers}
    columns = min(4, len(layers))
    rows = -(-len(layers) // columns)
    state_zeros = _has_zeros(info, None) and any(zero for zero, _, _ in shares.values())
    titles = [
        f"layer {n} · {100 * shares[n][0]:.1f} % exactly 0" if state_zeros else f"layer {n}" for n in layers
    ]
    fig = make_subplots(
        rows, columns, shared_xaxes="all", shared_yaxes="all", subplot_titles=titles,
        horizontal_spacing=0.03, vertical_spacing=0.36 / (rows + 1),
    )  # fmt: skip
    for number, layer in enumerate(layers):
        _, edges, share = shares[layer]
        place = {"row": number // columns + 1, "col": number % columns + 1}
        fig.add_trace(_outline(layer, edges, share), **place)
    theme.log_axis(fig, np.concatenate([share for _, _, share in shares.values()]), "", percent=True)
    if all(_geometric(edges) for _, edges, _ in shares.values()):
        fig.update_xaxes(type="log", dtick=1)
    fig.update_yaxes(title_text="share per bin", col=1)
    for number in range(max(0, len(layers) - columns), len(layers)):
        fig.update_xaxes(
            title_text="alpha", showticklabels=True, row=number // columns + 1, col=number % columns + 1
        )
    fig.update_annotations(font_size=12)
    return theme.style(
        fig,
        "Distribution of gate values within each layer",
        _subtitle(info, None),
        "One panel per layer. Bars give the share of all (position, KV head) pairs of the layer that fall "
        "into a bin of alpha, on a logarithmic axis"
        + (
            "; pairs whose gate is exactly 0 are not drawn, their share stands above the panel."
            if state_zeros
            else "."
        )
        + " All panels share both axes.",
        width=1000,
        height=180 + 165 * rows,
    )


def _layer_shares(table: pd.DataFrame) -> tuple[float, np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Share of exact zeros, bin edges `[bin, 2]` and share per bin, heads added up."""
    total = float(table["count"].sum())
    bins = table.groupby(["bin_low", "bin_high"], as_index=False)["count"].sum().sort_values("bin_low")
    zero = (bins["bin_low"] == 0) & (bins["bin_high"] == 0)
    rest = bins[~zero]
    edges = rest[["bin_low", "bin_high"]].to_numpy(float)
    if len(edges) and not np.isfinite(edges[-1, 1]):
        edges[-1, 1] = 2 * edges[-1, 0] - edges[-2, 0] if len(edges) > 1 else edges[-1, 0] + 1
    count = rest["count"].to_numpy(float)
    return float(bins.loc[zero, "count"].sum()) / max(total, 1.0), edges, count / max(total, 1.0)


def _outline(layer: int, edges: np.ndarray[Any, Any], share: np.ndarray[Any, Any]) -> go.Bar:
    """Bars as wide as their bins; a first bin that begins at 0 has no left end on a log axis and gets one."""
    left = edges[:, 0].copy()
    if _geometric(edges) and left[0] <= 0:
        left[0] = edges[0, 1] * edges[1, 0] / edges[1, 1]
    return go.Bar(
        x=left,
        y=np.where(share > 0, share, np.nan),
        width=edges[:, 1] - left,
        offset=0,
        marker={"color": theme.QUALITATIVE[0], "line": {"width": 0}},
        showlegend=False,
        customdata=edges,
        hovertemplate=f"layer {layer}<br>alpha %{{customdata[0]:.3g}} to %{{customdata[1]:.3g}}<br>"
        "%{y:.2%} of pairs<extra></extra>",
    )


def _geometric(edges: np.ndarray[Any, Any]) -> bool:
    positive = edges[edges[:, 0] > 0]
    widths = positive[:, 1] - positive[:, 0]
    return len(widths) > 2 and len(positive) >= len(edges) - 1 and widths.max() > 3 * widths.min()


def _gated(table: pd.DataFrame) -> pd.DataFrame:
    """Layer 0 has no gate, whether a table leaves it out or gives it nulls."""
    return table[table["layer"] > 0]


def _has_zeros(info: Info, table: pd.DataFrame | None) -> bool:
    if info.get("gate", "relu") != "relu":
        return False
    return table is None or bool(table["zero_fraction"].notna().any())


def _subtitle(info: Info, table: pd.DataFrame | None) -> str:
    words = f"{info['model']}, {info.get('gate', 'relu')} gate"
    if table is None:
        return theme.subtitle(info.get("n_tokens"), info.get("n_documents"), None, words)
    interval = theme.has_interval(table["low"], table["high"])
    return theme.subtitle(info.get("n_tokens"), info.get("n_documents"), interval, words)


FIGURES = {"fig3_heatmap": fig3_heatmap, "fig8_profile": fig8_profile, "distribution": distribution}
