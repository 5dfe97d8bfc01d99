"""Train one model by a recipe, on one CPU, one GPU, or many by accelerate launch; started again, it resumes.

Examples:
    satlens train recipe.toml
    satlens train --preset small --arch satformer --data data/fineweb --out runs/small-satformer
    satlens train --preset reference --arch hyperconnections --data runs/reference/data --out runs/reference/hc
    accelerate launch --multi_gpu --num_processes 8 -m satlens.cli train recipe.toml --out runs/mine
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

from satlens.errors import UserError
from satlens.training.preset import preset
from satlens.training.recipe import Recipe, new_recipe, read_recipe


@dataclass(frozen=True, kw_only=True)
class Config:
    """Flags of `satlens train`."""

    recipe: tyro.conf.Positional[Path | None] = None
    """A TOML file with the fields of satlens.training.recipe.Recipe; or give --preset and --arch."""
    preset: str | None = None
    """Scale of a preset: small, medium, large, xl (the paper's), thin (760M, deeper), reference (two CPU cores)."""
    arch: str | None = None
    """Architecture of a preset: transformer, satformer, resformer, denseformer, muddformer, hyperconnections."""
    gate: str | None = None
    """SATFormer's gate in a preset: relu, sigmoid, tanh, identity, softmax, softmax_sigmoid."""
    data: Path | None = None
    """Folder made by `satlens data build`; overrides the recipe's."""
    out: Path | None = None
    """Folder for checkpoints and logs; overrides the recipe's."""
    seed: int | None = None
    """Decides weights and data order; overrides the recipe's."""
    threads: int | None = None
    """CPU threads; left out, torch decides. Resume with the same number: sums depend on it in their last bit."""

    def __post_init__(self) -> None:
        if self.threads is not None and self.threads < 1:
            raise UserError(f"threads must be at least 1, got {self.threads}")
        if (self.recipe is None) == (self.preset is None and self.arch is None):
            raise UserError("give a recipe file, or --preset and --arch (satlens train --help shows both)")
        if self.recipe is None and (self.preset is None or self.arch is None):
            raise UserError("a preset needs both --preset and --arch")
        if self.recipe is not None and self.gate is not None:
            raise UserError("--gate belongs to presets: a recipe file names its gate in the model section")
        if self.recipe is None and (self.data is None or self.out is None):
            raise UserError("a preset needs --data (a folder of `satlens data build`) and --out")


def run(config: Config) -> Path | None:
    """Train to the end of the recipe; returns the folder of the final model (in the first process alone, so that
    many processes print it once)."""
    recipe = recipe_of(config)

    import torch
    from accelerate import PartialState

    from satlens.training.loop import train

    if config.threads:
        torch.set_num_threads(config.threads)
    final = train(recipe)
    return final if PartialState().is_main_process else None


def recipe_of(config: Config) -> Recipe:
    """The recipe that the flags ask for.

    Raises:
        UserError: no such recipe or preset, or one that makes no sense.
    """
    folders = {"data": config.data, "out": config.out}
    given: dict[str, Any] = {name: str(folder) for name, folder in folders.items() if folder is not None}
    given |= {} if config.seed is None else {"seed": config.seed}
    if config.recipe is not None:
        return read_recipe(config.recipe, **given)
    assert config.preset is not None and config.arch is not None
    fields = preset(config.preset, config.arch, config.gate)
    return new_recipe({**fields, **given}, f"preset {config.preset}, {config.arch}")
