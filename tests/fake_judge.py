"""An OpenAI-compatible endpoint in this process: the rules judge behind HTTP, which misbehaves when told to."""

import json
import math
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from sae.judges import CATEGORY, PURITY, Kind, Question, Token
from sae.judges.rules import Rules
from sae.pieces import escape

HANG, DROP = "hang", "drop"
PROBE = "Say hello."
Act = Callable[[int, dict[str, Any]], "str | tuple[int, dict[str, str], bytes] | None"]
"""``(how many questions came before, request) -> what to do``; None is a good answer. Probes are not acted on."""


@dataclass
class FakeJudge:
    """A running server; use it as a context manager."""

    act: Act = lambda n, body: None
    models: tuple[str, ...] = ("judge",)
    obeys: bool = True
    """Whether replies keep to schema and choice; else it chats."""
    delay: Callable[[int], float] = lambda n: 0.0
    requests: list[dict[str, Any]] = field(default_factory=list)
    """Bodies of all questions but probes, as they came."""
    keys: set[str] = field(default_factory=set)
    times: list[float] = field(default_factory=list)
    most_at_once: int = 0

    def __enter__(self) -> "FakeJudge":
        self._at_once, self._lock = 0, threading.Lock()
        self._released = threading.Event()
        handler = type("Handler", (_Handler,), {"fake": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1"
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Stop listening; what is under way is dropped."""
        self._released.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def respond(self, body: dict[str, Any]) -> "str | tuple[int, dict[str, str], bytes]":
        """What comes of one chat request."""
        if body["messages"][-1]["content"] == PROBE:
            return completion(body, self.reply(body))
        with self._lock:
            number = len(self.requests)
            self.requests.append(body)
            self.times.append(time.monotonic())
            self._at_once += 1
            self.most_at_once = max(self.most_at_once, self._at_once)
        try:
            time.sleep(self.delay(number))
            return self.act(number, body) or completion(body, self.reply(body))
        finally:
            with self._lock:
                self._at_once -= 1

    def reply(self, body: dict[str, Any]) -> str:
        """The rules judge's word on the tokens in the request, in the form that was asked for."""
        if not self.obeys:
            return "Hello! How can I help?"
        tokens = tuple(tokens_in(body))
        wanted = body.get("response_format", {}).get("json_schema", {}).get("name", "digit")
        (answer,) = Rules().ask([Question(kind=CATEGORY if wanted == "category" else PURITY, tokens=tokens)])
        if wanted == "category":
            return json.dumps({"category": answer.category or "Semantic Root Fragments"})
        assert answer.score is not None
        return (
            json.dumps({"score": round(answer.score)})
            if wanted == "score"
            else str(round(answer.score * 0.9))
        )


def token(text: str, piece: str | None = None, token_id: int = 0) -> Token:
    """A vocabulary entry of this text."""
    return Token(id=token_id, piece=escape(text if piece is None else piece), text=escape(text))


def question(texts: list[str], kind: Kind = PURITY) -> Question:
    """A question about tokens of these texts."""
    return Question(kind=kind, tokens=tuple(token(text, token_id=i) for i, text in enumerate(texts)))


def tokens_in(body: dict[str, Any]) -> list[Token]:
    """The tokens of the last fence in a request, parsed as JSON."""
    arrays = re.findall(r"⟦tokens⟧\n(.*)\n⟦end⟧", body["messages"][-1]["content"])
    shown = json.loads(arrays[-1]) if arrays else []
    return [token(text, token_id=i) for i, text in enumerate(shown)]


def completion(body: dict[str, Any], text: str | None, **changes: Any) -> tuple[int, dict[str, str], bytes]:
    """A chat completion with usage, and log-probabilities where they were asked for."""
    choice: dict[str, Any] = {
        "index": 0,
        "finish_reason": changes.pop("finish", "stop"),
        "message": {"role": "assistant", "content": text},
    }
    if body.get("logprobs"):
        peak = int(text) if text is not None and text.isdigit() else None
        choice["logprobs"] = {"content": [{"token": text, "logprob": 0.0, "top_logprobs": candidates(peak)}]}
    whole = {
        "id": "1",
        "object": "chat.completion",
        "created": 0,
        "model": body["model"],
        "choices": [choice],
        "usage": {"prompt_tokens": 100, "completion_tokens": 5, "total_tokens": 105},
    }
    return as_json(200, {**whole, **changes})


def candidates(peak: int | None) -> list[dict[str, Any]]:
    """Top log-probabilities: half on one digit and the rest spread; without a digit, on words."""
    if peak is None:
        return [{"token": "Hello", "logprob": -0.01}, {"token": "7", "logprob": -5.0}]
    shares = [0.5 if digit == peak else 0.5 / 9 for digit in range(10)]
    listed = [{"token": str(digit), "logprob": math.log(share)} for digit, share in enumerate(shares)]
    return [*listed, {"token": "!", "logprob": -9999.0}]


def as_json(
    status: int, body: Any, headers: dict[str, str] | None = None
) -> tuple[int, dict[str, str], bytes]:
    """A response with a JSON body."""
    return status, {"Content-Type": "application/json", **(headers or {})}, json.dumps(body).encode()


def refusal(status: int, headers: dict[str, str] | None = None, said: str = "no") -> Any:
    """An error as vllm words it."""
    return as_json(status, {"error": {"message": said, "type": "x", "code": status}}, headers)


class _Handler(BaseHTTPRequestHandler):
    fake: FakeJudge
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        """The list of models."""
        listed = [
            {"id": name, "object": "model", "root": f"/models/{name}-root"} for name in self.fake.models
        ]
        self._send(as_json(200, {"object": "list", "data": listed}))

    def do_POST(self) -> None:
        """A chat completion, or what was told to happen instead."""
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.fake.keys.add(self.headers.get("Authorization", ""))
        response = self.fake.respond(body)
        if isinstance(response, str):
            if response == HANG:
                self.fake._released.wait(10)
            self.close_connection = True
            return
        self._send(response)

    def _send(self, response: tuple[int, dict[str, str], bytes]) -> None:
        status, headers, body = response
        try:
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)
        except OSError:
            self.close_connection = True

    def log_message(self, *_: object) -> None:
        """Quiet."""
