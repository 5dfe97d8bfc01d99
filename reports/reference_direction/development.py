"""Train the eight development models: GELU with bias and SwiGLU, attention on and off, two seeds. It resumes.

Example: python reports/reference_direction/development.py --data runs/reference/data --out runs/development
Then:    satlens reference-development runs/development/*
"""

import argparse
from pathlib import Path

import torch

from satlens.training.loop import train
from satlens.training.recipe import read_recipe

PRESETS = Path(__file__).parents[2] / "satlens" / "training" / "presets"
ARMS = ("gelu", "gelu-noattn", "swiglu", "swiglu-noattn")


def main() -> None:
    """Train what is left to train, one model after the other, seed by seed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, default=Path("runs/reference/data"))
    parser.add_argument("--out", type=Path, default=Path("runs/development"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[42, 43])
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    for seed in given.seeds:
        for arm in ARMS:
            out = given.out / f"{arm}-{seed}"
            if (out / "final" / "satlens.json").exists():
                continue
            preset = PRESETS / f"development-{arm}.toml"
            print(train(read_recipe(preset, data=str(given.data), out=str(out), seed=seed)), flush=True)


if __name__ == "__main__":
    main()
