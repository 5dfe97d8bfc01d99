"""Train one model by a recipe: one CPU, one GPU, DDP or FSDP through accelerate; resumes to the same bytes."""

import copy
import hashlib
import json
import math
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from safetensors.torch import save_file
from torch import Tensor

from satlens.errors import SatlensError, UserError
from satlens.hf import MODELS
from satlens.training.data import token_windows, write_json
from satlens.training.recipe import Recipe
from satlens.training.state import latest_state, load_state, save_state


class _Objective(torch.nn.Module):
    """Mean next-token cross-entropy of a window; a module so that DDP and FSDP see one forward call."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.net = model

    def forward(self, ids: Tensor, position_embeddings: tuple[Tensor, Tensor]) -> Tensor:
        hidden = self.net.model(ids, use_cache=False, position_embeddings=position_embeddings).last_hidden_state
        logits = self.net.lm_head(hidden[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())


def train(recipe: Recipe) -> Path:
    """Run ``recipe`` to its end, from the newest state below ``recipe.out`` if there is one; returns ``out/final``.

    Raises:
        UserError: unknown architecture, data that do not fit, or a state of another recipe.
        SatlensError: the loss stopped being a number (the step is named).
    """
    accelerator = Accelerator()  # precision is ours (_autocast): a wrapped forward would break the compiled graph
    world = accelerator.num_processes
    manifest = _data_manifest(recipe)
    windows = _fitting_windows(recipe, manifest, world)
    set_seed(recipe.seed)
    model = _new_model(recipe, manifest)
    objective = _Objective(model)
    optimizer = torch.optim.AdamW(
        objective.parameters(),
        lr=recipe.lr,
        betas=(recipe.beta1, recipe.beta2),
        weight_decay=recipe.weight_decay,
        eps=1e-8,
        fused=True,
    )
    objective, optimizer = accelerator.prepare(objective, optimizer)
    recipe.out.mkdir(parents=True, exist_ok=True)
    identity = {**recipe.as_dict(), "data_sha256": manifest["splits"]["train"]["sha256"], "processes": world}
    progress: dict[str, Any] = {"step": 0, "recipe": identity, "seconds": 0.0}
    if (found := latest_state(recipe.out)) is not None:
        progress = load_state(found, objective, optimizer, identity)
    journal = _Journal(recipe.out / "log.jsonl", progress["step"], accelerator.is_main_process)
    runner = _Runner(recipe, accelerator, objective, optimizer, model, windows, manifest, journal, progress)
    return runner.run()


class _Journal:
    """Appends one JSON line per event; lines after the resumed step are dropped, so the log tells one history."""

    def __init__(self, path: Path, step: int, is_main: bool) -> None:
        self.path, self.is_main = path, is_main
        if is_main:
            lines = path.read_text().splitlines() if path.exists() else []
            kept = [line for line in lines if json.loads(line)["step"] <= step]
            path.write_text("".join(f"{line}\n" for line in kept))

    def write(self, **fields: Any) -> None:
        """Append one line (main process only)."""
        if self.is_main:
            with self.path.open("a") as file:
                file.write(json.dumps(fields) + "\n")


class _Runner:
    """The loop's moving parts, gathered so that each step of it is a short method."""

    def __init__(
        self,
        recipe: Recipe,
        accelerator: Accelerator,
        objective: Any,
        optimizer: Any,
        model: Any,
        windows: dict[str, np.ndarray],
        manifest: dict[str, Any],
        journal: _Journal,
        progress: dict[str, Any],
    ) -> None:
        self.recipe, self.accelerator, self.optimizer, self.model = recipe, accelerator, optimizer, model
        self.objective, self.windows, self.manifest = objective, windows, manifest
        self.journal, self.progress = journal, progress
        self.world = accelerator.num_processes
        self.total = recipe.max_steps(self.world)
        positions = torch.arange(recipe.seq_length, device=accelerator.device)[None]
        self.rotary = model.model.rotary(positions)
        self.loss_of: Callable[..., Tensor] = objective
        if recipe.compile:
            self.loss_of = torch.compile(objective, dynamic=False)
        self.orders: dict[int, np.ndarray] = {}

    def run(self) -> Path:
        """Every remaining step, then the final folder."""
        recipe, bar = self.recipe, _progress_bar(self.total, self.progress["step"], self.accelerator)
        keep = recipe.snapshot_steps(self.world)
        started, seen = time.perf_counter(), self.progress["seconds"]
        with bar:
            if self.progress["step"] == 0 and 0 in keep:
                self._snapshot(0)
            for step in range(self.progress["step"], self.total):
                fields = self._step(step)
                done = step + 1
                self.progress.update(step=done, seconds=seen + time.perf_counter() - started)
                if done % recipe.log_interval == 0 or done == self.total:
                    rate = (done * recipe.tokens_per_step(self.world)) / self.progress["seconds"]
                    self.journal.write(**fields, tokens_per_second=round(rate, 1))
                    bar.update(done, f"loss {fields['loss']:.3f}  {rate:,.0f} tok/s")
                if done % recipe.eval_interval == 0 or done == self.total:
                    self._evaluate(done)
                if done in keep:
                    self._snapshot(done)
                if done % recipe.save_interval == 0 or done == self.total:
                    main = self.accelerator.is_main_process
                    save_state(recipe.out, self.objective, self.optimizer, self.progress, main)
        return self._finish()

    def _step(self, step: int) -> dict[str, Any]:
        rate = self.recipe.learning_rate(step, self.world)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        total = torch.zeros((), device=self.accelerator.device)
        for micro in range(self.recipe.accumulation):
            last = micro == self.recipe.accumulation - 1
            with self._autocast(), self._sync_only(last):
                loss = self.loss_of(self._batch(step, micro), self.rotary)
                self.accelerator.backward(loss / self.recipe.accumulation)
            total += loss.detach() / self.recipe.accumulation
        norm = self.accelerator.clip_grad_norm_(self.objective.parameters(), self.recipe.grad_clip)
        value = float(self.accelerator.reduce(total, "mean"))
        if not math.isfinite(value):
            raise SatlensError(
                f"the loss is {value} at step {step} (learning rate {rate:.2e}, gradient norm {float(norm):.2e}); "
                f"the last good state is in {self.recipe.out}: lower lr or look at the data of that step"
            )
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        tokens = (step + 1) * self.recipe.tokens_per_step(self.world)
        return {"step": step + 1, "tokens": tokens, "loss": value, "lr": rate, "grad_norm": float(norm)}

    def _autocast(self) -> Any:
        return torch.autocast(
            self.accelerator.device.type, dtype=torch.bfloat16, enabled=self.recipe.precision == "bf16"
        )

    def _sync_only(self, last: bool) -> Any:
        """Gradients travel between processes once per optimizer step."""
        from contextlib import nullcontext

        return nullcontext() if last else self.accelerator.no_sync(self.objective)

    def _batch(self, step: int, micro: int) -> Tensor:
        """This process's windows of a micro-step: a pure function of the step, so resuming needs no position file."""
        per = self.recipe.batch_size
        flat = (step * self.recipe.accumulation + micro) * self.world + self.accelerator.process_index
        first = flat * per
        count = len(self.windows["train"])
        rows = []
        for index in range(first, first + per):
            epoch, place = divmod(index, count)
            rows.append(self._order(epoch)[place])
        ids = torch.from_numpy(self.windows["train"][rows].astype(np.int64))
        return ids.to(self.accelerator.device)

    def _order(self, epoch: int) -> np.ndarray:
        if epoch not in self.orders:
            rng = np.random.default_rng(self.recipe.seed + epoch)
            self.orders = {epoch: rng.permutation(len(self.windows["train"])), **self.orders}
        return self.orders[epoch]

    @torch.no_grad()
    def _evaluate(self, done: int) -> None:
        """Held-out loss on the same windows every time, summed in float64, shared between processes."""
        rows = self.windows["val"][: self.recipe.eval_windows]
        per = self.recipe.batch_size
        sums = torch.zeros(2, dtype=torch.float64)
        batches = [rows[i : i + per] for i in range(0, len(rows) - per + 1, per)]
        for batch in batches[self.accelerator.process_index :: self.world]:
            ids = torch.from_numpy(batch.astype(np.int64)).to(self.accelerator.device)
            with self._autocast():
                loss = self.loss_of(ids, self.rotary)
            sums += torch.tensor([float(loss), 1.0], dtype=torch.float64)
        sums = self.accelerator.reduce(sums.to(self.accelerator.device), "sum")
        if sums[1] > 0:
            loss = float(sums[0] / sums[1])
            self.journal.write(step=done, val_loss=loss, val_perplexity=math.exp(loss))

    def _weights(self, dtype: torch.dtype) -> dict[str, Tensor]:
        state = self.accelerator.get_state_dict(self.objective)
        return {k.removeprefix("net."): v.to(dtype) for k, v in state.items()}

    def _snapshot(self, done: int) -> None:
        weights = self._weights(torch.float32)
        if self.accelerator.is_main_process:
            folder = self.recipe.out / "snapshots" / f"step-{done:08d}"
            save_weights(self.model, weights, folder)

    def _finish(self) -> Path:
        final = self.recipe.out / "final"
        weights = self._weights(getattr(torch, self.recipe.save_dtype))
        if self.accelerator.is_main_process:
            save_weights(self.model, weights, final)
            copy_tokenizer(self.recipe.data, final)
            write_json(final / "satlens.json", _facts(self.recipe, self.manifest, self.progress, self.world))
        self.accelerator.wait_for_everyone()
        return final


def save_weights(model: Any, weights: dict[str, Tensor], folder: Path) -> None:
    """The official ``final/`` layout: config, generation config, safetensors without the tied head."""
    if model.config.tie_word_embeddings:
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
    shutil.rmtree(folder, ignore_errors=True)
    part.replace(folder)


def copy_tokenizer(data: Path, folder: Path) -> None:
    """Put the tokenizer beside the weights, as the official final save does."""
    for path in sorted((data / "tokenizer").iterdir()):
        (folder / path.name).write_bytes(path.read_bytes())


def _data_manifest(recipe: Recipe) -> dict[str, Any]:
    path = recipe.data / "data.json"
    if not path.exists():
        raise UserError(f"no finished data build at {recipe.data}: run `satlens data build` first")
    return json.loads(path.read_text())


def _fitting_windows(recipe: Recipe, manifest: dict[str, Any], world: int) -> dict[str, np.ndarray]:
    windows = {s: token_windows(recipe.data / f"{s}.bin", recipe.seq_length, manifest["dtype"]) for s in ("train", "val")}
    needed = recipe.max_steps(world) * recipe.batch_size * recipe.accumulation * world
    available = len(windows["train"]) * recipe.epochs
    if recipe.max_steps(world) < 1:
        raise UserError(f"max_tokens {recipe.max_tokens:,} is less than one step of {recipe.tokens_per_step(world):,}")
    if needed > available:
        raise UserError(
            f"{recipe.max_tokens:,} tokens need {needed:,} windows of {recipe.seq_length}, but the data hold "
            f"{len(windows['train']):,} and epochs is {recipe.epochs}: add text or raise epochs"
        )
    return windows


def _new_model(recipe: Recipe, manifest: dict[str, Any]) -> Any:
    if recipe.arch not in MODELS:
        raise UserError(f"unknown arch {recipe.arch!r}; known: {', '.join(MODELS)}")
    cls = MODELS[recipe.arch]
    given = {"vocab_size": manifest["d_vocab"], "max_position_embeddings": recipe.seq_length, **recipe.model}
    if given["vocab_size"] < manifest["d_vocab"]:
        raise UserError(f"vocab_size {given['vocab_size']} is below the tokenizer's {manifest['d_vocab']}")
    try:
        model = cls(cls.config_class(**given))
    except ValueError as error:
        raise UserError(f"the model section is wrong: {error}") from error
    for layer in model.model.layers:
        layer.attn.query_blocks = recipe.query_blocks
    return model.train()


def _facts(recipe: Recipe, manifest: dict[str, Any], progress: dict[str, Any], world: int) -> dict[str, Any]:
    """What a reader of the checkpoint must know: how text is laid out, what it saw, how it was made."""
    steps = progress["step"]
    return {
        "layout": manifest["layout"],
        "tokenizer_sha256": manifest["tokenizer_sha256"],
        "data_sha256": {split: facts["sha256"] for split, facts in manifest["splits"].items()},
        "tokens_seen": steps * recipe.tokens_per_step(world),
        "steps": steps,
        "recipe": recipe.as_dict(),
        "processes": world,
        "seconds": round(progress["seconds"], 1),
        "recipe_sha256": hashlib.sha256(json.dumps(recipe.as_dict(), sort_keys=True).encode()).hexdigest(),
    }


class _progress_bar:  # noqa: N801 - used as a function
    """A rich bar with ETA on stderr; silent on every process but the first."""

    def __init__(self, total: int, done: int, accelerator: Accelerator) -> None:
        from satlens.log import progress

        self.bar = progress(disable=not accelerator.is_main_process)
        self.task = self.bar.add_task("train", total=total, completed=done)

    def __enter__(self) -> "_progress_bar":
        self.bar.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self.bar.stop()

    def update(self, done: int, words: str) -> None:
        """Move to ``done`` steps and say ``words``."""
        self.bar.update(self.task, completed=done, description=words)
