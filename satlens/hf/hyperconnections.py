"""HyperConnections: several residual streams; a sub-layer reads a mix of them and writes to all, by learned weights."""

import math
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from satlens.hf.config import HyperConnectionsConfig
from satlens.hf.decoder import DecoderForCausalLM, DecoderModel
from satlens.hf.layers import Attention, RMSNorm, new_mlp

RMS_EPS = torch.finfo(torch.float32).eps  # what torch's own RMSNorm takes when none is given, in bfloat16 too


class HyperConnection(nn.Module):
    """How one sub-layer reads the streams (first column of A), mixes them (the others) and writes to them (b)."""

    def __init__(self, config: HyperConnectionsConfig, place: int) -> None:
        super().__init__()
        n, width = config.expansion_rate, config.hidden_size
        self.n, self.place, self.dynamic, self.squashed = n, place, config.use_dynamic_hc, config.use_tanh
        self.static_beta = nn.Parameter(torch.empty(n))
        self.static_alpha = nn.Parameter(torch.empty(n, n + 1))
        # modules of their own so that the weights can be read and edited like any other site
        self.alpha, self.beta = nn.Identity(), nn.Identity()
        if self.dynamic:
            layer_norm = config.hc_norm_type == "layer"
            self.norm = nn.LayerNorm(width) if layer_norm else RMSNorm(width, RMS_EPS)
            self.dynamic_alpha_proj = nn.Parameter(torch.empty(width, n + 1))
            self.dynamic_beta_proj = nn.Parameter(torch.empty(width))
            self.dynamic_alpha_scale = nn.Parameter(torch.empty(1))
            self.dynamic_beta_scale = nn.Parameter(torch.empty(1))

    def start_values(self) -> dict[str, Tensor]:
        """Read stream ``place mod n``, keep all streams, write to all: with equal streams a Transformer."""
        alpha = torch.zeros_like(self.static_alpha)
        alpha[self.place % self.n, 0] = 1
        alpha[:, 1:].fill_diagonal_(1)
        values = {"static_beta": torch.ones_like(self.static_beta), "static_alpha": alpha}
        if self.dynamic:
            for name in ("dynamic_alpha", "dynamic_beta"):
                values[f"{name}_proj"] = torch.zeros_like(getattr(self, f"{name}_proj"))
                values[f"{name}_scale"] = torch.full_like(getattr(self, f"{name}_scale"), 0.01)
        return values

    def weights(
        self, streams: Float[Tensor, "batch pos stream d_model"]
    ) -> tuple[Float[Tensor, "batch pos stream column"], Float[Tensor, "batch pos stream"]]:
        """A and b of every token. A's first column is what the sub-layer reads, the others what each stream becomes."""
        alpha, beta = self.static_alpha, self.static_beta
        if self.dynamic:
            normed = self.norm(streams)
            towards = normed @ self.dynamic_alpha_proj, normed @ self.dynamic_beta_proj
            if self.squashed:
                towards = towards[0].tanh(), towards[1].tanh()
            alpha = alpha + self.dynamic_alpha_scale * towards[0]
            beta = beta + self.dynamic_beta_scale * towards[1]
        rows = streams.shape[:2]
        return alpha.expand(*rows, -1, -1).to(streams.dtype), beta.expand(*rows, -1).to(streams.dtype)

    def forward(
        self, streams: Float[Tensor, "batch pos stream d_model"]
    ) -> tuple[Tensor, Tensor, Float[Tensor, "batch pos stream"]]:
        """``(what the sub-layer reads [batch pos d_model], streams carried on, weights of what it writes)``."""
        alpha, beta = self.weights(streams)
        mixed = self.alpha(alpha).transpose(-1, -2) @ streams
        return mixed[:, :, 0], mixed[:, :, 1:], self.beta(beta)


def written(carried: Tensor, beta: Tensor, output: Tensor) -> Float[Tensor, "batch pos stream d_model"]:
    """Each stream plus its share of what the sub-layer wrote: there is no other residual connection."""
    return carried + beta[..., None] * output[:, :, None]


class HyperBlock(GradientCheckpointingLayer):
    """Attention and MLP, each between a reading and a writing of the streams."""

    def __init__(self, config: HyperConnectionsConfig, layer_idx: int, attention: type[Attention]) -> None:
        super().__init__()
        self.attn_hc = HyperConnection(config, 2 * layer_idx)
        self.attn_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.attn = attention(config, layer_idx)
        self.mlp_hc = HyperConnection(config, 2 * layer_idx + 1)
        self.mlp_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mlp = new_mlp(config, layer_idx)
        # the reference divides here where the original paper multiplies
        std = config.initializer_range / math.sqrt(config.expansion_rate)
        self.attn.o_proj.start_std = self.mlp.down_proj.start_std = std  # type: ignore[assignment,union-attr]

    def forward(
        self, streams: Float[Tensor, "batch pos stream d_model"], **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """``(streams, attention weights or None)``."""
        read, carried, beta = self.attn_hc(streams)
        attn_out, weights, _ = self.attn(self.attn_norm(read), **kwargs)
        streams = written(carried, beta, attn_out)
        read, carried, beta = self.mlp_hc(streams)
        return written(carried, beta, self.mlp(self.mlp_norm(read))), weights


class HyperConnectionsModel(DecoderModel):
    """The stack without a head; what is said of its stream is the sum over streams."""

    config_class = HyperConnectionsConfig
    block = HyperBlock

    def begin(self, embedded: Tensor) -> tuple[Tensor, Any]:
        n = self.config.expansion_rate
        return embedded[:, :, None].expand(-1, -1, n, -1), None

    def advance(
        self, layer: int, block: Any, x: Tensor, memory: Any, **shared: Any
    ) -> tuple[Tensor, Any, Tensor | None]:
        x, weights = block(x, **shared)
        return x, None, weights

    def reported(self, x: Tensor, memory: Any) -> Tensor:
        return x.sum(dim=2)

    def end(self, x: Tensor, memory: Any) -> Tensor:
        return x.sum(dim=2)


class HyperConnectionsForCausalLM(DecoderForCausalLM):
    """The stack with its head."""

    config_class = HyperConnectionsConfig
    stack = HyperConnectionsModel
