"""What a training run says while it runs: a JSON line per event, and a bar for the person at the terminal."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from satlens.log import progress


class Journal:
    """Appends one JSON line per event; lines after the resumed step are dropped, so the log tells one history."""

    def __init__(self, path: Path, step: int, is_main: bool) -> None:
        self.path, self.is_main = path, is_main
        if is_main:
            lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
            kept = [line for line in lines if _step_of(line) <= step]
            part = path.with_name(path.name + ".part")
            part.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")
            part.replace(path)

    def write(self, **fields: Any) -> None:
        """Append one line (main process only)."""
        if self.is_main:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(fields, allow_nan=False) + "\n")


def _step_of(line: str) -> float:
    """The step of a line; a line cut short by a crash belongs to no step that was kept."""
    try:
        return float(json.loads(line)["step"])
    except ValueError:
        return float("inf")


@contextmanager
def progress_bar(total: int, done: int, disable: bool) -> Iterator[Callable[[int, str], None]]:
    """A bar with ETA on stderr; yields ``move(done steps, words)``."""
    with progress(disable=disable) as bar:
        task = bar.add_task("train", total=total, completed=done)
        yield lambda now, words: bar.update(task, completed=now, description=words)
