"""What every measurement reads: a model behind a bridge, its tokenizer, and text laid out the way it was trained."""

import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from satlens import reference
from satlens.errors import UserError
from satlens.log import progress, say
from satlens.run import Run, start_run


@dataclass(frozen=True, kw_only=True)
class Reading:
    """Text, layout and machine settings that all measuring verbs share."""

    text: Path | None = None
    """Text to measure on: a .bin token file, a data build, or txt/jsonl/parquet; left out, the shipped text."""
    tokens: int = 100_000
    """Text tokens to use, in whole documents from the start; 0 means all."""
    window: int | None = None
    """Tokens in a row; left out, the model's training context."""
    layout: Literal["stream", "document"] | None = None
    """How documents become rows; left out, the way the model was trained."""
    batch_size: int = 8
    """Rows at once: changes speed and memory, never an answer."""
    device: str = "cpu"
    """Where the model runs: cpu, cuda, cuda:1, mps."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Precision of the model; differences need float32."""
    seed: int = 0
    """Decides resampling, of gates and of documents."""
    resamples: int = 1000
    """Bootstrap resamples behind each 95 % interval."""
    runs: Path = Path("runs")
    """Folder that finished runs go to."""

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise UserError(f"batch size must be at least 1, got {self.batch_size}")
        if self.resamples < 100:
            raise UserError(f"an interval from {self.resamples} resamples would be noise; use at least 100")


@dataclass(frozen=True, kw_only=True)
class Subject:
    """An opened model and what came with it."""

    name: str
    path: Path
    bridge: Any
    sites: Any
    tokenizer: Any
    layout: Any
    window: int
    facts: dict[str, Any]
    """For manifests: architecture, digest, parameters, layout."""

    def batches(self, corpus: Any, batch_size: int) -> Iterator[Any]:
        """The corpus as this model reads it (this process's share of the rows)."""
        from satlens.tokens import batches

        rank, world = process_place()
        special = {"bos": self.tokenizer.bos_token_id, "eos": self.tokenizer.eos_token_id}
        return batches(corpus, self.layout, self.window, batch_size, rank=rank, world=world, **special)


def open_subject(model: str, reading: Reading) -> Subject:
    """Open a model by shipped name or path, with its tokenizer and the layout its checkpoint asks for.

    Raises:
        UserError: the checkpoint or tokenizer cannot be used, or the device is not there.
    """
    import torch

    from satlens.checkpoint import load_bridge, load_tokenizer, model_facts
    from satlens.tokens import Layout

    start_processes()
    path = reference.resolve(model)
    facts = model_facts(path)
    try:
        bridge, sites = load_bridge(path, dtype=getattr(torch, reading.dtype), device=reading.device)
    except (AssertionError, RuntimeError) as error:
        if reading.device != "cpu" and ("CUDA" in str(error) or "device" in str(error)):
            raise UserError(f"cannot use device {reading.device}: {str(error).splitlines()[0]}") from error
        raise
    trained = facts["layout"]
    kind = reading.layout or trained["kind"]
    layout = Layout(kind=kind, bos=trained["bos"], eos=trained["eos"])
    window = reading.window or sites.n_ctx
    if window > sites.n_ctx:
        say(f"note: rows of {window} tokens are longer than the {sites.n_ctx} this model was trained on")
    tokenizer = load_tokenizer(path)
    if len(tokenizer) > sites.d_vocab:
        raise UserError(f"{model}: the tokenizer has {len(tokenizer)} ids, the model only {sites.d_vocab}")
    name = reference.title(model)
    used = {"layout_used": {**vars(layout), "window": window}, "precision": reading.dtype}
    return Subject(
        name=name,
        path=path,
        bridge=bridge,
        sites=sites,
        tokenizer=tokenizer,
        layout=layout,
        window=window,
        facts={"name": name, **facts, **used},
    )


def require_same_text(first: Subject, second: Subject) -> None:
    """Two models can be compared only on the same tokens.

    Raises:
        UserError: their tokenizers or vocabularies differ.
    """
    if first.sites.d_vocab != second.sites.d_vocab:
        raise UserError(
            f"{first.name} has {first.sites.d_vocab} token ids and {second.name} {second.sites.d_vocab}: "
            "per-token numbers of different vocabularies cannot be compared"
        )
    if first.tokenizer.get_vocab() != second.tokenizer.get_vocab():
        raise UserError(
            f"the tokenizers of {first.name} and {second.name} differ: they would read other tokens"
        )
    if (first.layout, first.window) != (second.layout, second.window):
        raise UserError(
            f"{first.name} and {second.name} read text in different layouts ({first.layout}, {first.window} and "
            f"{second.layout}, {second.window}): give --layout and --window to set one for both"
        )


def open_text(subject: Subject, reading: Reading) -> Any:
    """The documents to measure on, limited to ``reading.tokens``.

    Raises:
        UserError: no text, or text of another tokenizer.
    """
    from satlens.tokens import open_corpus

    path = reading.text or reference.TEXT
    if reading.text is None and not path.exists():
        raise UserError("the shipped held-out text is not in this installation: give --text")
    corpus = open_corpus(path, subject.tokenizer)
    if corpus.n_empty:
        say(f"note: {corpus.n_empty} empty documents left out")
    return corpus.first_tokens(reading.tokens) if reading.tokens else corpus


def begin_run(verb: str, config: Any, reading: Reading) -> Run | None:
    """The run that this command will write, started before the measuring so that its times are true.

    None in the helper processes of a launch: only the first writes.
    """
    if process_place()[0]:
        return None
    run = start_run(reading.runs, verb, config, sys.argv[1:])
    run.log("started")
    return run


def data_facts(subject: Subject, corpus: Any, reading: Reading) -> dict[str, Any]:
    """For manifests: what was read, as a digest, counts, and the first ids exactly as the model saw them."""
    first = next(iter(subject.batches(corpus, 1)))
    return {
        "text": (reading.text or reference.TEXT).name,
        "digest": corpus.digest(),
        "n_documents": corpus.n_documents,
        "n_tokens": corpus.n_tokens,
        "n_empty": corpus.n_empty,
        "layout": vars(subject.layout),
        "window": subject.window,
        "first_ids": first.input_ids[0, :16].tolist(),
    }


def measure(
    subject: Subject,
    corpus: Any,
    conditions: list[Any],
    reading: Reading,
    words: str,
    stop: Callable[[], bool] | None = None,
) -> None:
    """Stream ``corpus`` through ``conditions`` with a progress bar, then make the sums those of all processes.

    ``stop`` is asked after every batch and ends the pass early when true.
    """
    from satlens.stream import gather, stream
    from satlens.tokens import count_rows

    rank, world = process_place()
    total = -(-count_rows(corpus, subject.layout, subject.window) // world)
    with progress(disable=rank != 0) as bar:
        task = bar.add_task(words, total=total)

        def on_batch(batch: Any) -> bool:
            bar.update(task, advance=len(batch.row))
            return not (stop is not None and stop())

        rows = subject.batches(corpus, reading.batch_size)
        stream(subject.bridge, subject.sites, rows, conditions, on_batch)
    for condition in conditions:
        condition.accumulators = tuple(gather(accumulator) for accumulator in condition.accumulators)


def process_place() -> tuple[int, int]:
    """``(rank, world)`` of this process; ``(0, 1)`` unless started by torchrun or accelerate launch."""
    return int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


def start_processes() -> None:
    """Join the other processes of a launch, once."""
    import torch

    if process_place()[1] > 1 and not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo")
