"""The funnel keeps and drops exactly what its thresholds say, and an error is never a rejection."""

import math
from collections import Counter

import numpy as np
import pandas as pd
import pytest

from sae.funnel import (
    STAGES,
    Thresholds,
    accepted_share,
    categorise,
    consistency,
    distribution,
    funnel_table,
    screen,
    verdicts,
)
from sae.taxonomy import CATEGORIES
from satlens.bootstrap import document_weights
from satlens.errors import UserError
from satlens.run import open_run, start_run

NAMES = list(CATEGORIES)


def latents(n=400, seed=0):
    """Latents of every kind: dead, rare, dense, with too few tokens, and with equal MonoScores."""
    rng = np.random.default_rng(seed)
    active = rng.integers(0, 4000, n) * rng.integers(0, 2, n) + rng.integers(0, 30, n)
    types = np.minimum(active, rng.integers(0, 40, n))
    return pd.DataFrame(
        {
            "latent": np.arange(n),
            "n_active": active,
            "density": active / 300_000,
            "n_types": types + 1,
            "mono_score": np.where(types >= 3, rng.integers(-3, 9, n) / 10, np.nan),
            "has_sets": types >= 6,
        }
    )


def answers_for(table, seed=1):
    """Random scores of both sets, and random categories, one answer in seven an error."""
    rng = np.random.default_rng(seed)
    open_latents = table.loc[table["verdict"].isna(), "latent"]
    scores, categories = [], []
    for latent in open_latents:
        for name in "ab":
            error = "no reply" if rng.integers(14) == 0 else None
            scores.append((latent, name, np.nan if error else float(rng.integers(5, 11)), error))
        error = "no category" if rng.integers(7) == 0 else None
        categories.append((latent, None if error else NAMES[rng.integers(4)], error))
    return (
        pd.DataFrame(scores, columns=["latent", "set", "score", "error"]),
        pd.DataFrame(categories, columns=["latent", "category", "error"]),
    )


def by_hand(table, rule, scores, categories):
    """Each latent's stage and verdict by a loop over its own numbers, from the definitions alone."""
    fate, left = {}, []
    for row in table.itertuples():
        if row.n_active == 0:
            fate[row.latent] = ("alive", "rejected")
        elif row.n_active < rule.min_active:
            fate[row.latent] = ("active", "rejected")
        elif row.density > rule.max_density:
            fate[row.latent] = ("sparse", "rejected")
        elif not row.has_sets or math.isnan(row.mono_score):
            fate[row.latent] = ("tokens", "rejected")
        else:
            left.append((-row.mono_score, row.latent))
    left = [latent for _, latent in sorted(left)]
    keep = -(-len(left) * round(rule.top_share * 100) // 100)
    fate |= dict.fromkeys(left[keep:], ("mono-score", "rejected"))
    said = {(r.latent, r.set): (r.score, r.error) for r in scores.itertuples()}
    named = {r.latent: (r.category, r.error) for r in categories.itertuples()}
    for latent in left[:keep]:
        (a, wrong_a), (b, wrong_b) = said[latent, "a"], said[latent, "b"]
        if isinstance(wrong_a, str) or isinstance(wrong_b, str):
            fate[latent] = ("consistency", "error")
        elif a < rule.min_score or b < rule.min_score:
            fate[latent] = ("consistency", "rejected")
        else:
            fate[latent] = ("category", "error" if isinstance(named[latent][1], str) else "accepted")
    return fate


@pytest.mark.parametrize("seed", range(5))
def test_every_latent_meets_the_fate_that_a_plain_loop_gives_it(seed):
    rule = Thresholds(max_density=0.004, top_share=0.35)
    table = latents(seed=seed)
    screened = screen(table, rule)
    scores, categories = answers_for(screened, seed)
    done = categorise(consistency(screened, scores, rule.min_score), categories, "judge")
    fate = by_hand(table, rule, scores, categories)
    assert {r.latent: (r.stage, r.verdict) for r in done.itertuples()} == fate
    tally = Counter(fate.values())
    assert all(
        tally[pair] for pair in (("sparse", "rejected"), ("consistency", "error"), ("category", "accepted"))
    )
    funnel = funnel_table(done).set_index("stage")
    assert list(funnel.index) == ["all", *STAGES]
    kept = len(table)
    for stage in STAGES:
        dropped, errors = tally[stage, "rejected"], tally[stage, "error"]
        kept -= dropped + errors
        assert tuple(funnel.loc[stage, ["kept", "dropped", "errors"]]) == (kept, dropped, errors)
        assert funnel.loc[stage, "share"] == kept / (kept + dropped)
        assert funnel.loc[stage, "share_low"] == kept / (kept + dropped + errors)
        assert funnel.loc[stage, "share_high"] == (kept + errors) / (kept + dropped + errors)
    assert (
        kept
        == verdicts(done)["accepted"]
        == len(done) - sum(map(tally.get, tally)) + tally["category", "accepted"]
    )


@pytest.mark.parametrize(
    ("n", "share", "kept"), [(35, 0.2, 7), (36, 0.2, 8), (5, 0.01, 1), (9, 1.0, 9), (10, 0.3, 3)]
)
def test_the_top_share_is_rounded_up_and_does_not_stumble_over_binary_fractions(n, share, kept):
    table = latents(n).assign(n_active=100, density=1e-4, has_sets=True, mono_score=np.arange(n) / n)
    done = screen(table, Thresholds(top_share=share))
    assert done["verdict"].isna().sum() == kept
    assert set(done.loc[done["verdict"].isna(), "latent"]) == set(range(n - kept, n))


def test_equal_mono_scores_are_cut_by_latent_number_whatever_the_order_of_the_rows():
    table = latents(50).assign(n_active=100, density=1e-4, has_sets=True, mono_score=0.5)
    for shuffled in (table, table.sample(frac=1, random_state=3)):
        done = screen(shuffled, Thresholds())
        assert set(done.loc[done["verdict"].isna(), "latent"]) == set(range(10))


def test_a_limit_skips_at_random_by_the_seed_and_the_skipped_count_in_no_share():
    table = latents(200).assign(n_active=100, density=1e-4, has_sets=True, mono_score=np.arange(200) / 200)
    drawn = [
        frozenset(d.loc[d["verdict"].isna(), "latent"])
        for d in (screen(table, Thresholds(limit=12), seed) for seed in (0, 0, 1))
    ]
    assert drawn[0] == drawn[1] != drawn[2]
    assert all(len(d) == 12 and d <= set(range(160, 200)) for d in drawn)
    done = screen(table, Thresholds(limit=12))
    scores = pd.DataFrame(
        [(n, s, 9.0, None) for n in drawn[0] for s in "ab"], columns=["latent", "set", "score", "error"]
    )
    done = categorise(
        consistency(done, scores, 7),
        pd.DataFrame([(n, NAMES[0], None) for n in drawn[0]], columns=["latent", "category", "error"]),
        "judge",
    )
    assert verdicts(done) == {"accepted": 12, "rejected": 160, "error": 0, "skipped": 28}
    assert accepted_share(done).estimate == 1.0
    assert "12 drawn at random" in funnel_table(done).set_index("stage").loc["sample", "reason"]


def judged(n_good, n_bad, n_error):
    """A table of latents that all reached the judge, with these fates."""
    n = n_good + n_bad + n_error
    table = latents(n).assign(n_active=100, density=1e-4, has_sets=True, mono_score=0.5)
    rows = []
    for latent in range(n):
        good, bad = latent < n_good, n_good <= latent < n_good + n_bad
        for name in "ab":
            lost = not good and not bad and name == "a"
            rows.append(
                (latent, name, np.nan if lost else 9.0 if good else 2.0, "timed out" if lost else None)
            )
    scores = pd.DataFrame(rows, columns=["latent", "set", "score", "error"])
    done = consistency(screen(table, Thresholds(top_share=1.0)), scores, 7.0)
    told = pd.DataFrame([(n, NAMES[2], None) for n in range(n_good)], columns=["latent", "category", "error"])
    return categorise(done, told, "judge")


def test_errors_change_no_share_and_are_not_rejections_even_when_the_other_set_failed():
    clean, erring = judged(6, 14, 0), judged(6, 14, 30)
    assert accepted_share(clean) == accepted_share(erring)
    assert verdicts(erring) == {"accepted": 6, "rejected": 14, "error": 30, "skipped": 0}
    lost = erring[erring["verdict"] == "error"]
    assert (lost["error"] == "timed out").all() and (lost["score_b"] == 2.0).all()
    row = funnel_table(erring).set_index("stage").loc["consistency"]
    assert (row["share"], row["share_low"], row["share_high"]) == (0.3, 6 / 50, 36 / 50)


def test_a_score_at_the_threshold_passes_and_one_below_does_not():
    table = screen(
        latents(3).assign(n_active=99, density=1e-4, has_sets=True, mono_score=0.5), Thresholds(top_share=1)
    )
    rows = [(0, "a", 7.0), (0, "b", 7.0), (1, "a", 6.99), (1, "b", 10.0), (2, "a", 0.0), (2, "b", 0.0)]
    scores = pd.DataFrame([(*row, None) for row in rows], columns=["latent", "set", "score", "error"])
    done = consistency(table, scores, 7.0)
    assert done["reason"].tolist() == [None, "one set below 7 of 10", "both sets below 7 of 10"]


@pytest.mark.parametrize("fates", [(0, 8, 0), (0, 0, 8), (1, 0, 0), (0, 0, 0)], ids=str)
def test_a_funnel_that_accepts_nothing_is_still_valid_and_survives_parquet(fates, tmp_path):
    done = judged(*fates)
    shares, funnel = distribution(done), funnel_table(done)
    assert len(shares) == 10 and shares["n"].sum() == fates[0] and shares["low"].isna().all()
    assert shares["share"].isna().all() == (fates[0] == 0)
    assert (accepted_share(done).estimate is None) == (fates[0] + fates[1] == 0)
    run = start_run(tmp_path, "sae-label", {}, [])
    for name, table in (("features", done), ("funnel", funnel), ("distribution", shares)):
        run.table(name, table)
    back = open_run(run.finish({}))
    assert back.tables["funnel"]["kept"].tolist() == funnel["kept"].tolist()
    assert (back.tables["features"]["verdict"] == "accepted").sum() == fates[0]


def test_distribution_counts_and_its_interval_is_the_bootstrap_of_a_plain_loop():
    done = judged(30, 3, 2)
    kinds = [NAMES[n % 3] for n in range(30)]
    done.loc[done["verdict"] == "accepted", "category"] = kinds
    shares = distribution(done, resamples=300, seed=4).set_index("category")
    weights = document_weights(30, 300, 4)
    for name in NAMES:
        assert (
            shares.loc[name, "n"] == kinds.count(name) and shares.loc[name, "share"] == kinds.count(name) / 30
        )
        if name in kinds:
            samples = [
                sum(w for w, kind in zip(line, kinds, strict=True) if kind == name) / 30 for line in weights
            ]
            assert shares.loc[name, ["low", "high"]].tolist() == pytest.approx(
                np.percentile(samples, [2.5, 97.5])
            )
        else:
            assert math.isnan(shares.loc[name, "low"])
    again = distribution(done, resamples=300, seed=4).set_index("category")
    pd.testing.assert_frame_equal(shares, again)
    assert not shares["low"].equals(distribution(done, resamples=300, seed=5).set_index("category")["low"])


@pytest.mark.parametrize(
    "wrong",
    [{"top_share": 0}, {"top_share": 1.1}, {"max_density": 0}, {"min_score": 11}, {"set_size": 2}, {"min_active": 0},
     {"limit": -1}],
    ids=str,
)  # fmt: skip
def test_thresholds_that_make_no_sense_are_refused(wrong):
    with pytest.raises(UserError):
        Thresholds(**wrong)
