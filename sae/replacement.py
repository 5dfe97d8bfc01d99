"""What does the model lose when later layers read a reconstruction in place of V1, and how much of V1's worth is kept?

V1 is replaced where it is read (role ``first_value`` of every mixing layer), never where layer 0 uses its own values,
and at every position, separators included: what is tried is a table to look V1 up in by token id. Tables of zeros (no
V1, the same as every gate shut) and of one mean vector (V1 without the token) give the scale.

``loss recovered = (NLL_zero - NLL_made) / (NLL_zero - NLL_clean)``: 1 loses nothing, 0 is as bad as no V1.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from sae.variance import weighted_mean
from satlens.accumulators import NllByDocument
from satlens.bootstrap import Interval, Weights, delta_interval, perplexity_interval, statistic_interval
from satlens.errors import UserError
from satlens.interventions import Edit
from satlens.reading import Reading, Subject, measure
from satlens.sites import Sites
from satlens.stream import CLEAN, Condition
from satlens.tokens import Batch

ROLE = "first_value"
ZERO, MEAN = "zero", "mean"


@dataclass(frozen=True, kw_only=True)
class Losses:
    """NLL summed by document, clean and with each table in V1's place, on the same predictions."""

    clean: np.ndarray
    count: np.ndarray
    """Scored predictions of each document."""
    replaced: Mapping[str, np.ndarray]


def readers(sites: Sites) -> tuple[int, ...]:
    """Layers that read V1; none in a plain Transformer, where replacing V1 for later layers means nothing."""
    return tuple(layer for layer in sites.layers(ROLE) if layer > 0)


def replace_v1(sites: Sites, table: Float[Tensor, "d_vocab d_in"]) -> tuple[Edit, ...]:
    """Edits that let every layer that reads V1 read ``table`` in its place, by token id.

    Raises:
        UserError: the model has no such layer, or the table is not of its vocabulary and width.
    """
    if not (layers := readers(sites)):
        raise UserError(f"no layer of this {sites.architecture} reads V1, so there is nothing to replace")
    if tuple(table.shape) != (wanted := (sites.d_vocab, sites.n_kv_heads * sites.d_head)):
        raise UserError(
            f"a table of shape {list(table.shape)} cannot stand for V1: this model needs {list(wanted)}"
        )
    return tuple(Edit(role=ROLE, layer=layer, apply=_looked_up(table)) for layer in layers)


def scale_tables(
    rows: Float[Tensor, "d_vocab d_in"], weights: Tensor
) -> dict[str, Float[Tensor, "d_vocab d_in"]]:
    """The two ends that every reconstruction stands between: no V1, and V1's mean, whatever the token."""
    mean = weighted_mean(rows, weights).to(rows.dtype)
    return {ZERO: torch.zeros_like(rows), MEAN: mean.expand_as(rows).contiguous()}


def measure_losses(
    subject: Subject, corpus: Any, tables: Mapping[str, Float[Tensor, "d_vocab d_in"]], reading: Reading
) -> Losses:
    """One pass over the text with V1 as it is and with each of ``tables`` in its place."""
    edits = {CLEAN: (), **{name: replace_v1(subject.sites, table) for name, table in tables.items()}}
    conditions = [_condition(name, edit, corpus.n_documents) for name, edit in edits.items()]
    measure(subject, corpus, conditions, reading, "V1 replaced")
    sums = {condition.name: condition.accumulators[0] for condition in conditions}
    clean = sums.pop(CLEAN)
    return Losses(
        clean=clean.nll.numpy(),
        count=clean.count.numpy(),
        replaced={name: documents.nll.numpy() for name, documents in sums.items()},
    )


def replacement_table(losses: Losses, weights: Weights) -> pd.DataFrame:
    """NLL, perplexity, their change, and loss recovered, one row a table; intervals over documents, paired."""
    count, rows = losses.count, []
    for name, nll in {CLEAN: losses.clean, **losses.replaced}.items():
        mean = float(nll.sum() / count.sum())
        delta = delta_interval(nll, losses.clean, count, weights)
        rows.append(
            {"condition": name, "nll": mean}
            | _ends("perplexity", "perplexity", perplexity_interval(nll, count, weights))
            | _ends("delta_nll", "delta_nll", delta.nll)
            | _ends("delta_ppl", "delta_ppl", delta.perplexity)
            | _ends("loss_recovered", "recovered", loss_recovered(losses, nll, weights))
            | {"n_tokens": int(count.sum()), "n_documents": int((count > 0).sum())}
        )
    return pd.DataFrame(rows)


def loss_recovered(losses: Losses, nll: np.ndarray, weights: Weights) -> Interval:
    """Share of what zeroing V1 costs that a replacement does not cost; undefined where zeroing costs nothing."""
    stacked = np.stack([losses.replaced[ZERO], nll, losses.clean], axis=1)
    return statistic_interval(stacked, losses.count, weights, _recovered)


def _condition(name: str, edits: tuple[Edit, ...], n_documents: int) -> Any:
    accumulators: Any = (NllByDocument(n_documents),)
    return Condition(name=name, edits=edits, accumulators=accumulators)


def _recovered(ratios: np.ndarray) -> np.ndarray:
    zero, made, clean = np.moveaxis(ratios, -1, 0)
    return np.divide(zero - made, zero - clean, out=np.full_like(zero, np.nan), where=zero != clean)


def _ends(name: str, prefix: str, interval: Interval) -> dict[str, Any]:
    return {name: interval.estimate, f"{prefix}_low": interval.low, f"{prefix}_high": interval.high}


def _looked_up(table: Tensor) -> Callable[[Tensor, Batch], Tensor]:
    def apply(v1: Tensor, batch: Batch) -> Tensor:
        return table.to(v1.device)[batch.input_ids].to(v1.dtype).view_as(v1)

    return apply
