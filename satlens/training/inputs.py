"""What a training run starts from: windows of token ids in their order, and a freshly drawn model."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np

from satlens.errors import UserError
from satlens.hf import MODELS
from satlens.training.data import token_windows
from satlens.training.memory import is_out_of_memory
from satlens.training.recipe import Recipe


def read_manifest(data: Path) -> dict[str, Any]:
    """``data.json`` of a finished build.

    Raises:
        UserError: no finished build, or a training file of another size than the build wrote.
    """
    path = data / "data.json"
    if not path.exists():
        raise UserError(f"no finished data build at {data}: run `satlens data build` first")
    manifest: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    for split, facts in manifest["splits"].items():
        file, expected = data / f"{split}.bin", facts["tokens"] * np.dtype(manifest["dtype"]).itemsize
        if not file.exists() or file.stat().st_size != expected:
            raise UserError(f"{file} is not the file that {path} describes ({expected:,} bytes): build again")
    return manifest


def fitting_windows(recipe: Recipe, manifest: dict[str, Any], world: int) -> dict[str, np.ndarray]:
    """Training and held-out windows, checked to be enough for the recipe.

    Raises:
        UserError: too little text for ``max_tokens`` or for one evaluation, or a run shorter than one step.
    """
    steps = recipe.max_steps(world)
    if steps < 1:
        step = recipe.tokens_per_step(world)
        raise UserError(f"max_tokens {recipe.max_tokens:,} is less than one step of {step:,}: raise it")
    train = token_windows(recipe.data / "train.bin", recipe.seq_length, manifest["dtype"])
    needed = steps * recipe.tokens_per_step(world) // recipe.seq_length
    if needed > len(train) * recipe.epochs:
        raise UserError(
            f"{recipe.max_tokens:,} tokens need {needed:,} windows of {recipe.seq_length}, but the data hold "
            f"{len(train):,} and epochs is {recipe.epochs}: add text or raise epochs"
        )
    if not recipe.eval_windows:
        return {"train": train, "val": train[:0]}
    try:
        val = token_windows(recipe.data / "val.bin", recipe.seq_length, manifest["dtype"])
    except UserError as error:
        raise UserError(f"{error}; or hold out more with --val-fraction, or set eval_windows = 0") from error
    return {"train": train, "val": val[: recipe.eval_windows]}


class WindowOrder:
    """Which windows a micro-step sees: a pure function of its number, so resuming needs no position file.

    Step ``s`` uses places ``[s * B, (s + 1) * B)`` of the epochs' permutations laid end to end, B windows being
    its global batch; so the order does not depend on how many processes or micro-steps share it.
    """

    def __init__(self, seed: int, count: int) -> None:
        self.seed, self.count = seed, count
        self.epoch, self.order = -1, np.empty(0, dtype=np.int64)

    def rows(self, first: int, n: int) -> list[int]:
        """Window numbers at places ``first`` to ``first + n`` of the endless order."""
        return [self._window(place) for place in range(first, first + n)]

    def _window(self, place: int) -> int:
        epoch, within = divmod(place, self.count)
        if epoch != self.epoch:
            rng = np.random.default_rng(self.seed + epoch)
            self.epoch, self.order = epoch, rng.permutation(self.count)
        return int(self.order[within])


def new_model(recipe: Recipe, manifest: dict[str, Any]) -> Any:
    """A model drawn from torch's global generator, in training mode, float32.

    Raises:
        UserError: unknown architecture or config field, or values no model can be built from.
    """
    if recipe.arch not in MODELS:
        raise UserError(f"unknown arch {recipe.arch!r}; known: {', '.join(MODELS)}")
    cls = MODELS[recipe.arch]
    known = {spec.name for spec in dataclasses.fields(cls.config_class)}
    if unknown := sorted(set(recipe.model) - known):
        raise UserError(
            f"the model section has fields that {recipe.arch} does not know: {', '.join(unknown)}"
        )
    given = {
        "vocab_size": manifest["d_vocab"],
        "eos_token_id": manifest["eos_token_id"],
        "max_position_embeddings": recipe.seq_length,
        **recipe.model,
    }
    try:
        model = cls(cls.config_class(**given))
    except Exception as error:  # the strict config wraps what it finds in classes of its own
        if is_out_of_memory(error):
            raise
        raise UserError(f"the model section is wrong: {' '.join(str(error).split())}") from error
    if model.config.vocab_size < manifest["d_vocab"]:
        raise UserError(
            f"vocab_size {model.config.vocab_size} is below the tokenizer's {manifest['d_vocab']}"
        )
    for layer in model.model.layers:
        layer.attn.query_blocks = recipe.query_blocks
    return model.train()
