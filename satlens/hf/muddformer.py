"""MUDDFormer: behind each block, token-dependent mixes of all outputs so far become the next block's four streams."""

from typing import Any, cast

import torch
import torch.nn.functional as F
from einops import rearrange
from jaxtyping import Float
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from satlens.hf.config import MUDDFormerConfig
from satlens.hf.decoder import DecoderForCausalLM, DecoderModel
from satlens.hf.layers import Attention, RMSNorm, new_mlp

WAYS = ("query", "key", "value", "residual")
"""The streams a block reads, in the order of their weights; behind the last block only the residual is made."""


def unit_rms(x: Float[Tensor, "batch pos d_model"], eps: float) -> Float[Tensor, "batch pos d_model"]:
    """RMSNorm without a weight, statistics in float32."""
    full = x.float()
    return (full * torch.rsqrt(full.square().mean(-1, keepdim=True) + eps)).to(x.dtype)


class Aggregation(nn.Module):
    """Depth aggregation behind one block: ``n`` outputs to ``c`` streams, weights from the latest output."""

    def __init__(self, config: MUDDFormerConfig, n_ways: int, n_outputs: int) -> None:
        super().__init__()
        self.eps, self.normed = config.norm_eps, config.use_pre_post_da_norm
        inner = n_ways * n_outputs
        self.w1 = nn.Linear(config.hidden_size, inner, bias=False)
        self.w2 = nn.Linear(inner, inner, bias=False)
        self.w1.start_std, self.w2.start_std = 1 / config.hidden_size, 0.0  # type: ignore[assignment]
        self.static_weight = nn.Parameter(torch.empty(n_ways, n_outputs))
        self.mixing = nn.Identity()  # so that the weights can be read and edited like any other site
        if self.normed:
            width, eps = config.hidden_size, config.norm_eps
            self.pre_da_norms = nn.ModuleList(RMSNorm(width, eps) for _ in range(n_outputs))
            self.post_da_norms = nn.ModuleList(RMSNorm(width, eps, start=1e-3) for _ in range(n_ways))

    def start_values(self) -> dict[str, Tensor]:
        """Every stream is the latest output: through the skip of the post-norms, or by its weight."""
        weight = torch.zeros_like(self.static_weight)
        if not self.normed:
            weight[:, -1] = 1
        return {"static_weight": weight}

    def weights(self, latest: Float[Tensor, "batch pos d_model"]) -> Float[Tensor, "batch pos way output"]:
        """Dynamic plus static weights of every output in every stream."""
        inner = F.gelu(self.w1(unit_rms(latest, self.eps)))
        n_ways = len(self.static_weight)
        return (
            rearrange(self.w2(inner), "b t (way output) -> b t way output", way=n_ways) + self.static_weight
        )

    def forward(self, outputs: tuple[Tensor, ...], latest: Tensor) -> tuple[Tensor, ...]:
        """The streams. ``outputs`` are raw, or under pre-norms already divided by their RMS, which is the same for
        every block and so is made once."""
        weights = self.mixing(self.weights(latest))
        streams = []
        for way in range(weights.shape[2]):
            total = torch.zeros_like(latest)
            for place, output in enumerate(outputs):
                given = cast(Tensor, self.pre_da_norms[place].weight) * output if self.normed else output
                total = total + weights[:, :, way, place, None] * given
            streams.append(latest + self.post_da_norms[way](total) if self.normed else total.to(latest.dtype))
        return tuple(streams)


class MUDDBlock(GradientCheckpointingLayer):
    """``h = r + attn(norm q, norm k, norm v)``, ``X = h + mlp(norm h)``, then the next block's streams."""

    def __init__(self, config: MUDDFormerConfig, layer_idx: int, attention: type[Attention]) -> None:
        super().__init__()
        width, eps = config.hidden_size, config.norm_eps
        self.attn_norm_q = RMSNorm(width, eps)
        self.attn_norm_k = RMSNorm(width, eps)
        self.attn_norm_v = RMSNorm(width, eps)
        self.attn = attention(config, layer_idx)
        self.mlp_norm = RMSNorm(width, eps)
        self.mlp = new_mlp(config, layer_idx)
        last = layer_idx == config.num_hidden_layers - 1
        self.da = Aggregation(config, 1 if last else config.num_ways, layer_idx + 2)
        self.normed, self.eps = config.use_pre_post_da_norm, eps

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, residual: Tensor, *outputs: Tensor, **kwargs: Any
    ) -> tuple[Tensor | None, ...]:
        """``(output, the output as later blocks read it, attention weights or None, next streams...)``. Tensors go in
        and come out one by one, so that reentrant gradient checkpointing sees them."""
        attn_out, weights, _ = self.attn(
            self.attn_norm_q(q), keys_read=self.attn_norm_k(k), values_read=self.attn_norm_v(v), **kwargs
        )
        h = residual + attn_out
        x = h + self.mlp(self.mlp_norm(h))
        kept = unit_rms(x, self.eps) if self.normed else x
        return x, kept, weights, *self.da((*outputs, kept), x)


class MUDDFormerModel(DecoderModel):
    """The stack without a head. Its memory is the four streams and all outputs so far."""

    config_class = MUDDFormerConfig
    block = MUDDBlock

    def begin(self, embedded: Tensor) -> tuple[Tensor, Any]:
        first = unit_rms(embedded, self.config.norm_eps) if self.config.use_pre_post_da_norm else embedded
        return embedded, ((embedded,) * len(WAYS), (first,))

    def advance(
        self, layer: int, block: Any, x: Tensor, memory: Any, **shared: Any
    ) -> tuple[Tensor, Any, Tensor | None]:
        streams, outputs = memory
        x, kept, weights, *streams = block(*streams, *outputs, **shared)
        return x, (tuple(streams), (*outputs, kept)), weights

    def end(self, x: Tensor, memory: Any) -> Tensor:
        (residual,) = memory[0]
        return residual


class MUDDFormerForCausalLM(DecoderForCausalLM):
    """The stack with its head."""

    config_class = MUDDFormerConfig
    stack = MUDDFormerModel
