"""What a forward pass costs in each architecture: time, tokens a second and peak memory, as ratios to the Transformer.

As `satlens bench train`, without gradients: logits of every position.

Examples:
    satlens bench forward --preset reference
    satlens bench forward --preset small --d-vocab 32000 --seq-length 4096 --device cuda --precision bf16
"""

import sys
from pathlib import Path

from satlens.efficiency.command import Config, bench

__all__ = ["Config", "run"]


def run(config: Config) -> Path:
    """Time forward passes; returns the run directory."""
    return bench("forward", config, sys.argv[1:])
