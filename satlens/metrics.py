"""How surprised is the model: next-token NLL of chosen positions, without ever holding a window's logits."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

CHUNK_LOGITS = 3 << 19
"""Logits held at once (float32: 6 MiB; fewer cost time, more only memory)."""
SMALLEST_ONEDNN = 64
"""Output width from which a linear map gains from oneDNN; a gate projection, one output a head, does not."""
LOG2_E = math.log2(math.e)
"""Logits are taken in bits inside: powers of 2 cost a quarter of powers of e."""


def chunked_nll(
    hidden: Float[Tensor, "scored d_model"],
    unembed: Float[Tensor, "d_vocab d_model"],
    targets: Int[Tensor, " scored"],
    chunk_logits: int = CHUNK_LOGITS,
) -> Float[Tensor, " scored"]:
    """NLL in nats of ``targets`` under ``softmax(hidden @ unembed.T)``, float32, chunk by chunk.

    The log-sum-exp is taken without shifting by the maximum, which is exact as long as nothing over- or
    underflows; a chunk where something does is done again the safe way.
    """
    n, d_vocab = len(hidden), unembed.shape[0]
    rows = max(1, min(chunk_logits // d_vocab, max(n, 1)))
    hidden, product = hidden.detach().float() * LOG2_E, _product(unembed.detach().float(), rows)
    parts = [
        _bits(product, hidden[start : start + rows], targets[start : start + rows])
        for start in range(0, n, rows)
    ]
    return torch.cat(parts or [hidden.new_empty(0)]) / LOG2_E


def _bits(product: Callable[[Tensor], Tensor], hidden: Tensor, targets: Tensor) -> Tensor:
    """NLL of one chunk in bits; its logits are gone before the next chunk's are made."""
    logits = product(hidden)
    wanted = logits.gather(1, targets[:, None]).squeeze(1)
    total = logits.exp2_().sum(dim=1)
    log_total = total.log2()
    if not bool(((total > 1e-20) & torch.isfinite(log_total)).all()):
        log_total = (product(hidden) / LOG2_E).logsumexp(dim=1) * LOG2_E
    return log_total - wanted


def _product(weight: Tensor, rows: int) -> Callable[[Tensor], Tensor]:
    """``x @ weight.T`` for at most ``rows`` rows at a time, each result valid until the next."""
    if onednn_serves(weight):
        return lambda x: onednn_linear(x, weight)
    buffer = torch.empty(rows, len(weight), dtype=weight.dtype, device=weight.device)
    return lambda x: torch.mm(x, weight.T, out=buffer[: len(x)])


def onednn_serves(weight: Tensor) -> bool:
    """Whether ``onednn_linear`` can and should be used: float32 on CPU."""
    return (
        weight.device.type == "cpu" and weight.dtype == torch.float32 and torch.backends.mkldnn.is_available()
    )


def onednn_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``F.linear`` by oneDNN, without gradients, still float32.

    torch's own choice for float32 on CPU is MKL, which takes more than twice as long on CPUs that are not Intel's.
    """
    return F.linear(x.to_mkldnn(), weight, bias).to_dense()


@contextmanager
def onednn_linears(model: nn.Module) -> Iterator[None]:
    """The model's linear maps by oneDNN for as long as a pass lasts, where that serves; hooks fire as ever."""
    taken = [
        module
        for module in model.modules()
        if type(module) is nn.Linear
        and "forward" not in vars(module)  # somebody else's replacement stays
        and module.out_features >= SMALLEST_ONEDNN
        and onednn_serves(module.weight)
    ]
    for module in taken:
        module.forward = partial(_linear, module)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for module in taken:
            del module.forward


def _linear(module: nn.Linear, x: Tensor) -> Tensor:
    return onednn_linear(x, module.weight, module.bias)
