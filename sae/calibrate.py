"""From a judge's answers on known and placebo sets to a calibration: ROC, thresholds, agreement, flips."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd

from sae.asking import ask
from sae.funnel import Thresholds
from sae.item_sets import (
    KNOWN,
    RULES,
    SHUFFLED_KNOWN,
    SHUFFLED_RULES,
    SHUFFLED_SAE,
    UNIFORM,
    Item,
    known_lists,
)
from sae.judges import CATEGORY, PURITY, Judge, Question, Token
from sae.trust import agreement, auc, choose_threshold, confusion, flip_rates, retention, roc, weakest
from satlens.bootstrap import Interval
from satlens.run import measured

PAPER = Thresholds().min_score
PAIRS = ((RULES, SHUFFLED_RULES), (KNOWN, SHUFFLED_KNOWN), (RULES, UNIFORM), (KNOWN, UNIFORM))
"""Coherent kind and the placebo it is told from."""
ROC_COLUMNS = ("coherent", "placebo", "threshold", "false_positive", "true_positive")
FLIP_COLUMNS = ("kind", "question", "n", "first", "again", "category_first", "category_again", "token_ids")


def set_questions(items: Sequence[Item], tokens: Mapping[int, Token]) -> tuple[pd.DataFrame, list[Question]]:
    """One purity question for each set of each item, and the rows that say which set it is."""
    rows, questions = [], []
    for item in items:
        for name, ids in zip("ab", item.sets, strict=False):
            rows.append((item.name, item.kind, item.truth, name, len(ids)))
            questions.append(Question(kind=PURITY, tokens=tuple(tokens[n] for n in ids)))
    return pd.DataFrame(rows, columns=["item", "kind", "truth", "set", "n"]), questions


def category_questions(items: Sequence[Item], tokens: Mapping[int, Token]) -> list[Question]:
    """One category question for each item, on all its tokens as the funnel asks."""
    return [Question(kind=CATEGORY, tokens=tuple(tokens[n] for n in item.tokens)) for item in items]


def flip_table(
    asked: Sequence[tuple[Sequence[Question], pd.DataFrame]],
    judge: Judge,
    raw: Judge,
    n: int,
    seed: int,
    log: Callable[..., None] | None = None,
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """``(flips, answers)``: questions asked again, in another order and once more the same.

    ``asked`` are lists of questions with their first answers; of each list ``n`` are drawn from those that had a usable
    answer. ``raw`` is the judge without its cache: what is repeated must be answered anew.
    """
    rng = np.random.default_rng(seed)
    first: list[tuple[Question, Any]] = []
    for questions, answers in asked:
        usable = np.flatnonzero(answers["error"].isna())
        rows = list(answers.itertuples())
        for at in np.sort(rng.permutation(usable)[:n]):
            first.append((questions[at], rows[at]))
    permuted = [
        replace(question, tokens=tuple(question.tokens[i] for i in rng.permutation(len(question.tokens))))
        for question, _ in first
    ]
    same = [question for question, _ in first]
    parts = {
        "order": (permuted, ask(judge, permuted, "other order", log)),
        "repetition": (same, ask(raw, same, "once more", log)),
    }
    out = []
    for kind, (questions, answers) in parts.items():
        for question, (_, before), after in zip(questions, first, answers.itertuples(), strict=True):
            ids = str([token.id for token in question.tokens])
            scores = (before.score, after.score, before.category, after.category)
            out.append((kind, question.kind, len(question.tokens), *scores, ids))
    again = pd.concat([answers for _, answers in parts.values()], ignore_index=True)
    return pd.DataFrame(out, columns=list(FLIP_COLUMNS)), again


def compare(
    sets: pd.DataFrame,
    truth: Sequence[str],
    category: pd.DataFrame,
    flips: pd.DataFrame,
    *,
    has_dictionary: bool,
    target: float,
    seed: int,
    resamples: int,
) -> tuple[dict[str, pd.DataFrame], dict[str, Any]]:
    """All tables but `sets`, and the summary.

    The threshold is chosen on the placebos that resemble what will be judged most: the dictionary's own sets
    shuffled, where there is one, else the shuffled rule-decidable sets. What it retains of these is therefore within
    the target by construction; what it retains of the other placebos is not.
    """
    kinds = {str(kind): part for kind, part in sets.groupby("kind", sort=False)}
    chance = SHUFFLED_SAE if has_dictionary else SHUFFLED_RULES
    pairs = [*PAIRS, *([(RULES, chance), (KNOWN, chance)] if has_dictionary else [])]
    pairs = [(good, bad) for good, bad in pairs if good in kinds and bad in kinds]
    threshold = choose_threshold(weakest(kinds[chance]), sets["score"].dropna().tolist(), target)
    curves = [roc(kinds[good], kinds[bad]).assign(coherent=good, placebo=bad) for good, bad in pairs]
    told = [None if pd.isna(name) else str(name) for name in category["category"]]
    rates = flip_rates(flips, {"7 of 10": PAPER, "the threshold": threshold})
    tables = {
        "roc": pd.concat(curves, ignore_index=True)[list(ROC_COLUMNS)],
        "auc": pd.DataFrame([auc_row(kinds, good, bad, seed, resamples) for good, bad in pairs]),
        "thresholds": threshold_table(kinds, threshold),
        "confusion": confusion(truth, told),
        "flips": flips,
        "flip_rates": pd.DataFrame(rates, columns=["kind", "what", "estimate", "low", "high", "n"]),
    }
    accuracy, kappa = agreement(truth, told, resamples, seed)
    summary = {
        "target": target,
        "threshold_placebo": chance,
        "threshold": threshold,
        **{f"n_items_{kind.replace(' ', '_')}": part["item"].nunique() for kind, part in kinds.items()},
        "known_lists": len(known_lists()),
        "n_sets": len(sets),
        "n_sets_without_score": int(sets["score"].isna().sum()),
        **_headline(tables, chance),
        "category_accuracy": measured(*accuracy, "of rule-decidable items"),
        "category_kappa": measured(*kappa, "Cohen's kappa"),
        "n_categories_without_answer": told.count(None),
    }
    return tables, summary


def threshold_table(kinds: Mapping[str, pd.DataFrame], threshold: float | None) -> pd.DataFrame:
    """Share of items of each kind that the paper's 7 of 10 and the calibrated threshold retain."""
    rows = []
    for rule, at in (("paper", PAPER), ("calibrated", threshold)):
        for kind, part in kinds.items():
            share, n = (Interval(None, None, None), 0) if at is None else retention(part, at)
            rows.append({"rule": rule, "threshold": at, "kind": kind, "n_items": n, **_renamed(share)})
    table = pd.DataFrame(rows)
    return table.astype(dict.fromkeys(("threshold", "retained", "low", "high"), "float64"))


def auc_row(
    kinds: Mapping[str, pd.DataFrame], good: str, bad: str, seed: int, resamples: int
) -> dict[str, Any]:
    """How well one coherent kind is told from one placebo kind."""
    found = auc(kinds[good], kinds[bad], resamples, seed)
    counts = {
        name: int(kinds[kind]["score"].count()) for name, kind in (("n_coherent", good), ("n_placebo", bad))
    }
    return {
        "coherent": good,
        "placebo": bad,
        "auc": found.estimate,
        "low": found.low,
        "high": found.high,
        **counts,
    }


def _headline(tables: Mapping[str, pd.DataFrame], chance: str) -> dict[str, Any]:
    """The numbers a reader wants first, each with its interval."""
    areas, rates, flips = tables["auc"], tables["thresholds"], tables["flip_rates"]
    out: dict[str, Any] = {}
    for name, good, bad in (("rules", RULES, SHUFFLED_RULES), ("known", KNOWN, SHUFFLED_KNOWN)):
        row = areas[(areas["coherent"] == good) & (areas["placebo"] == bad)]
        out[f"auc_{name}"] = _measured(row, "auc", "")
    named = {"false_retention": chance, "true_retention_rules": RULES, "true_retention_known": KNOWN}
    for prefix, rule in (("", "calibrated"), ("paper_", "paper")):
        for name, kind in named.items():
            row = rates[(rates["rule"] == rule) & (rates["kind"] == kind)]
            out[f"{prefix}{name}"] = _measured(row, "retained", "of items")
    for kind in ("order", "repetition"):
        for name, what in (
            ("paper_", "purity at 7 of 10"),
            ("", "purity at the threshold"),
            ("category_", "category"),
        ):
            row = flips[(flips["kind"] == kind) & (flips["what"] == what)]
            out[f"{name}{kind}_flip_rate"] = _measured(row, "estimate", "of questions asked again")
    return out


def _measured(row: pd.DataFrame, column: str, unit: str) -> dict[str, Any]:
    """The one row's number with its interval; without a row, nothing known."""
    values = [
        None if row.empty or pd.isna(v := row[name].iloc[0]) else float(v) for name in (column, "low", "high")
    ]
    return measured(values[0], values[1], values[2], unit)


def _renamed(share: Interval) -> dict[str, Any]:
    return {"retained": share.estimate, "low": share.low, "high": share.high}
