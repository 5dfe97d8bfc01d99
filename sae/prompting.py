"""What a language model is asked and how its reply is read: the same for every judge that is one."""

import hashlib
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from sae.judges import CATEGORY, KINDS, Answer, Kind, Question, Token
from sae.taxonomy import CATEGORIES, DESCRIPTIONS

Read = Literal["answer", "expected"]
FOLDER = Path(__file__).parent / "prompts"
OPEN, CLOSE = "⟦tokens⟧", "⟦end⟧"
"""Lines around the tokens. Their brackets are written as escapes between them, so nothing there can end the fence."""
DIGITS = "0123456789"
TOP_LOGPROBS = 20
"""As many as servers give; the ten digits are among them when nothing else is allowed."""
LEAST_MASS = 0.5
"""Below this share of the probability on digits, the reply was not about a digit and is not read."""
LONGEST_TOKENS = 4_000
"""Characters in a question's tokens: more are not sent, since they would be refused or drown the rest."""
_TO_DOUBLE = re.compile(r'(\\\\)|\\(?=[xU])|"')
"""A pair of backslashes is stepped over, so that its second one is not taken for the start of a code."""
_BYTE_PIECE = re.compile(r"<0x[0-9A-Fa-f]{2}>")


class Unreadable(Exception):
    """A reply that is not an answer; the message says why."""


@dataclass(frozen=True, kw_only=True)
class Form:
    """How one kind of question is put: its text, and what the reply may be."""

    text: str
    schema: dict[str, Any] | None
    """JSON schema of the reply; None when it is one digit, read by its probabilities."""
    max_tokens: int

    @property
    def name(self) -> str:
        """What the reply holds; `digit` where it is one."""
        return next(iter(self.schema["properties"])) if self.schema else "digit"


@dataclass(frozen=True, kw_only=True)
class Reply:
    """What one attempt brought: a completion, or why there is none and whether another may."""

    text: str | None = None
    finish: str | None = None
    logprobs: tuple[tuple[str, float], ...] = ()
    """Candidates for the first token."""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    failure: str | None = None
    retry: bool = True
    wait: float | None = None
    """Seconds the server asks to be left alone."""
    reached: bool = True
    """Whether the server said anything at all."""


@cache
def form(kind: Kind, read: Read) -> Form:
    """The form of a question kind: purity by either reading, category always by its answer."""
    if kind == CATEGORY:
        listed = "\n".join(f"- {name}: {DESCRIPTIONS[name]}" for name in CATEGORIES)
        text = _file("category").replace("{categories}", listed)
        return Form(text=text, schema=_schema("category", list(CATEGORIES)), max_tokens=32)
    if read == "expected":
        return Form(text=_file("purity-expected"), schema=None, max_tokens=1)
    return Form(text=_file("purity-answer"), schema=_schema("score", list(range(11))), max_tokens=16)


def digest(read: Read) -> str:
    """SHA-256 over all that decides what is asked: texts, examples, taxonomy and schemas."""
    forms = [vars(form(kind, read)) for kind in KINDS]
    return hashlib.sha256(json.dumps([forms, OPEN, CLOSE], sort_keys=True).encode()).hexdigest()


def messages(question: Question, read: Read) -> list[dict[str, str]]:
    """One question as a chat: what all share first, so that servers compute it once, the tokens last.

    Examples are turns of the chat, as small models follow those much better than a list of examples in one text.

    Raises:
        Unreadable: longer than any server should be sent.
    """
    *examples, last = _turns(form(question.kind, read).text)
    tokens = fenced(question.tokens)
    if len(tokens) > LONGEST_TOKENS:
        raise Unreadable(
            f"the tokens have {len(tokens):,} characters, more than {LONGEST_TOKENS:,}; not sent"
        )
    return [*examples, {**last, "content": last["content"].replace("{tokens}", tokens)}]


def usual_question(kind: Kind) -> Question:
    """A question of usual length, to see whether a judge has room for one."""
    return Question(kind=kind, tokens=tuple(Token(id=i, piece="", text=" structure") for i in range(20)))


def fenced(tokens: Sequence[Token]) -> str:
    """The tokens as a JSON array on one line of printable characters, in which the fence cannot occur."""
    array = "[" + ", ".join(f'"{_in_json(token)}"' for token in tokens) + "]"
    return array.replace("⟦", "\\u27E6").replace("⟧", "\\u27E7")


def shown(token: Token) -> str:
    """What of a token a model reads: its text, but a byte token by its name, which says more."""
    return token.piece if _BYTE_PIECE.fullmatch(token.piece) else token.text


def read_reply(form: Form, reply: Reply) -> Answer:
    """The answer in a reply, or why there is none; either way what it cost."""
    read: dict[str, Any]
    if reply.failure is not None:
        read = {"error": reply.failure}
    else:
        try:
            read = {**_value(form, reply), "error": None}
        except Unreadable as problem:
            read = {"error": str(problem)}
    costs = {"prompt_tokens": reply.prompt_tokens, "completion_tokens": reply.completion_tokens}
    return Answer(**{"raw": reply.text, **read, **costs})


def _value(form: Form, reply: Reply) -> dict[str, Any]:
    if form.schema is None:
        score, raw = read_expected(reply.logprobs)
        return {"score": score, "raw": raw}
    if reply.finish == "length":
        raise Unreadable("the reply was cut at its longest length")
    value = read_json(form, reply.text or "")
    return {"score": float(value)} if isinstance(value, int) else {"category": value}


def read_json(form: Form, reply: str) -> int | str:
    """The score or category in a reply.

    Raises:
        Unreadable: no JSON, or not what the schema allows.
    """
    assert form.schema is not None
    try:
        value = json.loads(reply)
    except ValueError as error:
        raise Unreadable(f"the reply is not JSON ({error})") from None
    allowed = form.schema["properties"][form.name]["enum"]
    found = value.get(form.name) if isinstance(value, dict) else None
    # True == 1 and 7.0 == 7 in Python, neither is what the schema asks for
    if set(value if isinstance(value, dict) else ()) != {form.name} or not any(
        found == item and type(found) is type(item) for item in allowed
    ):
        raise Unreadable(f'the reply is not {{"{form.name}": ...}} with one of the values it may have')
    assert isinstance(found, int | str)
    return found


def read_expected(logprobs: Iterable[tuple[str, float]]) -> tuple[float, str]:
    """``(score, raw)``: the expected digit under the digits' probabilities, times 10/9, so that it runs to 10.

    ``logprobs`` are the first token's candidates. Digits are renormalised among themselves (notes: a small model that
    answers 0 to everything orders sets well by this expectation).

    Raises:
        Unreadable: hardly any probability is on digits.
    """
    mass = dict.fromkeys(DIGITS, 0.0)
    for token, logprob in logprobs:
        if (digit := token.strip(" ▁Ġ")) in mass and len(digit) == 1 and math.isfinite(logprob):
            mass[digit] += math.exp(logprob)
    total = sum(mass.values())
    if not total >= LEAST_MASS:
        raise Unreadable(f"only {total:.3f} of the probability is on the digits 0 to 9")
    expected = sum(int(digit) * share for digit, share in mass.items()) / total
    return expected * 10 / 9, json.dumps({digit: round(share, 6) for digit, share in mass.items()})


def response_format(form: Form) -> Mapping[str, Any]:
    """The schema as the chat completions API takes it."""
    return {"type": "json_schema", "json_schema": {"name": form.name, "strict": True, "schema": form.schema}}


def _in_json(token: Token) -> str:
    """Escaped text is nearly JSON already: only quotes, and the codes JSON does not know, need a backslash more."""
    return _TO_DOUBLE.sub(lambda found: found[1] or f"\\{found[0]}", shown(token))


def _turns(text: str) -> list[dict[str, str]]:
    """The messages in a prompt file: it begins with the user's, and a line of its own names each next speaker."""
    first, *rest = re.split(r"^--- (user|assistant) ---\n", text, flags=re.MULTILINE)
    pairs = [("user", first), *zip(rest[::2], rest[1::2], strict=True)]
    return [{"role": role, "content": said.rstrip("\n")} for role, said in pairs]


def _schema(name: str, allowed: list[Any]) -> dict[str, Any]:
    kind = "integer" if isinstance(allowed[0], int) else "string"
    return {
        "type": "object",
        "properties": {name: {"type": kind, "enum": allowed}},
        "required": [name],
        "additionalProperties": False,
    }


def _file(name: str) -> str:
    return (FOLDER / f"{name}.txt").read_text(encoding="utf-8").rstrip("\n")
