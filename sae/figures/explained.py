"""How much of V1 do dictionaries and simpler means explain, on what they saw and on what they did not?

Explained variance is drawn on a logarithmic axis of what is left unexplained, since 99 % and 99.9 % are far apart.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from satlens.plots import theme

Tables = Mapping[str, pd.DataFrame]
Info = Mapping[str, Any]

METHODS = {
    "sae": "dictionary",
    "pca-k": "PCA, k components",
    "pca-bits": "PCA, same bits",
    "k-means": "k-means",
    "memory": "memory of frequent vectors",
}
SETS = {
    ("all types", "fve_train"): "training text,<br>by count",
    ("all types", "fve_heldout"): "held-out text,<br>by count",
    ("all types", "fve_types"): "token types,<br>each once",
    ("some withheld", "fve_types_trained"): "types it<br>was shown",
    ("some withheld", "fve_types_withheld"): "types it<br>never saw",
}
ASKED = 0.01
"""Unexplained variance that the paper asks a dictionary to stay below (App. C.1)."""
CONTROL = (
    "The two columns on the right are another fit, made alike, from which some token types were withheld: what was "
    "learned about V1 serves those too, what was learned about single tokens does not. "
)
LEAST_LEFT = 1e-4
"""Where the axis of unexplained variance ends: what is explained better is drawn there."""


def fve(tables: Tables, info: Info) -> go.Figure:
    """Fraction of variance explained, dictionary against baselines, in sample and out of it."""
    table = tables["dictionaries"]
    present = [key for key in SETS if table.loc[table["fit"] == key[0], key[1]].notna().any()]
    fig, drawn = go.Figure(), [ASKED]
    for index, (method, name) in enumerate(METHODS.items()):
        points = {n: _over_seeds(table, method, *key) for n, key in enumerate(present)}
        known = {n: point for n, point in points.items() if point is not None}
        if not known:
            continue
        mean, low, high = np.array(list(known.values())).T
        drawn += [*_left(low), *_left(high)]
        fig.add_trace(_dots(np.array(list(known)) + 0.14 * (index - 2), mean, low, high, name, index))
    _explained_axis(fig, drawn)
    fig.update_xaxes(
        title_text="vectors of V1 that count",
        tickvals=list(range(len(present))),
        ticktext=[SETS[key] for key in present],
        range=[-0.5, len(present) - 0.5],
        showgrid=False,
    )
    fig.add_hline(y=ASKED, line={"color": theme.MUTED, "width": 1, "dash": "dot"})
    control = [n for n, (fit, _) in enumerate(present) if fit != "all types"]
    if control:
        _part(fig, control[0] - 0.5, "control: fitted with some types withheld")
    n_seeds = int(info["n_seeds"])
    return theme.style(
        fig,
        "Variance of V1 explained: a dictionary and the same budget without one",
        _subtitle(info, f"mean and range of {n_seeds} seeds" if n_seeds > 1 else "one seed"),
        "Fraction of the variance of V1 explained, 1 - residual / total; the axis is logarithmic in what is left. By "
        "count: each token weighs as often as the text has it. Each once: every token type weighs the same. "
        + (CONTROL if control else "")
        + "Memory stores the most frequent vectors as they are, as many as the dictionary has latents, and gives the "
        "mean for the rest: what it reaches takes no structure. PCA with as many stored numbers as the dictionary "
        "explains everything and is not drawn. Dotted: the 99 % that the paper asks for.",
        width=900,
        height=520,
    )


def fve_by_frequency(tables: Tables, info: Info) -> go.Figure:
    """Explained variance of single token types against how often the text has them."""
    table = tables["type_quantiles"]
    table = table[table["count_low"].notna()]
    groups = [
        ("all types", "not withheld", "trained on all types"),
        ("some withheld", "withheld", "types withheld from it"),
    ]
    fig, drawn = go.Figure(), []
    for index, (fit, chosen, name) in enumerate(groups):
        rows = first(table[(table["fit"] == fit) & (table["set"] == chosen)], fit).sort_values("count_low")
        if not len(rows):
            continue
        x = np.sqrt(theme.floats(rows["count_low"]) * (theme.floats(rows["count_high"]) - 1)).clip(1)
        left = {q: _left(rows[q]) for q in ("q05", "q25", "q50", "q75", "q95")}
        drawn += [value for q in ("q05", "q95") for value in left[q]]
        for low, high, opacity in (("q05", "q95", 0.13), ("q25", "q75", 0.25)):
            fig.add_trace(_band(x, left[low], left[high], index, opacity))
        fig.add_trace(
            go.Scatter(
                x=x,
                y=left["q50"],
                name=f"{name}: median type",
                mode="lines+markers",
                line={"color": theme.QUALITATIVE[index], "width": 2},
                marker={"symbol": theme.SYMBOLS[index], "size": 7},
                customdata=np.stack([theme.floats(rows[c]) for c in ("q50", "n_types", "count_low", "count_high")], 1),
                hovertemplate=f"{name}<br>seen %{{customdata[2]:,}} to below %{{customdata[3]:,}} times: "
                "%{customdata[1]:,} types<br>median %{customdata[0]:.4g}<extra></extra>",
            )
        )  # fmt: skip
    _explained_axis(fig, drawn)
    fig.update_yaxes(title_text="variance explained of one type")
    fig.update_xaxes(
        type="log",
        title_text="how often the text has the type",
        dtick=1,
        exponentformat="none",
        tickformat=",",
    )
    return theme.style(
        fig,
        "Explained variance of single token types, by frequency",
        theme.subtitle(None, None, None, str(info["model"]), f"{int(info['n_types']):,} token types of the text"),
        "Each type's FVE is 1 - |x - reconstruction|² / |x - mean|². Line: the median type among those of like "
        "frequency (doublings); dark band: the middle half of types; light band: 5 to 95 %. Types withheld, where "
        "there are any, are those of a dictionary trained alike that never saw them: the gap between the curves is "
        "what was learned about single tokens rather than about V1.",
        width=860,
        height=480,
    )  # fmt: skip


def first(table: pd.DataFrame, fit: str = "all types") -> pd.DataFrame:
    """The rows of the first seed of that fit (of any fit, when there is none)."""
    rows = table[table["fit"] == fit] if (table["fit"] == fit).any() else table
    return rows[rows["seed"] == rows["seed"].iloc[0]] if len(rows) else rows


def _part(fig: go.Figure, x: float, text: str) -> None:
    """A line before column ``x``, and what stands right of it."""
    fig.add_vline(x=x, line={"color": theme.MUTED, "width": 1})
    fig.add_annotation(
        x=x + 0.05,
        xanchor="left",
        y=0.02,
        yref="y domain",
        yanchor="bottom",
        text=text,
        showarrow=False,
        font={"color": theme.MUTED, "size": 11},
    )


def _over_seeds(table: pd.DataFrame, method: str, fit: str, score: str) -> tuple[float, float, float] | None:
    values = theme.floats(table.loc[(table["method"] == method) & (table["fit"] == fit), score])
    values = values[np.isfinite(values)]
    return (float(values.mean()), float(values.min()), float(values.max())) if len(values) else None


def _dots(x: Any, mean: Any, low: Any, high: Any, name: str, index: int) -> go.Scatter:
    left = _left(mean)
    errors = {
        "type": "data",
        "symmetric": False,
        "array": _left(low) - left,  # what is explained least is left most
        "arrayminus": left - _left(high),
        "color": theme.QUALITATIVE[index],
        "thickness": 1.4,
        "width": 3,
    }
    return go.Scatter(
        x=x,
        y=left,
        error_y=errors if (high > low).any() else None,
        name=name,
        mode="markers",
        marker={"color": theme.QUALITATIVE[index], "symbol": theme.SYMBOLS[index], "size": 9},
        customdata=np.stack([mean, low, high], 1),
        hovertemplate=f"{name}<br>%{{customdata[0]:.5g}} "
        "[%{customdata[1]:.5g}, %{customdata[2]:.5g}]<extra></extra>",
    )


def _left(explained: Any) -> np.ndarray[Any, np.dtype[np.float64]]:
    """What is not explained, at least what the axis can show."""
    return (1 - theme.floats(explained)).clip(LEAST_LEFT)


def _explained_axis(fig: go.Figure, left: Any) -> None:
    """A y axis of FVE, logarithmic in what is left, the best on top."""
    values = theme.floats(left)
    values = values[np.isfinite(values)]
    worst, best = (float(values.max()), float(values.min())) if values.size else (1.0, 0.01)
    at = [
        10.0,
        5.0,
        2.0,
        1.0,
        0.5,
        0.2,
        0.1,
        0.05,
        0.02,
        0.01,
        0.005,
        0.002,
        0.001,
        0.0005,
        0.0002,
        LEAST_LEFT,
    ]
    words = [f"{100 * (1 - value):.6g} %{' +' if value == LEAST_LEFT else ''}" for value in at]
    words = [word.replace("-", "−") for word in words]
    fig.update_yaxes(
        type="log", title_text="variance explained", tickvals=at, ticktext=words,
        range=[np.log10(worst) + 0.1, np.log10(best) - 0.1],
    )  # fmt: skip


def _band(x: Any, low: Any, high: Any, index: int, opacity: float) -> go.Scatter:
    red, green, blue = (int(theme.QUALITATIVE[index][i : i + 2], 16) for i in (1, 3, 5))
    return go.Scatter(
        x=np.concatenate([x, x[::-1]]),
        y=np.concatenate([high, low[::-1]]),
        fill="toself",
        fillcolor=f"rgba({red},{green},{blue},{opacity})",
        mode="lines",
        line={"width": 0},
        hoverinfo="skip",
        showlegend=False,
    )


def _subtitle(info: Info, seeds: str) -> str:
    words = f"{info['model']}, d_sae {int(info['d_sae']):,}, k {info['k']}, {seeds}"
    size = theme.subtitle(info.get("n_tokens"), info.get("n_documents"), None)
    return f"{words} · held out: {size} · {int(info['n_types']):,} types"
