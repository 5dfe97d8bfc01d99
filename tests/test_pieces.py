"""Every vocabulary entry can be shown, told apart by its id, and got back from parquet and CSV."""

import io
import random

import pandas as pd
import pytest

from sae.pieces import escape, pieces, token_of, unescape
from satlens import reference
from satlens.report.numbers import csv, undefused

STRANGE = [
    "NA", '"', "\n", "\0", "\r", "\t", "\\", "\\n", "\\x41", "\u202eabc", "שלום", "=1+1", "'=1+1", "'", "''", "+", "-",
    "@x", "", " ", "nan", "None", ",", "\ufeff", "\u200d", "\x85", "\u2028", "\xa0", "�", "\udce2", "\ud800", "😀",
    "\U000e0001",
]  # fmt: skip


@pytest.mark.parametrize("text", STRANGE, ids=ascii)
def test_an_escaped_text_is_printable_and_can_be_got_back(text):
    assert escape(text).isprintable() and unescape(escape(text)) == text


def test_the_escape_tells_any_two_texts_apart():
    rng = random.Random(0)
    alphabet = [*"\\nxuU0123456789abcdefABCDEF'\"", *"\n\t\r\0\x85\u202e\udc80\udcff\ud800�😀\U000e0001"]
    texts = {"".join(rng.choices(alphabet, k=rng.randrange(8))) for _ in range(20_000)}
    assert len({escape(text) for text in texts}) == len(texts)
    assert all(unescape(escape(text)) == text for text in texts)


def test_what_is_shown_for_what():
    shown = {
        "\n": "\\n",
        "\\n": "\\\\n",
        "\0": "\\u0000",
        "\u202e": "\\u202E",
        "\udce2": "\\xE2",
        "\U000e0001": "\\U000E0001",
    }
    assert {text: escape(text) for text in shown} == shown
    assert escape("é � ”") == "é � ”"


@pytest.mark.parametrize("shown", ["\\", "a\\b", "\\x4", "\\u12", "\\\\\\"])
def test_text_that_was_not_escaped_is_not_unescaped(shown):
    with pytest.raises(ValueError, match="backslash stands alone"):
        unescape(shown)


def roundtrips(table, tmp_path):
    table.to_parquet(tmp_path / "t.parquet")
    yield pd.read_parquet(tmp_path / "t.parquet")
    text = csv(table)
    # as a spreadsheet would: no cell begins like a formula
    assert not any(
        cell[:1] in "=+-@" for line in text.splitlines()[1:] for cell in line.split(",")[1:2] if cell
    )
    read = pd.read_csv(io.StringIO(text), keep_default_na=False, dtype={"piece": str, "text": str})
    for column in ("piece", "text"):
        read[column] = read[column].map(undefused)
    yield read


def test_strange_strings_and_equal_ones_are_kept_apart_in_parquet_and_csv(tmp_path):
    texts = [escape(text) for text in [*STRANGE, *STRANGE]]
    table = pd.DataFrame({"token_id": range(len(texts)), "piece": texts, "text": texts})
    for read in roundtrips(table, tmp_path):
        pd.testing.assert_frame_equal(read, table, check_dtype=False)
        assert [unescape(text) for text in read["text"]] == [*STRANGE, *STRANGE]


# -- tokenizers


@pytest.fixture(scope="module")
def llama_style():
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(reference.resolve("reference-transformer"))


@pytest.fixture(scope="module")
def gpt2_style():
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=290, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(["the the the cat\n\nthe é 日本 日本 日本"], trainer)
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True), AddedToken("<é▁>", special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def test_a_llama_vocabulary_is_shown_with_its_spaces_and_bytes(llama_style):
    table = pieces(llama_style, len(llama_style)).set_index("piece")
    assert table.index.is_unique
    text = table["text"]
    assert text["▁the"] == " the" and text["ing"] == "ing" and text["▁▁"] == "  "
    assert (
        text["<0x0A>"] == "\\n"
        and text["<0x41>"] == "A"
        and text["<0xE2>"] == "\\xE2"
        and text["<0x00>"] == "\\u0000"
    )
    assert text["<s>"] == "<s>" and text["A"] == "A"
    assert table.loc["A", "token_id"] != table.loc["<0x41>", "token_id"]


def test_the_shown_texts_of_a_llama_sentence_make_up_the_sentence(llama_style):
    sentence = 'Say "ключ" =1+1\n\tNA — \u202e日本\0 naïve \\n'
    ids = llama_style(sentence, add_special_tokens=False)["input_ids"]
    # one byte of a character alone is a lone surrogate; together they are the character again
    joined = "".join(unescape(token_of(llama_style, i).text) for i in ids)
    assert joined.encode("utf-8", "surrogateescape").decode() == f" {sentence}"


def test_the_shown_texts_of_a_gpt2_sentence_make_up_the_sentence(gpt2_style):
    sentence = "the cat\n\nthe é 日本 \u202e\0 ключ \xad"
    ids = gpt2_style(sentence)["input_ids"]
    joined = "".join(unescape(token_of(gpt2_style, i).text) for i in ids)
    assert joined.encode("utf-8", "surrogateescape").decode() == sentence


def test_a_gpt2_vocabulary_is_shown_in_words_and_its_odd_bytes_as_codes(gpt2_style):
    text = pieces(gpt2_style, len(gpt2_style)).set_index("piece")["text"]
    assert text["Ġthe"] == " the" and text["Ċ"] == "\\n" and text["â"] == "\\xE2" and text["Ġ"] == " "
    assert text["<|end|>"] == "<|end|>" and text["<é▁>"] == "<é▁>"


def test_a_vocabulary_round_trips_with_equal_texts_under_their_own_ids(llama_style, tmp_path):
    table = pieces(llama_style, len(llama_style))
    assert table["text"].duplicated().sum() > 50  # bytes and characters
    for read in roundtrips(table, tmp_path):
        pd.testing.assert_frame_equal(read, table, check_dtype=False)


def test_an_id_beyond_the_vocabulary_has_no_piece(llama_style):
    table = pieces(llama_style, len(llama_style) + 3)
    assert list(table["piece"][-3:]) == ["", "", ""] and table["token_id"].iloc[-1] == len(llama_style) + 2
