"""Write the figures of finished runs as standalone HTML, SVG and PNG, from the stored figures: no model is run.

Examples:
    satlens figures runs/gates-* --out figures
    satlens figures runs/ablate-20260101-120000-abc123 --formats svg
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro

from satlens.plots.export import export_runs


@dataclass(frozen=True, kw_only=True)
class Config:
    """Flags of `satlens figures`."""

    runs: tyro.conf.Positional[tuple[Path, ...]]
    """Run directories."""
    out: Path = Path("figures")
    """Folder to write to; files are named verb-figure."""
    formats: tuple[Literal["svg", "png"], ...] = ("svg", "png")
    """Images beside HTML and JSON; they need Chrome or Chromium, without one they are left out with a note."""


def run(config: Config) -> list[Path]:
    """Export; returns the files."""
    return export_runs(list(config.runs), config.out, config.formats)
