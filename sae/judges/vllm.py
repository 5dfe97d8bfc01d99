"""A judge in this process: `vllm.LLM` on a model folder, asked and read just as the server judge is."""

import hashlib
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from sae.judges import KINDS, Answer, JudgeSettings, Question
from sae.prompting import (
    DIGITS,
    TOP_LOGPROBS,
    Form,
    Reply,
    Unreadable,
    digest,
    form,
    messages,
    read_reply,
    usual_question,
)
from satlens.errors import SatlensError, UserError

COSTS = True
MAX_MODEL_LEN = 2048
"""Context that is made room for: instructions, examples, and twenty long tokens."""
BATCHES = 4
"""A call holds this many times ``concurrency`` questions: enough to keep vllm busy, few enough to lose little."""


class Vllm:
    """One model, loaded by `check` or the first question."""

    def __init__(self, settings: JudgeSettings) -> None:
        self.settings = settings
        self.facts: dict[str, Any] = {
            "judge": "vllm",
            "model": Path(settings.judge_model).name if settings.judge_model else None,
            "dtype": settings.judge_dtype,
            "read": settings.read,
            "prompts": digest(settings.read),
            "decoding": {"temperature": 0, "top_logprobs": TOP_LOGPROBS},
        }
        self._llm: Any = None

    def check(self) -> None:
        """Load the model.

        Raises:
            UserError: vllm is not installed, there is no such model, or it does not load or answer.
        """
        if self._llm is not None:
            return
        folder = Path(str(self.settings.judge_model))
        self.facts["files"] = _files_digest(folder)
        self._llm = _load(folder, self.settings)
        for answer in self._batch([usual_question(kind) for kind in KINDS]):
            if answer.error is not None:
                raise UserError(
                    f"{folder.name} does not answer: {answer.error}; --judge-model is a chat model"
                )

    def ask(
        self, questions: Sequence[Question], on_answer: Callable[[Answer], None] | None = None
    ) -> list[Answer]:
        """Some hundred questions a call; what they share is computed once (prefix caching)."""
        self.check()
        answers: list[Answer] = []
        size = BATCHES * self.settings.concurrency
        for start in range(0, len(questions), size):
            for answer in self._batch(questions[start : start + size]):
                answers.append(replace(answer, index=len(answers)))
                if on_answer is not None:
                    on_answer(answers[-1])
        return answers

    def close(self) -> None:
        """Give the memory back."""
        llm, self._llm = self._llm, None
        if llm is not None:
            engine = getattr(llm.llm_engine, "engine_core", None)
            if engine is not None and hasattr(engine, "shutdown"):
                engine.shutdown()

    def _batch(self, questions: Sequence[Question]) -> list[Answer]:
        answers: list[Answer | None] = []
        forms, conversations = [], []
        for question in questions:
            asked = form(question.kind, self.settings.read)
            try:
                chat = messages(question, self.settings.read)
            except Unreadable as problem:
                answers.append(Answer(error=str(problem)))
                continue
            answers.append(None)
            forms.append(asked)
            conversations.append(chat)
        replies = iter(
            [read_reply(*pair) for pair in zip(forms, self._chat(conversations, forms), strict=True)]
        )
        return [answer or next(replies) for answer in answers]

    def _chat(self, conversations: list[Any], forms: list[Form]) -> list[Reply]:
        """The replies; when vllm refuses the lot for one of them (too long), one by one."""
        if not conversations:
            return []
        try:
            done = self._llm.chat(conversations, [_sampling(asked) for asked in forms], use_tqdm=False)
        except ValueError as error:
            if len(conversations) == 1:
                return [Reply(failure=f"refused: {' '.join(str(error).split())[:300]}", retry=False)]
            return [self._chat([c], [f])[0] for c, f in zip(conversations, forms, strict=True)]
        except RuntimeError as error:
            raise SatlensError(
                f"vllm stopped ({error}): repeat the command, --cache keeps what was answered"
            ) from error
        return [_reply(output) for output in done]


def make(settings: JudgeSettings) -> Vllm:
    """The judge; vllm is imported and the model loaded by `check`.

    Raises:
        UserError: no model was named.
    """
    if settings.judge_model is None:
        raise UserError("--judge vllm needs --judge-model: the folder of an instruction-tuned model")
    return Vllm(settings)


def _load(folder: Path, settings: JudgeSettings) -> Any:
    # a folder is all that is read, so nothing is looked up or reported; one process, so none is left behind
    for name in ("VLLM_NO_USAGE_STATS", "DO_NOT_TRACK", "HF_HUB_OFFLINE"):
        os.environ.setdefault(name, "1")
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    try:
        from vllm import LLM
        from vllm.platforms import current_platform
    except ImportError as error:
        raise UserError(
            f"--judge vllm needs vllm in this environment ({error}): pip install 'satlens[vllm]', or serve the model "
            "from an environment of its own and use --judge server"
        ) from error
    try:
        return LLM(
            model=str(folder),
            dtype=settings.judge_dtype,
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=settings.concurrency,
            seed=0,
            enable_prefix_caching=True,
            enforce_eager=current_platform.is_cpu(),
            structured_outputs_config={"backend": "guidance", "disable_any_whitespace": True},
        )
    except (OSError, ValueError, RuntimeError) as error:
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(f"vllm does not load {folder.name}: {first}") from error


def _files_digest(folder: Path) -> str:
    """What tells one model from another of the same name: its configuration, and its files' names and sizes."""
    config = folder / "config.json"
    if not config.is_file():
        raise UserError(
            f"no model at {folder}: --judge-model is a folder with config.json, weights and tokenizer"
        )
    sizes = sorted((path.name, path.stat().st_size) for path in folder.iterdir() if path.is_file())
    return hashlib.sha256(config.read_bytes() + repr(sizes).encode()).hexdigest()


def _sampling(asked: Form) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    allowed = {"json": asked.schema} if asked.schema else {"choice": list(DIGITS)}
    return SamplingParams(
        temperature=0,
        max_tokens=asked.max_tokens,
        logprobs=None if asked.schema else TOP_LOGPROBS,
        structured_outputs=StructuredOutputsParams(**allowed),
    )


def _reply(output: Any) -> Reply:
    done = output.outputs[0]
    first = done.logprobs[0].values() if done.logprobs else ()
    return Reply(
        text=done.text,
        finish=done.finish_reason,
        logprobs=tuple((str(item.decoded_token), float(item.logprob)) for item in first),
        prompt_tokens=len(output.prompt_token_ids or ()),
        completion_tokens=len(done.token_ids),
    )
