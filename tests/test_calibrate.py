"""A judge's calibration says what plain counting says, and cannot be fooled by a judge that says yes to everything."""

import itertools
import json
import math
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

import sae.calibrate_command as command
from sae.cache import cached
from sae.calibrate import compare, flip_table
from sae.figures.judge import FIGURES
from sae.item_sets import (
    KNOWN,
    RULES,
    SHUFFLED_RULES,
    SHUFFLED_SAE,
    Item,
    deal,
    known_items,
    known_lists,
    rule_items,
    shuffled,
    uniform,
)
from sae.judges import CATEGORY, PURITY, Answer, Question, Token
from sae.judges.rules import Rules, category_of
from sae.label_command import open_calibration
from sae.pieces import token_of
from sae.taxonomy import CATEGORIES
from sae.trust import (
    agreement,
    auc,
    choose_threshold,
    confusion,
    flip_rates,
    retention,
    roc,
    weakest,
    wilson,
)
from satlens import reference
from satlens.bootstrap import document_weights
from satlens.checkpoint import load_tokenizer
from satlens.cli import main
from satlens.errors import UserError
from satlens.run import digest, open_run, verify
from tests.tiny import write_pair, write_texts
from tests.tiny_sae import TestJudge, write_dictionary

NAMES = list(CATEGORIES)


def scores(kind, values, errors=()):
    """Items of two sets each, with these scores in pairs; the items numbered in ``errors`` lack their second."""
    rows = []
    for item, (a, b) in enumerate(values):
        rows.append((f"{kind} {item}", kind, None, "a", 5, float(a), None))
        lost = item in errors
        rows.append(
            (f"{kind} {item}", kind, None, "b", 5, math.nan if lost else float(b), "x" if lost else None)
        )
    return pd.DataFrame(rows, columns=["item", "kind", "truth", "set", "n", "score", "error"])


def drawn(seed, n, shift):
    rng = np.random.default_rng(seed)
    return np.clip(rng.integers(0, 8, (n, 2)) + shift, 0, 10).tolist()


def pairwise(good, bad):
    """Wins of every score over every other, ties half, by a loop."""
    pairs = [(a > b) + 0.5 * (a == b) for a, b in itertools.product(good, bad)]
    return sum(pairs) / len(pairs)


# --- statistics ---


@pytest.mark.parametrize("seed", range(4))
def test_auc_is_the_share_of_pairs_won(seed):
    good, bad = (
        scores("good", drawn(seed, 9, 2), errors={3}),
        scores("bad", drawn(seed + 9, 7, 0), errors={0, 1}),
    )
    found = auc(good, bad, 200, seed)
    assert found.estimate == pytest.approx(pairwise(good["score"].dropna(), bad["score"].dropna()))
    assert found.low <= found.estimate <= found.high


def test_the_interval_of_auc_resamples_whole_items_as_a_plain_loop_does():
    good, bad = scores("good", drawn(1, 5, 2)), scores("bad", drawn(2, 6, 0))
    up, down = document_weights(5, 100, 3), document_weights(6, 100, 4)
    by_item = [[part["score"].tolist() for _, part in t.groupby("item", sort=False)] for t in (good, bad)]
    samples = []
    for u, d in zip(up, down, strict=True):
        one = [score for item, w in zip(by_item[0], u, strict=True) for score in item * w]
        two = [score for item, w in zip(by_item[1], d, strict=True) for score in item * w]
        samples.append(pairwise(one, two))
    found = auc(good, bad, 100, 3)
    assert (found.low, found.high) == pytest.approx(tuple(np.percentile(samples, [2.5, 97.5])))
    assert found == auc(good, bad, 100, 3) != auc(good, bad, 100, 5)


def test_auc_without_scores_is_undefined_and_of_single_items_has_no_interval():
    good, bad = scores("good", [(9, 8)]), scores("bad", [(1, 2)])
    assert auc(good, bad) == (1.0, None, None)
    assert auc(good.assign(score=math.nan), bad) == (None, None, None)
    assert auc(good.assign(score=5.0), bad.assign(score=5.0)).estimate == 0.5


def test_roc_counts_sets_at_or_above_each_score_and_encloses_the_auc():
    good, bad = scores("good", drawn(3, 9, 2)), scores("bad", drawn(4, 7, 0))
    table = roc(good, bad)
    for row in table.iloc[1:].itertuples():
        assert row.true_positive == pytest.approx(sum(good["score"] >= row.threshold) / 18)
        assert row.false_positive == pytest.approx(sum(bad["score"] >= row.threshold) / 14)
    assert table.iloc[0, 1:].tolist() == [0, 0] and table.iloc[-1, 1:].tolist() == [1, 1]
    area = np.trapezoid(table["true_positive"], table["false_positive"])
    assert area == pytest.approx(auc(good, bad, 100).estimate)
    assert len(roc(good.assign(score=math.nan), bad)) == 0


@pytest.mark.parametrize(("hits", "n"), [(0, 7), (3, 10), (10, 10), (1, 200)])
def test_wilson_ends_are_where_the_normal_test_just_fails_to_reject(hits, n):
    share, low, high = wilson(hits, n)
    assert share == hits / n and 0 <= low <= share <= high <= 1
    for p in (low, high):
        if 0 < p < 1:
            assert abs(share - p) == pytest.approx(1.959963984540054 * math.sqrt(p * (1 - p) / n))
    assert wilson(0, 0) == (None, None, None)


def test_an_item_is_retained_by_its_weaker_set_and_an_error_takes_it_out_of_the_count():
    table = scores("x", [(9, 7), (10, 3), (8, 8), (10, 10), (7, 7)], errors={3})
    single = pd.DataFrame([("alone", "x", None, "a", 5, 9.0, None)], columns=table.columns)
    table = pd.concat([table, single], ignore_index=True)
    assert weakest(table).to_dict() == {"x 0": 7, "x 1": 3, "x 2": 8, "x 4": 7}
    share, n = retention(table, 7)
    assert (share.estimate, n) == (0.75, 4)
    assert retention(table, 7.5)[0].estimate == 0.25


@pytest.mark.parametrize("seed", range(5))
def test_the_threshold_is_the_lowest_score_that_keeps_placebos_out(seed):
    placebo, coherent = scores("bad", drawn(seed, 30, 0)), scores("good", drawn(seed, 30, 3))
    seen = [*placebo["score"], *coherent["score"]]
    found = choose_threshold(weakest(placebo), seen, 0.1)
    fitting = [at for at in set(seen) if retention(placebo, at)[0].estimate <= 0.1]
    assert found == min(fitting)


def test_a_judge_that_gives_its_top_score_to_everything_has_no_threshold():
    table = scores("bad", [(10, 10)] * 9)
    assert choose_threshold(weakest(table), table["score"].tolist(), 0.05) is None
    assert choose_threshold(weakest(table.assign(score=math.nan)), [], 0.05) is None


def test_kappa_is_the_textbook_one():
    a, b = NAMES[:2]
    truth = [a] * 25 + [b] * 25 + [a]
    answer = [a] * 20 + [b] * 5 + [a] * 10 + [b] * 15 + [None]  # the error is no disagreement
    accuracy, kappa = agreement(truth, answer, 500)
    assert accuracy.estimate == 35 / 50
    assert kappa.estimate == pytest.approx((0.7 - 0.5) / (1 - 0.5))
    assert kappa.low < 0.4 < kappa.high
    assert kappa == agreement(truth, answer, 500)[1]
    perfect = agreement([a, b] * 5, [a, b] * 5)[1]
    assert perfect.estimate == 1 == perfect.low
    assert agreement([a] * 5, [a] * 5)[1].estimate is None
    assert agreement([a], [None]) == ((None, None, None), (None, None, None))


def test_confusion_counts_pairs_and_keeps_errors_apart():
    a, b = NAMES[2], NAMES[0]
    table = confusion([a, a, a, b, b], [a, b, None, b, None])
    seen = {(r.truth, None if pd.isna(r.answer) else r.answer): r.n for r in table.itertuples()}
    assert seen == {(a, a): 1, (a, b): 1, (a, None): 1, (b, b): 1, (b, None): 1}
    assert table["truth"].iloc[0] == b  # the order of Table 8


# --- item sets ---


def vocabulary(name="reference-satformer"):
    tokenizer = load_tokenizer(reference.resolve(name))
    tokens = {n: token_of(tokenizer, n) for n in range(3, len(tokenizer))}
    return tokens, {n: found for n, token in tokens.items() if (found := category_of(token)) is not None}


@pytest.fixture(scope="module")
def words():
    tokens, categories = vocabulary()
    return SimpleNamespace(tokens=tokens, categories=categories)


def test_rule_items_are_of_one_category_and_share_no_token(words):
    items = rule_items(words.categories, 10, 4, np.random.default_rng(0))
    tokens = [token for item in items for token in item.tokens]
    assert len(tokens) == len(set(tokens))
    for item in items:
        assert {words.categories[token] for token in item.tokens} == {item.truth}
        assert len(item.sets) == 2 and all(3 <= len(part) <= 10 for part in item.sets)
    per = Counter(item.truth for item in items)
    assert max(per.values()) == 4 and len(per) == 9 and "Semantic Root Fragments" not in per


def test_known_lists_are_small_letters_without_doubles_and_the_reference_has_most_of_them(words):
    lists = known_lists()
    assert len(lists) >= 30
    for name, members in lists.items():
        assert len(members) == len(set(members)) >= 6, name
        assert all(word.isascii() and word.islower() and word.isalpha() for word in members), name
    ids = {token.text: n for n, token in words.tokens.items()}
    items = known_items(lists, ids, 10, np.random.default_rng(0))
    assert len(items) >= 30
    texts = {n: token.text for n, token in words.tokens.items()}
    for item in items:
        spelled = {texts[token] for token in item.tokens}
        assert len(spelled) == len(item.tokens) and {text.strip() for text in spelled} <= set(
            lists[item.name]
        )
        assert len({text[0] == " " for text in spelled}) == 1, "one spelling in a list"


def test_a_list_with_too_few_words_for_two_sets_gives_one_and_with_two_words_none():
    ids = {f" {word}": n for n, word in enumerate("one two three four five six seven".split())}
    lists = {
        "few": ["one", "two", "three"],
        "pair": ["one", "two", "absent"],
        "six": "one two three four five six".split(),
    }
    items = {item.name: item for item in known_items(lists, ids, 10, np.random.default_rng(0))}
    assert set(items) == {"few", "six"}
    assert [len(part) for part in items["few"].sets] == [3] and [len(part) for part in items["six"].sets] == [
        3,
        3,
    ]
    assert deal([1, 2, 3, 4, 5, 6, 7], 3) == ((1, 3, 5), (2, 4, 6))


@pytest.mark.parametrize("seed", range(3))
def test_shuffling_keeps_sizes_and_tokens_and_puts_none_twice_into_an_item(seed):
    rng = np.random.default_rng(seed)
    items = [
        Item(
            name=str(i),
            kind=RULES,
            truth=None,
            sets=deal(rng.choice(40, int(rng.integers(6, 15)), replace=False), 8),
        )
        for i in range(20)
    ]
    made = shuffled(items, SHUFFLED_RULES, rng)
    assert [[len(s) for s in item.sets] for item in made] == [[len(s) for s in item.sets] for item in items]
    assert Counter(t for i in made for t in i.tokens) == Counter(t for i in items for t in i.tokens)
    assert all(len(set(item.tokens)) == len(item.tokens) for item in made)
    assert {item.kind for item in made} == {SHUFFLED_RULES} and [i.sets for i in made] != [
        i.sets for i in items
    ]
    plain = uniform(items, range(100), rng)
    assert [[len(s) for s in item.sets] for item in plain] == [[len(s) for s in item.sets] for item in items]
    assert all(len(set(item.tokens)) == len(item.tokens) for item in plain)


# --- flips ---


def questions(n=30):
    tokens = [Token(id=i, piece=str(i), text=str(i)) for i in range(n + 4)]
    return [Question(kind=PURITY, tokens=tuple(tokens[i : i + 4])) for i in range(n)]


def asked(judge, given):
    return given, pd.DataFrame([vars(answer) for answer in judge.ask(given)])


def test_a_judge_that_heeds_order_flips_by_order_alone():
    judge = TestJudge(lambda q: 10 if q.tokens[0].id < q.tokens[1].id else 0)
    flips, answers = flip_table([asked(judge, questions())], judge, judge, 20, 0)
    rates = {(r["kind"], r["what"]): r for r in flip_rates(flips, {"7": 7.0})}
    changed = np.mean(
        [json.loads(ids)[0] > json.loads(ids)[1] for ids in flips.loc[flips["kind"] == "order", "token_ids"]]
    )
    assert rates["order", "purity at 7"]["estimate"] == changed > 0
    assert rates["order", "mean change of purity"]["estimate"] == pytest.approx(10 * changed)
    assert rates["repetition", "purity at 7"]["estimate"] == 0
    assert (rates["order", "purity at 7"]["n"], len(answers)) == (20, 40)


def test_a_judge_that_changes_its_mind_flips_by_repetition_although_its_answers_are_kept(tmp_path):
    said = itertools.count()
    raw = TestJudge(lambda q: 10 * (next(said) % 2))
    judge = cached(raw, tmp_path / "answers.jsonl")
    given = asked(judge, questions(10))
    flips, _ = flip_table([given], judge, raw, 9, 1)
    again = flips[flips["kind"] == "repetition"]
    assert ((again["first"] >= 7) != (again["again"] >= 7)).any()
    assert len(raw.asked) == 10 + 9 + 9


def test_answers_that_could_not_be_used_are_not_asked_again():
    judge = TestJudge(lambda q: Answer(error="no") if q.tokens[0].id % 2 else 8)
    flips, _ = flip_table([asked(judge, questions(10))], judge, judge, 50, 0)
    assert len(flips) == 2 * 5 and (flips["first"] == 8).all()


# --- the verb ---


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("place")
    pair, text = write_pair(folder), write_texts(folder)
    return SimpleNamespace(folder=folder, sae=write_dictionary(folder, pair["SATFormer"], text), **pair)


def calibrated(monkeypatch, folder, word, **changes):
    judge = TestJudge(word)
    monkeypatch.setattr(command, "make_judge", lambda settings: judge)
    given = {"runs": folder, "per_category": 3, "flips": 10, "resamples": 100}
    return open_run(command.run(command.Config(**{**given, **changes}))), judge


def test_rules_know_their_own_sets_and_nothing_of_meaning(capsys, tmp_path):
    assert (
        main(["judge", "calibrate", "--runs", str(tmp_path), "--per-category", "5", "--resamples", "200"])
        == 0
    )
    run = open_run(capsys.readouterr().out.strip())
    assert verify(run) == [] and set(run.figures) == set(FIGURES)
    summary = run.manifest.summary
    assert summary["auc_rules"]["estimate"] == 1.0 and summary["auc_known"]["estimate"] == 0.5
    assert summary["paper_true_retention_rules"]["estimate"] == 1.0
    assert summary["paper_true_retention_known"]["estimate"] == 0.0
    assert (
        summary["paper_false_retention"]["estimate"] < 0.05 and summary["paper_false_retention"]["high"] > 0
    )
    assert summary["category_accuracy"]["estimate"] == summary["category_kappa"]["estimate"] == 1.0
    assert summary["order_flip_rate"]["estimate"] == summary["repetition_flip_rate"]["estimate"] == 0.0
    assert 0 < summary["threshold"] <= 7
    for name in ("roc", "scores", "confusion"):
        caption = run.figures[name]["layout"]["meta"]["caption"]
        assert "blind to meaning" in caption
    sets = run.tables["sets"]
    assert set(sets["kind"]) == {"rules", "known", "shuffled rules", "shuffled known", "uniform"}
    assert [len(json.loads(ids)) for ids in sets["token_ids"]] == sets["n"].tolist()
    assert [len(json.loads(pieces)) for pieces in sets["pieces"]] == sets["n"].tolist()
    rates = run.tables["thresholds"].query("rule == 'calibrated' and kind == 'shuffled rules'").iloc[0]
    loop = [
        min(part["score"]) >= summary["threshold"]
        for _, part in sets[sets["kind"] == "shuffled rules"].groupby("item")
    ]
    assert rates["retained"] == np.mean(loop) <= 0.05 and rates["n_items"] == len(loop)
    assert open_calibration(run.path, Rules().facts, 10).path == run.path


def test_a_judge_that_always_says_ten_is_found_out_and_cannot_be_used(monkeypatch, tmp_path):
    run, judge = calibrated(monkeypatch, tmp_path, lambda q: 10 if q.kind == PURITY else NAMES[0])
    summary = run.manifest.summary
    assert summary["threshold"] is None and summary["auc_rules"]["estimate"] == 0.5
    assert (
        summary["paper_false_retention"]["estimate"] == 1.0 and summary["false_retention"]["estimate"] is None
    )
    assert summary["category_accuracy"]["estimate"] == 0.0
    assert "no calibrated threshold" in run.figures["scores"]["layout"]["meta"]["caption"]
    with pytest.raises(UserError, match="cannot tell coherent sets from placebos"):
        open_calibration(run.path, judge.facts, 10)


def test_a_judge_of_meaning_is_recognised_and_errors_are_counted_apart(monkeypatch, tmp_path):
    """A judge that knows the lists by heart, and fails on each tenth question."""
    lists, n = [set(members) for members in known_lists().values()], itertools.count()

    def word(question):
        if next(n) % 10 == 0:
            return Answer(error="timed out")
        if question.kind == CATEGORY:
            return NAMES[0]
        texts = {token.text.strip() for token in question.tokens}
        return 10 if any(texts <= members for members in lists) else 1

    run, _ = calibrated(monkeypatch, tmp_path, word)
    summary, sets = run.manifest.summary, run.tables["sets"]
    assert summary["auc_known"]["estimate"] == 1.0 and summary["auc_rules"]["estimate"] == 0.5
    assert summary["threshold"] == 10.0 and summary["false_retention"]["estimate"] == 0.0
    assert summary["n_sets_without_score"] == sets["error"].notna().sum() > 10
    assert (sets["score"].isna() == sets["error"].notna()).all()
    asked_whole = sets.groupby("item")["score"].agg(["size", "count"]).query("size == 2 and count == 2").index
    known = sets[(sets["kind"] == KNOWN) & sets["item"].isin(asked_whole)]["item"].nunique()
    rates = run.tables["thresholds"].query("rule == 'paper' and kind == 'known'").iloc[0]
    assert rates["n_items"] == known and rates["retained"] == 1.0
    assert run.tables["confusion"]["answer"].isna().any()
    assert "no usable answer" in run.figures["confusion"]["data"][0]["x"]


def test_with_a_dictionary_the_placebos_are_its_own_sets_shuffled(monkeypatch, place, tmp_path):
    monkeypatch.setattr("sae.funnel.Thresholds", _all_thresholds(command))
    run, _ = calibrated(
        monkeypatch, tmp_path, lambda q: 5 if q.kind == PURITY else NAMES[0], sae=place.sae, model=str(place.SATFormer)
    )  # fmt: skip
    sets, summary = run.tables["sets"], run.manifest.summary
    own = sets[sets["kind"] == SHUFFLED_SAE]
    vocabulary = command.open_vocabulary(
        command.Config(sae=place.sae, model=str(place.SATFormer), per_category=3)
    )
    expected = Counter(token for pair in vocabulary.latents for part in pair for token in part)
    assert Counter(token for ids in own["token_ids"] for token in json.loads(ids)) == expected
    assert summary["threshold_placebo"] == SHUFFLED_SAE and summary["sae_digest"]
    assert run.manifest.inputs[0]["digest"] == summary["sae_digest"]
    assert {(r.coherent, r.placebo) for r in run.tables["auc"].itertuples()} >= {(RULES, SHUFFLED_SAE)}


def _all_thresholds(module):
    """Thresholds that a small random dictionary passes."""
    from sae.funnel import Thresholds

    return lambda **given: Thresholds(**{"max_density": 1.0, "top_share": 1.0, "min_active": 1, **given})


def test_a_dictionary_of_another_model_or_site_is_refused(place, tmp_path):
    with pytest.raises(UserError, match="give the model it belongs to"):
        command.open_vocabulary(command.Config(sae=place.sae, model=str(place.transformer)))
    with pytest.raises(UserError, match="which does not ship"):
        command.open_vocabulary(command.Config(sae=place.sae))
    other = write_dictionary(tmp_path, place.SATFormer, place.folder / "texts.jsonl", site="mlp_out.0")
    with pytest.raises(UserError, match=r"reads mlp_out\.0, not V1"):
        command.open_vocabulary(command.Config(sae=other, model=str(place.SATFormer)))


def test_the_same_calibration_has_the_same_bytes_and_another_seed_others(monkeypatch, tmp_path):
    rules = Rules()

    def word(question):
        answer = rules.ask([question])[0]
        return answer.score if question.kind == PURITY else answer.category

    runs = [calibrated(monkeypatch, tmp_path, word, seed=seed)[0] for seed in (0, 0, 1)]
    assert digest(runs[0]) == digest(runs[1]) != digest(runs[2])


def test_compare_needs_neither_known_lists_nor_flips():
    sets = pd.concat(
        [scores(RULES, drawn(0, 5, 3)), scores(SHUFFLED_RULES, drawn(1, 5, 0))], ignore_index=True
    )
    category = pd.DataFrame({"category": [NAMES[0], None]})
    flips, _ = flip_table([], TestJudge(lambda q: 1), TestJudge(lambda q: 1), 0, 0)
    tables, summary = compare(
        sets, [NAMES[0], NAMES[1]], category, flips, has_dictionary=False, target=0.2, seed=0, resamples=100
    )
    assert summary["auc_known"]["estimate"] is None and summary["true_retention_known"]["estimate"] is None
    info = {"model": "m", "judge": "j", **summary}
    for name, figure in FIGURES.items():
        fig = figure({**tables, "sets": sets}, info)
        assert (len(fig.layout.meta["caption"]) > 60 and fig.layout.xaxis.title.text) or name == "scores"


@pytest.mark.parametrize(
    "wrong",
    [{"set_size": 2}, {"per_category": 0}, {"false_retention": 1.0}, {"resamples": 10}, {"flips": -1}],
    ids=str,
)
def test_settings_that_make_no_sense_are_refused(wrong):
    with pytest.raises(UserError):
        command.Config(**wrong)
