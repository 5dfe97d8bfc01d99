"""What happens when one head no longer gets some latents of V1: the edit, and how far the logits move.

A SATFormer layer reads V1 through a site of its own, so what is taken away there is missing for that layer alone, and
by being cut to one KV head for that head alone.
"""

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from analyses.latents.intake import logit_gram
from sae.dictionary import Codes, Dictionary
from satlens.architectures.steps import normed
from satlens.interventions import Edit
from satlens.tokens import Batch


def contribution(
    dictionary: Dictionary, codes: Codes, latents: Int[Tensor, " latent"], kv_head: int, n_kv_heads: int
) -> Float[Tensor, "d_vocab d_head"]:
    """What these latents together put into one head's V1, for every token id."""
    wanted = torch.isin(codes.latent, latents.to(codes.latent.device))
    rows = dictionary.W_dec.unflatten(1, (n_kv_heads, -1))[:, kv_head].contiguous()
    return torch.nn.functional.embedding_bag(
        codes.latent, rows, per_sample_weights=codes.act * wanted, mode="sum"
    )


def remove(layer: int, kv_head: int, table: Float[Tensor, "d_vocab d_head"]) -> Edit:
    """Take ``table`` (by token id) out of V1 as head ``kv_head`` of ``layer`` reads it."""

    def apply(v1: Tensor, batch: Batch) -> Tensor:
        out = v1.clone()
        out[:, :, kv_head] -= table.to(v1)[batch.input_ids]
        return out

    return Edit(role="first_value", layer=layer, apply=apply)


class CleanEnd:
    """The last residual stream of the unchanged model, for as long as a batch lasts."""

    reads = ("resid_post",)

    def __init__(self, last: int) -> None:
        self.last = last
        self.residual: Tensor | None = None

    def update(self, batch: Batch, role: str, layer: int, tensor: Tensor) -> None:
        """Keep the last layer's; the clean pass of a batch comes before its edited ones."""
        if layer == self.last:
            self.residual = tensor

    def __getstate__(self) -> dict[str, Any]:
        """Nothing that other processes need."""
        return {"last": self.last, "residual": None}

    def merge(self, other: "CleanEnd") -> None:
        """Nothing to add."""


class LogitChange:
    """By document: the standard deviation over the vocabulary of the change of logits, summed over scored positions.

    A change that is the same for every token changes no prediction and has size 0. It is never negative, so that,
    unlike the change of NLL, a small one does not drown in the noise of its sign.
    """

    reads = ("resid_post",)

    def __init__(self, n_documents: int, clean: CleanEnd, size: Callable[[Tensor, Tensor], Tensor]) -> None:
        self.total = torch.zeros(n_documents, dtype=torch.float64)
        self.clean, self.size = clean, size

    def update(self, batch: Batch, role: str, layer: int, tensor: Tensor) -> None:
        """Compare with the clean pass of the same batch."""
        if layer != self.clean.last:
            return
        assert self.clean.residual is not None
        size = self.size(self.clean.residual[batch.scored], tensor[batch.scored])
        self.total.index_add_(0, batch.target_docs().cpu(), size.double().cpu())

    def __getstate__(self) -> dict[str, Any]:
        """What travels between processes: the sums, not the model."""
        return {**vars(self), "size": None}

    def merge(self, other: "LogitChange") -> None:
        """Add another process's sums."""
        self.total += other.total


def change_size(bridge: Any) -> Callable[[Tensor, Tensor], Tensor]:
    """``(clean, edited)`` residuals ``[scored d_model]`` to the size of the change of their logits."""
    gram = logit_gram(bridge.unembed.original_component.weight.detach().float())

    def size(clean: Tensor, edited: Tensor) -> Tensor:
        change = (normed(bridge, edited[None])[0] - normed(bridge, clean[None])[0]).float()
        return ((change @ gram) * change).sum(-1).clamp(min=0).sqrt()

    return size


class PartsByDocument:
    """Intake length by document, layer, head and part: what an interval of a head's shares is made from."""

    reads = ("gate",)

    def __init__(
        self, n_documents: int, layers: tuple[int, ...], parts: Float[Tensor, "d_vocab kv_head part"]
    ) -> None:
        self.place = {layer: at for at, layer in enumerate(layers)}
        self.parts = parts
        self.total = torch.zeros(n_documents, len(layers), *parts.shape[1:], dtype=torch.float64)

    def update(self, batch: Batch, role: str, layer: int, tensor: Tensor) -> None:
        """Add alpha ``[batch pos kv_head]`` times the parts of each token's V1."""
        alpha, ids = tensor[batch.text].double().cpu(), batch.input_ids[batch.text].cpu()
        taken = alpha[..., None] * self.parts[ids]
        self.total[:, self.place[layer]].index_add_(0, batch.doc[batch.text].cpu(), taken)

    def merge(self, other: "PartsByDocument") -> None:
        """Add another process's sums."""
        self.total += other.total
