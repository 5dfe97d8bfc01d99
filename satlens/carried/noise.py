"""Noise of the reference's energy along chosen directions: is it the energy or the direction that hurts?

Every far position gets noise of length exactly ``epsilon |x|``. Positions of a document are paired with a neighbour in
order of length and a pair gets opposite noise, so that what is added nearly cancels over a document (the paper's
zero-mean arm, which keeps the reference itself in place); ``imbalance`` says what is left.
"""

from collections.abc import Callable
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from satlens.carried.edits import Displacement, Where

Arm = Literal["reference", "random", "isotropic", "shaped"]
Draw = Callable[[int, int, torch.Generator], Tensor]
"""``(pairs, d_model, generator) -> unit vectors [pairs d_model]``."""


def along(direction: Float[Tensor, " d_model"]) -> Draw:
    """Plus and minus one direction."""
    return lambda n, width, generator: direction.cpu().expand(n, width)


def isotropic() -> Draw:
    """Any direction, all alike."""
    return lambda n, width, generator: _units(torch.randn(n, width, generator=generator))


def shaped(deviation: Float[Tensor, " d_model"]) -> Draw:
    """Any direction, each coordinate as spread as the residual's own."""
    return lambda n, width, generator: _units(
        torch.randn(n, width, generator=generator) * deviation.cpu().float()
    )


def noise(draw: Draw, epsilon: float, seed: int) -> Displacement:
    """Noise of length ``epsilon |x|``, the same for a document whatever rows it is batched with."""

    def by(x: Tensor, where: Where) -> Tensor:
        out = torch.zeros_like(x)
        lengths = x.norm(dim=-1)
        for row, doc in enumerate(where.doc.tolist()):
            at = where.far[row].nonzero().squeeze(-1)
            if len(at):
                signs = _paired(lengths[row, at], draw, x.shape[-1], _generator(seed, doc))
                out[row, at] = epsilon * lengths[row, at, None] * signs.to(x)
        return out

    return by


def imbalance(
    added: Float[Tensor, "batch pos d_model"], where: Where, mean: Float[Tensor, " d_model"]
) -> Float[Tensor, " batch"]:
    """``|mean noise over a document's far positions| / |m|``: how far the noise moved the mean that it should leave."""
    counted = where.far[..., None]
    total = (added.double() * counted).sum(1) / counted.sum(1).clamp_min(1)
    return total.norm(dim=-1) / mean.double().norm()


def _paired(lengths: Tensor, draw: Draw, width: int, generator: torch.Generator) -> Tensor:
    """Unit vectors ``[pos d_model]``: neighbours in order of length get one draw with opposite signs."""
    n = len(lengths)
    pairs = (n + 1) // 2
    drawn = draw(pairs, width, generator).float()
    first = torch.where(torch.rand(pairs, generator=generator) < 0.5, -1.0, 1.0)
    signs = torch.stack([first, -first], dim=1).flatten()[:n, None]
    vectors = torch.empty(n, width)
    vectors[lengths.cpu().argsort(stable=True)] = drawn.repeat_interleave(2, dim=0)[:n] * signs
    return vectors


def _generator(seed: int, doc: int) -> torch.Generator:
    return torch.Generator().manual_seed((seed * 1_000_003 + doc * 7919 + 1) % 2**63)


def _units(x: Tensor) -> Tensor:
    return x / x.norm(dim=1, keepdim=True)
