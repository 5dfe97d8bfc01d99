"""Can the judge tell coherent token sets from placebos, where do its scores lie, and does it name categories well."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from sae.item_sets import KNOWN, RULES
from sae.taxonomy import CATEGORIES
from satlens.plots import theme

Tables = Mapping[str, pd.DataFrame]
Info = Mapping[str, Any]

KINDS = {
    "rules": "sets that rules can decide",
    "known": "words that belong together by meaning",
    "shuffled rules": "placebo: rule-decidable sets, shuffled",
    "shuffled known": "placebo: known word sets, shuffled",
    "shuffled dictionary": "placebo: the dictionary's own sets, shuffled",
    "uniform": "placebo: tokens drawn evenly from the vocabulary",
}
PAPER = 7.0
"""Its threshold of purity."""
MARKED = 12
"""Points of a curve up to which each gets a marker; a judge read by probabilities has as many as sets."""
NO_ANSWER = "no usable answer"
RULES_CAVEAT = (
    "This judge is the rules themselves: it agrees with rule-decidable sets by construction, and is blind to meaning, "
    "so only what it says of the placebos is a finding. "
)


def roc(tables: Tables, info: Info) -> go.Figure:
    """True against false positive rate of each coherent kind against each placebo kind."""
    curves, areas = tables["roc"], tables["auc"]
    fig = go.Figure()
    fig.add_trace(
        go.Scatter(
            x=[0, 1], y=[0, 1], mode="lines", line={"color": theme.MUTED, "dash": "dot", "width": 1},
            hoverinfo="skip", showlegend=False,
        )
    )  # fmt: skip
    for index, row in enumerate(areas.itertuples()):
        part = curves[(curves["coherent"] == row.coherent) & (curves["placebo"] == row.placebo)]
        ends = (
            f" [{row.low:.2f}, {row.high:.2f}]"
            if np.isfinite(theme.floats([row.low, row.high])).all()
            else ""
        )
        area = f"AUC {row.auc:.2f}{ends}" if np.isfinite(theme.floats([row.auc])[0]) else "no scores"
        fig.add_trace(
            go.Scatter(
                x=part["false_positive"],
                y=part["true_positive"],
                mode="lines+markers" if len(part) <= MARKED else "lines",
                name=f"{row.coherent} against {row.placebo}: {area}",
                line={
                    "color": theme.QUALITATIVE[index % len(theme.QUALITATIVE)],
                    "dash": "solid" if row.coherent == RULES else "dash",
                    "width": 2,
                },
                marker={"symbol": theme.SYMBOLS[index % len(theme.SYMBOLS)], "size": 7},
                text=[
                    f"score at least {at:.3g}" if np.isfinite(at) else ""
                    for at in theme.floats(part["threshold"])
                ],
                hovertemplate="%{text}<br>%{x:.1%} of placebo sets, %{y:.1%} of coherent sets<extra></extra>",
            )
        )
    share = {"tickformat": ".0%", "range": [-0.02, 1.02]}
    fig.update_xaxes(title_text="placebo sets at or above the score", **share)
    fig.update_yaxes(title_text="coherent sets at or above the score", **share)
    fig = theme.style(
        fig,
        "Does the judge score coherent sets above placebos?",
        _subtitle(info) + " · 95 % bootstrap interval over items",
        "Each point is a score: how many coherent and how many placebo sets reach it. AUC is the probability that a "
        "coherent set outscores a placebo (ties count half): 1 tells them apart always, 0.5, the dotted line, is "
        "chance. Solid lines: sets that rules can decide by spelling. Dashed: lists of words that belong together by "
        "meaning. Shuffled placebos hold the same tokens, dealt anew; uniform ones are drawn from the vocabulary. "
        + _caveat(info),
        width=980,
        height=560,
    )
    return fig.update_layout(
        legend={"orientation": "v", "x": 1.02, "y": 1, "yanchor": "top"}, margin={"t": 96}
    )


def scores(tables: Tables, info: Info) -> go.Figure:
    """Where the scores of coherent and placebo sets lie, and where the thresholds cut."""
    table = tables["sets"]
    kinds = [kind for kind in KINDS if (table["kind"] == kind).any()]
    fig = make_subplots(
        len(kinds), 1, shared_xaxes=True, vertical_spacing=0.25 / (len(kinds) + 1),
        subplot_titles=[_panel_title(table[table["kind"] == kind], kind) for kind in kinds],
    )  # fmt: skip
    whole = bool((table["score"].dropna() % 1 == 0).all())
    width = 1.0 if whole else 0.5
    edges = np.arange(-width / 2, 10 + width, width) if whole else np.arange(0, 10.5 + width, width)
    for row, kind in enumerate(kinds, start=1):
        values = table.loc[table["kind"] == kind, "score"].dropna().to_numpy(dtype=np.float64)
        count, _ = np.histogram(values, edges)
        fig.add_trace(
            go.Bar(
                x=edges[:-1] + width / 2,
                y=count / max(len(values), 1),
                width=0.86 * width,
                marker={"color": theme.QUALITATIVE[0] if kind in (RULES, KNOWN) else theme.QUALITATIVE[4]},
                showlegend=False,
                hovertemplate=f"{KINDS[kind]}<br>score %{{x:.3g}}: %{{y:.1%}} of sets<extra></extra>",
            ),
            row=row,
            col=1,
        )
        fig.update_yaxes(
            title_text="share", tickformat=".0%", range=[0, 1.05], tickvals=[0, 0.5, 1], row=row, col=1
        )
        _cuts(fig, info, row, 0.5 if whole else 0.0)
    fig.update_xaxes(range=[-0.7, 10.7], tickvals=list(range(11)))
    fig.update_xaxes(title_text="purity score of a set (0 to 10)", row=len(kinds), col=1)
    fig.update_annotations(font_size=12, x=0, xanchor="left")
    _name_cuts(fig, info, 0.5 if whole else 0.0)
    found = info["threshold"]
    words = (
        f"Solid line: the lowest score at which at most {info['target']:.0%} of placebo features "
        f"({info['threshold_placebo']}) have both sets at or above it, {found:.3g}. The other "
        "placebos had no part in that choice. "
        if found is not None
        else f"No score keeps placebo features ({info['threshold_placebo']}) at or below {info['target']:.0%}, so "
        "there is no calibrated threshold. "
    )
    return theme.style(
        fig,
        "Scores of coherent sets and of placebos",
        _subtitle(info),
        "Share of the sets of each kind with each score; blue belongs together, amber does not. Dashed line: the "
        "paper's threshold, 7. " + words + _caveat(info),
        width=860,
        height=150 + 120 * len(kinds),
    )


def confusion(tables: Tables, info: Info) -> go.Figure:
    """Which category the judge names for sets whose category rules can decide."""
    table = tables["confusion"].assign(answer=lambda t: t["answer"].fillna(NO_ANSWER))
    names = list(CATEGORIES)
    columns = [*names, *([NO_ANSWER] if (table["answer"] == NO_ANSWER).any() else [])]
    rows = [name for name in names if (table["truth"] == name).any()]
    counts = table.pivot_table(index="truth", columns="answer", values="n", aggfunc="sum", fill_value=0)
    counts = counts.reindex(index=rows, columns=columns, fill_value=0)
    n = counts.to_numpy(dtype=np.float64)
    share = n / np.maximum(n.sum(1, keepdims=True), 1)
    fig = go.Figure(
        go.Heatmap(
            z=share,
            x=columns,
            y=[f"{name} ({int(total)})" for name, total in zip(rows, n.sum(1), strict=True)],
            zmin=0,
            zmax=1,
            colorscale=theme.SEQUENTIAL,
            xgap=1,
            ygap=1,
            text=[[f"{int(cell)}" if cell else "" for cell in line] for line in n],
            texttemplate="%{text}",
            colorbar={
                "title": {"text": "share of the row", "side": "right"},
                "tickformat": ".0%",
                "thickness": 14,
            },
            hovertemplate="%{y}<br>answered %{x}<br>%{text} items, %{z:.1%}<extra></extra>",
        )
    )
    fig.update_xaxes(
        title_text="category that the judge names", tickangle=-40, showgrid=False, showline=False
    )
    fig.update_yaxes(
        title_text="category by rule (items)", autorange="reversed", showgrid=False, showline=False, ticks=""
    )
    return theme.style(
        fig,
        "Does the judge name the category that rules can decide?",
        f"{_subtitle(info)}<br>accuracy {_value(info['category_accuracy'], True)}, "
        f"kappa {_value(info['category_kappa'])}, 95 % intervals over items",
        "Rows are items whose tokens all fall into one category by rule, columns what the judge called them; numbers "
        "are items. A judge that agrees has all of them on the diagonal. Categories that need meaning (Semantic Root "
        "Fragments) have no row, because rules cannot decide them. " + _caveat(info),
        width=980,
        height=330 + 34 * len(rows),
    )


def _cuts(fig: go.Figure, info: Info, row: int, left: float) -> None:
    """The paper's threshold and the calibrated one in a panel; ``left`` puts a line before a whole number's bar."""
    fig.add_vline(PAPER - left, line={"color": theme.MUTED, "dash": "dash", "width": 1.2}, row=row, col=1)
    if info["threshold"] is not None:
        fig.add_vline(info["threshold"] - left, line={"color": theme.INK, "width": 1.4}, row=row, col=1)


def _name_cuts(fig: go.Figure, info: Info, left: float) -> None:
    """Say above the panels which line is which; where both lie close, the two labels turn away from each other."""
    found = info["threshold"]
    lines = [(PAPER, "paper: 7", theme.MUTED, "left" if found is None or found <= PAPER else "right")]
    if found is not None:
        lines.append((found, f"calibrated: {found:.3g}", theme.INK, "right" if found <= PAPER else "left"))
    for at, words, colour, anchor in lines:
        fig.add_annotation(
            x=at - left, xref="x", xanchor=anchor, y=1.02, yref="y domain", yanchor="bottom", text=words,
            showarrow=False, font={"size": 11, "color": colour},
        )  # fmt: skip


def _panel_title(part: pd.DataFrame, kind: str) -> str:
    missing = int(part["score"].isna().sum())
    lost = f", {missing:,} without score" if missing else ""
    return f"{KINDS[kind]} ({len(part):,} sets{lost})"


def _subtitle(info: Info) -> str:
    items = sum(value for key, value in info.items() if key.startswith("n_items_"))
    return (
        f"judge: {info['judge']} · vocabulary of {info['model']} · {items:,} items, {info['n_sets']:,} sets"
    )


def _caveat(info: Info) -> str:
    return RULES_CAVEAT if info["judge"] == "rules" else ""


def _value(number: Mapping[str, Any], percent: bool = False) -> str:
    if number["estimate"] is None:
        return "undefined"
    scale, unit = (100, " %") if percent else (1, "")
    ends = "" if number["low"] is None else f" [{scale * number['low']:.3g}, {scale * number['high']:.3g}]"
    return f"{scale * number['estimate']:.3g}{ends}{unit}"


FIGURES = {"roc": roc, "scores": scores, "confusion": confusion}
