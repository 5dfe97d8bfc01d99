"""Which V1 latents does each head take in, how much of it has a label, and do scores predict what removal does."""

import html
from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from satlens.plots import theme

Tables = Mapping[str, pd.DataFrame]
Info = Mapping[str, Any]
PARTS = {
    "semantic": theme.QUALITATIVE[0],
    "functional": theme.QUALITATIVE[1],
    "structural": theme.QUALITATIVE[2],
    "unlabelled": "#c9ced6",
    "bias": "#8b93a1",
    "error": "#4b515c",
}
LABELLED = ("semantic", "functional", "structural")
KINDS = {
    "top": "one of the head's strongest latents",
    "control": "a random latent, about as frequent",
    "top ten together": "its ten strongest together",
    "ten controls together": "ten random ones together",
    "all labelled": "all labelled features",
    "all of V1": "all of V1 (gate at 0)",
}
LONGEST_LABEL = 44


def head_shares(tables: Tables, info: Info) -> go.Figure:
    """What every head's V1 intake is made of, one panel a layer."""
    table = tables["head_shares"]
    layers = sorted(int(layer) for layer in table["layer"].unique())
    columns = min(4, len(layers))
    rows = -(-len(layers) // columns)
    fig = make_subplots(
        rows, columns, shared_yaxes="all", subplot_titles=[_panel(table, layer) for layer in layers],
        horizontal_spacing=0.03, vertical_spacing=0.42 / (rows + 1),
    )  # fmt: skip
    for number, layer in enumerate(layers):
        place = {"row": number // columns + 1, "col": number % columns + 1}
        here = table[table["layer"] == layer]
        for part, colour in PARTS.items():
            fig.add_trace(_bars(here[here["part"] == part], part, colour, showlegend=number == 0), **place)
        shut = sorted(here.loc[here["share"].isna(), "kv_head"].unique())
        for head in shut:
            fig.add_annotation(
                x=head, y=0.5, text="shut", textangle=-90, showarrow=False,
                font={"color": theme.MUTED, "size": 10}, **place,
            )  # fmt: skip
        fig.update_xaxes(tickvals=theme.ticks(int(here["kv_head"].max()) + 1, 12), **place)
    fig.update_xaxes(title_text="KV head", showgrid=False, row=rows)
    fig.update_yaxes(title_text="share of V1 intake", col=1)
    fig.update_yaxes(tickvals=[0, 0.5, 1], ticktext=["0 %", "50 %", "100 %"])
    fig.update_annotations(font_size=12)
    fig.update_layout(barmode="relative", bargap=0.15)
    fig = theme.style(
        fig,
        "What each head's V1 intake is made of",
        _subtitle(info),
        "A head's intake is the length of V1 it adds, alpha times |V1| summed over positions. Each part counts with "
        "its component along V1, so the parts of a bar add up to 100 % exactly: labelled features by kind (blue, "
        "orange, green), latents without a label, the decoder's bias, and the error, which is what the dictionary "
        f"does not reconstruct. {info['n_features']:,} of {info['n_latents']:,} latents have a label. A part below 0 "
        "points against V1. Heads marked shut never open their gate on this text.",
        width=1000,
        height=200 + 190 * rows,
    )
    return fig.update_layout(legend_y=1 + 0.16 / rows, margin_t=118)


def check(tables: Tables, info: Info) -> go.Figure:
    """Score of a latent in a head against what taking it away there did."""
    table, found = tables["flow_check"], tables["flow_correlation"].set_index(["predictor", "effect"])
    titles = [_correlation(found.loc[("score", effect)]) for effect in ("logit_change", "delta_nll")]
    fig = make_subplots(1, 2, horizontal_spacing=0.12, subplot_titles=titles)
    _effects(fig, table)
    fig.update_annotations(font_size=12)
    interval = theme.has_interval(table["delta_nll_low"], table["delta_nll_high"])
    words = theme.subtitle(info["n_tokens_check"], info["n_documents_check"], interval, f"{info['model']}")
    fig = theme.style(
        fig,
        "Does the score of a latent in a head predict what removing it there does?",
        words,
        "Each point takes one latent out of V1 as one KV head of one layer reads it, and nothing else. The score "
        "(alpha times activation times the size of the latent's logits along the direct path) needs no such run. "
        "Left: standard deviation over the vocabulary of the change of logits, averaged over scored positions; it "
        "cannot be negative. Right: change of NLL, above 0 where the model predicts worse. Controls are latents "
        "active about as often. Points at 0, which a logarithmic axis lacks, stand at the left or lower edge. Heads "
        f"of several layers are mixed. {_yardstick(table)}",
        width=1000,
        height=500,
    )
    return fig.update_layout(legend_y=1.1, margin_t=128)


def strongest_latents(tables: Tables, info: Info) -> go.Figure:
    """Scores of the strongest latents in every head."""
    table = tables["strongest_latents"]
    signed = bool((table["score"] < 0).any())
    wide = table.pivot(index="rank", columns=["layer", "kv_head"], values="score").sort_index(axis=1)
    first = table.drop_duplicates("rank").sort_values("rank")
    labels = [_label(row) for row in first.itertuples()]
    values = wide.to_numpy(float)
    heads = [f"layer {layer}, KV head {head}" for layer, head in wide.columns]
    heat = theme.heatmap(values, "score", diverging=signed)
    heat.update(
        y=list(range(len(labels))),
        x=list(range(len(heads))),
        customdata=np.broadcast_to(np.array(heads, dtype=object), values.shape),
        text=[[label] * len(heads) for label in labels],
        hovertemplate="%{text}<br>%{customdata}<br>score %{z:.4g}<extra></extra>",
    )
    fig = go.Figure(heat)
    _latent_axes(fig, [layer for layer, _ in wide.columns], labels)
    return theme.style(
        fig,
        "The latents with the largest scores, and the heads that read them",
        _subtitle(info),
        "Rows are the latents whose scores over all heads add up to most; a row without a category has no label. "
        "Tokens are the ones that activate the latent most, in falling order (␣ is a space). A score is the mean of "
        "alpha times activation times the size of the latent's logits along the direct path from that head, so "
        "frequent latents lead. Rows that look alike say that heads differ in how much of V1 they read, not in which "
        "latents. Scores leave out later layers and the final norm's scale: compare within a layer first.",
        width=1120,
        height=max(420, 200 + 24 * len(labels)),
    )


def _latent_axes(fig: go.Figure, layers: list[int], labels: list[str]) -> None:
    """Latents from the top downwards, heads grouped by layer with a line between."""
    middle = {layer: np.mean([i for i, other in enumerate(layers) if other == layer]) for layer in layers}
    for place in range(1, len(layers)):
        if layers[place] != layers[place - 1]:
            fig.add_vline(x=place - 0.5, line={"color": theme.INK, "width": 1})
    fig.update_xaxes(
        title_text="layer, its KV heads side by side",
        tickvals=list(middle.values()),
        ticktext=[str(layer) for layer in middle],
        showgrid=False,
    )
    fig.update_yaxes(
        title_text="latent: its label, tokens it is active on",
        tickvals=list(range(len(labels))),
        ticktext=labels,
        autorange="reversed",
        showgrid=False,
        tickfont={"size": 11},
    )


def _panel(table: pd.DataFrame, layer: int) -> str:
    """The layer, and how much of its heads' intake together has a label: often too little to see."""
    rows = table[(table["layer"] == layer) & table["share"].notna()]
    taken = rows["share"] * rows["length"].abs()
    labelled = taken[rows["part"].isin(LABELLED)].sum() / max(rows["length"].abs().sum() / len(PARTS), 1e-300)
    return f"layer {layer} · {100 * labelled:.2g} % labelled"


def _bars(rows: pd.DataFrame, part: str, colour: str, showlegend: bool) -> go.Bar:
    return go.Bar(
        x=rows["kv_head"],
        y=theme.floats(rows["share"]),
        name=part,
        legendgroup=part,
        showlegend=showlegend,
        marker={"color": colour, "line": {"width": 0}},
        text=theme.interval_texts(rows["low"], rows["high"]),
        textposition="none",
        hovertemplate=f"KV head %{{x}}<br>{part}: %{{y:.3%}} %{{text}}<extra></extra>",
    )


def _effects(fig: go.Figure, table: pd.DataFrame) -> None:
    """Points and axes of both panels."""
    single = table[table["kind"].isin(["top", "control"])]
    edge = {name: _edge(single[name].abs()) for name in ("score", "logit_change")}
    for index, kind in enumerate(("top", "control")):
        rows = table[table["kind"] == kind]
        x = np.maximum(theme.floats(rows["score"].abs()), edge["score"])
        for column, effect in ((1, "logit_change"), (2, "delta_nll")):
            least = edge["logit_change"] if effect == "logit_change" else -np.inf
            y, low, high = (
                np.maximum(theme.floats(rows[name]), least)
                for name in (effect, f"{effect}_low", f"{effect}_high")
            )
            trace = _points(rows, x, y, low, high, KINDS[kind], index, showlegend=column == 1)
            fig.add_trace(trace, row=1, col=column)
    for column in (1, 2):
        place = {"horizontal": True, "row": 1, "col": column}
        theme.log_axis(fig, single["score"].abs().clip(lower=edge["score"]), "score (log scale)", **place)
    sizes = pd.concat([single["logit_change"], single["logit_change_high"].astype(float)])
    title = "size of the change of logits (log scale)"
    theme.log_axis(fig, sizes.clip(lower=edge["logit_change"]), title, row=1, col=1)
    theme.zero_line(fig, row=1, col=2)
    fig.update_yaxes(
        title_text="NLL, latent removed minus unchanged (nats)", exponentformat="power", row=1, col=2
    )


def _points(
    rows: pd.DataFrame,
    x: np.ndarray[Any, Any],
    y: np.ndarray[Any, Any],
    low: np.ndarray[Any, Any],
    high: np.ndarray[Any, Any],
    name: str,
    index: int,
    showlegend: bool,
) -> go.Scatter:
    colour = theme.QUALITATIVE[index]
    known = bool(np.isfinite(low).any())
    error = {"type": "data", "symmetric": False, "array": high - y, "arrayminus": y - low, "color": colour}
    where = [f"latent {row.latent}, layer {row.layer} head {row.kv_head}" for row in rows.itertuples()]
    return go.Scatter(
        x=x,
        y=y,
        error_y={**error, "thickness": 1.2, "width": 2} if known else None,
        mode="markers",
        name=name,
        legendgroup=name,
        showlegend=showlegend,
        marker={"color": colour, "symbol": theme.SYMBOLS[index], "size": 8},
        text=where,
        hovertemplate="%{text}<br>score %{x:.3g}<br>%{y:.3g}<extra></extra>",
    )


def _edge(values: pd.Series) -> float:
    """Where a logarithmic axis puts its zeros: at a third of the smallest value."""
    positive = theme.floats(values)
    positive = positive[np.isfinite(positive) & (positive > 0)]
    return float(positive.min() / 3) if positive.size else 1e-6


def _correlation(row: pd.Series) -> str:
    value, low, high = theme.floats([row["spearman"], row["low"], row["high"]])
    words = f"{value:.2f}" if np.isfinite(value) else "undefined"
    ends = f" [{low:.2f}, {high:.2f}]" if np.isfinite(low) and np.isfinite(high) else ""
    return f"Spearman {words}{ends}, {int(row['n_removals'])} removals"


def _yardstick(table: pd.DataFrame) -> str:
    """What taking many away at once does, averaged over the checked heads."""
    means = table.groupby("kind")["logit_change"].mean()
    told = [f"{KINDS[kind]} {means[kind]:.2g}" for kind in KINDS if kind in means]
    return "Mean size of the change of logits: " + ", ".join(told) + "."


def _label(row: Any) -> str:
    """Latent number, category and tokens, shortened; token text is data and is escaped (plotly reads no &quot;)."""
    tokens = row.tokens if len(row.tokens) <= LONGEST_LABEL else row.tokens[: LONGEST_LABEL - 1] + "…"
    category = f" {row.category}:" if isinstance(row.category, str) else ":"
    return f"{row.latent}{category} {html.escape(tokens, quote=False)}"


def _subtitle(info: Info) -> str:
    words = f"{info['model']}, {info['gate']} gate, judge: {info['judge']}"
    return theme.subtitle(info["n_tokens"], info["n_documents"], None, words)


FIGURES = {"head_shares": head_shares, "check": check, "strongest_latents": strongest_latents}
