"""A norm as a formula that reproduces it, so that what becomes of a constant on its way through is known exactly."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True)
class Norm:
    """A norm as a formula: ``gain * (x - centred mean x) / sigma + bias``, ``sigma = sqrt(mean square + eps)``."""

    name: str
    """The module's name within its block."""
    gain: Float[Tensor, " d_model"]
    bias: Float[Tensor, " d_model"]
    """Zeros where the norm has none."""
    centred: bool
    """LayerNorm takes the mean over coordinates away first, RMSNorm does not."""
    eps: float
    module: nn.Module

    def inverse_sigma(self, x: Float[Tensor, "... d_model"]) -> Float[Tensor, "..."]:
        """``1 / sigma`` of each position, float32."""
        full = x.float()
        square = torch.linalg.vector_norm(full, dim=-1).square() / full.shape[-1]
        if self.centred:  # the textbook formula, a few per cent of the time that torch's variance takes
            square = square - full.mean(-1).square()
        return torch.rsqrt(square + self.eps)


def as_formula(name: str, module: nn.Module, like: Tensor) -> Norm | None:
    """The norm as a formula, if one reproduces it; gains are stored as they are, or (Gemma) minus 1.

    It is tried on numbers with a mean, without which LayerNorm and RMSNorm are the same.
    """
    weight = getattr(module, "weight", None)
    eps = next(
        (getattr(module, key) for key in ("eps", "variance_epsilon", "norm_eps") if hasattr(module, key)),
        None,
    )
    if eps is None or (weight is not None and weight.shape != like.shape[-1:]):
        return None
    x = torch.linspace(-1, 3, like.shape[-1], device=like.device).to(like.dtype)[None, None]
    output = module(x)
    stored = torch.ones(x.shape[-1], device=x.device) if weight is None else weight.detach().float()
    own = getattr(module, "bias", None)
    bias = torch.zeros_like(stored) if own is None else own.detach().float()
    for gain in (stored, stored + 1):
        for centred in (True, False):
            norm = Norm(name=name, gain=gain, bias=bias, centred=centred, eps=float(eps), module=module)
            full = x.float()
            moved = full - full.mean(-1, keepdim=True) if centred else full
            if close(moved * norm.inverse_sigma(x)[..., None] * gain + bias, output):
                return norm
    return None


def close(one: Tensor, other: Tensor) -> bool:
    """Equal to rounding of the model's dtype, on the scale of the larger."""
    if one.shape != other.shape:
        return False
    loose = {torch.float32: 1e-4, torch.float64: 1e-8}.get(other.dtype, 3e-2)
    return apart(one, other) <= loose * max(float(other.float().abs().max()), 1e-6)


def apart(one: Tensor, other: Tensor) -> float:
    """Largest difference between two tensors of a shape."""
    return float((one.float() - other.float()).abs().max())
