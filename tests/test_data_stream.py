"""A `datasets` data set is read as a stream, as far as the tokens asked for need it, and never held."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pandas as pd
import pytest
from tiny import documents

import satlens.training.data as data_module
from satlens.cli import main
from satlens.errors import SatlensError, UserError
from satlens.training.data import DataConfig, build_data
from satlens.training.text import parse_data_set, read_documents
from satlens.training.tokenizer import train_tokenizer

BATCH = 8
EOS = 2


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer") / "saved"
    train_tokenizer(documents(), 340, folder)
    return folder


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Stands for the hub: an endless data set; how it was asked for, and how many rows were taken from it."""
    asked: dict[str, Any] = {"rows": 0}

    def endless() -> Iterator[dict[str, Any]]:
        texts = documents(40)
        while True:
            asked["rows"] += 1
            yield {"text": texts[asked["rows"] % 40], "id": asked["rows"], "language": "en"}

    def load_dataset(*given: Any, **named: Any) -> datasets.IterableDataset:
        asked["call"] = (given, named)
        return datasets.IterableDataset.from_generator(endless)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr(data_module, "ENCODE_BATCH", BATCH)
    return asked


def test_a_build_takes_no_more_rows_than_its_tokens_need(
    opened: dict[str, Any], tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out = "hf:HuggingFaceFW/fineweb-edu@sample-100BT", tmp_path / "data"
    flags = ["--sources", source, "--tokenizer", str(tokenizer), "--tokens", "3000", "--out", str(out)]
    assert main(["data", "build", *flags]) == 0 and capsys.readouterr().out == f"{out}\n"
    wanted = {"name": "sample-100BT", "split": "train", "streaming": True}
    assert opened["call"] == (("HuggingFaceFW/fineweb-edu",), wanted)
    splits = json.loads((out / "data.json").read_text())["splits"]
    index = pd.read_parquet(out / "train.docs.parquet")
    last = int(index["n_tokens"].iloc[-1])
    assert 3000 <= splits["train"]["tokens"] < 3000 + last  # whole documents, and not one too many
    used = splits["train"]["documents"] + splits["val"]["documents"]
    assert used <= opened["rows"] <= used + BATCH
    ids = np.fromfile(out / "train.bin", dtype="<u2")
    assert len(ids) == splits["train"]["tokens"] and (ids == EOS).sum() == len(index)
    assert (ids[(index["start"] + index["n_tokens"] - 1).to_numpy()] == EOS).all()


def test_a_tokenizer_of_ones_own_does_not_wait_for_the_end_of_the_stream(
    opened: dict[str, Any], tmp_path: Path
) -> None:
    build_data(DataConfig(sources=("hf:any/set",), out=tmp_path / "out", tokens=500, vocab_size=300))
    assert json.loads((tmp_path / "out" / "data.json").read_text())["splits"]["train"]["tokens"] >= 500
    assert opened["rows"] < 200


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_a_local_folder_opens_as_a_data_set_and_gives_the_same_build(
    kind: str, tokenizer: Path, tmp_path: Path
) -> None:
    table = pd.DataFrame({"text": documents(30), "source": "web"})
    (tmp_path / "set").mkdir()
    if kind == "parquet":
        table.to_parquet(tmp_path / "set" / "train.parquet")
    else:
        table.to_json(tmp_path / "set" / "train.jsonl", orient="records", lines=True)
    for name, source in (("stream", f"hf:{tmp_path / 'set'}"), ("files", str(tmp_path / "set"))):
        build_data(DataConfig(sources=(source,), out=tmp_path / name, tokenizer=tokenizer, tokens=700))
    for file in ("train.bin", "val.bin", "train.docs.parquet", "data.json"):
        assert (tmp_path / "stream" / file).read_bytes() == (tmp_path / "files" / file).read_bytes(), file
    held = len(pd.read_parquet(tmp_path / "files" / "train.docs.parquet"))
    assert 0 < held < 29  # fewer than there are: the limit held for files too


@pytest.mark.parametrize(
    ("source", "parts"),
    [
        ("hf:a/b", ("a/b", None, "train")),
        ("hf:a/b:test", ("a/b", None, "test")),
        ("hf:a/b@c", ("a/b", "c", "train")),
        ("hf:a/b@c:test", ("a/b", "c", "test")),
    ],
)
def test_a_source_names_set_configuration_and_split(source: str, parts: tuple[str, ...]) -> None:
    assert parse_data_set(source) == parts


def read_all(monkeypatch: pytest.MonkeyPatch, rows: Callable[[], Iterator[dict[str, Any]]]) -> list[Any]:
    stream = datasets.IterableDataset.from_generator(rows)
    monkeypatch.setattr(datasets, "load_dataset", lambda *given, **named: stream)
    return list(read_documents(("hf:some/set",)))


def test_a_stream_that_breaks_off_says_where(monkeypatch: pytest.MonkeyPatch) -> None:
    def rows() -> Iterator[dict[str, Any]]:
        yield from ({"text": f"document {i}"} for i in range(3))
        raise ConnectionError("the server\nwent away")

    with pytest.raises(SatlensError, match=r"some/set broke off after \d documents \(.*the server went away"):
        read_all(monkeypatch, rows)


def test_a_data_set_without_text_says_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"no column named text \(found content, url\)"):
        read_all(monkeypatch, lambda: iter([{"content": "words", "url": "x"}]))


def test_a_data_set_that_does_not_open_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot open the data set") as caught:
        list(read_documents((f"hf:{tmp_path / 'nowhere'}",)))
    assert "\n" not in str(caught.value)
