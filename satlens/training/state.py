"""The resumable state of a training run: weights, optimizer moments, position and RNG, safetensors and JSON only."""

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from satlens.errors import SatlensError, UserError

HEAD, EMBEDDING = "lm_head.weight", "model.embeddings.weight"
_FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)


def latest_state(folder: Path) -> Path | None:
    """The newest whole state below ``folder``, or None. A state is whole once its folder has its final name."""
    states = sorted(p for p in folder.glob("state-*") if re.fullmatch(r"state-\d{8}", p.name) and p.is_dir())
    return states[-1] if states else None


def drop_unfinished(folder: Path) -> None:
    """Remove what a crash left half written."""
    for part in folder.glob("state-*.part"):
        shutil.rmtree(part)


def full_weights(model: Any) -> dict[str, Tensor]:
    """All weights on the CPU, unwrapped names. Collective: under FSDP every process calls it, the first gets all."""
    return dict[str, Any](get_model_state_dict(model, options=_FULL))


def save_state(folder: Path, model: Any, optimizer: Any, progress: dict[str, Any], is_main: bool) -> None:
    """Write ``state-<step>`` by rename, then drop older ones. Collective: every process calls it (FSDP gathers).

    The first process's RNG stands for all: each was seeded alike, and nothing is drawn after the weights.

    Raises:
        SatlensError: the disk is full or fails; the state before this one is untouched.
    """
    weights = full_weights(model)
    moments = get_optimizer_state_dict(model, optimizer, options=_FULL)
    if not is_main:
        return
    name = f"state-{progress['step']:08d}"
    part = folder / f"{name}.part"
    try:
        _write(part, weights, moments, progress)
        part.replace(folder / name)
        _sync(folder)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(part, ignore_errors=True)
        kept = latest_state(folder)
        words = f"resumes from {kept}" if kept else "starts over"
        raise SatlensError(
            f"{name} could not be written ({error}): make room; the run then {words}"
        ) from error
    for old in folder.glob("state-*"):
        if old.name != name:
            shutil.rmtree(old)


def _write(part: Path, weights: dict[str, Tensor], moments: dict[str, Any], progress: dict[str, Any]) -> None:
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    flat = {f"{p}/{k}": torch.as_tensor(v) for p, slots in moments["state"].items() for k, v in slots.items()}
    for name, tensors in (("weights", _without_tied(weights)), ("moments", flat)):
        owned = {key: tensor.detach().clone().contiguous() for key, tensor in tensors.items()}
        save_file(owned, part / f"{name}.safetensors")
    save_file({"torch": torch.get_rng_state()}, part / "rng.safetensors")
    groups = [{k: v for k, v in g.items() if _plain(v)} for g in moments["param_groups"]]
    (part / "progress.json").write_text(json.dumps({**progress, "param_groups": groups}, indent=1))
    for path in [*part.iterdir(), part]:
        _sync(path)


def load_state(path: Path, model: Any, optimizer: Any, recipe: dict[str, Any]) -> dict[str, Any]:
    """Restore ``model``, ``optimizer`` and RNG in place; returns the progress that was saved.

    Raises:
        UserError: the state was made by another recipe or from other data (the differences are listed), or is damaged.
    """
    try:
        progress: dict[str, Any] = json.loads((path / "progress.json").read_text())
        weights, moments, rng = (load_file(path / f"{n}.safetensors") for n in ("weights", "moments", "rng"))
    except (OSError, ValueError, SafetensorError) as error:
        raise UserError(f"{path} is damaged ({error}): delete it to start over") from error
    if differences := [
        f"{key}: was {progress['recipe'].get(key)}, now {recipe.get(key)}"
        for key in sorted({*recipe, *progress["recipe"]})
        if progress["recipe"].get(key) != recipe.get(key)
    ]:
        raise UserError(f"{path} belongs to another recipe ({'; '.join(differences)}); use another --out")
    set_model_state_dict(model, _with_tied(weights, model), options=_FULL)
    state: dict[str, Any] = {}
    for key, value in moments.items():
        parameter, slot = key.rsplit("/", 1)
        state.setdefault(parameter, {})[slot] = value
    groups = progress.pop("param_groups")
    set_optimizer_state_dict(model, optimizer, {"state": state, "param_groups": groups}, options=_FULL)
    torch.set_rng_state(rng["torch"])
    return progress


def _without_tied(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """All weights but a head that equals the embedding: ``_with_tied`` gives it back, whether it was tied or not.

    Values decide, not addresses: a gathered copy of a tied head (FSDP) has memory of its own.
    """
    return {
        name: tensor
        for name, tensor in weights.items()
        if not name.endswith(HEAD) or not torch.equal(tensor, weights[name.replace(HEAD, EMBEDDING)])
    }


def _with_tied(weights: dict[str, Any], model: Any) -> dict[str, Any]:
    """Give a head that was left out its name back."""
    own = get_model_state_dict(model, options=StateDictOptions())
    for name in own:
        if name not in weights and name.endswith(HEAD):
            weights[name] = weights[name.replace(HEAD, EMBEDDING)]
    return weights


def _plain(value: Any) -> bool:
    return value is None or isinstance(value, bool | int | float | str | list | tuple)


def _sync(path: Path) -> None:
    """Push a file or folder to disk, before a rename makes it the truth and before older states are dropped."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
