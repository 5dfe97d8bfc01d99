"""What is done to the residual stream at a layer's input: pure functions of tensors, exact where nothing changes.

Every edit is a displacement ``by`` added at the positions it may touch. A position whose displacement is zero in every
coordinate keeps its bits, so that alpha = 1, a direction replaced by itself and noise of size 0 are exact no-ops by
construction and not by a special case. Arithmetic is float32 whatever the model's dtype.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from satlens.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Where:
    """The positions of a batch that an edit may touch, and whose they are."""

    far: Bool[Tensor, "batch pos"]
    """True from the first counted position on; padding and the first positions of a document are false."""
    doc: Int[Tensor, " batch"]
    """Document of each row: what an edit draws at random depends on this, never on how rows were batched."""


Displacement = Callable[[Tensor, Where], Tensor]
"""``(residual [batch pos d_model] in float32, where) -> what is added``."""
Edit = Callable[[Tensor, Where], Tensor]
"""``(residual [batch pos d_model], where) -> the residual the layer will read instead``, same dtype."""


@dataclass(frozen=True, kw_only=True)
class Change:
    """One condition: edits at one or more sites, and the words that tables know it by."""

    edits: Mapping[tuple[str, int], Edit]
    """(role, layer) -> edit; the residual at several layers' inputs at once is co-removal."""
    labels: Mapping[str, object] = field(default_factory=dict)
    """Columns of result tables: experiment, alpha, control, draw, ..."""
    identity: bool = False
    """Whether this setting must change no bit (alpha = 1): a run in which it does is wrong and stops."""

    @property
    def start(self) -> int:
        """First edited layer: the pass begins there."""
        return min(layer for _, layer in self.edits)

    @property
    def name(self) -> str:
        """The labels in one line, for messages."""
        return ", ".join(f"{key} {value}" for key, value in self.labels.items()) or "unnamed"


def coefficient(
    x: Float[Tensor, "batch pos d_model"], unit: Float[Tensor, " d_model"]
) -> Float[Tensor, "batch pos 1"]:
    """``x . unit`` at every position."""
    return (x * unit).sum(-1, keepdim=True)


def dose(unit: Float[Tensor, " d_model"], alpha: float) -> Displacement:
    """``(alpha - 1)(x . m^) m^``: 0 removes the reference, 2 doubles it (spec part B, dose-response)."""
    return lambda x, where: (alpha - 1) * coefficient(x, unit) * unit


def matched(
    unit: Float[Tensor, " d_model"], other: Float[Tensor, " d_model"], alpha: float, signed: bool = False
) -> Displacement:
    """A dose's control: as long a displacement at every position, along ``other`` instead of m^.

    Unsigned is ``(alpha - 1)|x . m^| r``, which for removal is the paper's ``x - |x . m^| r``; signed keeps the sign of
    the projection (spec part B, controls).
    """

    def by(x: Tensor, where: Where) -> Tensor:
        along = coefficient(x, unit)
        return (alpha - 1) * (along if signed else along.abs()) * other

    return by


def published_unmatched(other: Float[Tensor, " d_model"], alpha: float) -> Displacement:
    """``(alpha - 1)|x . r| r``: the published cross-model control, which moves the residual about 20 times less.

    It is not a matched control; it exists to explain published numbers and carries that name in every table.
    """
    return lambda x, where: (alpha - 1) * coefficient(x, other).abs() * other


def replacement(unit: Float[Tensor, " d_model"], other: Float[Tensor, " d_model"]) -> Displacement:
    """``-(x . m^) m^ + (x . m^) c``: the projection keeps size, sign and timing and changes its direction to ``c``."""
    return lambda x, where: coefficient(x, unit) * (other - unit)


def edit(by: Displacement, keep_norm: bool = False, window: tuple[int, int] | None = None) -> Edit:
    """Turn a displacement into an edit of far positions.

    ``keep_norm`` rescales every touched position to the length it had, so that the direction alone has changed and not
    what a norm will divide by. ``window`` touches positions ``start <= t < stop`` only.

    Raises:
        UserError: an empty window.
    """
    if window is not None and not 0 <= window[0] < window[1]:
        raise UserError(f"a window of positions {window[0]} to {window[1] - 1} holds nothing")

    def apply(residual: Tensor, where: Where) -> Tensor:
        x = residual.float()
        moved = by(x, where)
        new = x + moved
        if keep_norm:
            now = _length(new)
            new = torch.where(now > 0, new * (_length(x) / now), new)
        touched = inside(where.far, window)[..., None] & (moved != 0).any(-1, keepdim=True)
        return torch.where(touched, new.to(residual.dtype), residual)

    return apply


def after_attention(layer: int, by: Displacement) -> dict[tuple[str, int], Edit]:
    """Edits that displace the stream behind a layer's attention, by what its input says: attention does not see it.

    For blocks whose attention writes into the stream before the MLP reads it; what attention would have answered to the
    displacement is the difference to ``edit(by)`` of the layer's input.
    """
    kept: dict[str, Tensor] = {}

    def remember(residual: Tensor, where: Where) -> Tensor:
        kept["residual"] = residual
        return residual

    def add(write: Tensor, where: Where) -> Tensor:
        moved = by(kept["residual"].float(), where)
        touched = where.far[..., None] & (moved != 0).any(-1, keepdim=True)
        return torch.where(touched, (write.float() + moved).to(write.dtype), write)

    return {("resid", layer): remember, ("attn_out", layer): add}


def inside(far: Bool[Tensor, "batch pos"], window: tuple[int, int] | None) -> Bool[Tensor, "batch pos"]:
    """Far positions, of the window only where there is one."""
    if window is None:
        return far
    at = torch.arange(far.shape[1], device=far.device)
    return far & (at >= window[0]) & (at < window[1])


def _length(x: Tensor) -> Tensor:
    return x.norm(dim=-1, keepdim=True)
