"""A judge without a model: categories that can be told from a token's string alone, and purity as their agreement.

A token is asked these questions in this order, and the first that fits decides:

1. Raw bytes (``<0x0A>`` of a byte-fallback vocabulary, incomplete UTF-8), U+FFFD, control characters other than white
   space: Byte-Level Fallbacks. So a line break is one in Llama's vocabulary and white space in GPT-2's, as in Table 8.
2. Nothing but white space: Code Formatting Symbols.
3. A number with its signs, separators and ordinal ending (``12``, ``.5``, ``4th``, ``²``), or ``th`` alone: Numerical
   Digit Fragments.
4. Any letter or mark beyond ASCII: Multilingual Unicode.
5. Symbols alone: Code Formatting Symbols when the tables know one of them or a part of the run as code, or a line break
   is among them; Structural Punctuation when all are punctuation; undecided for others (arrows, emoji).
6. Two or more letters, all of them capitals: undecided (acronyms, constants, headings).
7. No leading space and in the list of suffixes: Morphological Suffixes.
8. A connective or quantifier: Logic Quantifier Keywords. Without a leading space it must have four letters, as ``or``
   or ``all`` may then be part of any word; shorter ones are undecided.
9. An article, preposition, pronoun or auxiliary: Functional Leading Space if it has a leading space, else undecided.
10. One capital and small letters after it, if any: Entity Marker Fragments, with or without a leading space.
11. A leading space and at most two small letters: Functional Leading Space, as it begins a word and says no more.

What is left (longer small-letter words and fragments, letters mixed with symbols) is undecided as well: these may be
semantic roots, which no rule can tell. They belong to no category, so they lower purity; a set of them scores 0: this
judge accepts no feature as Semantic Root Fragments.
"""

import hashlib
import re
import tomllib
import unicodedata
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from sae.judges import PURITY, Answer, JudgeSettings, Question, Token
from sae.pieces import unescape
from sae.taxonomy import CATEGORIES

COSTS = False
"""Asking again is as cheap as looking up an answer."""
TABLES = Path(__file__).with_name("rules.toml")
SHORTEST_BARE_KEYWORD = 4
LONGEST_BARE_START = 2
_BYTE_PIECE = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_NUMBER = re.compile(r"[.,:+\-−]?\d+([.,:/\-]\d+)*[.,:]?(st|nd|rd|th|s|%)?", re.IGNORECASE)
_SPACES = "\t\n\v\f\r"
_NAME = re.compile(r"[A-Z][a-z]*")


class Rules:
    """The judge; it holds nothing but its facts."""

    def __init__(self) -> None:
        read = TABLES.read_bytes() + Path(__file__).read_bytes()
        self.facts: dict[str, Any] = {"judge": "rules", "digest": hashlib.sha256(read).hexdigest()}

    def check(self) -> None:
        """Always ready."""

    def ask(
        self, questions: Sequence[Question], on_answer: Callable[[Answer], None] | None = None
    ) -> list[Answer]:
        """Purity is 10 times the share of tokens in the most frequent category; that one is the category."""
        answers = []
        for index, question in enumerate(questions):
            answers.append(replace(_answer(question), index=index))
            if on_answer is not None:
                on_answer(answers[-1])
        return answers

    def close(self) -> None:
        """Nothing is open."""


def make(settings: JudgeSettings) -> Rules:
    """The rules have no settings."""
    return Rules()


def decidable(tokens: Sequence[Token]) -> bool:
    """Whether the rules put all of these into one category, so that no model need be asked."""
    found = {category_of(token) for token in tokens}
    return len(found) == 1 and None not in found


def category_of(token: Token) -> str | None:
    """The category of one token by the questions above, or None where none of them fits."""
    text = unescape(token.text)
    core = text.strip()
    if _is_bytes(unescape(token.piece), text):
        return "Byte-Level Fallbacks"
    if not core:
        return "Code Formatting Symbols" if text else None
    if _is_number(core) or (core == text and core in _words("ordinals")):
        return "Numerical Digit Fragments"
    if any(ord(char) > 127 and unicodedata.category(char)[0] in "LM" for char in core):
        return "Multilingual Unicode"
    if not any(char.isalnum() for char in core):
        return _of_symbols(text)
    return _of_word(core, begins=text[0] == " ") if text in (core, f" {core}") else None


def _answer(question: Question) -> Answer:
    counts = Counter(category_of(token) for token in question.tokens)
    del counts[None]
    # of equally frequent categories the first of Table 8, so that the order of the tokens cannot matter
    modal = max(CATEGORIES, key=lambda name: counts[name])
    raw = ", ".join(f"{name} {counts[name]}" for name in CATEGORIES if counts[name]) or "none decided"
    if question.kind == PURITY:
        share = counts[modal] / len(question.tokens) if question.tokens else 0.0
        return Answer(score=10 * share, raw=raw)
    if not counts:
        return Answer(error="the rules can tell the category of none of these tokens", raw=raw)
    return Answer(category=modal, raw=raw)


def _is_bytes(piece: str, text: str) -> bool:
    if _BYTE_PIECE.fullmatch(piece):
        return True
    return any(
        char == "\ufffd"
        or unicodedata.category(char) in ("Cs", "Cn", "Co")
        # white space is not text either, but it is code: the next question
        or (unicodedata.category(char) == "Cc" and char not in _SPACES)
        for char in text
    )


def _is_number(core: str) -> bool:
    if _NUMBER.fullmatch(core):
        return True
    return all(unicodedata.category(char) in ("Nd", "Nl", "No") for char in core)


def _of_symbols(text: str) -> str | None:
    core = text.strip()
    code = _words("code_characters", split=False)
    parts = _words("code_parts")
    if any(char in code for char in core) or any(part in core for part in parts) or "\n" in text:
        return "Code Formatting Symbols"
    if all(unicodedata.category(char)[0] == "P" for char in core if not char.isspace()):
        return "Structural Punctuation"
    return None


def _of_word(core: str, begins: bool) -> str | None:
    """The category of letters, apostrophes among them or not; ``begins`` is whether a space stands before."""
    if len(core) > 1 and core.isupper():
        return None
    if not begins and core in _words("suffixes"):
        return "Morphological Suffixes"
    small = core.lower()
    if small in _words("connectives"):
        return "Logic Quantifier Keywords" if begins or len(core) >= SHORTEST_BARE_KEYWORD else None
    if small in _words("function_words"):
        return "Functional Leading Space" if begins else None
    if _NAME.fullmatch(core):
        return "Entity Marker Fragments"
    short = begins and core.isalpha() and core.islower() and len(core) <= LONGEST_BARE_START
    return "Functional Leading Space" if short else None


@cache
def _tables() -> Mapping[str, str]:
    return tomllib.loads(TABLES.read_text(encoding="utf-8"))


@cache
def _words(table: str, split: bool = True) -> frozenset[str]:
    text = _tables()[table]
    return frozenset(text.split() if split else text)
