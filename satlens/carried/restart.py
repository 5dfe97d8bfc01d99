"""One clean pass for all changes: each starts again from the residual the clean pass had at its first edited layer.

Blocks before that layer are unchanged by construction and are never run again; changes at the same layer go as one
batch, and the clean model's logits are made once for all of them. Only sums for each document outlive a batch.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from satlens.carried.documents import DocumentSet, Rows
from satlens.carried.edits import Change, Edit, Where
from satlens.carried.effects import by_document, compare_outputs, spread
from satlens.carried.reader import Reader
from satlens.carried.reads import Hook, State
from satlens.carried.tally import Probe, Tally
from satlens.errors import SatlensError
from satlens.metrics import onednn_linears
from satlens.reading import process_place
from satlens.stream import agree, gather

GROUP = 16
"""Changes whose final hidden states are held at once; a chunk's clean logits are made once for all of them."""

Regions = Callable[[Rows], Mapping[str, Tensor]]
"""Rows to named masks ``[batch pos]`` within the far positions, over which KL is also summed."""


def measure(
    reader: Reader,
    documents: DocumentSet,
    changes: Sequence[Change],
    probes: Mapping[str, Probe],
    *,
    batch_size: int = 8,
    group: int = GROUP,
    regions: Regions | None = None,
    on_batch: Callable[[Rows], None] | None = None,
) -> Tally:
    """Run every document clean and under every change.

    ``batch_size`` and ``group`` change speed and memory, never an answer beyond float32 rounding. A change that alters
    no bit of the residual it starts from is not run: its result is the clean one, exactly.

    Raises:
        SatlensError: values that are not finite (counted, with change, layer and site), an identity setting that
            altered something, or an edit that did not fire.
    """
    tally = Tally(n_documents=documents.n_documents, n_layers=reader.n_layers + 1, changes=changes)
    passes, problem = 0, None
    rank, world = process_place()
    try:
        with torch.no_grad(), onednn_linears(reader.model):
            for rows in documents.batches(batch_size, reader.device, reader.pad, rank, world):
                _Pass(reader, rows, tally, probes, {} if regions is None else regions(rows)).run(group)
                passes += 1
                if on_batch is not None:
                    on_batch(rows)
        tally.check(passes)
    except SatlensError as error:
        problem = error
    agree(problem)
    tally = gather(tally)
    tally.changes = changes
    return tally


@dataclass(frozen=True)
class _Pass:
    """One batch under every change."""

    reader: Reader
    rows: Rows
    tally: Tally
    probes: Mapping[str, Probe]
    regions: Mapping[str, Tensor]

    def run(self, group: int) -> None:
        starts = sorted({change.start for change in self.tally.changes})
        seen: dict[tuple[str, int], Tensor] = {}
        ids = self.rows.input_ids
        clean, states = self.reader.run_keeping(ids, starts, self._reading(1, 0, seen))
        self._require_finite(clean, "clean", 0, lambda hooks: self.reader.run(ids, hooks))
        one = {site: sums[0] for site, sums in seen.items()}
        self.tally.put_clean(self.rows.doc.cpu(), self._counts(), self._clean_outputs(clean), one)
        for start in starts:
            places = [p for p, change in enumerate(self.tally.changes) if change.start == start]
            moved = [place for place in places if not self._is_still(place, states[start])]
            for first in range(0, len(moved), group):
                self._changed(moved[first : first + group], clean, states[start])

    def _changed(self, places: list[int], clean: Tensor, state: State) -> None:
        """Several changes with the same first layer: their passes, then their outputs against the same clean chunks."""
        # one large batch keeps an accelerator busy; on a CPU it only outgrows the cache
        n = 1 if self.rows.far.device.type == "cpu" else len(places)
        runs = [self._run(places[at : at + n], state) for at in range(0, len(places), n)]
        seen = {site: torch.cat([part[site] for _, part in runs]) for site in runs[0][1]}
        outputs = self._outputs(clean, torch.cat([hidden for hidden, _ in runs]))
        self.tally.put_changed(places, self.rows.doc.cpu(), outputs, seen)

    def _run(self, places: list[int], state: State) -> tuple[Tensor, dict[tuple[str, int], Tensor]]:
        """One pass for some changes, as many copies of the rows: hidden states ``[copy batch pos d_model]``, probes."""
        n = len(places)
        seen: dict[tuple[str, int], Tensor] = {}
        hooks = [*self._editing(places), *self._reading(n, state.layer, seen)]
        hidden = self.reader.run_from(state.repeat(n), hooks).unflatten(0, (n, -1))
        for copy, place in enumerate(places):
            name = self.tally.changes[place].name
            self._require_finite(hidden[copy], name, state.layer, self._again(place, state))
        return hidden, seen

    def _outputs(self, clean: Tensor, hidden: Tensor) -> dict[str, Tensor]:
        """Sums ``[condition batch]`` of KL, NLL, entropy and top-1 agreement, against the clean model."""
        rows = self.rows
        targets = rows.input_ids.roll(-1, 1)[rows.far]  # the last one is no target, and is not counted
        values = compare_outputs(
            self.reader.logits, clean[rows.far], hidden[:, rows.far], targets, self.reader.d_vocab
        )
        placed = {name: spread(value, rows.far) for name, value in values.items()}
        return {
            **by_document({"kl": placed["kl"]}, {"far": rows.far, "final": self._final(), **self.regions}),
            **by_document({name: placed[name] for name in ("top1", "entropy")}, {"far": rows.far}),
            **by_document({"nll": placed["nll"]}, {"scored": rows.scored}),
        }

    def _clean_outputs(self, clean: Tensor) -> dict[str, Tensor]:
        """The clean model against itself, ``[batch]``."""
        return {name: sums[0] for name, sums in self._outputs(clean, clean[None]).items()}

    def _counts(self) -> dict[str, Tensor]:
        masks = {"far": self.rows.far, "final": self._final(), "scored": self.rows.scored, **self.regions}
        return {name: mask.sum(-1) for name, mask in masks.items()}

    def _final(self) -> Tensor:
        """True at the last token of each row."""
        at = torch.arange(self.rows.far.shape[1], device=self.rows.far.device)
        return at == self.rows.last[:, None]

    def _is_still(self, place: int, state: State) -> bool:
        """Whether a change of the residual alone leaves every bit of this batch as it is."""
        change = self.tally.changes[place]
        if set(change.edits) != {("resid", state.layer)}:
            return False
        ((site, edit),) = change.edits.items()
        still = torch.equal(edit(state.residual, self._where()), state.residual)
        if still:
            self.tally.edited(place, *site, altered=False)
        return still

    def _editing(self, places: list[int]) -> list[Hook]:
        """One hook a site, which gives each copy of the rows its own change's edit."""
        sites = {site: None for place in places for site in self.tally.changes[place].edits}
        return [(role, layer, self._editor(role, layer, places)) for role, layer in sites]

    def _editor(self, role: str, layer: int, places: list[int]) -> Callable[[Tensor], Tensor]:
        def new(tensor: Tensor) -> Tensor:
            parts = list(tensor.unflatten(0, (len(places), -1)))
            for copy, place in enumerate(places):
                edit: Edit | None = self.tally.changes[place].edits.get((role, layer))
                if edit is not None:
                    before, parts[copy] = parts[copy], edit(parts[copy], self._where())
                    self.tally.edited(place, role, layer, altered=not torch.equal(before, parts[copy]))
            return torch.cat(parts)

        return new

    def _reading(self, copies: int, first: int, seen: dict[tuple[str, int], Tensor]) -> list[Hook]:
        """A hook for each probe and layer from ``first`` on, leaving ``[copy batch column]`` in ``seen``."""
        return [
            (probe.role, layer, self._reader(name, probe, layer, copies, seen))
            for name, probe in self.probes.items()
            for layer in sorted(self.reader.sites.get(probe.role, {}))
            if layer >= first
        ]

    def _reader(
        self, name: str, probe: Probe, layer: int, copies: int, seen: dict[tuple[str, int], Tensor]
    ) -> Callable[[Tensor], None]:
        def read(tensor: Tensor) -> None:
            parts = tensor.unflatten(0, (copies, -1))
            seen[name, layer] = torch.stack([probe.sums(part, self.rows, layer) for part in parts])

        return read

    def _where(self) -> Where:
        return Where(far=self.rows.far, doc=self.rows.doc)

    def _again(self, place: int, state: State) -> Callable[[list[Hook]], object]:
        """The same change alone, with further hooks."""
        return lambda hooks: self.reader.run_from(state, [*self._editing([place]), *hooks])

    def _require_finite(
        self, hidden: Tensor, name: str, start: int, again: Callable[[list[Hook]], object]
    ) -> None:
        """Stop at values that are not numbers, after finding where they first came up by running once more."""
        if bool(torch.isfinite(hidden[self.rows.real]).all()):
            return
        found: list[str] = []

        def watch(role: str, layer: int) -> Callable[[Tensor], None]:
            def look(tensor: Tensor) -> None:
                if bad := int((~torch.isfinite(tensor[self.rows.real])).sum()):
                    found.append(
                        f"{bad} of {tensor[self.rows.real].numel()} values of {role} in layer {layer}"
                    )

            return look

        again(
            [
                (role, layer, watch(role, layer))
                for role, layers in self.reader.sites.items()
                for layer in layers
                if layer >= start
            ]
        )
        where = found[0] if found else "values after the last layer"
        raise SatlensError(
            f"{self.reader.name}, {name}: {where} are not finite (overflow in "
            f"{str(hidden.dtype).removeprefix('torch.')}?): use a wider dtype or a smaller edit"
        )
