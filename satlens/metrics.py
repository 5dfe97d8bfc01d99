"""How surprised is the model: next-token NLL of chosen positions, without ever holding a window's logits."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

CHUNK_LOGITS = 1 << 22
"""Logits held at once (float32: 16 MiB, what the cache of a core can nearly keep)."""


def chunked_nll(
    hidden: Float[Tensor, "scored d_model"],
    unembed: Float[Tensor, "d_vocab d_model"],
    targets: Int[Tensor, " scored"],
    chunk_logits: int = CHUNK_LOGITS,
) -> Float[Tensor, " scored"]:
    """NLL in nats of ``targets`` under ``softmax(hidden @ unembed.T)``, float32, chunk by chunk.

    One buffer serves all chunks. The log-sum-exp is taken without shifting by the maximum, which is exact as long
    as nothing over- or underflows; a chunk where something does is done again the safe way.
    """
    n, d_vocab = len(hidden), unembed.shape[0]
    hidden, weight = hidden.float(), unembed.float()
    rows = max(1, min(chunk_logits // d_vocab, max(n, 1)))
    buffer = torch.empty(rows, d_vocab, dtype=torch.float32, device=hidden.device)
    nll = torch.empty(n, dtype=torch.float32, device=hidden.device)
    for start in range(0, n, rows):
        stop = min(start + rows, n)
        logits = torch.mm(hidden[start:stop], weight.T, out=buffer[: stop - start])
        wanted = logits.gather(1, targets[start:stop, None]).squeeze(1)
        total = logits.exp_().sum(dim=1)
        log_total = total.log()
        if not bool(((total > 1e-20) & torch.isfinite(log_total)).all()):
            log_total = torch.mm(hidden[start:stop], weight.T).logsumexp(dim=1)
        nll[start:stop] = log_total - wanted
    return nll
