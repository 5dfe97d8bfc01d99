"""How much of each V1 latent does a head take in, what else does it take in, and where would that go in the logits?

For KV head ``j`` of layer ``n``, ``S[tok]`` is alpha summed over the positions of a token (stored by satlens gates),
``a_f(tok)`` the activation of latent ``f`` and ``d_f[j]`` its decoder row for that head. With a gate that can be
negative, sums and shares are signed: what a head subtracts counts against what it adds.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from sae.dictionary import Codes, Dictionary
from satlens.gate_sums import GateSums
from satlens.sites import Sites

CHUNK_VALUES = 1 << 23
"""Float64 values held at once (64 MiB)."""


@dataclass(frozen=True, kw_only=True)
class Lengths:
    """V1 of each token id and head as a length, split into what the dictionary says it is made of.

    Each part is its component along V1 itself, so that the parts of one vector add up to its length.
    """

    total: Float[Tensor, "token kv_head"]
    active: Float[Tensor, "token k kv_head"]
    """Of each active latent, in the order of the codes."""
    bias: Float[Tensor, "token kv_head"]
    """Of the decoder's bias."""
    error: Float[Tensor, "token kv_head"]
    """Of what the dictionary does not reconstruct."""


@dataclass(frozen=True, kw_only=True)
class Intake:
    """What every head takes in of every latent, and its V1 intake as a whole; per position of the text."""

    activation: Float[Tensor, "latent layer kv_head"]
    """Mean of alpha times activation."""
    share: Float[Tensor, "latent layer kv_head"]
    """Part of the head's intake length; with bias and error these add up to 1. NaN where the head takes in nothing."""
    bias: Float[Tensor, "layer kv_head"]
    error: Float[Tensor, "layer kv_head"]
    length: Float[Tensor, "layer kv_head"]
    """Mean of alpha times the length of V1."""


def by_head(dictionary: Dictionary, n_heads: int) -> Float[Tensor, "latent kv_head d_head"]:
    """Decoder rows cut into heads, in float64."""
    return dictionary.W_dec.double().cpu().unflatten(1, (n_heads, -1))


def lengths(dictionary: Dictionary, codes: Codes, rows: Float[Tensor, "token d_in"], n_heads: int) -> Lengths:
    """Split the V1 vectors ``rows``, whose codes are ``codes``, along themselves."""
    v1 = rows.double().unflatten(1, (n_heads, -1))
    total = v1.norm(dim=-1)
    along = torch.where(total[..., None] > 0, v1 / total[..., None], 0.0)
    decoder, act = by_head(dictionary, n_heads)[codes.latent], codes.act.double()
    active = act[..., None] * torch.einsum("tkjr,tjr->tkj", decoder, along)
    bias = (dictionary.b_dec.double().unflatten(0, (n_heads, -1)) * along).sum(-1)
    rest = (
        v1
        - torch.einsum("tk,tkjr->tjr", act, decoder)
        - dictionary.b_dec.double().unflatten(0, (n_heads, -1))
    )
    return Lengths(total=total, active=active, bias=bias, error=(rest * along).sum(-1))


def chunks(n_tokens: int, k: int, d_in: int, n_gates: int) -> list[slice]:
    """Token ranges whose largest array stays bounded."""
    step = max(1, CHUNK_VALUES // (k * max(d_in, n_gates)))
    return [slice(start, min(start + step, n_tokens)) for start in range(0, n_tokens, step)]


def head_intake(
    dictionary: Dictionary, codes: Codes, rows: Float[Tensor, "d_vocab d_in"], gates: GateSums
) -> Intake:
    """Intake of every latent by every gated head, from the tokens that the gates run counted."""
    seen = torch.from_numpy(np.flatnonzero(gates.count))
    n_layers, n_heads = gates.sum.shape[1:]
    sums = torch.from_numpy(gates.sum)
    shape = (dictionary.d_sae, n_layers, n_heads)
    activation, share = (torch.zeros(shape, dtype=torch.float64) for _ in range(2))
    whole = torch.zeros(3, n_layers, n_heads, dtype=torch.float64)
    for part in chunks(len(seen), codes.act.shape[1], dictionary.d_in, n_layers * n_heads):
        ids = seen[part]
        here = Codes(latent=codes.latent[ids].cpu(), act=codes.act[ids].cpu())
        split, gate = lengths(dictionary, here, rows[ids].cpu(), n_heads), sums[ids]
        flat, act = here.latent.flatten(), here.act.double()
        activation.index_add_(0, flat, torch.einsum("tk,tnj->tknj", act, gate).flatten(0, 1))
        share.index_add_(0, flat, torch.einsum("tkj,tnj->tknj", split.active, gate).flatten(0, 1))
        for at, value in enumerate((split.total, split.bias, split.error)):
            whole[at] += torch.einsum("tj,tnj->nj", value, gate)
    total = torch.where(whole[0] != 0, whole[0], torch.nan)
    n_tokens = int(gates.count.sum())
    return Intake(
        activation=activation / n_tokens,
        share=share / total,
        bias=whole[1] / total,
        error=whole[2] / total,
        length=whole[0] / n_tokens,
    )


@dataclass(frozen=True, kw_only=True)
class DirectPath:
    """What a head writes of a vector, seen by the logits at once: output map, final norm's gain, unembedding.

    The norm's scale and every later layer are left out, so sizes compare within a layer better than between layers.
    """

    output: Float[Tensor, "layer d_model head_d_head"]
    """Output maps of the gated layers, all query heads side by side."""
    gain: Float[Tensor, " d_model"]
    unembed: Float[Tensor, "d_vocab d_model"]
    n_heads: int
    """Query heads."""

    def written(self, layer: int, head: int) -> Float[Tensor, "d_model d_head"]:
        """What query head ``head`` of the ``layer``-th gated layer makes of a mixed value, times the gain."""
        d_head = self.output.shape[2] // self.n_heads
        return self.gain[:, None] * self.output[layer][:, head * d_head : (head + 1) * d_head]

    def logits(
        self, layer: int, head: int, vectors: Float[Tensor, "row d_head"]
    ) -> Float[Tensor, "row d_vocab"]:
        """Direct-path logits, centred over the vocabulary (a constant changes no prediction)."""
        logits = vectors @ self.written(layer, head).T @ self.unembed.T
        return logits - logits.mean(1, keepdim=True)


def direct_path(bridge: Any, sites: Sites) -> DirectPath:
    """The output side of a model behind a bridge, in float32."""
    maps = [bridge.blocks[n].attn.o.original_component.weight for n in sites.layers("gate")]
    return DirectPath(
        output=torch.stack([weight.detach().float().cpu() for weight in maps]),
        gain=bridge.ln_final.original_component.weight.detach().float().cpu(),
        unembed=bridge.unembed.original_component.weight.detach().float().cpu(),
        n_heads=sites.n_heads,
    )


def logit_gram(unembed: Float[Tensor, "d_vocab d_model"]) -> Float[Tensor, "d_model d_model"]:
    """``K`` with ``h K h`` the variance over the vocabulary of the logits of ``h``: no logits need be made."""
    centred = unembed - unembed.mean(0)
    return centred.T @ centred / len(unembed)


def logit_sizes(
    dictionary: Dictionary, path: DirectPath, n_kv_heads: int
) -> Float[Tensor, "latent layer head"]:
    """Standard deviation over the vocabulary of the direct-path logits of each latent's decoder row.

    For each query head; those of one KV head read the same row of it.
    """
    gram, group = logit_gram(path.unembed), path.n_heads // n_kv_heads
    rows = by_head(dictionary, n_kv_heads).float()
    out = torch.empty(len(rows), len(path.output), path.n_heads)
    for layer in range(len(path.output)):
        for head in range(path.n_heads):
            written = path.written(layer, head)
            variance = ((rows[:, head // group] @ (written.T @ gram @ written)) * rows[:, head // group]).sum(
                1
            )
            out[:, layer, head] = variance.clamp(min=0).sqrt()
    return out


def kv_sizes(
    sizes: Float[Tensor, "latent layer head"], n_kv_heads: int
) -> Float[Tensor, "latent layer kv_head"]:
    """Query heads of one KV head together: root of the sum of squares."""
    return sizes.unflatten(2, (n_kv_heads, -1)).square().sum(3).sqrt()
