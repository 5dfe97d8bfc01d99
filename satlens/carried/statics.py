"""All static statistics of a reader: one pass over the fit documents, one over the evaluated ones, tables from sums.

``measure`` runs the passes; ``tables`` makes every table from what they left, without the model.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch

from satlens.bootstrap import Floats, Weights, document_weights
from satlens.carried.document_sums import Sums
from satlens.carried.documents import DocumentSets, Rows
from satlens.carried.ledger import Entry, ledger, stream_constant
from satlens.carried.reader import Reader
from satlens.carried.reads import GateRead
from satlens.errors import SatlensError, UserError

GEOMETRY_DEPTHS = (0.2, 0.35, 0.5, 0.65)
"""Depth fractions at which the geometry is measured when no layers are named (spec part B, scan)."""


@dataclass(frozen=True, kw_only=True)
class Statics:
    """What two passes left: sums by document as numpy, the ledger, and the gates. No model is needed any more."""

    fit: Mapping[str, np.ndarray]
    """``Sums.arrays()`` of the fit documents: means come from here."""
    evaluate: Mapping[str, np.ndarray]
    """The same of the evaluated documents: shares, duty, firing, writes."""
    fit_kinds: tuple[str, ...]
    kinds: tuple[str, ...]
    """Kind of each evaluated document."""
    same: bool
    """Whether both sets are the same documents."""
    entries: tuple[Entry, ...]
    reads: tuple[GateRead, ...]
    value_reads: tuple[GateRead, ...]
    origin: Floats
    """Constant part of the stream before the first block."""
    layers: tuple[int, ...]
    """Layers that tables of gates are made for."""
    geometry: tuple[int, ...]
    """Layers with a covariance."""

    @property
    def n_layers(self) -> int:
        """Blocks of the model."""
        return len(self.entries)

    def directions(self) -> Floats:
        """Unit m^ of each layer, from the fit documents."""
        return unit_means(self.fit)


def measure(
    reader: Reader,
    sets: DocumentSets,
    batch_size: int = 8,
    layers: Sequence[int] | None = None,
    gather: Callable[[Any], Any] = lambda sums: sums,
    place: tuple[int, int] = (0, 1),
    on_batch: Callable[[Rows], None] | None = None,
) -> Statics:
    """Both passes. ``gather`` makes the sums of many processes one; ``place`` is ``(rank, world)`` of this one.

    Raises:
        UserError: a layer that the model does not have.
        SatlensError: an overflow (named), or the resting term is not the mean pre-activation.
    """
    chosen = checked_layers(reader, layers)
    entries = ledger(reader)
    geometry = tuple(layers) if layers else depths(reader.n_layers)

    def pass_over(documents: Any, **options: Any) -> dict[str, np.ndarray]:
        sums = Sums(reader, entries, documents, **options)
        return gather(sums.run(documents, batch_size, on_batch, *place)).arrays()

    fit = pass_over(sets.fit)
    unit_means(fit)  # a mean without a direction stops the run before the second pass
    evaluate = pass_over(sets.evaluate, means=torch.from_numpy(stream_means(fit)), covariances=geometry)
    made = Statics(
        fit=fit,
        evaluate=evaluate,
        fit_kinds=sets.fit.kinds,
        kinds=sets.evaluate.kinds,
        same=sets.same,
        entries=entries,
        reads=reader.reads,
        value_reads=reader.value_reads,
        origin=stream_constant(reader).double().cpu().numpy(),
        layers=chosen,
        geometry=geometry,
    )
    check_linearity(made)
    return made


def tables(statics: Statics, n_resamples: int = 1000, seed: int = 0) -> dict[str, pd.DataFrame]:
    """Every table by name. Intervals resample documents, those of the fit set for means, the evaluated for the rest."""
    from satlens.carried import geometry, mean, resting, sources

    fit, evaluate = weights(statics, n_resamples, seed)
    out = {
        "carried_object": mean.object_table(statics, fit, evaluate),
        "carried_stability": mean.stability_table(statics, evaluate, seed),
        "carried_rotation": mean.rotation_table(statics, fit),
        "carried_writes": sources.writes_table(statics, evaluate),
        "carried_sources": sources.sources_table(statics),
        "carried_constant_share": sources.constant_share_table(statics, evaluate),
        "carried_parameter_share": sources.parameter_share_table(statics, fit),
        "carried_resting": resting.resting_table(statics, fit, evaluate),
        "carried_gates": resting.gates_table(statics),
        "carried_rank": resting.rank_table(statics, evaluate, seed),
        "carried_geometry": geometry.geometry_table(statics, fit),
        "carried_ledger": sources.ledger_table(statics),
    }
    if statics.value_reads:
        out["carried_value_gates"] = resting.value_gates_table(statics, fit, evaluate)
    return out


def weights(statics: Statics, n_resamples: int, seed: int) -> tuple[Weights, Weights]:
    """Resampled documents of the fit and of the evaluated set; the same when the documents are."""
    n_fit, n_evaluate = len(statics.fit["count"]), len(statics.evaluate["count"])
    fit = document_weights(n_fit, n_resamples, seed)
    return fit, fit if statics.same else document_weights(n_evaluate, n_resamples, seed + 1)


def stream_means(sums: Mapping[str, np.ndarray]) -> Floats:
    """``[layer d_model]``: m, the mean stream at each layer's input."""
    total: Floats = sums["resid"][:, :-1].sum(0)
    return total / sums["count"].sum()


def unit_means(sums: Mapping[str, np.ndarray]) -> Floats:
    """``[layer d_model]``: the mean stream at each layer's input, at length 1.

    Raises:
        SatlensError: a mean of length 0, which has no direction.
    """
    means = stream_means(sums)
    length = np.linalg.norm(means, axis=-1, keepdims=True)
    if bad := np.flatnonzero(~(length[:, 0] > 0)).tolist():
        raise SatlensError(
            f"the mean stream of layer {bad[0]} has length 0, so there is no reference direction"
        )
    return means / length


def check_linearity(statics: Statics) -> None:
    """The resting term is the mean pre-activation, by linearity (spec part B, resting term): on the same documents, to
    float32 rounding.

    Raises:
        SatlensError: they differ, so what is hooked is not what the gate linear reads or returns.
    """
    for read in (*statics.reads, *statics.value_reads):
        error, scale = linearity_error(statics, read)
        # products in bfloat16 and float16 are rounded once more than the sums that they are compared with
        loose = 1e-4 if read.dtype == "float32" else 3e-2
        if not error <= loose * scale:
            raise SatlensError(
                f"layer {read.layer}: w.b + beta differs from the measured mean of {read.name} by {error:.3g} "
                f"(values reach {scale:.3g}): this read is not a linear map of what was hooked"
            )


def linearity_error(statics: Statics, read: GateRead) -> tuple[float, float]:
    """Largest ``|w.b + beta - mean z|`` over gates, both on the evaluated documents, and the scale it is judged on."""
    role, count = read.roles[0], statics.evaluate["count"].sum()
    b = statics.evaluate[role][:, read.layer].sum(0) / count
    terms = read.weight.double().cpu().numpy() * b
    resting = terms.sum(1) + beta(read)
    measured = statics.evaluate[f"pre_{read.kind}_{read.layer}"] / count
    return float(np.abs(resting - measured).max()), float(np.abs(terms).sum(1).max() + np.abs(measured).max())


def beta(read: GateRead) -> Floats:
    """Gate biases in float64, 0 where there are none."""
    none = np.zeros(read.n_gates)
    return none if read.bias is None else read.bias.double().cpu().numpy()


def depths(n_layers: int, fractions: Sequence[float] = GEOMETRY_DEPTHS) -> tuple[int, ...]:
    """Layers at fractions of the depth, by truncation as the paper's scan takes them."""
    return tuple(sorted({int(n_layers * fraction) for fraction in fractions}))


def checked_layers(reader: Reader, layers: Sequence[int] | None) -> tuple[int, ...]:
    """The layers asked for, or all.

    Raises:
        UserError: one that the model does not have.
    """
    if not layers:
        return tuple(range(reader.n_layers))
    if bad := [layer for layer in layers if not 0 <= layer < reader.n_layers]:
        raise UserError(f"no layer {bad[0]}: {reader.name} has layers 0 to {reader.n_layers - 1}")
    return tuple(sorted(set(layers)))
