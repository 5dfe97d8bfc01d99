"""Which latents survive the funnel, why the others do not, and what the survivors are (paper, App. C.1, Figure 9)."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from sae.taxonomy import BROAD
from satlens.plots import theme

Tables = Mapping[str, pd.DataFrame]
Info = Mapping[str, Any]

STAGES = {
    "all": "latents of the dictionary",
    "alive": "active at all",
    "active": "active often enough",
    "sparse": "not too dense",
    "tokens": "enough tokens",
    "mono-score": "highest MonoScore",
    "sample": "drawn to be judged",
    "consistency": "both token sets pure",
    "category": "with a category: features",
}
"""What a latent is that has passed each stage."""
LONGEST_LINE = 60
DROPPED, ERRORS = "#d3d7de", theme.QUALITATIVE[1]


def funnel(tables: Tables, info: Info) -> go.Figure:
    """How many latents pass each stage, and why those dropped were."""
    table = tables["funnel"]
    asked = info.get("skipped", 0) > 0
    table = table[(table["stage"] != "sample") | asked]
    labels = [_stage_label(row) for row in table.itertuples()]
    fig = go.Figure()
    for name, column, colour in (
        ("kept", "kept", theme.QUALITATIVE[0]),
        ("dropped here", "dropped", DROPPED),
        ("no usable answer", "errors", ERRORS),
    ):
        if column == "errors" and not table["errors"].any():
            continue
        fig.add_trace(
            go.Bar(
                x=table[column],
                y=labels,
                orientation="h",
                name=name,
                marker={"color": colour},
                hovertemplate="%{x:,} " + name + "<extra></extra>",
            )
        )
    fig.add_trace(
        go.Scatter(
            x=table[["kept", "dropped", "errors"]].sum(axis=1),
            y=labels,
            mode="text",
            text=[f"  {n:,}" for n in table["kept"]],
            textposition="middle right",
            textfont={"color": theme.INK},
            cliponaxis=False,
            hoverinfo="skip",
            showlegend=False,
        )
    )
    fig.update_layout(barmode="stack", bargap=0.35, legend={"traceorder": "normal"})
    fig.update_yaxes(autorange="reversed", ticks="", showline=False, showgrid=False)
    fig.update_xaxes(title_text="latents", tickformat=",", rangemode="tozero")
    return theme.style(
        fig,
        "From latents to features: how many pass each stage of the funnel",
        _subtitle(info),
        "Each bar is what came to a stage: blue passed, grey was dropped there, for the reason that stands under the "
        "stage's name; the number is how many passed. "
        + (
            "Orange are latents on which the judge gave no usable answer: they are neither accepted nor rejected and "
            "count in no share. "
            if table["errors"].any()
            else ""
        )
        + ("Only a random part of the latents with the highest MonoScore was asked about. " if asked else "")
        + f"The mean latent is active on {100 * info['mean_density']:.2g} % of positions. "
        + _trust(info),
        width=900,
        height=190 + 46 * len(table),
    )


def distribution(tables: Tables, info: Info) -> go.Figure:
    """Share of accepted features in each category, by broad kind (paper, Figure 9, one dictionary)."""
    table = tables["distribution"]
    total = int(table["n"].sum())
    fig = go.Figure()
    for index, broad in enumerate(BROAD):
        part = table[table["broad"] == broad]
        share, low, high = (theme.floats(part[column]) for column in ("share", "low", "high"))
        known = np.isfinite(low) & np.isfinite(high)
        fig.add_trace(
            go.Bar(
                x=share,
                y=[f"{row.category} ({row.n:,})" for row in part.itertuples()],
                orientation="h",
                name=broad,
                marker={"color": theme.QUALITATIVE[index]},
                error_x={
                    "type": "data",
                    "symmetric": False,
                    "array": np.where(known, high - share, np.nan),
                    "arrayminus": np.where(known, share - low, np.nan),
                    "color": theme.INK,
                    "thickness": 1.2,
                    "width": 3,
                }
                if known.any()
                else None,
                text=theme.interval_texts(low, high),
                textposition="none",
                hovertemplate="%{y}<br>%{x:.1%} %{text}<extra></extra>",
            )
        )
    fig.update_layout(bargap=0.35)
    fig.update_yaxes(autorange="reversed", ticks="", showline=False, showgrid=False)
    fig.update_xaxes(title_text="share of accepted features", tickformat=".0%", rangemode="tozero")
    if not total:
        fig.update_xaxes(range=[0, 1])
    interval = (
        "95 % bootstrap interval over features" if total > 1 else "no interval: fewer than two features"
    )
    return theme.style(
        fig,
        f"What the {total:,} accepted features are" if total else "No feature was accepted",
        f"{_subtitle(info)} · {interval}",
        "Share of the accepted features in each of the ten categories of the paper's Table 8, with their number in "
        "brackets. The interval says how far the shares would move with other features of the same kind; it does not "
        "cover another training of the dictionary, nor another judge. " + _trust(info),
        width=900,
        height=480,
    )


def _stage_label(row: Any) -> str:
    dropped = int(row.dropped) + int(row.errors)
    if not dropped or not row.reason:
        return f"<b>{STAGES[row.stage]}</b>"
    lost = row.reason if "; " in row.reason else f"{row.reason}: {dropped:,}"
    if len(lost) > LONGEST_LINE:
        lost = "<br>".join(lost.rsplit("; ", 1))
    return f"<b>{STAGES[row.stage]}</b><br><span style='color:{theme.MUTED};font-size:11px'>{lost}</span>"


def _subtitle(info: Info) -> str:
    words = [f"{info['model']}, dictionary {info['sae']}", f"judge: {info['judge']}"]
    return theme.subtitle(info["n_tokens"], None, None, *words)


def _trust(info: Info) -> str:
    """What is known about the judge, in a sentence: without it the counts mean little."""
    if info["judge"] == "rules":
        return (
            "The rules judge knows spelling only: it accepts no semantic roots, and what it accepts says nothing about "
            "meaning."
        )
    if "calibration_auc_known" not in info:
        return (
            "This judge was not calibrated for this run: how many placebo sets it would accept as well is unknown "
            "(satlens judge calibrate)."
        )
    return (
        f"This judge's calibration: AUC {_value(info['calibration_auc_rules'])} on sets that rules can decide and "
        f"{_value(info['calibration_auc_known'])} on words that belong together by meaning; at the threshold used it "
        f"retains {_value(info['calibration_false_retention'], True)} of placebo features."
    )


def _value(number: Mapping[str, Any], percent: bool = False) -> str:
    if number["estimate"] is None:
        return "unknown"
    shown = (lambda value: f"{100 * value:.3g} %") if percent else (lambda value: f"{value:.3g}")
    if number["low"] is None:
        return shown(number["estimate"])
    return f"{shown(number['estimate'])} [{shown(number['low'])}, {shown(number['high'])}]"


FIGURES = {"funnel": funnel, "distribution": distribution}
