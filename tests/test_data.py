"""Text becomes tokens and back without loss, and a build holds exactly its documents."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from tiny import documents, write_texts
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

import satlens.training.data as data_module
from satlens.cli import main
from satlens.errors import UserError
from satlens.tokens import open_corpus
from satlens.training.data import DataConfig, build_data, id_dtype, split_of, token_windows
from satlens.training.text import read_documents
from satlens.training.tokenizer import BYTES, train_tokenizer


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer([*documents(), "0123456789"], 340, folder)
    return folder


@pytest.fixture(scope="module")
def tokenizer(tokenizer_folder: Path) -> Any:
    return AutoTokenizer.from_pretrained(tokenizer_folder)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """A build of 60 documents in a build folder, and the documents."""
    folder = tmp_path_factory.mktemp("build")
    source = write_texts(folder, 60)
    build_data(DataConfig(sources=(str(source),), out=folder / "data", vocab_size=340, val_fraction=0.2))
    return folder / "data", documents(60)


def encode(tokenizer: Any, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def tokens(tokenizer: Any, text: str) -> list[str]:
    return tokenizer.convert_ids_to_tokens(encode(tokenizer, text))


# --- the tokenizer ---

NASTY = {
    "leading spaces": "   the gate",
    "trailing spaces": "the gate   ",
    "only a space": " ",
    "inner runs": "the  gate    opens",
    "tabs and lines": "\t\tx\n\n\r\n  y\t",
    "emoji": "gate 🚪👩‍👩‍👧 opens",
    "CJK": "你好,世界",
    "combining marks": "e\u0301 and é and a\u0328\u0301",
    "right to left": "שלום عليكم",
    "byte token as text": "a <0x0A> b <0x41>",
    "odd spaces": "a\u00a0b\u2003c\u3000d",
    "control characters": "a\x00b\x1fc",
    "unseen letters": "Žluťoučký кůň",
    "first plane": "𝔊𝔞𝔱𝔢",
}


@pytest.mark.parametrize("text", NASTY.values(), ids=NASTY.keys())
def test_any_text_survives_the_round_trip(text: str, tokenizer: Any) -> None:
    assert tokenizer.decode(encode(tokenizer, text)) == text


def test_a_literal_space_mark_comes_back_as_a_space(tokenizer: Any) -> None:
    assert tokenizer.decode(encode(tokenizer, "a▁b")) == "a b"


def test_the_first_ids_are_the_specials_and_the_bytes(tokenizer: Any) -> None:
    assert tokenizer.convert_ids_to_tokens(list(range(259))) == ["<unk>", "<s>", "</s>", *BYTES]
    assert (tokenizer.unk_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1, 2)


def test_a_line_break_is_its_byte_token(tokenizer: Any) -> None:
    assert encode(tokenizer, "x\n\ty")[2:4] == [3 + 0x0A, 3 + 0x09]


def test_a_byte_token_written_out_is_ordinary_text(tokenizer: Any) -> None:
    assert 3 + 0x0A not in encode(tokenizer, "<0x0A>")


def test_unseen_characters_become_their_utf8_bytes(tokenizer: Any) -> None:
    assert encode(tokenizer, "🚪")[1:] == [3 + byte for byte in "🚪".encode()]


def test_digits_are_single_tokens(tokenizer: Any) -> None:
    assert tokens(tokenizer, "year 19073")[-6:] == ["▁", "1", "9", "0", "7", "3"]
    vocabulary = [token.lstrip("▁") for token in tokenizer.get_vocab() if token not in BYTES]
    assert all(len(token) == 1 for token in vocabulary if any(char.isdigit() for char in token))


def test_an_end_of_text_written_out_is_the_special_token(tokenizer: Any) -> None:
    assert encode(tokenizer, "a</s>").count(2) == 1


def test_no_token_crosses_a_line_or_a_word(tokenizer: Any) -> None:
    words = [t for t in tokenizer.get_vocab() if t not in BYTES and "▁" in t.lstrip("▁")]
    assert words == []


def test_the_saved_folder_opens_with_the_same_ids(tmp_path: Path) -> None:
    trained = train_tokenizer(documents(), 340, tmp_path)
    opened = AutoTokenizer.from_pretrained(tmp_path)
    for text in (*documents(), *NASTY.values()):
        assert encode(opened, text) == encode(trained, text)


def test_the_same_text_gives_the_same_tokenizer_bytes(tmp_path: Path) -> None:
    # more equally rare characters than the alphabet holds: which of them stay must not be chance
    texts = [" ".join(documents()), "".join(map(chr, range(0xAC00, 0xAC00 + 400)))] * 2
    for name in ("one", "two"):
        train_tokenizer(texts, 420, tmp_path / name, alphabet=100)
    assert digest(tmp_path / "one" / "tokenizer.json") == digest(tmp_path / "two" / "tokenizer.json")
    kept = [
        t
        for t in AutoTokenizer.from_pretrained(tmp_path / "one").get_vocab()
        if "\uac00" <= t[-1] <= "\ud7a3"
    ]
    assert 0 < len(kept) < 100
    assert max(kept) < "\uac64"  # the first hundred in code-point order at most


# --- the build ---


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_a_build_holds_every_document_closed_by_eos(built: tuple[Path, list[str]]) -> None:
    folder, texts = built
    tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
    for split in ("train", "val"):
        ids = np.fromfile(folder / f"{split}.bin", dtype="<u2")
        mine = [text for text in texts if split_of(text, 0.2) == split]
        assert ids.tolist() == [i for text in mine for i in [*encode(tokenizer, text), 2]]


def test_index_rows_are_the_slices_of_their_documents(built: tuple[Path, list[str]]) -> None:
    folder, texts = built
    tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
    seen = []
    for split in ("train", "val"):
        ids = np.fromfile(folder / f"{split}.bin", dtype="<u2")
        for row in pd.read_parquet(folder / f"{split}.docs.parquet").itertuples():
            text = texts[int(row.source.removeprefix("doc"))]
            piece = ids[row.start : row.start + row.n_tokens]
            assert tokenizer.decode(piece[:-1]) == text and piece[-1] == 2 and row.n_chars == len(text)
            seen.append(row.source)
    assert sorted(seen) == sorted(f"doc{i}" for i in range(60))


def test_the_manifest_says_what_the_files_hold(built: tuple[Path, list[str]]) -> None:
    folder, _ = built
    manifest = json.loads((folder / "data.json").read_text())
    assert manifest["tokenizer_sha256"] == digest(folder / "tokenizer" / "tokenizer.json")
    assert manifest["layout"] == {"kind": "stream", "bos": False, "eos": True}
    for split, facts in manifest["splits"].items():
        assert facts["sha256"] == digest(folder / f"{split}.bin")
        assert facts["tokens"] * 2 == (folder / f"{split}.bin").stat().st_size
    assert sum(facts["documents"] for facts in manifest["splits"].values()) == 60


def test_the_same_sources_give_the_same_build(built: tuple[Path, list[str]], tmp_path: Path) -> None:
    source = write_texts(tmp_path, 60)
    build_data(DataConfig(sources=(str(source),), out=tmp_path / "data", vocab_size=340, val_fraction=0.2))
    for name in ("train.bin", "val.bin", "data.json", "tokenizer/tokenizer.json"):
        assert digest(tmp_path / "data" / name) == digest(built[0] / name)


def test_a_document_stays_in_its_split_whatever_else_is_there(tmp_path: Path) -> None:
    def splits(texts: list[str], name: str) -> dict[str, str]:
        source = tmp_path / f"{name}.jsonl"
        source.write_text("".join(json.dumps({"text": t, "source": t[:12]}) + "\n" for t in texts))
        out = build_data(
            DataConfig(sources=(str(source),), out=tmp_path / name, vocab_size=300, val_fraction=0.3)
        )
        tables = {split: pd.read_parquet(out / f"{split}.docs.parquet") for split in ("train", "val")}
        return {source: split for split, table in tables.items() for source in table["source"]}

    texts = documents(40)
    all_of_them, fewer = splits(texts, "all"), splits(texts[::-3], "fewer")
    assert {**all_of_them, **fewer} == all_of_them and set(fewer.values()) == {"train", "val"}


def test_the_held_out_share_is_the_one_asked_for() -> None:
    held = sum(split_of(f"document {i}", 0.25) == "val" for i in range(4000))
    assert abs(held - 1000) < 5 * (4000 * 0.25 * 0.75) ** 0.5
    assert {split_of(f"document {i}", 0.0) for i in range(100)} == {"train"}


def test_a_given_tokenizer_is_kept_byte_for_byte(tokenizer_folder: Path, tmp_path: Path) -> None:
    source = write_texts(tmp_path)
    out = build_data(DataConfig(sources=(str(source),), out=tmp_path / "data", tokenizer=tokenizer_folder))
    assert digest(out / "tokenizer" / "tokenizer.json") == digest(tokenizer_folder / "tokenizer.json")


@pytest.mark.parametrize("d_vocab, dtype", [(32000, "<u2"), (65536, "<u2"), (65537, "<u4")])
def test_ids_that_need_it_are_written_in_four_bytes(d_vocab: int, dtype: str) -> None:
    assert id_dtype(d_vocab) == np.dtype(dtype)


def test_a_large_vocabulary_builds_and_opens_as_uint32(tmp_path: Path) -> None:
    vocabulary = {"<unk>": 0, "</s>": 1, **{f"word{i}": i for i in range(2, 2**16 + 5)}}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    wide = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>", eos_token="</s>")
    wide.save_pretrained(tmp_path / "wide")
    (tmp_path / "text.txt").write_text("word7 word65540 word65536")
    config = DataConfig(
        sources=(str(tmp_path / "text.txt"),),
        out=tmp_path / "data",
        tokenizer=tmp_path / "wide",
        val_fraction=0.0,
    )
    out = build_data(config)
    assert json.loads((out / "data.json").read_text())["dtype"] == "uint32"
    assert np.fromfile(out / "train.bin", dtype="<u4").tolist() == [7, 65540, 65536, 1]
    assert open_corpus(out / "train.bin", wide).document(0).tolist() == [7, 65540, 65536]


# --- token files of others ---


def test_an_official_headerless_file_opens_with_its_documents(tokenizer: Any, tmp_path: Path) -> None:
    ids = np.array([5, 6, 2, 7, 2, 8, 9, 10], dtype="<u2")
    (tmp_path / "train_000.bin").write_bytes(ids.tobytes())
    corpus = open_corpus(tmp_path / "train_000.bin", tokenizer)
    assert [corpus.document(i).tolist() for i in range(3)] == [[5, 6], [7], [8, 9, 10]]


@pytest.mark.parametrize("length, count", [(9, 2), (12, 2), (13, 3), (5, 1)])
def test_windows_follow_the_official_rule(length: int, count: int, tmp_path: Path) -> None:
    (tmp_path / "x.bin").write_bytes(np.arange(length, dtype="<u2").tobytes())
    windows = token_windows(tmp_path / "x.bin", 4)
    assert windows.tolist() == np.arange(4 * count).reshape(count, 4).tolist()


BAD_FILES = [
    (None, "no token file"),
    (b"", "holds 0 tokens"),
    (bytes(8), "holds 4 tokens, less than one window of 4"),
    (bytes(11), "truncated"),
]


@pytest.mark.parametrize("content, words", BAD_FILES)
def test_a_token_file_that_cannot_work_says_why(content: bytes | None, words: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "x.bin").write_bytes(content)
    with pytest.raises(UserError, match=words):
        token_windows(tmp_path / "x.bin", 4)


# --- sources ---


def jsonl(content: bytes) -> Callable[[Path], str]:
    def write(folder: Path) -> str:
        (folder / "bad.jsonl").write_bytes(content)
        return str(folder / "bad.jsonl")

    return write


def parquet(**columns: Any) -> Callable[[Path], str]:
    def write(folder: Path) -> str:
        pd.DataFrame(columns).to_parquet(folder / "bad.parquet")
        return str(folder / "bad.parquet")

    return write


def named(name: str, content: bytes) -> Callable[[Path], str]:
    def write(folder: Path) -> str:
        (folder / name).write_bytes(content)
        return str(folder / name)

    return write


GOOD = b'{"text": "fine"}\n'
BAD_SOURCES = {
    "broken json": (jsonl(GOOD + b"\n" + b'{"text": \n'), r"bad\.jsonl:3: not JSON"),
    "no text field": (jsonl(GOOD + b'{"body": "x"}\n'), r"bad\.jsonl:2: expected one JSON object"),
    "no object": (jsonl(GOOD + b"[1]\n"), r"bad\.jsonl:2: expected one JSON object"),
    "text is a number": (jsonl(GOOD + b'{"text": 7}\n'), r"bad\.jsonl:2: text must be a string, found int"),
    "half a surrogate": (jsonl(b'{"text": "a\\ud800"}\n'), r"bad\.jsonl:1: half a surrogate"),
    "not utf-8": (jsonl(GOOD + b'{"text": "\xff"}\n'), r"bad\.jsonl:2: not UTF-8"),
    "text file not utf-8": (named("bad.txt", b"a\xff"), r"bad\.txt: not UTF-8 \(byte 1\)"),
    "no text column": (parquet(body=["x"]), r"bad\.parquet: no column named text \(found body\)"),
    "number column": (parquet(text=[1, 2]), r"bad\.parquet: text must be a string"),
    "no parquet": (named("bad.parquet", b"PAR?"), r"bad\.parquet is no readable parquet"),
    "other suffix": (named("bad.doc", b"x"), r"cannot read \.doc file"),
    "nothing there": (lambda folder: str(folder / "none.txt"), "no documents at .*none"),
    "empty folder": (lambda folder: str(folder), "no documents at"),
    "blank text": (named("blank.txt", b" \n"), "no documents with text"),
}


@pytest.mark.parametrize("write, words", BAD_SOURCES.values(), ids=BAD_SOURCES.keys())
def test_a_source_that_cannot_work_says_where(write: Any, words: str, tmp_path: Path) -> None:
    source = write(tmp_path)
    with pytest.raises(UserError, match=words):
        build_data(DataConfig(sources=(source,), out=tmp_path / "out", vocab_size=300))
    assert not (tmp_path / "out" / "data.json").exists()


def test_all_kinds_of_files_in_a_folder_are_read_in_order(tmp_path: Path) -> None:
    (tmp_path / "a.md").write_text("one")
    (tmp_path / "b.jsonl").write_text(
        '{"text": "two", "source": "s", "kind": "k", "licence": "l"}\n\n{"text": null}\n'
    )
    (tmp_path / "c.unknown").write_text("not read")
    (tmp_path / "sub").mkdir()
    pd.DataFrame({"text": ["three", None, "  "], "kind": ["p", "p", "p"]}).to_parquet(
        tmp_path / "sub" / "d.parquet"
    )
    (tmp_path / "z.txt").write_text("four")
    read = [(d.text, d.source, d.kind, d.licence) for d in read_documents((str(tmp_path),))]
    assert read == [
        ("one", "a", "", ""),
        ("two", "s", "k", "l"),
        ("three", "d", "p", ""),
        ("four", "z", "", ""),
    ]


def test_a_finished_build_is_not_overwritten(built: tuple[Path, list[str]]) -> None:
    before = digest(built[0] / "train.bin")
    with pytest.raises(UserError, match="already holds a finished build"):
        build_data(DataConfig(sources=("x.txt",), out=built[0]))
    assert digest(built[0] / "train.bin") == before


def test_a_folder_without_tokenizer_json_is_refused(tmp_path: Path) -> None:
    config = DataConfig(sources=(str(write_texts(tmp_path)),), out=tmp_path / "out", tokenizer=tmp_path)
    with pytest.raises(UserError, match=r"no tokenizer\.json here"):
        build_data(config)


def test_a_damaged_tokenizer_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    config = DataConfig(sources=(str(write_texts(tmp_path)),), out=tmp_path / "out", tokenizer=tmp_path)
    with pytest.raises(UserError, match="is no tokenizer"):
        build_data(config)


@pytest.mark.parametrize(
    "name, value", [("val_fraction", 1.0), ("vocab_size", 259), ("tokenizer_chars", 0), ("tokens", -1)]
)
def test_a_build_setting_out_of_range_is_refused_by_name(name: str, value: Any, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"{name} must be"):
        DataConfig(sources=("x",), out=tmp_path, **{name: value})


def test_an_interrupted_build_is_not_finished_and_can_be_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = DataConfig(sources=(str(write_texts(tmp_path)),), out=tmp_path / "out", vocab_size=300)

    def stop(*_: Any) -> str:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(data_module._SplitWriter, "finish", stop)
        with pytest.raises(KeyboardInterrupt):
            build_data(config)
    assert not (tmp_path / "out" / "data.json").exists()
    assert json.loads((build_data(config) / "data.json").read_text())["splits"]["train"]["documents"] == 12
    assert not list((tmp_path / "out").glob("*.part"))


def test_the_command_prints_the_folder_alone_on_stdout(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out = write_texts(tmp_path), tmp_path / "data"
    assert main(["data", "build", "--sources", str(source), "--out", str(out), "--vocab-size", "300"]) == 0
    printed = capsys.readouterr()
    assert printed.out == f"{out}\n"
    assert "tokens in" in printed.err


def test_the_command_calls_a_missing_source_the_users_mistake(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["data", "build", "--sources", str(tmp_path / "no.txt"), "--out", str(tmp_path / "d")]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.startswith("satlens: no documents at")
