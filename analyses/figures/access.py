"""How much first-layer value reaches layer n, beside the layer's own values, in models that mix them differently."""

from collections.abc import Mapping
from typing import Any

import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from satlens.plots import theme

Tables = Mapping[str, pd.DataFrame]
Info = Mapping[str, Any]


def access(tables: Tables, info: Info) -> go.Figure:
    """Relative coefficient and share of length of V1 by layer, one curve a model."""
    table = tables["access"]
    panels = [("coefficient", "low", "high"), ("share", "share_low", "share_high")]
    fig = make_subplots(cols=2, horizontal_spacing=0.12)
    for index, name in enumerate(info["models"]):
        rows = table[table["model"] == name].sort_values("layer")
        words = f"{name} ({rows['gate'].iloc[0]} gate)"
        for column, (value, low, high) in enumerate(panels, start=1):
            theme.series(
                fig, rows["layer"], rows[value], rows[low], rows[high], words, index,
                place={"row": 1, "col": column}, showlegend=column == 1,
            )  # fmt: skip
    for column in (1, 2):
        theme.layer_axis(fig, int(info["n_layers"]), "layer n", most=12, row=1, col=column)
    theme.zero_line(fig, row=1, col=1)
    fig.update_yaxes(
        title_text="coefficient of V1 relative to own values<br>(mean c1 / mean c2)", row=1, col=1
    )
    fig.update_yaxes(
        title_text="share of the values' length that is V1's<br>(mean of |c1 V1| / (|c1 V1| + |c2 V|))",
        range=[0, 1.02],
        tickformat=".0%",
        row=1,
        col=2,
    )
    theme.grey_layer_zero(fig, label="")
    interval = theme.has_interval(table["share_low"], table["share_high"])
    return theme.style(
        fig,
        "How much first-layer value reaches each layer",
        theme.subtitle(info.get("n_tokens"), info.get("n_documents"), interval),
        "A layer attends to c1 V1 + c2 V, where V are its own values. Left: the mean of c1 over that of c2; c1 is a "
        "SATFormer's gate alpha, with c2 = 1, or a ResFormer's lambda_1, with c2 = lambda_2. Right: how much of the "
        "summed length of the two parts is V1's, averaged over positions and KV heads; a large coefficient on short "
        "values is little. A learned constant has no interval on the left. Layer 0, shaded, produces V1.",
        width=1040,
        height=470,
    )


FIGURES = {"access": access}
