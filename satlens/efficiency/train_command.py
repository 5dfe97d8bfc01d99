"""What a training step costs in each architecture: time, tokens a second and peak memory, as ratios to the Transformer.

Every model is timed in a process of its own, all of them in turn, round after round; ratios are taken within a round
(paper, Table 3, on the machine at hand). On a CPU times are CPU seconds, which a busy machine disturbs less.

Examples:
    satlens bench train --preset reference
    satlens bench train --preset large --batch-size 4 --d-vocab 32000 --device cuda --precision bf16 --compile
"""

import sys
from pathlib import Path

from satlens.efficiency.command import Config, bench

__all__ = ["Config", "run"]


def run(config: Config) -> Path:
    """Time training steps; returns the run directory."""
    return bench("train", config, sys.argv[1:])
