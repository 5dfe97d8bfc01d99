"""A judge behind an OpenAI-compatible endpoint, made for `vllm serve`: many questions at once, none lost quietly."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from queue import Empty, SimpleQueue
from threading import Event, Thread
from typing import Any
from urllib.parse import urlsplit

from sae.endpoint import Endpoint
from sae.judges import KINDS, Answer, JudgeSettings, Question
from sae.prompting import TOP_LOGPROBS, Form, Unreadable, digest, form, messages, read_reply, usual_question
from satlens.errors import SatlensError, UserError

COSTS = True
ATTEMPTS = 5
"""Times a question is sent before it is an error."""
FIRST_WAIT, LONGEST_WAIT = 0.5, 60.0
"""Seconds before the second attempt, doubled after each; the longest that a server's Retry-After is waited for."""
LOST_IN_A_ROW = 8
"""So many questions without any reply mean that the server is gone."""
OFF_TOPIC = [{"role": "user", "content": "Say hello."}]
"""Nobody answers this with a number or a category unless made to."""


class Server:
    """One model at one address."""

    def __init__(self, settings: JudgeSettings) -> None:
        self.settings = settings
        self.facts: dict[str, Any] = {
            "judge": "server",
            "model": settings.judge_model,
            "read": settings.read,
            "prompts": digest(settings.read),
            "decoding": {"temperature": 0, "top_logprobs": TOP_LOGPROBS},
        }
        self._endpoint: Endpoint | None = None

    def check(self) -> None:
        """Is it up, does it have the model, does it keep to what a reply may be, and does a question fit?

        Raises:
            UserError: no, and what to do about it.
        """
        self._open()
        stop = Event()
        for kind in KINDS:
            asked = form(kind, self.settings.read)
            answer, _ = self._until_answered(asked, OFF_TOPIC, 0, stop)
            if answer.error is not None:
                raise UserError(self._disobedient(asked, answer))
            answer, _ = self._answer(0, usual_question(kind), stop)
            if answer.error is not None:
                raise UserError(
                    f"{self.facts['model']} does not answer a question of usual length: {answer.error}; "
                    "its context (--max-model-len) must hold 2,048 tokens"
                )

    def ask(
        self, questions: Sequence[Question], on_answer: Callable[[Answer], None] | None = None
    ) -> list[Answer]:
        """Up to ``concurrency`` questions at a time.

        Raises:
            SatlensError: the server went away.
        """
        if self._endpoint is None:
            self._open()
        answers: dict[int, Answer] = {}
        lost, stop = 0, Event()
        try:
            for answer, reached in self._as_they_come(questions, stop):
                answers[answer.index] = answer
                lost = 0 if reached else lost + 1
                if on_answer is not None:
                    on_answer(answer)
                if lost >= LOST_IN_A_ROW:
                    raise SatlensError(self._gone(answer.error))
        except BaseException:
            stop.set()
            self.close()
            raise
        return [answers[index] for index in range(len(questions))]

    def close(self) -> None:
        """Close the connections; the server itself is left running."""
        if self._endpoint is not None:
            self._endpoint.close()
            self._endpoint = None

    def _open(self) -> None:
        """Connect, and find out which model answers."""
        address, wanted = self.settings.base_url, self.settings.judge_model
        self.close()
        self._endpoint = Endpoint(address, self.settings.timeout, self.settings.concurrency)
        try:
            served = self._endpoint.models()
        except ConnectionError as problem:
            raise UserError(f"no judge answers at {address} ({problem}); {self._start()}") from None
        except LookupError as problem:
            raise UserError(
                f"{address} lists no models ({problem}), so it is no OpenAI-compatible endpoint: "
                "--base-url mostly ends in /v1"
            ) from None
        name = wanted or (next(iter(served)) if len(served) == 1 else None)
        if name is None or name not in served:
            what = f"does not serve {wanted}" if wanted else "serves more than one model or none"
            raise UserError(f"{address} {what}: give --judge-model, one of {', '.join(served) or '(none)'}")
        self.facts |= {"model": name, "root": served[name]}

    def _as_they_come(self, questions: Sequence[Question], stop: Event) -> Iterator[tuple[Answer, bool]]:
        todo: SimpleQueue[tuple[int, Question]] = SimpleQueue()
        done: SimpleQueue[tuple[Answer, bool] | BaseException] = SimpleQueue()
        for item in enumerate(questions):
            todo.put(item)

        def work() -> None:
            while not stop.is_set():
                try:
                    done.put(self._answer(*todo.get_nowait(), stop))
                except Empty:
                    return
                except BaseException as error:  # raised again where the answers are awaited
                    stop.set()  # by then the next question must not be on its way
                    done.put(error)

        # daemons, unlike a pool's: a job that is interrupted must not wait for a reply that may never come
        for _ in range(min(self.settings.concurrency, len(questions))):
            Thread(target=work, daemon=True).start()
        for _ in questions:
            result = done.get()
            if isinstance(result, BaseException):
                raise result
            yield result

    def _answer(self, index: int, question: Question, stop: Event) -> tuple[Answer, bool]:
        """One question's answer, and whether any attempt reached the server."""
        try:
            chat = messages(question, self.settings.read)
        except Unreadable as problem:
            return Answer(error=str(problem), index=index), True
        return self._until_answered(form(question.kind, self.settings.read), chat, index, stop)

    def _until_answered(
        self, asked: Form, chat: list[dict[str, str]], index: int, stop: Event
    ) -> tuple[Answer, bool]:
        endpoint, max_tokens, reached = self._endpoint, asked.max_tokens, False
        answer = Answer(error="interrupted before it was sent", index=index)
        for attempt in range(ATTEMPTS):
            if endpoint is None or stop.is_set():
                break
            reply = endpoint.complete(self.facts["model"], asked, chat, max_tokens, stop)
            reached = reached or reply.reached
            # the tokens of replies that could not be used were paid too
            answer = replace(
                read_reply(asked, reply),
                index=index,
                prompt_tokens=answer.prompt_tokens + reply.prompt_tokens,
                completion_tokens=answer.completion_tokens + reply.completion_tokens,
            )
            if answer.error is None or not reply.retry or attempt == ATTEMPTS - 1:
                break
            if reply.finish == "length":
                max_tokens *= 2
            if (reply.wait or 0) > LONGEST_WAIT:
                return replace(answer, error=f"{answer.error}; told to wait {reply.wait:.0f} s"), reached
            # spread by number, so that questions refused together do not come back together
            backoff = FIRST_WAIT * 2**attempt * (1 + index * 0.618 % 1) / 2
            stop.wait(min(LONGEST_WAIT, backoff) if reply.wait is None else reply.wait)
        return answer, reached

    def _disobedient(self, asked: Form, answer: Answer) -> str:
        """What to do about a server that does not keep to schema or choice."""
        told = f"{self.facts['model']} at {self.settings.base_url} was told how to reply and did not: {answer.error}"
        if answer.raw:
            told += f" (it said {answer.raw[:60]!r})"
        if asked.schema is None:
            need = "--read expected needs vllm's structured_outputs with log-probabilities"
            return f"{told}. {need}: serve the model with vllm, or use --read answer"
        return f"{told}. Structured output must be on: {self._start()}"

    def _gone(self, why: str | None) -> str:
        return (
            f"the judge at {self.settings.base_url} no longer answers ({why}): start it again and repeat this command; "
            "what it answered so far is kept with --cache"
        )

    def _start(self) -> str:
        """The command that starts a judge where this one was looked for."""
        model, port = self.settings.judge_model or "MODEL", urlsplit(self.settings.base_url).port or 8000
        config = '{"backend":"guidance","disable_any_whitespace":true}'
        return f"start one with: vllm serve {model} --port {port} --structured-outputs-config '{config}'"


def make(settings: JudgeSettings) -> Server:
    """A client for ``settings.base_url``; nothing is sent before `check` or `ask`."""
    return Server(settings)
