"""Who says whether tokens belong together, and as what: one file a judge, all answering the same questions."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

PURITY, CATEGORY = "purity", "category"


@dataclass(frozen=True, kw_only=True)
class Token:
    """A vocabulary entry as a judge is shown it."""

    id: int
    piece: str
    """Its piece as the tokenizer spells it, made printable (see `sae.pieces`)."""
    text: str
    """What it decodes to, made printable."""


@dataclass(frozen=True, kw_only=True)
class Question:
    """How well do these tokens belong together (purity), or which category are they (category)?"""

    kind: Literal["purity", "category"]
    tokens: tuple[Token, ...]


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What came of one question: a value or an error, never a placeholder."""

    score: float | None = None
    """Purity from 0 to 10, by the reading that was asked for."""
    category: str | None = None
    """One of `sae.taxonomy.CATEGORIES`."""
    error: str | None = None
    """Why there is neither."""
    raw: str | None = None
    """The reply as it came."""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached: bool = False
    """Whether it was answered from the cache, at no cost."""


class Judge(Protocol):
    """What the funnel and the calibration need of a judge."""

    facts: dict[str, Any]
    """For manifests and as the cache's key: name, model, reading, digest of prompts and schema."""

    def check(self) -> None:
        """Raises UserError, with what to do, when the judge cannot be asked."""

    def ask(
        self, questions: Sequence[Question], on_answer: Callable[[Answer], None] | None = None
    ) -> list[Answer]:
        """One answer for each question, in order; a reply that cannot be used is an Answer with an error."""

    def close(self) -> None:
        """Let go of servers and memory."""
