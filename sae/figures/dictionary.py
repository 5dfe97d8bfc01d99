"""How often are a dictionary's latents active, and what does its reconstruction of V1 cost the model?"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from sae.figures.explained import METHODS, first, fve, fve_by_frequency
from satlens.plots import theme

Tables = Mapping[str, pd.DataFrame]
Info = Mapping[str, Any]

FEWEST, DENSEST = 10, 0.005
"""The funnel's first filter (paper, App. C.1): activations at least, share of positions at most."""
EXACT = "pca-stored"
"""The condition that reconstructs V1 without error, which loses nothing: a check, and no point of a log axis."""


def density(tables: Tables, info: Info) -> go.Figure:
    """How often latents are active, with the limits of the first filter, and on how many token types."""
    table = first(tables["density"])
    alive = table[~table["dead"].astype(bool)]
    n_positions = int(info["n_train_tokens"]) + int(info["n_tokens"])
    fig = make_subplots(cols=2, horizontal_spacing=0.1)
    fig.add_trace(_histogram(theme.floats(alive["density"]), 8), row=1, col=1)
    fig.add_trace(_histogram(theme.floats(alive["n_types_seen"]), 4), row=1, col=2)
    share = {10.0**n: f"{10.0 ** (n + 2):g} %" for n in range(-9, 1)}
    whole = {10.0**n: f"{10**n:,}" for n in range(7)}
    panels = [(share, "density of the latent (share of positions)")]
    panels.append((whole, "token types of the text it is active on"))
    for column, (ticks, title) in enumerate(panels, start=1):
        axis = {"tickvals": list(ticks), "ticktext": list(ticks.values()), "title_text": title}
        fig.update_xaxes(type="log", **axis, row=1, col=column)
        fig.update_yaxes(title_text="latents", rangemode="tozero", row=1, col=column)
    limits = {FEWEST / n_positions: f"{FEWEST} activations", DENSEST: f"{100 * DENSEST:g} %"}
    line = {"color": theme.QUALITATIVE[1], "width": 1.4, "dash": "dash"}
    for limit, words in limits.items():
        fig.add_vline(x=limit, line=line, row=1, col=1)
        fig.add_annotation(
            x=float(np.log10(limit)), y=1.0, yref="y domain", yanchor="bottom", text=words, showarrow=False,
            font={"color": theme.QUALITATIVE[1], "size": 11}, row=1, col=1,
        )  # fmt: skip
    few, dense = int((alive["n_active"] < FEWEST).sum()), int((alive["density"] > DENSEST).sum())
    words = f"{len(table):,} latents: {len(table) - len(alive):,} dead, {few:,} under {FEWEST} activations"
    return theme.style(
        fig,
        "How often latents are active, and on how many token types",
        f"{info['model']} · {words}, {dense:,} above {100 * DENSEST:g} % · {n_positions:,} tokens",
        "Left: latents by density, the share of positions of the whole text on which they are active; dead latents, "
        "which no token of the text activates, are not drawn. Dashed: the limits of the funnel's first filter, which "
        "keeps what lies between them. Right: latents by the number of token types they are active on; "
        f"{int((alive['n_types_seen'] == 1).sum()):,} are active on a single one, so they are that token's memory. "
        "Counts are exact: over every token of the text, of the first seed's dictionary.",
        width=980,
        height=430,
    )


def replacement(tables: Tables, info: Info) -> go.Figure:
    """What the model loses when later layers read a reconstruction in place of V1."""
    table = tables["replacement"]
    clean = table[table["condition"] == "clean"].iloc[0]
    rows = table[~table["condition"].isin(["clean", EXACT])].sort_values("delta_nll", ascending=False)
    delta, low, high = (theme.floats(rows[c]) for c in ("delta_nll", "delta_nll_low", "delta_nll_high"))
    low, high = np.where(np.isfinite(low), low, delta), np.where(np.isfinite(high), high, delta)
    drawable = np.concatenate([v[v > 0] for v in (delta, low, high)])
    floor = float(drawable.min()) / 2 if drawable.size else 1e-5
    recovered = theme.floats(rows["loss_recovered"])
    fig = go.Figure(
        go.Scatter(
            x=delta.clip(floor),
            y=[_words(condition) for condition in rows["condition"]],
            mode="markers+text",
            text=[
                f"{100 * r:.2f} % recovered".replace("-", "−") if np.isfinite(r) else "" for r in recovered
            ],
            textposition="top center",
            textfont={"size": 11, "color": theme.MUTED},
            error_x={
                "type": "data",
                "symmetric": False,
                "array": (high - delta).clip(0),
                "arrayminus": (delta.clip(floor) - low.clip(floor)).clip(0),
                "color": theme.QUALITATIVE[0],
                "thickness": 1.4,
                "width": 3,
            },
            marker={
                "color": theme.QUALITATIVE[0],
                "size": 8,
                "symbol": ["circle" if value > 0 else "circle-open" for value in delta],
            },
            customdata=np.stack([delta, theme.floats(rows["perplexity"])], 1),
            hovertemplate="%{y}<br>%{customdata[0]:.5g} nats, PPL %{customdata[1]:.5g}<br>%{text}<extra></extra>",
        )
    )
    ends = np.log10([floor, max(float(high.max(initial=floor)), floor)])
    decades = {10.0**n: f"{10.0**n:g}" for n in range(-9, 4)}
    fig.update_xaxes(
        type="log",
        title_text="NLL, replaced minus unchanged (nats per token)",
        tickvals=list(decades),
        ticktext=list(decades.values()),
        range=[ends[0] - 0.4, ends[1] + 0.4],
    )
    fig.update_yaxes(title_text="read in place of V1", range=[-0.6, len(rows) - 0.2])
    ppl = theme.interval_texts([clean["perplexity_low"]], [clean["perplexity_high"]])[0]
    words = f"{info['model']}, unchanged PPL {clean['perplexity']:.4g} {ppl}".rstrip()
    interval = theme.has_interval(rows["delta_nll_low"], rows["delta_nll_high"])
    return theme.style(
        fig,
        "Loss when later layers read a reconstruction in place of V1",
        theme.subtitle(int(clean["n_tokens"]), int(clean["n_documents"]), interval, words),
        "Every later layer that reads V1 reads a table in its place, looked up by token id. zero: no V1 at all, the "
        "same as every gate shut; mean: one vector for all tokens. Recovered is the share of what zero costs that "
        "the replacement does not cost. No dictionary is fitted on the separators between documents; where they are "
        "kept, they keep their own V1. An open mark stands for no loss, which a logarithmic axis cannot show.",
        width=860,
        height=180 + 42 * max(len(rows), 3),
    )


def _histogram(values: np.ndarray[Any, Any], per_decade: int) -> go.Bar:
    """Counts in bins of equal width on a logarithmic axis."""
    if not len(values):
        return go.Bar(x=[], y=[], showlegend=False)
    ends = np.floor(np.log10(values.min()) * per_decade), np.floor(np.log10(values.max()) * per_decade) + 1
    edges = 10 ** (np.arange(ends[0], ends[1] + 1) / per_decade)
    # a value on an edge belongs above it, whatever the power rounds to
    counts, _ = np.histogram(np.log10(values) * per_decade + 1e-9, np.arange(ends[0], ends[1] + 1))
    return go.Bar(
        x=edges[:-1],
        y=counts,
        width=np.diff(edges),
        offset=0,
        marker={"color": theme.QUALITATIVE[0], "line": {"color": "#ffffff", "width": 0.5}},
        showlegend=False,
        customdata=np.stack([edges[:-1], edges[1:]], 1),
        hovertemplate="%{customdata[0]:.3g} to %{customdata[1]:.3g}: %{y:,} latents<extra></extra>",
    )


def _words(condition: str) -> str:
    method, _, rest = condition.partition(" ")
    name = METHODS.get(method, method)
    return f"{name}, {rest.replace(' separators', ', separators')}" if rest else name


FIGURES = {
    "fve": fve,
    "fve_by_frequency": fve_by_frequency,
    "density": density,
    "replacement": replacement,
}
NEEDS = {
    "fve": "dictionaries",
    "fve_by_frequency": "type_quantiles",
    "density": "density",
    "replacement": "replacement",
}
"""The table that a figure cannot do without."""
