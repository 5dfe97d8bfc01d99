"""Step time and peak memory of every architecture as ratios to the first (paper Table 3)."""

from collections.abc import Callable, Mapping
from typing import Any

import pandas as pd
import plotly.graph_objects as go

from satlens.plots import theme

NAMES = {
    "transformer": "Transformer",
    "resformer": "ResFormer",
    "satformer": "SATFormer",
    "denseformer": "DenseFormer",
    "muddformer": "MUDDFormer",
    "hyperconnections": "HyperConnections",
}


def ratios(tables: Mapping[str, pd.DataFrame], info: Mapping[str, Any]) -> go.Figure:
    """Two points a model: step time and peak memory over the first model's, with the range over rounds."""
    table = tables["efficiency"].iloc[::-1]
    fig = go.Figure()
    words = {
        "time": "time of a step",
        "memory": "peak memory of the process",
        "saved": "kept for the backward pass",
    }
    for place, (word, said) in enumerate(words.items()):
        if (
            f"{word}_ratio" not in table
        ):  # models so small that they add nothing to what the process holds anyway
            continue
        middle = table[f"{word}_ratio"].to_numpy(dtype=float)
        low, high = (table[f"{word}_{end}"].to_numpy(dtype=float) for end in ("low", "high"))
        fig.add_scatter(
            x=middle,
            y=[NAMES.get(name, name) for name in table["model"]],
            mode="markers",
            name=said,
            marker={"color": theme.QUALITATIVE[place], "size": 11, "symbol": theme.SYMBOLS[place]},
            error_x={"type": "data", "symmetric": False, "array": high - middle, "arrayminus": middle - low},
            hovertemplate="%{y}: %{x:.3f}<extra>" + said + "</extra>",
        )
    fig.add_vline(x=1, line={"color": theme.MUTED, "width": 1, "dash": "dot"})
    fig.update_xaxes(title_text=f"ratio to the {NAMES.get(info['base'], info['base'])} (1 = the same)")
    step = "training step" if info["what"] == "train" else "forward pass"
    return theme.style(
        fig,
        f"What a {step} costs in each architecture",
        f"{info['preset']} size, {info['batch']} tokens, {info['precision']}, {info['device']}, {info['clock']} time; "
        f"bars: range over {info['rounds']} rounds",
        "Each model runs in a process of its own, all of them in turn; a ratio is taken within a round. Points are "
        "medians over rounds. Peak memory is what the process ever held beyond its start (on a CPU a rough number); "
        "what is kept for the backward pass is exact.",
    )


FIGURES: Mapping[str, Callable[..., go.Figure]] = {"ratios": ratios}
