"""Documents one a row: which are used, which fit and which are evaluated, and which positions count."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from satlens import reference
from satlens.errors import UserError
from satlens.log import say

if TYPE_CHECKING:
    from satlens.carried.reader import Reader
    from satlens.reading import Reading

SKIP = 16
"""First positions of every document that are neither counted nor edited (spec part B)."""
BLOCK = 16
"""Rows are padded to a multiple of this; positions are summed in float32 within a block, in float64 across."""
SHORTEST, LONGEST = 64, 256
"""Tokens: shorter documents are left out, longer ones cut (the context, if that is smaller)."""


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Some documents as right-padded rows. Padding is never read by the positions before it."""

    input_ids: Int[Tensor, "batch pos"]
    real: Bool[Tensor, "batch pos"]
    """True for tokens, false for right padding."""
    far: Bool[Tensor, "batch pos"]
    """Real positions from ``SKIP`` on: the ones that are counted and edited."""
    scored: Bool[Tensor, "batch pos"]
    """Far positions whose next token is real: predictions whose NLL counts."""
    last: Int[Tensor, " batch"]
    """Final real position of each row."""
    doc: Int[Tensor, " batch"]
    """Document of each row, by its place in the set."""

    def targets(self) -> Int[Tensor, " scored"]:
        """Token ids that the scored predictions are about, row-major."""
        return self.input_ids.roll(-1, 1)[self.scored]

    def docs_of(self, mask: Bool[Tensor, "batch pos"]) -> Int[Tensor, " n"]:
        """The document of each position in ``mask``, row-major."""
        return self.doc[:, None].expand_as(mask)[mask]


@dataclass(frozen=True, kw_only=True)
class DocumentSet:
    """Documents as ids, each long enough to count and no longer than the context."""

    ids: tuple[Int[np.ndarray, " token"], ...]
    names: tuple[str, ...]
    """Where each document comes from."""
    kinds: tuple[str, ...]
    """What kind of text each is (prose, code, ...); the source's name where the text does not say."""

    @property
    def n_documents(self) -> int:
        """Rows of a pass."""
        return len(self.ids)

    @property
    def far_counts(self) -> Int[np.ndarray, " doc"]:
        """Positions of each document that count."""
        return np.array([len(ids) - SKIP for ids in self.ids], dtype=np.int64)

    def take(self, places: Any) -> "DocumentSet":
        """The set of these documents, in this order."""
        return DocumentSet(
            ids=tuple(self.ids[i] for i in places),
            names=tuple(self.names[i] for i in places),
            kinds=tuple(self.kinds[i] for i in places),
        )

    def digest(self) -> str:
        """SHA-256 over lengths and ids."""
        sha = hashlib.sha256(np.array([len(ids) for ids in self.ids], dtype="<i8").tobytes())
        for ids in self.ids:
            sha.update(np.ascontiguousarray(ids, dtype="<i8").tobytes())
        return sha.hexdigest()

    def batches(
        self, batch_size: int, device: str | torch.device = "cpu", pad: int = 0, rank: int = 0, world: int = 1
    ) -> Iterator[Rows]:
        """Rows in order of length, longest first, so that little is padded and memory peaks at once.

        Process ``rank`` of ``world`` gets every ``world``-th document.
        """
        order = np.argsort([-len(ids) for ids in self.ids], kind="stable")[rank::world]
        for start in range(0, len(order), batch_size):
            yield rows_of(
                [self.ids[i] for i in order[start : start + batch_size]], order[start:], device, pad
            )


class DocumentSets(NamedTuple):
    """Means are fitted on ``fit``; everything else is measured on ``evaluate``."""

    fit: DocumentSet
    evaluate: DocumentSet
    same: bool
    """Whether the two are the same documents (the paper's convention)."""


def rows_of(documents: list[Any], places: Any, device: str | torch.device = "cpu", pad: int = 0) -> Rows:
    """Right-padded rows of documents given as ids; ``places`` are their places in the set."""
    longest = max(len(ids) for ids in documents)
    shape = (len(documents), -(-longest // BLOCK) * BLOCK)
    input_ids, real = np.full(shape, pad, dtype=np.int64), np.zeros(shape, dtype=bool)
    for row, ids in enumerate(documents):
        input_ids[row, : len(ids)] = ids
        real[row, : len(ids)] = True
    far = real & (np.arange(shape[1]) >= SKIP)
    scored = far & np.pad(real[:, 1:], ((0, 0), (0, 1)))
    arrays = {
        "input_ids": input_ids, "real": real, "far": far, "scored": scored,
        "last": real.sum(1) - 1, "doc": np.asarray(places[: len(documents)], dtype=np.int64),
    }  # fmt: skip
    return Rows(**{name: torch.from_numpy(value).to(device) for name, value in arrays.items()})


def documents(reader: "Reader", reading: "Reading", same: bool = False) -> DocumentSets:
    """The fit and evaluate sets of ``reading.text`` (the shipped text by default), at most ``reading.tokens`` in all.

    ``reading.window`` cuts documents shorter than 256; ``same`` fits on the documents that are evaluated.

    Raises:
        UserError: rows of another layout, no text, text of another tokenizer, ids that the model lacks, or no
            document of at least 64 tokens.
    """
    if reading.layout == "stream":
        raise UserError("the carried direction is measured on one document a row: leave --layout out")
    path = reading.text or reference.TEXT
    longest = min(reader.n_ctx, reading.window or LONGEST)
    found = read_documents(path, reader.tokenizer, longest, reading.tokens, reader.bos)
    if (largest := max(int(ids.max()) for ids in found.ids)) >= reader.d_vocab:
        raise UserError(
            f"{path.name} has token id {largest}, {reader.name} only {reader.d_vocab}: the tokenizer is not the model's"
        )
    return split(found, same)


def read_documents(
    path: Path, tokenizer: Any, n_ctx: int, limit: int = 0, bos: int | None = None
) -> DocumentSet:
    """The documents of a text that are long enough, cut to ``min(n_ctx, 256)`` tokens, until ``limit`` tokens.

    ``bos`` goes before every document that does not begin with it.

    Raises:
        UserError: no text, text of another tokenizer, or no document of at least 64 tokens.
    """
    corpus = _corpus(path, tokenizer)
    kinds = _kinds(path, corpus.names)
    longest, total = min(LONGEST, n_ctx), 0
    kept: list[tuple[np.ndarray, str, str]] = []
    for place in range(corpus.n_documents):
        start, size = corpus.starts[place], corpus.lengths[place]
        ids = np.array(corpus.ids[start : start + min(size, longest)], dtype=np.int64)
        if bos is not None and ids[0] != bos:
            ids = np.concatenate([[bos], ids])[:longest]
        if len(ids) < SHORTEST:
            continue
        total += len(ids)
        if limit and total > limit and kept:
            break
        kept.append((ids, corpus.names[place], kinds[place]))
    if not kept:
        raise UserError(
            f"{path.name}: none of {corpus.n_documents} documents has {SHORTEST} tokens, the fewest that are "
            "measured (16 are skipped): give longer documents"
        )
    ids_, names, kinds_ = zip(*kept, strict=True)
    return DocumentSet(ids=ids_, names=names, kinds=kinds_)


def _corpus(path: Path, tokenizer: Any) -> Any:
    """The text in the tokenizer's ids. The shipped one holds ids of the shipped tokenizer, so that for any other it is
    turned back into words first: read as they are, they would be other words."""
    from satlens.checkpoint import load_tokenizer
    from satlens.tokens import corpus_from_documents, open_corpus

    if path != reference.TEXT:
        return open_corpus(path, tokenizer)
    shipped = load_tokenizer(reference.resolve("reference-transformer"))
    corpus = open_corpus(path, shipped)
    if tokenizer.get_vocab() == shipped.get_vocab():
        return corpus
    words = [
        shipped.decode(corpus.document(place), clean_up_tokenization_spaces=False)
        for place in range(corpus.n_documents)
    ]
    return corpus_from_documents(tokenizer(words, add_special_tokens=False)["input_ids"], corpus.names)


def split(documents: DocumentSet, same: bool = False) -> DocumentSets:
    """Even documents fit, odd ones evaluate, so the two share none; with ``same`` (or only one) both are all."""
    if same or documents.n_documents < 2:
        if documents.n_documents < 2:
            say("note: a single document, so the same one fits and is evaluated, and no interval is given")
        return DocumentSets(documents, documents, True)
    if documents.n_documents < 4:
        say(f"note: {documents.n_documents} documents make sets of one, so some numbers have no interval")
    places = range(documents.n_documents)
    return DocumentSets(documents.take(places[::2]), documents.take(places[1::2]), False)


def _kinds(path: Path, names: tuple[str, ...]) -> tuple[str, ...]:
    """The kind column of the index beside a token file, if it has one and none of its documents is empty."""
    import pandas as pd

    file = path if path.suffix == ".bin" else path / "val.bin"
    index = file.with_suffix(".docs.parquet")
    if not index.exists():
        return names
    table = pd.read_parquet(index)
    if "kind" not in table or tuple(table["source"]) != names:
        return names
    return tuple(table["kind"])
