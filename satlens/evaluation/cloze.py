"""A retrieval item: a context that holds the answer, a cue that asks for it, and a prompt that fits the model.

The protocol is that of Arora et al. 2024 ("Just read twice"), which the paper follows: zero-shot, the model completes
the cue, at most 48 tokens or one line, and scores when the completion contains the answer, whatever its case. A context
that is too long is cut around the first place where the answer stands, so that it can be found at all.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from satlens.errors import UserError
from satlens.evaluation.data import Documents

LIMIT = 2000
"""Tokens of a context and its answer (paper, Table 2: input cut to 2k tokens)."""
RESERVED = 50
"""Of these, for the answer."""
GENERATED = 48
"""Tokens a model may write."""
SHORTEST_ANSWER = 2
"""Characters of an answer; one alone would be found in almost any completion, so the protocol leaves it out."""


@dataclass(frozen=True, kw_only=True)
class Item:
    """One question. The prompt is the context followed by the cue."""

    context: str
    cue: str
    answers: tuple[str, ...]
    number: int = 0
    """Place among the task's documents."""

    @property
    def prompt(self) -> str:
        """What the model reads."""
        return self.context + self.cue


def items_of(documents: Documents) -> list[Item]:
    """The items of a task, without those whose answer is too short to count."""
    items = [replace(_item(document), number=number) for number, document in enumerate(documents)]
    kept = [item for item in items if item.answers and len(item.answers[0]) >= SHORTEST_ANSWER]
    if not kept:
        raise UserError(f"no document has an answer of {SHORTEST_ANSWER} characters or more")
    return kept


def _item(document: dict[str, Any]) -> Item:
    """Of ``text`` and ``value`` (SWDE, SQuAD, FDA), or of ``context``, ``question``, ``answers`` (the others)."""
    if "text" not in document or "value" not in document:
        return _from_question(document)
    text = document["text"].strip()
    given = document.get("context")
    head = (
        given.strip()
        if isinstance(given, str) and text.startswith(given.strip())
        else text.rpartition("\n")[0]
    )
    return Item(context=head or text, cue=text[len(head or text) :], answers=(document["value"].strip(),))


def _from_question(document: dict[str, Any]) -> Item:
    """The question is a statement to be completed; contexts may end with it already, and TriviaQA's hold tags."""
    question = document["question"].strip()
    context = re.sub(r"\[PAR\]|\[DOC\]|\[TLE\]", "", document["context"]).strip()
    while question and context.lower().endswith(question.lower()):
        context = context[: -len(question)]
    answers = document["answers"]
    answers = answers.get("text", []) if isinstance(answers, dict) else answers  # SQuAD's own way
    answers = [answers] if isinstance(answers, str) else answers
    return Item(
        context=context.strip().strip("."), cue=f". {question}", answers=tuple(a.strip() for a in answers)
    )


def fit(item: Item, tokenizer: Any, window: int, after: int = GENERATED) -> Item:
    """The item with its context cut to what a window holds beside the cue and ``after`` more tokens.

    Half of the kept tokens stand before the answer's first place, as in the protocol; where the answer is not in the
    context, or nothing tells context and cue apart, the end is kept.

    Raises:
        UserError: cue and answer alone fill the window.
    """
    cue = tokenizer(item.cue, add_special_tokens=False)["input_ids"] if item.cue else []
    room = min(LIMIT - RESERVED, window - len(cue) - after)
    if room < 1:
        raise UserError(
            f"document {item.number + 1}: its cue of {len(cue)} tokens and {after} for the answer do not fit "
            f"a context of {window}"
        )
    coded = tokenizer(item.context, add_special_tokens=False, return_offsets_mapping=True)
    offsets = coded["offset_mapping"]
    if len(offsets) <= room:
        return item
    first = places(item, whole_words=False)
    if item.cue and first:
        before = sum(end <= first[0][0] for _, end in offsets)
        start = max(0, before - room // 2)
        stop = min(len(offsets), start + room)
    else:
        start, stop = len(offsets) - room, len(offsets)
    return replace(item, context=item.context[offsets[start][0] : offsets[stop - 1][1]])


def places(item: Item, whole_words: bool = True) -> list[tuple[int, int]]:
    """Where an answer stands in the context, as character ranges in order, whatever its case."""
    edge = (r"(?<!\w)", r"(?!\w)") if whole_words else ("", "")
    found = [
        match.span()
        for answer in item.answers
        if answer
        for match in re.finditer(edge[0] + re.escape(answer) + edge[1], item.context, re.IGNORECASE)
    ]
    return sorted(found)


def contains(completion: str, answers: Iterable[str]) -> int:
    """1 when the completion contains an answer, whatever its case."""
    return int(any(re.search(re.escape(answer), completion, re.IGNORECASE) for answer in answers))
