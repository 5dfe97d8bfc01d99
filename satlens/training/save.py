"""Models as folders: the official ``final/`` layout, for the end of a run and for its log-spaced snapshots."""

import copy
import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from satlens.errors import SatlensError
from satlens.training.data import write_json
from satlens.training.recipe import Recipe


def save_model(
    model: Any, weights: dict[str, Tensor], folder: Path, tokenizer: Path | None = None, facts: Any = None
) -> None:
    """Config, generation config and safetensors without the tied head; at the end of a run also the tokenizer
    files and ``satlens.json``. The folder gets its name when all of it is written.

    Raises:
        SatlensError: a head that should be tied is not the embedding, so it cannot be left out.
    """
    if model.config.tie_word_embeddings:
        head = weights.get("lm_head.weight")
        if head is not None and not torch.equal(head, weights["model.embeddings.weight"]):
            raise SatlensError(
                "the tied head and the embedding were trained apart: this way of sharding unties them"
            )
        weights = {k: v for k, v in weights.items() if k != "lm_head.weight"}
    part = folder.with_name(folder.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    config = copy.deepcopy(model.config)
    config.architectures, config.dtype = [type(model).__name__], next(iter(weights.values())).dtype
    config.save_pretrained(part)
    model.generation_config.save_pretrained(part)
    tensors = {name: tensor.detach().cpu().clone().contiguous() for name, tensor in weights.items()}
    save_file(tensors, part / "model.safetensors", metadata={"format": "pt"})
    if tokenizer is not None:
        for path in sorted(tokenizer.iterdir()):
            shutil.copyfile(path, part / path.name)
    if facts is not None:
        write_json(part / "satlens.json", facts)
    shutil.rmtree(folder, ignore_errors=True)
    part.replace(folder)


def facts_of(
    recipe: Recipe, manifest: dict[str, Any], progress: dict[str, Any], world: int
) -> dict[str, Any]:
    """What a reader of the checkpoint must know: how text is laid out, what it saw, how it was made."""
    steps = progress["step"]
    return {
        "layout": manifest["layout"],
        "tokenizer_sha256": manifest["tokenizer_sha256"],
        "data_sha256": {split: facts["sha256"] for split, facts in manifest["splits"].items()},
        "tokens_seen": steps * recipe.tokens_per_step(world),
        "steps": steps,
        "recipe": recipe.as_dict(),
        "attention_disabled": bool(recipe.model.get("attention_disabled", False)),
        "processes": world,
        "seconds": round(progress["seconds"], 1),
        "recipe_sha256": hashlib.sha256(json.dumps(recipe.as_dict(), sort_keys=True).encode()).hexdigest(),
    }
