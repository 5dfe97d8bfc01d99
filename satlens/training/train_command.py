"""Train one model by a recipe, on one CPU, one GPU, or many by accelerate launch; started again, it resumes.

Examples:
    satlens train satlens/training/presets/reference-satformer.toml
    accelerate launch --multi_gpu --num_processes 8 -m satlens.cli train recipe.toml --out runs/mine
"""

from dataclasses import dataclass
from pathlib import Path

import tyro

from satlens.errors import UserError
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
    """CPU threads; left out, torch decides. Resume with the same number: sums depend on it in their last bit."""

    def __post_init__(self) -> None:
        if self.threads is not None and self.threads < 1:
            raise UserError(f"threads must be at least 1, got {self.threads}")


def run(config: Config) -> Path | None:
    """Train to the end of the recipe; returns the folder of the final model (in the first process alone, so that
    many processes print it once)."""
    given = {"data": config.data, "out": config.out}
    recipe = read_recipe(config.recipe, **{k: str(v) for k, v in given.items() if v is not None})

    import torch
    from accelerate import PartialState

    from satlens.training.loop import train

    if config.threads:
        torch.set_num_threads(config.threads)
    final = train(recipe)
    return final if PartialState().is_main_process else None
