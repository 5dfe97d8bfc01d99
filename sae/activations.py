"""Dictionaries of other sites than V1: a model's activations, shuffled, streamed into sae-lens's own trainer."""

import math
import shutil
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from sae.dictionary import Dictionary, decode, encode
from sae.save import LOG, dictionary_of, is_finished, save_dictionary
from sae.topk import TopK
from sae.train import DEAD_AFTER, JOURNAL_LINES, Recipe
from satlens.architectures.steps import begin, step
from satlens.errors import SatlensError, UserError
from satlens.log import say
from satlens.reading import Subject
from satlens.stream import hooked
from satlens.tokens import Corpus, split_calibration
from satlens.training.journal import Journal, progress_bar

ROLES = ("value", "mixed_value", "resid_post", "mlp_out")
"""What a dictionary can read beside V1, each in a layer."""
SHUFFLED = 16
"""Training batches that the shuffle buffer holds."""


def parse_site(site: str, sites: Any) -> tuple[str, int]:
    """``resid_post.3`` as role and layer (negative layers count from the end).

    Raises:
        UserError: another role, no layer, or a layer that does not have the role.
    """
    role, _, number = site.rpartition(".")
    known = ", ".join(f"{name}.N" for name in ROLES)
    if role not in ROLES or not number.removeprefix("-").isdecimal():
        raise UserError(f"no site {site!r}: give v1, or one of {known} with N a layer")
    sites.name(role, int(number))
    return role, int(number) % sites.n_layers


def width(role: str, sites: Any) -> int:
    """Values of one vector: all KV heads joined where the site has heads."""
    return sites.n_kv_heads * sites.d_head if "kv_head" in sites.axes(role) else sites.d_model


def activations(
    subject: Subject, corpus: Corpus, role: str, layer: int, batch_size: int
) -> Iterator[Float[Tensor, "token d_in"]]:
    """The vectors at every text token, batch after batch: no padding, no BOS, no separators.

    Blocks after ``layer`` are not run.

    Raises:
        SatlensError: the site did not fire exactly once in a batch.
    """
    device = next(subject.bridge.original_model.parameters()).device
    seen: list[Tensor] = []
    point = (subject.sites.name(role, layer), lambda tensor, hook=None: seen.append(tensor))
    for batch in subject.batches(corpus, batch_size):
        placed = batch.to(device)
        seen.clear()
        with torch.no_grad(), hooked(subject.bridge, [point]):
            state = begin(subject.bridge, placed.input_ids, placed.padding)
            for number in range(layer + 1):
                state = step(subject.bridge, number, state)
        if len(seen) != 1:
            raise SatlensError(f"{role} of layer {layer} fired {len(seen)} times in one pass, not once")
        yield seen[0][placed.text].flatten(1).float()


def repeated(make: Callable[[], Iterator[Tensor]]) -> Iterator[Tensor]:
    """One pass over the text after another, for ever.

    Raises:
        UserError: a pass without a single vector.
    """
    for epoch in count():
        empty = True
        for part in make():
            empty &= not len(part)
            yield part
        if empty:
            raise UserError(f"pass {epoch} over the text gave no vector: give more text")


def shuffled(
    parts: Iterator[Float[Tensor, "token d_in"]], batch: int, held: int, generator: torch.Generator
) -> Iterator[Float[Tensor, "batch d_in"]]:
    """Batches of exactly ``batch`` vectors, drawn without replacement from a buffer of ``held`` that is kept full.

    What is drawn leaves room for the next vectors of ``parts``, which must not end.
    """
    rest: list[Tensor] = []

    def take(n: int) -> Tensor:
        while sum(map(len, rest)) < n:
            rest.append(next(parts))
        joined = torch.cat(rest)
        rest[:] = [joined[n:]]
        return joined[:n]

    buffer = take(max(held, batch)).clone()
    while True:
        places = torch.randperm(len(buffer), generator=generator)[:batch].to(buffer.device)
        yield buffer[places]
        buffer[places] = take(batch)


def train_site(
    subject: Subject, corpus: Corpus, recipe: Recipe, facts: dict[str, Any], folder: Path, rows: int
) -> Path:
    """The folder of one dictionary of ``facts["site"]``, trained from the start unless it is there.

    Every fifth document is held out, and what the dictionary explains of it is said at the end and kept in the log.

    Raises:
        UserError: a site that the model lacks, a recipe that cannot work, or a finished folder of another request.
        SatlensError: the loss stopped being a number (the step is named), or a file could not be written.
    """
    role, layer = parse_site(facts["site"], subject.sites)
    d_in = width(role, subject.sites)
    recipe.check(d_in)
    if is_finished(folder, facts):
        return folder
    heldout, train = split_calibration(corpus)
    work = folder.with_name(f"{folder.name}.training")
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    vectors = repeated(lambda: activations(subject, train, role, layer, rows))
    shuffle = torch.Generator().manual_seed(recipe.seed)
    batches = shuffled(vectors, recipe.batch, SHUFFLED * recipe.batch, shuffle)
    device = str(next(subject.bridge.original_model.parameters()).device)
    trainer = new_trainer(d_in, recipe, batches, device)
    fit(trainer, recipe, work)
    trainer.sae.fold_W_dec_norm()
    tensors = {name: getattr(trainer.sae, name) for name in ("W_enc", "b_enc", "W_dec", "b_dec")}
    made = dictionary_of(tensors, recipe.k, facts, None, folder)
    explained = explained_variance(made, activations(subject, heldout, role, layer, rows))
    say(f"{folder.name}: FVE {explained:.4f} on held-out documents")
    Journal(work / LOG, recipe.steps, is_main=True).write(step=recipe.steps, heldout_fve=explained)
    save_dictionary(made, trainer.feature_sparsity.double().cpu(), work / LOG)
    shutil.rmtree(work)
    return folder


def new_trainer(d_in: int, recipe: Recipe, batches: Iterator[Tensor], device: str) -> Any:
    """sae-lens's trainer of a Top-K SAE by this recipe, begun where a V1 dictionary of the same seed begins."""
    from sae_lens import TopKTrainingSAE, TopKTrainingSAEConfig
    from sae_lens.config import SAETrainerConfig
    from sae_lens.training.sae_trainer import SAETrainer

    config = TopKTrainingSAEConfig(
        d_in=d_in,
        d_sae=recipe.expansion * d_in,
        k=recipe.k,
        aux_loss_coefficient=recipe.aux_loss_coefficient,
        device=device,
    )
    with torch.random.fork_rng(devices=[]):  # its own first weights come from the global generator
        sae = TopKTrainingSAE(config)
    start = TopK(d_in, recipe.expansion * d_in, torch.Generator().manual_seed(recipe.seed))
    with torch.no_grad():
        sae.W_enc.copy_(start.encoder.T)
        sae.W_dec.copy_(start.decoder)
    training = SAETrainerConfig(
        total_training_samples=recipe.steps * recipe.batch,
        train_batch_size_samples=recipe.batch,
        lr=recipe.lr,
        lr_end=0.0,
        lr_scheduler_name="cosineannealing",
        dead_feature_window=DEAD_AFTER,
        device=device,
    )
    return SAETrainer(cfg=training, sae=sae, data_provider=batches)


def fit(trainer: Any, recipe: Recipe, work: Path) -> None:
    """What the trainer's own ``fit`` does, with our journal and bar, and an end when the loss is no number.

    Raises:
        SatlensError: the loss stopped being a number.
    """
    journal, every = Journal(work / LOG, 0, is_main=True), max(1, recipe.steps // JOURNAL_LINES)
    with progress_bar(recipe.steps, 0, disable=False) as move:
        for done in range(1, recipe.steps + 1):
            trainer.maybe_reset_sparsity()
            rate, dead = trainer.optimizer.param_groups[0]["lr"], int(trainer.dead_neurons.sum())
            taken = trainer.step(next(trainer.data_provider))
            trainer.n_training_steps += 1
            losses = {name: value.item() for name, value in taken.losses.items()}
            if not all(map(math.isfinite, losses.values())):
                raise SatlensError(
                    f"the losses are {losses} at step {done - 1} (learning rate {rate:.2e}): lower --lr, or look for "
                    "huge values in the model (satlens doctor)"
                )
            if done % every == 0 or done == recipe.steps:
                spread = taken.sae_in - taken.sae_in.mean(0)
                fve = 1 - losses["mse_loss"] / float(spread.square().sum(1).mean().clamp(min=1e-30))
                aux = losses["auxiliary_reconstruction_loss"]
                journal.write(
                    step=done,
                    tokens=done * recipe.batch,
                    mse=losses["mse_loss"],
                    aux=aux,
                    fve=fve,
                    dead=dead,
                    lr=rate,
                )
                move(done, f"{work.stem}: MSE {losses['mse_loss']:.4g}, {dead} dead")


def explained_variance(dictionary: Dictionary, parts: Iterator[Float[Tensor, "token d_in"]]) -> float:
    """``1 - sum |x - xhat|^2 / sum |x - mean|^2`` over all vectors, summed in float64; NaN when they are all alike."""
    n, residual, square, total = 0, 0.0, 0.0, torch.zeros(dictionary.d_in, dtype=torch.float64)
    for part in parts:
        x = part.cpu()
        made = decode(dictionary, encode(dictionary, x)).double()
        n, residual = n + len(x), residual + float((x.double() - made).square().sum())
        square, total = square + float(x.double().square().sum()), total + x.double().sum(0)
    spread = square - float(total.square().sum()) / max(n, 1)
    return 1 - residual / spread if spread > 0 else math.nan
