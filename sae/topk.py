"""A Top-K SAE and one step of its training: loss and gradients by hand, on distinct rows with weights.

The SAE, its loss and its auxiliary loss are those of `sae_lens.TopKTrainingSAE` (latents ranked as if all decoder rows
had length 1, MSE summed over d_in, dead latents trained on the residual). What differs is the work. A batch of B drawn
tokens has far fewer distinct ones, so it comes as its distinct rows and their shares; only the k active latents of a
row are decoded; and the gradient of a latent's weights is a sum over the few rows on which it is active.
"""

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from satlens.metrics import onednn_linear, onednn_serves

DECODER_INIT_NORM = 0.1
"""Length of every decoder row before the first step (sae-lens's default)."""
GROUPED = 4
"""Values in a group when the k largest are searched for on CPU."""
CPU_VALUES, OTHER_VALUES = 1 << 20, 1 << 27
"""Pre-activations held at once, on CPU (4 MiB: what its cache takes) and elsewhere."""


class TopK(nn.Module):
    """The four parameters. Encoder and decoder have one row a latent; sae-lens's `W_enc` is the encoder transposed."""

    def __init__(self, d_in: int, d_sae: int, generator: torch.Generator) -> None:
        """sae-lens's start: Kaiming-uniform decoder rows brought to one length, the encoder their copy, no biases."""
        super().__init__()
        decoder = nn.init.kaiming_uniform_(torch.empty(d_sae, d_in), generator=generator)
        decoder /= decoder.norm(dim=1, keepdim=True)
        decoder *= DECODER_INIT_NORM
        self.encoder, self.decoder = nn.Parameter(decoder.clone()), nn.Parameter(decoder)
        self.b_enc, self.b_dec = nn.Parameter(torch.zeros(d_sae)), nn.Parameter(torch.zeros(d_in))
        self.silent: Tensor
        """Steps since each latent last fired."""
        self.register_buffer("silent", torch.zeros(d_sae, dtype=torch.int64))

    @torch.no_grad()
    def folded(self) -> dict[str, Tensor]:
        """The same SAE with decoder rows of length 1, under sae-lens's names (its ``fold_W_dec_norm``)."""
        norm = self.decoder.norm(dim=1).clamp(min=1e-8)
        return {
            "W_enc": (self.encoder * norm[:, None]).T.contiguous(),
            "b_enc": self.b_enc * norm,
            "W_dec": self.decoder / norm[:, None],
            "b_dec": self.b_dec.clone(),
        }


@dataclass(frozen=True, kw_only=True)
class Step:
    """What one batch says."""

    mse: Float[Tensor, ""]
    """Squared error, summed over d_in, averaged over the tokens drawn."""
    aux: Float[Tensor, ""]
    """Auxiliary loss with its coefficient and scale; 0 when no latent is dead."""
    gradients: dict[str, Tensor]
    """Of mse + aux, by parameter name."""
    fired: Bool[Tensor, " d_sae"]
    """Latents active on some row."""


@dataclass(frozen=True, kw_only=True)
class _Active:
    """The latents that decode each row, and what multiplies their decoder rows (not brought to length 1)."""

    latent: Int[Tensor, "row k"]
    act: Float[Tensor, "row k"]


@torch.no_grad()
def loss_and_gradients(
    sae: TopK,
    rows: Float[Tensor, "row d_in"],
    weights: Float[Tensor, " row"],
    dead: Bool[Tensor, " d_sae"],
    k: int,
    aux_coefficient: float = 1.0,
) -> Step:
    """Loss and gradients of a batch of which row i makes up the share ``weights[i]`` (they add up to 1).

    ``dead`` latents, which have not fired for long, also learn to decode what the others miss: the d_in / 2 largest
    of each row, or all of them at a smaller scale when they are fewer.
    """
    n_dead, half = int(dead.sum()), rows.shape[1] // 2
    centred = rows - sae.b_dec
    live, dying = _active(sae, centred, dead, k, min(half, n_dead))
    error = _decode(sae, live) + sae.b_dec - rows
    d_out = 2 * weights[:, None] * error
    gradients = _gradients(sae, live, centred, d_out, live.act > 0)
    gradients["b_dec"] += d_out.sum(0)
    aux = torch.zeros_like(weights[0])
    if dying is not None:
        scale = aux_coefficient * min(n_dead / half, 1.0)
        missed = _decode(sae, dying) + error  # the residual is -error, and no gradient goes through it
        aux = scale * (weights @ missed.square().sum(1))
        d_out = 2 * scale * weights[:, None] * missed
        for name, gradient in _gradients(sae, dying, centred, d_out).items():
            gradients[name] += gradient
    fired = torch.zeros_like(dead)
    fired[live.latent[live.act > 0]] = True
    return Step(mse=weights @ error.square().sum(1), aux=aux, gradients=gradients, fired=fired)


def _active(sae: TopK, centred: Tensor, dead: Tensor, k: int, k_dead: int) -> tuple[_Active, _Active | None]:
    """The k largest latents of each row, negative ones at 0; and the k_dead largest dead ones, signed."""
    norm = sae.decoder.norm(dim=1)
    encoder, bias = sae.encoder * norm[:, None], sae.b_enc * norm
    linear = onednn_linear if onednn_serves(encoder) else F.linear
    held = CPU_VALUES if encoder.device.type == "cpu" else OTHER_VALUES
    dead_latents = dead.nonzero().squeeze(1)
    live, dying = [], []
    for part in centred.split(max(1, held // len(norm))):
        ranked = linear(part, encoder, bias)
        latent = largest(ranked, k)
        live.append((latent, ranked.gather(1, latent).relu() / norm[latent]))
        if k_dead:
            latent = dead_latents[largest(ranked[:, dead_latents], k_dead)]
            dying.append((latent, ranked.gather(1, latent) / norm[latent]))
    return _joined(live), _joined(dying) if dying else None


def _joined(parts: list[tuple[Tensor, Tensor]]) -> _Active:
    latent, act = (torch.cat(column) for column in zip(*parts, strict=True))
    return _Active(latent=latent, act=act)


def largest(values: Float[Tensor, "row value"], k: int) -> Int[Tensor, "row k"]:
    """Places of the k largest values of each row, in no particular order.

    On CPU most values need no look: whatever is among the k largest is in one of the k groups whose maxima are
    largest. numpy takes less than half of torch's time to select.
    """
    n = values.shape[1]
    if values.device.type != "cpu":
        return values.topk(k, sorted=False).indices
    if k == n or n % GROUPED or n < 2 * GROUPED * k:
        return _partitioned(values, k)
    groups = n // GROUPED  # a group is strided, so that its maximum is taken along whole vectors
    best = _partitioned(values.unflatten(1, (GROUPED, groups)).amax(1), k)
    places = (best[:, None] + torch.arange(0, n, groups)[:, None]).flatten(1)
    return places.gather(1, _partitioned(values.gather(1, places), k))


def _partitioned(values: Tensor, k: int) -> Tensor:
    first = values.shape[1] - k
    return torch.from_numpy(
        np.argpartition(values.numpy(), min(first, values.shape[1] - 1), axis=1)[:, first:]
    )


def _decode(sae: TopK, active: _Active) -> Tensor:
    """Weighted sums of decoder rows, without the bias."""
    return F.embedding_bag(active.latent, sae.decoder, per_sample_weights=active.act, mode="sum")


def _gradients(
    sae: TopK, active: _Active, centred: Tensor, d_out: Tensor, passes: Tensor | None = None
) -> dict[str, Tensor]:
    """Gradients through one set of active latents, given the loss's slope ``d_out`` in what they decode to.

    ``passes`` is false where the ReLU is shut. That latents are ranked by length adds nothing: activations are divided
    by it again. The decoder bias stands for its part in ``centred`` only.
    """
    d_act = _products(sae.decoder, active, d_out)
    if passes is not None:
        d_act *= passes
    latents, order = active.latent.flatten().sort(stable=True)
    row = order.div(active.latent.shape[1], rounding_mode="floor")
    first = torch.searchsorted(latents, torch.arange(len(sae.b_enc), device=latents.device))

    def by_latent(source: Tensor, factor: Tensor) -> Tensor:
        """For each latent, ``source`` summed over its rows with these factors: a bag as well, so no atomics."""
        return F.embedding_bag(row, source, first, per_sample_weights=factor.flatten()[order], mode="sum")

    b_enc = by_latent(torch.ones_like(d_out[:, :1]), d_act).squeeze(1)
    return {
        "encoder": by_latent(centred, d_act),
        "decoder": by_latent(d_out, active.act),
        "b_enc": b_enc,
        "b_dec": -(b_enc @ sae.encoder),
    }


@torch.enable_grad()
def _products(decoder: Tensor, active: _Active, d_out: Tensor) -> Tensor:
    """Each row's slope times the decoder rows of its own latents: what a bag's backward pass has a kernel for."""
    act = active.act.detach().requires_grad_()
    bag = F.embedding_bag(active.latent, decoder.detach(), per_sample_weights=act, mode="sum")
    (products,) = torch.autograd.grad(bag, act, d_out)
    return products
