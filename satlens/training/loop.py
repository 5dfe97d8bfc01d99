"""Train one model by a recipe: one CPU, one GPU, DDP or FSDP through accelerate; resumes to the same bytes."""

import math
import os
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import DistributedType, set_seed
from torch import Tensor
from torch.distributed.tensor import DTensor

from satlens.errors import SatlensError, UserError
from satlens.log import say
from satlens.training.inputs import WindowOrder, fitting_windows, new_model, read_manifest
from satlens.training.journal import Journal, progress_bar
from satlens.training.memory import batch_in_memory, model_in_memory
from satlens.training.recipe import Recipe
from satlens.training.save import facts_of, save_model
from satlens.training.state import drop_unfinished, full_weights, latest_state, load_state, save_state


class Objective(torch.nn.Module):
    """Mean next-token cross-entropy of a window; a module so that DDP and FSDP see one forward call."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.net = model
        self._no_split_modules = [model.model.block.__name__]  # what accelerate wraps one by one under FSDP

    def tie_weights(self) -> None:
        """Accelerate calls this when FSDP has moved the parameters, which tears a tied head off."""
        self.net.tie_weights()

    def forward(self, ids: Tensor, position_embeddings: tuple[Tensor, Tensor]) -> Tensor:
        hidden = self.net.model(
            ids, use_cache=False, position_embeddings=position_embeddings
        ).last_hidden_state
        logits = self.net.lm_head(hidden[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())


def train(recipe: Recipe) -> Path:
    """Run ``recipe`` to its end, from the newest state below ``recipe.out`` if there is one; returns ``out/final``.

    Raises:
        UserError: unknown architecture, data that do not fit, a batch beyond memory, or a state of another recipe.
        SatlensError: the loss stopped being a number (the step is named), or a state could not be written.
    """
    accelerator = _accelerator()
    world, is_main = accelerator.num_processes, accelerator.is_main_process
    manifest = read_manifest(recipe.data)
    windows = fitting_windows(recipe, manifest, world)
    set_seed(recipe.seed)
    with model_in_memory(recipe.arch, accelerator.device):
        model = new_model(recipe, manifest)
        objective = Objective(model)
        _refuse_scalars(accelerator, recipe.arch, objective)
        n_parameters = sum(p.numel() for p in objective.parameters())
        objective, optimizer = accelerator.prepare(objective, new_optimizer(recipe, objective))
    recipe.out.mkdir(parents=True, exist_ok=True)
    identity = {**recipe.as_dict(), "data_sha256": manifest["splits"]["train"]["sha256"], "processes": world}
    progress: dict[str, Any] = {"step": 0, "recipe": identity, "seconds": 0.0}
    if (found := latest_state(recipe.out)) is not None:
        progress = load_state(found, objective, optimizer, identity)
    if is_main:
        drop_unfinished(recipe.out)
        start = f"resuming at step {progress['step']:,}" if found else "starting"
        say(f"{start}: {recipe.arch}, {n_parameters:,} parameters, {recipe.max_steps(world):,} steps")
    run = _Run(
        recipe=recipe,
        accelerator=accelerator,
        objective=objective,
        optimizer=optimizer,
        model=model,
        windows=windows,
        manifest=manifest,
        journal=Journal(recipe.out / "log.jsonl", progress["step"], is_main),
        progress=progress,
    )
    final = run.to_the_end()
    accelerator.end_training()
    return final


def _accelerator() -> Accelerator:
    """Accelerate as its launcher set it up. Precision stays ours (see ``_Run._autocast``): a forward wrapped by
    accelerate would break the compiled graph. Without a GPU, processes talk through gloo.

    Raises:
        UserError: FSDP of the first kind, or processes that were started together but do not know each other.
    """
    accelerator = Accelerator(mixed_precision="no", cpu=not torch.accelerator.is_available())
    started = int(os.environ.get("WORLD_SIZE", "1"))
    if started != accelerator.num_processes:  # each would train alone, into the same folder
        raise UserError(
            f"{started} processes were started, but accelerate joins none: set ACCELERATE_USE_CPU=true"
        )
    if accelerator.distributed_type == DistributedType.FSDP and not accelerator.is_fsdp2:
        raise UserError("this loop shards by FSDP2: add --fsdp_version 2 to accelerate launch")
    return accelerator


def _refuse_scalars(accelerator: Accelerator, arch: str, objective: torch.nn.Module) -> None:
    """FSDP cuts parameters along their first axis.

    Raises:
        UserError: the model has parameters without an axis (ResFormer's lambdas), and FSDP was asked for.
    """
    scalars = [name for name, weight in objective.named_parameters() if weight.ndim == 0]
    if scalars and accelerator.distributed_type == DistributedType.FSDP:
        first = scalars[0].removeprefix("net.")
        raise UserError(
            f"{arch} has {len(scalars)} scalar parameters ({first} ...), which FSDP cannot shard: "
            "train it by DDP (accelerate launch without --use_fsdp)"
        )


def new_optimizer(recipe: Recipe, objective: torch.nn.Module) -> torch.optim.Optimizer:
    """AdamW over one group: the official recipe decays every parameter, norms included; frozen ones are left out."""
    return torch.optim.AdamW(
        [parameter for parameter in objective.parameters() if parameter.requires_grad],
        lr=recipe.lr,
        betas=(recipe.beta1, recipe.beta2),
        weight_decay=recipe.weight_decay,
        eps=1e-8,
        fused=True,
    )


@dataclass(kw_only=True)
class _Run:
    """The loop's moving parts, gathered so that each step of it is a short method."""

    recipe: Recipe
    accelerator: Accelerator
    objective: Any
    optimizer: Any
    model: Any
    windows: dict[str, np.ndarray]
    manifest: dict[str, Any]
    journal: Journal
    progress: dict[str, Any]

    def __post_init__(self) -> None:
        self.rank, self.world = self.accelerator.process_index, self.accelerator.num_processes
        self.is_main = self.accelerator.is_main_process
        self.total = self.recipe.max_steps(self.world)
        self.order = WindowOrder(self.recipe.seed, len(self.windows["train"]))
        positions = torch.arange(self.recipe.seq_length, device=self.accelerator.device)[None]
        self.rotary = self.model.model.rotary(positions)
        self.loss_of: Callable[..., Tensor] = self.objective
        if self.recipe.compile:
            self.loss_of = torch.compile(self.objective, dynamic=False)

    def to_the_end(self) -> Path:
        """Every remaining step, then the final folder."""
        recipe, first = self.recipe, self.progress["step"]
        keep = recipe.snapshot_steps(self.world)
        started, seen = time.perf_counter(), self.progress["seconds"]
        with progress_bar(self.total, first, disable=not self.is_main) as move:
            if first == 0 and 0 in keep:
                self._snapshot(0)
            for step in range(first, self.total):
                with self._fits(f"a batch of step {step}"):
                    fields = self._step(step)
                done = step + 1
                self.progress.update(step=done, seconds=seen + time.perf_counter() - started)
                if self._due(done, recipe.log_interval):
                    rate = (done * recipe.tokens_per_step(self.world)) / self.progress["seconds"]
                    self.journal.write(**fields, tokens_per_second=round(rate, 1))
                    move(done, f"loss {fields['loss']:.3f}  {rate:,.0f} tok/s")
                if self._due(done, recipe.eval_interval) and len(self.windows["val"]):
                    with self._fits(f"a held-out batch after step {done}"):
                        self._evaluate(done)
                if done in keep:
                    self._snapshot(done)
                if self._due(done, recipe.save_interval):
                    save_state(recipe.out, self.objective, self.optimizer, self.progress, self.is_main)
        return self._finish()

    def _fits(self, what: str) -> Any:
        """A batch beyond memory ends in one line; what lies in ``out`` is whole, since nothing is being written."""
        return batch_in_memory(self.recipe, what, self.accelerator.device)

    def _due(self, done: int, interval: int) -> bool:
        return done % interval == 0 or done == self.total

    def _step(self, step: int) -> dict[str, Any]:
        recipe, parts = self.recipe, self.recipe.accumulation
        rate = recipe.learning_rate(step, self.world)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        total = torch.zeros((), device=self.accelerator.device)
        for micro in range(parts):
            with self._autocast(), self._sync_only(micro == parts - 1):
                loss = self.loss_of(self._batch(step, micro), self.rotary)
                self.accelerator.backward(loss / parts)
            total += loss.detach() / parts
        norm = self._clip()
        value = float(self.accelerator.reduce(total, "mean"))
        if not (math.isfinite(value) and math.isfinite(norm)):  # a bad gradient would spoil the weights next
            raise SatlensError(
                f"the loss is {value} and the gradient norm {norm} at step {step} (learning rate {rate:.2e}); "
                f"the last good state is in {recipe.out}: lower lr or look at the data of that step"
            )
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        tokens = (step + 1) * recipe.tokens_per_step(self.world)
        return {"step": step + 1, "tokens": tokens, "loss": value, "lr": rate, "grad_norm": norm}

    def _clip(self) -> float:
        """Scale the gradients down to the largest norm allowed; returns the norm they had over all processes."""
        norm = self.accelerator.clip_grad_norm_(self.objective.parameters(), self.recipe.grad_clip)
        return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)

    def _autocast(self) -> Any:
        kind, wanted = self.accelerator.device.type, self.recipe.precision == "bf16"
        return torch.autocast(kind, dtype=torch.bfloat16, enabled=wanted)

    def _sync_only(self, last: bool) -> Any:
        """Gradients travel between processes once per optimizer step."""
        return nullcontext() if last else self.accelerator.no_sync(self.objective)

    def _batch(self, step: int, micro: int) -> Tensor:
        """This process's windows of a micro-step."""
        per = self.recipe.batch_size
        place = ((step * self.recipe.accumulation + micro) * self.world + self.rank) * per
        return self._ids(self.windows["train"][self.order.rows(place, per)])

    def _ids(self, rows: np.ndarray) -> Tensor:
        return torch.from_numpy(rows.astype(np.int64)).to(self.accelerator.device)

    @torch.no_grad()
    def _evaluate(self, done: int) -> None:
        """Held-out loss on the same windows every time, summed in float64, shared between processes.

        Every process runs the model equally often (one with nothing left repeats the first batch and does not
        count it): under FSDP a forward pass is collective, and one more of it would wait for ever.
        """
        rows = self.windows["val"]
        per = min(self.recipe.batch_size, len(rows))
        batches = [rows[i : i + per] for i in range(0, len(rows) - per + 1, per)]
        sums = torch.zeros(2, dtype=torch.float64)
        for first in range(0, len(batches), self.world):
            mine = first + self.rank
            counts = mine < len(batches)
            with self._autocast():
                loss = self.loss_of(self._ids(batches[mine if counts else 0]), self.rotary)
            sums += torch.tensor([float(loss), 1.0], dtype=torch.float64) * counts
        sums = self.accelerator.reduce(sums.to(self.accelerator.device), "sum")
        mean = float(sums[0] / sums[1])
        if not mean < 700:  # e^700 is the end of float64
            raise SatlensError(f"the held-out loss is {mean} after step {done}: lower lr")
        self.journal.write(step=done, val_loss=mean, val_perplexity=math.exp(mean))

    def _weights(self, dtype: torch.dtype) -> dict[str, Tensor]:
        return {k.removeprefix("net."): v.to(dtype) for k, v in full_weights(self.objective).items()}

    def _snapshot(self, done: int) -> None:
        weights = self._weights(torch.float32)
        if self.is_main:
            save_model(self.model, weights, self.recipe.out / "snapshots" / f"step-{done:08d}")

    def _finish(self) -> Path:
        final = self.recipe.out / "final"
        weights = self._weights(getattr(torch, self.recipe.save_dtype))
        if self.is_main:
            facts = facts_of(self.recipe, self.manifest, self.progress, self.world)
            save_model(self.model, weights, final, self.recipe.data / "tokenizer", facts)
        self.accelerator.wait_for_everyone()
        return final
