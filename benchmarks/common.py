"""What the benchmarks share: the model, interleaved CPU timing, peak memory of a fresh process, and one table."""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from satlens.checkpoint import load_bridge
from satlens.hf import MODELS
from satlens.tokens import Batch, Layout, batches, corpus_from_documents

SHAPE = {
    "hidden_size": 256,
    "num_hidden_layers": 8,
    "num_heads": 8,
    "intermediate_size": 512,
    "vocab_size": 8192,
}
BATCH, POS = 8, 256
MALLOC = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_")


@dataclass(frozen=True, kw_only=True)
class Row:
    """One measured claim: ``ratio`` is held against ``target``."""

    what: str
    ours: str
    other: str
    ratio: float
    spread: tuple[float, float] | None = None
    """Lowest and highest paired ratio; None for a single measurement."""
    rounds: int
    sense: Literal[">=", "<="]
    target: float
    unit: str = "x"

    @property
    def met(self) -> bool:
        """Whether the target is reached."""
        return self.ratio >= self.target if self.sense == ">=" else self.ratio <= self.target

    def cells(self) -> list[str]:
        """The row of the table."""
        spread = "" if self.spread is None else f" ({self.spread[0]:.2f} to {self.spread[1]:.2f})"
        target = f"{self.sense} {self.target:g} {self.unit}".rstrip()
        verdict = "met" if self.met else "**not met**"
        return [
            self.what,
            self.ours,
            self.other,
            f"{self.ratio:.4g}{spread}",
            target,
            str(self.rounds),
            verdict,
        ]


HEADINGS = ["what", "ours", "the other", "ratio", "target", "rounds", "met?"]


def table(rows: list[Row]) -> str:
    """The rows as a Markdown table, columns aligned."""
    lines = [HEADINGS, *(row.cells() for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(HEADINGS))]
    lines.insert(1, ["-" * width for width in widths])
    return "\n".join(
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |"
        for line in lines
    )


def build(model_type: str = "SATFormer") -> Any:
    """An untrained model of the shape of the shipped pair, its gates loud (at 0.02 they would hardly matter)."""
    torch.manual_seed(0)
    config = MODELS[model_type].config_class(**SHAPE, max_position_embeddings=512, qk_norm=True)
    model = MODELS[model_type](config).eval()
    with torch.no_grad():
        for layer in model.model.layers:
            if getattr(layer.attn, "mixes", False):
                layer.attn.value_residual_mixing.alpha_proj.weight.normal_(std=0.2)
    return model


def build_bridge(model_type: str = "SATFormer") -> tuple[Any, Any]:
    """The same model behind a bridge, with its sites."""
    return load_bridge(build(model_type))


def text(n_rows: int = BATCH, n_pos: int = POS) -> Batch:
    """One batch of random ids, one document a row."""
    rng = torch.Generator().manual_seed(0)
    ids = torch.randint(0, SHAPE["vocab_size"], (n_rows, n_pos), generator=rng).tolist()
    corpus = corpus_from_documents(ids)
    (batch,) = batches(corpus, Layout(eos=False), n_pos, n_rows)
    return batch


def interleave(runs: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """CPU seconds of every run, taken in turn so that a slow moment of the machine hits all of them alike."""
    torch.set_num_threads(1)
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for index in range(rounds + 1):
        for name, run in runs.items():
            start = time.process_time()
            run()
            if index:  # the first round warms up
                seconds[name].append(time.process_time() - start)
    return seconds


def compare(
    what: str, seconds: dict[str, list[float]], over: str, under: str, sense: Any, target: float
) -> Row:
    """``over`` divided by ``under``, as the median of the ratios of each round; "ours" is one of the two."""
    ratios = [a / b for a, b in zip(seconds[over], seconds[under], strict=True)]
    other = over if under == "ours" else under
    return Row(
        what=what,
        ours=milliseconds(seconds["ours"]),
        other=milliseconds(seconds[other]),
        ratio=statistics.median(ratios),
        spread=(min(ratios), max(ratios)),
        rounds=len(ratios),
        sense=sense,
        target=target,
    )


def milliseconds(seconds: list[float]) -> str:
    """Median, in CPU milliseconds."""
    return f"{statistics.median(seconds) * 1e3:.0f} ms CPU"


def peak_of(run: Callable[[], object], warm_up: Callable[[], object]) -> float:
    """MiB by which this process's resident memory rises at most above where it stood before ``run``.

    ``warm_up`` is the same work on a few tokens: libraries are loaded, and next to no heap is left free.
    """
    torch.set_num_threads(1)
    with torch.no_grad():
        warm_up()
        Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts again from here
        before = _status("VmRSS")
        run()
    return (_status("VmHWM") - before) / 1024


def _status(field: str) -> int:
    found = re.search(rf"^{field}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.M)
    assert found is not None
    return int(found[1])


def peak_in_subprocess(script: str, variant: str) -> float:
    """What ``script --peak variant`` measures in a process of its own, with the allocator as it comes.

    The malloc settings of the timed runs would keep freed memory resident and blur a peak.
    """
    env = {name: value for name, value in os.environ.items() if name not in MALLOC}
    done = subprocess.run(
        [sys.executable, script, "--peak", variant], env=env, check=True, capture_output=True, text=True
    )
    return float(json.loads(done.stdout.splitlines()[-1]))


def compare_peaks(what: str, script: str, other: str, rounds: int, target: float) -> Row:
    """Peak of variant ``other`` over the peak of variant ``ours``, each in fresh processes."""
    peaks = {name: [peak_in_subprocess(script, name) for _ in range(rounds)] for name in ("ours", other)}
    ratios = [a / b for a, b in zip(peaks[other], peaks["ours"], strict=True)]
    return Row(
        what=what,
        ours=f"{statistics.median(peaks['ours']):.1f} MiB",
        other=f"{statistics.median(peaks[other]):.1f} MiB",
        ratio=statistics.median(ratios),
        spread=(min(ratios), max(ratios)),
        rounds=rounds,
        sense=">=",
        target=target,
    )


def command(
    measure: Callable[[int], list[Row]], rounds: int, peaks: dict[str, Callable[[], float]] | None = None
) -> None:
    """The command line of one benchmark: its table, or with ``--peak`` one number for ``peak_in_subprocess``."""
    parser = argparse.ArgumentParser(description=sys.modules["__main__"].__doc__)
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--peak", choices=list(peaks or {}), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.peak:
        assert peaks is not None
        print(json.dumps(peaks[args.peak]()))
    else:
        print(table(measure(args.rounds)))
