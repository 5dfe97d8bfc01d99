"""Put a trained pair, its held-out text and its data sheet into satlens/reference, from where they ship.

Example: python reports/reference/package.py --work runs/reference
"""

import argparse
import hashlib
import json
import shutil
from pathlib import Path

import numpy as np
import pandas as pd

from satlens.reference import FOLDER, MODELS
from satlens.training.data import write_json

HELDOUT_TOKENS = 400_000
# the Universal Declaration of Human Rights in many languages: the package that carries it is MIT
ALSO_FREE = ("human_rights",)


def heldout(data: Path, out: Path) -> dict[str, object]:
    """Whole held-out documents of public-domain text, in the order of their digests, so that any prefix is a mix."""
    table = pd.read_parquet(data / "val.docs.parquet")
    ids = np.fromfile(data / "val.bin", dtype="<u2")
    free = table["licence"].str.contains("public domain") | table["source"].isin(ALSO_FREE)
    rows = []
    for row in table[free].itertuples():
        body = ids[row.start : row.start + row.n_tokens]
        rows.append((hashlib.sha256(body.tobytes()).hexdigest(), row, body))
    rows.sort(key=lambda item: item[0])
    ends = np.cumsum([len(body) for _, _, body in rows])
    rows = rows[: int(np.searchsorted(ends, HELDOUT_TOKENS)) + 1]
    out.mkdir(parents=True, exist_ok=True)
    stream = np.concatenate([body for _, _, body in rows]).astype("<u2")
    (out / "heldout.bin").write_bytes(stream.tobytes())
    sizes = np.array([len(body) for _, _, body in rows])
    index = pd.DataFrame(
        {
            "start": np.cumsum(sizes) - sizes,
            "n_tokens": sizes,
            "source": [row.source for _, row, _ in rows],
            "kind": [row.kind for _, row, _ in rows],
            "licence": [row.licence for _, row, _ in rows],
        }
    )
    index.to_parquet(out / "heldout.docs.parquet", index=False)
    by_source = (
        index.groupby(["source", "kind", "licence"])["n_tokens"]
        .agg(documents="size", tokens="sum")
        .reset_index()
    )
    return {
        "tokens": int(sizes.sum()),
        "documents": len(index),
        "sha256": hashlib.sha256(stream.tobytes()).hexdigest(),
        "sources": json.loads(by_source.to_json(orient="records")),
    }


def heldout_perplexity() -> dict[str, dict[str, float]]:
    """Perplexity of both models on all shipped held-out text, with intervals, as `satlens lens` measures it."""
    from satlens.accumulators import NllByDocument
    from satlens.bootstrap import document_weights, perplexity_interval
    from satlens.reading import Reading, measure, open_subject, open_text
    from satlens.stream import Condition

    reading, out = Reading(tokens=0), {}
    for name, folder in MODELS.items():
        subject = open_subject(name, reading)
        corpus = open_text(subject, reading)
        clean = Condition(name="clean", accumulators=(NllByDocument(corpus.n_documents),))
        measure(subject, corpus, [clean], reading, name)
        sums = clean.accumulators[0]
        weights = document_weights(corpus.n_documents)
        value = perplexity_interval(sums.nll.numpy(), sums.count.numpy(), weights)
        out[folder] = {**value._asdict(), "predictions": int(sums.count.sum())}
    return out


def main() -> None:
    """Copy the two models and write the sheet."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", type=Path, default=Path("runs/reference"))
    work = parser.parse_args().work
    sheet: dict[str, object] = {"heldout": heldout(work / "data", FOLDER / "text"), "models": {}}
    for folder in MODELS.values():
        target = FOLDER / folder
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(work / folder / "final", target)
        shutil.copy(work / folder / "log.jsonl", target / "training-log.jsonl")
        weights = target / "model.safetensors"
        sheet["models"][folder] = {
            "bytes": weights.stat().st_size,
            "sha256": hashlib.sha256(weights.read_bytes()).hexdigest(),
            **json.loads((target / "satlens.json").read_text()),
        }
    perplexities = heldout_perplexity()
    for folder, value in perplexities.items():
        sheet["models"][folder]["heldout_perplexity"] = value
    sources = json.loads((work / "corpus" / "sources.json").read_text())
    sheet["data"] = json.loads((work / "data" / "data.json").read_text())
    sheet["sources"] = sources
    write_json(FOLDER / "datasheet.json", sheet)


if __name__ == "__main__":
    main()
