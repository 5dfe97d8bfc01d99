"""What a pass keeps: each accumulator sums what it reads, so that merging processes or batches is addition.

``reads`` names roles of ``Sites``, or "nll" for the float32 NLL of the scored predictions. ``update`` is called once
per batch for each (role, layer) and for "nll" with layer -1, as soon as the tensor exists: nothing is held.
"""

import math
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from satlens.interventions import position_hash
from satlens.sites import Sites
from satlens.tokens import Batch

NLL = "nll"
N_BINS = 48
SMALLEST, LARGEST = 1e-3, 1e2
"""Where the logarithmic bins of gate values begin and end; what lies outside falls into the end bins."""

SIGNED = ("tanh", "identity", "static")
"""Gates whose alpha may be negative. A static gate (ResFormer) is one learned constant a layer."""
N_BLOCKS = 500
"""Documents kept apart in sums by document and token; more are joined into as many blocks (document % N_BLOCKS)."""


class Accumulator(Protocol):
    """State across batches. ``merge`` is what makes many processes equal to one."""

    reads: tuple[str, ...]

    def update(self, batch: Batch, role: str, layer: int, tensor: Tensor) -> None: ...

    def merge(self, other: Any) -> None: ...


class NllByDocument:
    """Sum of NLL and number of scored predictions of every document, in float64."""

    reads = (NLL,)

    def __init__(self, n_documents: int) -> None:
        self.nll = torch.zeros(n_documents, dtype=torch.float64)
        self.count = torch.zeros(n_documents, dtype=torch.float64)

    def update(self, batch: Batch, role: str, layer: int, tensor: Tensor) -> None:
        """Add ``tensor`` ``[scored]`` to the documents of its targets."""
        docs = batch.target_docs().cpu()
        self.nll.index_add_(0, docs, tensor.double().cpu())
        self.count.index_add_(0, docs, torch.ones_like(docs, dtype=torch.float64))

    def merge(self, other: "NllByDocument") -> None:
        """Add another process's sums."""
        self.nll += other.nll
        self.count += other.count


class LensNll:
    """NLL by document when the stream behind each layer goes straight to the final norm and head (logit lens).

    ``stream`` is what the model would end with if that layer were its last (in most models ``resid_post``)."""

    reads = ("stream", NLL)

    def __init__(self, n_documents: int, sites: Sites, nll_of: Callable[[Tensor, Batch], Tensor]) -> None:
        self.layers = [NllByDocument(n_documents) for _ in range(sites.n_layers)]
        self.last, self.nll_of = sites.n_layers - 1, nll_of

    def update(self, batch: Batch, role: str, layer: int, tensor: Tensor) -> None:
        """The last layer's lens is the model itself, so its NLL is taken from the pass."""
        if role == NLL:
            self.layers[self.last].update(batch, NLL, -1, tensor)
        elif layer != self.last:
            self.layers[layer].update(batch, NLL, -1, self.nll_of(tensor, batch))

    def __getstate__(self) -> dict[str, Any]:
        """What travels between processes: the sums, not the model."""
        return {**vars(self), "nll_of": None}

    def merge(self, other: "LensNll") -> None:
        """Add another process's sums."""
        for mine, theirs in zip(self.layers, other.layers, strict=True):
            mine.merge(theirs)


def closed(alpha: Tensor, kind: str) -> Tensor:
    """Which gate values count as shut, by kind of gate (see ``CLOSED_RULE``)."""
    match kind:
        case "relu" | "static":
            return alpha == 0
        case "tanh" | "identity":
            return alpha < 0
        case _:
            return alpha < 0.05


CLOSED_RULE = {
    "relu": "alpha exactly 0",
    "static": "lambda_1 exactly 0",
    "tanh": "alpha below 0 (V1 is subtracted)",
    "identity": "alpha below 0 (V1 is subtracted)",
    "sigmoid": "alpha below 0.05",
    "softmax": "alpha below 0.05 (an even share is 1)",
    "softmax_sigmoid": "alpha below 0.05",
}


def bin_edges(kind: str) -> np.ndarray:
    """Edges of the gate histogram: logarithmic from SMALLEST to LARGEST, mirrored where alpha may be negative."""
    positive = np.geomspace(SMALLEST, LARGEST, N_BINS + 1)
    if kind in SIGNED:
        return np.concatenate([-positive[::-1], positive])
    return np.concatenate([[0.0], positive])


class PairSums:
    """Alpha summed over heads for every (document, token id) that occurs, per layer: sparse, for it is mostly empty.

    What bootstraps a mean over a set of tokens, a category's say, with documents as the unit.
    """

    SETTLE_AT = 1 << 15
    """Positions that may wait before they are put together, unless more pairs are there already."""

    def __init__(self, n_layers: int) -> None:
        self.key = torch.empty(0, dtype=torch.long)
        self.count = torch.empty(0, dtype=torch.float64)
        self.total = torch.empty(0, n_layers, dtype=torch.float64)
        self.waiting: list[tuple[Tensor, Tensor, Tensor]] = []

    def add(self, docs: Tensor, ids: Tensor, alpha: Tensor) -> None:
        """Add ``alpha`` ``[text layer]``; pairs are put together once enough wait, which costs little a batch."""
        key = ids * N_BLOCKS + docs % N_BLOCKS
        self.waiting.append((key, torch.ones(len(key), dtype=torch.float64), alpha))
        if sum(len(part[0]) for part in self.waiting) > max(self.SETTLE_AT, len(self.key)):
            self.settle()

    def settle(self) -> None:
        """Put what waits together with what is there, in the order of token, then document."""
        keys, counts, totals = zip((self.key, self.count, self.total), *self.waiting, strict=True)
        self.waiting.clear()
        self.key, place = torch.cat(keys).unique(return_inverse=True)
        self.count = torch.zeros(len(self.key), dtype=torch.float64).index_add_(0, place, torch.cat(counts))
        self.total = torch.zeros(len(self.key), self.total.shape[1], dtype=torch.float64).index_add_(
            0, place, torch.cat(totals)
        )

    def merge(self, other: "PairSums") -> None:
        """Add another process's sums."""
        self.waiting += [(other.key, other.count, other.total), *other.waiting]
        self.settle()

    def result(self) -> dict[str, np.ndarray]:
        """Coordinates, occurrences and sums as they are stored: ``doc``, ``token``, ``count``, ``sum`` [pair layer]."""
        self.settle()
        whole = {"doc": self.key % N_BLOCKS, "token": self.key // N_BLOCKS, "count": self.count}
        return {**{name: x.int().numpy() for name, x in whole.items()}, "sum": self.total.float().numpy()}


class GateStatistics:
    """Sums of alpha by token id, by document and by both, share of shut gates, and a histogram.

    All per layer and KV head, but for the sums by both, which are over heads.

    Enough for every gate figure, and for its bootstrap, without the model (spec part A, Fig. 3 and 8).
    """

    reads = ("gate",)

    def __init__(self, n_documents: int, sites: Sites) -> None:
        assert sites.gate_kind is not None
        self.kind, self.gated = sites.gate_kind, list(sites.layers("gate"))
        size = (len(self.gated), sites.n_kv_heads)

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(*shape, dtype=torch.float64)

        self.token_sum, self.token_closed = zeros(sites.d_vocab, *size), zeros(sites.d_vocab, *size)
        self.doc_sum, self.doc_closed = zeros(n_documents, *size), zeros(n_documents, *size)
        self.doc_square = zeros(n_documents, *size)
        self.token_count, self.doc_count = zeros(sites.d_vocab), zeros(n_documents)
        self.edges = torch.from_numpy(bin_edges(self.kind)).float()
        self.exact_zero = zeros(*size)
        self.histogram = zeros(*size, len(self.edges) - 1)
        self.pairs = PairSums(len(self.gated))
        self.waiting: list[Tensor] = []

    def update(self, batch: Batch, role: str, layer: int, tensor: Tensor) -> None:
        """Add alpha ``[batch pos kv_head]`` at the positions that are text.

        The layers of a batch are summed together when the last has come: few large steps cost less than many small.
        """
        self.waiting.append(tensor[batch.text].detach().float().cpu())
        if layer != self.gated[-1]:
            return
        alpha = torch.stack(self.waiting, dim=1)
        self.waiting.clear()
        ids, docs = batch.input_ids[batch.text].cpu(), batch.doc[batch.text].cpu()
        value, shut = alpha.double(), closed(alpha, self.kind).double()
        self.token_sum.index_add_(0, ids, value)
        self.token_closed.index_add_(0, ids, shut)
        self.doc_sum.index_add_(0, docs, value)
        self.doc_closed.index_add_(0, docs, shut)
        self.pairs.add(docs, ids, value.sum(-1))
        self.doc_square.index_add_(0, docs, value.square_())
        ones = torch.ones_like(ids, dtype=torch.float64)
        self.token_count.index_add_(0, ids, ones)
        self.doc_count.index_add_(0, docs, ones)
        self._count_bins(alpha)

    def _count_bins(self, alpha: Tensor) -> None:
        """Bins by the logarithm of the magnitude: what a search among the edges gives, to rounding, but faster."""
        n_bins, signed = self.histogram.shape[-1], self.kind in SIGNED
        is_zero = alpha == 0
        self.exact_zero += is_zero.sum(0).double()
        step = N_BINS / math.log(LARGEST / SMALLEST)
        place = ((alpha.abs() / SMALLEST).log_() * step).floor_().clamp_(-1, N_BINS - 1).long() + 1
        place = N_BINS + place * alpha.sign().long() if signed else place
        cell = torch.arange(alpha[0].numel()).view_as(alpha[0]) * n_bins
        counts = torch.bincount((place + cell)[~is_zero], minlength=cell.numel() * n_bins)
        self.histogram += counts.view_as(self.histogram).double()

    def merge(self, other: "GateStatistics") -> None:
        """Add another process's sums."""
        self.pairs.merge(other.pairs)
        for name, mine in vars(self).items():
            if isinstance(mine, Tensor) and name != "edges":
                mine += getattr(other, name)


class GateSample:
    """Alpha at about ``n_draws`` randomly chosen text positions, for resampling: one row of heads per position.

    Positions are chosen by a hash of where they stand, so the sample is the same for every batch size.
    """

    reads = ("gate",)

    def __init__(self, sites: Sites, n_positions: int, n_draws: int, seed: int) -> None:
        self.gated, self.seed = list(sites.layers("gate")), seed
        self.highest = min(2**63 * n_draws // max(n_positions, 1), 2**63 - 1)
        self.values: dict[int, list[Tensor]] = {layer: [] for layer in self.gated}
        self.keys: list[Tensor] = []

    def update(self, batch: Batch, role: str, layer: int, tensor: Tensor) -> None:
        """Keep alpha at the chosen positions of this batch."""
        key = position_hash(batch.row, batch.input_ids.shape[1], 1, self.seed).squeeze(-1)
        chosen = batch.text.cpu() & (key <= self.highest)
        if layer == self.gated[0]:
            self.keys.append(key[chosen])
        self.values[layer].append(tensor.detach().float().cpu()[chosen])

    def merge(self, other: "GateSample") -> None:
        """Take over another process's positions."""
        self.keys += other.keys
        for layer, values in self.values.items():
            values += other.values[layer]

    def result(self, n_layers: int) -> Tensor:
        """``[layer kv_head draw]``, in the order of the keys (which is the same however rows were spread)."""
        order = torch.cat(self.keys).argsort()
        stacked = {layer: torch.cat(values)[order] for layer, values in self.values.items()}
        n_draws, n_heads = next(iter(stacked.values())).shape
        out = torch.zeros(n_layers, n_heads, n_draws)
        for layer, values in stacked.items():
            out[layer] = values.T
        return out


class FirstValueIntake:
    """What a layer attends to, ``c1 V1 + c2 V``, summed by document: c1, c2, and the share of length that is V1's.

    Each is a mean over KV heads; c1 is the gate and c2 the own scale, 1 in models without one. Where both parts have
    no length, none of V1 arrives and the share is 0.
    """

    def __init__(self, n_documents: int, sites: Sites) -> None:
        self.gated = list(sites.layers("gate"))
        scale = ("own_scale",) if sites.layers("own_scale") else ()
        self.reads: tuple[str, ...] = ("first_value", "value", "gate", *scale)
        self.sums = torch.zeros(n_documents, len(self.gated), 3, dtype=torch.float64)
        self.count = torch.zeros(n_documents, dtype=torch.float64)
        self.waiting: dict[str, Tensor] = {}

    def update(self, batch: Batch, role: str, layer: int, tensor: Tensor) -> None:
        """Keep lengths and coefficients at the positions that are text until the layer's last has come."""
        if layer not in self.gated:
            return
        chosen = tensor[batch.text].float()
        is_values = role in ("first_value", "value")
        self.waiting[role] = (chosen.norm(dim=-1) if is_values else chosen).double().cpu()
        if len(self.waiting) < len(self.reads):
            return
        of_first, v1, v = (self.waiting[name] for name in ("gate", "first_value", "value"))
        of_own = self.waiting.get("own_scale", torch.ones_like(of_first))
        self.waiting.clear()
        first, own = of_first.abs() * v1, of_own.abs() * v
        share = first / (first + own).clamp(min=torch.finfo(torch.float64).tiny)
        means = torch.stack([of_first, of_own, share], dim=-1).mean(dim=1)
        docs = batch.doc[batch.text].cpu()
        self.sums[:, self.gated.index(layer)].index_add_(0, docs, means)
        if layer == self.gated[-1]:
            self.count.index_add_(0, docs, torch.ones_like(docs, dtype=torch.float64))

    def merge(self, other: "FirstValueIntake") -> None:
        """Add another process's sums."""
        self.sums += other.sums
        self.count += other.count
