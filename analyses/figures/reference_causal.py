"""What changing the carried direction does: doses, replacements and noise; further figures stand beside."""

import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from analyses.figures import reference_gate, reference_reach
from analyses.figures.reference_parts import (
    Info,
    Tables,
    chosen_words,
    curve,
    layer_grid,
    legend_key,
    panels,
    range_over_draws,
    titled_panels,
    words_below,
)
from satlens.plots import theme

ARMS = {
    "reference": "along m^",
    "random": "along a random direction",
    "isotropic": "in all directions",
    "shaped": "in all, shaped as the stream",
}
"""Noise arms and what the figure calls them."""


def dose_response(tables: Tables, info: Info) -> go.Figure:
    """Release of gates and KL against the dose, at each edited layer, above the range of the matched controls."""
    table = tables["dose"]
    layers = panels(table["layer"])
    fig = layer_grid(2, layers)
    plain = table[~table["norm_kept"] & (table["direction"] == "reference")]
    # at alpha = 1 there is nothing to keep the norm of, so that setting is run once
    kept = pd.concat(
        [table[table["norm_kept"] & (table["direction"] == "reference")], plain[plain["alpha"] == 1]]
    )
    controls = table[~table["norm_kept"] & (table["direction"] == "matched")]
    for row, measure in enumerate(("release", "kl_far"), start=1):
        for col, layer in enumerate(layers, start=1):
            place, legend = {"row": row, "col": col}, row == col == 1
            part = controls[controls["layer"] == layer]
            if len(part):
                range_over_draws(
                    fig, part, "alpha", measure, f"{info['draws']} matched random directions", place, legend
                )
            for index, (name, lines) in enumerate((("m^", plain), ("m^, norm kept", kept))):
                part = lines[lines["layer"] == layer].sort_values("alpha")
                part = part[part["alpha"] != 1] if row == 2 else part
                if len(part):
                    dash = "dot" if index else "solid"
                    curve(fig, part, "alpha", measure, name, index, place, legend, dash)
    fig.update_yaxes(title_text="share firing, changed − clean", row=1, col=1)
    theme.zero_line(fig, row=1)
    values = theme.floats(table.loc[table["alpha"] != 1, "kl_far"])
    for col in range(1, len(layers) + 1):
        theme.log_axis(fig, values, "KL, nats" if col == 1 else "", row=2, col=col)
        fig.update_yaxes(showticklabels=col == 1, row=2, col=col)
    fig.update_xaxes(tickvals=sorted(set(table["alpha"])))
    fig.update_xaxes(title_text="alpha (0 removes m^, 1 is clean)", row=2)
    fig = theme.style(
        fig,
        "Dose-response of the carried direction",
        words_below(info, table, "release"),
        "The stream's projection on m^ at one layer's input is multiplied by alpha, at far positions only. "
        "Top: share of (gate, position) pairs with a post-activation above 0.5 at that layer, minus the clean "
        "model's. Bottom: KL from the clean model's next-token distribution to the changed one's, mean over "
        "far positions, on a logarithmic axis; at alpha = 1 it is exactly 0 and not drawn. Grey: the range "
        "over random directions orthogonal to m^, moved by exactly the same length at every position, with "
        "their mean. Dotted: the same dose with every position rescaled to the length it had."
        + chosen_words(table, layers),
        width=max(640, 140 + 250 * len(layers)),
        height=660,
    )  # fmt: skip
    return titled_panels(fig)


REPLACEMENT_CAPTION = (
    "The projection on m^ is taken out and put along another unit vector, with its size, sign and timing. "
    "Colour is the edited layer, symbol the kind of replacement. Dotted lines: the projection taken out "
    "and not put back. If the direction carries the function, points fall towards 0 (left) and down "
    "(right) as the cosine nears 1, and random directions lie at the dotted line."
)


def replacement(tables: Tables, info: Info) -> go.Figure:
    """Release and KL when the projection is moved to another direction, against that direction's cosine with m^."""
    table = tables["replacement"]
    table = table[~table["norm_kept"]]
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
        legend_key(fig, f"layer {layer}", theme.QUALITATIVE[at % len(theme.QUALITATIVE)], "square")
    for kind, symbol in zip(kinds, theme.SYMBOLS, strict=False):
        legend_key(fig, kind, theme.MUTED, symbol)
    fig.update_xaxes(title_text="cosine of the replacement with m^")
    fig.update_yaxes(title_text="share firing, changed − clean", row=1, col=1)
    theme.zero_line(fig, row=1, col=1)
    known = table[table["replacement"] != "m^ itself"]
    theme.log_axis(fig, known["kl_far"], "KL, nats, mean over far positions", row=1, col=2)
    return theme.style(
        fig,
        "Direction or magnitude? The carried projection moved to other directions",
        words_below(info, table, "release", interval=False),
        REPLACEMENT_CAPTION,
        width=1000,
        height=500,
    )  # fmt: skip


def noise(tables: Tables, info: Info) -> go.Figure:
    """KL against the length of noise along m^, along random directions, isotropic and shaped."""
    table = tables["noise"]
    layers = panels(table["layer"])
    fig = layer_grid(1, layers)
    for col, layer in enumerate(layers, start=1):
        place = {"row": 1, "col": col}
        for index, (arm, name) in enumerate(ARMS.items()):
            part = table[(table["layer"] == layer) & (table["arm"] == arm)]
            mean = part.groupby("epsilon", as_index=False)[["kl_far"]].mean().sort_values("epsilon")
            colour = theme.QUALITATIVE[index]
            range_over_draws(fig, part, "epsilon", "kl_far", name, place, False, colour, mean=False)
            curve(fig, mean, "epsilon", "kl_far", name, index, place, col == 1)
        gone = table[(table["layer"] == layer) & (table["arm"] == "removal")]
        curve(fig, gone, "share", "kl_far", "m^ removed, at its own length", len(ARMS), place, col == 1)
        theme.log_axis(fig, table["kl_far"], "KL, nats" if col == 1 else "", **place)
        fig.update_yaxes(showticklabels=col == 1, **place)
    ticks = sorted(set(table["epsilon"].dropna()))
    fig.update_xaxes(type="log", tickvals=ticks, ticktext=[f"{value:g}" for value in ticks])
    fig.update_xaxes(title_text="noise length / stream length")
    fig = theme.style(
        fig,
        "Energy or direction? Noise along the carried direction and elsewhere",
        words_below(info, table, "kl_far", interval=False),
        "Noise of the same length, a share of the stream's, is added at every far position of one layer's "
        "input; it comes in opposite pairs, so that it hardly moves the mean. Lines are means over draws, "
        "bands their range; both axes are logarithmic. Shaped noise has the spread of the stream in each "
        "coordinate. The single point is the removal of m^, drawn at the mean share of the stream that it "
        "takes away." + chosen_words(table, layers),
        width=max(640, 140 + 250 * len(layers)),
        height=440,
    )  # fmt: skip
    return titled_panels(fig)


FIGURES = {
    "dose_response": dose_response,
    "replacement": replacement,
    "noise": noise,
    **reference_reach.FIGURES,
    **reference_gate.FIGURES,
}
NEEDS = {
    "dose_response": {"dose"},
    "replacement": {"replacement"},
    "noise": {"noise"},
    **reference_reach.NEEDS,
    **reference_gate.NEEDS,
}
"""Tables that a figure is drawn from: it is drawn when all were made."""
