"""Text as rows of token ids: which positions are real, which predictions count, and whose document each belongs to."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from satlens.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How documents become rows. It follows how the model was trained unless the user says otherwise."""

    kind: Literal["stream", "document"] = "stream"
    """stream: one run of tokens, cut at multiples of the window; document: a row never crosses documents."""
    bos: bool = False
    """Put BOS before every document (never doubled where the text has one)."""
    eos: bool = True
    """Put EOS after every document."""
    score_eos: bool = False
    """Count predictions whose target is that EOS."""


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Documents as ids, one after another, without separators."""

    ids: Int[np.ndarray, " token"]
    starts: Int[np.ndarray, " doc"]
    lengths: Int[np.ndarray, " doc"]
    names: tuple[str, ...]
    """Where each document comes from, for people."""
    n_empty: int = 0
    """Documents that held no token and were left out."""

    @property
    def n_documents(self) -> int:
        """Documents with at least one token."""
        return len(self.starts)

    @property
    def n_tokens(self) -> int:
        """Tokens of all documents, separators not counted."""
        return int(self.lengths.sum())

    def document(self, index: int) -> Int[np.ndarray, " token"]:
        """Ids of one document, as a copy: the corpus may be a read-only file of a narrower type."""
        return np.array(
            self.ids[self.starts[index] : self.starts[index] + self.lengths[index]], dtype=np.int64
        )

    def take(self, documents: Int[np.ndarray, " doc"]) -> "Corpus":
        """The corpus of these documents only, in this order."""
        names = tuple(self.names[i] for i in documents)
        return Corpus(
            ids=self.ids, starts=self.starts[documents], lengths=self.lengths[documents], names=names
        )

    def first_tokens(self, n_tokens: int) -> "Corpus":
        """Whole documents from the start until ``n_tokens`` are reached (at least one document)."""
        ends = np.cumsum(self.lengths)
        keep = max(1, int(np.searchsorted(ends, n_tokens, side="right")))
        return self.take(np.arange(min(keep, self.n_documents)))

    def digest(self) -> str:
        """SHA-256 over lengths and ids: two runs read the same text exactly when theirs agree."""
        sha = hashlib.sha256(np.ascontiguousarray(self.lengths, dtype="<i8").tobytes())
        for index in range(self.n_documents):
            sha.update(np.ascontiguousarray(self.document(index), dtype="<i8").tobytes())
        return sha.hexdigest()


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Some rows of a laid-out corpus."""

    input_ids: Int[Tensor, "batch pos"]
    real: Bool[Tensor, "batch pos"]
    """True for tokens, false for right padding."""
    scored: Bool[Tensor, "batch pos"]
    """True at t when the prediction of token t + 1 counts; the last column is always false."""
    doc: Int[Tensor, "batch pos"]
    """Document of each token, -1 for padding. The prediction made at t belongs to document ``doc[t + 1]``."""
    text: Bool[Tensor, "batch pos"]
    """True for tokens of a document: neither padding nor BOS nor separator. Gate statistics count these."""
    row: Int[Tensor, " batch"]
    """Number of each row in the whole layout, the same whatever the batch size or process."""

    @property
    def padding(self) -> Int[Tensor, "batch pos"] | None:
        """The attention mask to give a model: None when no token is padding."""
        return None if bool(self.real.all()) else self.real.long()

    def targets(self) -> Int[Tensor, " scored"]:
        """Token ids that the scored predictions are about, row-major."""
        return self.input_ids.roll(-1, 1)[self.scored]

    def target_docs(self) -> Int[Tensor, " scored"]:
        """Document each scored prediction is credited to, row-major."""
        return self.doc.roll(-1, 1)[self.scored]

    def to(self, device: str | torch.device) -> "Batch":
        """The same batch on another device."""
        return Batch(**{name: value.to(device) for name, value in vars(self).items()})


def corpus_from_documents(documents: list[Any], names: tuple[str, ...] | None = None) -> Corpus:
    """A corpus from lists of ids; documents without tokens are left out and counted."""
    kept = [i for i, ids in enumerate(documents) if len(ids)]
    if not kept:
        raise UserError("the text holds no tokens at all")
    lengths = np.array([len(documents[i]) for i in kept], dtype=np.int64)
    return Corpus(
        ids=np.concatenate([np.asarray(documents[i], dtype=np.int64) for i in kept]),
        starts=np.cumsum(lengths) - lengths,
        lengths=lengths,
        names=tuple((names[i] if names else str(i)) for i in kept),
        n_empty=len(documents) - len(kept),
    )


def open_corpus(path: Path, tokenizer: Any, eos: int | None = None) -> Corpus:
    """Text to measure on: a token file (``.bin``), a build folder, or text/JSONL/parquet to be tokenised.

    Raises:
        UserError: nothing there, no tokens, or an id outside the tokenizer's vocabulary.
    """
    if path.suffix == ".bin" or (path / "data.json").exists():
        file = path if path.suffix == ".bin" else path / "val.bin"
        return _from_bin(file, tokenizer, eos)
    from satlens.training.text import read_documents

    if not path.exists():
        raise UserError(f"no text at {path}: give a .bin, .txt, .jsonl or .parquet file, or a folder of them")
    documents = list(read_documents((str(path),)))
    ids = tokenizer([d.text for d in documents], add_special_tokens=False)["input_ids"] if documents else []
    return corpus_from_documents(ids, tuple(d.source for d in documents))


def _from_bin(file: Path, tokenizer: Any, eos: int | None) -> Corpus:
    """A headerless token file; documents come from the index beside it, or else end at each EOS."""
    if not file.exists():
        raise UserError(f"no token file at {file}")
    index = file.with_suffix(".docs.parquet")
    eos = tokenizer.eos_token_id if eos is None else eos
    wide = len(tokenizer) > 2**16
    if file.stat().st_size % (4 if wide else 2):
        raise UserError(
            f"{file} has an odd number of bytes: it is truncated or no uint{32 if wide else 16} file"
        )
    if not file.stat().st_size:
        raise UserError(f"{file} holds no tokens")
    ids = np.memmap(file, dtype="<u4" if wide else "<u2", mode="r")
    if len(ids) and int(ids.max()) >= len(tokenizer):
        raise UserError(
            f"{file} holds id {ids.max()}, but the tokenizer has {len(tokenizer)}: made with another?"
        )
    if index.exists():
        table = pd.read_parquet(index)
        starts, sizes = table["start"].to_numpy(), table["n_tokens"].to_numpy()
        names = tuple(table["source"])
        if len(table) and int((starts + sizes).max()) > len(ids):
            raise UserError(f"{index.name} points beyond the end of {file}: they belong to different builds")
    else:
        ends = np.flatnonzero(ids == eos) + 1
        ends = np.append(ends, len(ids)) if not len(ends) or ends[-1] < len(ids) else ends
        starts, sizes = np.concatenate([[0], ends[:-1]]), np.diff(ends, prepend=0)
        names = tuple(str(i) for i in range(len(starts)))
    last = ids[starts + sizes - 1] if len(starts) else ids
    sizes = sizes - (last == eos)  # the separator is the layout's business
    keep = np.flatnonzero(sizes > 0)
    if not len(keep):
        raise UserError(f"{file} holds no tokens")
    return Corpus(
        ids=ids,
        starts=starts[keep],
        lengths=sizes[keep],
        names=tuple(names[i] for i in keep),
        n_empty=len(starts) - len(keep),
    )


def split_calibration(corpus: Corpus, every: int = 5) -> tuple[Corpus, Corpus]:
    """``(calibration, scored)``: every ``every``-th document calibrates, so the two share no document.

    Raises:
        UserError: fewer than two documents.
    """
    if corpus.n_documents < 2:
        raise UserError("calibration and scored documents must be disjoint: give at least two documents")
    every = min(every, corpus.n_documents)
    calibrates = np.arange(corpus.n_documents) % every == every - 1
    return corpus.take(np.flatnonzero(calibrates)), corpus.take(np.flatnonzero(~calibrates))


@dataclass(frozen=True, kw_only=True)
class _Rows:
    """Where every row of a layout lies, without its tokens: a corpus may be far larger than memory."""

    corpus: Corpus
    layout: Layout
    bos: int | None
    eos: int | None
    ends: Int[np.ndarray, " doc"]
    """Tokens of all documents up to and including this one, with their separators."""
    start: Int[np.ndarray, " row"]
    """First token of each row, counted over all documents with their separators."""
    length: Int[np.ndarray, " row"]

    def tokens(self, row: int) -> tuple[np.ndarray, ...]:
        """``(ids, doc, text, scorable)`` of one row's tokens."""
        low, high = self.start[row], self.start[row] + self.length[row]
        first, last = np.searchsorted(self.ends, [low, high - 1], side="right")
        parts = []
        for doc in range(first, last + 1):
            ids, text, scorable = self._document(doc)
            begin = self.ends[doc] - len(ids)
            cut = slice(max(low - begin, 0), high - begin)
            parts.append((ids[cut], np.full(len(ids[cut]), doc), text[cut], scorable[cut]))
        return tuple(np.concatenate(column) for column in zip(*parts, strict=True))

    def _document(self, index: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """One document with its separators, and for each token: is it text, does it count as a target."""
        body = self.corpus.document(index)
        has_bos = self.bos is not None and body[0] == self.bos
        head = [self.bos] if self.layout.bos and not has_bos else []
        tail = [self.eos] if self.layout.eos else []
        ids = np.concatenate([head, body, tail]).astype(np.int64)
        text = np.ones(len(ids), dtype=bool)
        text[: len(head) + has_bos] = False
        text[len(ids) - len(tail) :] = False
        scorable = text.copy()
        scorable[len(ids) - len(tail) :] = self.layout.score_eos
        return ids, text, scorable


def _rows(corpus: Corpus, layout: Layout, window: int, bos: int | None, eos: int | None) -> _Rows:
    if layout.bos and bos is None:
        raise UserError("the layout wants BOS, but the tokenizer has none")
    if layout.eos and eos is None:
        raise UserError("the layout wants EOS, but the tokenizer has none")
    lengths = _separated_lengths(corpus, layout, bos)
    ends = lengths.cumsum()
    if layout.kind == "stream":
        start = np.arange(0, ends[-1], window)
        length = np.minimum(window, ends[-1] - start)
    else:
        per_doc = -(-lengths // window)
        doc = np.repeat(np.arange(len(lengths)), per_doc)
        within = np.arange(len(doc)) - np.repeat(per_doc.cumsum() - per_doc, per_doc)
        start = (ends - lengths)[doc] + within * window
        length = np.minimum(window, ends[doc] - start)
    return _Rows(corpus=corpus, layout=layout, bos=bos, eos=eos, ends=ends, start=start, length=length)


def _separated_lengths(corpus: Corpus, layout: Layout, bos: int | None) -> Int[np.ndarray, " doc"]:
    """Tokens of each document once its separators are added."""
    adds_bos = layout.bos & (np.asarray(corpus.ids[corpus.starts]) != (-1 if bos is None else bos))
    return corpus.lengths + adds_bos + int(layout.eos)


def batches(
    corpus: Corpus,
    layout: Layout,
    window: int,
    batch_size: int,
    bos: int | None = None,
    eos: int | None = None,
    rank: int = 0,
    world: int = 1,
) -> Iterator[Batch]:
    """The corpus as batches of at most ``batch_size`` rows of at most ``window`` tokens.

    Process ``rank`` of ``world`` gets every ``world``-th row. Rows of the document layout are grouped by length, so
    that little is padded; no answer depends on that, since sums go to documents.

    Raises:
        UserError: a window below two tokens (nothing could be scored), or separators the tokenizer lacks.
    """
    if window < 2:
        raise UserError(f"a window of {window} tokens scores nothing; use at least 2")
    rows = _rows(corpus, layout, window, bos, eos)
    order = np.argsort(-rows.length, kind="stable")[rank::world]
    for start in range(0, len(order), batch_size):
        yield _batch(rows, order[start : start + batch_size])


def _batch(rows: _Rows, order: np.ndarray) -> Batch:
    shape = (len(order), max(int(rows.length[order].max()), 2))
    ids, doc = np.zeros(shape, dtype=np.int64), np.full(shape, -1, dtype=np.int64)
    real, text, scored = (np.zeros(shape, dtype=bool) for _ in range(3))
    for line, row in enumerate(order):
        n = int(rows.length[row])
        ids[line, :n], doc[line, :n], text[line, :n], scorable = rows.tokens(row)
        real[line, :n] = True
        scored[line, : n - 1] = scorable[1:]
    tensors = {"input_ids": ids, "doc": doc, "real": real, "text": text, "scored": scored, "row": order}
    return Batch(**{name: torch.from_numpy(np.ascontiguousarray(value)) for name, value in tensors.items()})


def count_rows(corpus: Corpus, layout: Layout, window: int, bos: int | None = None) -> int:
    """Rows that ``batches`` will make, for progress bars."""
    lengths = _separated_lengths(corpus, layout, bos)
    if layout.kind == "stream":
        return -(-int(lengths.sum()) // window)
    return int((-(-lengths // window)).sum())
