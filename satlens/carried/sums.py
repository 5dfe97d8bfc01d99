"""One pass over a document set: what every static number is made of, summed by document and nothing else kept.

Positions are summed in float32 within blocks of 16 and in float64 across them, by matrix products, which cost next to
nothing; comparing pre-activations with three thresholds is the dearest part. The sums of several processes are added
(each document is in one of them).
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from satlens.carried.documents import BLOCK, SKIP, DocumentSet, Rows
from satlens.carried.ledger import Entry
from satlens.carried.norms import Norm
from satlens.carried.reader import Reader, hooked_site
from satlens.carried.reads import GateRead, Hook, Site
from satlens.errors import SatlensError
from satlens.metrics import onednn_linears

FIRING = (0.5, 1.0)
"""Post-activations above these fire (spec part B)."""
STRIDE = 4
"""Covariances are taken at every fourth position: what they are used for needs no more."""
N_SAMPLES = 16
"""Documents of which one position's stream is kept, for the geometry's empirical null: 120 pairs."""
ALONG = ("share", "size", "inner", "norm")
"""Of the stream x against m^: (x.m^)/|x|, its absolute value, x.m^, and |x|."""
WRITTEN = ("along", "whole")
"""Of a write w against m^: (w.m^)^2 and |w|^2."""

Key = tuple[str, int]


class Sums:
    """Sums by document of the stream, the writes, the reads and the gates, in float64 on the model's device."""

    def __init__(
        self,
        reader: Reader,
        entries: Sequence[Entry],
        documents: DocumentSet,
        *,
        value_norms: Mapping[int, Norm | None] | None = None,
        directions: Float[Tensor, "layer d_model"] | None = None,
        gates: bool = True,
        covariances: Sequence[int] = (),
    ) -> None:
        """``directions``: unit m^ of each layer, fitted before; without them, shares and constant shares are left
        out. ``gates``: count duty and firing. ``covariances``: layers whose stream gets a covariance."""
        self.reader = reader
        self.directions = None if directions is None else directions.float().to(reader.device)
        self.norms = _norms(entries, value_norms or {})
        n, layers, width = documents.n_documents, reader.n_layers, reader.d_model

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(*shape, dtype=torch.float64, device=reader.device)

        roles = [r for r in ("resid", "attn_out", "mlp_out", "read", "value_read") if reader.sites.get(r)]
        reads: list[GateRead] = [*reader.reads, *reader.value_reads] if gates else []
        self.reads = {(read.kind, read.layer): read for read in reads}
        along = [*ALONG, *(f"{role}_{part}" for role in ("attn_out", "mlp_out") for part in WRITTEN)]
        self.data: dict[str, Tensor] = {
            "count": zeros(n),
            **{role: zeros(n, layers + (role == "resid"), width) for role in roles},
            **{f"scale_{kind}": zeros(n, layers) for kind, _ in self.norms},
            **({key: zeros(n, layers) for key in along} if directions is not None else {}),
            "first": zeros(layers + 1, width),
            "sink": zeros(layers + 1, width),
            "final_square": zeros(width),
            "samples": zeros(min(n, N_SAMPLES), layers + 1, width),
            **{f"covariance_{layer}": zeros(width, width) for layer in covariances},
            "covariance_count": zeros(1),
            **{f"duty_{_at(key)}": zeros(n, r.n_gates).to(torch.int16) for key, r in self.reads.items()},
            **{f"pre_{_at(key)}": zeros(r.n_gates) for key, r in self.reads.items()},
            **{f"fired_{_at(key)}": zeros(n, len(FIRING)) for key in self.reads},
        }
        self.thresholds = {
            key: (0.0, *(inverse(read.activate, level) for level in FIRING if read.elementwise))
            for key, read in self.reads.items()
        }
        self.buffers: dict[torch.Size, Tensor] = {}

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
        far, shape = rows.far.float(), rows.input_ids.shape
        with ExitStack() as stack:
            for (kind, layer), norm in self.norms.items():
                site = Site(module=norm.module, side="in")
                scale = self._scale(kind, layer, norm, rows, far)
                stack.enter_context(hooked_site(site, scale, *shape, f"input of the norm of layer {layer}"))
            self.reader.run(rows.input_ids, self._hooks(rows, far))
        self.buffers.clear()
        self.data["count"][rows.doc] += rows.far.sum(1).double()
        self.data["covariance_count"] += rows.far[:, ::STRIDE].sum()
        checked = [self.data[role][rows.doc].sum() for role in ("resid", "mlp_out", "read")]
        if not bool(torch.isfinite(torch.stack(checked)).all()):
            raise_overflow(self.reader, rows)

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

    def _hooks(self, rows: Rows, far: Tensor) -> list[Hook]:
        out: list[Hook] = []
        for role in ("resid", "attn_out", "mlp_out", "read", "value_read"):
            for layer in self.reader.sites.get(role, {}):
                out.append((role, layer, self._adder(role, layer, rows, far)))
        for key, read in self.reads.items():
            out.append((read.roles[1], read.layer, self._counter(key, rows, far)))
        return out

    def _adder(self, role: str, layer: int, rows: Rows, far: Tensor) -> Callable[[Tensor], None]:
        def add(tensor: Tensor) -> None:
            x = tensor.float()
            self.data[role][rows.doc, layer] += far_sums(x, far)
            if role == "resid":
                self._add_stream(x, layer, rows, far)
            elif self.directions is not None and role in ("attn_out", "mlp_out"):
                inner, length = x @ self.directions[layer], torch.linalg.vector_norm(x, dim=-1)
                for part, value in zip(WRITTEN, (inner, length), strict=True):
                    self.data[f"{role}_{part}"][rows.doc, layer] += (value * far).double().square().sum(1)

        return add

    def _add_stream(self, x: Tensor, layer: int, rows: Rows, far: Tensor) -> None:
        data = self.data
        data["first"][layer] += x[:, 0].double().sum(0)
        data["sink"][layer] += x[:, :SKIP].double().sum((0, 1))
        for row in (rows.doc < len(data["samples"])).nonzero()[:, 0].tolist():
            data["samples"][rows.doc[row], layer] = x[row, (SKIP + int(rows.last[row])) // 2].double()
        if layer == self.reader.n_layers:
            data["final_square"] += far_sums(x.square(), far).sum(0)
            return
        if f"covariance_{layer}" in data:
            part = x[:, ::STRIDE][rows.far[:, ::STRIDE]]
            data[f"covariance_{layer}"] += (part.T @ part).double()
        if self.directions is not None:
            inner, length = x @ self.directions[layer], torch.linalg.vector_norm(x, dim=-1)
            share = inner / length.clamp_min(1e-30)
            for name, value in zip(ALONG, (share, share.abs(), inner, length), strict=True):
                data[name][rows.doc, layer] += (value * far).double().sum(1)

    def _scale(self, kind: str, layer: int, norm: Norm, rows: Rows, far: Tensor) -> Callable[[Tensor], None]:
        def add(tensor: Tensor) -> None:
            self.data[f"scale_{kind}"][rows.doc, layer] += (norm.inverse_sigma(tensor) * far).double().sum(1)

        return add

    def _counter(self, key: Key, rows: Rows, far: Tensor) -> Callable[[Tensor], None]:
        """Duty by gate, firing over gates, and the sum of pre-activations, without making the activation again."""

        def add(tensor: Tensor) -> None:
            z, at = tensor.float(), _at(key)
            self.data[f"pre_{at}"] += far_sums(z, far).sum(0)
            buffer = self.buffers.setdefault(z.shape, torch.empty_like(z))
            for level, threshold in enumerate(self.thresholds[key]):
                torch.gt(z, threshold, out=buffer)
                above = torch.bmm(far[:, None], buffer)[:, 0]  # counts: exact in float32
                if level == 0:
                    self.data[f"duty_{at}"][rows.doc] += above.to(torch.int16)
                else:
                    self.data[f"fired_{at}"][rows.doc, level - 1] += above.double().sum(1)

        return add


def far_sums(
    x: Float[Tensor, "batch pos width"], far: Float[Tensor, "batch pos"]
) -> Float[Tensor, "batch width"]:
    """Sum over the positions where ``far`` is 1, by row: float32 within blocks of 16, float64 across them."""
    batch, pos, width = x.shape
    blocks = torch.bmm(far.reshape(-1, 1, BLOCK), x.reshape(-1, BLOCK, width))
    return blocks.view(batch, pos // BLOCK, width).double().sum(1)


def inverse(activate: Callable[[Tensor], Tensor], level: float) -> float:
    """The pre-activation whose post-activation is ``level > 0``: every activation here grows from 0 to above it.

    Infinite for one that never gets there (a sigmoid gate above 1).
    """

    def above(z: float) -> bool:
        return float(activate(torch.full((1, 1, 1), z, dtype=torch.float64))) > level

    low, high = 0.0, 64.0
    if not above(high):
        return float("inf")
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if above(middle) else (middle, high)
    return high


@torch.no_grad()
def raise_overflow(reader: Reader, rows: Rows) -> None:
    """Say where numbers stopped being finite first: run the batch again, counting.

    Raises:
        SatlensError: always.
    """
    counts: list[tuple[int, str, int]] = []

    def counter(role: str, layer: int) -> Callable[[Tensor], None]:
        def count(tensor: Tensor) -> None:
            if bad := int((~torch.isfinite(tensor)).sum()):
                counts.append((layer, role, bad))

        return count

    reader.run(rows.input_ids, [(r, at, counter(r, at)) for r, sites in reader.sites.items() for at in sites])
    dtype = str(next(reader.model.parameters()).dtype).removeprefix("torch.")
    if not counts:
        raise SatlensError(f"{reader.name}: sums overflowed, though no value of the batch is infinite")
    layer, role, bad = counts[0]
    total = sum(count for _, _, count in counts)
    raise SatlensError(
        f"{reader.name}: {bad} values of {role} in layer {layer} are not finite in {dtype} ({total} at all sites of "
        "the batch), so no mean exists: run it in float32 or bfloat16"
    )


def _norms(entries: Sequence[Entry], value_norms: Mapping[int, Norm | None]) -> dict[Key, Norm]:
    """The norms whose scale is needed to pass constants on: ``gate``, ``exit`` (post-norm) and ``value``."""
    out: dict[Key, Norm] = {}
    for entry in entries:
        if entry.norm is not None:
            out["gate", entry.layer] = entry.norm
        if entry.exit_norm is not None:
            out["exit", entry.layer] = entry.exit_norm
    return {**out, **{("value", layer): norm for layer, norm in value_norms.items() if norm is not None}}


def _at(key: Key) -> str:
    return f"{key[0]}_{key[1]}"
