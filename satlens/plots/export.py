"""How a figure leaves plotly: JSON, an offline HTML page, and SVG or PNG where a Chromium is at hand."""

import importlib.util
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
import plotly.io as pio

from satlens.log import say
from satlens.run import open_run

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome", "msedge")
_RANDOM_ID = re.compile(r'id="(?:topdefs|defs|legenddefs)-([0-9a-f]{6})"')


def export(
    figures: Mapping[str, go.Figure | dict[str, Any]], out: Path, formats: Sequence[str] = ("svg", "png")
) -> list[Path]:
    """Write each figure as JSON and HTML, and as images where possible; returns the files written.

    The pages share one `plotly.min.js` beside them, so the folder works offline. A missing Chromium costs the
    images and one line on stderr, nothing else.
    """
    out.mkdir(parents=True, exist_ok=True)
    written: list[Path] = []
    drawn = {name: go.Figure(fig) for name, fig in figures.items()}
    for name, fig in drawn.items():
        name_traces(fig)
        json_path, html_path = out / f"{name}.json", out / f"{name}.html"
        json_path.write_text(str(fig.to_json(remove_uids=False)), encoding="utf-8")
        fig.write_html(html_path, include_plotlyjs="directory", div_id=name, config={"displaylogo": False})
        written += [json_path, html_path]
    for suffix in formats:
        written += images(drawn, out, suffix)
    return written


def export_runs(runs: Sequence[Path], out: Path, formats: Sequence[str] = ("svg", "png")) -> list[Path]:
    """Export every figure of finished runs, named ``verb-figure`` (``run-figure`` for a second run of a verb).

    Raises UserError for a directory that is no finished run.
    """
    named: dict[str, Any] = {}
    for run in map(open_run, runs):
        taken = sum(name.startswith(f"{run.manifest.verb}-") for name in named)
        prefix = run.manifest.verb if not taken else run.path.name
        named.update({f"{prefix}-{name}": run.figures[name] for name in run.figures})
    return export(named, out, formats)


def images(figures: Mapping[str, go.Figure], out: Path, suffix: str = "svg") -> list[Path]:
    """Write figures as `out/<name>.<suffix>` in one browser start; an empty list when that is not possible.

    Ids that plotly draws at random are replaced in SVG, so that the same figure gives the same bytes.
    """
    if not figures:
        return []
    if reason := cannot_draw():
        say(f"no {suffix.upper()} files: {reason}; HTML and JSON are complete")
        return []
    for fig in figures.values():
        name_traces(fig)
    out.mkdir(parents=True, exist_ok=True)
    paths = [out / f"{name}.{suffix}" for name in figures]
    for path in paths:
        path.unlink(missing_ok=True)
    reason = "the browser gave no reason"
    try:
        _draw(list(figures.values()), paths, suffix)
    except Exception as error:  # whatever a browser can fail with, the run must go on
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
    drawn = [path for path in paths if path.is_file()]
    if missing := [path.name for path in paths if path not in drawn]:
        say(f"not drawn: {', '.join(missing)} ({reason}); HTML and JSON are complete")
    if suffix == "svg":
        for path in drawn:
            path.write_text(fix_ids(path.read_text(encoding="utf-8"), path.stem), encoding="utf-8")
    return drawn


def _draw(figures: list[go.Figure], paths: list[Path], suffix: str) -> None:
    """All figures in one browser; kaleido passes over those it cannot draw without raising."""
    pio.write_images(
        figures,
        paths,
        format=suffix,
        scale=1 if suffix == "svg" else 2,
        width=[fig.layout.width or 860 for fig in figures],
        height=[fig.layout.height or 480 for fig in figures],
    )


def cannot_draw() -> str:
    """Why images cannot be made here; empty when they can."""
    if importlib.util.find_spec("kaleido") is None:
        return "the package kaleido is not installed (pip install 'satlens[figures]')"
    named = os.environ.get("BROWSER_PATH")
    if (named and Path(named).exists()) or any(shutil.which(browser) for browser in BROWSERS):
        return ""
    return "no Chrome or Chromium was found (on Debian: apt install chromium)"


def name_traces(fig: go.Figure) -> None:
    """Give traces fixed ids; plotly draws the missing ones at random."""
    for number, trace in enumerate(fig.data):
        trace.uid = trace.uid or f"t{number}"


def fix_ids(svg: str, name: str) -> str:
    """Replace the six random hex digits that plotly puts into an SVG's ids by the figure's name."""
    for found in sorted(set(_RANDOM_ID.findall(svg))):
        svg = re.sub(rf"(clip|defs-|legend|\bg){found}", rf"\g<1>{name}-", svg)
    return svg
