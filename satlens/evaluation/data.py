"""Where a task's documents come from: a local copy, or the hub where one is reachable.

A local copy is one file a task in `--offline-dir`: NAME.jsonl (one object a line) or NAME.parquet, NAME as `--tasks`
spells it, with the fields that `satlens.evaluation.tasks` lists and under the names the hub's data set gives them.
"""

import json
from pathlib import Path
from typing import Any

from satlens.errors import UserError
from satlens.evaluation.tasks import Task

Documents = list[dict[str, Any]]


class Unavailable(UserError):
    """A data set cannot be had: this task is left out, and its row says why."""


def local_documents(task: Task, folder: Path) -> tuple[Documents, str]:
    """``(documents, file name)`` of a task's local copy.

    Raises:
        Unavailable: there is no file of that task in the folder.
        UserError: no such folder, or a file that cannot be read, is empty or lacks fields.
    """
    if not folder.is_dir():
        raise UserError(
            f"no folder {folder}: --offline-dir takes a folder with one NAME.jsonl or .parquet a task"
        )
    file = next(
        (p for p in (folder / f"{task.name}{s}" for s in (".jsonl", ".parquet")) if p.is_file()), None
    )
    if file is None:
        raise Unavailable(f"no {task.name}.jsonl or {task.name}.parquet in {folder}")
    documents = _from_parquet(file) if file.suffix == ".parquet" else _from_jsonl(file)
    if not documents:
        raise UserError(f"{file} holds no documents")
    check_fields(task, documents, str(file))
    return documents, file.name


def hub_documents(task: Task) -> tuple[Documents, str]:
    """``(documents, data set)`` of a task's validation split on the hub. No code of the data set is run: the
    ``datasets`` releases that satlens needs know no loading scripts.

    Raises:
        Unavailable: the hub or the data set cannot be reached.
        UserError: the data set has other fields than this task needs.
    """
    import datasets

    name, _, configuration = task.hub.partition(":")
    try:
        rows = datasets.load_dataset(name, configuration or None, split="validation")
    except Exception as error:  # the library raises whatever its many back ends raise
        raise unavailable(task, error) from error
    documents = [dict(row) for row in rows]
    check_fields(task, documents, task.hub)
    return documents, task.hub


def unavailable(task: Task, error: Exception) -> Unavailable:
    """What is said of a data set that did not come, and from then on nothing waits for the hub any more."""
    if isinstance(error, ConnectionError):
        _stop_asking()
    reason = " ".join(str(error).split()) or type(error).__name__
    return Unavailable(
        f"data set {task.hub} cannot be fetched or read ({reason}): give --offline-dir with a local copy"
    )


def _stop_asking() -> None:
    """An unreachable hub costs half a minute of retries a data set; what is cached still opens."""
    import datasets
    import huggingface_hub.constants

    datasets.config.HF_HUB_OFFLINE = True
    huggingface_hub.constants.HF_HUB_OFFLINE = True


def check_fields(task: Task, documents: Documents, where: str) -> None:
    """Require every document to have what the task is asked with.

    Raises:
        UserError: the first document that lacks something, by number, and what it lacks.
    """
    for number, document in enumerate(documents, 1):
        lacking = [[f for f in fields if document.get(f) is None] for fields in task.fields]
        if all(lacking):
            wanted = " or ".join(", ".join(fields) for fields in task.fields)
            least = min(lacking, key=len)
            raise UserError(
                f"{where}, document {number}: lacks {', '.join(least)}; {task.name} needs {wanted}"
            )


def _from_jsonl(file: Path) -> Documents:
    documents = []
    try:
        lines = file.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{file} cannot be read ({error})") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            document = json.loads(line)
        except ValueError as error:
            raise UserError(f"{file}:{number}: not JSON ({error}); expected one object a line") from error
        if not isinstance(document, dict):
            raise UserError(
                f"{file}:{number}: expected one JSON object a line, found {type(document).__name__}"
            )
        documents.append(document)
    return documents


def _from_parquet(file: Path) -> Documents:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        documents: Documents = pq.read_table(file).to_pylist()
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"{file} is no readable parquet file ({error})") from error
    return documents
