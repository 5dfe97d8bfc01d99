"""ResFormer: later layers mix the first layer's values with one learned scalar a layer ("Learnable ResFormer Plus")."""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from satlens.hf.config import ResFormerConfig
from satlens.hf.decoder import DecoderForCausalLM, DecoderModel
from satlens.hf.layers import Attention


class LambdaManager(nn.Module):
    """``lambda1 = scale * softmax(logits)`` over the layers but the first, whether they mix or not."""

    def __init__(self, config: ResFormerConfig) -> None:
        super().__init__()
        self.n_layers = config.num_hidden_layers
        self.lambda_scale = nn.Parameter(torch.empty(()))
        self.lambda_logits = nn.Parameter(torch.empty(self.n_layers - 1))

    def start_values(self) -> dict[str, Tensor]:
        """A sum of lambdas that is the number of layers, shared evenly."""
        return {
            "lambda_scale": torch.full_like(self.lambda_scale, self.n_layers),
            "lambda_logits": torch.zeros_like(self.lambda_logits),
        }

    def forward(self) -> Float[Tensor, " layer_after_first"]:
        """``lambda1``; entry i - 1 belongs to layer i."""
        return self.lambda_scale * self.lambda_logits.softmax(dim=0)


def mixed(of_first: Tensor, v1: Tensor, of_own: Tensor, v: Tensor) -> Tensor:
    """``of_first V1 + of_own V``, in the dtype of V; the coefficients are scalars or have an axis of 1 for d_head."""
    return (of_first * v1 + of_own * v).to(v.dtype)


class ValueResidualMixing(nn.Module):
    """``V' = lambda1 V1 + lambda2 V``; a module of its own so that mixed values are an ordinary hook point."""

    def __init__(self, config: ResFormerConfig) -> None:
        super().__init__()
        self.start = config.value_residual_lambda2_init
        self.lambda2 = nn.Parameter(torch.empty(()))

    def start_values(self) -> dict[str, Tensor]:
        """The config's lambda2."""
        return {"lambda2": torch.full_like(self.lambda2, self.start)}

    def forward(
        self,
        v: Float[Tensor, "batch pos kv_head d_head"],
        v1: Float[Tensor, "batch pos kv_head d_head"],
        coefficient: Float[Tensor, ""],
    ) -> Float[Tensor, "batch pos kv_head d_head"]:
        return mixed(coefficient, v1, self.lambda2, v)


class ResFormerAttention(Attention):
    """Attention whose layer 0 hands out its values and whose mixing layers read them."""

    def __init__(self, config: ResFormerConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.writes = layer_idx == 0 and config.use_value_residual
        self.mixes = config.mixes(layer_idx)
        if self.writes or self.mixes:
            self.first_value = nn.Identity()
        if self.mixes:
            self.value_residual_mixing = ValueResidualMixing(config)

    def mix_values(
        self, v: Tensor, h: Tensor, v1: Tensor | None, coefficient: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        if self.writes:
            return v, self.first_value(v)
        if self.mixes:
            if v1 is None or coefficient is None:
                raise ValueError(
                    f"layer {self.layer_idx} mixes first-layer values but got none: pass v1 and coefficient"
                )
            v = self.value_residual_mixing(v, self.first_value(v1), coefficient)
        return v, v1


class ResFormerModel(DecoderModel):
    """The stack without a head."""

    config_class = ResFormerConfig
    attention = ResFormerAttention

    def add_parts(self, config: ResFormerConfig) -> None:
        if config.use_value_residual:
            self.lambda_manager = LambdaManager(config)
            # where no layer mixes nothing reads the lambdas: DDP would wait for gradients that never come
            mixing = any(config.mixes(layer) for layer in range(config.num_hidden_layers))
            self.lambda_manager.requires_grad_(mixing)

    def advance(
        self, layer: int, block: Any, x: Tensor, memory: Any, **shared: Any
    ) -> tuple[Tensor, Any, Tensor | None]:
        mixes = self.config.mixes(layer)
        coefficient = self.lambda_manager()[layer - 1] if mixes else None
        x, memory, weights = block(x, memory, coefficient, **shared)
        return x, memory, weights


class ResFormerForCausalLM(DecoderForCausalLM):
    """The stack with its head."""

    config_class = ResFormerConfig
    stack = ResFormerModel
