"""The rules tell a token's category from its string, and leave undecided what a string cannot tell."""

import time

import pytest

from sae.judges import CATEGORY, rules
from tests.fake_judge import question, token

DECIDED = {
    "Byte-Level Fallbacks": [("\n", "<0x0A>"), ("\udce2", "<0xE2>"), "\udce2\udc80", "�", "\0", "\x7f"],
    "Code Formatting Symbols": [
        *"{ ++ == // /* -> () (); :: ` # $ @ && __".split(),
        *"\n\t ",
        "    ",
        ");\n",
    ],
    "Numerical Digit Fragments": [
        "12",
        "4",
        ".5",
        "th",
        " 7",
        "3rd",
        "1,000",
        "1990s",
        "50%",
        "²",
        "٣",
        "-3",
    ],
    "Multilingual Unicode": ["α", "é", "ñ", "ß", " naïve", "日本", "ключ", "אב", "\u0301"],
    "Structural Punctuation": [".", ":", "(", "”", " —", "...", "?!", "¿", "、", '."'],
    "Logic Quantifier Keywords": [
        " if",
        " however",
        " all",
        " but",
        "However",
        "because",
        " None",
        "when",
        " Or",
    ],
    "Functional Leading Space": [" The", " the", " of", " its", " a", " q", " ex"],
    "Entity Marker Fragments": ["Mc", "San", "Al", " Paris", " Al", "B", " J"],
    "Morphological Suffixes": ["ing", "ed", "s", "ly", "ness", "'s", "n't", "less"],
    None: [
        " structure",
        "trans",
        "ology",
        "or",
        "If",
        "All",
        "the",
        "The",
        "HTTP",
        " NASA",
        "x=",
        "x1",
        "→",
        "★",
        "",
    ],
}


def cases():
    return [(name, case) for name, texts in DECIDED.items() for case in texts if case != ""] + [(None, "")]


@pytest.mark.parametrize(("name", "case"), cases(), ids=lambda value: repr(value))
def test_the_rules_tell_a_category_from_the_string_alone(name, case):
    asked = token(*case) if isinstance(case, tuple) else token(case)
    assert rules.category_of(asked) == name
    assert rules.decidable([asked]) is (name is not None)


def test_purity_by_the_rules_is_ten_times_the_share_of_the_most_frequent_category():
    def score(texts):
        (answer,) = rules.Rules().ask([question(texts)])
        return answer.score

    assert score(["ing", "ed", "s"]) == 10 and score(["ing", "ed", "12", "trans"]) == 5
    assert score(["trans", " structure"]) == 0 and score([]) == 0


def test_a_tie_does_not_depend_on_the_order_of_the_tokens():
    answers = [rules.Rules().ask([question(texts, CATEGORY)])[0] for texts in (["12", "ing"], ["ing", "12"])]
    assert answers[0] == answers[1] and answers[0].category == "Morphological Suffixes"


def test_what_no_rule_decides_is_an_error_and_not_a_category():
    (answer,) = rules.Rules().ask([question(["trans", "ology"], CATEGORY)])
    assert answer.category is None and answer.error


def test_tokens_are_decidable_only_when_all_fall_into_one_category():
    assert rules.decidable(question(["ing", "ed"]).tokens)
    assert not rules.decidable(question(["ing", "12"]).tokens)
    assert not rules.decidable(question(["ing", "trans"]).tokens)
    assert not rules.decidable(())


def test_words_stand_in_one_table_but_for_the_suffix_that_is_also_a_quantifier():
    tables = [rules._words(name) for name in ("connectives", "function_words", "suffixes", "ordinals")]
    assert sum(map(len, tables)) == len(frozenset().union(*tables)) + 1
    assert rules.category_of(token("less")) == "Morphological Suffixes"
    assert rules.category_of(token(" less")) == "Logic Quantifier Keywords"


def test_a_very_long_token_is_decided_at_once():
    start = time.monotonic()
    for text in ("1" * 50_000 + "x", "1." * 20_000 + "!", "-" * 50_000):
        rules.category_of(token(text))
    assert time.monotonic() - start < 1
