"""Several models on the same tokens: NLL against the first, and held-out loss over training tokens and time."""

from collections.abc import Callable, Mapping
from typing import Any

import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from satlens.plots import theme

Tables = Mapping[str, pd.DataFrame]
Info = Mapping[str, Any]


def delta(tables: Tables, info: Info) -> go.Figure:
    """One row a group: NLL minus the first group's, interval over documents, a tick for every seed."""
    groups = tables["groups"].sort_values("delta_nll", ascending=False)
    models = tables["models"]
    base = float(tables["groups"].iloc[0]["nll"])
    fig = go.Figure()
    middle, low, high = (groups[f"delta_nll{end}"].to_numpy(dtype=float) for end in ("", "_low", "_high"))
    fig.add_scatter(
        x=middle, y=groups["group"], mode="markers", name="mean over seeds",
        marker={"color": theme.QUALITATIVE[0], "size": 10},
        error_x={"type": "data", "symmetric": False, "array": high - middle, "arrayminus": middle - low},
        hovertemplate="%{y}: %{x:.3f} nats<extra></extra>",
    )  # fmt: skip
    fig.add_scatter(
        x=models["nll"] - base, y=models["group"], mode="markers", name="one seed",
        marker={"color": theme.QUALITATIVE[1], "symbol": "line-ns-open", "size": 12},
        hovertemplate="%{y}: %{x:.3f} nats<extra>one seed</extra>",
    )  # fmt: skip
    fig.add_vline(x=0, line={"color": theme.MUTED, "width": 1, "dash": "dot"})
    fig.update_xaxes(title_text=f"NLL minus that of {info['base']} (nats per token; left predicts better)")
    return theme.style(
        fig,
        f"How well each model predicts, against {info['base']}",
        theme.subtitle(
            info["n_tokens"],
            info["n_documents"],
            theme.has_interval(groups["delta_nll_low"], groups["delta_nll_high"]),
        ),
        "All models read the same tokens. Bars: 95 % interval over documents of the mean over seeds, paired to the "
        "first group; ticks: single seeds, which say how much training again would change." + _flags(info),
        height=max(360, 110 + 34 * len(groups)),
    )


def curves(tables: Tables, info: Info) -> go.Figure:
    """Held-out loss against training tokens, and against time in units of the first model's, where it is known."""
    table = tables["curves"]
    timed = bool(table["time"].notna().all())
    fig = make_subplots(1, 2 if timed else 1, shared_yaxes=True, horizontal_spacing=0.06)
    for place, (group, rows) in enumerate(table.groupby("group", sort=False)):
        look = {"color": theme.QUALITATIVE[place % len(theme.QUALITATIVE)]}
        dash = ["solid", "dash", "dot"][place // len(theme.QUALITATIVE) % 3]
        for column, name in enumerate(("tokens", "time") if timed else ("tokens",), start=1):
            mean = rows.groupby("step")[[name, "val_loss"]].mean().sort_index()
            mean = mean[mean.index > 0]
            fig.add_scatter(
                x=mean[name] / 1e6, y=mean["val_loss"], mode="lines", name=str(group), legendgroup=str(group),
                showlegend=column == 1, line={**look, "dash": dash, "width": 2}, row=1, col=column,
                hovertemplate=f"{group}: %{{y:.3f}} nats<extra></extra>",
            )  # fmt: skip
    fig.update_yaxes(title_text="held-out loss (nats per token)", row=1, col=1)
    fig.update_xaxes(title_text="training tokens (millions)", row=1, col=1)
    if timed:
        fig.update_xaxes(title_text=f"time, in millions of {info['base']}'s tokens", row=1, col=2)
        lowest = table.groupby("model")["time"].max().min() / 1e6
        fig.add_vline(x=lowest, line={"color": theme.MUTED, "width": 1, "dash": "dot"}, row=1, col=2)
    words = "equal tokens on the left, equal time on the right" if timed else "equal tokens"
    return theme.style(
        fig,
        "Held-out loss over training",
        f"means over seeds; {words}",
        "From the trainer's own log, on held-out windows. Time is tokens multiplied by the measured step time over the "
        "first model's; the dotted line is where the fastest model ended." + _flags(info)
        if timed
        else "From the trainer's own log, on held-out windows." + _flags(info),
    )


def _flags(info: Info) -> str:
    if not info["unequal"]:
        return " All were trained on the same data in the same order, with the same recipe and seeds."
    return (
        " Not made alike: " + "; ".join(f"{name} ({words})" for name, words in info["unequal"].items()) + "."
    )


FIGURES: Mapping[str, Callable[..., go.Figure]] = {"delta": delta, "curves": curves}
