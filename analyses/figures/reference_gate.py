"""Where both papers meet: the carried direction at SATFormer's own gate; and what one clean pass predicts of doses."""

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from analyses.figures.reference_parts import Info, Tables, panels, titled_panels
from satlens.plots import theme

MODELS = {
    ("gaussian", "rescaled"): ("Gaussian shape", "dash"),
    ("empirical", "rescaled"): ("each gate's own shape", "solid"),
    ("empirical", "held"): ("own shape, norm held", "dot"),
}
"""(shape, norm) -> name and dash of the predictions that are drawn."""
LEVELS = {"duty": "on duty", "firing": "firing above 0.5"}
COSTS = {
    "removed": "m^ removed",
    "removed for the gate": "m^ removed, seen by the gate alone",
    "zeroed": "gate closed",
}


GATES_CAPTION = (
    "m^ is removed at each layer's input in turn, where SATFormer's attention norm reads it. Left: share "
    "of (position, KV head) pairs whose gate alpha is above 0 at that layer. Middle: share of (position, "
    "MLP gate) pairs with a pre-activation above 0 at the same layer. If m^ held a kind of gate shut, "
    "removing it would open them: blue above black, and outside the grey range of equally long moves along "
    "random directions. Right: perplexity (logarithmic axis; the line is the clean model's) when the whole layer "
    "sees the removal, when only the gate's own projection does, and when the gate is closed instead (alpha = "
    "0). Layer 0, shaded, produces V1 and has no gate."
)


def two_gates(tables: Tables, info: Info) -> go.Figure:
    """Open gates of both papers with and without the carried direction, and what that and a closed gate cost."""
    table = tables["gate"]
    n_layers = info["n_layers"]
    titles = ("SATFormer's gate: alpha above 0", "MLP gates: on duty", "what it costs")
    fig = make_subplots(1, 3, horizontal_spacing=0.08, subplot_titles=titles)
    removed = table[table["kind"] == "removed"].sort_values("layer")
    controls = table[table["kind"] == "matched"]
    for col, (name, delta) in enumerate((("open", "delta_open"), ("duty", "delta_duty")), start=1):
        place, clean = {"row": 1, "col": col}, theme.floats(removed[f"{name}_clean"])
        _control_band(fig, controls, name, place, col == 1)
        theme.series(
            fig, removed["layer"], clean, [None] * len(removed), [None] * len(removed), "clean", 6, place=place,
            showlegend=col == 1,
        )  # fmt: skip
        ends = [clean + theme.floats(removed[f"{delta}_{end}"]) for end in ("low", "high")]
        theme.series(
            fig, removed["layer"], removed[name], *ends, COSTS["removed"], 0, place=place, showlegend=col == 1
        )
        fig.update_yaxes(range=[0, 1.02], tickvals=[0, 0.25, 0.5, 0.75, 1], tickformat=".0%", **place)
    _costs(fig, table, {"row": 1, "col": 3})
    for col in (1, 2, 3):
        theme.layer_axis(fig, n_layers, most=12, row=1, col=col)
    fig.update_yaxes(title_text="share of positions and gates", row=1, col=1)
    theme.grey_layer_zero(fig, label="")
    fig = theme.style(
        fig,
        "Does removing the carried direction open the gates, and what does it cost?",
        theme.subtitle(
            info["n_tokens"],
            info["n_documents"],
            theme.has_interval(removed["delta_open_low"], removed["delta_open_high"]),
            info["model"],
        ),
        GATES_CAPTION,
        width=1180,
        height=470,
    )  # fmt: skip
    return titled_panels(fig)


def _costs(fig: go.Figure, table: pd.DataFrame, place: dict[str, int]) -> None:
    """Perplexity of each change of a layer, above the line of the clean model's."""
    clean = float(table["perplexity_clean"].iloc[0])
    shown = []
    for index, kind in enumerate(COSTS):
        part = table[table["kind"] == kind].sort_values("layer")
        values, low, high = (clean + theme.floats(part[f"delta_ppl{end}"]) for end in ("", "_low", "_high"))
        shown += [values, low, high]
        if len(part):
            theme.series(
                fig, part["layer"], values, low, high, COSTS[kind], index, place=place,
                showlegend=kind != "removed", bars=True, offset=0.12 * (index - 1),
            )  # fmt: skip
    fig.add_hline(y=clean, line={"color": theme.INK, "width": 1.2}, **place)
    theme.log_axis(fig, np.concatenate([*shown, [clean]]), "perplexity", **place)


def prediction(tables: Tables, info: Info) -> go.Figure:
    """Predicted doses over measured ones: MLP gates."""
    return _prediction(tables, info, "mlp", "MLP gates")


def prediction_own_gate(tables: Tables, info: Info) -> go.Figure:
    """Predicted doses over measured ones: SATFormer's own gate."""
    return _prediction(tables, info, "value", "SATFormer's own gate")


PREDICTION_CAPTION = (
    "Points: measured share of (gate, far position) pairs when the projection on m^ is multiplied by alpha; open where "
    "the solid line misses the interval. Lines: the location-scale model, which moves each gate's mean and spread as "
    "its coupling to m^ says and keeps its shape, Gaussian or its own histogram; norm held, as if the norm divided by "
    "what it did before the dose. The model leaves out how the layer's attention answers the dose. Crosses show the "
    "doses measured without that answer (added behind attention; not for SATFormer's own gate, which reads the stream "
    "before it): where they lie on the line and the points do not, attention's answer is what the model lacks; where "
    "they miss it too, shape or scale change, or the documents differ from those it was predicted from (--same-docs "
    "tells them apart)."
)


def _prediction(tables: Tables, info: Info, kind: str, words: str) -> go.Figure:
    table = tables["prediction"]
    table = table[table["kind"] == kind]
    layers = panels(table["layer"])
    levels = LEVELS if kind == "mlp" else {"duty": "open (alpha above 0)"}
    titles = [f"layer {layer}" for layer in layers] + [""] * (len(layers) * (len(levels) - 1))
    fig = make_subplots(
        len(levels), max(1, len(layers)), shared_xaxes="all", shared_yaxes="rows", horizontal_spacing=0.02,
        vertical_spacing=0.07, subplot_titles=titles or ("no gate of this kind was predicted",),
    )  # fmt: skip
    for row, (level, title) in enumerate(levels.items(), start=1):
        for col, layer in enumerate(layers, start=1):
            part = table[(table["level"] == level) & (table["layer"] == layer)].sort_values("alpha")
            place, legend = {"row": row, "col": col}, row == col == 1
            for index, ((shape, norm), (name, dash)) in enumerate(MODELS.items(), start=1):
                _predicted(
                    fig,
                    part[(part["shape"] == shape) & (part["norm"] == norm)],
                    name,
                    dash,
                    index,
                    place,
                    legend,
                )
            best = part[(part["shape"] == "empirical") & (part["norm"] == "rescaled")]
            if kind == "mlp":
                _attention_held(fig, best[best["alpha"] != 1], place, legend)
            outside = (best["predicted"] < best["low"]) | (best["predicted"] > best["high"])
            for missed, words_ in ((False, "measured"), (True, "measured, solid line outside its interval")):
                _measured(fig, best[outside == missed], words_, missed, place, legend)
        fig.update_yaxes(title_text=f"share {title}", row=row, col=1)
    fig.update_yaxes(rangemode="tozero")
    fig.update_xaxes(tickvals=sorted(set(table["alpha"])))
    fig.update_xaxes(title_text="alpha (0 removes m^)", row=len(levels))
    fig = theme.style(
        fig,
        f"Predicted from one clean pass, and measured: {words}",
        theme.subtitle(
            info["n_tokens"],
            info["n_documents"],
            theme.has_interval(table["low"], table["high"]),
            info["model"],
            "predicted from other documents" if not info["same_documents"] else "predicted from the same documents",
        ),
        PREDICTION_CAPTION,
        width=max(640, 140 + 250 * len(layers)),
        height=220 + 230 * len(levels),
    )  # fmt: skip
    return titled_panels(fig)


def _predicted(
    fig: go.Figure, part: pd.DataFrame, name: str, dash: str, index: int, place: dict[str, int], legend: bool
) -> None:  # fmt: skip
    fig.add_trace(
        go.Scatter(
            x=part["alpha"], y=part["predicted"], mode="lines", name=name, legendgroup=name, showlegend=legend,
            line={"color": theme.QUALITATIVE[index], "width": 1.8, "dash": dash},
            hovertemplate=f"{name}<br>alpha %{{x}}<br>%{{y:.4g}}<extra></extra>",
        ),
        **place,
    )  # fmt: skip


def _measured(
    fig: go.Figure, part: pd.DataFrame, name: str, missed: bool, place: dict[str, int], legend: bool
) -> None:  # fmt: skip
    """Measured points with intervals; open where the best model's line misses the interval."""
    values, low, high = (theme.floats(part[column]) for column in ("measured", "low", "high"))
    fig.add_trace(
        go.Scatter(
            x=part["alpha"] if len(part) else [None], y=values if len(part) else [None], mode="markers", name=name,
            legendgroup=name, showlegend=legend, text=theme.interval_texts(low, high),
            marker={"color": theme.INK, "size": 8, "symbol": "circle-open" if missed else "circle",
                    "line": {"width": 2}},
            error_y={"type": "data", "symmetric": False, "array": high - values, "arrayminus": values - low,
                     "color": theme.INK, "thickness": 1.2, "width": 3},
            hovertemplate="measured<br>alpha %{x}<br>%{y:.4g} %{text}<extra></extra>",
        ),
        **place,
    )  # fmt: skip


def _attention_held(fig: go.Figure, part: pd.DataFrame, place: dict[str, int], legend: bool) -> None:
    """What the doses do when the layer's attention cannot answer them: what the model claims to predict."""
    fig.add_trace(
        go.Scatter(
            x=part["alpha"], y=part["attention_held"], mode="markers", name="measured, attention held",
            legendgroup="held", showlegend=legend, marker={"color": theme.QUALITATIVE[0], "size": 9, "symbol": "x-thin",
                                                           "line": {"color": theme.QUALITATIVE[0], "width": 2}},
            text=theme.interval_texts(part["attention_held_low"], part["attention_held_high"]),
            hovertemplate="attention held<br>alpha %{x}<br>%{y:.4g} %{text}<extra></extra>",
        ),
        **place,
    )  # fmt: skip


def _control_band(
    fig: go.Figure, controls: pd.DataFrame, name: str, place: dict[str, int], legend: bool
) -> None:
    """The range of the matched controls at each layer."""
    found = controls.groupby("layer")[name].agg(["min", "max"]).sort_index()
    fig.add_trace(
        go.Scatter(
            x=[*found.index, *found.index[::-1]], y=[*found["max"], *found["min"][::-1]], fill="toself", mode="lines",
            line={"width": 0}, fillcolor="rgba(92,99,112,0.25)", hoverinfo="skip", name="matched random directions",
            legendgroup="controls", showlegend=legend,
        ),
        **place,
    )  # fmt: skip


FIGURES = {"two_gates": two_gates, "prediction": prediction, "prediction_own_gate": prediction_own_gate}
NEEDS = {"two_gates": {"gate"}, "prediction": {"prediction"}, "prediction_own_gate": {"prediction", "gate"}}
