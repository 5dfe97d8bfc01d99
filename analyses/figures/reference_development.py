"""When do gates come to rest on the carried direction, beside the time at which the model learns to copy."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from satlens.plots import theme

Tables = Mapping[str, pd.DataFrame]
Info = Mapping[str, Any]

BESIDE = {"loss": "loss", "induction": "induction", "loss_drop": "induction"}
"""Panels of one number a checkpoint, and the tables they come from; the others are a layer's."""
IN_A_ROW, ROW = 5, 26
"""Runs in a row of the legend at the figures' width, and the row's height in pixels."""
LEAST_TOP = 0.1
"""Top of the induction axis at least: a head that copies comes near 1, and what stays at chance shall look so."""
PANELS = (
    ("loss", "loss on held-out text", "nats per token"),
    ("coupling", "coupling w·b, median gate", "pre-activation"),
    ("duty_median", "duty, median gate", "share of far positions"),
    ("share", "m^ in the stream", "share of its norm"),
    ("induction", "induction: attention to the successor", "largest head's mean"),
    ("loss_drop", "worth of a repeat", "nats per token"),
)
"""Column, title, y axis."""
NAMES = {column: title for column, title, _ in PANELS}


def development(tables: Tables, info: Info) -> go.Figure:
    """Loss, coupling, duty and share of one layer against the step, copying beside them."""
    layer = int(info["layer"])
    gates = tables["development"]
    gates = gates[gates["layer"] == layer]
    fig = make_subplots(
        2, 3, horizontal_spacing=0.09, vertical_spacing=0.17, subplot_titles=[title for _, title, _ in PANELS]
    )
    for number, (column, _, unit) in enumerate(PANELS):
        place = {"row": number // 3 + 1, "col": number % 3 + 1}
        table = tables[BESIDE[column]] if column in BESIDE else gates
        for run in _runs(info):
            _curve(fig, table[table["run"] == run["run"]], column, run, place, number == 0)
        fig.update_yaxes(title_text=unit, **place)
    _step_axes(fig, gates["step"])
    fig.update_yaxes(rangemode="tozero")
    fig.update_yaxes(rangemode="normal", row=1, col=1)  # no loss comes near 0
    _chance(fig, float(info["chance"]), row=2, col=2)
    top = max(LEAST_TOP, 1.06 * float(np.nanmax(theme.floats(tables["induction"]["induction"]))))
    fig.update_yaxes(range=[0, top], row=2, col=2)
    fig.update_annotations(font_size=13)
    interval = theme.has_interval(gates["duty_low"], gates["duty_high"])
    return theme.style(
        fig,
        "When gates come to rest on the carried direction",
        _subtitle(info, f"layer {layer} of {info['n_layers']}", interval),
        f"Every training checkpoint of every run, layer {layer}, against the optimizer step on a logarithmic axis; "
        "step 0, the untrained model, stands at the left edge. Loss is that of the documents that are evaluated. "
        "Coupling is w·b, the gate row times the mean of what it reads, for the median gate: without gate biases it is "
        "the mean pre-activation. Duty is the share of far positions at which the pre-activation is above 0. The share "
        "of m^ is the mean of (x·m^)/|x|. Induction is the largest head's mean attention, in random sequences shown "
        "twice, to the token after the previous occurrence (dotted: attention spread evenly); the worth of a repeat is "
        "the loss of the first showing minus that of the second. A run without attention has patterns, but they are "
        "written nowhere. Thin lines are further seeds. Bands of the lower middle and right panel resample sequences.",
        width=1160,
        height=760,
    ).update_layout(**_legend(len(info["runs"]), 760))  # fmt: skip


def development_layers(tables: Tables, info: Info) -> go.Figure:
    """The same at several depths: one column a layer."""
    gates = tables["development"]
    layers = sorted(gates["layer"].unique())
    layers = [layers[i] for i in np.unique(np.linspace(0, len(layers) - 1, 4).round().astype(int))]
    rows = [panel for panel in PANELS if panel[0] in ("coupling", "duty_median", "share")]
    fig = make_subplots(
        len(rows), len(layers), shared_xaxes=True, shared_yaxes="rows", horizontal_spacing=0.03,
        vertical_spacing=0.06, subplot_titles=[f"layer {layer}" for layer in layers],
    )  # fmt: skip
    for row, (column, title, _) in enumerate(rows, start=1):
        for at, layer in enumerate(layers, start=1):
            for run in _runs(info):
                table = gates[(gates["run"] == run["run"]) & (gates["layer"] == layer)]
                _curve(fig, table, column, run, {"row": row, "col": at}, (row, at) == (1, 1), band=False)
        values = theme.floats(gates.loc[gates["layer"].isin(layers), column])
        ends = (min(0.0, np.nanmin(values)), max(0.0, np.nanmax(values)))
        pad = 0.06 * max(ends[1] - ends[0], 1e-6)
        fig.update_yaxes(range=[ends[0] - pad, ends[1] + pad], row=row)
        fig.update_yaxes(title_text=title, row=row, col=1)
    _step_axes(fig, gates["step"])
    fig.update_xaxes(title_text="")
    fig.update_xaxes(title_text="step", row=len(rows))
    fig.update_annotations(font_size=13)
    return theme.style(
        fig,
        "Coupling, duty and share of the carried direction by depth",
        _subtitle(info, f"{len(layers)} of {info['n_layers']} layers", None),
        "One column a layer, one row a quantity, against the optimizer step (step 0 at the left edge). Intervals are "
        "in the table. Coupling and duty are medians over the layer's gates.",
        width=1160,
        height=860,
    ).update_layout(**_legend(len(info["runs"]), 860))


def order(tables: Tables, info: Info) -> go.Figure:
    """Between which checkpoints each quantity went half its way: what comes first."""
    table = tables["order"]
    still = [name for name, rows in table.groupby("quantity", sort=False) if rows["before"].isna().all()]
    words = ", ".join(NAMES[name].split(":")[0] for name in still)
    where = f"layer {info['layer']} of {info['n_layers']}" + (
        f" · in no run half way: {words}" if still else ""
    )
    runs = [run["run"] for run in _runs(info)][::-1]
    fig = go.Figure()
    for number, column in enumerate(table["quantity"].unique()):
        part = table[(table["quantity"] == column) & table["before"].notna()]
        low, high = (_placed(part[end], tables["development"]["step"]) for end in ("before", "after"))
        height = [runs.index(run) + 0.11 * (number - 2.5) for run in part["run"]]
        colour = theme.QUALITATIVE[number % len(theme.QUALITATIVE)]
        middle = np.sqrt(low * high)
        fig.add_trace(
            go.Scatter(
                x=middle, y=height, mode="markers", name=NAMES[column],
                marker={"color": colour, "symbol": theme.SYMBOLS[number % len(theme.SYMBOLS)], "size": 9},
                error_x={"type": "data", "symmetric": False, "array": high - middle, "arrayminus": middle - low,
                         "color": colour, "thickness": 1.4, "width": 3},
                customdata=np.stack([part["before"], part["after"]], axis=-1),
                hovertemplate=NAMES[column] + "<br>between steps %{customdata[0]:,} and %{customdata[1]:,}"
                "<extra></extra>",
            )
        )  # fmt: skip
    _step_axes(fig, tables["development"]["step"])
    fig.update_yaxes(tickvals=list(range(len(runs))), ticktext=runs, range=[-0.7, len(runs) - 0.3])
    return theme.style(
        fig,
        "What comes first: the checkpoints between which each quantity went half its way",
        _subtitle(info, where, None),
        "For each run and quantity, the last checkpoint before it stayed beyond half of its final change from step 0, "
        "and the one after; the marker stands at their geometric mean. Quantities that end less than "
        f"{info['least_change']['others']} from where they began (the worth of a repeat: "
        f"{info['least_change']['loss_drop']} nats), and copying where attention is off, have no mark. The share of m^ "
        "overshoots early, so its mark says only when it first stayed above.",
        width=1080,
        height=230 + 66 * len(runs),
    )


def _runs(info: Info) -> list[dict[str, Any]]:
    """Runs in the order of the legend, each with the look of its arm."""
    kinds = sorted({run["mlp"] for run in info["runs"]})
    looks = []
    for run in sorted(
        info["runs"], key=lambda r: (kinds.index(r["mlp"]), not r["attention"], str(r["seed"]), r["run"])
    ):
        arm = [r for r in looks if (r["mlp"], r["attention"]) == (run["mlp"], run["attention"])]
        colour = theme.QUALITATIVE[
            (2 * kinds.index(run["mlp"]) + (not run["attention"])) % len(theme.QUALITATIVE)
        ]
        looks.append(
            {**run, "colour": colour, "dash": "solid" if run["attention"] else "dash", "nth": len(arm)}
        )
    return looks  # fmt: skip


def _curve(
    fig: go.Figure, table: pd.DataFrame, column: str, run: Mapping[str, Any], place: dict[str, int], legend: bool,
    band: bool = True,
) -> None:  # fmt: skip
    """One run's line, with its interval as a band where the table has one; seeds after the first are thin."""
    table = table.sort_values("step")
    x, y = _placed(table["step"], table["step"]), theme.floats(table[column])
    low, high = (theme.floats(table[f"{column}_{end}"]) if f"{column}_{end}" in table else np.full(len(y), np.nan)
                 for end in ("low", "high"))  # fmt: skip
    known = np.isfinite(low) & np.isfinite(high)
    if band and known.any():
        fig.add_trace(
            go.Scatter(
                x=np.concatenate([x[known], x[known][::-1]]), y=np.concatenate([high[known], low[known][::-1]]),
                fill="toself", fillcolor=run["colour"], opacity=0.15, mode="lines", line={"width": 0},
                hoverinfo="skip", showlegend=False, legendgroup=run["run"],
            ),
            **place,
        )  # fmt: skip
    width = 2.2 if run["nth"] == 0 else 1.1
    fig.add_trace(
        go.Scatter(
            x=x, y=y, mode="lines+markers", name=_label(run), legendgroup=run["run"], showlegend=legend,
            line={"color": run["colour"], "dash": run["dash"], "width": width},
            marker={"color": run["colour"], "size": 5 if run["nth"] == 0 else 4,
                    "symbol": theme.SYMBOLS[run["nth"] % len(theme.SYMBOLS)]},
            customdata=table["step"], text=theme.interval_texts(low, high),
            hovertemplate=_label(run) + "<br>step %{customdata:,}<br>%{y:.4g} %{text}<extra></extra>",
        ),
        **place,
    )  # fmt: skip


def _label(run: Mapping[str, Any]) -> str:
    words = [str(run["mlp"]), "attention on" if run["attention"] else "attention off"]
    if run["seed"] is not None:
        words.append(f"seed {run['seed']}")
    return ", ".join(words) if run.get("distinct", True) else str(run["run"])


def _placed(steps: Any, among: Any) -> np.ndarray[Any, Any]:
    """Steps on a log axis: step 0 stands half a decade left of the first step after it."""
    values, others = theme.floats(steps), theme.floats(among)
    positive = others[others > 0]
    return np.where(values > 0, values, (positive.min() if positive.size else 1.0) / 3)


def _legend(n_runs: int, height: int) -> dict[str, Any]:
    """Room for the legend between the subtitle and the panels' titles, however many rows it takes."""
    top = 108 + ROW * -(-n_runs // IN_A_ROW)
    return {"margin_t": top, "legend_y": 1 + 26 / (height - top - 64)}


def _chance(fig: go.Figure, value: float, **place: int) -> None:
    fig.add_hline(y=value, line={"color": theme.MUTED, "width": 1, "dash": "dot"}, **place)


def _step_axes(fig: go.Figure, steps: Any) -> None:
    values = np.unique(theme.floats(steps))
    positive = values[values > 0]
    low, high = (positive.min(), positive.max()) if positive.size else (1.0, 10.0)
    decades = range(int(np.ceil(np.log10(low))), int(np.floor(np.log10(high))) + 1)
    at = [10.0**decade for decade in decades] or sorted({low, high})  # all steps may lie within a decade
    words = [f"{value:.0f}" if value < 1000 else f"{value / 1000:.3g}k" for value in at]
    if (values == 0).any():
        at, words = [low / 3, *at], ["0", *words]
    ends = [float(np.log10(min(at[0], low))) - 0.12, float(np.log10(high)) + 0.12]
    fig.update_xaxes(type="log", tickvals=at, ticktext=words, range=ends, title_text="step")


def _subtitle(info: Info, where: str, interval: bool | None) -> str:
    return theme.subtitle(info.get("n_tokens"), info.get("n_documents"), interval, where)


FIGURES = {"development": development, "development_layers": development_layers, "order": order}
