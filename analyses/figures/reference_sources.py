"""What writes the carried direction, what orders the gates that read it, and whether it is a known direction."""

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from analyses.figures.reference import (
    Info,
    Tables,
    clear_of_titles,
    errors,
    layers,
    line,
    named,
    spread,
    subtitle,
)
from satlens.plots import theme

GREY = "#9aa0ab"


def carried_writes(tables: Tables, info: Info) -> go.Figure:
    """Which writes make the deep mean, and how constant they are along m^ (spec part B: writes, constant share)."""
    writes, constant, n_layers = tables["carried_writes"], tables["carried_constant_share"], info["n_layers"]
    titles = (
        "share of the deepest layer's m",
        "constant share of attention's write",
        "constant share of the MLP's write",
    )
    fig = make_subplots(1, 3, horizontal_spacing=0.085, subplot_titles=titles)
    for index, write in enumerate(("attention", "mlp")):
        part = writes[(writes["write"] == write) & writes["share"].notna()].sort_values("layer")
        _bars(fig, part, write, index)
    for col, write in ((2, "attention"), (3, "mlp")):
        for index, channel, name in ((2, "along", "along m^"), (6, "orthogonal", "orthogonal to m^")):
            part = constant[(constant["write"] == write) & (constant["channel"] == channel)].sort_values(
                "layer"
            )
            theme.series(
                fig, part["layer"], part["constant_share"], part["low"], part["high"], name, index,
                place={"row": 1, "col": col}, showlegend=col == 2,
            )  # fmt: skip
        layers(fig, n_layers, 1, col)
        theme.zero_line(fig, row=1, col=col)
    layers(fig, n_layers, 1, 1)
    theme.zero_line(fig, row=1, col=1)
    fig.update_yaxes(title_text="mean write · m^ / |m|", tickformat=".0%", row=1, col=1)
    fig.update_yaxes(title_text="even · odd means / mean square", row=1, col=2)
    fig.update_yaxes(matches="y2", row=1, col=3)
    fig.update_annotations(font_size=13)
    styled = theme.style(
        fig,
        "What writes the carried direction",
        subtitle(info, writes, "share"),
        f"Left: how much of the mean stream at layer {n_layers - 1} each block's mean write supplies along it (with "
        "the embeddings the shares add up to 1 where blocks add their writes); the hatched part is parameters alone, "
        "output biases and W_O b_V. Middle and right: (mean over even documents · mean over odd documents) / mean "
        "square of each write, along the writing layer's m^ and orthogonal to it: 1 is a write that is the same "
        "everywhere.",
        width=1100,
        height=440,
    )
    return clear_of_titles(styled)


def carried_rank(tables: Tables, info: Info) -> go.Figure:
    """What orders gates by duty: the resting term, random directions at its norm, the read norm, the bias."""
    rank, parameter = tables["carried_rank"], tables["carried_parameter_share"]
    known = parameter[parameter["share"].notna()]
    drawn = bool(theme.floats(known["share"]).any())
    titles = ("what orders duty over gates", "share of b that is parameters")
    fig = make_subplots(1, 1 + drawn, horizontal_spacing=0.1, subplot_titles=titles[: 1 + drawn])
    for index, (predictor, name) in enumerate(
        (("resting", "resting term"), ("read norm", "read norm |w| alone"), ("bias", "bias alone"))
    ):
        part = rank[(rank["predictor"] == predictor) & rank["rho"].notna()].sort_values("layer")
        if len(part):
            line(fig, part, "rho", name, index, 1, 1, legend=True)
    random = rank[rank["predictor"] == "random"]
    fig.add_trace(
        go.Scatter(
            x=random["layer"], y=random["rho"], mode="markers", name="random directions at the norm of b",
            marker={"color": GREY, "size": 5, "opacity": 0.7},
            hovertemplate="random direction<br>layer %{x}<br>%{y:.3g}<extra></extra>",
        ),
        row=1, col=1,
    )  # fmt: skip
    if drawn:
        line(fig, known, "share", "all constants on the path", 4, 1, 2, legend=True)
        blank = np.full(len(known), np.nan)
        theme.series(
            fig, known["layer"], known["norm_bias_share"], blank, blank, "the norm's bias alone", 5,
            place={"row": 1, "col": 2},
        )  # fmt: skip
        fig.update_yaxes(title_text="b_param · b / |b|²", tickformat=".0%", row=1, col=2)
        theme.zero_line(fig, row=1, col=2)
    for col in range(1, 2 + drawn):
        layers(fig, info["n_layers"], 1, col)
    fig.update_yaxes(title_text="Spearman correlation", range=[-1.05, 1.05], zeroline=True, row=1, col=1)
    fig.update_annotations(font_size=13)
    styled = theme.style(
        fig,
        "What orders the gates" + (", and what of the reference is parameters" if drawn else ""),
        subtitle(info, rank, "rho"),
        "Left: rank correlation, over a layer's gates, of duty with what might order it; ties share their ranks. "
        f"Random directions are orthogonal to b and as long. {_parameter_words(parameter, drawn)}",
        width=1040,
        height=450,
    )
    return clear_of_titles(styled)


def _parameter_words(parameter: pd.DataFrame, drawn: bool) -> str:
    if drawn:
        return (
            "Right: the input-independent part of b, every output bias, W_O b_V and the layer's own attention "
            "included, through the norm that the gate really reads."
        )
    if parameter["share"].notna().any():
        return "No constant lies on the path to the gates, so no part of b is parameters alone."
    return f"What part of b is parameters alone is unknown: {parameter['reason'].iloc[0]}."


DIRECTIONS = {
    "read mean": "read mean b (control)",
    "first token": "first token",
    "sink": "first 16 positions",
    "massive": "massive coordinates",
    "outlier": "outlier dimensions",
}
METRICS = {"covariance": "in the covariance", "jaccard": "top-20 overlap"}


def carried_geometry(tables: Tables, info: Info) -> go.Figure:
    """m^ against known directions, each metric beside its null (spec part B: geometry)."""
    table = tables["carried_geometry"]
    table = table[(table["metric"] != "energy")]
    depths, metrics = spread(sorted(table["layer"].unique()), 4), list(dict.fromkeys(table["metric"]))
    directions = list(dict.fromkeys(table["direction"]))
    fig = make_subplots(
        1,
        len(depths),
        shared_yaxes=True,
        horizontal_spacing=0.02,
        subplot_titles=[f"layer {layer}" for layer in depths],
    )
    for col, layer in enumerate(depths, start=1):
        part = table[table["layer"] == layer]
        values = part.pivot(index="direction", columns="metric", values="value").loc[directions, metrics]
        null = part.pivot(index="direction", columns="metric", values="null_95").loc[directions, metrics]
        above = np.abs(values.to_numpy()) > null.to_numpy()
        text = [
            ["–" if np.isnan(v) else f"{v:.2f}{'*' if a else ''}" for v, a in zip(*pair, strict=True)]
            for pair in zip(values.to_numpy(), above, strict=True)
        ]
        fig.add_trace(
            go.Heatmap(
                z=values, x=[_metric(name) for name in metrics], y=[DIRECTIONS[name] for name in directions],
                zmin=-1, zmax=1, colorscale=theme.DIVERGING, xgap=1, ygap=1, text=text, texttemplate="%{text}",
                textfont={"size": 10}, showscale=col == len(depths),
                colorbar={"title": {"text": "similarity", "side": "top"}, "thickness": 14, "outlinewidth": 0},
                customdata=null, hovertemplate="%{y}, %{x}<br>%{z:.3f}, null 95 %: %{customdata:.3f}<extra></extra>",
            ),
            row=1, col=col,
        )  # fmt: skip
    fig.update_annotations(font_size=13)
    fig.update_xaxes(tickangle=-50, showgrid=False)
    fig.update_yaxes(autorange="reversed", showgrid=False)
    return theme.style(
        fig,
        "Is the carried direction a known one?",
        theme.subtitle(
            info["n_tokens"], info["n_documents"], None, named(info), "* above the null's 95th percentile"
        ),
        "Similarity of m^ to the mean of what the gate reads (a positive control), the mean first token, the mean of "
        "the first 16 positions, the massive coordinates of the first token and the outlier dimensions of the last "
        "stream. Metrics: cosine; cosine in the stream's covariance; cosine within its 8, 32, ... leading principal "
        "components; overlap of the 20 largest coordinates. The null is the same metric between single positions' "
        "deviations from the mean in 16 documents, every two of them.",
        width=max(760, 260 + 250 * len(depths)),
        height=440,
    )


def _metric(name: str) -> str:
    return METRICS.get(name, name.replace("top ", "in PCs 1–"))


def _bars(fig: go.Figure, part: pd.DataFrame, write: str, index: int) -> None:
    """Bars of a write's share with error bars; hatched over them, what of it is parameters."""
    colour = theme.QUALITATIVE[index]
    offset = (index - 0.5) * 0.4
    layer, share = theme.floats(part["layer"]) + offset, theme.floats(part["share"])
    fig.add_trace(
        go.Bar(
            x=layer, y=share, width=0.36, name="MLP" if write == "mlp" else write, marker={"color": colour},
            error_y=errors(part, "share", theme.INK),
            hovertemplate=f"{write}<br>layer %{{customdata}}<br>%{{y:.1%}}<extra></extra>", customdata=part["layer"],
        ),
        row=1, col=1,
    )  # fmt: skip
    constant = theme.floats(part["constant_share"])
    if np.nanmax(np.abs(constant), initial=0.0) > 0:
        fig.add_trace(
            go.Bar(
                x=layer, y=constant, width=0.36, name="parameters alone", legendgroup="parameters",
                showlegend=index == 0,
                marker={"color": "rgba(0,0,0,0)", "line": {"color": theme.INK, "width": 1},
                        "pattern": {"shape": "/", "fgcolor": theme.INK, "size": 5}},
                hovertemplate="parameters alone<br>%{y:.1%}<extra></extra>",
            ),
            row=1, col=1,
        )  # fmt: skip
    fig.update_layout(barmode="overlay")


FIGURES = {
    "carried_writes": carried_writes,
    "carried_rank": carried_rank,
    "carried_geometry": carried_geometry,
}
NEEDS: dict[str, tuple[str, ...]] = {
    "carried_writes": ("carried_constant_share",),
    "carried_geometry": ("carried_geometry",),
}
"""Tables without which a figure is left out: what fewer than two documents cannot give."""
