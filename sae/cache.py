"""Answers kept by content: a job that was killed, or is repeated, asks nothing twice.

One JSON line an answer, appended as it arrives and found again by what was asked: the judge's facts, the kind of
question, and the tokens as they are shown, in their order. Errors are not kept, so that a repeated job asks those
again. Several jobs may share a file.
"""

import fcntl
import hashlib
import json
import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from sae.judges import Answer, Judge, Question
from sae.taxonomy import CATEGORIES
from satlens.errors import UserError
from satlens.log import say

KEPT = ("score", "category", "raw", "prompt_tokens", "completion_tokens")


class Cached:
    """A judge that looks up first. Its answers from the file say so, and what they cost when they were made."""

    def __init__(self, judge: Judge, path: Path) -> None:
        self.judge, self.path = judge, path
        self._known: dict[str, Answer] = {}
        self._read_to = 0
        self._checked = False

    @property
    def facts(self) -> dict[str, Any]:
        """The judge's own: looking up changes no answer."""
        return self.judge.facts

    def check(self) -> None:
        """The judge's own check, and whether the file can be written, before any work.

        Raises:
            UserError: one of them fails.
        """
        with self._file():
            pass
        self.judge.check()
        self._checked = True

    def ask(
        self, questions: Sequence[Question], on_answer: Callable[[Answer], None] | None = None
    ) -> list[Answer]:
        """Known answers at once, then the others as they come; a question that occurs twice is asked once."""
        if not self._checked:
            self.check()  # only then are the facts whole, and they are part of the key
        self._load()
        keys = [key_of(self.facts, question) for question in questions]
        places: dict[str, list[int]] = {}
        for index, key in enumerate(keys):
            places.setdefault(key, []).append(index)
        answers: dict[int, Answer] = {}

        def give(key: str, answer: Answer) -> None:
            for index in places[key]:
                answers[index] = replace(answer, index=index)
                answer = replace(answer, cached=True)  # the next place of this question costs nothing
                if on_answer is not None:
                    on_answer(answers[index])

        def keep(answer: Answer) -> None:
            key = missing[answer.index]
            if answer.error is None:
                self._append(key, questions[places[key][0]].kind, answer)
            give(key, answer)

        for key in places:
            if key in self._known:
                give(key, self._known[key])
        missing = [key for key in places if key not in self._known]
        if missing:
            self.judge.ask([questions[places[key][0]] for key in missing], keep)
        return [answers[index] for index in range(len(questions))]

    def close(self) -> None:
        """The file is open only while it is read or written."""
        self.judge.close()

    def _load(self) -> None:
        """Take in what the file has gained since it was last read."""
        strange = 0
        with self._file() as file:
            file.seek(self._read_to)
            for line in file.read().splitlines():
                entry = _entry(line)
                if entry is None:
                    strange += 1
                else:
                    self._known[entry[0]] = entry[1]
            self._read_to = file.tell()
        if strange:
            say(f"note: {strange} lines of {self.path.name} are no answers; what they held is asked again")

    def _append(self, key: str, kind: str, answer: Answer) -> None:
        self._known[key] = replace(answer, cached=True)
        kept = {name: value for name in KEPT if (value := getattr(answer, name)) is not None}
        line = json.dumps({"key": key, "kind": kind, **kept}, allow_nan=False)
        with self._file() as file:
            file.seek(0, os.SEEK_END)
            file.write(f"{line}\n".encode())

    @contextmanager
    def _file(self) -> Iterator[Any]:
        """The file, held for this moment; a last line that a killed job left unfinished is cut off."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            file = self.path.open("a+b")
        except OSError as error:
            raise UserError(
                f"cannot write answers to {self.path} ({error.strerror}): give another --cache"
            ) from error
        with file:
            # only for this moment: jobs that share the file wait for a line, not for each other
            fcntl.flock(file, fcntl.LOCK_EX)
            _cut_unfinished_line(file)
            yield file
            file.flush()


def cached(judge: Judge, path: Path) -> Cached:
    """The judge behind the file at ``path``, which is made when it is not there."""
    return Cached(judge, path)


def key_of(facts: dict[str, Any], question: Question) -> str:
    """SHA-256 of all that an answer depends on. Ids are left out: entries that look alike get the same answer."""
    asked = [facts, question.kind, [[token.piece, token.text] for token in question.tokens]]
    return hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()


def _cut_unfinished_line(file: Any) -> None:
    end = file.seek(0, os.SEEK_END)
    at = end
    while at > 0:
        start = max(0, at - 4096)
        file.seek(start)
        newline = file.read(at - start).rfind(b"\n")
        if newline >= 0:
            at = start + newline + 1
            break
        at = start
    if at < end:
        file.truncate(at)


def _entry(line: bytes) -> tuple[str, Answer] | None:
    """The key and answer in a line, or None when it holds none."""
    try:
        found = json.loads(line)
        answer = Answer(**{name: found[name] for name in KEPT if name in found}, cached=True)
        key, score, category = str(found["key"]), answer.score, answer.category
    except (ValueError, TypeError, KeyError):
        return None
    sound = category in CATEGORIES if score is None else category is None and _is_score(score)
    return (key, answer) if sound else None


def _is_score(value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and math.isfinite(value) and 0 <= value <= 10
