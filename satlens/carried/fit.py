"""The carried direction of every layer, fitted: mean residual, its unit vector, and how spread stream and gates are."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from jaxtyping import Float
from torch import Tensor

from satlens.carried.directions import unit
from satlens.carried.documents import DocumentSet, Rows
from satlens.carried.reader import Reader
from satlens.carried.reads import Hook
from satlens.carried.sums import far_sums, raise_overflow
from satlens.errors import SatlensError
from satlens.metrics import onednn_linears
from satlens.reading import process_place
from satlens.stream import agree, gather

Key = tuple[str, int]
"""(kind of gate, layer)."""


@dataclass(frozen=True, kw_only=True)
class Reference:
    """What the fit documents say; the documents that are evaluated are others."""

    mean: Float[Tensor, "layer d_model"]
    """``m_L``: mean residual at each layer's input over far positions, float64; the last row is what leaves the
    last block."""
    deviation: Float[Tensor, "layer d_model"]
    """Standard deviation of each of its coordinates, float64."""
    gate_mean: Mapping[Key, Float[Tensor, " gate"]]
    """Mean pre-activation of each gate, for the layers asked for."""
    gate_deviation: Mapping[Key, Float[Tensor, " gate"]]
    """Its standard deviation."""
    n_tokens: int
    """Far positions behind the means."""

    def unit(self, layer: int) -> Float[Tensor, " d_model"]:
        """``m^_L``, float32.

        Raises:
            UserError: the mean is zero, so the layer has no reference direction.
        """
        return unit(self.mean[layer])


class Moments:
    """Sums and sums of squares over far positions, by role and layer, in float64."""

    def __init__(self) -> None:
        self.sums: dict[Key, Tensor] = {}
        self.squares: dict[Key, Tensor] = {}
        self.count = 0

    def add(self, role: str, layer: int, tensor: Tensor, far: Tensor) -> None:
        """Add a tensor ``[batch pos width]``."""
        x = tensor.float()
        for store, value in ((self.sums, x), (self.squares, x.square())):
            store[role, layer] = store.get((role, layer), 0.0) + far_sums(value, far).sum(0)

    def merge(self, other: "Moments") -> None:
        """Add another process's sums."""
        for mine, theirs in ((self.sums, other.sums), (self.squares, other.squares)):
            for key, value in theirs.items():
                mine[key] = mine.get(key, 0.0) + value
        self.count += other.count

    def mean(self, key: Key) -> Tensor:
        """Mean over positions."""
        return self.sums[key] / self.count

    def deviation(self, key: Key) -> Tensor:
        """Population standard deviation over positions."""
        return (self.squares[key] / self.count - self.mean(key).square()).clamp_min(0).sqrt()


@torch.no_grad()
def fit(
    reader: Reader,
    documents: DocumentSet,
    *,
    batch_size: int = 8,
    gates: Collection[int] = (),
    on_batch: Callable[[Rows], None] | None = None,
) -> Reference:
    """One pass: means of the stream at every layer's input, and of the gates of the layers in ``gates``.

    Raises:
        SatlensError: values that are not finite, with layer and site.
    """
    roles = {"pre": "mlp", "value_pre": "value"}
    stream: list[Key] = [("resid", layer) for layer in sorted(reader.sites["resid"])]
    sites = stream + [
        (role, layer) for role in roles for layer in reader.sites.get(role, {}) if layer in gates
    ]
    moments, problem = Moments(), None
    try:
        _add(moments, reader, documents, batch_size, sites, on_batch)
    except SatlensError as error:
        problem = error
    agree(problem)
    moments = gather(moments)
    read = {(roles[role], layer): (role, layer) for role, layer in sites if role in roles}
    return Reference(
        mean=torch.stack([moments.mean(key) for key in stream]),
        deviation=torch.stack([moments.deviation(key) for key in stream]),
        gate_mean=MappingProxyType({key: moments.mean(site) for key, site in read.items()}),
        gate_deviation=MappingProxyType({key: moments.deviation(site) for key, site in read.items()}),
        n_tokens=moments.count,
    )


def _add(
    moments: Moments,
    reader: Reader,
    documents: DocumentSet,
    batch_size: int,
    sites: list[Key],
    on_batch: Callable[[Rows], None] | None,
) -> None:
    """Add this process's documents."""
    rank, world = process_place()
    with onednn_linears(reader.model):
        for rows in documents.batches(batch_size, reader.device, reader.pad, rank, world):
            reader.run(rows.input_ids, _hooks(moments, sites, rows))
            moments.count += int(rows.far.sum())
            if not all(bool(torch.isfinite(total).all()) for total in moments.sums.values()):
                raise_overflow(reader, rows)
            if on_batch is not None:
                on_batch(rows)


def _hooks(moments: Moments, sites: list[Key], rows: Rows) -> list[Hook]:
    far = rows.far.float()

    def adder(role: str, layer: int) -> Callable[[Tensor], None]:
        return lambda tensor: moments.add(role, layer, tensor, far)

    return [(role, layer, adder(role, layer)) for role, layer in sites]
