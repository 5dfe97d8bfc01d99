"""ResFormer behind a bridge: its two learned scalars a layer are hooks, laid out as a gate is.

``gate`` is lambda_1, the coefficient of V1, and ``own_scale`` is lambda_2, that of the layer's own values. Both are the
same number at every token and KV head; as views of that shape they can be edited where one likes.
"""

from typing import Any

from torch import Tensor
from transformer_lens.hook_points import HookPoint

from satlens.architectures.value_residual import (
    ValueResidualAdapter,
    Values,
    mixing_layers,
    value_residual_names,
)
from satlens.hf.resformer import mixed

MODEL_TYPE = "ResFormer"
ARCHITECTURE = "ResFormerForCausalLM"


class Mixing(Values):
    """``V' = lambda_1 V1 + lambda_2 V`` with the scalars spread over tokens and heads (views: nothing is copied)."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.hook_gate, self.hook_own_scale = HookPoint(), HookPoint()

    def forward(self, v: Tensor, v1: Tensor, coefficient: Tensor) -> Tensor:
        mixing: Any = self.original_component
        v, shape = self.hook_in(v), v.shape[:3]
        of_first = self.hook_gate(coefficient.expand(shape))
        of_own = self.hook_own_scale(mixing.lambda2.expand(shape))
        out: Tensor = self.hook_out(mixed(of_first[..., None], v1, of_own[..., None], v))
        return out


class Adapter(ValueResidualAdapter):
    """The mixing with its two scalars."""

    def mix(self) -> Values:
        return Mixing("value_residual_mixing")


def names(config: Any) -> dict[str, dict[int, str]]:
    """Role -> layer -> hook name."""
    return value_residual_names(config, gate="hook_gate", own_scale="hook_own_scale")


def gate_kind(config: Any) -> str | None:
    """``static``: one learned constant a layer, if any layer mixes values."""
    return "static" if mixing_layers(config) else None
