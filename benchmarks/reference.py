"""What do all static statistics of the carried direction cost on top of forward passes that measure nothing?"""

from functools import partial

import torch
from common import BATCH, POS, SHAPE, Row, build, command, compare, interleave

from satlens.carried.documents import DocumentSet
from satlens.carried.ledger import ledger, value_ledger
from satlens.carried.opening import read_model
from satlens.carried.statics import depths, unit_means
from satlens.carried.sums import Sums
from satlens.metrics import onednn_linears

TARGET = 1.1
"""Of a bare forward pass, for each document set."""


def measure(rounds: int) -> list[Row]:
    """CPU time of each pass over CPU time of the model's blocks on the same rows, by the same kernels, without head.

    The means pass and the evaluation pass are held apart: each has its own documents. A third row compares both with
    what a user would write, transformers' own forward pass with the head.
    """
    reader = read_model(build(), None)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, SHAPE["vocab_size"], (BATCH, POS), generator=generator)
    names = tuple(str(i) for i in range(BATCH))
    documents = DocumentSet(ids=tuple(ids.numpy()), names=names, kinds=names)
    rows = next(documents.batches(BATCH))
    entries, norms = ledger(reader), value_ledger(reader)
    fitted = Sums(reader, entries, documents, value_norms=norms, gates=False)
    fitted.update(rows)
    directions = torch.from_numpy(unit_means(fitted.arrays()))
    full = Sums(
        reader,
        entries,
        documents,
        value_norms=norms,
        directions=directions,
        covariances=depths(reader.n_layers),
    )

    def fast(work: object) -> None:
        with onednn_linears(reader.model):
            work(rows)  # type: ignore[operator]

    def plain() -> None:
        with torch.no_grad():
            reader.model(input_ids=rows.input_ids, use_cache=False)

    runs = {
        "means": partial(fast, fitted.update),
        "evaluation": partial(fast, full.update),
        "bare": partial(fast, lambda rows: reader.run(rows.input_ids)),
        "plain": plain,
    }
    seconds = interleave(runs, rounds)
    out = []
    for name, words, under in (
        ("means", "means of the fit documents, bare blocks", "bare"),
        ("evaluation", "all static statistics, bare blocks", "bare"),
        ("evaluation", "all static statistics, transformers' forward", "plain"),
    ):
        pair = {"ours": seconds[name], under: seconds[under]}
        out.append(compare(words, pair, "ours", under, "<=", TARGET))
    return out


if __name__ == "__main__":
    command(measure, rounds=21)
