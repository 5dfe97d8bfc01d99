"""Where documents come from: local text, JSONL or parquet files, or a named `datasets` data set."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from satlens.errors import UserError

SUFFIXES = (".txt", ".md", ".jsonl", ".parquet")


@dataclass(frozen=True, kw_only=True)
class Document:
    """One document and where it comes from."""

    text: str
    source: str
    kind: str = ""
    licence: str = ""


def read_documents(sources: tuple[str, ...]) -> Iterator[Document]:
    """All documents of ``sources`` in order: files, folders of files, or ``hf:NAME[:SPLIT]``.

    Raises:
        UserError: a source that does not exist, holds no documents, or cannot be read.
    """
    for source in sources:
        if source.startswith("hf:"):
            yield from _from_datasets(source)
            continue
        path = Path(source)
        files = sorted(p for p in path.rglob("*") if p.suffix in SUFFIXES) if path.is_dir() else [path]
        if not files or not path.exists():
            raise UserError(f"no documents at {source}: give {', '.join(SUFFIXES)} files, a folder of them, or hf:NAME")
        for file in files:
            yield from _from_file(file)


def _from_file(path: Path) -> Iterator[Document]:
    if path.suffix == ".jsonl":
        yield from _from_jsonl(path)
    elif path.suffix == ".parquet":
        yield from _from_parquet(path)
    elif path.suffix in SUFFIXES:
        text = path.read_text(encoding="utf-8")
        if text.strip():
            yield Document(text=text, source=path.stem)
    else:
        raise UserError(f"{path}: cannot read {path.suffix or 'this kind of'} file; use one of {', '.join(SUFFIXES)}")


def _from_jsonl(path: Path) -> Iterator[Document]:
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            try:
                row = json.loads(line)
                text = row["text"]
            except (ValueError, KeyError, TypeError) as error:
                raise UserError(f'{path}:{number}: expected one JSON object with a "text" field a line') from error
            if text.strip():
                yield Document(text=text, **{k: row.get(k) or d for k, d in _labels(path.stem).items()})


def _from_parquet(path: Path) -> Iterator[Document]:
    import pyarrow.parquet as pq

    table = pq.ParquetFile(path)
    if "text" not in table.schema_arrow.names:
        raise UserError(f"{path}: no column named text (found {', '.join(table.schema_arrow.names)})")
    for batch in table.iter_batches():
        for row in batch.to_pylist():
            if (row["text"] or "").strip():
                yield Document(text=row["text"], **{k: row.get(k) or d for k, d in _labels(path.stem).items()})


def _from_datasets(source: str) -> Iterator[Document]:
    import datasets

    name, _, split = source.removeprefix("hf:").partition(":")
    try:
        rows = datasets.load_dataset(name, split=split or "train", streaming=True)
    except Exception as error:
        raise UserError(f"cannot open the data set {name}: {error}") from error
    for row in rows:
        if row["text"].strip():
            yield Document(text=row["text"], source=name)


def _labels(stem: str) -> dict[str, str]:
    return {"source": stem, "kind": "", "licence": ""}
