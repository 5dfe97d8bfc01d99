"""One request to an OpenAI-compatible endpoint, and what came of it: a reply, a refusal, or nothing."""

import os
import time
from email.utils import parsedate_to_datetime
from threading import Event
from typing import Any

from sae.prompting import DIGITS, TOP_LOGPROBS, Form, Reply, response_format
from satlens.errors import UserError

KEY = "OPENAI_API_KEY"
"""Environment variable that a key is read from; vllm needs none unless started with one."""
CONNECT = 10.0
"""Seconds to wait for a connection: a host that is not there must not take as long as a slow reply."""
AGAIN = (408, 409, 425, 429)
"""Statuses below 500 that are worth another attempt."""


class Endpoint:
    """A connection to one address and to no other: no proxy, no redirect. Its key is in no message or fact."""

    def __init__(self, base_url: str, timeout: float, connections: int) -> None:
        try:
            import openai
        except ImportError as error:
            raise UserError(
                "--judge server needs the openai client: pip install 'satlens[judge]' (or: pip install openai)"
            ) from error
        self._openai = openai
        limits = {"max_connections": connections, "max_keepalive_connections": connections}
        http = openai.DefaultHttpxClient(
            trust_env=False,
            follow_redirects=False,
            limits=type(openai.DEFAULT_CONNECTION_LIMITS)(**limits),
        )
        self._client: Any = openai.OpenAI(
            base_url=base_url,
            api_key=os.environ.get(KEY) or "none",
            max_retries=0,
            timeout=openai.Timeout(timeout, connect=min(CONNECT, timeout)),
            http_client=http,
        )
        self._quiet_until = 0.0

    def models(self) -> dict[str, str | None]:
        """Names it serves, each with the last part of where the weights come from, if it says so.

        Raises:
            UserError: it refuses the key.
            ConnectionError: nothing answers there.
            LookupError: what answers there lists no models.
        """
        openai = self._openai
        try:
            listed = self._client.models.list().data
            return {
                model.id: str(getattr(model, "root", "") or "").rsplit("/", 1)[-1] or None for model in listed
            }
        except openai.APIConnectionError as error:
            raise ConnectionError(_cause(error)) from error
        except openai.APIStatusError as error:
            self._refused(error)
            raise LookupError(f"HTTP {error.status_code}") from error
        except (AttributeError, TypeError, ValueError, openai.OpenAIError) as error:
            raise LookupError("its reply is no list of models") from error

    def complete(
        self, model: str, form: Form, chat: list[dict[str, str]], max_tokens: int, stop: Event
    ) -> Reply:
        """Ask once, after whatever silence the server asked for; ``stop`` ends the silence early.

        Raises:
            UserError: it refuses the key.
        """
        stop.wait(max(0.0, self._quiet_until - time.monotonic()))
        openai = self._openai
        try:
            done = self._client.chat.completions.create(
                model=model,
                messages=chat,
                temperature=0,
                max_tokens=max_tokens,
                **_constraint(form),
            )
        except openai.APITimeoutError:
            return Reply(failure="no reply in time", reached=False)
        except openai.APIConnectionError as error:
            return Reply(failure=f"no reply ({_cause(error)})", reached=False)
        except openai.APIStatusError as error:
            return self._refused(error)
        except (ValueError, openai.OpenAIError) as error:
            return Reply(failure=f"the reply cannot be read ({type(error).__name__})")
        return _reply(done)

    def close(self) -> None:
        """Close the connections, also those in use."""
        self._client.close()

    def _refused(self, error: Any) -> Reply:
        status = error.status_code
        if status in (401, 403):
            raise UserError(f"the judge refuses the key (HTTP {status}): set {KEY} to one it accepts")
        wait = _retry_after(error.response.headers.get("retry-after"))
        if wait is not None:  # for all, not only for the one that was told
            self._quiet_until = max(self._quiet_until, time.monotonic() + wait)
        said = " ".join(str(error.message).split())[:300]
        again = status in AGAIN or status >= 500
        return Reply(failure=f"HTTP {status}: {said}", retry=again, wait=wait)


def _constraint(form: Form) -> dict[str, Any]:
    """What makes the reply one of those allowed; vllm's own field where the standard one does not reach."""
    if form.schema is not None:
        return {"response_format": response_format(form)}
    return {
        "logprobs": True,
        "top_logprobs": TOP_LOGPROBS,
        "extra_body": {"structured_outputs": {"choice": list(DIGITS)}},
    }


def _reply(done: Any) -> Reply:
    """The parts of a completion; the client does not validate what a server sends, so any may be missing."""
    try:
        choice, usage = done.choices[0], done.usage
        first = choice.logprobs.content[0].top_logprobs if choice.logprobs else []
        return Reply(
            text=choice.message.content,
            finish=choice.finish_reason,
            logprobs=tuple((str(item.token), float(item.logprob)) for item in first),
            prompt_tokens=int(usage.prompt_tokens) if usage else 0,
            completion_tokens=int(usage.completion_tokens) if usage else 0,
        )
    except (AttributeError, TypeError, ValueError, IndexError):
        return Reply(failure="the reply is no chat completion")


def _retry_after(value: str | None) -> float | None:
    """Seconds named by a Retry-After header, which holds a number or a date."""
    if value is None:
        return None
    try:
        return max(0.0, float(value))
    except ValueError:
        pass
    try:
        return max(0.0, parsedate_to_datetime(value).timestamp() - time.time())
    except (TypeError, ValueError):
        return None


def _cause(error: BaseException) -> str:
    """The innermost reason of a connection that failed: the client's own words are only "Connection error."."""
    while (inner := error.__cause__ or error.__context__) is not None:
        error = inner
    return str(error) or type(error).__name__
