"""The parts every architecture is made of: RMSNorm, rotary positions, MLPs, attention with a value seam."""

from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from satlens.hf.config import SharedConfig

QK_NORM_EPS = 1e-5  # the official q/k norms ignore norm_eps


class RMSNorm(nn.Module):
    """``w * x / sqrt(mean(x^2) + eps)``, statistics in float32, result in the dtype of ``x``."""

    def __init__(self, width: int, eps: float, start: float = 1.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((width,), start))
        self.variance_epsilon, self.start = eps, start

    def forward(self, x: Float[Tensor, "... width"]) -> Float[Tensor, "... width"]:
        full = x.float()
        scale = torch.rsqrt(full.square().mean(-1, keepdim=True) + self.variance_epsilon)
        return (full * scale * self.weight.float()).to(x.dtype)


class Rotary(nn.Module):
    """Cosine and sine tables of the half-split (NeoX) rotation, for the positions asked for."""

    def __init__(self, d_head: int, theta: float) -> None:
        super().__init__()
        self.d_head, self.theta = d_head, theta

    def forward(self, position_ids: Int[Tensor, "rows pos"]) -> tuple[Tensor, Tensor]:
        """Float32 ``(cos, sin)``, each ``[rows pos d_head]``. Angles are made here, not kept in a buffer, so that
        casting a model to bfloat16 cannot spoil them."""
        even = torch.arange(0, self.d_head, 2, dtype=torch.float32, device=position_ids.device)
        angle = position_ids[..., None].float() * self.theta ** -(even / self.d_head)
        angle = torch.cat((angle, angle), dim=-1)
        return angle.cos(), angle.sin()


def rotate(x: Float[Tensor, "batch head pos d_head"], cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate queries or keys; ``cos`` and ``sin`` are ``[rows pos d_head]`` with rows = batch or 1."""
    first, second = x.chunk(2, dim=-1)
    half_turned = torch.cat((-second, first), dim=-1)
    return x * cos[:, None].to(x.dtype) + half_turned * sin[:, None].to(x.dtype)


class SwiGLU(nn.Module):
    """``down(silu(gate x) * up x)``; biases only where the config asks for them."""

    def __init__(self, config: SharedConfig, width: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, width, bias=config.mlp_bias)
        self.up_proj = nn.Linear(config.hidden_size, width, bias=config.mlp_bias)
        self.down_proj = nn.Linear(width, config.hidden_size, bias=config.mlp_bias)
        self.act_fn = nn.SiLU()

    def forward(self, x: Float[Tensor, "batch pos d_model"]) -> Float[Tensor, "batch pos d_model"]:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class PlainMLP(nn.Module):
    """``down(gelu(up x))`` with the exact GELU, the MLP of the paper's development study (our own option)."""

    def __init__(self, config: SharedConfig, width: int) -> None:
        super().__init__()
        self.up_proj = nn.Linear(config.hidden_size, width, bias=config.mlp_bias)
        self.down_proj = nn.Linear(width, config.hidden_size, bias=config.mlp_bias)
        self.act_fn = nn.GELU()

    def forward(self, x: Float[Tensor, "batch pos d_model"]) -> Float[Tensor, "batch pos d_model"]:
        return self.down_proj(self.act_fn(self.up_proj(x)))


def new_mlp(config: SharedConfig, layer_idx: int) -> nn.Module:
    """The MLP that the config names, as wide as the layer's is."""
    width = config.mlp_width_of(layer_idx)
    return PlainMLP(config, width) if config.mlp == "gelu" else SwiGLU(config, width)


class FrozenZero(nn.Linear):
    """The output projection of a disabled attention: zero, and no optimizer moves it (paper B, section 7)."""

    def __init__(self, in_features: int, out_features: int, bias: bool = False) -> None:
        super().__init__(in_features, out_features, bias)
        self.requires_grad_(False)


class Attention(nn.Module):
    """Causal attention; ``mix_values`` is the seam where value-residual architectures act."""

    def __init__(self, config: SharedConfig, layer_idx: int) -> None:
        super().__init__()
        d_model, d_head = config.hidden_size, config.head_dim
        self.config, self.layer_idx, self.head_dim = config, layer_idx, d_head
        kv_width = config.n_kv_heads * d_head
        self.q_proj = nn.Linear(d_model, d_model, bias=config.qkv_bias)
        self.k_proj = nn.Linear(d_model, kv_width, bias=config.qkv_bias)
        self.v_proj = nn.Linear(d_model, kv_width, bias=config.qkv_bias)
        output = FrozenZero if config.attention_disabled else nn.Linear
        self.o_proj = output(d_model, d_model, bias=False)
        if config.qk_norm:
            self.q_norm = RMSNorm(d_head, QK_NORM_EPS)
            self.k_norm = RMSNorm(d_head, QK_NORM_EPS)
        # a module of its own so that attention weights can be read and edited like any other site
        self.pattern = nn.Identity()
        self.query_blocks = 1  # above 1: blocked_attention, faster than the fused kernel for training on CPU

    def mix_values(
        self,
        v: Float[Tensor, "batch pos kv_head d_head"],
        h: Float[Tensor, "batch pos d_model"],
        v1: Tensor | None,
        coefficient: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """The values attention will use, and the first layer's values to hand on."""
        return v, v1

    def forward(
        self,
        hidden_states: Float[Tensor, "batch pos d_model"],
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Bool[Tensor, "rows 1 pos key"] | None = None,
        v1: Float[Tensor, "batch pos kv_head d_head"] | None = None,
        cache: Any = None,
        output_attentions: bool = False,
        coefficient: Float[Tensor, ""] | None = None,
        keys_read: Float[Tensor, "batch pos d_model"] | None = None,
        values_read: Float[Tensor, "batch pos d_model"] | None = None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """``(output, attention weights or None, v1)``. The weights stand second because that is where hook
        libraries look for them.

        ``coefficient`` scales V1 (ResFormer). ``keys_read`` and ``values_read``: what keys and values are made of,
        where that is another stream than the queries' (MUDDFormer)."""
        split = "batch pos (head d_head) -> batch pos head d_head"
        of_keys = hidden_states if keys_read is None else keys_read
        of_values = hidden_states if values_read is None else values_read
        q = rearrange(self.q_proj(hidden_states), split, d_head=self.head_dim)
        k = rearrange(self.k_proj(of_keys), split, d_head=self.head_dim)
        v = rearrange(self.v_proj(of_values), split, d_head=self.head_dim)
        v, v1 = self.mix_values(v, hidden_states, v1, coefficient)
        if self.config.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        q, k = rotate(q, *position_embeddings), rotate(k, *position_embeddings)
        if cache is not None:  # mixed values are cached, so decoding needs no V1 of earlier tokens
            k, v = cache.update(k, v, self.layer_idx)
        if output_attentions:
            z, weights = explicit_attention(q, k, v, attention_mask, self.pattern)
        elif self.query_blocks > 1 and attention_mask is None and q.shape[2] % self.query_blocks == 0:
            z, weights = blocked_attention(q, k, v, self.query_blocks), None
        else:
            z, weights = fused_attention(q, k, v, attention_mask), None
        out = self.o_proj(rearrange(z, "batch head pos d_head -> batch pos (head d_head)"))
        return out, weights, v1


def fused_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Scaled dot-product attention by torch's fused kernels; no mask means plain causal."""
    grouped = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=grouped)


def blocked_attention(q: Tensor, k: Tensor, v: Tensor, n_blocks: int) -> Tensor:
    """Causal attention in query blocks that never touch the keys ahead of them, made for a compiler to fuse.

    On CPU the fused kernel's backward pass is slow for narrow heads; compiled, this takes about half its time.
    """
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    width, q, out = q.shape[2] // n_blocks, q * q.shape[-1] ** -0.5, []
    future = torch.ones(width, width, dtype=torch.bool, device=q.device).triu(1)
    for start in range(0, q.shape[2], width):
        stop = start + width
        scores = (q[:, :, start:stop] @ k[:, :, :stop].transpose(-1, -2)).float()
        hidden = F.pad(future, (start, 0))
        weights = scores.masked_fill(hidden, float("-inf")).softmax(dim=-1).to(v.dtype)
        out.append(weights @ v[:, :, :stop])
    return torch.cat(out, dim=2)


def explicit_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, pattern: nn.Module
) -> tuple[Tensor, Float[Tensor, "batch head pos key"]]:
    """The same attention with its weights laid open (softmax in float32)."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    if mask is None:
        mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()
    scores = (q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5).float().masked_fill(~mask, float("-inf"))
    weights = pattern(scores.softmax(dim=-1).to(q.dtype))
    return weights @ v, weights


def attention_mask(
    padding: Int[Tensor, "batch key"] | None,
    n_new: int,
    n_past: int,
    window: int | None,
    device: torch.device,
) -> Bool[Tensor, "rows 1 pos key"] | None:
    """Which keys each query sees, or None for plain causal attention (the fused fast path).

    A query always sees itself, so that a padded row has a defined (and unused) output instead of NaN.
    """
    n_keys = n_past + n_new
    if padding is not None and bool(padding.all()):
        padding = None
    if padding is None and (window is None or window >= n_keys) and (n_past == 0 or n_new == 1):
        return None if n_past == 0 else torch.ones(1, 1, n_new, n_keys, dtype=torch.bool, device=device)
    query = torch.arange(n_past, n_keys, device=device)[:, None]
    key = torch.arange(n_keys, device=device)[None, :]
    seen = key <= query
    if window is not None:
        seen &= query - key < window
    seen = seen[None, None]
    if padding is not None:
        seen = seen & (padding[:, None, None, :].bool() | (key == query))
    return seen
