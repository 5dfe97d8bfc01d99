"""SATFormer: later layers add the first layer's values, scaled by a gate per token and KV head (paper, eq. 2-3)."""

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor, nn

from satlens.hf.config import SATFormerConfig
from satlens.hf.decoder import DecoderForCausalLM, DecoderModel
from satlens.hf.layers import Attention


class Gate(nn.Module):
    """Gate logits to alpha. Parameter-free and a module of its own, so that alpha is an ordinary hook point."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, logits: Float[Tensor, "batch pos kv_head"]) -> Float[Tensor, "batch pos kv_head"]:
        """Softmax gates are scaled by the number of heads, so that their mean over heads is 1."""
        n_heads = logits.shape[-1]
        match self.kind:
            case "relu":
                return torch.relu(logits)
            case "sigmoid":
                return torch.sigmoid(logits)
            case "tanh":
                return torch.tanh(logits)
            case "identity":
                return logits
            case "softmax":
                return n_heads * torch.softmax(logits, dim=-1)
            case "softmax_sigmoid":
                return n_heads * torch.softmax(logits, dim=-1) * torch.sigmoid(logits)
        raise ValueError(f"unknown gate {self.kind!r}")


class ValueResidualMixing(nn.Module):
    """``V' = V + alpha V1`` with ``alpha = gate(W_alpha h)``."""

    def __init__(self, config: SATFormerConfig) -> None:
        super().__init__()
        self.alpha_proj = nn.Linear(
            config.hidden_size, config.n_kv_heads, bias=config.value_residual_proj_bias
        )
        self.gate = Gate(config.value_residual_gate)

    def forward(
        self,
        v: Float[Tensor, "batch pos kv_head d_head"],
        v1: Float[Tensor, "batch pos kv_head d_head"],
        hidden_states: Float[Tensor, "batch pos d_model"],
    ) -> Float[Tensor, "batch pos kv_head d_head"]:
        alpha = self.gate(self.alpha_proj(hidden_states).to(v.dtype))
        return v + rearrange(alpha, "batch pos kv_head -> batch pos kv_head 1") * v1


class SATFormerAttention(Attention):
    """Attention whose layer 0 hands out its values and whose mixing layers read them."""

    def __init__(self, config: SATFormerConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.writes = layer_idx == 0 and config.use_value_residual
        self.mixes = config.mixes(layer_idx)
        if self.writes or self.mixes:  # where V1 is written (layer 0) or read (mixing layers): one edge each
            self.first_value = nn.Identity()
        if self.mixes:
            self.value_residual_mixing = ValueResidualMixing(config)

    def mix_values(
        self, v: Tensor, h: Tensor, v1: Tensor | None, coefficient: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        if self.writes:
            return v, self.first_value(v)
        if self.mixes:
            if v1 is None:
                raise ValueError(f"layer {self.layer_idx} mixes first-layer values but got none: pass v1")
            v = self.value_residual_mixing(v, self.first_value(v1), h)
        return v, v1


class SATFormerModel(DecoderModel):
    """The stack without a head."""

    config_class = SATFormerConfig
    attention = SATFormerAttention


class SATFormerForCausalLM(DecoderForCausalLM):
    """The stack with its head."""

    config_class = SATFormerConfig
    stack = SATFormerModel
