"""Words and progress for the person at the terminal: stderr only, so that stdout stays data."""

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress


def say(words: str) -> None:
    """One line on stderr."""
    print(words, file=sys.stderr, flush=True)


def progress(disable: bool = False) -> "Progress":
    """A progress display with rate and time left; where stderr is not a terminal it draws nothing."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    console = Console(stderr=True)
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        console=console,
        disable=disable or not console.is_terminal,
    )
