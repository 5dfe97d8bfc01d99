"""Train a Top-K dictionary of a model's V1 (or of another site), with seeds and a control, and measure it.

V1 is a function of the token id, so a dictionary of it trains on the exact table, weighted by how often the text has
each token: no forward pass, no sampling error in what is reported. Of the documents, every fifth is held out. A second
dictionary, trained alike, never sees a tenth of the token types: what it does on those says how much is remembered.

Started again, the command goes on where it was killed, to the same bytes (on as many threads), and skips seeds that
are finished. Other sites stream activations into sae-lens's own trainer, and start a killed seed over.

Examples:
    satlens sae train reference-satformer
    satlens sae train path/to/final --text corpus.jsonl --seeds 0 1 2 --device cuda
    satlens sae train path/to/final --site resid_post.5 --sae-tokens 20000000
"""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import tyro

from satlens.errors import UserError
from satlens.reading import Reading, Subject, data_facts, open_subject, open_text, process_place

V1_BATCH, OTHER_BATCH = 16_384, 4_096
"""Tokens drawn for one step: V1's merge into a fifth as many distinct rows, other sites' do not merge."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """Flags of `satlens sae train`."""

    model: tyro.conf.Positional[str] = "reference-satformer"
    """A checkpoint folder, or reference-satformer or reference-transformer."""
    site: str = "v1"
    """What it reads: v1, or value.N, mixed_value.N, resid_post.N, mlp_out.N of layer N."""
    k: int = 32
    """Active latents for each vector."""
    expansion: int = 16
    """Latents for each dimension of the vectors."""
    sae_tokens: int = 100_000_000
    """Tokens that training draws (or, from a text shorter than that, reads again and again)."""
    sae_batch: int | None = None
    """Tokens drawn for one step; left out, 16,384 for v1 and 4,096 for other sites, whose batches are not merged."""
    lr: float = 5e-4
    """Adam's learning rate at the start; it falls to 0 along a cosine."""
    seeds: tuple[int, ...] = (0,)
    """One dictionary for each."""
    withhold_types: float = 0.1
    """Share of the token types that the control, trained alike with the first seed, never sees; 0 trains none."""
    out: Path | None = None
    """Folder of the dictionaries; left out, runs/dictionaries/MODEL-SITE."""
    reading: Annotated[Reading, tyro.conf.arg(name="")] = field(default_factory=lambda: Reading(tokens=0))
    """Text and machine settings."""

    def __post_init__(self) -> None:
        if not self.seeds or len(set(self.seeds)) < len(self.seeds) or min(self.seeds) < 0:
            raise UserError(f"seeds must be distinct and not negative, got {' '.join(map(str, self.seeds))}")
        if not 0 <= self.withhold_types < 1:
            raise UserError(
                f"the share of withheld types must be at least 0 and below 1, got {self.withhold_types}"
            )


def run(config: Config) -> list[Path]:
    """Train what is not trained yet; returns the run that measured it, and the folder of each seed's dictionary.

    Raises:
        UserError: a site that the model lacks, sizes that do not fit, a finished folder of another request.
        SatlensError: training diverged, or a file could not be written.
    """
    from sae.dictionary import V1
    from sae.evaluate import evaluate_dictionaries

    if process_place()[1] > 1:
        raise UserError("satlens sae train runs as one process: start it without torchrun")
    subject = open_subject(config.model, config.reading)
    corpus = open_text(subject, config.reading)
    if config.site != V1:
        return train_sites(subject, corpus, config)
    folders, types_folder = train_v1(subject, corpus, config)
    run = evaluate_dictionaries(subject, corpus, folders, types_folder, config.reading, config)
    return [run, *folders]


def train_v1(subject: Subject, corpus: Any, config: Config) -> tuple[list[Path], Path | None]:
    """A dictionary for each seed, and the control with withheld types (None without)."""
    from sae.table import split_counts, v1_rows, withheld_types
    from sae.train import make_dictionary

    # mps lacks some of the kernels, and the table is small
    table = v1_rows(subject.bridge).to("cpu" if config.reading.device == "mps" else config.reading.device)
    counts = split_counts(corpus, subject.sites.d_vocab)

    def make(seed: int, name: str, withheld: list[int]) -> Path:
        recipe = recipe_of(config, seed, table.shape[1])
        facts = {**facts_of(subject, corpus, config, recipe), "withheld": withheld}
        return make_dictionary(table, counts, recipe, facts, out_of(config, subject) / name)

    folders = [make(seed, f"seed-{seed}", []) for seed in config.seeds]
    first = config.seeds[0]
    withheld = withheld_types(counts, config.withhold_types, first).tolist()
    return folders, make(first, f"seed-{first}-types", withheld) if withheld else None


def train_sites(subject: Subject, corpus: Any, config: Config) -> list[Path]:
    """A dictionary of another site for each seed."""
    from sae.activations import parse_site, train_site, width

    role, layer = parse_site(config.site, subject.sites)
    config = replace(config, site=f"{role}.{layer}")

    def make(seed: int) -> Path:
        recipe = recipe_of(config, seed, width(role, subject.sites))
        data = data_facts(subject, corpus, config.reading)
        facts = {**facts_of(subject, corpus, config, recipe), "withheld": [], "data": data}
        folder = out_of(config, subject) / f"seed-{seed}"
        return train_site(subject, corpus, recipe, facts, folder, config.reading.batch_size)

    return [make(seed) for seed in config.seeds]


def recipe_of(config: Config, seed: int, d_in: int) -> Any:
    """The part of the flags that training needs.

    Raises:
        UserError: it cannot work for vectors of ``d_in`` values.
    """
    from sae.dictionary import V1
    from sae.train import Recipe

    usual = V1_BATCH if config.site == V1 else OTHER_BATCH
    recipe = Recipe(
        k=config.k,
        expansion=config.expansion,
        tokens=config.sae_tokens,
        batch=usual if config.sae_batch is None else config.sae_batch,
        lr=config.lr,
        seed=seed,
    )
    recipe.check(d_in)
    return recipe


def out_of(config: Config, subject: Subject) -> Path:
    """Where the dictionaries go."""
    return config.out or Path("runs/dictionaries") / f"{subject.name.replace('/', '-')}-{config.site}"


def facts_of(subject: Subject, corpus: Any, config: Config, recipe: Any) -> dict[str, Any]:
    """What a reader of the dictionary must know, and what must agree for it to be the one that was asked for."""
    model = {name: subject.facts[name] for name in ("name", "digest", "architecture")}
    data = data_facts(subject, corpus, config.reading)
    return {
        "site": config.site,
        "model": {**model, "n_kv_heads": subject.sites.n_kv_heads, "d_head": subject.sites.d_head},
        "seed": recipe.seed,
        "tokens": recipe.steps * recipe.batch,
        "steps": recipe.steps,
        "batch": recipe.batch,
        "k": recipe.k,
        "expansion": recipe.expansion,
        "lr": recipe.lr,
        "aux_loss_coefficient": recipe.aux_loss_coefficient,
        "precision": config.reading.dtype,
        # how the text is laid out decides nothing about counts
        "data": {name: data[name] for name in ("text", "digest", "n_documents", "n_tokens", "n_empty")},
    }
