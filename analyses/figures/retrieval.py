"""Where is the gate open in a retrieval item, and what does its answer lose without it."""

from collections.abc import Mapping
from typing import Any

import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from satlens.plots import theme

Tables = Mapping[str, pd.DataFrame]
Info = Mapping[str, Any]
SPANS = ("answer", "mention", "context", "rest")
BARE = "answer without context"
WORDS = {
    "answer": "answer",
    "mention": "mention in context",
    "context": "other context",
    "rest": "cue",
    BARE: BARE,
}
ABOUT = (
    "An item is a context, a cue and the answer. Mention: the places in the context where the answer stands; other "
    "context: all its other tokens; rest: the cue. "
)
EFFECTS = (
    "Top: change of NLL on the same tokens when all gates are zero, all are at their mean, or one layer's is at its "
    "mean (means from items that are not scored). Bottom: the effect on the answer minus that on other context, and "
    "minus that on the same answer asked without its context. Above 0 in both says that V1 helps retrieval beyond "
    "helping prediction in general; an interval that holds 0 does not say so. Where a treatment breaks the model, "
    "tokens that were predicted well have more to lose: trust single layers more than all gates at once."
)


def gates(tables: Tables, info: Info) -> go.Figure:
    """Mean alpha by layer, one curve a span; below, each minus other context."""
    fig = make_subplots(
        1, 2, horizontal_spacing=0.11, subplot_titles=["mean alpha", "mean alpha minus that of other context"]
    )
    for index, span in enumerate(SPANS):
        rows = tables["gates"][tables["gates"]["span"] == span].sort_values("layer")
        if len(rows):
            theme.series(
                fig, rows["layer"], rows["mean"], rows["low"], rows["high"], WORDS[span], index,
                place={"row": 1, "col": 1},
            )  # fmt: skip
    for index, span in enumerate(SPANS[:2]):
        table = tables["gate_contrasts"]
        rows = table[table["contrast"] == f"{span} - context"].sort_values("layer")
        theme.series(
            fig, rows["layer"], rows["mean"], rows["low"], rows["high"], WORDS[span], index,
            place={"row": 1, "col": 2}, showlegend=False,
        )  # fmt: skip
    for column in (1, 2):
        theme.layer_axis(fig, info["n_layers"], most=12, row=1, col=column)
    fig.update_yaxes(title_text="alpha (unitless)", rangemode="tozero", row=1, col=1)
    theme.zero_line(fig, row=1, col=2)
    fig.update_annotations(font_size=13)
    theme.grey_layer_zero(fig, label="")
    known = theme.has_interval(tables["gates"]["low"], tables["gates"]["high"])
    fig = theme.style(
        fig,
        "Gates where an answer is read and where it stands in the context",
        _subtitle(info, known),
        f"{ABOUT}Left: alpha averaged over the tokens of each kind and over KV heads. Right: the same minus other "
        "context, paired on items; an interval that holds 0 shows no difference. A gate acts on the token where it is "
        "read: values at a mention are what later tokens can retrieve. Layer 0, shaded, produces V1.",
        width=1040,
        height=470,
    )
    return fig.update_layout(legend_y=1.08, margin_t=124)


def effects(tables: Tables, info: Info) -> go.Figure:
    """Change of NLL by treatment, one point a span, and the two contrasts below."""
    table, contrasts = tables["effects"], tables["effect_contrasts"]
    conditions = [name for name in dict.fromkeys(table["condition"]) if name != "clean"]
    fig = make_subplots(2, 1, vertical_spacing=0.19, shared_xaxes=True)
    for index, span in enumerate((*SPANS, BARE)):
        rows = table[(table["span"] == span) & (table["condition"] != "clean")]
        if len(rows):
            _points(fig, rows, conditions, WORDS[span], index, 0.13 * (index - 2), row=1)
    for index, base in enumerate(("context", BARE)):
        rows = contrasts[contrasts["contrast"] == f"answer - {base}"]
        if len(rows):
            _points(
                fig, rows, conditions, f"answer minus {WORDS[base]}", index + 5, 0.2 * (index - 0.5), row=2
            )
    fig.update_traces(legend="legend2", row=2)
    fig.update_xaxes(
        tickvals=list(range(len(conditions))),
        ticktext=[_words(name) for name in conditions],
        range=[-0.6, len(conditions) - 0.4],
        showticklabels=True,
    )
    fig.update_xaxes(title_text="gates replaced", row=2, col=1)
    fig.update_yaxes(title_text="NLL minus clean<br>(nats per token)", row=1, col=1)
    fig.update_yaxes(title_text="difference of effects<br>(nats per token)", row=2, col=1)
    theme.zero_line(fig)
    known = theme.has_interval(table["low"], table["high"])
    fig = theme.style(
        fig,
        "What tokens of a retrieval item lose when gates are replaced",
        _subtitle(info, known),
        ABOUT + EFFECTS,
        width=max(900, 200 + 84 * len(conditions)),
        height=760,
    )
    below = {"orientation": "h", "x": 0, "xanchor": "left", "y": 0.43, "yanchor": "bottom"}
    return fig.update_layout(legend2=below)


def _points(
    fig: go.Figure, rows: pd.DataFrame, conditions: list[str], name: str, index: int, offset: float, row: int
) -> None:
    value, low, high = (theme.floats(rows[column]) for column in ("delta_nll", "low", "high"))
    colour = theme.QUALITATIVE[index % len(theme.QUALITATIVE)]
    fig.add_trace(
        go.Scatter(
            x=[conditions.index(c) + offset for c in rows["condition"]],
            y=value,
            mode="markers",
            name=name,
            marker={"color": colour, "symbol": theme.SYMBOLS[index % len(theme.SYMBOLS)], "size": 7},
            error_y={
                "type": "data",
                "symmetric": False,
                "array": high - value,
                "arrayminus": value - low,
                "color": colour,
                "thickness": 1.4,
                "width": 3,
            },
            text=[
                f"{c} {ends}"
                for c, ends in zip(rows["condition"], theme.interval_texts(low, high), strict=True)
            ],
            hovertemplate=f"{name}<br>%{{y:.4g}} nats %{{text}}<extra></extra>",
        ),
        row=row,
        col=1,
    )


def _words(condition: str) -> str:
    """all zero -> all<br>zero; mean 3 -> layer 3<br>mean."""
    kind, last = condition.split()
    return f"{kind}<br>{last}" if kind == "all" else f"layer {last}<br>{kind}"


def _subtitle(info: Info, interval: bool) -> str:
    words = f"{info['model']} ({info['gate']} gate) on {info['task']}"
    counts = f"{info['n_tokens']:,} tokens in {info['n_items']:,} items"
    ends = "95 % bootstrap interval over items" if interval else "no interval: fewer than two items"
    return theme.subtitle(None, None, None, words, counts, ends)


FIGURES = {"gates": gates, "effects": effects}
