"""Who says whether tokens belong together, and as what: one file a judge, all answering the same questions."""

import importlib
import pkgutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from satlens.errors import UserError

Kind = Literal["purity", "category"]
PURITY: Literal["purity"] = "purity"
CATEGORY: Literal["category"] = "category"
KINDS: tuple[Kind, ...] = (PURITY, CATEGORY)


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

    kind: Kind
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
    index: int = 0
    """Which of the questions asked together it answers: answers arrive in any order."""


class Judge(Protocol):
    """What the funnel and the calibration need of a judge."""

    @property
    def facts(self) -> dict[str, Any]:
        """For manifests and as the cache's key: name, model, reading, digest of prompts. Whole after `check`."""

    def check(self) -> None:
        """Raises UserError, with what to do, when the judge cannot be asked."""

    def ask(
        self, questions: Sequence[Question], on_answer: Callable[[Answer], None] | None = None
    ) -> list[Answer]:
        """One answer for each question, in order; a reply that cannot be used is an Answer with an error.

        ``on_answer`` is told each as it arrives, in any order, from this thread.
        """

    def close(self) -> None:
        """Let go of servers and memory."""


@dataclass(frozen=True, kw_only=True)
class JudgeSettings:
    """Which judge is asked, and how it is read."""

    judge: str = "rules"
    """rules (no model), server (an OpenAI-compatible endpoint, such as vllm serve) or vllm (in this process)."""
    base_url: str = "http://127.0.0.1:8000/v1"
    """server: its address. A key, where one is needed, is read from OPENAI_API_KEY and never stored."""
    judge_model: str | None = None
    """server: a name it serves, left out the only one; vllm: a model folder."""
    read: Literal["answer", "expected"] = "answer"
    """How a score is read: the number answered, or the expected digit under the model's probabilities."""
    concurrency: int = 64
    """Questions that are under way at once."""
    judge_dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """vllm: precision of the weights; auto takes the folder's own. The device is the one vllm was built for."""
    timeout: float = 300.0
    """server: seconds until a request counts as failed and is tried again."""
    cache: Path | None = Path("runs/answers.jsonl")
    """File that keeps answers, so that a job killed or repeated asks nothing twice."""

    def __post_init__(self) -> None:
        if self.judge not in judges():
            raise UserError(f"no judge {self.judge!r}: --judge is one of {', '.join(judges())}")
        if self.concurrency < 1:
            raise UserError(f"at least one question must be under way, got --concurrency {self.concurrency}")
        if "@" in self.base_url or not self.base_url.startswith(("http://", "https://")):
            raise UserError(
                f"--base-url is an address like {JudgeSettings.base_url}, and holds no key (OPENAI_API_KEY does)"
            )
        if self.timeout <= 0:
            raise UserError(f"--timeout is in seconds and above 0, got {self.timeout:g}")


def judges() -> tuple[str, ...]:
    """The judges there are: the files of this folder, each with a `make(settings)` and a `COSTS`."""
    return tuple(sorted(info.name for info in pkgutil.iter_modules(__path__)))


def make_judge(settings: JudgeSettings) -> Judge:
    """The judge that was asked for, not yet checked; one whose answers cost something is behind the cache."""
    module = importlib.import_module(f"{__name__}.{settings.judge}")
    judge: Judge = module.make(settings)
    if settings.cache is None or not module.COSTS:
        return judge
    from sae.cache import cached

    return cached(judge, settings.cache)
