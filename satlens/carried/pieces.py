"""Long measurements made of many models: each model's rows are kept as they come, so that nothing computed is lost."""

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from satlens.errors import SatlensError
from satlens.log import say
from satlens.run import plain

Rows = dict[str, list[dict[str, Any]]]
"""Table -> its rows, as one model gave them."""
EDITION = 2
"""Raised when the same identity would give other rows than before, so that those of older code are not taken."""
FAILURES = (
    SatlensError,
    SafetensorError,
    RuntimeError,
    ValueError,
    OSError,
    NotImplementedError,
    MemoryError,
)
"""What a model can fail with that is no reason to give up the others: it cannot be opened, run, or held."""


def piece(folder: Path, identity: Mapping[str, Any], compute: Callable[[], Rows]) -> tuple[Rows, bool]:
    """The rows of one model, and whether they were there already from a command that was interrupted.

    ``identity`` is all that the rows depend on: weights, documents, settings. Another identity is another piece.
    """
    text = json.dumps(plain({"edition": EDITION, **identity}), sort_keys=True, allow_nan=False)
    path = folder / f"{hashlib.sha256(text.encode()).hexdigest()[:24]}.json"
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if found["identity"] == json.loads(text):
            return dict(found["rows"]), True
    except (OSError, ValueError, KeyError):
        pass  # not there, or cut short by a crash: compute it
    rows = plain(compute())
    folder.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.part")
    part.write_text(
        json.dumps({"identity": json.loads(text), "rows": rows}, allow_nan=False), encoding="utf-8"
    )
    part.replace(path)
    return rows, False


def attempt(name: str, measure: Callable[[], Rows]) -> tuple[Rows, str]:
    """``measure()`` with an empty reason, or no rows and the reason it failed with."""
    try:
        return measure(), ""
    except FAILURES as error:
        reason = (" ".join(str(error).split()) or type(error).__name__)[:300]
        say(f"{name}: failed: {reason}")
        return {}, reason
