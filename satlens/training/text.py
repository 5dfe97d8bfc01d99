"""Where documents come from: local text, JSONL or parquet files, or a named `datasets` data set."""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from satlens.errors import SatlensError, UserError

SUFFIXES = (".txt", ".md", ".jsonl", ".parquet")


@dataclass(frozen=True, kw_only=True)
class Document:
    """One document and where it comes from."""

    text: str
    source: str
    kind: str = ""
    licence: str = ""


def read_documents(sources: tuple[str, ...]) -> Iterator[Document]:
    """All documents of ``sources`` in order: files, folders of files, or ``hf:NAME[@CONFIGURATION][:SPLIT]``.

    Documents of nothing but white space are left out.

    Raises:
        UserError: a source that does not exist, holds no files, or cannot be read (file and line are named).
    """
    for source in sources:
        if source.startswith("hf:"):
            yield from _from_datasets(source)
            continue
        path = Path(source)
        files = [path]
        if path.is_dir():
            files = sorted(p for p in path.rglob("*") if p.suffix in SUFFIXES and p.is_file())
        if not files or not path.exists():
            known = ", ".join(SUFFIXES)
            raise UserError(f"no documents at {source}: give {known} files, a folder of them, or hf:NAME")
        for file in files:
            yield from _from_file(file)


def _from_file(path: Path) -> Iterator[Document]:
    if path.suffix == ".jsonl":
        yield from _from_jsonl(path)
    elif path.suffix == ".parquet":
        yield from _from_parquet(path)
    elif path.suffix in SUFFIXES:
        yield from _labelled({"text": _decoded(path.read_bytes(), str(path))}, path.stem, str(path))
    else:
        kind = path.suffix or "this kind of"
        raise UserError(f"{path}: cannot read {kind} file; use one of {', '.join(SUFFIXES)}")


def _from_jsonl(path: Path) -> Iterator[Document]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            where = f"{path}:{number}"
            text = _decoded(line, where)
            if not text.strip():
                continue
            try:
                row = json.loads(text)
            except ValueError as error:
                raise UserError(f"{where}: not JSON ({error}); expected one object a line") from error
            if not isinstance(row, dict) or "text" not in row:
                raise UserError(f'{where}: expected one JSON object with a "text" field a line')
            yield from _labelled(row, path.stem, where)


def _from_parquet(path: Path) -> Iterator[Document]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as table:
            names = table.schema_arrow.names
            if "text" not in names:
                raise UserError(f"{path}: no column named text (found {', '.join(names)})")
            columns = [name for name in ("text", "source", "kind", "licence") if name in names]
            for batch in table.iter_batches(columns=columns):
                for row in batch.to_pylist():
                    yield from _labelled(row, path.stem, str(path))
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"{path} is no readable parquet file ({error})") from error


def _from_datasets(source: str) -> Iterator[Document]:
    """Rows of a data set one after another, as they arrive: nothing of it is kept."""
    import datasets

    name, config, split = parse_data_set(source)
    try:
        rows = datasets.load_dataset(name, name=config, split=split, streaming=True)
    except Exception as error:  # the library raises whatever its many back ends raise
        raise UserError(f"cannot open the data set {name}: {' '.join(str(error).split())}") from error
    for row in _unbroken(rows, name):
        if "text" not in row:
            raise UserError(f"the data set {name} has no column named text (found {', '.join(row)})")
        yield from _labelled(row, name, name)


def parse_data_set(source: str) -> tuple[str, str | None, str]:
    """``(name, configuration, split)`` of ``hf:NAME[@CONFIGURATION][:SPLIT]``; the name may be a local folder."""
    named, _, split = source.removeprefix("hf:").partition(":")
    name, _, config = named.partition("@")
    return name, config or None, split or "train"


def _unbroken(rows: Iterable[dict[str, Any]], name: str) -> Iterator[dict[str, Any]]:
    """The rows; a stream that breaks off is told with the place.

    Raises:
        SatlensError: the connection or a file of the set failed.
    """
    iterator, read = iter(rows), 0
    while True:
        try:
            row = next(iterator)
        except StopIteration:
            return
        except Exception as error:  # again, whatever a back end raises
            reason = " ".join(str(error).split()) or type(error).__name__
            raise SatlensError(
                f"the data set {name} broke off after {read:,} documents ({reason}): start the build again"
            ) from error
        read += 1
        yield row


def _labelled(row: dict[str, Any], stem: str, where: str) -> Iterator[Document]:
    """The document of one row, or nothing where its text is empty."""
    text = row["text"]
    if text is None:
        return
    if not isinstance(text, str):
        raise UserError(f"{where}: text must be a string, found {type(text).__name__}")
    try:
        text.encode()
    except UnicodeEncodeError as error:  # JSON can spell half a surrogate pair, which no tokenizer takes
        raise UserError(f"{where}: half a surrogate pair at character {error.start}: remove it") from error
    if text.strip():
        given = {label: str(row[label]) for label in ("source", "kind", "licence") if row.get(label)}
        yield Document(text=text, **{"source": stem, **given})


def _decoded(raw: bytes, where: str) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{where}: not UTF-8 (byte {error.start}); convert it") from error
