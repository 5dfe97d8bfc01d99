"""The resumable state of a training run: weights, optimizer moments, position and RNG, safetensors and JSON only."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from satlens.errors import UserError

_FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)


def latest_state(folder: Path) -> Path | None:
    """The newest whole state below ``folder``, or None. A state is whole once its folder has its final name."""
    states = sorted(p for p in folder.glob("state-*") if p.is_dir() and not p.name.endswith(".part"))
    return states[-1] if states else None


def save_state(folder: Path, model: Any, optimizer: Any, progress: dict[str, Any], is_main: bool) -> None:
    """Write ``state-<step>`` by rename, then drop older ones. Collective: every process calls it (FSDP gathers)."""
    weights = get_model_state_dict(model, options=_FULL)
    moments = get_optimizer_state_dict(model, optimizer, options=_FULL)
    if not is_main:
        return
    name = f"state-{progress['step']:08d}"
    part = folder / f"{name}.part"
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    save_file(_unshared(weights), part / "weights.safetensors")
    flat = {f"{p}/{k}": torch.as_tensor(v) for p, slots in moments["state"].items() for k, v in slots.items()}
    save_file(_unshared(flat), part / "moments.safetensors")
    save_file({"torch": torch.get_rng_state()}, part / "rng.safetensors")
    groups = [{k: v for k, v in g.items() if _plain(v)} for g in moments["param_groups"]]
    (part / "progress.json").write_text(json.dumps({**progress, "param_groups": groups}, indent=1))
    _sync(part)
    os.replace(part, folder / name)
    for old in folder.glob("state-*"):
        if old.name != name:
            shutil.rmtree(old)


def load_state(path: Path, model: Any, optimizer: Any, recipe: dict[str, Any]) -> dict[str, Any]:
    """Restore ``model``, ``optimizer`` and RNG in place; returns the progress that was saved.

    Raises:
        UserError: the state was made by another recipe (the differences are listed).
    """
    progress = json.loads((path / "progress.json").read_text())
    if differences := [
        f"{key}: was {progress['recipe'].get(key)}, now {recipe.get(key)}"
        for key in sorted({*recipe, *progress["recipe"]})
        if progress["recipe"].get(key) != recipe.get(key)
    ]:
        raise UserError(f"{path} belongs to another recipe ({'; '.join(differences)}); use another --out")
    set_model_state_dict(model, _with_tied(load_file(path / "weights.safetensors"), model), options=_FULL)
    state: dict[str, dict[str, Any]] = {}
    for key, value in load_file(path / "moments.safetensors").items():
        parameter, slot = key.rsplit("/", 1)
        state.setdefault(parameter, {})[slot] = value
    groups = progress.pop("param_groups")
    set_optimizer_state_dict(model, optimizer, {"state": state, "param_groups": groups}, options=_FULL)
    torch.set_rng_state(load_file(path / "rng.safetensors")["torch"])
    return progress


def _unshared(tensors: dict[str, Any]) -> dict[str, Any]:
    """One name per storage: a tied head is the embedding, and is written once."""
    seen: set[int] = set()
    kept = {}
    for name, tensor in tensors.items():
        address = tensor.data_ptr()
        if tensor.numel() > 1 and address in seen:
            continue
        seen.add(address)
        kept[name] = tensor.detach().clone().contiguous()
    return kept


def _with_tied(weights: dict[str, Any], model: Any) -> dict[str, Any]:
    """Give a tied head its name back."""
    own = get_model_state_dict(model, options=StateDictOptions())
    for name in own:
        if name not in weights and name.endswith("lm_head.weight"):
            weights[name] = weights[name.replace("lm_head.weight", "model.embeddings.weight")]
    return weights


def _plain(value: Any) -> bool:
    return value is None or isinstance(value, bool | int | float | str | list | tuple)


def _sync(folder: Path) -> None:
    """Push the files to disk before the rename makes them the truth."""
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
