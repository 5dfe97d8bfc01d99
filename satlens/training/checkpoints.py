"""What a training run left behind: its checkpoints in order of their steps, and how its model was set up."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from satlens.checkpoint_folder import read_facts, read_json
from satlens.errors import UserError

_STEP = re.compile(r"(?:.*[^0-9])?(\d+)")
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """One model of a training run."""

    run: str
    """Name of the run's folder."""
    path: Path
    step: int
    """Optimizer steps finished."""
    tokens: int | None
    """Training tokens seen; None where the run does not say."""


@dataclass(frozen=True, kw_only=True)
class TrainingRun:
    """A run's checkpoints, ascending, and what tells its arm from others."""

    name: str
    checkpoints: tuple[Checkpoint, ...]
    mlp: str
    """swiglu or gelu for our own models, the name of the nonlinearity for others."""
    attention: bool
    """False when attention was disabled (its output projection zero and frozen)."""
    seed: int | None
    """Seed of weights and data order, where the run says so."""
    tokenizer: Path | None
    """A folder with the run's tokenizer, if the run has one."""


def read_run(folder: Path) -> TrainingRun:
    """A run of `satlens train`, finished or not, or a folder of checkpoints whose names end in their steps.

    Raises:
        UserError: no checkpoint there.
    """
    ours = folder / "snapshots"
    found = _numbered(ours if ours.is_dir() else folder)
    if not found:
        raise UserError(
            f"no checkpoints in {folder}: give the folder of a training run (with snapshots/ in it), or one of "
            "checkpoints named by their steps (step1000, checkpoint-500)"
        )
    facts = _facts(folder)
    recipe = facts.get("recipe", {})
    per_step = _tokens_per_step(recipe, facts)
    config = read_json(found[0][1] / "config.json")
    return TrainingRun(
        name=folder.resolve().name,
        checkpoints=tuple(
            Checkpoint(run=folder.resolve().name, path=path, step=step, tokens=per_step and per_step * step)
            for step, path in found
        ),
        mlp=_kind(config),
        attention=not config.get("attention_disabled", False),
        seed=recipe.get("seed"),
        tokenizer=_tokenizer(folder, [path for _, path in found]),
    )


def _numbered(folder: Path) -> list[tuple[int, Path]]:
    """``(step, folder)`` of every checkpoint; what has no config is still being written, or something else."""
    found = []
    for path in folder.iterdir() if folder.is_dir() else ():
        number = _STEP.fullmatch(path.name)
        if number and (path / "config.json").is_file() and not path.name.startswith("state-"):
            found.append((int(number[1]), path))
    return sorted(found)


def _facts(folder: Path) -> dict[str, Any]:
    """What the run's final model says of itself, or, before there is one, its newest state."""
    if (folder / "final").is_dir():
        return read_facts(folder / "final")
    states = sorted(folder.glob("state-*/progress.json"))
    return read_json(states[-1]) if states else {}


def _tokens_per_step(recipe: dict[str, Any], facts: dict[str, Any]) -> int | None:
    if not {"batch_size", "seq_length"} <= recipe.keys():
        return None
    processes = int(facts.get("processes") or recipe.get("processes") or 1)
    return int(recipe["batch_size"] * recipe["seq_length"] * recipe.get("accumulation", 1) * processes)


def _kind(config: dict[str, Any]) -> str:
    if config.get("model_type") in ("transformer", "SATFormer"):
        return str(config.get("mlp", "swiglu"))
    return str(config.get("hidden_act") or config.get("activation_function") or "unknown")


def _tokenizer(folder: Path, checkpoints: list[Path]) -> Path | None:
    places = (folder / "final", *reversed(checkpoints), folder)
    return next((place for place in places if any((place / name).is_file() for name in TOKENIZERS)), None)
