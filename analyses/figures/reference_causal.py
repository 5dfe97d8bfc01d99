"""What changing the carried direction does: doses, replacements, noise, reach, and (reference_gate) the gate."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from analyses.figures import reference_gate
from satlens.plots import theme

Tables = Mapping[str, pd.DataFrame]
Info = Mapping[str, Any]

MOST_PANELS = 5
"""Layers drawn as panels of one figure; of more, this many are chosen, evenly spaced."""


def dose_response(tables: Tables, info: Info) -> go.Figure:
    """Release of gates and KL against the dose, at each edited layer, above the range of the matched controls."""
    table = tables["dose"]
    layers = panels(table["layer"])
    fig = _grid(2, layers, [f"layer {layer}" for layer in layers] + [""] * len(layers))
    plain = table[~table["norm_kept"] & (table["direction"] == "reference")]
    kept = table[table["norm_kept"] & (table["direction"] == "reference")]
    controls = table[~table["norm_kept"] & (table["direction"] == "matched")]
    for row, measure in enumerate(("release", "kl_far"), start=1):
        for col, layer in enumerate(layers, start=1):
            place, legend = {"row": row, "col": col}, row == col == 1
            part = controls[controls["layer"] == layer]
            if len(part):
                _range(
                    fig, part, "alpha", measure, f"{info['draws']} matched random directions", place, legend
                )
            for index, (name, lines) in enumerate((("m^", plain), ("m^, norm kept", kept))):
                part = lines[lines["layer"] == layer].sort_values("alpha")
                part = part[part["alpha"] != 1] if row == 2 else part
                if len(part):
                    _line(
                        fig,
                        part,
                        "alpha",
                        measure,
                        name,
                        index,
                        place,
                        legend,
                        dash="solid" if not index else "dot",
                    )
    fig.update_yaxes(title_text="share firing, changed − clean", row=1, col=1)
    theme.zero_line(fig, row=1)
    values = theme.floats(table.loc[table["alpha"] != 1, "kl_far"])
    for col in range(1, len(layers) + 1):
        theme.log_axis(fig, values, "KL, nats" if col == 1 else "", row=2, col=col)
        fig.update_yaxes(showticklabels=col == 1, row=2, col=col)
    fig.update_xaxes(tickvals=sorted(set(table["alpha"])))
    fig.update_xaxes(title_text="alpha (0 removes m^, 1 is clean)", row=2)
    return theme.style(
        fig,
        "Dose-response of the carried direction",
        _subtitle(info, table, "release"),
        "The stream's projection on m^ at one layer's input is multiplied by alpha, at far positions only. "
        "Top: share of (gate, position) pairs with a post-activation above 0.5 at that layer, minus the clean "
        "model's. Bottom: KL from the clean model's next-token distribution to the changed one's, mean over "
        "far positions, on a logarithmic axis; at alpha = 1 it is exactly 0 and not drawn. Grey: the range "
        "over random directions orthogonal to m^, moved by exactly the same length at every position, with "
        "their mean. Dotted: the same dose with every position rescaled to the length it had." + _chosen(table, layers),
        width=max(640, 140 + 250 * len(layers)),
        height=660,
    )  # fmt: skip


def replacement(tables: Tables, info: Info) -> go.Figure:
    """Release and KL when the projection is moved to another direction, against that direction's cosine with m^."""
    table = tables["replacement"]
    layers = sorted(set(table["layer"]))
    fig = make_subplots(1, 2, horizontal_spacing=0.11)
    kinds = [kind for kind in dict.fromkeys(table["replacement"]) if kind not in ("removed", "m^ itself")]
    for col, measure in enumerate(("release", "kl_far"), start=1):
        for at, layer in enumerate(layers):
            colour = theme.QUALITATIVE[at % len(theme.QUALITATIVE)]
            for kind, symbol in zip(kinds, theme.SYMBOLS, strict=False):
                part = table[(table["layer"] == layer) & (table["replacement"] == kind)]
                fig.add_trace(
                    go.Scatter(
                        x=theme.floats(part["cosine"]), y=theme.floats(part[measure]), mode="markers",
                        name=f"layer {layer}", showlegend=False, marker={"color": colour, "symbol": symbol, "size": 8},
                        text=[f"{kind} {source}" for source in part["source"]],
                        hovertemplate=f"layer {layer}<br>%{{text}}<br>cosine %{{x:.3f}}<br>%{{y:.4g}}<extra></extra>",
                    ),
                    row=1, col=col,
                )  # fmt: skip
            removed = table[
                (table["layer"] == layer) & (table["replacement"] == "removed") & ~table["norm_kept"]
            ]
            fig.add_hline(
                y=float(removed[measure].iloc[0]),
                line={"color": colour, "width": 1.2, "dash": "dot"},
                row=1,
                col=col,
            )
    for at, layer in enumerate(layers):
        _key(fig, f"layer {layer}", theme.QUALITATIVE[at % len(theme.QUALITATIVE)], "square")
    for kind, symbol in zip(kinds, theme.SYMBOLS, strict=False):
        _key(fig, kind, theme.MUTED, symbol)
    fig.update_xaxes(title_text="cosine of the replacement with m^")
    fig.update_yaxes(title_text="share firing, changed − clean", row=1, col=1)
    theme.zero_line(fig, row=1, col=1)
    known = table[table["replacement"] != "m^ itself"]
    theme.log_axis(fig, known["kl_far"], "KL, nats, mean over far positions", row=1, col=2)
    return theme.style(
        fig,
        "The direction, not the magnitude: m^ replaced by other directions",
        _subtitle(info, table, "release", interval=False),
        "The projection on m^ is taken out and put along another unit vector, with its size, sign and timing. "
        "Colour is the edited layer, symbol the kind of replacement. Dotted lines: the projection taken out "
        "and not put back. If the direction carries the function, points fall towards 0 (left) and down "
        "(right) as the cosine nears 1, and random directions lie at the dotted line.",
        width=1000,
        height=500,
    )  # fmt: skip


def noise(tables: Tables, info: Info) -> go.Figure:
    """KL against the length of noise along m^, along random directions, isotropic and shaped."""
    table = tables["noise"]
    layers = panels(table["layer"])
    fig = _grid(1, layers, [f"layer {layer}" for layer in layers])
    arms = [arm for arm in dict.fromkeys(table["arm"]) if arm != "removal"]
    for col, layer in enumerate(layers, start=1):
        place = {"row": 1, "col": col}
        for index, arm in enumerate(arms):
            part = table[(table["layer"] == layer) & (table["arm"] == arm)]
            mean = part.groupby("epsilon", as_index=False)[["kl_far"]].mean().sort_values("epsilon")
            _range(fig, part, "epsilon", "kl_far", arm, place, False, theme.QUALITATIVE[index], mean=False)
            _line(fig, mean, "epsilon", "kl_far", arm, index, place, col == 1)
        gone = table[(table["layer"] == layer) & (table["arm"] == "removal")]
        _line(fig, gone, "share", "kl_far", "removal, at its own length", len(arms), place, col == 1)
        theme.log_axis(fig, table["kl_far"], "KL, nats" if col == 1 else "", **place)
        fig.update_yaxes(showticklabels=col == 1, **place)
    ticks = sorted(set(table["epsilon"].dropna()))
    fig.update_xaxes(type="log", tickvals=ticks, ticktext=[f"{value:g}" for value in ticks])
    fig.update_xaxes(title_text="noise length / stream length")
    return theme.style(
        fig,
        "Noise along the carried direction and elsewhere",
        _subtitle(info, table, "kl_far", interval=False),
        "Noise of the same length, a share of the stream's, is added at every far position of one layer's "
        "input; it comes in opposite pairs, so that it hardly moves the mean. Lines are means over draws, "
        "bands their range; both axes are logarithmic. Shaped noise has the spread of the stream in each "
        "coordinate. The single point is the removal of m^, drawn at the mean share of the stream that it "
        "takes away." + _chosen(table, layers),
        width=max(640, 140 + 250 * len(layers)),
        height=440,
    )  # fmt: skip


def recovery(tables: Tables, info: Info) -> go.Figure:
    """Cosine of the stream with each layer's own m^ after a removal upstream."""
    table = tables["recovery"]
    fig = go.Figure()
    edited = sorted(set(table["edited_layer"]))
    first = table[(table["edited_layer"] == edited[0]) & (table["direction"] == "reference")]
    fig.add_trace(
        go.Scatter(
            x=first["layer"], y=first["cosine_clean"], mode="lines", name="clean",
            line={"color": theme.MUTED, "width": 5}, opacity=0.4,
            hovertemplate="clean<br>layer %{x}<br>%{y:.4g}<extra></extra>",
        )
    )  # fmt: skip
    for index, layer in enumerate(edited):
        part = table[(table["edited_layer"] == layer) & (table["direction"] == "reference")].sort_values(
            "layer"
        )
        low = part["cosine_clean"] + part["dip_low"]
        high = part["cosine_clean"] + part["dip_high"]
        theme.series(fig, part["layer"], part["cosine"], low, high, f"removed at layer {layer}", index)
    theme.layer_axis(
        fig, int(table["layer"].max()) + 1, "layer whose input is read (the last: what leaves the model)"
    )
    fig.update_xaxes(ticktext=[str(value) for value in theme.ticks(int(table["layer"].max()) + 1)])
    fig.update_yaxes(title_text="cosine of stream and m^, mean")
    theme.zero_line(fig)
    return theme.style(
        fig,
        "Does the stream find back to the carried direction?",
        _subtitle(info, table, "dip"),
        "m^ is removed at one layer's input, at far positions; each curve shows the mean cosine of the stream "
        "with the reading layer's own m^ from there on, grey the clean model's. A curve that returns to grey "
        "has been resupplied by the layers in between. Bands are intervals of the difference from clean.",
        width=860,
        height=460,
    )  # fmt: skip


def co_removal(tables: Tables, info: Info) -> go.Figure:
    """KL and NLL of removal at several layers at once, beside the range of the controls."""
    table = tables["co_removal"]
    sets = list(dict.fromkeys(table["layer_set"]))
    fig = make_subplots(1, 2, horizontal_spacing=0.06, shared_yaxes=True)
    for col, measure in enumerate(("kl_far", "delta_nll"), start=1):
        for at, name in enumerate(sets):
            part = table[table["layer_set"] == name]
            moved = part[part["direction"] == "matched"]
            fig.add_trace(
                go.Scatter(
                    x=moved[measure], y=[at - 0.14] * len(moved), mode="markers",
                    name=f"{info['draws']} matched controls",
                    marker={"color": theme.MUTED, "symbol": "line-ns-open", "size": 11}, showlegend=col == 1 and not at,
                    legendgroup="controls", hovertemplate=f"control, {name}<br>%{{x:.4g}}<extra></extra>",
                ),
                row=1, col=col,
            )  # fmt: skip
            gone = part[part["direction"] == "reference"]
            fig.add_trace(
                go.Scatter(
                    x=gone[measure], y=[at + 0.1], mode="markers", name="m^ removed", legendgroup="m",
                    error_x={"type": "data", "symmetric": False, "thickness": 1.4, "width": 4,
                             "array": gone[f"{measure}_high"] - gone[measure],
                             "arrayminus": gone[measure] - gone[f"{measure}_low"]},
                    marker={"color": theme.QUALITATIVE[0], "size": 10}, showlegend=col == 1 and not at,
                    text=theme.interval_texts(gone[f"{measure}_low"], gone[f"{measure}_high"]),
                    hovertemplate=f"m^ removed, {name}<br>%{{x:.4g}} %{{text}}<extra></extra>",
                ),
                row=1, col=col,
            )  # fmt: skip
    fig.update_xaxes(title_text="KL, nats, mean over far positions", rangemode="tozero", row=1, col=1)
    fig.update_xaxes(
        title_text="NLL, changed − clean, nats", zeroline=True, zerolinecolor=theme.INK, row=1, col=2
    )
    fig.update_yaxes(tickvals=list(range(len(sets))), ticktext=sets, range=[len(sets) - 0.4, -0.6])
    return theme.style(
        fig,
        "The carried direction removed at many layers at once",
        _subtitle(info, table, "kl_far"),
        "m^ of each layer of a set is removed at that layer's input. Grey ticks: the same lengths taken along random "
        "directions, one draw a tick. Sets are named by their first layer and step.",
        width=980,
        height=260 + 60 * len(sets),
    )  # fmt: skip


def panels(layers: Any) -> list[int]:
    """The layers drawn as panels: all, or ``MOST_PANELS`` evenly spaced."""
    known = sorted({int(layer) for layer in layers})
    if len(known) <= MOST_PANELS:
        return known
    return [known[round(at)] for at in np.linspace(0, len(known) - 1, MOST_PANELS)]


def _grid(rows: int, layers: Sequence[int], titles: Sequence[str]) -> go.Figure:
    return make_subplots(
        rows, len(layers), shared_xaxes="all", shared_yaxes="rows", horizontal_spacing=0.02, vertical_spacing=0.07,
        subplot_titles=titles,
    )  # fmt: skip


def _range(
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


def _line(
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


def _key(fig: go.Figure, name: str, colour: str, symbol: str) -> None:
    """An entry of the legend without a point."""
    fig.add_trace(
        go.Scatter(
            x=[None], y=[None], mode="markers", name=name, marker={"color": colour, "symbol": symbol, "size": 8}
        ),
        row=1, col=1,
    )  # fmt: skip


def _chosen(table: pd.DataFrame, layers: Sequence[int]) -> str:
    total = table["layer"].nunique()
    return (
        ""
        if total == len(layers)
        else f" {len(layers)} of {total} edited layers are drawn; the table has all."
    )


def _subtitle(info: Info, table: pd.DataFrame, measure: str, interval: bool = True) -> str:
    known = theme.has_interval(table[f"{measure}_low"], table[f"{measure}_high"]) if interval else None
    words = "m^ fitted on the same documents" if info["same_documents"] else "m^ fitted on other documents"
    return theme.subtitle(info["n_tokens"], info["n_documents"], known, info["model"], words)


FIGURES = {
    "dose_response": dose_response,
    "replacement": replacement,
    "noise": noise,
    "recovery": recovery,
    "co_removal": co_removal,
    **reference_gate.FIGURES,
}
NEEDS = {
    "dose_response": {"dose"},
    "replacement": {"replacement"},
    "noise": {"noise"},
    "recovery": {"recovery"},
    "co_removal": {"co_removal"},
    **reference_gate.NEEDS,
}
"""Tables that a figure is drawn from: it is drawn when all were made."""
