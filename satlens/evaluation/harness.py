"""lm-evaluation-harness with our models as its back end: the only file that knows its API (0.4.13).

What a model reads is fixed here. Nothing is put before a text unless the checkpoint was trained with BOS: the first
context token is the text's own first token. Where a text has no context (WikiText), its first token is predicted
from EOS, which stood before every document in training. What is too long for the context loses its beginning.
"""

import functools
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from satlens.errors import SatlensError, UserError
from satlens.evaluation import cloze
from satlens.evaluation.data import Documents, unavailable
from satlens.evaluation.tasks import Task

SPLIT = "validation"


def require_harness() -> None:
    """Say in one line that the harness is missing, before anything is opened.

    Raises:
        UserError: it is not installed, or too old.
    """
    import importlib.util

    if importlib.util.find_spec("lm_eval") is None:
        raise UserError("lm-evaluation-harness is not installed: pip install 'satlens[eval]'")
    from lm_eval.tasks import TaskManager

    if not hasattr(TaskManager, "load"):
        raise UserError(
            "this lm-evaluation-harness is too old: pip install 'satlens[eval]' (0.4.13 or later)"
        )
    logging.getLogger("lm_eval").setLevel(logging.ERROR)  # it warns of what is meant here


@functools.cache
def _backend_class() -> type:
    from lm_eval.models.huggingface import HFLM

    class Backend(HFLM):
        """The harness's HuggingFace model, which counts the inputs that it cuts."""

        add_bos_token: bool
        n_cut = 0
        quiet = not sys.stderr.isatty()

        def loglikelihood(self, requests: Any, **_: Any) -> Any:
            return super().loglikelihood(requests, disable_tqdm=self.quiet)

        def generate_until(self, requests: Any, **_: Any) -> Any:
            return super().generate_until(requests, disable_tqdm=self.quiet)

        def loglikelihood_rolling(self, requests: Any, **_: Any) -> Any:
            bos, self.add_bos_token = self.add_bos_token, False  # the prefix token stands there already
            try:
                return super().loglikelihood_rolling(requests, disable_tqdm=self.quiet)
            finally:
                self.add_bos_token = bos

        def _loglikelihood_tokens(self, requests: Any, **options: Any) -> Any:
            self.n_cut += sum(len(a) + len(b) > self.max_length + 1 for _, a, b in requests)
            return super()._loglikelihood_tokens(requests, **{**options, "disable_tqdm": self.quiet})

        def tok_batch_encode(self, strings: Any, left_truncate_len: int | None = None, **options: Any) -> Any:
            ids, mask = super().tok_batch_encode(strings, **options)
            if left_truncate_len is None:
                return ids, mask
            self.n_cut += int((mask.sum(1) > left_truncate_len).sum())
            return ids[:, -left_truncate_len:], mask[:, -left_truncate_len:]

    return Backend


def backend(model: Any, tokenizer: Any, layout: dict[str, Any], window: int, batch_size: int) -> Any:
    """A model in memory as the harness sees it: its texts begin as ``layout`` says, and ``window`` is its context.

    Raises:
        UserError: the checkpoint wants BOS before a text, but its tokenizer puts none there.
    """
    prefix = tokenizer.bos_token_id if layout["bos"] else tokenizer.eos_token_id
    lm = _backend_class()(
        pretrained=model,
        tokenizer=tokenizer,
        backend="causal",
        max_length=window,
        batch_size=batch_size,
        add_bos_token=bool(layout["bos"]),
        prefix_token_id=prefix,
        softmax_dtype="float32",
    )
    if layout["bos"] and lm.tok_encode("a")[:1] != [tokenizer.bos_token_id]:
        raise UserError(
            "this model was trained with BOS before every text, but its tokenizer puts none there: "
            "set add_bos_token in tokenizer_config.json"
        )
    return lm


def build(task: Task, documents: Documents | None, tokenizer: Any, window: int) -> Any:
    """The harness's task over these documents, or over the hub's where there are none.

    Raises:
        Unavailable: the data set cannot be fetched.
        UserError: a document that cannot be asked with this window.
    """
    try:
        if task.cloze:
            assert documents is not None
            return _cloze_task(task, documents, tokenizer, window)
        return _defined_task(task, documents)
    except UserError:
        raise
    except Exception as error:
        if documents is None:  # the library raises whatever its many back ends raise
            raise unavailable(task, error) from error
        reason = " ".join(str(error).split())
        raise UserError(
            f"{task.name}: the local copy does not fit the task ({type(error).__name__}: {reason})"
        ) from error


def _defined_task(task: Task, documents: Documents | None) -> Any:
    """The harness's own definition, its data replaced where a local copy is given."""
    import lm_eval.tasks
    from lm_eval.tasks import TaskManager

    assert task.definition is not None
    folder, name = task.definition.split("/")
    changes: dict[str, Any] = {"task": name, "num_fewshot": 0}
    if documents is not None:
        changes |= {
            "custom_dataset": _dataset(documents),
            "training_split": None,
            "validation_split": SPLIT,
            "test_split": None,
        }
    where = Path(lm_eval.tasks.__file__).parent / folder
    manager = TaskManager(include_defaults=False, include_path=str(where))
    loaded = manager.load({"group": task.name, "task": [changes]})
    return loaded["tasks"][name]


def _cloze_task(task: Task, documents: Documents, tokenizer: Any, window: int) -> Any:
    """The protocol of ``cloze`` as a task of the harness."""
    from lm_eval.api.task import ConfigurableTask

    items = [cloze.fit(item, tokenizer, window) for item in cloze.items_of(documents)]
    asked = [{"prompt": i.prompt, "answers": list(i.answers), "number": i.number} for i in items]
    return ConfigurableTask(
        config={
            "task": task.name,
            "custom_dataset": _dataset(asked),
            "validation_split": SPLIT,
            "output_type": "generate_until",
            "num_fewshot": 0,
            "doc_to_text": _prompt,
            "doc_to_target": _first_answer,
            "generation_kwargs": {"until": ["\n"], "max_gen_toks": cloze.GENERATED, "do_sample": False},
            "process_results": _contains,
            "metric_list": [{"metric": "contains", "aggregation": "mean", "higher_is_better": True}],
            "metadata": {"version": 1},
        }
    )


def _prompt(document: dict[str, Any]) -> str:
    return str(document["prompt"])


def _first_answer(document: dict[str, Any]) -> str:
    return str(document["answers"][0])


def _contains(document: dict[str, Any], results: list[str]) -> dict[str, int]:
    return {"contains": cloze.contains(results[0], document["answers"])}


def _dataset(documents: Documents) -> Callable[..., dict[str, Any]]:
    from datasets import Dataset

    made = {SPLIT: Dataset.from_list(documents)}
    return lambda **_: made


def check_lengths(built: Any, lm: Any, limit: int | None) -> None:
    """Look for an answer that fills the context alone: cut from the left, nothing would be left to answer to.

    Raises:
        UserError: there is one; its document and length are named.
    """
    built.build_all_requests(limit=limit, rank=0, world_size=1)
    for instance in built.instances:
        if instance.request_type != "loglikelihood":
            continue
        answer = instance.args[1]
        if len(answer.encode()) < lm.max_length:
            continue  # no tokenizer makes more tokens than bytes
        length = len(lm.tok_encode(answer, add_special_tokens=False))
        if length > lm.max_length:
            raise UserError(
                f"{built.config.task}, document {instance.doc_id + 1}: its answer of {length} tokens is longer "
                f"than the model's context of {lm.max_length}"
            )


def answer(built: Any, lm: Any, limit: int | None) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """``(the harness's numbers by metric, its record of every document)``.

    Raises:
        SatlensError: the harness fails.
    """
    import torch
    from lm_eval.evaluator import evaluate

    from satlens.metrics import onednn_linears

    name = built.config.task
    try:
        with torch.no_grad(), onednn_linears(lm.model):
            # no bootstrap: standard errors and intervals are made from the documents' scores
            found = evaluate(lm=lm, task_dict={"tasks": {name: built}}, limit=limit, bootstrap_iters=0)
    except (ValueError, AssertionError, KeyError) as error:
        raise SatlensError(
            f"lm-evaluation-harness failed on {name}: {type(error).__name__}: {error}"
        ) from error
    numbers = {
        key.split(",")[0]: float(value)
        for key, value in found["results"][name].items()
        if "," in key and "_stderr" not in key
    }
    return numbers, found["samples"][name]
