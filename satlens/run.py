"""What was computed, from what, and is it whole: a run is a directory whose manifest is written last.

Nothing in a run names a user, a host or an absolute path, and its JSON is strict (NaN becomes null), so a run
can be handed on as it is. Tables, tensors and figures are artifacts with a digest; the log holds times
and is not.
"""

import hashlib
import importlib.metadata
import json
import os
import re
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, is_dataclass
from datetime import UTC, datetime
from enum import Enum
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, ValidationError

from satlens.errors import SatlensError, UserError

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd
    from plotly.graph_objects import Figure

SCHEMA_VERSION = 1
VERSIONED = ("satlens", "torch", "transformer-lens", "transformers", "numpy")
MANIFEST = "manifest.json"
_NAME = re.compile(r"[a-z]+/[a-z0-9][a-z0-9_-]*\.[a-z]+")
_PATH_IN_TEXT = re.compile(r"(?<![\w/.~])[/~][^\s/'\"]*/(?:[^\s/'\"]+/)*([^\s/'\"]*)")


class Artifact(BaseModel):
    """One file of a run: where it is, what it holds and the digest of its bytes."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    path: str
    sha256: str
    rows: int | None = None
    units: dict[str, str] = {}


class Manifest(BaseModel):
    """Everything needed to say what a run is; it exists only when the run is whole."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    schema_version: int
    verb: str
    run: str
    config: dict[str, Any]
    argv: list[str]
    seed: int | None
    precision: str | None
    versions: dict[str, str | None]
    git: dict[str, Any] | None
    model: dict[str, Any]
    baseline: dict[str, Any] | None
    data: dict[str, Any]
    inputs: list[dict[str, Any]]
    artifacts: list[Artifact]
    summary: dict[str, Any]
    started: str
    finished: str
    elapsed_s: float


class Run:
    """A run being written: artifacts go in one by one, `finish` makes it whole."""

    def __init__(self, path: Path, verb: str, config: dict[str, Any], argv: list[str]) -> None:
        self.path = path
        self._verb, self._config, self._argv = verb, config, argv
        self._started = datetime.now(UTC)
        self._artifacts: dict[str, Artifact] = {}
        self._finished = False

    def table(self, name: str, df: "pd.DataFrame", units: Mapping[str, str] | None = None) -> Path:
        """Write a table as parquet; units go into the file's column metadata and the manifest.

        A column without any value (no interval) is stored as nulls of a float column, so that readers need no
        special case. Raises SatlensError for a unit of a column that does not exist.
        """
        import pyarrow as pa
        import pyarrow.parquet as pq

        units = dict(units or {})
        if unknown := sorted(set(units) - set(df.columns)):
            raise SatlensError(f"table {name!r} has units for columns it lacks: {', '.join(unknown)}")
        arrow = pa.Table.from_pandas(df, preserve_index=False)
        fields = []
        for field in arrow.schema:
            kind = pa.float64() if pa.types.is_null(field.type) else field.type
            metadata = {"unit": units[field.name]} if field.name in units else None
            fields.append(pa.field(field.name, kind, metadata=metadata))
        arrow = arrow.cast(pa.schema(fields, metadata=arrow.schema.metadata))
        return self._add(f"tables/{name}.parquet", lambda part: pq.write_table(arrow, part), len(df), units)

    def tensor(
        self, name: str, tensors: Mapping[str, "np.ndarray[Any, Any]"], units: Mapping[str, str] | None = None
    ) -> Path:
        """Write named arrays as one safetensors file; `units` says what each array holds."""
        import numpy as np
        from safetensors.numpy import save_file

        arrays = {key: np.ascontiguousarray(value) for key, value in tensors.items()}
        path = f"tensors/{name}.safetensors"
        return self._add(path, lambda part: save_file(arrays, part), None, dict(units or {}))

    def figure(self, name: str, fig: "Figure") -> Path:
        """Write a plotly figure as JSON; everything else (HTML, SVG, PNG) can be made from it later."""
        text = json.dumps(json.loads(fig.to_json(remove_uids=False)), allow_nan=False, separators=(",", ":"))
        return self._add(f"figures/{name}.json", lambda part: part.write_text(text, encoding="utf-8"))

    def log(self, event: str, **fields: Any) -> None:
        """Append one line to log.jsonl, with the seconds since the run began."""
        elapsed = round((datetime.now(UTC) - self._started).total_seconds(), 3)
        line = json.dumps({"event": event, "elapsed_s": elapsed, **plain(fields)}, allow_nan=False)
        with (self.path / "log.jsonl").open("a", encoding="utf-8") as file:
            file.write(line + "\n")

    def finish(
        self,
        summary: Mapping[str, Any],
        inputs: Sequence["FinishedRun | Mapping[str, Any]"] = (),
        model: Mapping[str, Any] | None = None,
        data: Mapping[str, Any] | None = None,
        baseline: Mapping[str, Any] | None = None,
        precision: str | None = None,
    ) -> Path:
        """Write the manifest and return the run's directory.

        `model` and `baseline` hold model facts with their digest, `data` the data digest, token count and
        first ids, `inputs` the runs this one was made from. Raises SatlensError when called twice.
        """
        self._open()
        end = datetime.now(UTC)
        precision = precision or self._config.get("precision") or (model or {}).get("precision")
        manifest = Manifest(
            schema_version=SCHEMA_VERSION,
            verb=self._verb,
            run=self.path.name,
            config=self._config,
            argv=self._argv,
            seed=self._config.get("seed"),
            precision=None if precision is None else str(precision),
            versions=versions(),
            git=git_state(Path(__file__).resolve().parent.parent),
            model=plain(dict(model or {})),
            baseline=None if baseline is None else plain(dict(baseline)),
            data=plain(dict(data or {})),
            inputs=[_input(item) for item in inputs],
            artifacts=list(self._artifacts.values()),
            summary=plain(dict(summary)),
            started=self._started.isoformat(timespec="seconds"),
            finished=end.isoformat(timespec="seconds"),
            elapsed_s=round((end - self._started).total_seconds(), 3),
        )
        text = json.dumps(manifest.model_dump(mode="json"), indent=2, allow_nan=False, ensure_ascii=False)
        _write(self.path / MANIFEST, lambda part: part.write_text(text + "\n", encoding="utf-8"))
        self._finished = True
        return self.path

    def _add(
        self,
        relative: str,
        write: Callable[[Path], object],
        rows: int | None = None,
        units: dict[str, str] | None = None,
    ) -> Path:
        self._open()
        if not _NAME.fullmatch(relative):
            raise SatlensError(f"{relative!r} is no artifact name: use small letters, digits, '-' and '_'")
        if relative in self._artifacts:
            raise SatlensError(f"{relative} was already written in this run")
        path = self.path / relative
        path.parent.mkdir(exist_ok=True)
        _write(path, write)
        self._artifacts[relative] = Artifact(path=relative, sha256=sha256(path), rows=rows, units=units or {})
        return path

    def _open(self) -> None:
        if self._finished:
            raise SatlensError(f"{self.path.name} is finished and cannot change any more")


class Artifacts(Mapping[str, Any]):
    """The artifacts of one kind by name, each read when it is asked for."""

    def __init__(self, paths: Mapping[str, Path], read: Callable[[Path], Any]) -> None:
        self._paths, self._read = dict(paths), read

    def __getitem__(self, name: str) -> Any:
        return self._read(self._paths[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._paths)

    def __len__(self) -> int:
        return len(self._paths)


class FinishedRun:
    """A whole run, opened for reading."""

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self.path, self.manifest = path, manifest
        self.tables = Artifacts(self._kind("tables/"), _read_table)
        self.tensors = Artifacts(self._kind("tensors/"), _read_tensors)
        self.figures = Artifacts(self._kind("figures/"), _read_json)

    def _kind(self, prefix: str) -> dict[str, Path]:
        paths = [artifact.path for artifact in self.manifest.artifacts if artifact.path.startswith(prefix)]
        return {Path(path).stem: self.path / path for path in paths}


def start_run(
    root: Path, verb: str, config: dict[str, Any] | Any, argv: Sequence[str], run_id: str | None = None
) -> Run:
    """Make the directory `root/<verb>-<stamp>-<id>` and return the run to write into.

    `config` is a dict or a dataclass; the id is `run_id`, config's `run_id`, or six random hex digits.
    Raises UserError when that directory is already there.
    """
    fields = plain(config)
    run_id = run_id or fields.get("run_id") or os.urandom(3).hex()
    path = Path(root) / f"{verb}-{datetime.now(UTC).strftime('%Y%m%d-%H%M%S')}-{run_id}"
    try:
        path.mkdir(parents=True)
    except FileExistsError:
        raise UserError(f"{path} exists already: give another run id") from None
    return Run(path, verb, fields, [_no_paths(str(argument)) for argument in argv])


def measured(estimate: Any, low: Any, high: Any, unit: str = "") -> dict[str, Any]:
    """A number of a run's summary with its 95 % interval (ends may be None), as the report reads it."""
    return {"estimate": estimate, "low": low, "high": high, "unit": unit}


def open_run(path: Path | str) -> FinishedRun:
    """Open a finished run. Raises UserError when there is no manifest or it cannot be understood."""
    path = Path(path)
    file = path / MANIFEST
    if not file.is_file():
        raise UserError(f"{path}: no {MANIFEST}, so not finished or not a run; name a directory under runs/")
    try:
        manifest = Manifest.model_validate_json(file.read_bytes())
    except ValidationError as error:
        where = "; ".join(f"{'.'.join(map(str, e['loc'])) or 'file'}: {e['msg']}" for e in error.errors()[:3])
        raise UserError(f"{path}: {MANIFEST} cannot be read ({where}); make the run again") from None
    if (found := manifest.schema_version) != SCHEMA_VERSION:
        raise UserError(f"{path}: manifest version {found}, not {SCHEMA_VERSION}; make the run again")
    return FinishedRun(path, manifest)


def digest(run: FinishedRun) -> str:
    """What the run found, as one digest: sha256 over its artifacts' paths, digests, rows and units."""
    ordered = sorted(run.manifest.artifacts, key=lambda artifact: artifact.path)
    artifacts = [artifact.model_dump(mode="json") for artifact in ordered]
    return hashlib.sha256(json.dumps(artifacts, sort_keys=True).encode()).hexdigest()


def verify(run: FinishedRun) -> list[str]:
    """Hash every artifact again; the answer lists those missing or changed, and is empty for a sound run."""
    problems = []
    for artifact in run.manifest.artifacts:
        path = run.path / artifact.path
        if not path.is_file():
            problems.append(f"{artifact.path}: missing")
        elif sha256(path) != artifact.sha256:
            problems.append(f"{artifact.path}: changed since the run")
    return problems


def sha256(path: Path) -> str:
    """Digest of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def versions() -> dict[str, str | None]:
    """Installed versions of what shapes the numbers, from package metadata: nothing is imported for it."""
    found: dict[str, str | None] = {}
    for name in VERSIONED:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def git_state(root: Path) -> dict[str, Any] | None:
    """Short commit and whether files differ from it; None when `root` is not the top of a checkout."""

    def git(*words: str) -> str:
        command = ["git", "-C", str(root), *words]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.strip()

    try:
        if Path(git("rev-parse", "--show-toplevel")).resolve() != root.resolve():
            return None
        return {"commit": git("rev-parse", "--short", "HEAD"), "dirty": bool(git("status", "--porcelain"))}
    except (OSError, subprocess.SubprocessError):
        return None


def plain(value: Any) -> Any:
    """The value as strict JSON: dataclasses, named tuples, arrays opened; NaN as null, paths as base names.

    Raises SatlensError for what JSON cannot hold, rather than storing an object's address.
    """
    if value is None or (isinstance(value, bool | int) and not isinstance(value, Enum)):
        return value
    if isinstance(value, float):
        return float(value) if value - value == 0 else None
    if isinstance(value, Enum):
        return plain(value.value)
    if isinstance(value, str | PurePath):
        return _no_paths(str(value))
    if is_dataclass(value) and not isinstance(value, type):
        return plain(asdict(value))
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return plain(value._asdict())
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, set | frozenset):
        return sorted((plain(item) for item in value), key=str)
    if hasattr(value, "tolist"):
        return plain(value.tolist())
    if type(value).__module__ == "torch":
        return str(value)
    raise SatlensError(f"a {type(value).__name__} does not fit a run's JSON: pass numbers, text or lists")


def _no_paths(text: str) -> str:
    flag, equals, rest = text.partition("=")
    if equals and flag.startswith("-"):
        return f"{flag}={_no_paths(rest)}"
    if text.startswith(("/", "~", "../")) and "\n" not in text and len(text) > 1:
        return PurePath(text).name or text
    return _PATH_IN_TEXT.sub(lambda match: match.group(1) or "...", text)


def _input(item: "FinishedRun | Mapping[str, Any]") -> dict[str, Any]:
    if isinstance(item, FinishedRun):
        return {"run": item.manifest.run, "verb": item.manifest.verb, "digest": digest(item)}
    return dict(plain(item))


def _write(path: Path, write: Callable[[Path], object]) -> None:
    part = path.with_name(f".{path.name}.part")
    write(part)
    with part.open("rb") as file:
        os.fsync(file.fileno())
    os.replace(part, path)


def _read_table(path: Path) -> "pd.DataFrame":
    import pandas as pd

    return pd.read_parquet(path)


def _read_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def _read_tensors(path: Path) -> dict[str, Any]:
    from safetensors.numpy import load_file

    return dict(load_file(path))
