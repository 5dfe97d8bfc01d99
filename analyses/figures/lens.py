"""At which depth is the next token readable, and where does one model overtake the other (paper Figure 5)."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from satlens.plots import theme

Tables = Mapping[str, pd.DataFrame]
Info = Mapping[str, Any]


def fig5_lens(tables: Tables, info: Info) -> go.Figure:
    """Logit-lens perplexity by layer for one or two models on the same tokens, with the crossover if any."""
    table = tables["lens"]
    n_layers = int(table["layer"].max()) + 1
    names = _models(table, info)
    fig = go.Figure()
    for index, name in enumerate(names):
        rows = table[table["model"] == name].sort_values("layer")
        theme.series(fig, rows["layer"], rows["perplexity"], rows["low"], rows["high"], name, index)
    theme.layer_axis(fig, n_layers, "layer behind which the stream is read")
    ends = [*theme.floats(table["perplexity"]), *theme.floats(table["low"]), *theme.floats(table["high"])]
    theme.log_axis(fig, ends, "perplexity (log scale)")
    theme.grey_layer_zero(fig, label="")
    words = _mark_crossover(fig, tables) if len(names) > 1 else ""
    return theme.style(
        fig,
        "Perplexity read from the residual stream after each layer",
        _subtitle(info, table, "low", "high", *([words] if words else [])),
        "The final norm and the unembedding are applied to the residual stream after each layer, and the "
        "perplexity of the next token is taken. The last layer is the model's own perplexity. Layer 0, "
        "shaded, produces V1."
        + (" Both models see the same tokens." if len(names) > 1 else "")
        + _rule(tables, len(names)),
    )


def difference(tables: Tables, info: Info) -> go.Figure:
    """NLL of the model minus NLL of its baseline, by layer, paired on the same tokens."""
    table = tables["lens_difference"].sort_values("layer")
    n_layers = int(table["layer"].max()) + 1
    model, baseline = info["model"], info.get("baseline") or "baseline"
    fig = go.Figure()
    theme.series(
        fig, table["layer"], table["delta_nll"], table["low"], table["high"], f"{model} minus {baseline}",
        unit=" nats", showlegend=False,
    )  # fmt: skip
    theme.zero_line(fig)
    theme.layer_axis(fig, n_layers, "layer behind which the stream is read")
    fig.update_yaxes(title_text=f"NLL, {model} minus {baseline}<br>(nats per token)")
    theme.grey_layer_zero(fig, label="")
    delta = theme.floats(table["delta_nll"])
    if (delta > 0).any():
        theme.side_label(fig, f"{baseline} predicts better", above=True)
    if (delta < 0).any():
        theme.side_label(fig, f"{model} predicts better", above=False)
    words = _mark_crossover(fig, tables)
    return theme.style(
        fig,
        "Difference of the two models by depth",
        _subtitle(info, table, "low", "high", *([words] if words else [])),
        f"Logit-lens NLL of {model} minus that of {baseline} on the same tokens. Below 0, {model} predicts "
        "better from "
        "that depth. The band is paired: both models are resampled on the same documents." + _rule(tables, 2),
    )


def _mark_crossover(fig: go.Figure, tables: Tables) -> str:
    """Draw the crossover with its interval and say it in words; empty when it was not measured."""
    if "crossover" not in tables or tables["crossover"].empty:
        return ""
    row = tables["crossover"].iloc[0]
    share = row["share_of_resamples_with_crossover"]
    if pd.isna(row["layer"]):
        return "no crossover" + (
            "" if pd.isna(share) else f" (there is one in {100 * share:.0f} % of resamples)"
        )
    layer, low, high = (float(row[key]) if pd.notna(row[key]) else np.nan for key in ("layer", "low", "high"))
    if np.isfinite(low) and np.isfinite(high):
        fig.add_vrect(
            x0=low - 0.12,
            x1=high + 0.12,
            fillcolor=theme.QUALITATIVE[4],
            opacity=0.16,
            line_width=0,
            layer="below",
        )
    fig.add_vline(
        x=layer,
        line={"color": theme.INK, "width": 1.2, "dash": "dash"},
        annotation={"text": "crossover", "yref": "y domain", "y": 0.98, "yanchor": "top", "textangle": -90},
        annotation_position="top right",
    )
    ends = theme.interval_texts([low], [high])[0]
    return f"crossover at layer {layer:g} {ends}".rstrip() + (
        "" if pd.isna(share) else f", found in {100 * share:.0f} % of resamples"
    )


def _rule(tables: Tables, n_models: int) -> str:
    if n_models < 2 or "crossover" not in tables or tables["crossover"].empty:
        return ""
    rule = tables["crossover"].iloc[0]["rule"]
    return "" if pd.isna(rule) else f" Crossover: {str(rule).rstrip('.')}. The shaded strip is its interval."


def _models(table: pd.DataFrame, info: Info) -> list[str]:
    """The model first, its baseline second, whatever order the table has."""
    names = list(dict.fromkeys(table["model"].astype(str)))
    return sorted(names, key=lambda name: (name != info["model"], names.index(name)))


def _subtitle(info: Info, table: pd.DataFrame, low: str, high: str, *words: str) -> str:
    n_tokens, n_documents = info.get("n_tokens"), info.get("n_documents")
    if n_tokens is None and "n_tokens" in table:
        n_tokens, n_documents = int(table["n_tokens"].iloc[0]), int(table["n_documents"].iloc[0])
    return theme.subtitle(n_tokens, n_documents, theme.has_interval(table[low], table[high]), *words)


FIGURES = {"fig5_lens": fig5_lens, "difference": difference}
