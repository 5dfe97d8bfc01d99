"""Which latents become features, and why the others do not: the paper's funnel as functions of tables.

Stages (paper, App. C.1): activity and density, MonoScore, agreement of two token sets, category. Every latent ends with
a verdict: accepted, rejected, error (the judge gave no usable answer) or skipped (never asked). Shares count accepted
and rejected latents only: an error is neither, and stands beside them.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from sae.labels import ACCEPTED, ERROR, REJECTED, SKIPPED
from sae.taxonomy import CATEGORIES
from satlens.bootstrap import Interval, document_weights, percentile_interval, ratio_interval, resample
from satlens.errors import UserError

STAGES = ("alive", "active", "sparse", "tokens", "mono-score", "sample", "consistency", "category")
"""In order; `screen` decides the first six, the judge the last two."""


@dataclass(frozen=True, kw_only=True)
class Thresholds:
    """What a latent must pass; the defaults are the paper's (App. C.1), set sizes are ours."""

    min_active: int = 10
    """Fewest positions of the counted text that a latent must be active on."""
    max_density: float = 0.005
    """Largest share of positions that a latent may be active on."""
    top_share: float = 0.2
    """Share of the remaining latents, by MonoScore, that is judged."""
    min_score: float = 7.0
    """Purity, from 0 to 10, that both token sets must reach."""
    set_size: int = 10
    """Most tokens in each of the two sets (at least 3 are needed)."""
    limit: int = 0
    """Judge only this many of the top share, drawn at random by the seed; 0 judges all."""

    def __post_init__(self) -> None:
        if not 0 < self.top_share <= 1:
            raise UserError(f"--top-share must be above 0 and at most 1, got {self.top_share}")
        if not 0 < self.max_density <= 1:
            raise UserError(f"--max-density must be above 0 and at most 1, got {self.max_density}")
        if not 0 <= self.min_score <= 10:
            raise UserError(f"--min-score is a purity from 0 to 10, got {self.min_score}")
        if self.set_size < 3:
            raise UserError(f"--set-size must be at least 3 tokens, got {self.set_size}")
        if self.min_active < 1 or self.limit < 0:
            raise UserError("--min-active must be at least 1 and --limit at least 0")


def screen(latents: pd.DataFrame, rule: Thresholds, seed: int = 0) -> pd.DataFrame:
    """Decide all that needs no judge: adds ``stage``, ``verdict`` and ``reason``, empty for latents to be judged.

    ``latents`` has one row per latent: latent, n_active, density, n_types, mono_score, has_sets (whether two sets of
    at least 3 tokens can be made). The top share is ``ceil(top_share * n)`` of the latents that reach it; equal
    MonoScores are ordered by latent number, so the cut never depends on the machine. With ``limit`` the latents not
    drawn are skipped.
    """
    table = latents.assign(stage=None, verdict=None, reason=None).astype(dict.fromkeys(_WORDS, "object"))
    _drop(table, table["n_active"] == 0, "alive", "never active on the counted text")
    _drop(
        table,
        table["n_active"] < rule.min_active,
        "active",
        f"active on fewer than {rule.min_active} positions",
    )
    _drop(
        table,
        table["density"] > rule.max_density,
        "sparse",
        f"active on more than {100 * rule.max_density:.3g} % of positions",
    )
    lacking = ~table["has_sets"].astype(bool) | table["mono_score"].isna()
    _drop(table, lacking, "tokens", "fewer than 3 tokens in a set")
    left = table[_open(table)].sort_values(["mono_score", "latent"], ascending=[False, True])
    keep = math.ceil(rule.top_share * len(left) - 1e-9)  # 0.2 * 35 is not quite 7 in binary
    _drop(
        table,
        ~table.index.isin(left.index[:keep]),
        "mono-score",
        f"below the top {100 * rule.top_share:.3g} % by MonoScore",
    )
    if 0 < rule.limit < keep:
        drawn = np.random.default_rng(seed).choice(np.sort(left.index[:keep]), rule.limit, replace=False)
        _drop(table, ~table.index.isin(drawn), "sample", f"not asked: {rule.limit} drawn at random", SKIPPED)
    return table


def consistency(table: pd.DataFrame, scores: pd.DataFrame, min_score: float) -> pd.DataFrame:
    """Enter the purity of the two sets (latent, set a or b, score, error) and reject where one is below ``min_score``.

    A latent with an unusable answer is an error even when its other set failed: it could never have been accepted,
    so counting it as rejected would lower the share of accepted latents with every error.
    """
    table = table.copy()
    for name in ("a", "b"):
        column = scores[scores["set"] == name].set_index("latent")["score"].astype(float)
        table[f"score_{name}"] = table["latent"].map(column)
    errors = scores.dropna(subset=["error"]).groupby("latent")["error"].first()
    table["error"] = table["latent"].map(errors).astype("object")
    asked = table["latent"].isin(scores["latent"])
    _drop(table, asked & table["error"].notna(), "consistency", "the judge gave no score", ERROR)
    failed = (table[["score_a", "score_b"]] < min_score).sum(axis=1)
    _drop(table, asked & (failed == 2), "consistency", f"both sets below {min_score:.4g} of 10")
    _drop(table, asked & (failed == 1), "consistency", f"one set below {min_score:.4g} of 10")
    return table


def categorise(table: pd.DataFrame, answers: pd.DataFrame, decided_by: str) -> pd.DataFrame:
    """Accept the latents that ``answers`` (latent, category, error) give a category; the others are errors."""
    table = table.copy()
    for column in ("category", "broad", "decided_by"):
        if column not in table:
            table[column] = pd.Series(None, index=table.index, dtype="object")
    known = answers.set_index("latent")
    here = _open(table) & table["latent"].isin(known.index)
    told = table.loc[here, "latent"].map(known["category"])
    table.loc[here, "category"] = told
    table.loc[here, "broad"] = told.map(CATEGORIES)
    table.loc[here, "decided_by"] = decided_by
    bad = here & table["category"].isna()
    table.loc[bad, "error"] = table.loc[bad, "latent"].map(known["error"])
    _drop(table, bad, "category", "the judge gave no category", ERROR)
    _drop(table, here & ~bad, "category", "both sets pure, and a category", ACCEPTED)
    return table


def funnel_table(table: pd.DataFrame) -> pd.DataFrame:
    """One row per stage: how many latents were kept, dropped and lost to errors, and why.

    ``share`` is kept / (kept + dropped), without errors. ``share_low`` and ``share_high`` are what it would be if the
    judge had dropped, or kept, every latent on which it erred.
    """
    kept = len(table)
    rows: list[dict[str, Any]] = [{"stage": "all", "kept": kept, "reason": "latents of the dictionary"}]
    for stage in STAGES:
        here = table[table["stage"] == stage]
        verdicts = here["verdict"].value_counts()
        errors = int(verdicts.get(ERROR, 0))
        dropped = int(verdicts.get(REJECTED, 0) + verdicts.get(SKIPPED, 0))
        kept -= dropped + errors
        reasons = here.loc[here["verdict"].isin([REJECTED, SKIPPED, ERROR]), "reason"]
        counts = reasons.value_counts(sort=False).sort_index()
        words = "; ".join(f"{why}: {n}" if len(counts) > 1 else str(why) for why, n in counts.items())
        rows.append({"stage": stage, "kept": kept, "dropped": dropped, "errors": errors, "reason": words})
    out = pd.DataFrame(rows, columns=["stage", "kept", "dropped", "errors", "reason"])
    out[["dropped", "errors"]] = out[["dropped", "errors"]].fillna(0)
    out = out.astype({"kept": "int64", "dropped": "int64", "errors": "int64"})
    came = (out["kept"] + out["dropped"]).where(lambda n: n > 0)
    out["share"] = out["kept"] / came
    out["share_low"] = out["kept"] / (came + out["errors"])
    out["share_high"] = (out["kept"] + out["errors"]) / (came + out["errors"])
    return out[["stage", "kept", "dropped", "errors", "share", "share_low", "share_high", "reason"]]


def verdicts(table: pd.DataFrame) -> dict[str, int]:
    """How many latents ended with each verdict, those that none had included."""
    return {name: int((table["verdict"] == name).sum()) for name in (ACCEPTED, REJECTED, ERROR, SKIPPED)}


def distribution(table: pd.DataFrame, resamples: int = 1000, seed: int = 0) -> pd.DataFrame:
    """Accepted latents by category: count and share of all accepted, with a bootstrap over those (paper, Fig. 9).

    All ten categories are there, also those that no latent has; these have no interval, since a bootstrap would
    claim that none is to be found. Without accepted latents the shares are undefined.
    """
    accepted = table.loc[table["verdict"] == ACCEPTED, "category"]
    names = list(CATEGORIES)
    member = (accepted.to_numpy()[:, None] == np.array(names, dtype=object)[None]).astype(np.float64)
    n = len(accepted)
    low = high = np.full(len(names), np.nan)
    if n > 1:
        low, high = percentile_interval(resample(member, document_weights(n, resamples, seed)) / n)
    counts = member.sum(0).astype(np.int64)
    low, high = np.where(counts, low, np.nan), np.where(counts, high, np.nan)
    return pd.DataFrame(
        {
            "category": names,
            "broad": [CATEGORIES[name] for name in names],
            "n": counts,
            "share": counts / n if n else np.full(len(names), np.nan),
            "low": low,
            "high": high,
        }
    )


def accepted_share(table: pd.DataFrame, resamples: int = 1000, seed: int = 0) -> Interval:
    """Accepted / (accepted + rejected by the judge), with a bootstrap over those latents; None where undefined."""
    judged = table["stage"].isin(["consistency", "category"]) & table["verdict"].isin([ACCEPTED, REJECTED])
    hit = (table.loc[judged, "verdict"] == ACCEPTED).to_numpy(dtype=np.float64)
    if not len(hit):
        return Interval(None, None, None)
    return ratio_interval(hit, np.ones(len(hit)), document_weights(len(hit), resamples, seed))


_WORDS = ("stage", "verdict", "reason")


def _open(table: pd.DataFrame) -> pd.Series:
    return table["verdict"].isna()


def _drop(table: pd.DataFrame, where: Any, stage: str, reason: str, verdict: str = REJECTED) -> None:
    """Give latents without a verdict this one (in place)."""
    table.loc[_open(table) & where, list(_WORDS)] = [stage, verdict, reason]
