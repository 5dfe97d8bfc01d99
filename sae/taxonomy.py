"""The ten categories a V1 feature can have, and the three broad kinds they add up to (paper, Table 8)."""

from collections.abc import Mapping
from types import MappingProxyType

BROAD = ("semantic", "functional", "structural")
"""The three kinds of the paper's Fig. 6, in its order."""

CATEGORIES: Mapping[str, str] = MappingProxyType(
    {
        "Semantic Root Fragments": "semantic",
        "Entity Marker Fragments": "semantic",
        "Logic Quantifier Keywords": "semantic",
        "Morphological Suffixes": "semantic",
        "Functional Leading Space": "semantic",
        "Multilingual Unicode": "functional",
        "Byte-Level Fallbacks": "functional",
        "Numerical Digit Fragments": "functional",
        "Structural Punctuation": "structural",
        "Code Formatting Symbols": "structural",
    }
)
"""Category -> broad kind. That `Functional Leading Space` counts as semantic is the paper's choice (App. C.1)."""

DESCRIPTIONS: Mapping[str, str] = MappingProxyType(
    {
        "Semantic Root Fragments": "core meaning-bearing subwords, such as struct, trans, ology",
        "Entity Marker Fragments": "capitalised fragments often used in proper names, such as Mc, San, Al",
        "Logic Quantifier Keywords": "connectives and quantifiers that direct the flow of a sentence, such as "
        "if, however, all, but",
        "Morphological Suffixes": "subwords that modify parts of speech, such as ing, ed, s, ly",
        "Functional Leading Space": "tokens that begin a new word, such as The, Apple, Run",
        "Multilingual Unicode": "valid scripts beyond ASCII, such as α, é, ñ, ß",
        "Byte-Level Fallbacks": "raw UTF-8 bytes or characters that are no text, such as <0x0A>",
        "Numerical Digit Fragments": "numbers, decimals or ordinal indicators, such as 12, 4, .5, th",
        "Structural Punctuation": "symbols of syntax, grouping or boundaries, such as . : ( ”",
        "Code Formatting Symbols": "programming syntax, or white space and indentation, such as { \\n ++",
    }
)
"""What a judge is told about each category: the words and examples of Table 8."""
