"""V1 as a table: the first layer's values depend on the token id alone, so one row per id says it all."""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from satlens.architectures.steps import begin, step
from satlens.errors import SatlensError
from satlens.sites import Sites

ROWS = 4096
"""Token ids whose streams are laid out at once."""


@torch.no_grad()
def v1_table(
    model: Any, token_ids: Int[Tensor, " token"] | None = None
) -> Float[Tensor, "token kv_head d_head"]:
    """``RMSNorm(E) W_v (+ b)`` of layer 0, for ``token_ids`` or all ids, from a model or a bridge.

    Layer 0 sees the embedding and nothing else, and its values get neither a norm nor a position, so they are
    a function of the id. For a model without first-layer values these are the layer-0 values, which nothing later
    reads. HyperConnections' layer 0 reads a mix of equal streams, the embedding times a number that depends on the id.
    """
    decoder = getattr(model, "original_model", model).model
    embedding = _inner(decoder.embeddings).weight
    layer = _inner(decoder.layers[0])
    rows = embedding if token_ids is None else embedding[token_ids]
    # the model's own modules, so that no hook fires; MUDDFormer's values have a norm of their own
    norm = _inner(layer.attn_norm_v if hasattr(layer, "attn_norm_v") else layer.attn_norm)
    v_proj = _inner(_inner(layer.attn).v_proj)
    if hasattr(layer, "attn_hc"):
        rows = torch.cat([_mix(_inner(layer.attn_hc), part) for part in rows.split(ROWS)])
    values: Tensor = v_proj(norm(rows))
    return values.unflatten(-1, (-1, decoder.config.head_dim))


def _mix(connection: Any, rows: Float[Tensor, "token d_model"]) -> Float[Tensor, "token d_model"]:
    """What a hyper-connection's sub-layer reads of streams that all are ``rows``."""
    streams = rows[None, :, None].expand(1, -1, connection.n, -1)
    alpha, _ = connection.weights(streams)
    read: Tensor = (alpha.transpose(-1, -2) @ streams)[0, :, 0]
    return read


@torch.no_grad()
def check_v1_table(bridge: Any, sites: Sites, input_ids: Int[Tensor, "batch pos"]) -> None:
    """Compare the table with the values that layer 0 really computes on ``input_ids``.

    Raises:
        SatlensError: they differ by more than rounding, so this model's V1 is not a function of the token id.
    """
    seen: list[Tensor] = []

    def keep(tensor: Tensor, hook: Any) -> None:
        seen.append(tensor)

    with bridge.hooks(fwd_hooks=[(sites.name("value", 0), keep)]):
        step(bridge, 0, begin(bridge, input_ids))
    expected = v1_table(bridge, input_ids.flatten()).unflatten(0, tuple(input_ids.shape)).float()
    # kernels sum in another order for another number of rows: one unit in the last place of reduced precision
    bound = max(1e-5, 4 * torch.finfo(seen[0].dtype).eps) * max(1.0, float(expected.abs().max()))
    if sites.architecture == "dhc":
        bound *= 10  # streams may cancel in the mix, and the norm then magnifies what rounding left
    worst = float((seen[0].float() - expected).abs().max())
    if not worst <= bound:
        raise SatlensError(
            f"layer-0 values are not a table of the token id: they differ from RMSNorm(E) W_v by up to "
            f"{worst:.3g} (rounding explains {bound:.1g})"
        )


def _inner(module: Any) -> Any:
    """The model's own module, whether or not a bridge component stands in front of it."""
    return getattr(module, "original_component", module)
