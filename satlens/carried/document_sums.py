"""One pass over a document set: what every static number is made of, summed by document and nothing else kept.

The fit documents give means, and the scales of the norms that gates read; the evaluated documents, once m^ is known,
everything else. The sums of several processes are added (each document is in one of them).
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from satlens.carried.documents import DocumentSet, Rows
from satlens.carried.ledger import Entry
from satlens.carried.norms import Norm
from satlens.carried.reader import Reader, hooked_site
from satlens.carried.reads import GateRead, Site
from satlens.carried.sums import ALONG, FIRING, WRITES, WRITTEN, BatchSums, Key, at, inverse, raise_overflow
from satlens.metrics import onednn_linears

N_SAMPLES = 16
"""Documents of which one position's stream is kept, for the geometry's empirical null: 120 pairs."""


class Sums:
    """Sums by document of the stream, the writes, the reads and the gates, in float64 on the model's device."""

    def __init__(
        self,
        reader: Reader,
        entries: Sequence[Entry],
        documents: DocumentSet,
        means: Float[Tensor, "layer d_model"] | None = None,
        covariances: Sequence[int] = (),
    ) -> None:
        """``means``: m of each layer, fitted before. Without them this is the pass that fits: means and scales alone.
        ``covariances``: layers whose stream gets one."""
        self.reader = reader
        self.means = None if means is None else means.to(reader.device)
        fits = means is None
        self.norms = _norms(entries) if fits else {}
        reads: list[GateRead] = [] if fits else [*reader.reads, *reader.value_reads]
        self.reads: dict[Key, GateRead] = {(read.kind, read.layer): read for read in reads}
        summed = ("resid", "read", "value_read") if fits else ("resid", "read", "value_read", *WRITES)
        self.roles = tuple(role for role in summed if reader.sites.get(role))
        self.thresholds = {
            key: (0.0, *(inverse(read.activate, level) for level in FIRING if read.elementwise))
            for key, read in self.reads.items()
        }
        self.data = self._zeros(documents.n_documents)
        if not fits:
            self.data |= self._evaluated_zeros(documents.n_documents, covariances)

    def run(
        self,
        documents: DocumentSet,
        batch_size: int,
        on_batch: Callable[[Rows], None] | None = None,
        rank: int = 0,
        world: int = 1,
    ) -> "Sums":
        """Pass over the documents (this process's share of them); returns itself.

        Raises:
            SatlensError: values overflowed; says how many, in which layer and at which site.
        """
        with onednn_linears(self.reader.model):
            for rows in documents.batches(batch_size, self.reader.device, self.reader.pad, rank, world):
                self.update(rows)
                if on_batch is not None:
                    on_batch(rows)
        return self

    def update(self, rows: Rows) -> None:
        """Run one batch and add its sums.

        Raises:
            SatlensError: as ``run``.
        """
        batch = BatchSums(self.reader, rows, self.data, self.roles, self.means)
        n, pos = rows.input_ids.shape
        with ExitStack() as stack:
            for (kind, layer), norm in self.norms.items():
                site, keep = Site(module=norm.module, side="in"), batch.scale(kind, layer, norm)
                stack.enter_context(hooked_site(site, keep, n, pos, f"input of the norm of layer {layer}"))
            self.reader.run(rows.input_ids, batch.hooks(self.reads, self.thresholds))
        if not batch.finite():
            raise_overflow(self.reader, rows)
        batch.close()

    def merge(self, other: "Sums") -> None:
        """Add another process's sums."""
        for name, mine in self.data.items():
            mine += other.data[name].to(mine.device)

    def __getstate__(self) -> dict[str, Any]:
        """What travels between processes: the sums, not the model."""
        return {"data": {name: value.cpu() for name, value in self.data.items()}}

    def arrays(self) -> dict[str, np.ndarray]:
        """Everything summed, as numpy."""
        return {name: value.cpu().numpy() for name, value in self.data.items()}

    def _zeros(self, n: int) -> dict[str, Tensor]:
        """What both passes sum."""
        layers, width = self.reader.n_layers, self.reader.d_model
        return {
            "count": self._new(n),
            **{role: self._new(n, layers + (role == "resid"), width) for role in self.roles},
            **{f"scale_{kind}": self._new(n, layers) for kind, _ in self.norms},
        }

    def _evaluated_zeros(self, n: int, covariances: Sequence[int]) -> dict[str, Tensor]:
        """What needs m^, the gates, and the geometry's proxies."""
        layers, width = self.reader.n_layers, self.reader.d_model
        along = [*ALONG, *(f"{role}_{part}" for role in WRITES for part in WRITTEN if role in self.roles)]
        gates = {at(key): read.n_gates for key, read in self.reads.items()}
        return {
            **{name: self._new(n, layers) for name in along},
            "first": self._new(layers + 1, width),
            "sink": self._new(layers + 1, width),
            "final_square": self._new(width),
            "samples": self._new(min(n, N_SAMPLES), layers + 1, width),
            **{f"covariance_{layer}": self._new(width, width) for layer in covariances},
            **{f"deviation_{layer}": self._new(width) for layer in covariances},
            "covariance_count": self._new(1),
            **{f"duty_{name}": self._new(n, n_gates).to(torch.int16) for name, n_gates in gates.items()},
            **{f"pre_{name}": self._new(n_gates) for name, n_gates in gates.items()},
            **{f"fired_{name}": self._new(n, len(FIRING)) for name in gates},
        }

    def _new(self, *shape: int) -> Tensor:
        return torch.zeros(*shape, dtype=torch.float64, device=self.reader.device)


def _norms(entries: Sequence[Entry]) -> dict[Key, Norm]:
    """The norms whose scale is needed to pass constants on: ``gate``, and ``exit`` in post-norm blocks."""
    out: dict[Key, Norm] = {}
    for entry in entries:
        if entry.norm is not None:
            out["gate", entry.layer] = entry.norm
        if entry.exit_norm is not None:
            out["exit", entry.layer] = entry.exit_norm
    return out
