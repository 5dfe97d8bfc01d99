"""What is a judge's word worth: does it tell coherent token sets from placebos, at what score, and twice the same.

Coherent sets come from the vocabulary: those that rules can decide, and short lists of words that belong together by
meaning. Placebos are the same tokens shuffled, and tokens drawn evenly; with --sae also the dictionary's own sets,
shuffled. The threshold found here is what satlens sae label --calibration uses.

Examples:
    satlens judge calibrate
    satlens judge calibrate --judge server --base-url http://127.0.0.1:8000/v1 --read expected
    satlens judge calibrate --judge server --sae runs/dictionaries/reference-satformer-v1/seed-0
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import tyro

from sae.judges import JudgeSettings, make_judge
from satlens import reference
from satlens.errors import UserError
from satlens.run import Run, start_run

if TYPE_CHECKING:
    import pandas as pd

    from sae.item_sets import Item
    from sae.judges import Judge, Token


@dataclass(frozen=True, kw_only=True)
class Config:
    """Flags of `satlens judge calibrate`."""

    judge: Annotated[JudgeSettings, tyro.conf.arg(name="")] = field(default_factory=JudgeSettings)
    """Who is asked."""
    model: str | None = None
    """Whose vocabulary the sets are made of: a checkpoint folder or a shipped name; left out, the dictionary's model,
    or reference-satformer."""
    sae: Path | None = None
    """A V1 dictionary: placebos are then its own judged sets, shuffled."""
    set_size: int = 10
    """Most tokens in a set: use what satlens sae label will use."""
    per_category: int = 10
    """Most rule-decidable items of each category, and a tenth of the placebos made from a dictionary."""
    false_retention: float = 0.05
    """Largest share of placebo features that the threshold may let through."""
    flips: int = 50
    """Questions of each kind (purity, category) that are asked again, in another order and once more the same."""
    seed: int = 0
    """Decides which tokens make up the sets, and the resampling."""
    resamples: int = 1000
    """Bootstrap resamples behind each 95 % interval."""
    runs: Path = Path("runs")
    """Folder that finished runs go to."""

    def __post_init__(self) -> None:
        if self.set_size < 3 or self.per_category < 1 or self.flips < 0:
            raise UserError("--set-size must be at least 3, --per-category at least 1, --flips at least 0")
        if not 0 <= self.false_retention < 1:
            raise UserError(f"--false-retention is a share from 0 to below 1, got {self.false_retention}")
        if self.resamples < 100:
            raise UserError(f"an interval from {self.resamples} resamples would be noise; use at least 100")


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """What item sets are made of."""

    name: str
    facts: dict[str, Any]
    """Of the model it belongs to."""
    data: dict[str, Any]
    """Of the text that a dictionary's sets come from; empty without one."""
    tokens: "dict[int, Token]"
    """Every id but the special ones."""
    latents: tuple[tuple[tuple[int, ...], ...], ...]
    """The two sets of each latent of a dictionary that would be judged; empty without one."""
    dictionary: dict[str, Any] | None
    """Its folder name and digest."""


def run(config: Config) -> Path:
    """Calibrate one judge; returns the run directory.

    Raises:
        UserError: the judge cannot be asked, the vocabulary has no coherent sets, or the dictionary is unfit.
        SatlensError: none of the judge's answers could be used.
    """

    from sae.cache import Cached

    judge = make_judge(config.judge)
    # the same question asked again must reach the judge, not its cache
    raw = judge.judge if isinstance(judge, Cached) else judge
    try:
        judge.check()
        vocabulary = open_vocabulary(config)
        items = make_items(config, vocabulary)
        out = start_run(config.runs, "judge", config, sys.argv[1:])
        return calibrate(out, config, vocabulary, items, judge, raw)
    finally:
        judge.close()


def open_vocabulary(config: Config) -> Vocabulary:
    """Tokens of a model, and with ``--sae`` the sets of its dictionary.

    Raises:
        UserError: they cannot be opened or do not belong together.
    """
    from sae.dictionary import open_dictionary
    from sae.pieces import token_of
    from satlens.checkpoint import load_tokenizer, model_facts

    dictionary = None if config.sae is None else open_dictionary(config.sae)
    own = dictionary.facts["model"]["name"] if dictionary else "reference-satformer"
    name = config.model or own
    if config.model is None and name not in reference.MODELS:
        raise UserError(
            f"{config.sae} was trained on {name}, which does not ship: give its folder with --model"
        )
    path = reference.resolve(name)
    facts = {"name": reference.title(name), **model_facts(path)}
    tokenizer = load_tokenizer(path)
    special = set(tokenizer.all_special_ids)
    tokens = {n: token_of(tokenizer, n) for n in range(len(tokenizer)) if n not in special}
    latents: tuple[tuple[tuple[int, ...], ...], ...] = ()
    if dictionary:
        dictionary.require_model(facts)
        latents = dictionary_sets(config, dictionary, path)
    return Vocabulary(
        name=facts["name"],
        facts=facts,
        data=dictionary.facts["data"] if dictionary else {},
        tokens=tokens,
        latents=latents,
        dictionary={"dictionary": dictionary.path.name, "digest": dictionary.digest} if dictionary else None,
    )


def dictionary_sets(config: Config, dictionary: Any, model: Path) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """The two sets of some latents that the funnel, at the paper's thresholds, would have judged.

    Raises:
        UserError: a dictionary of another site, or one with too few such latents to shuffle.
    """
    from sae.features import input_embeddings, latent_features, mono_score, token_sets
    from sae.funnel import Thresholds, screen
    from sae.label import latent_table
    from sae.table import v1_rows
    from satlens.checkpoint import load_bridge

    if not dictionary.is_v1 or dictionary.counts is None:
        raise UserError(
            f"{config.sae} reads {dictionary.facts['site']}, not V1: its latents have no token sets"
        )
    bridge, _ = load_bridge(model)
    counts = dictionary.counts.total
    features = latent_features(dictionary, v1_rows(bridge), counts)
    mono = mono_score(features, input_embeddings(bridge), counts)
    rule = Thresholds(set_size=config.set_size, limit=10 * config.per_category)
    table = screen(latent_table(features, mono), rule, config.seed)
    latents = table.loc[table["verdict"].isna(), "latent"].tolist()
    if len(latents) < 2:
        raise UserError(
            f"{config.sae} has {len(latents)} latents to judge, too few to shuffle: leave --sae out"
        )
    sets = [token_sets(features, latent, counts, config.set_size) for latent in latents]
    return tuple(tuple(tuple(part.tolist()) for part in pair) for pair in sets if pair is not None)


def make_items(config: Config, vocabulary: Vocabulary) -> "list[Item]":
    """Coherent items, then their placebos.

    Raises:
        UserError: a vocabulary with fewer than two coherent items.
    """
    from sae import item_sets as made
    from sae.judges.rules import category_of

    rng = np.random.default_rng(config.seed)
    tokens = vocabulary.tokens
    categories = {n: name for n, token in tokens.items() if (name := category_of(token)) is not None}
    words: dict[str, int] = {}
    for n, token in tokens.items():
        if n not in categories:  # what spelling decides says nothing about meaning
            words.setdefault(token.text, n)
    by_rule = made.rule_items(categories, config.set_size, config.per_category, rng)
    known = made.known_items(made.known_lists(), words, config.set_size, rng)
    if len(by_rule) < 2:
        raise UserError(
            f"the vocabulary of {vocabulary.name} has {len(by_rule)} sets that rules can decide, too few to calibrate "
            "on: give a model with a larger vocabulary"
        )
    own = [
        made.Item(name=str(n), kind="", truth=None, sets=sets) for n, sets in enumerate(vocabulary.latents)
    ]
    return [
        *by_rule,
        *known,
        *made.shuffled(by_rule, made.SHUFFLED_RULES, rng),
        *made.shuffled(known, made.SHUFFLED_KNOWN, rng),
        *made.shuffled(own, made.SHUFFLED_SAE, rng),
        *made.uniform([*by_rule, *known], list(tokens), rng),
    ]


def calibrate(
    out: Run, config: Config, vocabulary: Vocabulary, items: "Sequence[Item]", judge: "Judge", raw: "Judge"
) -> Path:
    """Ask, compare, and make the run whole."""
    from sae.asking import judge_name, report_errors, spent
    from sae.figures.judge import FIGURES

    tables, summary, answers = measure(out, config, vocabulary, items, judge, raw)
    units = {"score": "purity 0-10", "threshold": "purity 0-10"}
    for name, table in tables.items():
        out.table(name, table, {column: unit for column, unit in units.items() if column in table})
    report_errors(answers)
    dictionary = vocabulary.dictionary
    summary = {
        "model": vocabulary.name,
        "judge": judge_name(judge.facts),
        "judge_facts": judge.facts,
        "sae_digest": dictionary["digest"] if dictionary else None,
        "set_size": config.set_size,
        **summary,
        **spent(answers),
    }
    for name, figure in FIGURES.items():
        out.figure(name, figure(tables, summary))
    inputs = [dictionary] if dictionary else []
    return out.finish(summary, inputs, model=vocabulary.facts, data=vocabulary.data)


def measure(
    out: Run, config: Config, vocabulary: Vocabulary, items: "Sequence[Item]", judge: "Judge", raw: "Judge"
) -> "tuple[dict[str, pd.DataFrame], dict[str, Any], pd.DataFrame]":
    """``(tables, summary, answers)`` of everything the judge was asked."""
    import pandas as pd

    from sae.asking import ask, require_some
    from sae.calibrate import category_questions, compare, flip_table, set_questions
    from sae.item_sets import RULES

    sets, questions = set_questions(items, vocabulary.tokens)
    purity = ask(judge, questions, "purity", out.log)
    require_some(purity)
    decided = [item for item in items if item.kind == RULES]
    category_asked = category_questions(decided, vocabulary.tokens)
    category = ask(judge, category_asked, "category", out.log)
    asked = [(questions, purity), (category_asked, category)]
    flips, again = flip_table(asked, judge, raw, config.flips, config.seed, out.log)
    sets = pd.concat([sets, purity[["score", "error"]]], axis=1)
    tables, summary = compare(
        sets,
        [str(item.truth) for item in decided],
        category,
        flips,
        has_dictionary=bool(vocabulary.latents),
        target=config.false_retention,
        seed=config.seed,
        resamples=config.resamples,
    )
    tables["sets"] = sets.assign(
        pieces=[_pieces(question) for question in questions],
        token_ids=[_ids(question) for question in questions],
    )
    return tables, summary, pd.concat([purity, category, again], ignore_index=True)


def _pieces(question: Any) -> str:
    return json.dumps([token.piece for token in question.tokens], ensure_ascii=False)


def _ids(question: Any) -> str:
    return json.dumps([token.id for token in question.tokens])
