"""What do all static statistics of the carried direction cost on top of forward passes that measure nothing?"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from common import BATCH, POS, SHAPE, Row, build, command, compare, interleave

from satlens.carried.document_sums import Sums
from satlens.carried.documents import DocumentSet
from satlens.carried.ledger import ledger
from satlens.carried.opening import read_model
from satlens.carried.statics import depths, stream_means
from satlens.metrics import onednn_linears

TARGET = 1.1
"""Of a bare forward pass, for each document set."""


def measure(rounds: int) -> list[Row]:
    """CPU time of each pass over CPU time of a forward pass on the same rows.

    The means pass and the evaluation pass are held apart: each has its own documents. A forward pass is the model's
    own, head included, with its linear maps by the same kernels as ours. The two others frame it: blocks alone, since
    the statics need no head, and the model as transformers runs it on a CPU.
    """
    reader = read_model(build(), None)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, SHAPE["vocab_size"], (BATCH, POS), generator=generator)
    names = tuple(str(i) for i in range(BATCH))
    documents = DocumentSet(ids=tuple(ids.numpy()), names=names, kinds=names)
    rows = next(documents.batches(BATCH))
    entries = ledger(reader)
    fitted = Sums(reader, entries, documents)
    fitted.update(rows)
    means = torch.from_numpy(stream_means(fitted.arrays()))
    full = Sums(reader, entries, documents, means, depths(reader.n_layers))

    def fast(work: Callable[[Any], object]) -> None:
        with onednn_linears(reader.model):
            work(rows)

    def forward(rows: Any) -> None:
        with torch.no_grad():
            reader.model(input_ids=rows.input_ids, use_cache=False)

    runs: dict[str, Callable[[], object]] = {
        "means": partial(fast, fitted.update),
        "statics": partial(fast, full.update),
        "forward": partial(fast, forward),
        "blocks": partial(fast, lambda rows: reader.run(rows.input_ids)),
        "transformers": partial(forward, rows),
    }
    seconds = interleave(runs, rounds)
    words = {
        "means": "means of the fit documents",
        "statics": "all statics of the evaluated documents",
        "forward": "forward pass, same kernels",
        "blocks": "its blocks without head",
        "transformers": "forward pass by transformers",
    }
    return [
        compare(
            f"{words[name]} / {words[under]}",
            {"ours": seconds[name], under: seconds[under]},
            "ours",
            under,
            "<=",
            TARGET,
        )
        for under in ("forward", "blocks", "transformers")
        for name in ("means", "statics")
    ]


if __name__ == "__main__":
    command(measure, rounds=21)
