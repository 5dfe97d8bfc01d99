"""What the same budget buys without a dictionary: principal components, k-means, and plain memory of frequent vectors.

Budgets differ in kind, and each baseline holds one of them fixed. A Top-K dictionary of ``d_sae`` latents keeps
``d_sae d_in`` decoder numbers (and as many to encode) and describes a vector by ``k`` numbers and which ``k`` latents
they belong to. No baseline equals it in all of these, so each says in words what it keeps and what it may use.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from sae.variance import weighted_mean

LLOYD_STEPS = 15
"""Rounds of assignment and averaging at most; few types change their centre after ten."""
EXACT = "pca-stored"
"""Where the dictionary has at least as many latents as V1 has dimensions, this one leaves nothing unexplained."""
_CHUNK_VALUES = 1 << 24


@dataclass(frozen=True, kw_only=True)
class Reconstruction:
    """What stands for the vector of every token id, and what that took."""

    method: str
    budget: str
    """In words: what is stored, and what describes one vector."""
    made: Float[Tensor, "type d_in"]
    """The reconstruction of each row."""
    l0: float
    """Numbers that describe one vector."""
    n_stored: int
    """Numbers that are stored once, for all vectors."""
    seeded: bool = True
    """Whether another seed would give another one."""


@dataclass(frozen=True, kw_only=True)
class Budget:
    """What the dictionary has, which the baselines are measured against."""

    d_sae: int
    k: int

    def same_bits(self) -> int:
        """Components whose coefficients take as many bits as k coefficients of 32 bits and the names of k latents."""
        return round(self.k * (32 + math.log2(self.d_sae)) / 32)


def pca(
    rows: Float[Tensor, "type d_in"], weights: Int[Tensor, " type"], n_components: int
) -> Float[Tensor, "type d_in"]:
    """The mean and the projection on the ``n_components`` directions of largest weighted variance (float64 inside)."""
    mean = weighted_mean(rows, weights)
    centred = rows.double() - mean
    scaled = centred * weights.to(rows.device).double().sqrt()[:, None]
    directions = torch.linalg.eigh(scaled.T @ scaled).eigenvectors.flip(1)[:, :n_components]
    return (mean + centred @ directions @ directions.T).to(rows.dtype)


def kmeans(
    rows: Float[Tensor, "type d_in"],
    weights: Int[Tensor, " type"],
    n_centres: int,
    generator: torch.Generator,
    steps: int = LLOYD_STEPS,
) -> Float[Tensor, "type d_in"]:
    """The nearest of ``n_centres`` centres, placed by Lloyd's algorithm on the weighted rows.

    Centres begin as different rows, drawn by their share of the variance (k-means++'s first draw, made without
    replacement). One that no row is nearest to moves to the row that costs most. Where there are no more weighted rows
    than centres, every row is its own centre and the error is 0.
    """
    known = weights.to(rows.device).nonzero().squeeze(1)
    x, w = rows[known], weights.to(rows.device)[known].double()
    cost = w * (x.double() - weighted_mean(x, w)).square().sum(1)
    wait = torch.empty(len(x), dtype=torch.float64).exponential_(generator=generator).to(rows.device)
    # the first of exponential clocks that run at the rate of the cost: weighted draws without replacement
    order = (wait / cost.clamp_min(1e-300)).argsort()
    centres = x[order[:n_centres]].clone()
    if len(x) > n_centres:
        previous = None
        for _ in range(steps):
            nearest, distance = _nearest(x, centres)
            if previous is not None and torch.equal(nearest, previous):
                break
            previous = nearest
            centres = _averages(x, w, centres, nearest, w * distance)
    return centres[_nearest(rows, centres)[0]]


def memory(
    rows: Float[Tensor, "type d_in"], weights: Int[Tensor, " type"], n_kept: int
) -> Float[Tensor, "type d_in"]:
    """The ``n_kept`` most frequent vectors as they are (ties by token id), and the mean for all others.

    Its FVE on the weights is the share of the variance that it remembers: what no structure at all achieves.
    """
    made = weighted_mean(rows, weights).to(rows.dtype).expand_as(rows).clone()
    order = weights.to(rows.device).argsort(descending=True, stable=True)[:n_kept]
    kept = order[weights.to(rows.device)[order] > 0]
    made[kept] = rows[kept]
    return made


def baselines(
    rows: Float[Tensor, "type d_in"],
    weights: Int[Tensor, " type"],
    budget: Budget,
    seed: int,
    unseeded: bool = True,
) -> list[Reconstruction]:
    """Every baseline, fitted on the same weights; without ``unseeded`` only those that ``seed`` decides."""
    chosen = [make for name, make in BASELINES.items() if unseeded or name in SEEDED]
    return [make(rows, weights, budget, seed) for make in chosen]


def _pca_row(
    name: str, words: str, n: Callable[[Budget, int], int]
) -> Callable[[Tensor, Tensor, Budget, int], Reconstruction]:
    def make(rows: Tensor, weights: Tensor, budget: Budget, seed: int) -> Reconstruction:
        d_in = rows.shape[1]
        rank = min(n(budget, d_in), d_in)
        return Reconstruction(
            method=name,
            budget=f"{rank} components: {words}",
            made=pca(rows, weights, rank),
            l0=float(rank),
            n_stored=(rank + 1) * d_in,
            seeded=False,
        )

    return make


def _kmeans_row(rows: Tensor, weights: Tensor, budget: Budget, seed: int) -> Reconstruction:
    generator = torch.Generator().manual_seed(seed)
    n_types = int((weights > 0).sum())
    n = min(budget.d_sae, n_types)
    own = "; every type fitted on is its own centre" if n_types <= budget.d_sae else ""
    return Reconstruction(
        method="k-means",
        budget=f"{n:,} centres for {n_types:,} types: as many stored vectors as the dictionary, one used each{own}",
        made=kmeans(rows, weights, n, generator),
        l0=1.0,
        n_stored=n * rows.shape[1],
    )


def _memory_row(rows: Tensor, weights: Tensor, budget: Budget, seed: int) -> Reconstruction:
    n_types = int((weights > 0).sum())
    n = min(budget.d_sae, n_types)
    return Reconstruction(
        method="memory",
        budget=f"the {n:,} most frequent of {n_types:,} vectors stored as they are, the mean for the rest",
        made=memory(rows, weights, n),
        l0=1.0,
        n_stored=(n + 1) * rows.shape[1],
        seeded=False,
    )


BASELINES: Mapping[str, Callable[[Tensor, Tensor, Budget, int], Reconstruction]] = {
    "pca-k": _pca_row(
        "pca-k", "as many numbers describe a vector as the dictionary has active latents", lambda b, _: b.k
    ),
    "pca-bits": _pca_row(
        "pca-bits",
        "their coefficients take the bits of k coefficients and the names of k latents",
        lambda b, _: b.same_bits(),
    ),
    EXACT: _pca_row(
        EXACT,
        "as many stored numbers as the dictionary, or all directions there are, which leaves nothing unexplained",
        lambda b, d_in: min(b.d_sae, d_in),
    ),
    "k-means": _kmeans_row,
    "memory": _memory_row,
}
SEEDED = ("k-means",)
"""Those that draw their start."""


def _nearest(x: Tensor, centres: Tensor) -> tuple[Tensor, Tensor]:
    """Index of the nearest centre of each row, and the squared distance to it (float64)."""
    step = max(1, _CHUNK_VALUES // len(centres))
    half = centres.square().sum(1) / 2
    indices = [(x[i : i + step] @ centres.T - half).argmax(1) for i in range(0, len(x), step)]
    index = torch.cat(indices)
    return index, (x.double() - centres[index].double()).square().sum(1)


def _averages(x: Tensor, w: Tensor, centres: Tensor, nearest: Tensor, cost: Tensor) -> Tensor:
    """Each centre as the weighted mean of its rows; those without rows go where the cost is largest."""
    total = torch.zeros_like(centres, dtype=torch.float64).index_add_(0, nearest, w[:, None] * x.double())
    mass = torch.zeros(len(centres), dtype=torch.float64, device=x.device).index_add_(0, nearest, w)
    moved = (total / mass.clamp_min(1e-300)[:, None]).to(x.dtype)
    empty = (mass == 0).nonzero().squeeze(1)
    moved[empty] = x[cost.argsort(descending=True)[: len(empty)]]
    return moved
