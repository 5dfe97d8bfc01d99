"""Put finished runs on one offline HTML page: what was asked, figures, key numbers, tables, provenance."""

import base64
import html
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

from satlens.errors import UserError
from satlens.log import say
from satlens.plots import export
from satlens.report import numbers, template
from satlens.run import FinishedRun, open_run

INLINE_ROWS = 60
CSV_LIMIT = 512 * 1024
CSV_LIMIT_STATIC = 48 * 1024


def assemble(runs: Sequence[Path], out: Path, static: bool = False, title: str = "satlens report") -> Path:
    """Write `out/index.html` from run directories and return its path; the same runs give the same bytes.

    The page carries plotly.js (about 5 MB) and draws live figures. `static` carries SVG pictures instead, about
    100 kB a run; without a Chromium the live page is written, and a line on stderr says so.
    Raises UserError when there is no run, or one of them is not finished.
    """
    opened = _in_order([open_run(path) for path in runs])
    if not opened:
        raise UserError("a report needs at least one run: name directories under runs/")
    if static and (reason := export.cannot_draw()):
        say(f"no static page: {reason}; writing the live one")
        static = False
    pictures = _pictures(opened) if static else {}
    sections = [_section(run, number, static, pictures) for number, run in enumerate(opened, start=1)]
    live = not static and any(run.figures for run in opened)
    page = template.PAGE.format(
        title=html.escape(title),
        style=template.STYLE,
        library=f"<script>{get_plotlyjs()}</script>" if live else "",
        intro=_intro(opened),
        contents="\n".join(_contents(run, number) for number, run in enumerate(opened, start=1)),
        sections="\n".join(sections),
        glossary="\n".join(
            f"<dt>{html.escape(a)}</dt><dd>{html.escape(b)}.</dd>" for a, b in template.GLOSSARY
        ),
        script=f"<script>{template.DRAW}</script>" if live else "",
    )
    out.mkdir(parents=True, exist_ok=True)
    part = out / ".index.html.part"
    part.write_text(page, encoding="utf-8")
    os.replace(part, out / "index.html")
    return out / "index.html"


def _in_order(runs: list[FinishedRun]) -> list[FinishedRun]:
    """By verb in reading order, then as given; a run named twice appears once."""
    unique = list({run.manifest.run: run for run in runs}.values())

    def place(run: FinishedRun) -> tuple[int, str]:
        verb = run.manifest.verb
        known = verb in template.ORDER
        return (template.ORDER.index(verb) if known else len(template.ORDER), "" if known else verb)

    return sorted(unique, key=place)


def _intro(runs: list[FinishedRun]) -> str:
    tokens = sorted({int(run.manifest.data["n_tokens"]) for run in runs if run.manifest.data.get("n_tokens")})
    words = f"{len(runs)} run{'s' if len(runs) > 1 else ''}"
    if tokens:
        words += f" on {' and '.join(f'{count:,}' for count in tokens)} tokens"
    return (
        f"<p>{words}. Measured numbers stand with their interval and token count; "
        '<a href="#how-to-read">how to read this page</a> is at the end. The page works offline.</p>'
    )


def _contents(run: FinishedRun, number: int) -> str:
    return f'<li><a href="#run-{number}">{html.escape(_heading(run))}</a></li>'


def _heading(run: FinishedRun) -> str:
    names = " and ".join(name for name in (_name(run.manifest.model), _name(run.manifest.baseline)) if name)
    summary = run.manifest.summary
    # several runs of a verb on a page differ in these
    details = [f"dictionary seed {summary['sae_seed']}"] if summary.get("sae_seed") is not None else []
    details += [f"judge {summary['judge']}"] if summary.get("judge") else []
    return ", ".join([f"{run.manifest.verb}: {names}" if names else run.manifest.verb, *details])


def _section(run: FinishedRun, number: int, static: bool, pictures: Mapping[str, str]) -> str:
    question = template.QUESTIONS.get(run.manifest.verb, "")
    parts = [
        f'<section id="run-{number}" aria-label="{html.escape(_heading(run))}">',
        f"<h2>{html.escape(_heading(run))}</h2>",
        f"<p><strong>{html.escape(question)}</strong></p>" if question else "",
        f'<p class="muted">{html.escape(_asked(run))}</p>',
        numbers.key_numbers(run),
        _figures(run, number, static, pictures),
        numbers.tables(run, INLINE_ROWS, CSV_LIMIT_STATIC if static else CSV_LIMIT),
        numbers.provenance(run),
        "</section>",
    ]
    return "\n".join(part for part in parts if part)


def _asked(run: FinishedRun) -> str:
    """The request in words: on what model, on which text, with which seed."""
    manifest, data = run.manifest, run.manifest.data
    words = []
    if name := _name(manifest.model):
        words.append(f"Model {name}" + (f" against {base}" if (base := _name(manifest.baseline)) else ""))
    text = f"text {data['name']}" if data.get("name") else "text"
    if data.get("n_tokens") is not None:
        text += f": {int(data['n_tokens']):,} tokens"
    if data.get("n_documents") is not None:
        text += f" in {int(data['n_documents']):,} documents"
    if text != "text":
        words.append(text)
    if manifest.seed is not None:
        words.append(f"seed {manifest.seed}")
    # a run made from a notebook or a script has no command of its own
    if manifest.argv and manifest.argv[0] in (manifest.verb, manifest.verb.split("-")[0], "suite"):
        words.append(f"command: satlens {' '.join(manifest.argv)}")
    return "; ".join(words) + "."


def _figures(run: FinishedRun, number: int, static: bool, pictures: Mapping[str, str]) -> str:
    figures = {name: run.figures[name] for name in run.figures}
    if not figures:
        return ""
    parts = []
    for name, figure in figures.items():
        key = f"fig-{number}-{name}"
        title, caption = _title(figure, name), str(figure["layout"].get("meta", {}).get("caption", ""))
        label = html.escape(f"{title}. {caption}".strip(), quote=True)
        if key in pictures:
            layout = figure["layout"]
            size = f'width="{layout.get("width", 860)}" height="{layout.get("height", 480)}"'
            plot = f'<img {size} alt="{label}" src="data:image/svg+xml;base64,{pictures[key]}">'
        elif static:
            plot = "<p>This figure could not be drawn here; its numbers are in the tables below.</p>"
        else:
            plot = (
                f'<div data-figure="{key}" role="img" aria-label="{label}"></div>\n{_embedded(figure, key)}'
            )
        parts.append(
            f'<figure>\n<div class="plot" tabindex="0">{plot}</div>\n'
            f"<figcaption>{html.escape(caption)}</figcaption>\n</figure>"
        )
    return "\n".join(parts)


def _embedded(figure: Mapping[str, Any], key: str) -> str:
    """Figure JSON inside the page; `<` is written as an escape, so no text in it can end the element."""
    text = json.dumps(figure, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    return f'<script type="application/json" id="{key}">{text}</script>'


def _pictures(runs: list[FinishedRun]) -> dict[str, str]:
    """SVG of every figure in base64, drawn in one browser start, as far as they could be drawn."""
    drawn = {
        f"fig-{number}-{name}": go.Figure(run.figures[name])
        for number, run in enumerate(runs, start=1)
        for name in run.figures
    }
    with tempfile.TemporaryDirectory() as folder:
        paths = export.images(drawn, Path(folder), "svg")
        return {path.stem: base64.b64encode(path.read_bytes()).decode() for path in paths}


def _title(figure: Mapping[str, Any], name: str) -> str:
    title = figure["layout"].get("title", {})
    return str(title.get("text", name)) if isinstance(title, Mapping) else str(title)


def _name(facts: Mapping[str, Any] | None) -> str:
    return str((facts or {}).get("name", ""))
