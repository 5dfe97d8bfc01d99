"""All models in turn, round after round, each in a fresh process; ratios to the first are taken within a round."""

import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pandas as pd

from satlens.efficiency.child import Job, as_text
from satlens.errors import SatlensError

Found = dict[str, Any]


def alternate(
    jobs: Mapping[str, Job], rounds: int, on_job: Callable[[str], None] = lambda name: None
) -> dict[str, list[Found]]:
    """What every model's process answered, by round. One that does not fit is not tried again."""
    found: dict[str, list[Found]] = {name: [] for name in jobs}
    for _ in range(rounds):
        for name, job in jobs.items():
            if not any("failed" in answer for answer in found[name]):
                found[name].append(run_child(name, job))
            on_job(name)
    return found


def run_child(name: str, job: Job) -> Found:
    """One process, its answer.

    Raises:
        SatlensError: it broke for another reason than memory; its last line says which.
    """
    command = [sys.executable, "-m", "satlens.efficiency.child", as_text(job)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode == -9:  # the system's answer to a process that takes all memory
        return {"failed": f"a batch of {job.batch_size} x {job.seq_length} does not fit in memory"}
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise SatlensError(f"{name} could not be timed: {last}")
    answer: Found = json.loads(done.stdout.strip().splitlines()[-1])
    return answer


def table(found: Mapping[str, Sequence[Found]], jobs: Mapping[str, Job], clock: str) -> pd.DataFrame:
    """One row a model: medians over rounds, and the median, lowest and highest of its ratios to the first model's.

    ``clock`` is ``seconds`` (wall) or ``cpu_seconds``, which a busy machine disturbs less.
    """
    base = next(iter(found))
    rows = []
    for name, answers in found.items():
        good = [answer for answer in answers if "failed" not in answer]
        if not good:
            rows.append({"model": name, "status": "failed", "reason": answers[0]["failed"]})
            continue
        seconds = statistics.median(answer[clock] for answer in good)
        tokens = jobs[name].batch_size * jobs[name].seq_length
        row = {
            "model": name,
            "status": "measured",
            "reason": "",
            "parameters": good[0]["parameters"],
            "seconds": seconds,
            "tokens_per_second": tokens / seconds,
            "peak_mib": statistics.median(answer["peak_mib"] for answer in good),
            "rounds": len(good),
        }
        if "saved_mib" in good[0]:
            row["saved_mib"] = good[0]["saved_mib"]
        for word, key in (("time", clock), ("memory", "peak_mib"), ("saved", "saved_mib")):
            pairs = zip(good, found[base], strict=False)
            ratios = [a[key] / b[key] for a, b in pairs if key in a and b.get(key)]
            if ratios:
                ends = {f"{word}_low": min(ratios), f"{word}_high": max(ratios)}
                row |= {f"{word}_ratio": statistics.median(ratios), **ends}
        rows.append(row)
    return pd.DataFrame(rows)
