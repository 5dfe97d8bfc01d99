"""Where both papers meet at rest: what SATFormer's own gates rest on, and how often they are open."""

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from analyses.figures.reference import Info, Tables, errors, subtitle
from satlens.plots import theme


def carried_value_gates(tables: Tables, info: Info) -> go.Figure:
    """SATFormer's own gates: what each head rests on, and how often it is open (the bridge between the papers)."""
    table = tables["carried_value_gates"]
    n_layers, n_heads = info["n_layers"], int(table["kv_head"].max()) + 1
    fig = make_subplots(
        1, 3, horizontal_spacing=0.13,
        subplot_titles=("resting logit W_alpha·b", "duty: share of positions open", "duty = 1 − share of zeros"),
    )  # fmt: skip
    for col, column in ((1, "resting"), (2, "duty")):
        values = np.full((n_layers, n_heads), np.nan)
        values[table["layer"], table["kv_head"]] = table[column]
        trace = theme.heatmap(values, "", diverging=column == "resting")
        trace.colorbar = {"thickness": 12, "outlinewidth": 0, "len": 0.9, "x": (0.255, 0.63)[col - 1]}
        fig.add_trace(trace, row=1, col=col)
        fig.update_xaxes(title_text="KV head", showgrid=False, row=1, col=col)
        at = theme.ticks(n_layers)
        fig.update_yaxes(range=[-0.5, n_layers - 0.5], tickvals=at, showgrid=False, row=1, col=col)
        fig.add_hrect(y0=-0.5, y1=0.5, fillcolor=theme.GREYED, line_width=0, layer="below", row=1, col=col)
    fig.update_yaxes(title_text="layer", row=1, col=1)
    bars = errors(table, "duty", theme.MUTED)
    fig.add_trace(
        go.Scatter(
            x=table["resting"], y=table["duty"], mode="markers", error_y=bars, showlegend=False,
            marker={"color": table["layer"], "colorscale": theme.SEQUENTIAL, "cmin": 0, "cmax": n_layers - 1, "size": 8,
                    "line": {"color": theme.INK, "width": 0.7}},
            text=[f"layer {a}, head {b}" for a, b in zip(table["layer"], table["kv_head"], strict=True)],
            hovertemplate="%{text}<br>resting %{x:.3g}<br>duty %{y:.1%}<extra></extra>",
        ),
        row=1, col=3,
    )  # fmt: skip
    fig.update_xaxes(title_text="resting logit", zeroline=True, zerolinecolor=theme.INK, row=1, col=3)
    fig.update_yaxes(title_text="duty", range=[-0.03, 1.03], tickformat=".0%", row=1, col=3)
    fig.update_annotations(font_size=13)
    return theme.style(
        fig,
        "What SATFormer's own gates rest on",
        subtitle(info, table, "duty"),
        "The gate's logit is linear in what it reads, so its mean is exactly W_alpha·b, b the mean output of the "
        "attention norm. Duty is the share of far positions with a logit above 0: for a ReLU gate "
        f"(this one is {info.get('value_gate')}), 1 − duty is its share of exact zeros. Points are darker in deeper "
        "layers. Layer 0 produces V1 and has no gate.",
        width=1100,
        height=440,
    )


FIGURES = {"carried_value_gates": carried_value_gates}
NEEDS = {"carried_value_gates": ("carried_value_gates",)}
"""Tables without which a figure is left out: only SATFormer has gates of its own."""
