"""What does the model lose when the gate is changed: by layer, by head, by structure, and cumulatively.

Every figure shows differences from the unchanged model on the same tokens, so 0 means that nothing was lost.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from satlens.plots import theme

Tables = Mapping[str, pd.DataFrame]
Info = Mapping[str, Any]

CONDITIONS = ["zero", "mean", "head-mean", "resample"]
"""From the bluntest replacement of the gate to the one that keeps most of it."""


def fig4_layers(tables: Tables, info: Info) -> go.Figure:
    """Change of perplexity per ablated layer, for zero and mean (paper Figure 4)."""
    table = _scope(tables, "layer")
    return _by_layer(
        tables,
        info,
        table[table["condition"].isin(["zero", "mean"])],
        "delta_ppl",
        "Change of perplexity when one layer's gate is replaced",
        "perplexity, ablated minus unchanged",
        "One layer's gate at a time is set to 0, so that the layer gets no V1, or to one constant: its "
        "mean over positions and heads, taken on calibration documents that are not scored here. Above 0 "
        "the model predicts worse without the gate; an interval that includes 0 is no evidence of a "
        "change.",
    )


def ladder(tables: Tables, info: Info) -> go.Figure:
    """All replacements side by side, from no V1 at all to the head's own values at the wrong places."""
    return _by_layer(
        tables,
        info,
        _scope(tables, "layer"),
        "delta_nll",
        "Replacing one layer's gate by less and less blunt values",
        "NLL, ablated minus unchanged (nats per token)",
        "Read each layer from left to right. zero: no V1. mean: one constant for the layer, so zero minus "
        "mean is what a fixed amount of V1 is worth. head-mean: one constant per head, so mean minus "
        "head-mean is what unequal heads are worth. resample: values drawn from the head's own "
        "distribution on calibration documents, so head-mean minus resample is what the right spread of "
        "values is worth at random places (below 0 when randomness hurts). What is left from resample down "
        "to 0 is what choosing by token is worth.",
    )


def heads(tables: Tables, info: Info) -> go.Figure:
    """Change of NLL when one head's gate is zeroed; cells whose interval includes 0 are marked."""
    table = _scope(tables, "head")
    table = table[table["condition"] == _main_condition(table)]
    n_layers, n_heads = int(table["layer"].max()) + 1, int(table["kv_head"].max()) + 1
    layer, head = table["layer"].to_numpy(int), table["kv_head"].to_numpy(int)
    values = np.full((n_layers, n_heads), np.nan)
    text = np.full((n_layers, n_heads), "", dtype=object)
    low, high = theme.floats(table["delta_nll_low"]), theme.floats(table["delta_nll_high"])
    values[layer, head] = theme.floats(table["delta_nll"])
    text[layer, head] = theme.interval_texts(low, high)
    fig = go.Figure(theme.heatmap(values, "delta NLL (nats per token)", diverging=True, text=text.tolist()))
    unsure = (low <= 0) & (high >= 0)
    if unsure.any():
        fig.add_trace(
            go.Scatter(
                x=head[unsure],
                y=layer[unsure],
                mode="markers",
                name="interval includes 0",
                showlegend=True,
                marker={"symbol": "x-thin", "size": 7, "line": {"color": theme.MUTED, "width": 1.2}},
                hoverinfo="skip",
            )
        )
    theme.matrix_axes(fig, n_layers, n_heads)
    theme.grey_layer_zero(fig, "layer 0 has no gate: it produces V1", horizontal=True)
    return theme.style(
        fig,
        "Change of NLL when a single head's gate is zeroed",
        _subtitle(tables, info, theme.has_interval(low, high)),
        "Each cell zeroes the gate of one KV head in one layer and leaves all others alone. Red: the model "
        "predicts worse without it; blue: better. White is no change. A cross marks cells whose interval "
        "includes 0.",
        width=max(800, min(1100, 280 + 46 * n_heads)),
        height=max(440, 230 + 30 * n_layers),
    )


def cumulative(tables: Tables, info: Info) -> go.Figure:
    """Change of NLL when all layers from n upwards, or all up to n, are ablated together."""
    table = tables["ablation"][tables["ablation"]["scope"].isin(["upward", "downward"])]
    condition = _main_condition(table)
    table = table[table["condition"] == condition].sort_values("layer")
    n_layers = int(table["layer"].max()) + 1
    fig = go.Figure()
    names = {"upward": f"layers n to {n_layers - 1}", "downward": "layers 1 to n"}
    for index, (scope, name) in enumerate(names.items()):
        rows = table[table["scope"] == scope]
        theme.series(
            fig, rows["layer"], rows["delta_nll"], rows["delta_nll_low"], rows["delta_nll_high"], name, index,
            unit=" nats",
        )  # fmt: skip
    theme.zero_line(fig)
    theme.layer_axis(fig, n_layers, "layer n")
    fig.update_yaxes(title_text="NLL, ablated minus unchanged (nats per token)")
    theme.grey_layer_zero(fig)
    return theme.style(
        fig,
        f"Change of NLL when the gates of many layers are replaced ({condition})",
        _subtitle(tables, info, theme.has_interval(table["delta_nll_low"], table["delta_nll_high"])),
        f"One curve ablates every layer from n to {n_layers - 1}, the other every layer from 1 to n. At "
        "both ends the curves name the same thing: all gates (upward at 1, downward at the last layer), or "
        "a single layer. Where a curve is steep, the layer that was added matters given the others.",
    )


def _by_layer(
    tables: Tables, info: Info, table: pd.DataFrame, value: str, title: str, axis: str, caption: str
) -> go.Figure:
    n_layers = int(table["layer"].max()) + 1
    present = [condition for condition in CONDITIONS if (table["condition"] == condition).any()]
    fig = go.Figure()
    for number, condition in enumerate(present):
        rows = table[table["condition"] == condition].sort_values("layer")
        theme.series(
            fig, rows["layer"], rows[value], rows[f"{value}_low"], rows[f"{value}_high"], condition,
            CONDITIONS.index(condition), bars=True, line=False,
            offset=0.17 * (number - (len(present) - 1) / 2), unit=" nats" if value == "delta_nll" else "",
        )  # fmt: skip
    theme.zero_line(fig)
    theme.layer_axis(fig, n_layers, "ablated layer")
    fig.update_yaxes(title_text=axis)
    theme.grey_layer_zero(fig)
    interval = theme.has_interval(table[f"{value}_low"], table[f"{value}_high"])
    return theme.style(
        fig, title, _subtitle(tables, info, interval), caption, width=max(860, 120 + 46 * n_layers)
    )


def _scope(tables: Tables, scope: str) -> pd.DataFrame:
    table = tables["ablation"]
    return table[table["scope"] == scope]


def _main_condition(table: pd.DataFrame) -> str:
    """Zero where it was measured, else the first condition there is."""
    return next(condition for condition in CONDITIONS if (table["condition"] == condition).any())


def _subtitle(tables: Tables, info: Info, interval: bool) -> str:
    clean = tables["baseline"].iloc[0]
    ends = theme.interval_texts([clean["low"]], [clean["high"]])[0]
    words = f"{info['model']}, unchanged PPL {clean['perplexity']:.4g} {ends}".rstrip()
    return theme.subtitle(int(clean["n_tokens"]), int(clean["n_documents"]), interval, words)


FIGURES = {"fig4_layers": fig4_layers, "ladder": ladder, "heads": heads, "cumulative": cumulative}
