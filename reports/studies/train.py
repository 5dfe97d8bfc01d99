"""Train the small models of the studies: architectures, gates, depth against width, two seeds each. It resumes.

Example: python reports/studies/train.py --data runs/reference/data --out runs/studies
"""

import argparse
from pathlib import Path

import torch

from satlens.training.loop import train
from satlens.training.preset import preset
from satlens.training.recipe import new_recipe

ARCHITECTURES = ("transformer", "satformer", "resformer", "denseformer", "muddformer", "hyperconnections")
GATES = ("sigmoid", "tanh", "identity", "softmax", "softmax_sigmoid")
SETTINGS: dict[str, tuple[str, str, str | None]] = {
    **{arch: ("study", arch, None) for arch in ARCHITECTURES},
    **{f"{arch}-thin": ("study-thin", arch, None) for arch in ("satformer", "resformer")},
    **{f"satformer-{gate}": ("study", "satformer", gate) for gate in GATES},
}
"""Name -> scale, architecture, gate; plain satformer has the ReLU gate."""
# with the paper's period of 5 a model of six layers would have one average
CHANGES = {"denseformer": {"dwa_dilation": 1, "dwa_period": 1}}


def main() -> None:
    """Train what is left to train, one model after the other, seed by seed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, default=Path("runs/reference/data"))
    parser.add_argument("--out", type=Path, default=Path("runs/studies"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[42, 43])
    parser.add_argument("--only", nargs="+", choices=list(SETTINGS), default=list(SETTINGS))
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    for name in given.only:
        scale, arch, gate = SETTINGS[name]
        fields = preset(scale, arch, gate)
        fields["model"] |= CHANGES.get(arch, {})
        for seed in given.seeds:
            out = given.out / f"{name}-{seed}"
            if not (out / "final" / "satlens.json").exists():
                places = {"data": str(given.data), "out": str(out), "seed": seed}
                print(train(new_recipe({**fields, **places}, name)), flush=True)


if __name__ == "__main__":
    main()
