"""What a gate reads and where: the sites of a block by role, the gate linears, and the state a pass can restart from.

A role names a tensor of one layer; every tensor of a role has the shape ``[batch pos width]``, whatever the model's
own code does inside (OPT flattens batch and position; its tensors are unfolded again before anyone sees them).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Literal, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

ROLES: Mapping[str, str] = MappingProxyType(
    {
        "resid": "residual stream before a block and its norms; at layer n_layers, the last block's output [d_model]",
        "attn_out": "what attention writes: the output of its out-projection, bias included [d_model]",
        "read": "what the gate linear receives: edits reach the gate only, not the up-projection [d_model]",
        "pre": "gate pre-activation, as the linear returns it, bias included [gate]",
        "post": "what the out-projection receives: act(pre), in a gated MLP times the up-projection [gate]",
        "mlp_out": "what the MLP writes: the output of its out-projection, bias included [d_model]",
        "value_read": "what SATFormer's own gate projection receives (the attention norm's output) [d_model]",
        "value_pre": "SATFormer's gate logit, one a KV head [kv_head]",
        "value_gate": "SATFormer's alpha, after its nonlinearity [kv_head]",
    }
)

Edit = Callable[[Tensor], Tensor | None]
"""Gets a role's tensor ``[batch pos width]``; returns its replacement, or None to leave it as it is."""
Hook = tuple[str, int, Edit]
"""``(role, layer, function)``."""


@dataclass(frozen=True, kw_only=True)
class Site:
    """One tensor of one layer: a module, and whether it is what goes in or what comes out."""

    module: nn.Module
    side: Literal["in", "out"]
    rows: slice | None = None
    """Part of the last axis, where one linear computes gate and up-projection together."""


@dataclass(frozen=True, kw_only=True)
class GateRead:
    """A linear map from ``d_model`` to gates: ``z = weight @ x + bias`` with ``x`` what it reads.

    Weights are made float32 at each access, so that half-precision models are not held twice.
    """

    layer: int
    kind: Literal["mlp", "value"]
    """``mlp``: one gate an MLP unit. ``value``: SATFormer's own gate, one a KV head."""
    name: str
    """The linear's name in the model."""
    linear: nn.Module
    """The linear itself."""
    rows: slice | None = None
    """Its outputs that are gates, where one linear computes gate and up-projection together; None for all."""
    activation: str
    """Name of the function after the linear; its rectified side is ``z > 0``."""
    activate: Callable[[Tensor], Tensor]
    """Pre-activation to post-activation, without the up-projection of a gated MLP."""
    gated: bool
    """Whether the post-activation is multiplied by an up-projection."""

    @property
    def roles(self) -> tuple[str, str]:
        """Roles of what the linear reads and of what it returns."""
        return ("read", "pre") if self.kind == "mlp" else ("value_read", "value_pre")

    @property
    def weight(self) -> Float[Tensor, "gate d_model"]:
        """Rows ``w_n``, float32, in this sense whatever the module's storage (GPT-2's is transposed)."""
        stored = cast(Tensor, self.linear.weight).detach()
        rows = stored.T if type(self.linear).__name__ == "Conv1D" else stored
        return (rows if self.rows is None else rows[self.rows]).float()

    @property
    def bias(self) -> Float[Tensor, " gate"] | None:
        """``beta_n``, float32; None where the linear has none."""
        stored = cast(Tensor | None, getattr(self.linear, "bias", None))
        if stored is None:
            return None
        return (stored if self.rows is None else stored[self.rows]).detach().float()

    @property
    def n_gates(self) -> int:
        """Rows of the linear that are gates."""
        return int(self.weight.shape[0])

    @property
    def elementwise(self) -> bool:
        """Whether a post-activation depends on its own gate alone; a softmax gate's depends on all heads."""
        return not self.activation.startswith("softmax")

    @property
    def dtype(self) -> str:
        """What the linear computes in."""
        return str(cast(Tensor, self.linear.weight).dtype).removeprefix("torch.")


@dataclass(frozen=True, kw_only=True)
class State:
    """All that the blocks from ``layer`` on depend on: a pass can start again here."""

    layer: int
    input_ids: Int[Tensor, "batch pos"]
    residual: Float[Tensor, "batch pos d_model"]
    """Input of block ``layer``."""
    v1: Tensor | None = None
    """First-layer values, which SATFormer's later layers read beside the stream; None in other models."""

    def repeat(self, times: int) -> "State":
        """The same rows ``times`` over, copy after copy: conditions at one layer go as one batch."""
        return State(
            layer=self.layer,
            input_ids=self.input_ids.repeat(times, 1),
            residual=self.residual.repeat(times, 1, 1),
            v1=None if self.v1 is None else self.v1.repeat(times, *[1] * (self.v1.dim() - 1)),
        )

    def with_residual(self, residual: Float[Tensor, "batch pos d_model"]) -> "State":
        """The state with another stream."""
        return replace(self, residual=residual)


def unfolded(tensor: Tensor, batch: int, pos: int, where: str) -> Tensor:
    """A tensor that may have lost its batch axis, as ``[batch pos width]``.

    Raises:
        ValueError: neither ``[batch pos width]`` nor ``[batch * pos, width]``, so its rows are not positions.
    """
    if tensor.dim() == 3 and tensor.shape[:2] == (batch, pos):
        return tensor
    if tensor.dim() == 2 and tensor.shape[0] == batch * pos:
        return tensor.view(batch, pos, tensor.shape[1])
    raise ValueError(
        f"{where} has shape {tuple(tensor.shape)} in a pass of {batch} rows of {pos} positions: expected "
        f"({batch}, {pos}, width) or ({batch * pos}, width)"
    )


def first_tensor(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Tensor, str | None]:
    """A module's input, and its keyword if it was passed by one.

    Raises:
        ValueError: no tensor among the arguments that inputs usually have.
    """
    if args and isinstance(args[0], torch.Tensor):
        return args[0], None
    for name in ("hidden_states", "x", "input", "inputs"):
        if isinstance(kwargs.get(name), torch.Tensor):
            return kwargs[name], name
    raise ValueError(f"no input tensor among {len(args)} arguments and keywords {', '.join(kwargs)}")
