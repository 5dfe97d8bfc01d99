"""What is done to a model's insides: each intervention is a list of edits, an edit is a site and a function.

Add one by writing a function and naming it in ``INTERVENTIONS``; the contract tests pick it up from there.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from jaxtyping import Float, Int
from torch import Tensor

from satlens.errors import UserError
from satlens.tokens import Batch


@dataclass(frozen=True, kw_only=True)
class Edit:
    """Replace the tensor at one site; ``apply`` must return a new tensor and leave its input alone."""

    role: str
    layer: int
    apply: Callable[[Tensor, Batch], Tensor]


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """What an intervention may know about the gates, measured on documents that are not scored."""

    mean: Float[Tensor, "layer kv_head"]
    """Mean alpha per layer and head (rows of layers without a gate are 0)."""
    sample: Float[Tensor, "layer kv_head draw"]
    """Alpha values drawn from each head's own distribution."""


class Intervention(Protocol):
    """Edits that set the gate of ``layer``, all heads or those in ``heads``."""

    def __call__(self, layer: int, heads: tuple[int, ...] | None, known: Calibration, seed: int) -> Edit: ...


def zero(layer: int, heads: tuple[int, ...] | None, known: Calibration, seed: int) -> Edit:
    """Alpha to 0: the layer cannot re-read V1 (paper, Fig. 4)."""
    return _gate_edit(layer, heads, lambda alpha, _: torch.zeros_like(alpha))


def mean(layer: int, heads: tuple[int, ...] | None, known: Calibration, seed: int) -> Edit:
    """Alpha to one constant per layer, its mean over positions and heads (paper, Fig. 4: constant mixing)."""
    constant = known.mean[layer].mean()
    return _gate_edit(layer, heads, lambda alpha, _: torch.full_like(alpha, float(constant)))


def head_mean(layer: int, heads: tuple[int, ...] | None, known: Calibration, seed: int) -> Edit:
    """Alpha to one constant per head, its mean over positions: keeps which head reads, drops when."""
    constants = known.mean[layer]
    return _gate_edit(layer, heads, lambda alpha, _: constants.to(alpha).expand_as(alpha).clone())


def resample(layer: int, heads: tuple[int, ...] | None, known: Calibration, seed: int) -> Edit:
    """Alpha to draws from the head's own calibration values: keeps its distribution, drops its timing."""
    sample = known.sample[layer]
    n_heads, n_draws = sample.shape

    def draw(alpha: Tensor, batch: Batch) -> Tensor:
        picks = position_hash(batch.row, alpha.shape[1], n_heads, seed * 1009 + layer) % n_draws
        heads_axis = torch.arange(n_heads, device=alpha.device).expand_as(picks)
        return sample.to(alpha)[heads_axis, picks.to(alpha.device)]

    return _gate_edit(layer, heads, draw)


def position_hash(
    row: Int[Tensor, " batch"], n_pos: int, n_heads: int, seed: int
) -> Int[Tensor, "batch pos kv_head"]:
    """A non-negative pseudo-random integer for each (row, position, head): the same whatever the batching.

    Counter-based (splitmix64), so that an answer does not depend on how rows were grouped or spread.
    """
    position = row.cpu()[:, None] * (1 << 20) + torch.arange(n_pos)[None]
    counter = position[..., None] * (1 << 10) + torch.arange(n_heads)
    x = counter + _signed(0x9E3779B97F4A7C15 * (seed + 1))
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = (x ^ _shift_right(x, shift)) * _signed(factor)
    return (x ^ _shift_right(x, 31)) & 0x7FFFFFFFFFFFFFFF


def _signed(value: int) -> int:
    value %= 2**64
    return value - 2**64 if value >= 2**63 else value


def _shift_right(x: Tensor, by: int) -> Tensor:
    """Logical shift: torch's is arithmetic, the mask clears what the sign bit brought in."""
    return (x >> by) & ((1 << (64 - by)) - 1)


def _gate_edit(layer: int, heads: tuple[int, ...] | None, new: Callable[[Tensor, Batch], Tensor]) -> Edit:
    """An edit of the gate that replaces only ``heads`` (all when None)."""

    def apply(alpha: Tensor, batch: Batch) -> Tensor:
        replaced = new(alpha, batch)
        if heads is None:
            return replaced
        if bad := [head for head in heads if not 0 <= head < alpha.shape[-1]]:
            raise UserError(f"no KV head {bad[0]}: layer {layer} has heads 0 to {alpha.shape[-1] - 1}")
        out = alpha.clone()
        index = torch.tensor(heads, dtype=torch.long, device=alpha.device)
        out[..., index] = replaced[..., index]
        return out

    return Edit(role="gate", layer=layer, apply=apply)


INTERVENTIONS: Mapping[str, Intervention] = {
    "zero": zero,
    "mean": mean,
    "head-mean": head_mean,
    "resample": resample,
}
