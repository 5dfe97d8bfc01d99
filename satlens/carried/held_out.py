"""How well a model predicts the documents that are evaluated: their NLL, document by document."""

import numpy as np
import torch
from jaxtyping import Float

from satlens.carried.documents import DocumentSet
from satlens.carried.reader import Reader


@torch.no_grad()
def held_out_nll(
    reader: Reader, documents: DocumentSet, batch_size: int = 8
) -> tuple[Float[np.ndarray, " doc"], Float[np.ndarray, " doc"]]:
    """Sum of NLL in nats over the far predictions of each document, and their number.

    One pass with the head, for the loss that stands beside a checkpoint's statistics: the training log has it at steps
    of its own, and other people's checkpoints come without a log.
    """
    sums, counts = (torch.zeros(documents.n_documents, dtype=torch.float64) for _ in range(2))
    for rows in documents.batches(batch_size, reader.device, reader.pad):
        nll = reader.nll(reader.run(rows.input_ids), rows).double().cpu()
        places = rows.docs_of(rows.scored).cpu()
        sums.index_add_(0, places, nll)
        counts.index_add_(0, places, torch.ones_like(nll))
    return sums.numpy(), counts.numpy()
