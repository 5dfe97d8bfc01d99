"""The shipped pair is what its data sheet says, opens, and reads its own text better than chance by far."""

import hashlib
import json
import math

import numpy as np
import pandas as pd
import pytest

from satlens import reference
from satlens.checkpoint import load_tokenizer, model_facts
from satlens.reading import Reading, measure, open_subject, open_text, require_same_text

SHEET = json.loads((reference.FOLDER / "datasheet.json").read_text())


@pytest.mark.parametrize("name", reference.MODELS)
def test_shipped_weights_are_small_and_the_sheets(name):
    folder = reference.resolve(name)
    weights = (folder / "model.safetensors").read_bytes()
    sheet = SHEET["models"][reference.MODELS[name]]
    assert len(weights) == sheet["bytes"] <= 25_000_000
    assert hashlib.sha256(weights).hexdigest() == sheet["sha256"]
    facts = model_facts(folder)
    assert facts["dtype"] == "bfloat16" and facts["n_layers"] >= 8
    assert facts["n_parameters"] <= 12_000_000
    assert sheet["tokens_seen"] >= 25_000_000


def test_the_two_were_trained_alike():
    one, two = (SHEET["models"][folder] for folder in reference.MODELS.values())
    same = ("tokens_seen", "steps", "processes", "data_sha256", "tokenizer_sha256", "layout")
    assert {k: one[k] for k in same} == {k: two[k] for k in same}
    recipes = [{k: v for k, v in m["recipe"].items() if k != "arch"} for m in (one, two)]
    assert recipes[0] == recipes[1]


def test_heldout_text_is_free_and_the_sheets():
    text = reference.TEXT.read_bytes()
    assert hashlib.sha256(text).hexdigest() == SHEET["heldout"]["sha256"]
    table = pd.read_parquet(reference.TEXT.with_suffix(".docs.parquet"))
    assert int(table["n_tokens"].sum()) == len(text) // 2 == SHEET["heldout"]["tokens"] >= 390_000
    assert set(table["licence"].str.contains("public domain") | table["licence"].isin(["MIT"])) == {True}


def test_every_kind_of_token_occurs_in_the_heldout_text():
    tokenizer = load_tokenizer(reference.resolve("reference-satformer"))
    pieces = set(tokenizer.convert_ids_to_tokens(np.unique(np.fromfile(reference.TEXT, "<u2")).tolist()))
    wanted = {
        "digits": lambda p: p.isdigit(),
        "bytes": lambda p: p == "<0x0A>",
        "leading space": lambda p: p.startswith("▁T"),
        "punctuation": lambda p: p in (".", ",", ":"),
        "code": lambda p: p in ("{", "();", "==", "▁▁▁▁", "*/", "->"),
        "scripts": lambda p: any("\u0400" <= c <= "\u04ff" or "\u3040" <= c <= "\u9fff" for c in p),
        "suffixes": lambda p: p in ("ing", "ed", "ly"),
        "capitals": lambda p: len(p) > 1 and p[0].isascii() and p[0].isupper(),
        "connectives": lambda p: p in ("▁however", "▁if", "▁but"),
        "roots": lambda p: p.isascii() and p.isalpha() and p.islower() and len(p) >= 4,
    }
    missing = [kind for kind, is_kind in wanted.items() if not any(map(is_kind, pieces))]
    assert not missing


def test_perplexities_are_in_the_sheets_interval_and_far_below_chance():
    reading = Reading(tokens=20_000, batch_size=16)
    from satlens.accumulators import NllByDocument
    from satlens.stream import Condition

    subjects = [open_subject(name, reading) for name in reference.MODELS]
    require_same_text(*subjects)
    for subject in subjects:
        corpus = open_text(subject, reading)
        clean = Condition(name="clean", accumulators=(NllByDocument(corpus.n_documents),))
        measure(subject, corpus, [clean], reading, subject.name)
        sums = clean.accumulators[0]
        got = math.exp(float(sums.nll.sum() / sums.count.sum()))
        stated = SHEET["models"][reference.MODELS[subject.name]]["heldout_perplexity"]["estimate"]
        assert 0.5 < got / stated < 2.0
        assert got < 8192 / 20


def test_models_that_training_calls_final_are_told_apart(tmp_path):
    assert reference.title("reference-satformer") == "reference-satformer"
    assert reference.title(str(tmp_path / "gelu-42" / "final")) == "gelu-42/final"
    assert reference.title(str(tmp_path / "mine")) == "mine"
