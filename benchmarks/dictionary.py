"""How much faster does a dictionary of V1 get its data and take a step than with sae-lens, at equal results?

Text and model are the shipped ones: how many distinct tokens a batch has decides much.
"""

from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from common import Row, command, compare, interleave
from datasets import Dataset
from sae_lens import TopKTrainingSAE, TopKTrainingSAEConfig
from sae_lens.config import SAETrainerConfig
from sae_lens.training.activations_store import ActivationsStore
from sae_lens.training.sae_trainer import SAETrainer
from torch import Tensor

from sae.table import split_counts, v1_rows
from sae.train import DEAD_AFTER, Draws, Learner, Recipe, draws
from satlens.reading import Reading, Subject, open_subject, open_text

BATCH, STEPS = 4096, 2000
RECIPE = Recipe(k=32, expansion=16, tokens=STEPS * BATCH, batch=BATCH, lr=5e-4, seed=0)
SAME_STEPS = 6
"""Steps over which both trainings must have the same losses before they are timed."""


@cache
def shipped() -> tuple[Subject, Any, Tensor, Draws]:
    """The model, its text, the table and the draws."""
    reading = Reading(tokens=0)
    subject = open_subject("reference-satformer", reading)
    corpus = open_text(subject, reading)
    counts = split_counts(corpus, subject.sites.d_vocab)
    return subject, corpus, v1_rows(subject.bridge), draws(counts.train, RECIPE)


def store() -> Iterator[Tensor]:
    """Batches of layer-0 values from sae-lens's store, which runs the bridge up to them on tokenised rows."""
    subject, corpus, table, _ = shipped()
    rows = [batch.input_ids[0].tolist() for batch in subject.batches(corpus, 1)][:-1]  # the last is short
    made = ActivationsStore(
        model=subject.bridge,
        dataset=Dataset.from_dict({"tokens": rows}),
        streaming=False,
        hook_name=subject.sites.name("value", 0),
        hook_head_index=None,
        context_size=subject.window,
        d_in=table.shape[1],
        n_batches_in_buffer=2 * BATCH // subject.window,
        total_training_tokens=STEPS * BATCH,
        store_batch_size_prompts=8,
        train_batch_size_tokens=BATCH,
        prepend_bos=False,
        normalize_activations="none",
        device=torch.device("cpu"),
        dtype="float32",
        activations_mixing_fraction=0.5,
    )
    return made.get_data_loader()


def expanded(step: int) -> Tensor:
    """A drawn batch as sae-lens takes it: one row a token."""
    _, _, table, draw = shipped()
    ids, share = draw(step)
    return table[ids].repeat_interleave((share * BATCH).round().long(), 0)


def stock(like: Learner) -> Any:
    """sae-lens's trainer at its defaults, begun where ours is."""
    d_sae, d_in = like.sae.decoder.shape
    made = TopKTrainingSAE(TopKTrainingSAEConfig(d_in=d_in, d_sae=d_sae, k=RECIPE.k))
    with torch.no_grad():
        made.W_enc.copy_(like.sae.encoder.T)
        made.W_dec.copy_(like.sae.decoder)
    config = SAETrainerConfig(
        total_training_samples=STEPS * BATCH,
        train_batch_size_samples=BATCH,
        lr=RECIPE.lr,
        lr_end=0.0,
        lr_scheduler_name="cosineannealing",
        dead_feature_window=DEAD_AFTER,
    )
    return SAETrainer(cfg=config, sae=made, data_provider=iter(()))


def pair(n_dead: int = 0) -> tuple[Learner, Any]:
    """Both trainings after the same first steps, which must have had the same losses, some latents called dead."""
    _, _, table, draw = shipped()
    ours = Learner(table, draw, RECIPE)
    theirs = stock(ours)
    mark(ours, theirs, n_dead)
    for step in range(SAME_STEPS):
        found, expected = ours.take_step().step, theirs.step(expanded(step)).loss.detach()
        torch.testing.assert_close(found.mse + found.aux, expected, rtol=1e-5, atol=0)
        mark(ours, theirs, n_dead)
    return ours, theirs


def mark(ours: Learner, theirs: Any, n_dead: int) -> None:
    """Call the first ``n_dead`` latents dead in both trainings, whatever they did."""
    ours.sae.silent[:n_dead] = DEAD_AFTER + 1
    theirs.n_forward_passes_since_fired[:n_dead] = DEAD_AFTER + 1


def measure(rounds: int) -> list[Row]:
    """CPU time of a batch of data and of a step. The table is made outside: once, in the time of a few draws."""
    torch.set_num_threads(1)
    _, _, table, draw = shipped()
    loader, number = store(), iter(range(10**9))

    def their_batches() -> None:
        for _ in range(8):  # the store refills its buffer for every second batch
            next(loader)

    def our_batches() -> None:
        for _ in range(8):
            ids, share = draw(next(number))
            assert len(table[ids]) == len(share)

    seconds = interleave({"ours": our_batches, "store": their_batches}, rounds)
    rows = [compare("V1 of 32,768 tokens, sae-lens's ActivationsStore", seconds, "store", "ours", ">=", 100)]
    for n_dead, words in ((0, ""), (1000, ", 1,000 of 4,096 latents dead")):
        ours, theirs = pair(n_dead)
        batch = expanded(SAME_STEPS)

        def our_step(ours: Learner = ours, theirs: Any = theirs, n_dead: int = n_dead) -> None:
            mark(ours, theirs, n_dead)
            ours.take_step()

        def their_step(theirs: Any = theirs, batch: Tensor = batch) -> None:
            theirs.step(batch)

        seconds = interleave({"ours": our_step, "stock": their_step}, rounds)
        rows.append(
            compare(f"SAE step of 4,096 tokens, sae-lens's trainer{words}", seconds, "stock", "ours", ">=", 7)
        )
    return rows


if __name__ == "__main__":
    command(measure, rounds=11)
