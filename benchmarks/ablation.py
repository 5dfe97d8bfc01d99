"""How much faster is one shared pass than one full forward for every ablated layer, and is the answer the same?"""

from typing import Any

import torch
import torch.nn.functional as F
from common import Row, build, build_bridge, command, compare, interleave, text
from torch import Tensor

from satlens.accumulators import NllByDocument
from satlens.interventions import Calibration, Edit, mean, zero
from satlens.stream import Condition, stream
from satlens.tokens import Batch

SCORED_NOT = -100
"""Target of a position that predicts nothing; cheaper than cutting the last position off the logits."""


def suite(sites: Any) -> list[tuple[str, Edit | None]]:
    """The clean model, and each mixing layer's gate set to zero and to a constant."""
    shape = (sites.n_layers, sites.n_kv_heads)
    known = Calibration(mean=torch.full(shape, 0.7, dtype=torch.float64), sample=torch.zeros(*shape, 1))
    made: list[tuple[str, Edit | None]] = [("clean", None)]
    for layer in sites.layers("gate"):
        made += [
            (f"zero {layer}", zero(layer, None, known, 0)),
            (f"mean {layer}", mean(layer, None, known, 0)),
        ]
    return made


def shared_pass(bridge: Any, sites: Any, batch: Batch) -> dict[str, float]:
    """Mean NLL of every condition, by ``satlens.stream``."""
    conditions = [
        Condition(
            name=name, edits=() if edit is None else (edit,), accumulators=(NllByDocument(len(batch.row)),)
        )
        for name, edit in suite(sites)
    ]
    stream(bridge, sites, [batch], conditions)
    kept = {condition.name: condition.accumulators[0] for condition in conditions}
    return {name: float(sums.nll.sum() / sums.count.sum()) for name, sums in kept.items()}


def targets(batch: Batch) -> Tensor:
    """Next tokens, one for each position."""
    return torch.where(batch.scored, batch.input_ids.roll(-1, 1), SCORED_NOT).flatten()


def full_nll(logits: Tensor, wanted: Tensor) -> float:
    """Mean NLL over the scored positions from a whole window's logits, averaged in float64."""
    nll = F.cross_entropy(logits.flatten(0, 1), wanted, ignore_index=SCORED_NOT, reduction="none")
    return float(nll.double().sum() / (wanted != SCORED_NOT).sum())


def plain_loop(model: Any, sites: Any, batch: Batch) -> dict[str, float]:
    """One forward of the model for each condition, the gate replaced by a forward hook."""
    found, wanted = {}, targets(batch)
    for name, edit in suite(sites):
        handle = None
        if edit is not None:
            gate = model.model.layers[edit.layer].attn.value_residual_mixing.gate
            handle = gate.register_forward_hook(lambda module, inputs, out, edit=edit: edit.apply(out, batch))
        found[name] = full_nll(model(batch.input_ids).logits, wanted)
        if handle is not None:
            handle.remove()
    return found


def hook_loop(bridge: Any, sites: Any, batch: Batch) -> dict[str, float]:
    """The same by ``run_with_hooks`` of transformer-lens and its own loss."""
    found = {}
    for name, edit in suite(sites):
        hooks = []
        if edit is not None:
            hooks = [
                (sites.name("gate", edit.layer), lambda alpha, hook, edit=edit: edit.apply(alpha, batch))
            ]
        nll = bridge.run_with_hooks(batch.input_ids, return_type="loss", loss_per_token=True, fwd_hooks=hooks)
        found[name] = float(nll.double().mean())
    return found


@torch.no_grad()
def measure(rounds: int) -> list[Row]:
    """Speed over both loops, and the largest difference of any condition's NLL change."""
    plain, (bridge, sites), batch = build(), build_bridge(), text()
    ours, truth = shared_pass(bridge, sites, batch), plain_loop(plain, sites, batch)
    effects = {name: truth[name] - truth["clean"] for name in truth if name != "clean"}
    error = max(abs(ours[name] - ours["clean"] - effect) for name, effect in effects.items())
    smallest = min(map(abs, effects.values()))
    seconds = interleave(
        {
            "ours": lambda: shared_pass(bridge, sites, batch),
            "loop": lambda: plain_loop(plain, sites, batch),
            "hooks": lambda: hook_loop(bridge, sites, batch),
        },
        rounds,
    )
    n = len(truth)
    return [
        compare(f"{n} ablations, plain forwards", seconds, "loop", "ours", ">=", 1.8),
        compare(f"{n} ablations, run_with_hooks", seconds, "hooks", "ours", ">=", 2.0),
        Row(
            what=f"largest error of {n - 1} NLL changes",
            ours=f"{error:.1e} nats",
            other=f"smallest change {smallest:.1e}",
            ratio=error,
            rounds=1,
            sense="<=",
            target=1e-6,
            unit="nats",
        ),
    ]


if __name__ == "__main__":
    command(measure, rounds=7)
