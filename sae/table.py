"""What a V1 dictionary is trained on: one row per token id, weighted by how often the text has it."""

from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from sae.dictionary import Counts
from satlens.tokens import Corpus, split_calibration
from satlens.v1 import v1_table


def v1_rows(model_or_bridge: Any) -> Float[Tensor, "d_vocab d_in"]:
    """V1 of every token id, KV heads joined (``d_in = n_kv_heads * d_head``), in float32."""
    return v1_table(model_or_bridge).flatten(1).float()


def token_counts(corpus: Corpus, d_vocab: int) -> Int[Tensor, " d_vocab"]:
    """How often each token id occurs in the documents (separators not counted)."""
    counts = np.zeros(d_vocab, dtype=np.int64)
    for index in range(corpus.n_documents):
        counts += np.bincount(corpus.document(index), minlength=d_vocab)
    return torch.from_numpy(counts)


def split_counts(corpus: Corpus, d_vocab: int, every: int = 5) -> Counts:
    """Counts of the documents to train on and of every ``every``-th, which is held out.

    Raises:
        UserError: fewer than two documents.
    """
    heldout, train = split_calibration(corpus, every)
    return Counts(train=token_counts(train, d_vocab), heldout=token_counts(heldout, d_vocab))


def withheld_types(counts: Counts, share: float, seed: int) -> Int[Tensor, " type"]:
    """Token ids for a second dictionary never to see: ``share`` of those the text has, chosen at random.

    A dictionary that only remembers its few thousand vectors does well on held-out *counts* and badly on these.
    """
    seen = counts.total.nonzero().squeeze(1)
    order = torch.randperm(len(seen), generator=torch.Generator().manual_seed(seed))
    return seen[order[: round(share * len(seen))]].sort().values
