"""From a dictionary's features to labels: token sets, questions about them, and what the answers decide."""

from collections.abc import Callable, Sequence
from typing import Any

import pandas as pd
from jaxtyping import Float, Int
from torch import Tensor

from sae.asking import ANSWER_COLUMNS, ask, require_some
from sae.features import LEAST_TOKENS, Features, token_sets
from sae.funnel import categorise, consistency
from sae.judges import CATEGORY, PURITY, Judge, Question, Token
from sae.judges.rules import category_of, decidable
from sae.pieces import token_of

SET_COLUMNS = {
    "latent": "int64",
    "set": "object",
    "rank": "int64",
    "token_id": "int64",
    "piece": "object",
    "text": "object",
    "act": "float64",
}


def latent_table(features: Features, mono: Float[Tensor, " d_sae"]) -> pd.DataFrame:
    """One row per latent, as `sae.funnel.screen` reads it."""
    return pd.DataFrame(
        {
            "latent": range(features.d_sae),
            "n_active": features.n_active.numpy(),
            "density": features.density.numpy(),
            "n_types": features.n_types.numpy(),
            "n_types_seen": features.n_types_seen.numpy(),
            "mono_score": mono.numpy(),
            "has_sets": (features.n_types_seen >= 2 * LEAST_TOKENS).numpy(),
        }
    )


def sets_table(
    features: Features, latents: Sequence[int], counts: Int[Tensor, " d_vocab"], m: int, tokenizer: Any
) -> pd.DataFrame:
    """The two token sets of each latent: one row per token, ``rank`` counting from 0 within its set."""
    rows = []
    for latent in latents:
        acts = {int(token): float(act) for token, act in zip(*features.of(int(latent)), strict=True)}
        for name, ids in zip("ab", token_sets(features, int(latent), counts, m) or (), strict=False):
            for rank, token in enumerate(ids.tolist()):
                shown = token_of(tokenizer, token)
                rows.append((int(latent), name, rank, token, shown.piece, shown.text, acts[token]))
    return pd.DataFrame(rows, columns=list(SET_COLUMNS)).astype(SET_COLUMNS)


def judge_latents(
    table: pd.DataFrame,
    sets: pd.DataFrame,
    judge: Judge,
    min_score: float,
    prefilter: bool,
    log: Callable[..., None] | None = None,
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """``(latents, answers)``: purity of both sets of every latent that is still open, then a category for the pure.

    With ``prefilter``, a latent whose tokens the rules put into one and the same category is accepted without
    asking. ``answers`` has kind, latent, set, and the columns of `sae.asking.ANSWER_COLUMNS`.

    Raises:
        SatlensError: not one purity answer could be used.
    """
    open_latents = table.loc[table["verdict"].isna(), "latent"].tolist()
    tokens = {key: _tokens(part) for key, part in sets.groupby(["latent", "set"], sort=False)}
    union = {latent: _dealt_back(tokens[latent, "a"], tokens[latent, "b"]) for latent in open_latents}
    told: list[tuple[int, str | None, None]] = []
    if prefilter:
        told = [(n, category_of(union[n][0]), None) for n in open_latents if decidable(union[n])]
        table = categorise(table, pd.DataFrame(told, columns=["latent", "category", "error"]), "rules")
    known = {latent for latent, *_ in told}
    pairs = [(latent, name) for latent in open_latents if latent not in known for name in "ab"]
    purity = ask(judge, [Question(kind=PURITY, tokens=tokens[pair]) for pair in pairs], "purity", log)
    require_some(purity)
    purity = _keyed(purity, PURITY, [n for n, _ in pairs], [name for _, name in pairs])
    table = consistency(table, purity, min_score)
    pure = table.loc[table["verdict"].isna(), "latent"].tolist()
    category = ask(judge, [Question(kind=CATEGORY, tokens=union[n]) for n in pure], "category", log)
    category = _keyed(category, CATEGORY, pure, [None] * len(pure))
    table = categorise(table, category, "rules" if judge.facts["judge"] == "rules" else "judge")
    return table, pd.concat([purity, category], ignore_index=True)


def _keyed(answers: pd.DataFrame, kind: str, latents: list[int], sets: list[Any]) -> pd.DataFrame:
    keys = pd.DataFrame({"kind": kind, "latent": latents, "set": pd.Series(sets, dtype="object")})
    return pd.concat([keys.astype({"kind": "object", "latent": "int64"}), answers], axis=1)[
        ["kind", "latent", "set", *ANSWER_COLUMNS]
    ]


def _tokens(rows: pd.DataFrame) -> tuple[Token, ...]:
    named = rows[["token_id", "piece", "text"]].itertuples(index=False)
    return tuple(Token(id=int(token), piece=piece, text=text) for token, piece, text in named)


def _dealt_back(first: tuple[Token, ...], second: tuple[Token, ...]) -> tuple[Token, ...]:
    """Both sets as one, in the order of activation from which they were dealt."""
    out = [token for pair in zip(first, second, strict=False) for token in pair]
    return (*out, *first[len(second) :])
