"""The prediction held against measured doses: where one clean pass is enough, and where it fails."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from satlens.bootstrap import ratio_interval
from satlens.carried.documents import DocumentSet, Rows
from satlens.carried.doses import ALPHAS, reference_doses
from satlens.carried.effects import count_above, thresholds
from satlens.carried.ledger import ledger, value_ledger
from satlens.carried.outcomes import part_or_nan
from satlens.carried.prediction import GatePass, gate_passes, predict
from satlens.carried.reader import Reader, hooked_site
from satlens.carried.reads import GateRead, Hook, Site
from satlens.carried.setting import Setting
from satlens.carried.tally import Probe, Tally
from satlens.log import say
from satlens.metrics import onednn_linears
from satlens.reading import process_place
from satlens.stream import gather

LEVEL_NAMES = ("duty", "firing", "firing_hard")
"""What is predicted: pre-activation above 0, post-activation above 0.5 and above 1."""


def forecast(
    setting: Setting, fit_documents: DocumentSet, alphas: Sequence[float] = ALPHAS
) -> tuple[dict[str, pd.DataFrame], Tally]:
    """Predict each layer's dose-response from a clean pass over the fit documents, and measure it on the others.

    Tables: ``prediction`` (a row a read, alpha, level, shape and treatment of the norm: predicted, measured with its
    interval, error) and ``prediction_location`` (mean pre-activation over gates and positions, predicted and measured:
    what is wrong there is attention's answer to the dose, not shape or scale).
    """
    reader = setting.reader
    passes = clean_pass(setting, fit_documents, alphas)
    changes = [change for layer in setting.layers for change in reference_doses(setting, layer, alphas)]
    probes = {kind: _level_probe(reader, kind) for kind in dict.fromkeys(p.read.kind for p in passes)}
    tally = setting.run("prediction, measured", changes, probes)
    rows: list[dict[str, object]] = []
    locations: list[dict[str, object]] = []
    for found in passes:
        lines = [1 + i for i, change in enumerate(changes) if change.start == found.read.layer]
        measured = _measured(tally, found.read, lines, setting)
        for norm in ("rescaled", "held"):
            made = predict(found, norm)
            labels = {"layer": found.read.layer, "kind": found.read.kind, "norm": norm}
            for shape, above in made.above.items():
                rows += _rows({**labels, "shape": shape}, above.mean(-1), found.alphas, measured)
            locations += _locations(labels, made.location, found.alphas, measured)
    return {"prediction": pd.DataFrame(rows), "prediction_location": pd.DataFrame(locations)}, tally


@torch.no_grad()
def clean_pass(setting: Setting, documents: DocumentSet, alphas: Sequence[float]) -> list[GatePass]:
    """One pass over ``documents`` without edits: all that predictions need, for every gate of the edited layers."""
    reader = setting.reader
    norms = {("mlp", entry.layer): entry.norm for entry in ledger(reader)}
    norms |= {("value", layer): norm for layer, norm in value_ledger(reader).items()}
    reads = [r for r in (*reader.reads, *reader.value_reads) if r.layer in setting.layers]
    passes = gate_passes(reads, norms, setting.reference, alphas)
    if left := sorted({r.layer for r in reads} - {p.read.layer for p in passes}):
        say(f"note: no norm feeds the gates of layers {', '.join(map(str, left))}, so they are not predicted")
    rank, world = process_place()
    with onednn_linears(reader.model):
        for rows in documents.batches(setting.batch_size, reader.device, reader.pad, rank, world):
            _add_batch(reader, passes, rows)
            if setting.on_batch is not None:
                setting.on_batch("prediction, clean pass", rows)
    for found in passes:
        together = gather(found)
        found.sums, found.count = together.sums, together.count
    return passes


def _add_batch(reader: Reader, passes: list[GatePass], rows: Rows) -> None:
    hooks: list[Hook] = []
    shape = rows.input_ids.shape
    with ExitStack() as stack:
        for found in passes:
            seen: dict[str, Tensor] = {}
            role, pre = found.read.roles
            site = Site(module=found.norm.module, side="in")
            where = f"input of the norm of layer {found.read.layer}"
            stack.enter_context(hooked_site(site, _keeper(seen, "normed"), *shape, where))
            hooks += [
                ("resid", found.read.layer, _keeper(seen, "resid")),
                (role, found.read.layer, _keeper(seen, "read")),
                (pre, found.read.layer, _adder(found, seen, rows)),
            ]
        reader.run(rows.input_ids, hooks)


def _keeper(seen: dict[str, Tensor], name: str) -> Callable[[Tensor], None]:
    def keep(tensor: Tensor) -> None:
        seen[name] = tensor

    return keep


def _adder(found: GatePass, seen: dict[str, Tensor], rows: Rows) -> Callable[[Tensor], None]:
    def add(pre: Tensor) -> None:
        found.add(seen["resid"], seen["normed"], seen["read"], pre, rows)
        seen.clear()

    return add


def _level_probe(reader: Reader, kind: str) -> Probe:
    """Counts above each level, and the sum of pre-activations over gates."""
    reads = reader.reads if kind == "mlp" else reader.value_reads
    levels = {read.layer: thresholds(read) for read in reads}

    def sums(z: Tensor, rows: Rows, layer: int) -> Tensor:
        counts = count_above(z, rows.far, levels[layer])
        total = torch.where(rows.far, z.float().sum(-1), 0.0).double().sum(1)
        return torch.cat([counts, total[:, None]], dim=1)

    return Probe(role=reads[0].roles[1], columns=(*LEVEL_NAMES, "sum"), sums=sums)


def _measured(tally: Tally, read: GateRead, lines: list[int], setting: Setting) -> list[np.ndarray]:
    """Estimate, low and high of each column at each dose, ``[alpha column]``."""
    sums = tally.probes[read.kind][lines, :, read.layer].numpy().transpose(1, 0, 2) / read.n_gates
    interval = ratio_interval(sums, tally.counts["far"].numpy(), setting.weights)
    return [part_or_nan(part, sums.shape[1:]) for part in interval]


def _rows(
    labels: dict[str, object], predicted: Tensor, alphas: Sequence[float], measured: list[np.ndarray]
) -> list[dict[str, object]]:
    estimate, low, high = measured
    return [
        {
            **labels,
            "alpha": alpha,
            "level": level,
            "predicted": float(predicted[i, j]),
            "measured": estimate[i, j],
            "low": low[i, j],
            "high": high[i, j],
            "error": float(predicted[i, j]) - estimate[i, j],
        }
        for i, alpha in enumerate(alphas)
        for j, level in enumerate(LEVEL_NAMES)
    ]


def _locations(
    labels: dict[str, object], location: Tensor, alphas: Sequence[float], measured: list[np.ndarray]
) -> list[dict[str, object]]:
    estimate, low, high = (part[:, -1] for part in measured)
    return [
        {
            **labels,
            "alpha": alpha,
            "predicted": float(location[i].mean()),
            "measured": estimate[i],
            "low": low[i],
            "high": high[i],
            "error": float(location[i].mean()) - estimate[i],
        }
        for i, alpha in enumerate(alphas)
    ]
