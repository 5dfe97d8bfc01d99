"""Train a V1 dictionary on the table: each step draws a batch of tokens by their counts; killed, it resumes exactly."""

import math
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from sae.dictionary import Counts
from sae.features import latent_features
from sae.save import LOG, dictionary_of, identity, is_finished, save_dictionary
from sae.topk import Step, TopK, loss_and_gradients
from satlens.errors import SatlensError, UserError
from satlens.log import say
from satlens.training.journal import Journal, progress_bar
from satlens.training.state import drop_unfinished, latest_state, load_state, save_state

DEAD_AFTER = 1000
"""Steps without firing after which a latent counts as dead (sae-lens's ``dead_feature_window``)."""
GRAD_CLIP = 1.0
"""Largest gradient norm (sae-lens's trainer)."""
SAVE_SECONDS = 20.0
"""Time between two resumable states."""
JOURNAL_LINES = 200
"""Lines that a whole training leaves in its log."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How a dictionary is trained, whatever it reads."""

    k: int
    """Active latents for each vector."""
    expansion: int
    """d_sae / d_in."""
    tokens: int
    """Tokens drawn in all."""
    batch: int
    """Tokens drawn for one step."""
    lr: float
    """Adam's learning rate at the start; it falls to 0 along a cosine."""
    seed: int
    """Decides the first weights and the draws."""
    aux_loss_coefficient: float = 1.0
    """Weight of the loss that revives dead latents (sae-lens's default)."""

    @property
    def steps(self) -> int:
        """Whole batches in ``tokens``."""
        return self.tokens // self.batch

    def learning_rate(self, step: int) -> float:
        """Of the step with this number, from 0."""
        return self.lr * (1 + math.cos(math.pi * step / self.steps)) / 2

    def check(self, d_in: int) -> None:
        """Refuse what cannot be trained.

        Raises:
            UserError: sizes or a rate out of range, or less text than one batch.
        """
        d_sae = d_in * self.expansion
        if self.expansion < 1:
            raise UserError(f"expansion {self.expansion} leaves no latents; use at least 1")
        if not 1 <= self.k <= d_sae:
            raise UserError(f"k is {self.k}, but there are {d_sae} latents: it must be from 1 to {d_sae}")
        if self.batch < 1 or self.steps < 1:
            raise UserError(
                f"{self.tokens:,} tokens are no whole batch of {self.batch:,}: raise --sae-tokens or lower --sae-batch"
            )
        if not self.lr > 0:
            raise UserError(f"the learning rate must be above 0, got {self.lr}")


@dataclass(frozen=True, kw_only=True)
class Draws:
    """Batches of i.i.d. tokens, each as its distinct ids and their shares.

    The counts of B independent draws are one multinomial vector, so that is what is drawn. Step n has a generator of
    its own, made from seed and n: a resumed training needs no position in a stream of random numbers.
    """

    ids: Int[np.ndarray, " seen"]
    """Token ids that can be drawn."""
    probability: Float[np.ndarray, " seen"]
    batch: int
    seed: int

    def __call__(self, step: int) -> tuple[Int[Tensor, " row"], Float[Tensor, " row"]]:
        """Ids drawn in this step, and the share of the batch that each makes up."""
        counts = np.random.default_rng([self.seed, step]).multinomial(self.batch, self.probability)
        drawn = counts.nonzero()[0]
        return torch.from_numpy(self.ids[drawn]), torch.from_numpy(counts[drawn] / self.batch)


def draws(counts: Int[Tensor, " d_vocab"], recipe: Recipe) -> Draws:
    """Draws of the ids that have a count, in proportion to it.

    Raises:
        UserError: no id has one.
    """
    seen = counts.numpy().nonzero()[0]
    if not len(seen):
        raise UserError("the text to train on holds no tokens: give more text, or withhold fewer types")
    share = counts.numpy()[seen] / int(counts.sum())
    return Draws(ids=seen, probability=share, batch=recipe.batch, seed=recipe.seed)


def make_dictionary(
    table: Float[Tensor, "d_vocab d_in"],
    counts: Counts,
    recipe: Recipe,
    facts: dict[str, Any],
    folder: Path,
) -> Path:
    """The folder of the dictionary that ``facts`` describe: trained unless it is there, from where it was left.

    ``facts["withheld"]`` are the token ids that are never drawn. Until the folder is whole, log and state are in
    ``<folder>.training``.

    Raises:
        UserError: a recipe that cannot work, or a folder or state of another request (the differences are listed).
        SatlensError: the loss stopped being a number (the step is named), or a file could not be written.
    """
    recipe.check(table.shape[1])
    work = folder.with_name(f"{folder.name}.training")
    if not is_finished(folder, facts):
        drawn = counts.train.clone()
        drawn[facts["withheld"]] = 0
        trained = train(table, drawn, recipe, facts, work)
        made = dictionary_of(trained.folded(), recipe.k, facts, counts, folder)
        density = latent_features(made, table.cpu(), counts.total).density
        save_dictionary(made, density, work / LOG)
    shutil.rmtree(work, ignore_errors=True)
    return folder


def train(
    table: Float[Tensor, "d_vocab d_in"],
    counts: Int[Tensor, " d_vocab"],
    recipe: Recipe,
    facts: dict[str, Any],
    folder: Path,
) -> TopK:
    """A dictionary of the rows of ``table``, drawn by ``counts``; runs where the table is.

    Log and state are kept in ``folder``, and a state found there is continued, to the same bytes. ``facts`` must
    agree for that.

    Raises:
        UserError: no counts at all, or a state of another request (the differences are listed).
        SatlensError: the loss stopped being a number (the step is named), or the state could not be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    learner = Learner(table, draws(counts, recipe), recipe)
    learner.resume(folder, identity(facts))
    say(f"{folder.stem}: {len(learner.sae.b_enc):,} latents, step {learner.step:,} of {recipe.steps:,}")
    journal = Journal(folder / LOG, learner.step, is_main=True)
    every, saved = max(1, recipe.steps // JOURNAL_LINES), time.monotonic()
    with progress_bar(recipe.steps, learner.step, disable=False) as move:
        while learner.step < recipe.steps:
            taken, done = learner.take_step(), learner.step
            if done % every == 0 or done == recipe.steps:
                fields = taken.report()
                journal.write(step=done, tokens=done * recipe.batch, **fields)
                move(done, f"{folder.stem}: MSE {fields['mse']:.4g}, {fields['dead']} dead")
            if time.monotonic() - saved >= SAVE_SECONDS or done == recipe.steps:
                learner.save(folder, identity(facts))
                saved = time.monotonic()
    return learner.sae


class Learner:
    """A dictionary in training, between two steps."""

    def __init__(self, table: Tensor, draw: Draws, recipe: Recipe) -> None:
        self.table, self.draw, self.recipe, self.step = table, draw, recipe, 0
        d_in = table.shape[1]
        start = torch.Generator().manual_seed(recipe.seed)
        self.sae = TopK(d_in, recipe.expansion * d_in, start).to(table)
        fused = table.device.type in ("cpu", "cuda")
        self.optimizer = torch.optim.Adam(
            self.sae.parameters(), lr=recipe.lr, betas=(0.9, 0.999), fused=fused
        )

    def take_step(self) -> "Taken":
        """One batch and one update, in the order of sae-lens's trainer.

        Raises:
            SatlensError: loss or gradient is not a number.
        """
        ids, share = self.draw(self.step)
        rows, share = self.table[ids.to(self.table.device)], share.to(self.table.dtype).to(self.table.device)
        rate = self.recipe.learning_rate(self.step)
        dead = self.sae.silent > DEAD_AFTER
        found = loss_and_gradients(
            self.sae, rows, share, dead, self.recipe.k, self.recipe.aux_loss_coefficient
        )
        for name, parameter in self.sae.named_parameters():
            parameter.grad = found.gradients[name]
        norm = float(nn.utils.clip_grad_norm_(self.sae.parameters(), GRAD_CLIP))
        loss = float(found.mse + found.aux)
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise SatlensError(
                f"the loss is {loss} and the gradient norm {norm} at step {self.step} (learning rate {rate:.2e}): "
                "lower --lr, or look for huge values in the model (satlens doctor)"
            )
        self.sae.silent += 1
        self.sae.silent[found.fired] = 0
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.step += 1
        return Taken(step=found, rows=rows, share=share, n_dead=int(dead.sum()), lr=rate, grad_norm=norm)

    def save(self, folder: Path, identity: dict[str, Any]) -> None:
        """Write the resumable state; the one before it goes when this one is whole."""
        save_state(folder, self.sae, self.optimizer, {"step": self.step, "recipe": identity}, is_main=True)

    def resume(self, folder: Path, identity: dict[str, Any]) -> None:
        """Continue from the newest state in ``folder``, if there is one."""
        found = latest_state(folder)
        if found is not None:
            self.step = load_state(found, self.sae, self.optimizer, identity)["step"]
        drop_unfinished(folder)


@dataclass(frozen=True, kw_only=True)
class Taken:
    """A step that was taken, and what it was taken on."""

    step: Step
    rows: Float[Tensor, "row d_in"]
    share: Float[Tensor, " row"]
    n_dead: int
    lr: float
    grad_norm: float

    def report(self) -> dict[str, Any]:
        """For the journal: the losses, the share of the batch's variance that is explained, dead latents."""
        variance = self.share @ (self.rows - self.share @ self.rows).square().sum(1)
        mse = float(self.step.mse)
        return {
            "mse": mse,
            "aux": float(self.step.aux),
            "fve": 1 - mse / float(variance) if float(variance) else None,
            "dead": self.n_dead,
            "lr": self.lr,
            "grad_norm": self.grad_norm,
        }
