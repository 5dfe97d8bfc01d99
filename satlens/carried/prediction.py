"""From one clean pass: what a dose will do to duty and firing, gate by gate, under a location-scale model.

With the layer's input ``r``, its dose ``r + (a - 1)(r . m^) m^``, and attention's write held as it was, the norm that
feeds the gate (gain g, bias b, sigma) turns the dose into, exactly,

    z(t; a) = w . [s (x(t) - b) + (a - 1) s q(t) h + b] + beta,   h = g * (m^, centred where the norm centres),

with ``q = (r . m^) / sigma`` and ``s = sigma / sigma(a)`` at each position. The model is: *location*, the mean of that,
which the pass sums exactly; *scale*, ``mean(s)^2 [sd^2 + 2 (a - 1) c cov(z, q) + (a - 1)^2 c^2 var(q)]`` with the
coupling ``c = w . h``, which takes s for constant; *shape*, the standardised distribution of the clean gate, Gaussian
or its own histogram, taken as unchanged. The norm is either rescaled by the dose, as it is, or held (s = 1), which
shows what its rescaling is worth. What the model leaves out is attention's answer to the dose in sequential blocks.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from satlens.carried.documents import Rows
from satlens.carried.effects import thresholds
from satlens.carried.fit import Key, Reference
from satlens.carried.norms import Norm
from satlens.carried.reads import GateRead
from satlens.carried.sums import far_sums

Shape = Literal["gaussian", "empirical"]
Held = Literal["rescaled", "held"]

LOWEST, HIGHEST, N_BINS = -8.0, 12.0, 160
"""Range and bins of the standardised histogram; gates that rest far below their threshold have long upper tails."""


@dataclass(kw_only=True)
class GatePass:
    """Sums of one clean pass over the fit documents for one gate read: scalars and vectors, no positions."""

    read: GateRead
    norm: Norm
    m: Float[Tensor, " d_model"]
    alphas: tuple[float, ...]
    mean: Float[Tensor, " gate"]
    """Mean pre-activation of each gate, which the fit has."""
    deviation: Float[Tensor, " gate"]
    """Its standard deviation."""
    count: int = 0
    sums: dict[str, Tensor] = field(default_factory=dict)

    @property
    def h(self) -> Float[Tensor, " d_model"]:
        """What m^ at unit length becomes behind the norm, times sigma."""
        m = self.m.double().cpu()
        return self.norm.gain.double().cpu() * (m - m.mean() if self.norm.centred else m)

    def add(self, resid: Tensor, normed: Tensor, read: Tensor, pre: Tensor, rows: Rows) -> None:
        """Add one batch: the layer's input, what the norm receives, what the gate reads, and its pre-activations."""
        far = rows.far
        along = (resid.float() * self.m).sum(-1)
        inverse = self.norm.inverse_sigma(normed)
        s = self._rescaling(normed.float(), along, inverse)
        q = along * inverse
        x = read.float() - self.norm.bias.to(read.device)
        weight = torch.where(far, s, 0.0).flatten(1)
        self._sum("x", far_sums(x, far.float()).sum(0))
        self._sum("s", weight.double().sum(1))
        self._sum("sq", (weight * q.flatten()).double().sum(1))
        self._sum("sx", (weight @ x.flatten(0, 1)).double())
        q = torch.where(far, q, 0.0)
        self._sum("q", q.double().sum())
        self._sum("qq", q.double().square().sum())
        self._sum("qx", (q.flatten()[None] @ x.flatten(0, 1))[0].double())
        self._sum("histogram", self._histogram(pre[far].float()))
        self.count += int(far.sum())

    def _rescaling(self, normed: Tensor, along: Tensor, inverse: Tensor) -> Float[Tensor, "alpha batch pos"]:
        """``sigma / sigma(a)`` at every position: the dose changes sigma^2 by two scalar products."""
        m = self.m - self.m.mean() if self.norm.centred else self.m
        centred = normed - normed.mean(-1, keepdim=True) if self.norm.centred else normed
        across, square = (centred * m).sum(-1), m.square().sum()
        moved = [2 * (a - 1) * along * across + (a - 1) ** 2 * along.square() * square for a in self.alphas]
        change = torch.stack(moved) / normed.shape[-1] * inverse.square()
        # rounding can only take a variance below 0 where the dose removes all of it
        return torch.rsqrt((1 + change).clamp_min(1e-12))

    def _histogram(self, z: Float[Tensor, "n gate"]) -> Float[Tensor, "gate bin"]:
        deviation = self.deviation.clamp_min(1e-30).to(z)
        u = (z - self.mean.to(z)) / deviation
        place = ((u - LOWEST) * (N_BINS / (HIGHEST - LOWEST))).floor().clamp(-1, N_BINS).long() + 1
        place += torch.arange(z.shape[1], device=z.device) * (N_BINS + 2)
        counts = torch.bincount(place.flatten(), minlength=z.shape[1] * (N_BINS + 2))
        return counts.view(z.shape[1], -1).double()

    def _sum(self, name: str, value: Tensor) -> None:
        value = value.cpu()
        self.sums[name] = self.sums[name] + value if name in self.sums else value

    def merge(self, other: "GatePass") -> None:
        """Add another process's sums."""
        for name, value in other.sums.items():
            self._sum(name, value)
        self.count += other.count

    def __getstate__(self) -> dict[str, object]:
        """What travels between processes: the sums, not the model."""
        return {"sums": self.sums, "count": self.count}


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """What the model says of every gate at every dose."""

    location: Float[Tensor, "alpha gate"]
    """Mean pre-activation."""
    scale: Float[Tensor, "alpha gate"]
    """Standard deviation."""
    above: Mapping[Shape, Float[Tensor, "alpha level gate"]]
    """Share of positions above each level (duty, firing at 0.5 and at 1), by shape."""


def predict(found: GatePass, norm: Held = "rescaled") -> Prediction:
    """Predict duty and firing at every alpha of the pass."""
    n, sums = found.count, {name: value / found.count for name, value in found.sums.items()}
    weight = found.read.weight.double().cpu()
    bias = 0.0 if found.read.bias is None else found.read.bias.double().cpu()
    constant = weight @ found.norm.bias.double().cpu() + bias
    coupling = weight @ found.h
    steps = torch.tensor(found.alphas, dtype=torch.float64)[:, None] - 1
    held = norm == "held"
    s = torch.ones(len(found.alphas)).double() if held else sums["s"]
    sx = sums["x"].expand_as(sums["sx"]) if held else sums["sx"]
    sq = sums["q"].expand_as(sums["sq"]) if held else sums["sq"]
    location = sx @ weight.T + steps * sq[:, None] * coupling + constant
    with_q = weight @ (sums["qx"] - sums["q"] * sums["x"])
    spread_q = (sums["qq"] - sums["q"].square()).clamp_min(0)
    variance = (
        found.deviation.double().cpu().square()
        + 2 * steps * coupling * with_q
        + (steps * coupling).square() * spread_q
    )
    scale = s[:, None] * variance.clamp_min(0).sqrt()
    levels = torch.tensor(thresholds(found.read), dtype=torch.float64)
    u = (levels[:, None] - location[:, None]) / scale[:, None].clamp_min(1e-30)
    gaussian = 0.5 * torch.erfc(u / 2**0.5)
    return Prediction(
        location=location,
        scale=scale,
        above={"gaussian": gaussian, "empirical": _above(found.sums["histogram"] / n, u)},
    )


def _above(
    share: Float[Tensor, "gate bin"], u: Float[Tensor, "alpha level gate"]
) -> Float[Tensor, "alpha level gate"]:
    """Share of each gate's own standardised values above ``u``, linear within bins.

    The first and last bin hold what lies outside the range: all of it counts as just outside.
    """
    beyond = share.flip(1).cumsum(1).flip(1)  # from this bin on, itself included
    place = (u - LOWEST) * (N_BINS / (HIGHEST - LOWEST))
    lower = place.floor().clamp(0, N_BINS - 1)
    inside = (place - lower).clamp(0, 1)
    at = lower.long() + 1
    gates = torch.arange(share.shape[0]).expand_as(at)
    out = beyond[gates, at] - inside * share[gates, at]
    # at the ends of the range, what lies outside is above or below every value of u there
    return torch.where(
        place < 0, torch.ones_like(out), torch.where(place > N_BINS, torch.zeros_like(out), out)
    )


def gate_passes(
    reads: Sequence[GateRead], norms: Mapping[Key, Norm | None], reference: Reference, alphas: Sequence[float]
) -> list[GatePass]:
    """A pass to fill for every read whose norm is known and whose gates the reference was fitted on."""
    out = []
    for read in reads:
        key, norm = (read.kind, read.layer), norms.get((read.kind, read.layer))
        if norm is not None and key in reference.gate_mean:
            out.append(
                GatePass(
                    read=read, norm=norm, m=reference.unit(read.layer).to(read.weight.device), alphas=tuple(alphas),
                    mean=reference.gate_mean[key], deviation=reference.gate_deviation[key],
                )
            )  # fmt: skip
    return out
