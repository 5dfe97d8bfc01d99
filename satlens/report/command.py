"""Put finished runs on one offline page: figures with intervals, tables to download, provenance.

Examples:
    satlens report runs/gates-* runs/lens-* --out reports/mine
"""

from dataclasses import dataclass
from pathlib import Path

import tyro

from satlens.report import assemble


@dataclass(frozen=True, kw_only=True)
class Config:
    """Flags of `satlens report`."""

    runs: tyro.conf.Positional[tuple[Path, ...]]
    """Run directories, in any order."""
    out: Path = Path("reports/page")
    """Folder for index.html."""
    static: bool = False
    """Pictures instead of interactive figures: about 100 kB a run."""


def run(config: Config) -> Path:
    """Assemble the page; returns its path."""
    return assemble(list(config.runs), config.out, static=config.static)
