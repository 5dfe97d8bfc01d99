"""Documents to token files: `{split}.bin` (headerless little-endian ids), a document index, a manifest of digests."""

import hashlib
import json
import math
import os
import sys
from array import array
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from satlens.errors import UserError
from satlens.log import say
from satlens.training.text import Document, read_documents
from satlens.training.tokenizer import BYTES, SPECIALS, train_tokenizer

SPLITS = ("train", "val")
ENCODE_BATCH = 512  # documents encoded at once: enough to keep the tokenizer busy, little to hold
COLUMNS = ("start", "n_tokens", "n_chars", "source", "kind", "licence")
SMALLEST_VOCAB = len(SPECIALS) + len(BYTES) + 1


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Turn documents into token files.

    Example: satlens data build --sources texts/ --out data/ --vocab-size 8192
    """

    sources: tuple[str, ...]
    """Text, JSONL or parquet files, folders of them, or hf:NAME[@CONFIGURATION][:SPLIT]."""
    out: Path
    """Folder to write; must not hold a finished build."""
    tokenizer: Path | None = None
    """A HuggingFace tokenizer folder; left out, one is trained on the documents."""
    vocab_size: int = 8192
    """Size of the tokenizer that is trained."""
    tokenizer_chars: int = 40_000_000
    """Characters the tokenizer is trained on, spread evenly over the documents."""
    val_fraction: float = 0.01
    """Share of documents held out, chosen by the hash of their text."""
    tokens: int = 0
    """Stop once the training split holds this many tokens, in whole documents; 0 reads the sources to their end."""

    def __post_init__(self) -> None:
        if not 0 <= self.val_fraction < 1:
            raise UserError(f"val_fraction must be in [0, 1), got {self.val_fraction}")
        if self.vocab_size < SMALLEST_VOCAB:
            raise UserError(f"vocab_size must be at least {SMALLEST_VOCAB}, got {self.vocab_size}")
        if self.tokenizer_chars < 1:
            raise UserError(f"tokenizer_chars must be at least 1, got {self.tokenizer_chars}")
        if self.tokens < 0:
            raise UserError(f"tokens must be at least 0 (0 reads everything), got {self.tokens}")


def split_of(text: str, val_fraction: float) -> str:
    """The split a document belongs to, decided by its own hash: stable when other documents come or go."""
    draw = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") / 2**64
    return "val" if draw < val_fraction else "train"


def build_data(config: DataConfig) -> Path:
    """Write ``out/{train,val}.bin``, ``out/{train,val}.docs.parquet``, ``out/tokenizer`` and ``out/data.json``.

    Documents lie one after another, each closed by EOS, no BOS (the official layout). ``data.json`` is written
    last, so it exists only when the build is whole.

    Raises:
        UserError: no documents, an existing build, or a tokenizer that cannot be used.
    """
    if (config.out / "data.json").exists():
        raise UserError(f"{config.out} already holds a finished build: choose another --out or delete it")
    config.out.mkdir(parents=True, exist_ok=True)
    tokenizer = _tokenizer(config)
    dtype = id_dtype(len(tokenizer))
    splits = _write_splits(config, tokenizer, dtype)
    manifest = {
        "layout": {"kind": "stream", "bos": False, "eos": True},
        "dtype": dtype.name,
        "d_vocab": len(tokenizer),
        "eos_token_id": tokenizer.eos_token_id,
        "tokenizer_sha256": tokenizer_digest(config.out / "tokenizer"),
        "val_fraction": config.val_fraction,
        "splits": splits,
    }
    write_json(config.out / "data.json", manifest)
    for split, facts in splits.items():
        say(f"{split}: {facts['tokens']:,} tokens in {facts['documents']:,} documents")
    return config.out


def id_dtype(d_vocab: int) -> np.dtype[Any]:
    """The official uint16 where every id fits, else uint32: an id that wraps around would be another token."""
    return np.dtype("<u2") if d_vocab <= 2**16 else np.dtype("<u4")


def _write_splits(config: DataConfig, tokenizer: Any, dtype: np.dtype[Any]) -> dict[str, dict[str, Any]]:
    """Encode every document into its split; returns what each split holds."""
    with ExitStack() as stack:
        writers = {split: stack.enter_context(_SplitWriter(config.out, split, dtype)) for split in SPLITS}
        for doc, ids in _encoded(read_documents(config.sources), tokenizer):
            writers[split_of(doc.text, config.val_fraction)].add(doc, ids)
            if config.tokens and writers["train"].start >= config.tokens:
                break
        if not writers["train"].start:
            raise UserError(
                f"no training documents in {', '.join(config.sources)}: add text or lower val_fraction"
            )
        return {split: writer.finish() for split, writer in writers.items()}


def _encoded(documents: Iterator[Document], tokenizer: Any) -> Iterator[tuple[Document, list[int]]]:
    """Every document with its ids, closed by EOS; a few hundred of them are held at a time."""
    for batch in _batches(documents):
        encoded = tokenizer([doc.text for doc in batch], add_special_tokens=False)["input_ids"]
        for doc, ids in zip(batch, encoded, strict=True):
            yield doc, [*ids, tokenizer.eos_token_id]


class _SplitWriter:
    """Appends documents to one split's token file and keeps its index; files appear whole, by rename."""

    def __init__(self, out: Path, split: str, dtype: np.dtype[Any]) -> None:
        self.bin, self.index, self.dtype = out / f"{split}.bin", out / f"{split}.docs.parquet", dtype
        self.part = self.bin.with_suffix(".bin.part")
        self.sha, self.start = hashlib.sha256(), 0
        # eight bytes a number and a label: an index of millions of documents must fit in memory, their text need not
        self.numbers = {name: array("q") for name in COLUMNS[:3]}
        self.labels: dict[str, list[str]] = {name: [] for name in COLUMNS[3:]}

    def __enter__(self) -> "_SplitWriter":
        self.file = self.part.open("wb")
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()

    def add(self, doc: Document, ids: list[int]) -> None:
        """Append one document's ids (EOS included)."""
        raw = np.asarray(ids, dtype=self.dtype).tobytes()
        self.file.write(raw)
        self.sha.update(raw)
        for column, number in zip(self.numbers.values(), (self.start, len(ids), len(doc.text)), strict=True):
            column.append(number)
        for name, values in self.labels.items():
            values.append(sys.intern(getattr(doc, name)))
        self.start += len(ids)

    def finish(self) -> dict[str, Any]:
        """Give the files their names and say what they hold."""
        self.file.close()
        self.part.replace(self.bin)
        table = pd.DataFrame(
            {name: np.asarray(column) for name, column in self.numbers.items()} | self.labels
        )
        part = self.index.with_suffix(".parquet.part")
        table.to_parquet(part, index=False)
        part.replace(self.index)
        return {"tokens": self.start, "documents": len(table), "sha256": self.sha.hexdigest()}


def _tokenizer(config: DataConfig) -> Any:
    """The tokenizer as saved in the build: trained here, or a copy of the one given."""
    from transformers import AutoTokenizer

    target = config.out / "tokenizer"
    if config.tokenizer is None:
        train_tokenizer(_sample(config), config.vocab_size, target)
    elif not (config.tokenizer / "tokenizer.json").exists():
        raise UserError(
            f"{config.tokenizer}: no tokenizer.json here; give a saved HuggingFace fast tokenizer"
        )
    else:
        try:
            AutoTokenizer.from_pretrained(config.tokenizer).save_pretrained(target)
        except Exception as error:  # a damaged file shows up as whatever its parser raises
            raise UserError(f"{config.tokenizer} is no tokenizer: {' '.join(str(error).split())}") from error
    tokenizer = AutoTokenizer.from_pretrained(target)
    if tokenizer.eos_token_id is None:
        raise UserError("the tokenizer has no EOS token; documents could not be told apart")
    return tokenizer


def _sample(config: DataConfig) -> Iterator[str]:
    """Every k-th training document, k such that about ``tokenizer_chars`` characters are seen."""
    total = sum(len(text) for text in _texts(config))
    if not total:
        raise UserError(
            f"no documents with text in {', '.join(config.sources) or 'an empty list of sources'}"
        )
    training = (text for text in _texts(config) if split_of(text, config.val_fraction) == "train")
    return islice(training, 0, None, max(1, total // config.tokenizer_chars))


def _texts(config: DataConfig) -> Iterator[str]:
    """The texts a tokenizer may be trained on: all, or about as many as ``tokens`` will need (a token is seldom more
    than six characters), so that the start of a large stream does not wait for its end."""
    enough, seen = config.tokens * 6 or math.inf, 0
    for doc in read_documents(config.sources):
        yield doc.text
        seen += len(doc.text)
        if seen >= enough:
            return


def _batches(documents: Iterator[Document]) -> Iterator[list[Document]]:
    while batch := list(islice(documents, ENCODE_BATCH)):
        yield batch


def tokenizer_digest(folder: Path) -> str:
    """SHA-256 of ``tokenizer.json``: two models may be compared only when theirs agree."""
    return hashlib.sha256((folder / "tokenizer.json").read_bytes()).hexdigest()


def write_json(path: Path, content: Any) -> None:
    """Strict JSON, whole by atomic rename."""
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    os.replace(part, path)


def token_windows(path: Path, width: int, dtype: str = "uint16") -> np.ndarray:
    """A token file as ``[windows, width]``, by the official rule: ``(len - 1) // width`` windows from the start.

    Raises:
        UserError: missing or truncated file, or fewer than ``width + 1`` tokens.
    """
    if not path.exists():
        raise UserError(f"no token file at {path}: make one with `satlens data build`")
    kind = np.dtype(dtype).newbyteorder("<")
    length, odd = divmod(path.stat().st_size, kind.itemsize)
    if odd:
        raise UserError(
            f"{path} has {odd} bytes too many for {dtype} ids: it is truncated or of another type"
        )
    count = (length - 1) // width
    if count < 1:
        raise UserError(
            f"{path} holds {length} tokens, less than one window of {width}: add text or shorten it"
        )
    return np.memmap(path, dtype=kind, mode="r")[: count * width].reshape(count, width)
