"""Has the model learnt to copy: attention to the token after the previous occurrence, and what a repeat is worth.

Random sequences are shown twice in a row. An induction head, reading a token of the second copy, attends to the token
that followed it in the first, which is the token to come (Olsson et al. 2022; spec part B, development).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from satlens.bootstrap import Interval, Weights, statistic_interval
from satlens.carried.documents import Rows
from satlens.carried.reader import Reader
from satlens.errors import UserError

SEQUENCES, LENGTH = 32, 64
"""Random sequences, and the tokens of each (shown twice)."""
LEAST = 4
"""Tokens of a sequence below which a repeat is no repeat."""


@dataclass(frozen=True, kw_only=True)
class Induction:
    """What the sequences gave, each on its own, so that intervals resample sequences."""

    attention: Float[np.ndarray, "sequence layer head"]
    """Mean attention, over the second copy, to the token after the previous occurrence."""
    first: Float[np.ndarray, " sequence"]
    """Mean NLL in nats of the tokens of the first copy (its first token left out)."""
    second: Float[np.ndarray, " sequence"]
    """Mean NLL in nats of the same tokens in the second copy."""
    n_predictions: int
    """Predictions behind each of the two means, over all sequences."""
    chance: float
    """What a head that spreads its attention evenly over the past would score."""

    def heads(self) -> Float[np.ndarray, "layer head"]:
        """Mean over sequences, for each head."""
        return self.attention.mean(0)

    def best(self) -> tuple[int, int]:
        """``(layer, head)`` of the head that attends most."""
        layer, head = np.unravel_index(int(self.heads().argmax()), self.attention.shape[1:])
        return int(layer), int(head)

    def score(self, weights: Weights) -> Interval:
        """The largest of the heads' means, with its interval over sequences."""
        flat = self.attention.reshape(len(self.attention), -1)
        return statistic_interval(flat, np.ones(len(flat)), weights, lambda means: means.max(-1))

    def loss_drop(self, weights: Weights) -> Interval:
        """NLL of the first copy minus NLL of the second, in nats per token, with its interval over sequences."""
        ones = np.ones(len(self.first))
        return statistic_interval(self.first - self.second, ones, weights, lambda means: means)


@torch.no_grad()
def induction(
    reader: Reader, sequences: int = SEQUENCES, length: int = LENGTH, seed: int = 0, batch_size: int = 8
) -> Induction:
    """Show ``sequences`` random sequences twice each, and keep what the heads look at and what is predicted.

    The sequences depend on the seed and the vocabulary alone, so checkpoints of a run all see the same.

    Raises:
        UserError: the context is too short to repeat anything, or the model does not show its attention weights.
    """
    lead = int(reader.bos is not None)
    length = min(length, (reader.n_ctx - lead) // 2)
    if length < LEAST:
        raise UserError(
            f"{reader.name}: a context of {reader.n_ctx} tokens is too short to repeat a sequence"
        )
    ids = repeated_ids(reader, sequences, length, torch.Generator().manual_seed(seed))
    attention, losses = [], []
    with _open_attention(reader):
        for start in range(0, len(ids), batch_size):
            batch = ids[start : start + batch_size].to(reader.device)
            out = reader.model.base_model(input_ids=batch, use_cache=False, output_attentions=True)
            attention.append(_all_heads(reader, out.attentions, length, lead))
            losses.append(_copies_nll(reader, out.last_hidden_state, batch, length, lead))
    first, second = torch.cat(losses).double().cpu().numpy().T
    return Induction(
        attention=torch.cat(attention).double().cpu().numpy(),
        first=first,
        second=second,
        n_predictions=sequences * (length - 1),
        chance=even_attention(length, lead),
    )


def even_attention(length: int, lead: int = 0) -> float:
    """The score of attention spread evenly: mean of ``1 / (t + 1)`` over the positions that are read."""
    positions = np.arange(lead + length, lead + 2 * length - 1)
    return float((1 / (positions + 1)).mean())


def repeated_ids(
    reader: Reader, sequences: int, length: int, generator: torch.Generator
) -> Int[Tensor, "sequence pos"]:
    """Distinct ordinary tokens in random order, twice in a row, behind BOS where the model wants one.

    Within a sequence no token occurs twice, so that "the previous occurrence" is one place.

    Raises:
        UserError: fewer ordinary tokens than ``length``.
    """
    special = set(reader.tokenizer.all_special_ids)
    ordinary = [token for token in range(min(reader.d_vocab, len(reader.tokenizer))) if token not in special]
    if len(ordinary) < length:
        raise UserError(f"{reader.name}: {len(ordinary)} tokens are too few for a sequence of {length}")
    table = torch.tensor(ordinary)
    draws = [table[torch.randperm(len(table), generator=generator)[:length]] for _ in range(sequences)]
    once = torch.stack(draws)
    lead = once.new_full((sequences, int(reader.bos is not None)), reader.bos or 0)
    return torch.cat((lead, once, once), dim=1)


def attention_to_successor(
    pattern: Float[Tensor, "sequence head pos key"], length: int, lead: int = 0
) -> Float[Tensor, "sequence head"]:
    """Mean attention from each position of the second copy but the last to the position after the same token's
    previous occurrence, ``length - 1`` positions back. ``lead`` positions stand before the first copy."""
    # the last position has a successor too, but what follows it in the text is not a repeat
    query = torch.arange(lead + length, lead + 2 * length - 1, device=pattern.device)
    return pattern[:, :, query, query - length + 1].float().mean(-1)


def _all_heads(reader: Reader, patterns: Any, length: int, lead: int) -> Float[Tensor, "sequence layer head"]:
    if not patterns or any(pattern is None for pattern in patterns):
        raise UserError(f"{reader.name} does not show its attention weights, so induction cannot be scored")
    return torch.stack([attention_to_successor(pattern, length, lead) for pattern in patterns], dim=1)


def _copies_nll(
    reader: Reader, hidden: Tensor, ids: Tensor, length: int, lead: int
) -> Float[Tensor, "sequence 2"]:
    """Mean NLL of tokens 1, 2, ... of the sequence, in either copy: the same targets, so the two are paired."""
    scored = torch.zeros_like(ids, dtype=torch.bool)
    for start in (lead, lead + length):
        scored[:, start : start + length - 1] = True  # the prediction at t is of the token at t + 1
    everything = torch.ones_like(scored)
    place = torch.arange(len(ids), device=ids.device)
    rows = Rows(
        input_ids=ids,
        real=everything,
        far=everything,
        scored=scored,
        last=place.new_full((len(ids),), ids.shape[1] - 1),
        doc=place,
    )
    return reader.nll(hidden, rows).double().view(len(ids), 2, length - 1).mean(-1)


@contextmanager
def _open_attention(reader: Reader) -> Iterator[None]:
    """Attention weights exist only in transformers' eager attention; our own models lay them open when asked."""
    from satlens.hf import DecoderForCausalLM

    if isinstance(reader.model, DecoderForCausalLM):
        yield
        return
    before = reader.model.config._attn_implementation
    reader.model.set_attn_implementation("eager")
    try:
        yield
    finally:
        reader.model.set_attn_implementation(before)
