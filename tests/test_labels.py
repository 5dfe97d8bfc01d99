"""Labelling end to end on a tiny model: right sets, right verdicts, nothing asked twice, nothing of another model."""

import json
import os
import signal
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

import sae.label_command as command
from sae.asking import ask, require_some
from sae.cache import cached
from sae.dictionary import open_dictionary
from sae.features import Features
from sae.figures.labels import FIGURES
from sae.funnel import Thresholds, screen
from sae.judges import CATEGORY, PURITY, Answer, JudgeSettings, Question, Token
from sae.judges.rules import Rules, decidable
from sae.label import judge_latents, latent_table, sets_table
from sae.labels import open_labels
from sae.pieces import token_of
from sae.taxonomy import CATEGORIES
from satlens.checkpoint import load_model, load_tokenizer
from satlens.cli import main
from satlens.errors import SatlensError, UserError
from satlens.run import digest, open_run, start_run, verify
from satlens.v1 import v1_table
from tests.fake_judge import DROP, FakeJudge
from tests.tiny import write_pair, write_texts
from tests.tiny_sae import TestJudge, write_dictionary

ALL = ("--max-density", "1", "--top-share", "1", "--min-active", "1")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A tiny pair, its texts, and a dictionary of the first model."""
    folder = tmp_path_factory.mktemp("place")
    pair, text = write_pair(folder), write_texts(folder)
    sae = write_dictionary(folder, pair["SATFormer"], text)
    return SimpleNamespace(folder=folder, text=text, sae=sae, **pair)


def config(place, **changes):
    """Flags that let every latent with enough tokens reach the judge."""
    rule = {"max_density": 1.0, "top_share": 1.0, "min_active": 1, **changes.pop("funnel", {})}
    given = {"sae": place.sae, "model": str(place.SATFormer), "runs": place.folder / "runs", "resamples": 100}
    return command.Config(**{**given, "funnel": Thresholds(**rule), **changes})


def label_with(monkeypatch, place, word, **changes):
    """A finished run by a judge of this process, and the judge."""
    judge = TestJudge(word)
    monkeypatch.setattr(command, "make_judge", lambda settings: judge)
    return open_run(command.run(config(place, **changes))), judge


def good(question):
    return 9 if question.kind == PURITY else "Morphological Suffixes"


def test_a_run_by_rules_is_whole_and_its_tables_agree_with_each_other_and_the_model(place, capsys):
    flags = (
        "--model",
        place.SATFormer,
        "--runs",
        place.folder / "runs",
        "--resamples",
        "100",
        "--min-score",
        "4",
        *ALL,
    )
    assert main(["sae", "label", str(place.sae), *map(str, flags)]) == 0
    run = open_run(capsys.readouterr().out.strip())
    assert verify(run) == [] and set(run.figures) == set(FIGURES)
    features, sets, answers = (run.tables[name] for name in ("features", "sets", "answers"))
    dictionary = open_dictionary(place.sae)
    counts = dictionary.counts.total
    rows = v1_table(load_model(place.SATFormer)).flatten(1)
    pre = (rows - dictionary.b_dec) @ dictionary.W_enc + dictionary.b_enc
    act = torch.zeros_like(pre).scatter(1, pre.topk(4).indices, pre.topk(4).values.relu())
    assert features["latent"].tolist() == list(range(24))
    for row in features.itertuples():
        active = act[:, row.latent] > 0
        assert row.n_active == int(counts[active].sum()) and row.n_types == int(active.sum())
        assert row.density == row.n_active / int(counts.sum())
    judged = features[features["stage"].isin(["consistency", "category"])]
    assert set(sets["latent"]) == set(judged["latent"]) and len(judged) > 5
    for latent, part in sets.groupby("latent"):
        strongest = sorted(
            np.flatnonzero((act[:, latent] > 0) & (counts > 0)), key=lambda t: -float(act[t, latent])
        )[:20]
        assert part.loc[part["set"] == "a", "token_id"].tolist() == strongest[0::2]
        assert part.loc[part["set"] == "b", "token_id"].tolist() == strongest[1::2]
        assert part["act"].tolist() == pytest.approx([float(act[t, latent]) for t in part["token_id"]])
    purity = answers[answers["kind"] == PURITY]
    assert len(purity) == 2 * len(judged) and (answers["set"].isna() == (answers["kind"] == CATEGORY)).all()
    accepted = features[features["verdict"] == "accepted"]
    assert 0 < len(accepted) < len(judged) and set(accepted["decided_by"]) == {"rules"}
    assert (accepted[["score_a", "score_b"]] >= 4).all().all()
    assert (accepted["broad"] == accepted["category"].map(CATEGORIES)).all()
    whole = run.tables["activations"]
    for latent, part in whole.groupby("latent"):
        assert set(part["token_id"]) == set(np.flatnonzero(act[:, latent] > 0))
    assert set(whole["latent"]) == set(accepted["latent"])
    summary = run.manifest.summary
    assert (summary["accepted"], summary["n_tokens"]) == (len(accepted), int(counts.sum()))
    assert summary["min_score_from"] == "--min-score" and summary["tokens_spent"] == 0


def test_a_latent_that_never_fires_and_one_on_two_tokens_are_dropped_for_that_reason(place, monkeypatch):
    run, _ = label_with(monkeypatch, place, good)
    features = run.tables["features"].set_index("latent")
    assert features.loc[0, ["n_active", "stage", "verdict"]].tolist() == [0, "alive", "rejected"]
    assert features.loc[1, "n_types_seen"] == 2 and features.loc[1, ["stage", "verdict"]].tolist() == [
        "tokens",
        "rejected",
    ]
    assert np.isnan(features.loc[1, "mono_score"])
    labels = open_labels(run.path)
    assert {0, 1}.isdisjoint(labels.features["latent"])
    assert set(labels.activations["latent"]) == set(labels.features["latent"]) != set()
    assert (labels.seed, labels.judge) == (7, "made, m")


def test_labels_of_another_model_or_dictionary_are_refused(place, monkeypatch):
    run, _ = label_with(monkeypatch, place, good)
    labels = open_labels(run.path)
    labels.require(labels.model_digest, labels.sae_digest)
    with pytest.raises(UserError, match="labels another model"):
        labels.require(model_digest="0" * 64)
    with pytest.raises(UserError, match="labels another dictionary"):
        labels.require(sae_digest="0" * 64)
    with pytest.raises(UserError, match=r"was trained on made .* give the model it belongs to"):
        command.run(config(place, model=str(place.transformer)))
    assert (
        labels.model_digest == run.manifest.model["digest"]
        and labels.sae_digest == open_dictionary(place.sae).digest
    )


def test_a_model_that_does_not_ship_must_be_named(place):
    with pytest.raises(UserError, match="give its folder with --model"):
        command.run(config(place, model=None))


def test_dictionaries_of_other_sites_and_of_other_widths_are_refused(place, tmp_path):
    other = write_dictionary(tmp_path, place.SATFormer, place.text, site="resid_post.1")
    with pytest.raises(UserError, match="not V1"):
        command.run(config(place, sae=other))
    facts = json.loads((place.sae / "cfg.json").read_text())["metadata"]["satlens"]["model"]
    narrow = write_dictionary(tmp_path, place.transformer, place.text, model=facts)
    wide = open_dictionary(narrow)
    assert (
        wide.facts["model"]["digest"] == facts["digest"]
    )  # it lies about its model, so only widths can tell
    for name in ("W_enc", "W_dec", "b_dec"):
        object.__setattr__(wide, name, getattr(wide, name)[..., :5] if name != "W_enc" else wide.W_enc[:5])
    rows = torch.zeros(4, open_dictionary(place.sae).d_in)
    from sae.features import latent_features

    with pytest.raises(UserError, match="reads vectors of 5 values, these have 16"):
        latent_features(wide, rows, torch.ones(4, dtype=torch.long))


def test_a_judge_that_is_down_stops_the_command_before_a_run_exists(place, monkeypatch):
    judge = TestJudge(good)

    def down():
        raise UserError("start one with: vllm serve")

    judge.check = down
    monkeypatch.setattr(command, "make_judge", lambda settings: judge)
    runs = place.folder / "none"
    with pytest.raises(UserError, match="vllm serve"):
        command.run(config(place, runs=runs))
    assert not runs.exists() and judge.closed


def test_a_judge_that_errs_on_some_latents_rejects_none_of_them(place, monkeypatch):
    def word(question):
        if question.tokens[0].id % 3 == 0:
            return Answer(error="\ud800 nonsense", raw="\ud800", prompt_tokens=10)
        return 9 if question.kind == PURITY else "Morphological Suffixes"

    run, judge = label_with(monkeypatch, place, word, prefilter=False)
    features, answers = run.tables["features"], run.tables["answers"]
    lost = set(answers.loc[answers["error"].notna(), "latent"])
    assert set(features.loc[features["verdict"] == "error", "latent"]) == lost != set()
    judged = features[features["stage"].isin(["consistency", "category"])]
    assert set(judged["verdict"]) == {"accepted", "error"}
    summary = run.manifest.summary
    assert summary["accepted_share_of_judged"]["estimate"] == 1.0
    assert summary["error"] == len(lost) and summary["answer_errors"] == answers["error"].notna().sum()
    row = run.tables["funnel"].set_index("stage").loc["consistency"]
    assert row["dropped"] == 0 and row["errors"] > 0 and row["share"] == 1.0 > row["share_low"]
    assert summary["tokens_spent"] == sum(answers["prompt_tokens"]) + sum(answers["completion_tokens"])
    assert len(judge.asked) == len(answers)


def test_a_judge_without_a_single_usable_answer_fails_and_leaves_no_finished_run(
    place, monkeypatch, tmp_path
):
    with pytest.raises(SatlensError, match=r"none of the judge's .* out of memory"):
        label_with(monkeypatch, place, lambda q: Answer(error="out of memory"), runs=tmp_path)
    assert not list(tmp_path.glob("*/manifest.json"))


def test_all_rejected_is_a_result(place, monkeypatch):
    run, judge = label_with(monkeypatch, place, lambda question: 3, prefilter=False)
    assert all(question.kind == PURITY for question in judge.asked)
    labels = open_labels(run.path)
    assert len(labels.features) == 0 and list(labels.activations.columns) == ["latent", "token_id", "act"]
    assert len(labels.activations) == 0 and run.tables["distribution"]["n"].sum() == 0
    assert run.manifest.summary["accepted_share_of_judged"] == {
        "estimate": 0.0, "low": 0.0, "high": 0.0, "unit": "of latents with a verdict",
    }  # fmt: skip
    assert "No feature was accepted" in str(run.figures["distribution"]["layout"]["title"])


def test_a_limit_judges_that_many_and_says_so(place, monkeypatch):
    run, judge = label_with(monkeypatch, place, good, funnel={"limit": 4}, prefilter=False)
    assert sum(question.kind == PURITY for question in judge.asked) == 8
    summary = run.manifest.summary
    assert summary["skipped"] > 0 and summary["accepted"] == 4
    assert summary["accepted_if_all_were_asked"]["estimate"] == 4 + summary["skipped"]
    assert "not asked: 4 drawn at random" in set(run.tables["features"]["reason"])
    assert "Only a random part" in run.figures["funnel"]["layout"]["meta"]["caption"]


def decidable_table():
    """Latents of which two are of one category by rule, one is not, and one is in one set only."""
    texts = {
        0: ["1", "2", "3", "4", "5", "6"],
        1: [".", ",", ";", "!", "?", ":"],
        2: ["1", "x", "3", "y", "z", "."],
        3: ["1", ".", "2", ",", "3", ";"],
    }
    rows = []
    for latent, words in texts.items():
        for rank, word in enumerate(words):
            rows.append((latent, "ab"[rank % 2], rank // 2, 10 * latent + rank, word, word, 1.0))
    sets = pd.DataFrame(rows, columns=["latent", "set", "rank", "token_id", "piece", "text", "act"])
    latents = pd.DataFrame(
        {
            "latent": range(4),
            "n_active": 50,
            "density": 1e-3,
            "n_types": 6,
            "mono_score": 0.5,
            "has_sets": True,
        }
    )
    return screen(latents, Thresholds(top_share=1)), sets


def test_the_prefilter_asks_only_what_rules_leave_open_and_changes_no_label_of_an_agreeing_judge():
    rules = Rules()

    def word(question):
        answer = rules.ask([question])[0]
        return answer.score if question.kind == PURITY else answer.category

    table, sets = decidable_table()
    results = {}
    for prefilter in (False, True):
        judge = TestJudge(word)
        results[prefilter] = (*judge_latents(table, sets, judge, 7.0, prefilter), judge.asked)
    without, with_it = results[False], results[True]
    for column in ("latent", "verdict", "category", "broad"):
        assert without[0][column].tolist() == with_it[0][column].tolist()
    assert with_it[0]["decided_by"].fillna("none").tolist() == ["rules", "rules", "none", "judge"]
    assert set(with_it[1]["latent"]) == {2, 3} and set(without[1]["latent"]) == {0, 1, 2, 3}
    assert len(with_it[2]) < len(without[2])
    # each set of latent 3 is of one category, but of different ones: only the judge can say
    assert not any(decidable(question.tokens) for question in with_it[2] if len(question.tokens) == 6)


def test_a_category_question_shows_the_tokens_in_the_order_of_activation():
    table, sets = decidable_table()
    judge = TestJudge(good)
    judge_latents(table, sets, judge, 7.0, False)
    shown = [question for question in judge.asked if question.kind == CATEGORY]
    assert [[token.id for token in question.tokens] for question in shown] == [
        [10 * latent + rank for rank in range(6)] for latent in range(4)
    ]


def odd_tokenizer():
    """Pieces that spreadsheets, JSON and pandas like to spoil; two ids that read the same."""
    pieces = [
        "<unk>",
        "NA",
        '"',
        "\n",
        "\0",
        "שלום\u202e",
        "=1+1",
        "A",
        "<0x41>",
        "<0xE2>",
        "▁",
        "nan",
        "'",
        ",",
        "\\n",
        "None",
    ]
    model = models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=[], byte_fallback=True)
    backend = Tokenizer(model)
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>"), pieces


def test_odd_tokens_stay_apart_and_survive_parquet_by_id(tmp_path):
    tokenizer, pieces = odd_tokenizer()
    n = len(pieces)
    features = Features(
        starts=torch.tensor([0, n]),
        token=torch.arange(n),
        act=torch.linspace(5, 1, n),
        n_active=torch.tensor([n]),
        n_types=torch.tensor([n]),
        n_types_seen=torch.tensor([n]),
        n_positions=n,
    )
    sets = sets_table(features, [0], torch.ones(n, dtype=torch.long), 10, tokenizer)
    run = start_run(tmp_path, "sae-label", {}, [])
    run.table("sets", sets)
    back = open_run(run.finish({})).tables["sets"].set_index("token_id")
    assert sorted(back.index) == list(range(n))
    for token_id in range(n):
        shown = token_of(tokenizer, token_id)
        assert (back.loc[token_id, "piece"], back.loc[token_id, "text"]) == (shown.piece, shown.text)
    assert back["piece"].is_unique and back.loc[7, "text"] == back.loc[8, "text"] == "A"
    assert back["text"].map(str.isprintable).all()


def test_latent_table_knows_which_latents_have_two_sets(place):
    from sae.features import latent_features, token_sets
    from sae.table import v1_rows

    dictionary = open_dictionary(place.sae)
    counts = dictionary.counts.total
    features = latent_features(dictionary, v1_rows(load_model(place.SATFormer)), counts)
    table = latent_table(features, torch.zeros(features.d_sae))
    for m in (3, 10):
        expected = [token_sets(features, n, counts, m) is not None for n in range(features.d_sae)]
        assert table["has_sets"].tolist() == expected
    assert {True, False} == set(table["has_sets"])


# --- nothing is asked twice ---


def test_a_repeated_run_asks_nothing_and_finds_the_same(place, monkeypatch, tmp_path):
    judges = [TestJudge(good), TestJudge(good)]
    made = iter(judges)
    monkeypatch.setattr(
        command, "make_judge", lambda settings: cached(next(made), tmp_path / "answers.jsonl")
    )
    first, second = (open_run(command.run(config(place, prefilter=False))) for _ in range(2))
    assert judges[0].asked and not judges[1].asked
    for name in ("features", "funnel", "sets", "activations", "distribution"):
        pd.testing.assert_frame_equal(first.tables[name], second.tables[name])
    assert first.manifest.summary["tokens_spent"] == second.manifest.summary["tokens_from_cache"] > 0
    assert second.manifest.summary["tokens_spent"] == 0
    told = [json.loads(line) for line in (second.path / "log.jsonl").read_text().splitlines()]
    assert {line["tokens"] for line in told if line["event"] == "answered"} == {0}


@pytest.mark.slow
def test_a_run_killed_in_the_middle_asks_only_what_is_left(place, tmp_path):
    """SIGKILL while the eighth question is under way: of all questions, that one alone comes twice."""
    pytest.importorskip("openai")
    child, answers_file = [], tmp_path / "answers.jsonl"

    def act(number, body):
        if number == 7 and child:
            os.kill(child.pop().pid, signal.SIGKILL)
            return DROP
        return None

    with FakeJudge(act=act) as fake:
        flags = (
            "--judge",
            "server",
            "--base-url",
            fake.url,
            "--concurrency",
            "1",
            "--cache",
            tmp_path / "answers.jsonl",
        )
        flags += (
            "--model",
            place.SATFormer,
            "--runs",
            tmp_path / "runs",
            "--resamples",
            "100",
            "--min-score",
            "4",
            *ALL,
        )
        argv = ["sae", "label", str(place.sae), "--no-prefilter", *map(str, flags)]
        process = subprocess.Popen([sys.executable, "-m", "satlens.cli", *argv], stderr=subprocess.DEVNULL)
        child.append(process)
        assert process.wait(timeout=120) == -signal.SIGKILL
        kept = len(answers_file.read_text().splitlines())
        checks = len(fake.requests) - kept - 1  # what the judge is asked at every start, before any work
        assert kept > 3 and not list(tmp_path.glob("runs/*/manifest.json"))
        fake.requests.clear()
        assert main(argv) == 0
        known = [json.loads(line)["key"] for line in answers_file.read_text().splitlines()]
        assert len(fake.requests) == checks + len(known) - kept
    (finished,) = tmp_path.glob("runs/*/manifest.json")
    answers = open_run(finished.parent).tables["answers"]
    assert len(known) == len(set(known)) > 20 and answers["error"].isna().all()
    assert answers["cached"].sum() == kept + len(answers) - len(known)


def test_the_same_labels_have_the_same_bytes(place, monkeypatch):
    runs = [label_with(monkeypatch, place, good)[0] for _ in range(2)]
    assert digest(runs[0]) == digest(runs[1])


# --- calibration ---


def calibration(folder, judge, **changes):
    """A finished calibration, as far as labelling reads one."""
    number = {"estimate": 0.9, "low": 0.8, "high": 1.0, "unit": ""}
    names = ("auc_rules", "auc_known", "false_retention", "true_retention_rules", "true_retention_known")
    summary = {
        "judge_facts": judge.facts,
        "set_size": 10,
        "target": 0.05,
        "threshold": 8.5,
        **dict.fromkeys(names, number),
    }
    return start_run(folder, changes.pop("verb", "judge"), {}, []).finish({**summary, **changes})


def test_a_calibrated_threshold_replaces_the_score_and_its_trust_stands_beside_the_counts(
    place, monkeypatch, tmp_path
):
    def word(question):
        return 8 if question.kind == PURITY else "Morphological Suffixes"

    run, judge = label_with(monkeypatch, place, word, prefilter=False)
    assert run.manifest.summary["accepted"] > 0
    path = calibration(tmp_path, judge)
    run, _ = label_with(monkeypatch, place, word, prefilter=False, calibration=path)
    summary = run.manifest.summary
    assert (summary["accepted"], summary["min_score"]) == (0, 8.5)
    assert summary["min_score_from"] == f"calibration {path.name}"
    assert summary["calibration_auc_known"]["estimate"] == 0.9
    assert run.manifest.inputs[1]["run"] == path.name
    assert "retains 90 % [80 %, 100 %] of placebo" in run.figures["funnel"]["layout"]["meta"]["caption"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"verb": "gates"}, "is a run of gates, not of satlens judge calibrate"),
        ({"judge_facts": {**TestJudge(good).facts, "model": "n"}}, r"another judge \(model n, not m\)"),
        ({"set_size": 6}, "calibrate with --set-size 10"),
        ({"threshold": None}, "cannot tell coherent sets from placebos"),
    ],
    ids=["verb", "judge", "size", "useless"],
)  # fmt: skip
def test_a_calibration_that_does_not_fit_is_refused(place, monkeypatch, tmp_path, changes, words):
    judge = TestJudge(good)
    path = calibration(tmp_path, judge, **changes)
    with pytest.raises(UserError, match=words):
        label_with(monkeypatch, place, good, calibration=path)


# --- asking, figures, weight of the import ---


def test_answers_come_back_in_order_with_what_they_cost():
    tokens = tuple(Token(id=i, piece="x", text="x") for i in range(3))
    questions = [Question(kind=PURITY, tokens=tokens[:n]) for n in (1, 2, 3)]
    told = []
    answers = ask(
        TestJudge(lambda q: len(q.tokens)),
        questions,
        "words",
        lambda event, **fields: told.append((event, fields)),
    )
    assert answers["score"].tolist() == [1.0, 2.0, 3.0]
    assert told[0] == ("asking", {"what": "words", "questions": 3})
    assert told[-1] == ("answered", {"what": "words", "answers": 3, "errors": 0, "tokens": 33})
    empty = ask(TestJudge(good), [], "words")
    assert len(empty) == 0 and empty["score"].dtype == np.float64
    require_some(empty)


def test_figures_show_the_numbers_of_their_tables(place, monkeypatch):
    run, _ = label_with(monkeypatch, place, good)
    tables = {name: run.tables[name] for name in ("funnel", "distribution")}
    fig = FIGURES["funnel"](tables, run.manifest.summary)
    assert list(fig.data[0].x) == tables["funnel"].query("stage != 'sample'")["kept"].tolist()
    assert "not calibrated" in fig.layout.meta["caption"] and fig.layout.xaxis.title.text
    fig = FIGURES["distribution"](tables, run.manifest.summary)
    drawn = {
        label.rsplit(" (", 1)[0]: x for trace in fig.data for label, x in zip(trace.y, trace.x, strict=True)
    }
    assert drawn == dict(
        zip(tables["distribution"]["category"], tables["distribution"]["share"], strict=True)
    )
    for name, figure in FIGURES.items():
        again = figure(tables, run.manifest.summary).to_json(remove_uids=False)
        assert again == figure(tables, run.manifest.summary).to_json(remove_uids=False), name


@pytest.mark.parametrize(
    "module", ["sae.label_command", "sae.figures.labels", "sae.figures.judge", "sae.calibrate_command"]
)
def test_help_and_figures_need_no_torch(module):
    script = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


def test_settings_of_the_judge_are_flags_of_the_verb(capsys):
    with pytest.raises(SystemExit):
        main(["sae", "label", "--help"])
    told = capsys.readouterr().out
    for flag in (
        "--judge",
        "--min-active",
        "--max-density",
        "--top-share",
        "--min-score",
        "--set-size",
        "--limit",
        "--cache",
    ):
        assert flag in told
    assert JudgeSettings().judge == "rules" and load_tokenizer is not None
