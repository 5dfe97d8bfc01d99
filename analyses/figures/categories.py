"""Does the gate let some kinds of V1 features in more than others (paper Figure 6), and which are there (Figure 9)."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from satlens.plots import theme

Tables = Mapping[str, pd.DataFrame]
Info = Mapping[str, Any]
BROAD = ("semantic", "functional", "structural")
MEAN = "mean"
"""Value of the column ``seed`` for the mean over several dictionaries."""
JOINT = "bands: 95 % bootstrap over documents and features"
SMALLEST_SHARE = 1e-3


def fig6_gating(tables: Tables, info: Info) -> go.Figure:
    """Mean alpha by layer for the three broad categories (paper Figure 6)."""
    table = tables["category_gating"]
    table = table[(table["level"] == "broad") & (table["weighting"] == "feature")]
    fig = go.Figure()
    for index, category in enumerate(BROAD):
        rows = table[table["category"] == category]
        _curve(fig, rows, f"{category}, {_size(rows)}", index)
    theme.layer_axis(fig, info["n_layers"])
    fig.update_yaxes(title_text="mean alpha (unitless)", rangemode="tozero")
    theme.grey_layer_zero(fig)
    return theme.style(
        fig,
        "Mean gate value on V1 features, by broad category",
        _subtitle(info, table),
        "Mean of alpha over the positions where a feature is active and over KV heads, then over the features of "
        "a category, each counted once. "
        f"{_bands(info, table)} A category of fewer than five features has a curve but no band. Features that share "
        "tokens are not independent, so the bands are, if anything, too narrow. Categories also differ in how often "
        "their tokens occur: the next figure says what that explains. Layer 0, shaded, produces V1 and has no gate.",
    )


def fig6_differences(tables: Tables, info: Info) -> go.Figure:
    """Semantic minus the two others by layer, beside what token frequency alone gives."""
    table = tables["differences"]
    table = table[table["weighting"] == "feature"]
    names = list(dict.fromkeys(table["difference"]))
    titles = [_title(tables["category_gating"], name) for name in names]
    fig = make_subplots(1, len(names), shared_yaxes=True, horizontal_spacing=0.05, subplot_titles=titles)
    for column, name in enumerate(names, start=1):
        place = {"row": 1, "col": column}
        rows = table[table["difference"] == name]
        _null_band(fig, _main(rows), place, showlegend=column == 1)
        _curve(fig, rows, "measured", 0, place, showlegend=column == 1)
        theme.layer_axis(fig, info["n_layers"], most=12, **place)
        theme.zero_line(fig, **place)
    fig.update_yaxes(title_text="difference of mean alpha", row=1, col=1)
    fig.update_annotations(font_size=13)
    theme.grey_layer_zero(fig, label="")
    fig = theme.style(
        fig,
        "Semantic features against the others: difference of mean gate values",
        _subtitle(info, table),
        "Above 0 the gate is wider open on semantic features. "
        f"{_bands(info, table)} Grey: where 95 % of the differences fall when token types that occur about equally "
        "often (the same tenth by frequency) trade their gate values, so that categories keep their frequencies and "
        "lose everything else. A curve inside the grey band is no more than frequency explains. Without five features "
        "on both sides there is no band.",
        width=980,
    )
    return fig.update_layout(legend_y=1.1, margin_t=124)


def fig9_distribution(tables: Tables, info: Info) -> go.Figure:
    """Share of the labelled features by category, for both models and every seed (paper Figure 9)."""
    table = tables["distribution"]
    table = table[table["level"] == "fine"]
    names = list(dict.fromkeys(table["category"]))[::-1]
    kinds = dict(zip(table["category"], table["broad"], strict=True))
    models = list(dict.fromkeys(table["model"]))
    positive = table.loc[table["share"] > 0, "share"]
    edge = min(SMALLEST_SHARE, *(positive / 2), 1.0) / 2
    fig = go.Figure()
    for index, model in enumerate(models):
        place = {name: at + 0.3 * ((len(models) - 1) / 2 - index) for at, name in enumerate(names)}
        _shares(fig, table[table["model"] == model], model, index, place, edge)
    decades = [10.0**power for power in range(int(np.ceil(np.log10(edge) + 1e-9)), 1)]
    fig.update_xaxes(
        type="log",
        title_text="share of the labelled features (log scale)",
        range=[np.log10(edge) - 0.12, 0.05],
        tickvals=[edge, *decades],
        ticktext=["0", *[f"{100 * decade:.10g} %" for decade in decades]],
    )
    fig.update_yaxes(
        title_text="category (broad kind)",
        tickvals=list(range(len(names))),
        ticktext=[f"{name} ({kinds[name]})" for name in names],
        range=[-0.6, len(names) - 0.4],
    )
    fig.add_vline(x=edge, line={"color": theme.GRID, "width": 1.5}, layer="below")
    return theme.style(
        fig,
        "What the labelled V1 features are",
        f"{' and '.join(models)} · judge: {info['judge']} · {_counts(table, models)}",
        "One small point per dictionary (training seed), a large one for their mean; shares refer to the accepted "
        "features of each dictionary, whose number stands above. The axis is logarithmic, so a share of 0 cannot "
        "stand on it: such points are drawn hollow at the left edge, marked 0. Models differ only where their points "
        "do by more than those of one model among themselves; with one dictionary a model nothing can be said of "
        "that. Categories are the judge's words and worth no more than its calibration.",
        width=900,
        height=520,
    )


def _shares(
    fig: go.Figure, rows: pd.DataFrame, model: str, index: int, place: Mapping[str, float], edge: float
) -> None:
    """Points of one model: its dictionaries, and their mean where there are several."""
    key = {"color": theme.QUALITATIVE[index], "symbol": theme.SYMBOLS[index], "size": 10}
    fig.add_trace(go.Scatter(x=[None], y=[None], mode="markers", name=model, legendgroup=model, marker=key))
    several = rows["seed"].nunique() > 1
    means = rows.groupby("category", sort=False)[["share", "n"]].mean().reset_index()
    for table, size, opacity in ((rows, 6, 0.55), (means, 11, 1.0)) if several else ((rows, 10, 1.0),):
        share = theme.floats(table["share"])
        seeds = table["seed"] if "seed" in table else [MEAN] * len(table)
        fig.add_trace(
            go.Scatter(
                x=np.where(share > 0, share, edge),
                y=[place[name] for name in table["category"]],
                mode="markers",
                name=model,
                legendgroup=model,
                showlegend=False,
                marker={
                    "color": theme.QUALITATIVE[index],
                    "symbol": [theme.SYMBOLS[index] + ("" if value > 0 else "-open") for value in share],
                    "size": size,
                    "opacity": opacity,
                },
                customdata=np.stack([share, theme.floats(table["n"]), np.array(seeds, dtype=object)], axis=1),
                text=list(table["category"]),
                hovertemplate=f"{model}<br>%{{text}}<br>%{{customdata[0]:.2%}} (%{{customdata[1]:.4g}} features), "
                "seed %{customdata[2]}<extra></extra>",
            )
        )


def _curve(
    fig: go.Figure,
    rows: pd.DataFrame,
    name: str,
    index: int,
    place: Mapping[str, int] | None = None,
    showlegend: bool = True,
) -> None:
    """The mean over seeds with its band, and a small point for each seed where there are several."""
    main = _main(rows).sort_values("layer")
    theme.series(
        fig, main["layer"], main["mean"], main["low"], main["high"], name, index, place=place, showlegend=showlegend
    )  # fmt: skip
    seeds = rows[rows["seed"] != MEAN] if (rows["seed"] == MEAN).any() else rows.iloc[:0]
    if len(seeds):
        fig.add_trace(
            go.Scatter(
                x=seeds["layer"],
                y=seeds["mean"],
                mode="markers",
                legendgroup=name,
                showlegend=False,
                marker={"color": theme.QUALITATIVE[index], "size": 4, "symbol": "line-ew-open"},
                text=[f"seed {seed}" for seed in seeds["seed"]],
                hovertemplate=name + ", %{text}<br>%{y:.4g}<extra></extra>",
            ),
            **(place or {}),
        )


def _null_band(fig: go.Figure, rows: pd.DataFrame, place: Mapping[str, int], showlegend: bool) -> None:
    rows = rows.sort_values("layer")
    low, high = theme.floats(rows["null_low"]), theme.floats(rows["null_high"])
    known = np.isfinite(low)
    layers = rows["layer"].to_numpy()[known]
    fig.add_trace(
        go.Scatter(
            x=np.concatenate([layers, layers[::-1]]),
            y=np.concatenate([high[known], low[known][::-1]]),
            fill="toself",
            fillcolor="rgba(92,99,112,0.18)",
            mode="lines",
            line={"width": 0},
            name="token frequency alone",
            legendgroup="null",
            showlegend=showlegend,
            hoverinfo="skip",
        ),
        **place,
    )


def _main(rows: pd.DataFrame) -> pd.DataFrame:
    """The mean over seeds, or the only seed."""
    return rows[rows["seed"] == MEAN] if (rows["seed"] == MEAN).any() else rows


def _size(rows: pd.DataFrame) -> str:
    """How many features a curve stands for, as a range over seeds."""
    n = rows.loc[rows["seed"] != MEAN].groupby("seed")["n_features"].first()
    least, most = int(n.min()), int(n.max())
    return f"{least} feature{'' if least == 1 else 's'}" if least == most else f"{least} to {most} features"


def _title(gating: pd.DataFrame, difference: str) -> str:
    """ "semantic (22 features) minus structural (16)", so that a difference of two features is seen as one."""
    rows = gating[(gating["level"] == "broad") & (gating["weighting"] == "feature")]
    return " minus ".join(
        f"{name} ({_size(rows[rows['category'] == name])})" for name in difference.split(" - ")
    )


def _counts(table: pd.DataFrame, models: list[str]) -> str:
    words = []
    for model in models:
        n = table[table["model"] == model].groupby("seed", sort=False)["n_features"].first()
        words.append(f"{model} {', '.join(f'{int(value):,}' for value in n)}")
    return "labelled features: " + "; ".join(words)


def _bands(info: Info, table: pd.DataFrame) -> str:
    if len(info["seeds"]) > 1:
        return (
            f"Curves are means over {len(info['seeds'])} dictionaries (training seeds), small dashes the single ones; "
            "sizes are features of one dictionary, bands resample documents and features."
        )
    return "Bands resample documents and features."


def _subtitle(info: Info, table: pd.DataFrame) -> str:
    interval = theme.has_interval(table["low"], table["high"])
    words = f"{info['model']}, {info['gate']} gate, judge: {info['judge']}"
    parts = [theme.subtitle(info["n_tokens"], info["n_documents"], None, words)]
    return " · ".join([*parts, JOINT if interval else "no interval: too few documents or features"])


FIGURES = {
    "fig6_gating": fig6_gating,
    "fig6_differences": fig6_differences,
    "fig9_distribution": fig9_distribution,
}
