"""How far a removal reaches, and where there is nothing to remove: later layers and positions, other texts, twins."""

import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from analyses.figures.reference_parts import (
    Info,
    Tables,
    chosen_words,
    curve,
    layer_grid,
    panels,
    range_over_draws,
    titled_panels,
    words_below,
)
from satlens.plots import theme


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
        ends = part["cosine_low"], part["cosine_high"]
        theme.series(fig, part["layer"], part["cosine"], *ends, f"removed at layer {layer}", index)
    theme.layer_axis(
        fig, int(table["layer"].max()) + 1, "layer whose input is read (the last: what leaves the model)"
    )
    fig.update_xaxes(ticktext=[str(value) for value in theme.ticks(int(table["layer"].max()) + 1)])
    fig.update_yaxes(title_text="cosine of stream and m^, mean")
    theme.zero_line(fig)
    return theme.style(
        fig,
        "Does the stream find back to the carried direction?",
        words_below(info, table, "cosine"),
        "m^ is removed at one layer's input, at far positions; each curve shows the mean cosine of the stream "
        "with the reading layer's own m^ from there on, grey the clean model's. A curve that returns to grey "
        "has been resupplied by the layers in between.",
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
    fig.update_xaxes(zeroline=True, zerolinecolor=theme.INK, rangemode="tozero")
    fig.update_xaxes(title_text="KL, nats, mean over far positions", row=1, col=1)
    fig.update_xaxes(title_text="NLL, changed − clean, nats", row=1, col=2)
    fig.update_yaxes(tickvals=list(range(len(sets))), ticktext=sets, range=[len(sets) - 0.4, -0.6])
    return theme.style(
        fig,
        "The carried direction removed at many layers at once",
        words_below(info, table, "kl_far"),
        "m^ of each layer of a set is removed at that layer's input. Grey ticks: the same lengths taken along random "
        "directions, one draw a tick. Sets are named by their first layer and step.",
        width=980,
        height=260 + 60 * len(sets),
    )  # fmt: skip


def window(tables: Tables, info: Info) -> go.Figure:
    """KL at later positions, and how often greedy continuations change, after a removal at a few positions."""
    table, greedy = tables["window"], tables["window_greedy"]
    fig = make_subplots(1, 2, horizontal_spacing=0.1)
    gone = table[table["direction"] == "reference"].sort_values("layer")
    ends, left = (gone["kl_after_low"], gone["kl_after_high"]), {"row": 1, "col": 1}
    theme.series(fig, gone["layer"], gone["kl_after"], *ends, "m^ removed", 0, bars=True, place=left)
    words = f"{info['draws']} matched random directions"
    range_over_draws(fig, table[table["direction"] == "matched"], "layer", "kl_after", words, left, True)
    for index, (direction, name) in enumerate((("reference", "m^ removed"), ("matched", "one of them"))):
        part = greedy[greedy["direction"] == direction].sort_values("layer")
        theme.series(
            fig, part["layer"], part["differs"], part["differs_low"], part["differs_high"], name, 6 * index, bars=True,
            offset=0.08 * index, place={"row": 1, "col": 2}, showlegend=direction == "matched",
        )  # fmt: skip
    everything = pd.concat([table["kl_after"], gone["kl_after_low"], gone["kl_after_high"]])
    theme.log_axis(fig, everything, "KL, nats, mean over the 32 positions after", row=1, col=1)
    fig.update_xaxes(title_text="layer whose input is edited", tickvals=sorted(set(table["layer"])))
    fig.update_yaxes(
        title_text="documents whose greedy text changes", range=[-0.02, 1.04], tickformat=".0%", row=1, col=2
    )
    return theme.style(
        fig,
        "Does a removal at eight positions reach later ones?",
        words_below(info, table, "kl_after"),
        "m^ is removed at positions 64 to 71 only, at one layer's input. Left: KL from the clean model's next-token "
        "distribution at the 32 positions after the window, which were not edited and can only see it through "
        "attention; logarithmic axis; grey, the range over random directions moved by the same length, and their mean. "
        "Right: share of documents in which any of the 16 greedy tokens after those positions differs from the clean "
        f"model's, among the documents that are long enough ({_n_documents(greedy)}).",
        width=980,
        height=460,
    )  # fmt: skip


def _n_documents(greedy: pd.DataFrame) -> str:
    return f"{int(greedy['n_documents'].iloc[0])}" if len(greedy) else "none is"


def ladder(tables: Tables, info: Info) -> go.Figure:
    """Gates on duty, and the mean stream's cosine with the prose's, from prose to a repeated token."""
    table = tables["ladder"]
    fig = make_subplots(1, 2, horizontal_spacing=0.1)
    for index, text in enumerate(dict.fromkeys(table["text"])):
        part = table[table["text"] == text].sort_values("layer")
        ends = part["duty_low"], part["duty_high"]
        theme.series(fig, part["layer"], part["duty"], *ends, text, index, place={"row": 1, "col": 1})
        nothing = [None] * len(part)
        theme.series(
            fig, part["layer"], part["cosine"], nothing, nothing, text, index, place={"row": 1, "col": 2},
            showlegend=False,
        )  # fmt: skip
    n_layers = int(table["layer"].max()) + 1
    for col in (1, 2):
        theme.layer_axis(fig, n_layers, most=16, row=1, col=col)
        fig.update_xaxes(ticktext=[str(value) for value in theme.ticks(n_layers, 16)], row=1, col=col)
    fig.update_yaxes(
        title_text="share of MLP gates on duty", rangemode="tozero", tickformat=".0%", row=1, col=1
    )
    fig.update_yaxes(title_text="cosine of the text's mean stream and m", row=1, col=2)
    theme.zero_line(fig, row=1, col=2)
    return theme.style(
        fig,
        "Does the carried direction need text, or only tokens?",
        words_below(info, table, "duty"),
        "The evaluated text (prose), its tokens in random order, each replaced by one of like frequency, tokens drawn "
        "evenly from its types, and one token repeated through each document. Left: share of (gate, far position) "
        "pairs with a pre-activation above 0. Right: cosine of the mean stream at each layer's input with m, which was "
        "fitted on prose. A rung whose cosine stays near 1 makes the same reference as prose does.",
        width=980,
        height=460,
    )  # fmt: skip


def twins(tables: Tables, info: Info) -> go.Figure:
    """The doses of the model and of its random-init twins, each along its own m^."""
    table = tables["twin"]
    layers = panels(table["layer"])
    plain = [
        (name, part[(part["direction"] == "reference") & ~part["norm_kept"]])
        for name, part in [(info["model"], tables["dose"]), *table.groupby("twin", sort=False)]
    ]
    fig = layer_grid(2, layers)
    for row, measure in enumerate(("release", "kl_far"), start=1):
        for col, layer in enumerate(layers, start=1):
            place, legend = {"row": row, "col": col}, row == col == 1
            for index, (name, lines) in enumerate(plain):
                part = lines[lines["layer"] == layer].sort_values("alpha")
                part = part[part["alpha"] != 1] if row == 2 else part
                curve(fig, part, "alpha", measure, name, index, place, legend)
    fig.update_yaxes(title_text="share firing, changed − clean", row=1, col=1)
    theme.zero_line(fig, row=1)
    values = pd.concat([lines.loc[lines["alpha"] != 1, "kl_far"] for _, lines in plain])
    for col in range(1, len(layers) + 1):
        theme.log_axis(fig, values, "KL, nats" if col == 1 else "", row=2, col=col)
        fig.update_yaxes(showticklabels=col == 1, row=2, col=col)
    fig.update_xaxes(tickvals=sorted(set(table["alpha"])))
    fig.update_xaxes(title_text="alpha (0 removes m^)", row=2)
    fig = theme.style(
        fig,
        "Is it learned? The same doses where nothing was trained",
        words_below(info, table, "release"),
        "Twins have the model's config and untrained weights; each is dosed along its own m^. Top: share of (gate, "
        "position) pairs with a post-activation above 0.5 at the edited layer, minus the clean model's. Bottom: KL "
        "from the clean model's next-token distribution, mean over far positions, logarithmic; at alpha = 1 it is "
        "exactly 0 and not drawn." + chosen_words(table, layers),
        width=max(640, 140 + 250 * len(layers)),
        height=660,
    )  # fmt: skip
    return titled_panels(fig)


FIGURES = {"recovery": recovery, "co_removal": co_removal, "window": window, "ladder": ladder, "twins": twins}
NEEDS = {
    "recovery": {"recovery"},
    "co_removal": {"co_removal"},
    "window": {"window", "window_greedy"},
    "ladder": {"ladder"},
    "twins": {"twin", "dose"},
}
"""Tables that a figure is drawn from."""
