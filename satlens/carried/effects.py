"""What a change does to predictions and gates: float32 measures at each position, float64 sums for each document."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from satlens.carried.reads import GateRead
from satlens.carried.sums import inverse
from satlens.metrics import LOG2_E

CHUNK_LOGITS = 3 << 19
"""Logits of one distribution held at once; a chunk holds the clean one and one changed one."""
SAFE_BITS = 100.0
"""Largest logit, in bits, whose power of 2 float32 can sum up; a softmax of larger ones is shifted."""
LEVELS = (0.0, 0.5, 1.0)
"""A gate is on duty above 0 before its activation and fires above 0.5 (and 1.0) after it (spec part B)."""
OUTPUTS = ("kl", "nll", "entropy", "top1")
"""What is measured of the next-token distribution; top1 is 1 where the most probable token is the clean one."""

Logits = Callable[[Tensor], Tensor]
"""``hidden [n d_model] (after the final norm) -> logits [n d_vocab]``."""


def compare_outputs(
    logits: Logits,
    clean: Float[Tensor, "scored d_model"],
    changed: Float[Tensor, "condition scored d_model"],
    targets: Int[Tensor, " scored"],
    d_vocab: int,
    chunk_logits: int = CHUNK_LOGITS,
) -> dict[str, Float[Tensor, "condition scored"]]:
    """KL(clean || changed), NLL of ``targets``, entropy and top-1 agreement with the clean model, per position.

    A chunk's clean logits are made once for all conditions, and no chunk's logits outlive it. Nats, float32 from
    float32 logits; normalisers are kept in float64, without which a KL near 1e-6 would be lost.
    """
    n = len(clean)
    step = max(1, chunk_logits // d_vocab)
    out = {name: clean.new_empty(len(changed), n, dtype=torch.float32) for name in OUTPUTS}
    for start in range(0, n, step):
        at = slice(start, min(start + step, n))
        base = Distribution(logits(clean[at]).float())
        best = base.best()
        for index, hidden in enumerate(changed):
            new = Distribution(logits(hidden[at]).float())
            out["kl"][index, at] = base.kl(new)
            out["nll"][index, at], out["entropy"][index, at] = new.nll(targets[at]), new.entropy()
            out["top1"][index, at] = new.prefers(best)
    return out


class Distribution:
    """Next-token distributions of a chunk: logits, their unnormalised powers and normaliser.

    Inside, logits are in bits: powers of 2 cost a quarter of powers of e. Powers are taken without shifting by the
    maximum, exact as long as nothing over- or underflows; a chunk where something would is shifted first.
    """

    def __init__(self, logits: Float[Tensor, "n d_vocab"]) -> None:
        self.logits = logits * LOG2_E
        self.top = self.logits.amax(dim=-1)
        if not bool((self.top.abs() < SAFE_BITS).all()):
            self.logits -= self.top[:, None]
            self.top = torch.zeros_like(self.top)
        self.powers = self.logits.exp2()
        self.total = self.powers.sum(-1)
        self.log_total = self.total.double().log2()

    def best(self) -> Int[Tensor, " n"]:
        """The most probable token of each row."""
        return self.logits.argmax(dim=-1)

    def prefers(self, token: Int[Tensor, " n"]) -> Tensor:
        """1 where no token is more probable than this one."""
        return (self.logits.gather(1, token[:, None]).squeeze(1) == self.top).float()

    def nll(self, targets: Int[Tensor, " n"]) -> Tensor:
        """NLL of each row's target."""
        return self._nats(self.log_total - self.logits.gather(1, targets[:, None]).squeeze(1))

    def entropy(self) -> Tensor:
        """Entropy of each row."""
        return self._nats(self.log_total - self._mean(self.logits))

    def kl(self, other: "Distribution") -> Tensor:
        """KL(self || other) of each row; never below 0, where rounding would put it."""
        # the difference first: two means of logits would each be off by more than a small KL
        apart = self._mean(self.logits - other.logits)
        return self._nats((apart - self.log_total + other.log_total).clamp_min(0))

    def _mean(self, values: Tensor) -> Tensor:
        """The mean of values ``[n d_vocab]`` under each row's distribution, float64."""
        return torch.linalg.vecdot(self.powers, values).double() / self.total.double()

    def _nats(self, bits: Tensor) -> Tensor:
        return (bits / LOG2_E).float()


def thresholds(read: GateRead) -> tuple[float, ...]:
    """Pre-activations above which a gate is on duty and fires (0.5, 1): firing is then a comparison, not a map."""
    return tuple(level if level == 0 else inverse(read.activate, level) for level in LEVELS)


def count_above(
    z: Float[Tensor, "batch pos gate"], far: Bool[Tensor, "batch pos"], levels: tuple[float, ...]
) -> Float[Tensor, "batch level"]:
    """(Far position, gate) pairs whose pre-activation is above each level, per row, in float64."""
    counted, above = far.float()[:, None], torch.empty(z.shape, dtype=torch.float32, device=z.device)
    counts = []
    for level in levels:
        torch.gt(z, level, out=above)
        counts.append(torch.bmm(counted, above).double().sum((1, 2)))  # within a gate, exact in float32
    return torch.stack(counts, dim=-1)


def by_document(
    values: Mapping[str, Tensor], regions: Mapping[str, Tensor]
) -> dict[str, Float[Tensor, "condition batch"]]:
    """Sums over each named region of positions ``[batch pos]`` of each measure ``[condition batch pos]``, in float64.

    Keys are ``measure_region``. Positions outside the region are not read, so they may hold anything.
    """
    return {
        f"{name}_{region}": torch.where(mask, value.double(), 0.0).sum(-1)
        for name, value in values.items()
        for region, mask in regions.items()
    }


def spread(values: Tensor, mask: Tensor) -> Tensor:
    """Put values ``[... n]`` of the true positions of ``mask [batch pos]`` back where they were, 0 elsewhere."""
    out: Any = values.new_zeros(*values.shape[:-1], *mask.shape)
    out[..., mask] = values
    return out
