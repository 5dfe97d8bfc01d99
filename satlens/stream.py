"""The only loop that runs a model for measurement: one pass over the text, several conditions at once.

A condition's pass starts at its first edited layer, from the residual stream and the memory (V1, say) that the clean
pass had there; everything before it is unchanged by construction and is never run again.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from satlens.accumulators import NLL, Accumulator
from satlens.architectures.steps import State, begin, end, normed, step
from satlens.errors import SatlensError
from satlens.interventions import Edit
from satlens.metrics import chunked_nll, onednn_linears
from satlens.sites import Sites
from satlens.tokens import Batch

CLEAN = "clean"


@dataclass(kw_only=True)
class Condition:
    """A name, what is done to the model, and what is kept of it. No edits is the clean model."""

    name: str
    edits: tuple[Edit, ...] = ()
    accumulators: tuple[Accumulator, ...] = ()
    fired: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    """Times each edit (by place in ``edits``) was applied."""
    changed: bool = False
    """Whether an edit ever altered its tensor."""
    moved: bool = False
    """Whether the NLL of any scored prediction ever differed from the clean one."""

    @property
    def start(self) -> int | None:
        """First edited layer; None for the clean condition."""
        return min((edit.layer for edit in self.edits), default=None)


def stream(
    bridge: Any,
    sites: Sites,
    batches: Iterable[Batch],
    conditions: list[Condition],
    on_batch: Callable[[Batch], bool] | None = None,
) -> None:
    """Run every batch under every condition, feeding the conditions' accumulators.

    ``on_batch`` is called after each batch (progress); the pass ends early when it answers False.

    Raises:
        SatlensError: an edit that never fired, one that changed its tensor without moving any prediction, a hook
            that fired more than once a pass, or an NLL that is not a number (the row is named).
    """
    clean = [c for c in conditions if not c.edits]
    edited = sorted((c for c in conditions if c.edits), key=lambda c: -_start(c))
    passes = 0
    with torch.no_grad(), onednn_linears(bridge.original_model):
        for batch in batches:
            placed = batch.to(next(bridge.original_model.parameters()).device)
            states, nll = _clean_pass(bridge, sites, placed, clean, edited)
            for condition in edited:
                _edited_pass(bridge, sites, placed, condition, states, nll)
            passes += 1
            if on_batch is not None and not on_batch(batch):
                break
    for condition in edited:
        _check(condition, passes)


def nll_of(bridge: Any, residual: Tensor, batch: Batch) -> Tensor:
    """NLL ``[scored]`` when ``residual`` ``[batch pos d_model]`` goes to the final norm and head."""
    # the norm acts on each position alone: only those that are scored need it
    hidden = normed(bridge, residual[batch.scored][None])[0]
    nll = chunked_nll(hidden, bridge.unembed.original_component.weight, batch.targets())
    if not bool(torch.isfinite(nll).all()):
        where = batch.scored.nonzero()[~torch.isfinite(nll)][0].tolist()
        raise SatlensError(
            f"the NLL is not a number in row {int(batch.row[where[0]])}, position {where[1] + 1}: "
            "look at the weights (satlens doctor) or use a wider dtype"
        )
    return nll


def _start(condition: Condition) -> int:
    assert condition.start is not None
    return condition.start


def _clean_pass(
    bridge: Any, sites: Sites, batch: Batch, clean: list[Condition], edited: list[Condition]
) -> tuple[dict[int, State], Tensor | None]:
    """States at the layers where edited passes begin, and the clean NLL if any condition wants it."""
    starts = {_start(c) for c in edited}
    readers: list[tuple[Accumulator, int | None]] = [(a, None) for c in clean for a in c.accumulators]
    # what an edited pass would read before its first edit is what the clean pass reads there
    readers += [(a, _start(c)) for c in edited for a in c.accumulators]
    states: dict[int, State] = {}
    with _reading(bridge, sites, batch, readers, first=0):
        state = begin(bridge, batch.input_ids, batch.padding)
        for layer in range(sites.n_layers):
            if layer in starts:
                states[layer] = state
            state = step(bridge, layer, state)
    if not any(NLL in a.reads for c in (*clean, *edited) for a in c.accumulators):
        return states, None
    nll = nll_of(bridge, end(bridge, state), batch)
    _feed_nll(clean, batch, nll)
    return states, nll


def _edited_pass(
    bridge: Any,
    sites: Sites,
    batch: Batch,
    condition: Condition,
    states: dict[int, State],
    clean: Tensor | None,
) -> None:
    start = _start(condition)
    changed_before = condition.changed
    condition.changed = False
    later = any(edit.layer > start for edit in condition.edits)
    only_nll = all(set(a.reads) <= {NLL} for a in condition.accumulators)
    readers: list[tuple[Accumulator, int | None]] = [(a, None) for a in condition.accumulators]
    nll = None
    with _editing(bridge, sites, batch, condition), _reading(bridge, sites, batch, readers, first=start):
        state = states[start]
        for layer in range(start, sites.n_layers):
            state = step(bridge, layer, state)
            if layer == start and not condition.changed and not later and only_nll:
                nll = clean  # the edit left every value as it was, so all that follows is the clean pass
                break
    if any(NLL in a.reads for a in condition.accumulators):
        if nll is None:
            nll = nll_of(bridge, end(bridge, state), batch)
        if clean is not None and nll is not clean:
            condition.moved |= not torch.equal(nll, clean)
        _feed_nll([condition], batch, nll)
    condition.changed |= changed_before


def _feed_nll(conditions: list[Condition], batch: Batch, nll: Tensor) -> None:
    for condition in conditions:
        for accumulator in condition.accumulators:
            if NLL in accumulator.reads:
                accumulator.update(batch, NLL, -1, nll)


@contextmanager
def _reading(
    bridge: Any, sites: Sites, batch: Batch, readers: list[tuple[Accumulator, int | None]], first: int
) -> Iterator[None]:
    """Feed each reader from its sites at layers from ``first`` on, and below its own bound where it has one."""
    hooks = []
    for accumulator, below in readers:
        for role in accumulator.reads:
            if role == NLL:
                continue
            for layer in sites.layers(role):
                if layer >= first and (below is None or layer < below):
                    hooks.append((sites.name(role, layer), _reader(accumulator, batch, role, layer)))
    with hooked(bridge, hooks):
        yield


def _reader(accumulator: Accumulator, batch: Batch, role: str, layer: int) -> Callable[..., None]:
    def read(tensor: Tensor, hook: Any = None) -> None:
        accumulator.update(batch, role, layer, tensor)

    return read


@contextmanager
def _editing(bridge: Any, sites: Sites, batch: Batch, condition: Condition) -> Iterator[None]:
    hooks = [
        (sites.name(edit.role, edit.layer), _editor(condition, place, edit, batch))
        for place, edit in enumerate(condition.edits)
    ]
    with hooked(bridge, hooks):
        yield


def _editor(condition: Condition, place: int, edit: Edit, batch: Batch) -> Callable[..., Tensor]:
    def replace(tensor: Tensor, hook: Any = None) -> Tensor:
        new = edit.apply(tensor, batch)
        if new.shape != tensor.shape:
            raise SatlensError(
                f"{condition.name}: an edit turned shape {tuple(tensor.shape)} into {tuple(new.shape)}"
            )
        condition.fired[place] += 1
        condition.changed |= not torch.equal(new, tensor)
        return new

    return replace


@contextmanager
def hooked(bridge: Any, hooks: list[tuple[str, Callable[..., Any]]]) -> Iterator[None]:
    """Hold hooks on named points and take exactly these away again, whatever else hangs there.

    Raises:
        SatlensError: a name the bridge does not have (it would never fire).
    """
    added = []
    try:
        for name, function in hooks:
            point = _hook_point(bridge, name)
            if point is None:
                raise SatlensError(f"the bridge has no hook point {name}")
            before = list(point.fwd_hooks)
            point.add_hook(function)
            added += [(point, handle) for handle in point.fwd_hooks if handle not in before]
        yield
    finally:
        for point, handle in added:
            handle.hook.remove()
            point.fwd_hooks.remove(handle)


def _hook_point(bridge: Any, name: str) -> Any:
    """The point of that name, or None. ``hook_dict`` knows aliases too, but is made anew at every look (1 ms)."""
    try:
        return bridge.get_submodule(name)
    except AttributeError:
        return bridge.hook_dict.get(name)


def _check(condition: Condition, passes: int) -> None:
    for place, edit in enumerate(condition.edits):
        fired = condition.fired[place]
        if fired != passes:
            raise SatlensError(
                f"{condition.name}: the edit of {edit.role} in layer {edit.layer} fired {fired} times "
                f"in {passes} passes, so the numbers of this condition would be wrong"
            )
    if condition.changed and not condition.moved and any(NLL in a.reads for a in condition.accumulators):
        raise SatlensError(
            f"{condition.name}: the edit changed its tensor, but no prediction moved: a dead site?"
        )


def gather(accumulator: Any) -> Any:
    """The accumulator of all processes together (itself when there is one process)."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return accumulator
    parts: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(parts, accumulator)
    total = parts[0]
    for part in parts[1:]:
        total.merge(part)
    return total


def agree(error: SatlensError | None) -> None:
    """Raise what any process met in all of them, so that none waits for the sums of one that stopped.

    Raises:
        SatlensError: ``error``, or another process's.
    """
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        found: list[SatlensError | None] = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(found, error)
        error = next((other for other in found if other is not None), None)
    if error is not None:
        raise error
