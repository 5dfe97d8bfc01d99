"""What a causal pass keeps: float64 sums for each document, of the clean model and of every change."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from satlens.carried.documents import Rows
from satlens.carried.edits import Change
from satlens.errors import SatlensError

CLEAN = 0
"""Line of the clean model; change ``i`` is line ``1 + i``."""


@dataclass(frozen=True, kw_only=True)
class Probe:
    """What is read inside the model: a role's tensor of each layer, reduced to sums for each row."""

    role: str
    columns: tuple[str, ...]
    sums: Callable[[Tensor, Rows, int], Tensor]
    """``([batch pos width], rows, layer) -> [batch column]``, float64; must leave the tensor alone."""


@dataclass(kw_only=True)
class Tally:
    """Sums for each document, by line: the clean model, then every change.

    Where a change's pass does not reach (layers before its first edit) its line holds the clean model's values, which
    are its own by construction.
    """

    n_documents: int
    n_layers: int
    changes: Sequence[Change]
    counts: dict[str, Float[Tensor, " doc"]] = field(default_factory=dict)
    """Positions summed over: far, final, scored, and every further region."""
    outputs: dict[str, Float[Tensor, "line doc"]] = field(default_factory=dict)
    """``kl_far kl_final kl_<region> top1_far entropy_far nll_scored``: nats (top1: positions), summed."""
    probes: dict[str, Float[Tensor, "line doc layer column"]] = field(default_factory=dict)
    """By probe; NaN in layers that do not have the role."""
    altered: set[int] = field(default_factory=set)
    """Changes that ever altered a bit of a tensor they edit."""
    fired: dict[tuple[int, str, int], int] = field(default_factory=dict)
    """Passes in which each (change, role, layer) was edited."""

    @property
    def n_lines(self) -> int:
        """The clean model and every change."""
        return 1 + len(self.changes)

    def put_clean(
        self,
        docs: Int[Tensor, " batch"],
        counts: Mapping[str, Tensor],
        outputs: Mapping[str, Tensor],
        probes: Mapping[tuple[str, int], Tensor],
    ) -> None:
        """The clean values of some documents, in every line: a change that does nothing keeps them."""
        for name, count in counts.items():
            self.counts.setdefault(name, _zeros(self.n_documents))[docs] = count.double().cpu()
        for name, sums in outputs.items():
            self.outputs.setdefault(name, _zeros(self.n_lines, self.n_documents))[:, docs] = sums.cpu()
        for (name, layer), sums in probes.items():
            size = (self.n_lines, self.n_documents, self.n_layers, sums.shape[-1])
            store = self.probes.setdefault(name, torch.full(size, torch.nan, dtype=torch.float64))
            store[:, docs, layer] = sums.cpu()

    def put_changed(
        self,
        places: Sequence[int],
        docs: Int[Tensor, " batch"],
        outputs: Mapping[str, Tensor],
        probes: Mapping[tuple[str, int], Tensor],
    ) -> None:
        """What some changes did to some documents; ``[change batch ...]`` in the order of ``places``."""
        lines = torch.tensor(places)[:, None] + 1
        for name, sums in outputs.items():
            self.outputs[name][lines, docs] = sums.cpu()
        for (name, layer), sums in probes.items():
            self.probes[name][lines, docs, layer] = sums.cpu()

    def edited(self, place: int, role: str, layer: int, altered: bool) -> None:
        """Note that an edit was applied, and whether it changed anything."""
        self.fired[place, role, layer] = self.fired.get((place, role, layer), 0) + 1
        if altered:
            self.altered.add(place)

    def merge(self, other: "Tally") -> None:
        """Take over the documents that another process ran."""
        docs = (
            (other.counts["far"] > 0).nonzero().squeeze(1)
            if other.counts
            else torch.tensor([], dtype=torch.long)
        )
        for name, count in other.counts.items():
            self.counts[name][docs] = count[docs]
        for mine, theirs in ((self.outputs, other.outputs), (self.probes, other.probes)):
            for name, sums in theirs.items():
                mine[name][:, docs] = sums[:, docs]
        self.altered |= other.altered

    def __getstate__(self) -> dict[str, Any]:
        """What travels between processes: the sums; what was done is known to all of them."""
        return {**vars(self), "changes": ()}

    def check(self, passes: int) -> None:
        """Require every edit to have been applied once a pass, and identity settings to have changed nothing.

        Raises:
            SatlensError: otherwise the numbers would be another experiment's.
        """
        for place, change in enumerate(self.changes):
            for role, layer in change.edits:
                if (times := self.fired.get((place, role, layer), 0)) != passes:
                    raise SatlensError(
                        f"{change.name}: the edit of {role} in layer {layer} was applied {times} times in {passes} "
                        "passes, so the numbers of this change would be wrong"
                    )
            if change.identity and place in self.altered:
                raise SatlensError(f"{change.name}: the setting that changes nothing changed the residual")


def _zeros(*size: int) -> Tensor:
    return torch.zeros(*size, dtype=torch.float64)
