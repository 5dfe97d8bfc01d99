"""How a run's numbers, tables and provenance become HTML: text escaped, numbers with intervals."""

import base64
import html
from collections.abc import Iterator, Mapping
from typing import Any

import pandas as pd

from satlens.run import FinishedRun, digest, verify

NO_INTERVAL = "no interval: fewer than two documents"
_DEFUSE = ("=", "+", "-", "@", "\t", "\r", "'")


def key_numbers(run: FinishedRun) -> str:
    """The manifest's summary as a table: name, value, interval and tokens.

    An entry `{"estimate", "low", "high", "unit", "n_tokens"}` is a measured number; all else is
    shown as it is.
    """
    rows = []
    # what a run counted (predictions that were scored, say) before what its text held
    counted = run.manifest.summary.get("n_tokens", run.manifest.data.get("n_tokens"))
    for name, value in _flat(run.manifest.summary):
        if isinstance(value, Mapping):
            unit = f" {value['unit']}" if value.get("unit") else ""
            tokens = value.get("n_tokens", counted)
            shown = number(value["estimate"]) + unit
            ends = _ends(value, run.manifest.data.get("n_documents"))
        else:
            shown, ends, tokens = number(value), "", None
        rows.append((name, shown, ends, number(tokens) if tokens is not None else ""))
    if not rows:
        return ""
    head = ["quantity", "value", "95 % interval", "tokens"]
    width = 4 if any(row[2] or row[3] for row in rows) else 2
    return f"<h3>Key numbers</h3>\n{grid(head[:width], [row[:width] for row in rows])}"


def number(value: Any) -> str:
    """A number with five significant digits, a truth value in words, a list with commas."""
    if value is None:
        return "not defined"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.0f}" if value == int(value) and abs(value) < 1e15 else f"{value:,.5g}"
    if isinstance(value, list):
        return ", ".join(number(item) for item in value)
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {number(item)}" for key, item in value.items())
    return str(value)


def grid(head: list[str], rows: list[Any]) -> str:
    """An HTML table that scrolls sideways on a narrow screen; all cells are escaped."""
    top = "".join(f'<th scope="col">{html.escape(cell)}</th>' for cell in head)
    body = "\n".join(
        "<tr>" + "".join(f"<td>{html.escape(str(cell))}</td>" for cell in row) + "</tr>" for row in rows
    )
    return f'<div class="scroll"><table><thead><tr>{top}</tr></thead><tbody>\n{body}\n</tbody></table></div>'


def tables(run: FinishedRun, inline_rows: int, limit: int) -> str:
    """Each table as a CSV link, and written out when the run has no figure and the table is short.

    A table whose CSV is larger than `limit` bytes is named with its place in the run directory instead.
    """
    links, shown = [], []
    for name in run.tables:
        table = run.tables[name]
        text = csv(table).encode()
        label = f"{html.escape(name)} ({len(table):,} rows)"
        if len(text) <= limit:
            data = base64.b64encode(text).decode()
            href = f"data:text/csv;charset=utf-8;base64,{data}"
            link = f'<a download="{html.escape(name)}.csv" href="{href}">{label}</a>'
        else:
            link = f"{label}: <code>{html.escape(run.manifest.run)}/tables/{html.escape(name)}.parquet</code>"
        links.append(f"<li>{link}</li>")
        if not run.figures and len(table) <= inline_rows:
            rows = [[number(_scalar(cell)) for cell in row] for row in table.itertuples(index=False)]
            shown.append(
                f"<h3>{html.escape(name)}</h3>\n{grid([str(column) for column in table.columns], rows)}"
            )
    if not links:
        return ""
    return "\n".join([*shown, "<h3>Tables</h3>", "<ul>", *links, "</ul>"])


def csv(table: pd.DataFrame) -> str:
    """The table as CSV, safe to open in a spreadsheet: text that would be read as a formula gets a leading '.

    So does text that has one already, so that `undefused` gives back every cell. Only text columns are touched:
    negative numbers stay numbers. To get back "NA" and empty cells too, read with ``keep_default_na=False``.
    """
    safe = table.copy()
    for column in safe.columns:
        if not pd.api.types.is_numeric_dtype(safe[column]) and not pd.api.types.is_bool_dtype(safe[column]):
            safe[column] = safe[column].map(_defused, na_action="ignore")
    return str(safe.to_csv(index=False, lineterminator="\n"))


def undefused(cell: str) -> str:
    """What a text cell of `csv` was in the table."""
    return cell[1:] if cell.startswith("'") and cell[1:].startswith(_DEFUSE) else cell


def provenance(run: FinishedRun) -> str:
    """What the manifest says about where the numbers come from, and whether the files still match it."""
    manifest = run.manifest
    rows: list[tuple[str, Any]] = [
        ("run", manifest.run),
        ("command", " ".join(manifest.argv)),
        ("started, seconds", f"{manifest.started}, {manifest.elapsed_s:g}"),
        ("seed", number(manifest.seed)),
        ("precision", manifest.precision or "not stated"),
        ("versions", ", ".join(f"{name} {version or 'none'}" for name, version in manifest.versions.items())),
        ("git", number(manifest.git) if manifest.git else "not a checkout"),
        ("results digest", digest(run)),
    ]
    groups = [("model", manifest.model), ("baseline", manifest.baseline or {}), ("data", manifest.data)]
    for group, facts in [*groups, ("setting", manifest.config)]:
        rows += [(f"{group}: {name}", number(value)) for name, value in _flat(facts)]
    rows += [(f"input: {item.get('run', '')}", item.get("digest", number(item))) for item in manifest.inputs]
    rows += [(artifact.path, artifact.sha256) for artifact in manifest.artifacts]
    problems = verify(run)
    alert = (
        f'<p class="alert">Files differ from the manifest: {html.escape("; ".join(problems))}</p>'
        if problems
        else ""
    )
    return f"{alert}<details><summary>Provenance</summary>\n{grid(['what', 'value'], rows)}\n</details>"


def _ends(value: Mapping[str, Any], n_documents: int | None) -> str:
    """The interval in words; where it is missing, only too few documents are named as the reason."""
    low, high = value.get("low"), value.get("high")
    if low is not None and high is not None:
        return f"[{number(low)}, {number(high)}]"
    return NO_INTERVAL if n_documents is not None and n_documents < 2 else "no interval"


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        name = f"{prefix}{key}".replace("_", " ")
        if isinstance(value, Mapping) and "estimate" not in value:
            yield from _flat(value, f"{name}: ")
        else:
            yield name, value


def _scalar(cell: Any) -> Any:
    if isinstance(cell, str):
        return cell
    if pd.api.types.is_scalar(cell) and pd.isna(cell):
        return None
    return cell.tolist() if hasattr(cell, "tolist") else cell


def _defused(cell: Any) -> Any:
    return f"'{cell}" if isinstance(cell, str) and cell.startswith(_DEFUSE) else cell
