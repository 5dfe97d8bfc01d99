"""What each latent responds to, exactly: every token id it is active on, their counts, and how alike they are.

V1 is a function of the token id, so one encoding of the table says all there is: nothing here is sampled. A token is a
token id throughout; two ids that spell the same string are two tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sae.dictionary import Codes, Dictionary, encode
from satlens.errors import UserError

LEAST_TOKENS = 3
"""Distinct tokens below which there is no MonoScore and no pair of sets."""


@dataclass(frozen=True, kw_only=True)
class Features:
    """The token ids of every latent, latent after latent, each latent's by falling activation (ties by token id)."""

    starts: Int[Tensor, " boundary"]
    """Where each latent's entries begin in ``token`` and ``act``, and last the end of all: ``d_sae + 1`` numbers."""
    token: Int[Tensor, " entry"]
    """Token ids, whether or not the text has them."""
    act: Float[Tensor, " entry"]
    """Activations, all above 0."""
    n_active: Int[Tensor, " d_sae"]
    """Positions of the counted text on which each latent is active."""
    n_types: Int[Tensor, " d_sae"]
    """Token ids on which it is active."""
    n_types_seen: Int[Tensor, " d_sae"]
    """Those among them that the text has."""
    n_positions: int
    """Positions of the counted text."""

    @property
    def d_sae(self) -> int:
        """Latents."""
        return len(self.n_types)

    @property
    def density(self) -> Float[Tensor, " d_sae"]:
        """Share of positions on which each latent is active (float64)."""
        return self.n_active.double() / self.n_positions

    @property
    def dead(self) -> Bool[Tensor, " d_sae"]:
        """Latents that no token id of the text activates."""
        return self.n_types_seen == 0

    @property
    def never(self) -> Bool[Tensor, " d_sae"]:
        """Latents that no token id at all activates; all of them are dead."""
        return self.n_types == 0

    @property
    def l0(self) -> float:
        """Mean number of active latents at a position of the counted text."""
        return int(self.n_active.sum()) / self.n_positions

    def of(self, latent: int) -> tuple[Int[Tensor, " entry"], Float[Tensor, " entry"]]:
        """Token ids and activations of one latent, the largest activation first.

        Raises:
            UserError: no such latent.
        """
        if not 0 <= latent < self.d_sae:
            raise UserError(f"no latent {latent}: this dictionary has latents 0 to {self.d_sae - 1}")
        entries = slice(int(self.starts[latent]), int(self.starts[latent + 1]))
        return self.token[entries], self.act[entries]


def latent_features(
    dictionary: Dictionary,
    rows: Float[Tensor, "d_vocab d_in"],
    counts: Int[Tensor, " counted"],
    codes: Codes | None = None,
) -> Features:
    """Encode every token id's vector and turn the codes around: for each latent, the ids it is active on.

    ``counts`` says how often the text has each id; density, dead latents and L0 refer to it. ``codes`` are those of
    ``rows``, for a caller that has them.

    Raises:
        UserError: counts of another vocabulary, or of no text.
    """
    if len(rows) != len(counts):
        raise UserError(
            f"counts of {len(counts)} token ids do not fit a table of {len(rows)}: another tokenizer?"
        )
    if (n_positions := int(counts.sum())) < 1:
        raise UserError("the counted text has no token, so no latent has a density: give a longer text")
    codes = codes or encode(dictionary, rows)
    act, latent = codes.act.flatten().cpu(), codes.latent.flatten().cpu()
    token = torch.arange(len(rows)).repeat_interleave(codes.act.shape[1])
    active = act > 0
    act, latent, token = act[active], latent[active], token[active]
    order = torch.from_numpy(np.lexsort((token.numpy(), -act.numpy(), latent.numpy())))
    act, latent, token = act[order], latent[order], token[order]
    counted = counts.cpu().long()[token]
    n_types = torch.bincount(latent, minlength=dictionary.d_sae)
    zero = torch.zeros(dictionary.d_sae, dtype=torch.long)
    return Features(
        starts=torch.cat([torch.zeros(1, dtype=torch.long), n_types.cumsum(0)]),
        token=token,
        act=act,
        n_active=zero.index_add(0, latent, counted),
        n_types=n_types,
        n_types_seen=zero.index_add(0, latent, (counted > 0).long()),
        n_positions=n_positions,
    )


def mono_score(
    features: Features,
    embeddings: Float[Tensor, "d_vocab d_model"],
    counts: Int[Tensor, " d_vocab"],
    top: int = 20,
    seen_only: bool = True,
) -> Float[Tensor, " d_sae"]:
    """MonoScore: how alike the input embeddings of each latent's ``top`` strongest tokens are, from -1 to 1 (float64).

    Spec part A: the activation-weighted mean pairwise cosine similarity of the centred input embeddings. Exactly:
    with ``c`` the mean of all ``d_vocab`` embeddings, each id counted once, and ``u_i = (E[i] - c) / |E[i] - c|`` (0
    where that length is 0), it is ``sum_{i<j} a_i a_j (u_i . u_j) / sum_{i<j} a_i a_j`` over pairs of the latent's
    ``top`` tokens, ``a_i`` being their activations. NaN for a latent with fewer than three such tokens.

    ``seen_only`` lets only tokens that the text has into the list: the others' embeddings were hardly ever trained.
    """
    token, act = _strongest(features, counts, top, seen_only)
    listed, place = token.unique(return_inverse=True)
    held = embeddings.cpu()
    unit = torch.nn.functional.normalize(held[listed].double() - held.double().mean(0))
    a, length = act.double(), unit.square().sum(1)  # 1, or 0 for an embedding that is the mean
    # a sum over pairs is half of: square of the sum less sum of the squares
    total = torch.nn.functional.embedding_bag(place, unit, per_sample_weights=a, mode="sum").square().sum(1)
    score = (total - (a.square() * length[place]).sum(1)) / (a.sum(1).square() - a.square().sum(1))
    score[(act > 0).sum(1) < LEAST_TOKENS] = torch.nan
    return score


def token_sets(
    features: Features, latent: int, counts: Int[Tensor, " d_vocab"], m: int = 10
) -> tuple[Int[Tensor, " first"], Int[Tensor, " second"]] | None:
    """Two sets of token ids to judge apart: the latent's ``2 m`` strongest tokens of the text, dealt in turn.

    The strongest goes to the first set, the next to the second, and so on, so that neither is the stronger half. None
    when either would have fewer than three.
    """
    token, _ = features.of(latent)
    dealt = token[counts.cpu()[token] > 0][: 2 * m]
    first, second = dealt[0::2], dealt[1::2]
    return None if len(second) < LEAST_TOKENS else (first, second)


def activations_table(features: Features, latents: Sequence[int]) -> pd.DataFrame:
    """Every token id that each of ``latents`` is active on: one row an activation, in the order of ``latents``.

    Raises:
        UserError: no such latent.
    """
    chosen = torch.as_tensor(np.asarray(latents, dtype=np.int64))
    if bad := [int(latent) for latent in chosen if not 0 <= latent < features.d_sae]:
        raise UserError(f"no latent {bad[0]}: this dictionary has latents 0 to {features.d_sae - 1}")
    lengths = features.n_types[chosen]
    ends = lengths.cumsum(0)
    within = torch.arange(int(lengths.sum())) - (ends - lengths).repeat_interleave(lengths)
    entries = features.starts[chosen].repeat_interleave(lengths) + within
    return pd.DataFrame(
        {
            "latent": chosen.repeat_interleave(lengths).numpy(),
            "token_id": features.token[entries].numpy(),
            "act": features.act[entries].numpy(),
        }
    )


def input_embeddings(bridge: Any) -> Float[Tensor, "d_vocab d_model"]:
    """The model's input embeddings as they are, before any norm: what MonoScore compares."""
    weight: Tensor = bridge.embed.original_component.weight
    return weight.detach()


def _strongest(
    features: Features, counts: Int[Tensor, " d_vocab"], top: int, seen_only: bool
) -> tuple[Int[Tensor, "d_sae rank"], Float[Tensor, "d_sae rank"]]:
    """Each latent's ``top`` first entries as a matrix; places that nothing fills have activation 0."""
    keep = torch.ones_like(features.token, dtype=torch.bool)
    if seen_only:
        keep = counts.cpu()[features.token] > 0
    latent = torch.arange(features.d_sae).repeat_interleave(features.n_types)
    before = torch.cat([torch.zeros(1, dtype=torch.long), keep.long().cumsum(0)])
    rank = before[:-1] - before[features.starts[:-1]].repeat_interleave(features.n_types)
    keep &= rank < top
    token = torch.zeros(features.d_sae, top, dtype=torch.long)
    act = torch.zeros(features.d_sae, top, dtype=features.act.dtype)
    token[latent[keep], rank[keep]] = features.token[keep]
    act[latent[keep], rank[keep]] = features.act[keep]
    return token, act
