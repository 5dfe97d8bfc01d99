"""Train one model by a recipe, on one CPU, one GPU, or many by accelerate launch; started again, it resumes.

Examples:
    satlens train satlens/training/presets/reference-satformer.toml
    accelerate launch --num-processes 8 -m satlens.cli train recipe.toml --out runs/mine
"""

from dataclasses import dataclass
from pathlib import Path

import tyro

from satlens.training.recipe import read_recipe


@dataclass(frozen=True, kw_only=True)
class Config:
    """Flags of `satlens train`."""

    recipe: tyro.conf.Positional[Path]
    """A TOML file with the fields of satlens.training.recipe.Recipe."""
    data: Path | None = None
    """Folder made by `satlens data build`; overrides the recipe's."""
    out: Path | None = None
    """Folder for checkpoints and logs; overrides the recipe's."""
    threads: int | None = None
    """CPU threads; left out, torch decides."""


def run(config: Config) -> Path:
    """Train to the end of the recipe; returns the folder of the final model."""
    import torch

    from satlens.training.loop import train

    given = {"data": config.data, "out": config.out}
    recipe = read_recipe(config.recipe, **{k: str(v) for k, v in given.items() if v is not None})
    if config.threads:
        torch.set_num_threads(config.threads)
    return train(recipe)
