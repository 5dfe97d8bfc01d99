"""A bridge run one block at a time, so that a pass can start again at an edited layer."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from satlens.errors import SatlensError
from satlens.hf.decoder import mask_for, positions_for


@dataclass(frozen=True, kw_only=True)
class State:
    """All that the next block depends on: not the residual stream alone, since later layers also read its memory."""

    residual: Float[Tensor, "batch pos *stream d_model"]
    """Input of the next block (MUDDFormer: its latest output; HyperConnections: all streams)."""
    memory: Any
    """What blocks read beside it, as the model's ``advance`` hands it on: None, first-layer values, or nested tuples of
    tensors ``[batch pos ...]`` (DenseFormer's outputs, MUDDFormer's streams and outputs)."""
    position_embeddings: tuple[Float[Tensor, "rows pos d_head"], Float[Tensor, "rows pos d_head"]]
    """Rotary cosine and sine; rows is batch, or 1 when all rows have the same positions."""
    attention_mask: Bool[Tensor, "rows 1 pos key"] | None
    """Keys each query sees; None for plain causal attention."""


def begin(
    bridge: Any, input_ids: Int[Tensor, "batch pos"], attention_mask: Int[Tensor, "batch key"] | None = None
) -> State:
    """The state before block 0 (the embedding's hooks fire). ``attention_mask``: 1 real tokens, 0 padding."""
    decoder = bridge.original_model.model
    embedded = decoder.embeddings(input_ids)
    residual, memory = decoder.begin(embedded)
    return State(
        residual=residual,
        memory=memory,
        position_embeddings=decoder.rotary(positions_for(None, attention_mask, embedded, 0)),
        attention_mask=mask_for(decoder.config, attention_mask, embedded, 0),
    )


def step(bridge: Any, layer: int, state: State) -> State:
    """The state after block ``layer``, run through the bridge so that all the block's hooks fire."""
    residual, memory, _ = bridge.original_model.model.advance(
        layer,
        bridge.blocks[layer],
        state.residual,
        state.memory,
        position_embeddings=state.position_embeddings,
        attention_mask=state.attention_mask,
    )
    return replace(state, residual=residual, memory=memory)


def end(bridge: Any, state: State) -> Float[Tensor, "batch pos d_model"]:
    """What the final norm reads when ``state`` is that behind the last block."""
    out: Tensor = bridge.original_model.model.end(state.residual, state.memory)
    return out


def normed(bridge: Any, residual: Float[Tensor, "batch pos d_model"]) -> Float[Tensor, "batch pos d_model"]:
    """The final norm (its hooks fire), apart from the head, which may be applied to a chunk of positions."""
    out: Tensor = bridge.ln_final(residual)
    return out


def unembed(bridge: Any, hidden: Float[Tensor, "batch pos d_model"]) -> Float[Tensor, "batch pos d_vocab"]:
    """Logits of normed residuals (the head's hooks fire)."""
    out: Tensor = bridge.unembed(hidden)
    return out


def cat(states: Sequence[State]) -> State:
    """Several states as one batch, in order: conditions that are at the same layer run together.

    Raises:
        SatlensError: states at different stages (their memories differ in form) or with masks of different kinds.
    """
    first = states[0]
    if len({(_form(state.memory), state.attention_mask is None) for state in states}) > 1:
        raise SatlensError(
            "cannot join states of different kinds: all must stand before the same layer, all or none with a mask"
        )
    sizes = [len(state.residual) for state in states]
    cos, sin = ([state.position_embeddings[i] for state in states] for i in range(2))
    return State(
        residual=torch.cat([state.residual for state in states]),
        memory=_mapped(torch.cat, [state.memory for state in states]),
        position_embeddings=(_cat_rows(cos, sizes), _cat_rows(sin, sizes)),
        attention_mask=None
        if first.attention_mask is None
        else _cat_rows([s.attention_mask for s in states if s.attention_mask is not None], sizes),
    )


def rows(state: State, start: int, stop: int) -> State:
    """Rows ``start`` to ``stop`` of the batch, the inverse of ``cat``."""

    def take(x: Tensor) -> Tensor:
        return x if len(x) == 1 and len(state.residual) != 1 else x[start:stop]

    return State(
        residual=state.residual[start:stop],
        memory=_mapped(lambda parts: parts[0][start:stop], [state.memory]),
        position_embeddings=(take(state.position_embeddings[0]), take(state.position_embeddings[1])),
        attention_mask=None if state.attention_mask is None else take(state.attention_mask),
    )


def _mapped(function: Callable[[list[Tensor]], Tensor], memories: list[Any]) -> Any:
    """``function`` of the tensors that stand at the same place of several memories of one form."""
    if memories[0] is None:
        return None
    if isinstance(memories[0], Tensor):
        return function(memories)
    return tuple(_mapped(function, list(parts)) for parts in zip(*memories, strict=True))


def _form(memory: Any) -> Any:
    """What a memory is made of: None, a tensor, or nested tuples of these."""
    return tuple(_form(part) for part in memory) if isinstance(memory, tuple) else type(memory)


def _cat_rows(parts: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
    """Join per-row tensors; one shared row stays one row while all parts agree on it."""
    head = parts[0]
    if all(len(part) == 1 and (part is head or torch.equal(part, head)) for part in parts):
        return head
    return torch.cat([part.expand(size, *part.shape[1:]) for part, size in zip(parts, sizes, strict=True)])
