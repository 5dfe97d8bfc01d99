"""What happens where in a retrieval item: gates and NLL summed apart for answer, mention, other context, and rest.

An item is one row: context, cue, a space, the answer. A token belongs to the answer, to a mention (a place in the
context where an answer stands as whole words), to the rest of the context, or to the rest of the row, which is the
cue. Gates count where a token is read; NLL counts where a token is predicted.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from satlens.accumulators import NLL, closed
from satlens.errors import UserError
from satlens.evaluation import cloze
from satlens.sites import Sites
from satlens.tokens import Batch

SPANS = ("answer", "mention", "context", "rest")
ANSWER, MENTION, CONTEXT, REST = range(len(SPANS))
OUTSIDE = -1
"""Span of BOS and of padding."""


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Items as token ids, one a row, padded on the right."""

    ids: Int[Tensor, "item pos"]
    span: Int[Tensor, "item pos"]
    length: Int[np.ndarray, " item"]
    numbers: tuple[int, ...]
    """Place of each item among the task's documents."""
    n_left_out: int = 0
    """Items without the answer in the context that is kept, or too long for the window."""

    def __len__(self) -> int:
        return len(self.length)

    def take(self, items: Int[np.ndarray, " item"]) -> "Rows":
        """These items only, in this order."""
        index = torch.from_numpy(items)
        numbers = tuple(self.numbers[i] for i in items)
        return Rows(ids=self.ids[index], span=self.span[index], length=self.length[items], numbers=numbers)

    def batches(self, batch_size: int, rank: int = 0, world: int = 1) -> Iterator[Batch]:
        """The rows by length, so that little is padded; ``row`` and ``doc`` are the item's place here."""
        order = np.argsort(-self.length, kind="stable")[rank::world]
        for start in range(0, len(order), batch_size):
            index = torch.from_numpy(order[start : start + batch_size])
            width = int(self.length[order[start]])
            real = torch.arange(width) < torch.from_numpy(self.length)[index][:, None]
            text = self.span[index, :width] != OUTSIDE
            scored = text.roll(-1, 1)
            scored[:, -1] = False
            doc = torch.where(real, index[:, None], -1)
            yield Batch(
                input_ids=self.ids[index, :width], real=real, scored=scored, doc=doc, text=text, row=index
            )


def rows_of(items: list[cloze.Item], tokenizer: Any, window: int, bos: int | None = None) -> Rows:
    """Items as rows of at most ``window`` tokens, each cut around its answer if it must be.

    Raises:
        UserError: no item has its answer in what is kept of its context.
    """
    if not tokenizer.is_fast:
        raise UserError(
            "this tokenizer cannot say where a token stands in a text: give a folder with tokenizer.json"
        )
    room = window - (bos is not None)
    ids, spans, numbers, longest = [], [], [], 0
    for item in items:
        made = _row(item, tokenizer, room)
        if made is None:
            continue
        head = [] if bos is None else [bos]
        ids.append([*head, *made[0]])
        spans.append([OUTSIDE] * len(head) + made[1])
        numbers.append(item.number)
        longest = max(longest, len(ids[-1]))
    if not ids:
        raise UserError(
            f"none of {len(items)} items has its answer in the part of its context that fits {window} tokens: "
            "their texts are longer than the model's context, or this is no retrieval task"
        )
    return Rows(
        ids=_padded(ids, longest, 0),
        span=_padded(spans, longest, OUTSIDE),
        length=np.array([len(row) for row in ids]),
        numbers=tuple(numbers),
        n_left_out=len(items) - len(ids),
    )


def without_context(
    items: list[cloze.Item], rows: Rows, tokenizer: Any, window: int, bos: int | None
) -> Rows:
    """The same items asked without their context, in the same order: what is not retrieval in an effect."""
    by_number = {item.number: item for item in items}
    asked = [by_number[number] for number in rows.numbers]
    head = [] if bos is None else [bos]
    ids, spans = [], []
    for item in asked:
        bare = replace(item, context="", cue=item.cue.lstrip(". \n"))
        row, span = _coded(bare, tokenizer)
        row, span = row[-(window - len(head)) :], span[-(window - len(head)) :]
        ids.append([*head, *row])
        spans.append([OUTSIDE] * len(head) + span)
    longest = max(map(len, ids))
    return Rows(
        ids=_padded(ids, longest, 0),
        span=_padded(spans, longest, OUTSIDE),
        length=np.array([len(row) for row in ids]),
        numbers=rows.numbers,
    )


def _row(item: cloze.Item, tokenizer: Any, window: int) -> tuple[list[int], list[int]] | None:
    """Ids and spans of one item; None when its answer is not in the context that is kept."""
    answer = len(tokenizer(f" {item.answers[0]}", add_special_tokens=False)["input_ids"])
    try:
        fitted = cloze.fit(item, tokenizer, window, after=answer + 2)  # cutting can split two tokens anew
    except UserError:
        return None
    ids, span = _coded(fitted, tokenizer)
    ids, span = ids[-window:], span[-window:]
    return (ids, span) if MENTION in span and ANSWER in span else None


def _coded(item: cloze.Item, tokenizer: Any) -> tuple[list[int], list[int]]:
    text = f"{item.prompt} {item.answers[0]}"
    coded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    mentions = cloze.places(item)
    spans = []
    for start, end in coded["offset_mapping"]:
        if end > len(item.prompt):
            spans.append(ANSWER)
        elif end > len(item.context):
            spans.append(REST)
        else:
            held = any(start < stop and end > begin for begin, stop in mentions)
            spans.append(MENTION if held else CONTEXT)
    return list(coded["input_ids"]), spans


def _padded(rows: list[list[int]], width: int, fill: int) -> Tensor:
    return torch.tensor([row + [fill] * (width - len(row)) for row in rows])


class NllBySpan:
    """Sum of NLL and number of predictions of every item and span, in float64."""

    reads = (NLL,)

    def __init__(self, rows: Rows) -> None:
        self.span = rows.span
        self.nll = torch.zeros(len(rows), len(SPANS), dtype=torch.float64)
        self.count = torch.zeros(len(rows), len(SPANS), dtype=torch.float64)

    def update(self, batch: Batch, role: str, layer: int, tensor: Tensor) -> None:
        """Add ``tensor`` ``[scored]`` to the span of the token that each prediction is about."""
        line, pos = batch.scored.cpu().nonzero(as_tuple=True)
        item = batch.row.cpu()[line]
        cell = item * len(SPANS) + self.span[item, pos + 1]
        self.nll.view(-1).index_add_(0, cell, tensor.double().cpu())
        self.count.view(-1).index_add_(0, cell, torch.ones_like(cell, dtype=torch.float64))

    def merge(self, other: "NllBySpan") -> None:
        """Add another process's sums."""
        self.nll += other.nll
        self.count += other.count


class GatesBySpan:
    """Sums of alpha and of shut gates of every item, span, layer and KV head, and positions, in float64."""

    reads = ("gate",)

    def __init__(self, rows: Rows, sites: Sites) -> None:
        assert sites.gate_kind is not None
        self.span, self.kind, self.layers = rows.span, sites.gate_kind, list(sites.layers("gate"))
        shape = (len(rows), len(SPANS), len(self.layers), sites.n_kv_heads)
        self.sum = torch.zeros(shape, dtype=torch.float64)
        self.shut = torch.zeros(shape, dtype=torch.float64)
        self.count = torch.zeros(shape[:2], dtype=torch.float64)

    def update(self, batch: Batch, role: str, layer: int, tensor: Tensor) -> None:
        """Add alpha ``[batch pos kv_head]`` at the positions that are text to the span of the token read there."""
        line, pos = batch.text.cpu().nonzero(as_tuple=True)
        item = batch.row.cpu()[line]
        cell = item * len(SPANS) + self.span[item, pos]
        alpha, at = tensor.detach().float().cpu()[line, pos], self.layers.index(layer)
        for total, value in ((self.sum, alpha), (self.shut, closed(alpha, self.kind))):
            total.flatten(0, 1)[:, at].index_add_(0, cell, value.double())
        if at == 0:
            self.count.view(-1).index_add_(0, cell, torch.ones_like(cell, dtype=torch.float64))

    def merge(self, other: "GatesBySpan") -> None:
        """Add another process's sums."""
        self.sum += other.sum
        self.shut += other.shut
        self.count += other.count
