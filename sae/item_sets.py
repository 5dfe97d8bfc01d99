"""Token sets whose answer is known beforehand: coherent by rule or by meaning, and placebos that are neither.

An item stands for one feature: two disjoint sets of tokens, as the funnel would show them. Placebo items have the same
sizes as the coherent ones; shuffled ones have also the same tokens, each as often.
"""

import tomllib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from sae.taxonomy import CATEGORIES

LEAST = 3
"""Fewest tokens in a set."""
KNOWN_SETS = Path(__file__).with_name("known_sets.toml")
RULES, KNOWN, SHUFFLED_RULES, SHUFFLED_KNOWN, SHUFFLED_SAE, UNIFORM = (
    "rules",
    "known",
    "shuffled rules",
    "shuffled known",
    "shuffled dictionary",
    "uniform",
)


@dataclass(frozen=True, kw_only=True)
class Item:
    """What one feature would show: two token sets (one where a known list is short)."""

    name: str
    kind: str
    """rules, known, or one of the placebos."""
    truth: str | None
    """Category of a rule-decidable item, name of a known list, None for a placebo."""
    sets: tuple[tuple[int, ...], ...]

    @property
    def tokens(self) -> tuple[int, ...]:
        """All its token ids."""
        return tuple(token for part in self.sets for token in part)


def deal(tokens: Iterable[int], m: int) -> tuple[tuple[int, ...], ...]:
    """The first ``2 m`` tokens dealt alternately into two sets; one set where there are too few for two."""
    used = [int(token) for token in tokens][: 2 * m]
    parts = (tuple(used[0::2]), tuple(used[1::2]))
    return parts if len(parts[1]) >= LEAST else (tuple(used[:m]),)


def rule_items(categories: Mapping[int, str], m: int, most: int, rng: np.random.Generator) -> list[Item]:
    """Items of one category each, at most ``most`` per category, that share no token.

    ``categories`` maps the token ids that rules can decide to their category. A category with fewer than six tokens
    has no item.
    """
    items = []
    for category in CATEGORIES:
        ids = rng.permutation([token for token, name in categories.items() if name == category])
        parts = [ids[start : start + 2 * m] for start in range(0, len(ids), 2 * m)]
        parts = [part for part in parts if len(part) >= 2 * LEAST]
        items += [
            Item(name=f"{category} {number}", kind=RULES, truth=category, sets=deal(part, m))
            for number, part in enumerate(parts[:most])
        ]
    return items


def known_lists() -> dict[str, list[str]]:
    """Names and words of the lists that ship with the package."""
    return tomllib.loads(KNOWN_SETS.read_text(encoding="utf-8"))


def known_items(
    lists: Mapping[str, Sequence[str]], words: Mapping[str, int], m: int, rng: np.random.Generator
) -> list[Item]:
    """One item for each list that the vocabulary has at least three words of.

    ``words`` maps texts to token ids. A list is taken in the spelling, with or without a leading space, that has
    more of its words: in a mixture, spelling would tell the words of one set apart.
    """
    items = []
    for name, members in lists.items():
        spaced = [words[f" {word}"] for word in members if f" {word}" in words]
        bare = [words[word] for word in members if word in words]
        ids = list(dict.fromkeys(spaced if len(spaced) >= len(bare) else bare))
        if len(ids) >= LEAST:
            items.append(Item(name=name, kind=KNOWN, truth=name, sets=deal(rng.permutation(ids), m)))
    return items


def shuffled(items: Sequence[Item], kind: str, rng: np.random.Generator) -> list[Item]:
    """The same sizes and the same tokens, each as often, dealt at random: no item holds a token twice.

    A token that lands twice in an item is exchanged with a random place of another item until none does. Where that
    is impossible (a token in more than as many items as there are) the doubles are left out.
    """
    pool = rng.permutation([token for item in items for token in item.tokens]).tolist()
    ends = np.cumsum([len(item.tokens) for item in items]).tolist()
    owner = np.repeat(np.arange(len(items)), [len(item.tokens) for item in items]).tolist()
    held = [Counter(pool[end - len(item.tokens) : end]) for item, end in zip(items, ends, strict=True)]
    for place, mine in enumerate(owner):
        for other in rng.integers(len(pool), size=1000).tolist() if held[mine][pool[place]] > 1 else ():
            one, two, theirs = pool[place], pool[other], owner[other]
            if theirs != mine and not held[mine][two] and not held[theirs][one]:
                held[mine].update({one: -1, two: 1})
                held[theirs].update({one: 1, two: -1})
                pool[place], pool[other] = two, one
                break
    return [
        _refilled(item, f"{kind} {number}", kind, pool[end - len(item.tokens) : end])
        for number, (item, end) in enumerate(zip(items, ends, strict=True))
    ]


def uniform(items: Sequence[Item], ids: Sequence[int], rng: np.random.Generator) -> list[Item]:
    """Items of the same sizes, of tokens drawn evenly from the vocabulary."""
    return [
        _refilled(
            item, f"{UNIFORM} {number}", UNIFORM, rng.choice(ids, len(item.tokens), replace=False).tolist()
        )
        for number, item in enumerate(items)
    ]


def _refilled(item: Item, name: str, kind: str, tokens: list[int]) -> Item:
    sets, start = [], 0
    for part in item.sets:
        taken = tokens[start : start + len(part)]
        sets.append(tuple(token for token in dict.fromkeys(taken)))
        start += len(part)
    return replace(item, name=name, kind=kind, truth=None, sets=tuple(sets))
