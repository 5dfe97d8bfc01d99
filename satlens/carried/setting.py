"""What every causal experiment runs on: a model, its fitted directions, the evaluated documents, how to measure.

In a notebook (every experiment of `satlens reference-causal` is such a function of a setting)::

    from satlens.carried.documents import documents
    from satlens.carried.doses import dose_response
    from satlens.carried.fit import fit
    from satlens.carried.opening import open_reader
    from satlens.carried.setting import new_setting
    from satlens.reading import Reading

    reading = Reading(tokens=1000)
    reader = open_reader("reference-transformer", reading)
    sets = documents(reader, reading)
    setting = new_setting(reader, fit(reader, sets.fit), sets.evaluate, layers=(4,))
    tables, sums = dose_response(setting, alphas=(0.0, 1.0))
    removal = tables["dose"].query("direction == 'reference' and alpha == 0 and not norm_kept")
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from satlens.bootstrap import Weights, document_weights
from satlens.carried import directions
from satlens.carried.documents import DocumentSet, Rows
from satlens.carried.edits import Change
from satlens.carried.effects import count_above, thresholds
from satlens.carried.fit import Reference
from satlens.carried.reader import Reader
from satlens.carried.restart import Regions, measure
from satlens.carried.tally import Probe, Tally
from satlens.errors import UserError

DEPTHS = (0.2, 0.35, 0.5, 0.65)
"""Depth fractions of the edited layers when none are named (spec part B, scan)."""
GATES = ("duty", "fires", "fires_hard")
"""Columns of the gates' probe: pre-activation above 0, post-activation above 0.5 and above 1."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Everything an experiment needs; nothing of it changes."""

    reader: Reader
    reference: Reference
    documents: DocumentSet
    """The evaluated documents."""
    layers: tuple[int, ...]
    """Layers whose input is edited."""
    weights: Weights
    """Bootstrap weights over the evaluated documents, the same for every number of a run."""
    draws: int = directions.LEAST_CONTROLS
    """Random directions of each control distribution."""
    batch_size: int = 8
    seed: int = 0
    on_batch: Callable[[str, Rows], None] | None = None
    """Called after each batch of a pass with the pass's name (progress)."""

    def unit(self, layer: int) -> Float[Tensor, " d_model"]:
        """``m^_L`` on the model's device."""
        return self.reference.unit(layer).to(self.reader.device)

    def randoms(self, layer: int) -> Float[Tensor, "draw d_model"]:
        """The layer's control directions: the same in every experiment of a run."""
        return directions.random_units(self.unit(layer), self.draws, self.generator(layer))

    def generator(self, place: int) -> torch.Generator:
        """A generator for one purpose (a layer, say), set by the run's seed."""
        return torch.Generator().manual_seed(self.seed * 1_000_003 + place)

    def run(
        self,
        words: str,
        changes: Sequence[Change],
        probes: Mapping[str, Probe] | None = None,
        documents: DocumentSet | None = None,
        regions: Regions | None = None,
    ) -> Tally:
        """Measure changes on the evaluated documents, reading every MLP gate beside ``probes``, and SATFormer's own."""
        told = self.on_batch
        own = {"own": own_gate_probe(self.reader)} if self.reader.value_reads else {}
        return measure(
            self.reader,
            documents or self.documents,
            changes,
            {"gates": gate_probe(self.reader), **own, **(probes or {})},
            batch_size=self.batch_size,
            regions=regions,
            on_batch=None if told is None else lambda rows: told(words, rows),
        )


def new_setting(
    reader: Reader,
    reference: Reference,
    documents: DocumentSet,
    layers: Sequence[int] = (),
    *,
    n_resamples: int = 1000,
    draws: int = directions.LEAST_CONTROLS,
    batch_size: int = 8,
    seed: int = 0,
    on_batch: Callable[[str, Rows], None] | None = None,
) -> Setting:
    """A setting, its layers checked and its bootstrap drawn.

    Raises:
        UserError: a layer that the model does not have.
    """
    return Setting(
        reader=reader,
        reference=reference,
        documents=documents,
        layers=chosen_layers(reader, layers),
        weights=document_weights(documents.n_documents, n_resamples, seed),
        draws=draws,
        batch_size=batch_size,
        seed=seed,
        on_batch=on_batch,
    )


def chosen_layers(reader: Reader, layers: Sequence[int]) -> tuple[int, ...]:
    """The layers asked for, or those at ``DEPTHS``, in order and once each.

    Raises:
        UserError: a layer that the model does not have.
    """
    if bad := [layer for layer in layers if not 0 <= layer < reader.n_layers]:
        raise UserError(f"{reader.name} has layers 0 to {reader.n_layers - 1}, there is no layer {bad[0]}")
    wanted = layers or [int(depth * reader.n_layers) for depth in DEPTHS]
    return tuple(sorted(set(wanted)))


def gate_probe(reader: Reader) -> Probe:
    """Counts of MLP gates on duty and firing; divide by far positions and gates for shares."""
    levels = {read.layer: thresholds(read) for read in reader.reads}
    return Probe(
        role="pre", columns=GATES, sums=lambda z, rows, layer: count_above(z, rows.far, levels[layer])
    )


def own_gate_probe(reader: Reader) -> Probe:
    """Of SATFormer's own gate, per KV head: positions where alpha is above 0, then the sum of alpha."""
    heads = range(reader.value_reads[0].n_gates)

    def sums(alpha: Tensor, rows: Rows, layer: int) -> Tensor:
        counted = rows.far[..., None]
        parts = ((alpha > 0) & counted, torch.where(counted, alpha.float(), 0.0))
        return torch.cat([part.double().sum(1) for part in parts], dim=-1)

    columns = (*(f"open_{head}" for head in heads), *(f"alpha_{head}" for head in heads))
    return Probe(role="value_gate", columns=columns, sums=sums)


def stream_probe(reader: Reader, reference: Reference) -> Probe:
    """Of the stream x at each layer's input: sums of ``cos(x, m^_L)``, of ``x . m^_L`` and of ``|x|``."""
    units = torch.stack([reference.unit(layer) for layer in range(len(reference.mean))]).to(reader.device)

    def sums(resid: Tensor, rows: Rows, layer: int) -> Tensor:
        x = resid.float()
        along, length = (x * units[layer]).sum(-1), x.norm(dim=-1)
        values = torch.stack([along / length.clamp_min(1e-30), along, length], dim=-1)
        return torch.where(rows.far[..., None], values, 0.0).double().sum(1)

    return Probe(role="resid", columns=("cosine", "along", "length"), sums=sums)
