"""Questions to a judge and its answers as a table: with a progress bar, time left and what was spent."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pandas as pd

from sae.judges import Answer, Judge, Question
from satlens.errors import SatlensError
from satlens.log import progress, say

ANSWER_COLUMNS = {
    "score": "float64",
    "category": "object",
    "error": "object",
    "raw": "object",
    "prompt_tokens": "int64",
    "completion_tokens": "int64",
    "cached": "bool",
}


def ask(
    judge: Judge, questions: Sequence[Question], words: str, log: Callable[..., None] | None = None
) -> pd.DataFrame:
    """One row of `ANSWER_COLUMNS` for each question, in order.

    ``log`` is told the start, the end and every tenth of the way, so that a run's journal shows how far a job came.
    """
    counted = {"answers": 0, "errors": 0, "tokens": 0}
    tell = log or (lambda *_, **__: None)
    tell("asking", what=words, questions=len(questions))
    with progress() as bar:
        task = bar.add_task(words, total=len(questions))

        def on_answer(answer: Answer) -> None:
            counted["answers"] += 1
            counted["errors"] += answer.error is not None
            counted["tokens"] += 0 if answer.cached else answer.prompt_tokens + answer.completion_tokens
            bar.update(task, advance=1, description=_shown(words, counted))
            if counted["answers"] * 10 // len(questions) > (counted["answers"] - 1) * 10 // len(questions):
                tell("answered", what=words, **counted)

        answers = judge.ask(questions, on_answer) if questions else []
    if len(answers) != len(questions):
        raise SatlensError(f"the judge gave {len(answers)} answers to {len(questions)} questions")
    rows = [{name: _storable(value) for name, value in vars(answer).items()} for answer in answers]
    return pd.DataFrame(rows, columns=list(ANSWER_COLUMNS)).astype(ANSWER_COLUMNS)


def require_some(answers: pd.DataFrame) -> None:
    """Stop where a judge gave no usable answer at all: what would follow is about the judge, not the latents.

    Raises:
        SatlensError: there are answers, and all are errors.
    """
    if len(answers) and answers["error"].notna().all():
        raise SatlensError(
            f"none of the judge's {len(answers):,} answers could be used (the first: {answers['error'].iloc[0]}); "
            "see whether this judge can follow the prompt, and repeat the command"
        )


def spent(answers: pd.DataFrame) -> dict[str, int]:
    """What the questions cost: tokens paid now, and tokens of answers that the cache already had."""
    tokens = answers["prompt_tokens"] + answers["completion_tokens"]
    return {
        "questions": len(answers),
        "questions_from_cache": int(answers["cached"].sum()),
        "answer_errors": int(answers["error"].notna().sum()),
        "tokens_spent": int(tokens[~answers["cached"]].sum()),
        "tokens_from_cache": int(tokens[answers["cached"]].sum()),
    }


def report_errors(answers: pd.DataFrame) -> None:
    """Say how many answers could not be used, and that repeating asks only those."""
    if errors := int(answers["error"].notna().sum()):
        say(
            f"note: {errors:,} of {len(answers):,} answers could not be used; repeat the command to ask those again"
        )


def judge_name(facts: Mapping[str, Any]) -> str:
    """A judge in words: its kind, its model where it has one, and how it is read where that is not the usual way."""
    words = [str(facts["judge"])]
    if facts.get("model"):
        words.append(str(facts["model"]))
    if facts.get("read", "answer") != "answer":
        words.append(f"read by {facts['read']} score")
    return ", ".join(words)


def _storable(value: Any) -> Any:
    """A reply may hold half a surrogate pair, which no file can: it is spelled out."""
    return value.encode("utf-8", "backslashreplace").decode() if isinstance(value, str) else value


def _shown(words: str, counted: Mapping[str, int]) -> str:
    errors = f", {counted['errors']} errors" if counted["errors"] else ""
    return f"{words} ({counted['tokens']:,} tokens{errors})"
