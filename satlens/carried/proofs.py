"""Is a model what its sites say: every site alive, the restart exact, the head and activation the config's."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from satlens.carried.documents import rows_of
from satlens.carried.ledger import probe_ids
from satlens.carried.reader import Reader
from satlens.carried.reads import Edit, GateRead, Hook, State
from satlens.carried.sums import raise_overflow
from satlens.errors import UserError


@torch.no_grad()
def prove(reader: Reader) -> None:
    """Check all that later numbers rest on, on a few tokens.

    Every site edited alone moves the logits and undone leaves them bit-equal; a pass restarted at any layer is the
    whole pass to the last bit; no position reads what stands after it; the head and the activation are those that
    are computed with elsewhere.

    Raises:
        UserError: any of these fails, with the layer and the site.
    """
    ids = probe_ids(reader)
    clean, states = reader.run_keeping(ids, range(reader.n_layers))
    if not bool(torch.isfinite(clean).all()):
        raise_overflow(reader, rows_of([ids[0].cpu().numpy()], np.arange(1), reader.device, reader.pad))
    _prove_head(reader, ids, clean)
    _prove_causal(reader, ids, clean)
    _prove_restart(reader, states, clean)
    _prove_activations(reader, ids)
    for role in reader.sites:
        _prove_alive(reader, role)
    if not torch.equal(reader.run(ids), clean):
        raise UserError(f"{reader.name}: a pass after the edits were undone differs from the one before")


def _prove_head(reader: Reader, ids: Tensor, hidden: Tensor) -> None:
    own = reader.model(input_ids=ids, use_cache=False).logits.float()
    if not torch.allclose(reader.logits(hidden), own, rtol=1e-3, atol=1e-3 * float(own.abs().max())):
        raise UserError(
            f"{reader.name}: its logits are not its head's; this family does something else to them"
        )


def _prove_causal(reader: Reader, ids: Tensor, clean: Tensor) -> None:
    other = ids.clone()
    other[:, -1] = ids[:, 0]
    difference = (reader.run(other) - clean)[:, :-1].float().abs().max()
    if float(difference) > 1e-3 * float(clean.float().abs().max()):
        raise UserError(f"{reader.name} reads tokens to the right of a position: it is no causal model")


def _prove_restart(reader: Reader, states: dict[int, State], clean: Tensor) -> None:
    for layer, state in states.items():
        if not torch.equal(reader.run_from(state), clean):
            raise UserError(
                f"{reader.name}: a pass from layer {layer} is not the whole pass, so blocks share state"
            )


def _prove_activations(reader: Reader, ids: Tensor) -> None:
    """Post-activation is the function of the pre-activation, times the up-projection where there is one."""
    seen: dict[tuple[str, int], Tensor] = {}

    def keep(role: str, layer: int) -> Edit:
        return lambda x: seen.__setitem__((role, layer), x.clone())

    roles = ("read", "pre", "post")
    hooks = [(role, read.layer, keep(role, read.layer)) for read in reader.reads for role in roles]
    reader.run(ids, hooks)
    for read in reader.reads:
        x, z, post = (seen[role, read.layer].float() for role in roles)
        expected = read.activate(z)
        if read.gated:
            expected = expected * _up(reader, read, x)
        loose = 1e-3 if seen["pre", read.layer].dtype == torch.float32 else 0.1
        if expected.shape != post.shape or not torch.allclose(
            expected, post, rtol=loose, atol=loose * float(post.abs().max())
        ):
            raise UserError(
                f"{reader.name}: layer {read.layer} does not compute {read.activation} of what {read.name} returns, "
                "so its firing would be measured wrongly"
            )


def _up(reader: Reader, read: GateRead, x: Tensor) -> Tensor:
    up: Any = reader.parts["mlp.in"][read.layer]
    if up is None:  # gate and up-projection are the two halves of one linear
        joint: Any = reader.site("pre", read.layer).module
        return torch.nn.functional.linear(x, joint.weight.float()[read.n_gates :])
    bias = None if up.bias is None else up.bias.float()
    return torch.nn.functional.linear(x, up.weight.float(), bias)


def _prove_alive(reader: Reader, role: str) -> None:
    """One pass for all layers: row ``i`` of the batch is edited at the ``i``-th layer alone."""
    layers = sorted(reader.sites[role])
    ids = probe_ids(reader, rows=len(layers))
    clean = reader.logits(reader.run(ids)[:, -1])
    hooks: list[Hook] = [(role, layer, _push(row)) for row, layer in enumerate(layers)]
    edited = reader.logits(reader.run(ids, hooks)[:, -1])
    moved = (edited != clean).any(-1)
    if dead := [layer for row, layer in enumerate(layers) if not bool(moved[row])]:
        raise UserError(
            f"{reader.name}: editing {role} of layer {_listed(dead)} moves no logit: the site is dead, or what it "
            "feeds is zero in this model"
        )


def _push(row: int) -> Any:
    def push(tensor: Tensor) -> Tensor:
        """Far beyond the tensor's own range, upwards, with a different step for every coordinate."""
        steps = 1 + torch.arange(tensor.shape[-1], device=tensor.device) % 3
        size = tensor[row].float().abs().max() + 1
        out = tensor.clone()
        out[row] = (tensor[row].float() + size * steps).to(tensor.dtype)
        return out

    return push


def _listed(layers: Sequence[int]) -> str:
    return ", ".join(map(str, layers[:4])) + (" ..." if len(layers) > 4 else "")
