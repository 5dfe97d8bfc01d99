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
from satlens.carried.edits import Change, after_attention, dose
from satlens.carried.effects import count_above, thresholds
from satlens.carried.ledger import ledger, value_ledger
from satlens.carried.outcomes import part_or_nan
from satlens.carried.prediction import GatePass, gate_passes, predict
from satlens.carried.reader import Reader, hooked_site
from satlens.carried.reads import Hook, Site
from satlens.carried.setting import Setting
from satlens.carried.tally import CLEAN, Probe, Tally
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
    interval; the same of the change from alpha = 1, which is always among the doses and in which the difference between
    the two document sets cancels; and measured with ``attention_held``, where the dose is added behind the layer's
    attention, which cannot answer it), ``prediction_location`` (mean pre-activation over gates and positions, predicted
    and measured, which is exact where attention is held and the documents are the same) and ``prediction_summary``
    (where it fails).
    """
    reader, alphas = setting.reader, sorted({*alphas, 1.0})
    passes = clean_pass(setting, fit_documents, alphas)
    changes = [change for layer in setting.layers for change in reference_doses(setting, layer, alphas)]
    changes += [
        change for layer in _answering(reader, setting.layers) for change in _held(setting, layer, alphas)
    ]
    kinds = sorted({found.read.kind for found in passes})
    probes: dict[str, Probe] = {kind: _level_probe(reader, kind) for kind in kinds}
    tally = setting.run("prediction, measured", changes, probes)
    rows: list[dict[str, object]] = []
    locations: list[dict[str, object]] = []
    for found in passes:
        measured = _measured(tally, found, setting)
        for norm in ("rescaled", "held"):
            made = predict(found, norm)
            labels: dict[str, object] = {"layer": found.read.layer, "kind": found.read.kind, "norm": norm}
            for shape, above in made.above.items():
                rows += _rows({**labels, "shape": shape}, above.mean(-1), found.alphas, measured)
            locations += _locations(labels, made.location, found.alphas, measured)
    table = pd.DataFrame(rows)
    tables = {"prediction": table, "prediction_location": pd.DataFrame(locations)}
    return {**tables, "prediction_summary": where_it_fails(table)}, tally


def _answering(reader: Reader, layers: Sequence[int]) -> list[int]:
    """Layers whose attention reads the dose before the MLP gates do; in parallel blocks nothing stands between."""
    return [
        entry.layer
        for entry in ledger(reader)
        if entry.layer in layers
        and (entry.block == "post-norm" or (entry.block == "sequential" and not entry.renormed))
    ]


def _held(setting: Setting, layer: int, alphas: Sequence[float]) -> list[Change]:
    """The doses of a layer, added behind its attention; alpha = 1 is the clean model."""
    m = setting.unit(layer)
    return [
        Change(
            edits=after_attention(layer, dose(m, alpha)),
            labels={"alpha": alpha, "direction": "attention held"},
        )
        for alpha in alphas
        if alpha != 1
    ]


def where_it_fails(table: pd.DataFrame) -> pd.DataFrame:
    """A row a kind of gate, level, model and dose, over layers: how far predicted changes are off, and how often more
    than the measured interval allows; beside the size of the measured change, without which an error says nothing.

    The interval is that of the evaluated documents; the prediction's own documents have theirs, which is not in it.
    """
    rows = []
    keys = ["kind", "level", "shape", "norm", "alpha"]
    for labels, part in table[table["alpha"] != 1].groupby(keys, sort=False):
        error = part["change_error"].to_numpy(float)
        outside = (part["predicted_change"] < part["change_low"]) | (
            part["predicted_change"] > part["change_high"]
        )
        worst = int(np.abs(error).argmax())
        rows.append(
            {
                **dict(zip(keys, labels, strict=True)),
                "n_layers": len(part),
                "n_outside": int(outside.sum()) if part["change_low"].notna().any() else None,
                "mean_change": part["change"].mean(),
                "mean_error": error.mean(),
                "mean_absolute_error": np.abs(error).mean(),
                "mean_absolute_error_attention_held": part["attention_held_change_error"].abs().mean(),
                "worst_error": error[worst],
                "worst_layer": int(part["layer"].iloc[worst]),
            }
        )
    return pd.DataFrame(rows)


def failures_in_words(table: pd.DataFrame) -> dict[str, str]:
    """Where the best model (each gate's own shape, the norm rescaled) fails, in a sentence a kind of gate and level.

    Keys are ``prediction_<kind>_<level>``; ``table`` is ``where_it_fails``'s.
    """
    out: dict[str, str] = {}
    best = table[(table["shape"] == "empirical") & (table["norm"] == "rescaled")]
    for (kind, level), part in best.groupby(["kind", "level"]):
        worst = part.iloc[int(part["worst_error"].abs().to_numpy().argmax())]
        known = part["n_outside"].notna().all()
        inside = (
            f"outside the measured interval at {int(part['n_outside'].sum())} of {int(part['n_layers'].sum())} doses"
            if known
            else "no interval to hold it against"
        )
        error, held, size = (
            float((part["n_layers"] * part[name].abs()).sum() / part["n_layers"].sum())
            for name in ("mean_absolute_error", "mean_absolute_error_attention_held", "mean_change")
        )
        answer = "" if held == error else f" ({held:.3f} with attention held)"
        out[f"prediction_{kind}_{level}"] = (
            f"predicted change off by {error:.3f} on average{answer}, where the share changes "
            f"by {size:.3f}; {inside}; worst {worst['worst_error']:+.3f} at layer {worst['worst_layer']}, alpha "
            f"{worst['alpha']:g}"
        )
    return out


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
    batch, pos = rows.input_ids.shape
    with ExitStack() as stack:
        for found in passes:
            seen: dict[str, Tensor] = {}
            role, pre = found.read.roles
            site = Site(module=found.norm.module, side="in")
            where = f"input of the norm of layer {found.read.layer}"
            stack.enter_context(hooked_site(site, _keeper(seen, "normed"), batch, pos, where))
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


Measured = dict[str, list[np.ndarray]]
"""What was measured: estimate, low and high of each column of the probe at each dose, ``[alpha column]``."""


def _measured(tally: Tally, found: GatePass, setting: Setting) -> Measured:
    """A read's shares and their changes from the clean model, as the model is and with attention held."""
    read, alphas = found.read, found.alphas
    lines: dict[str, dict[object, int]] = {"reference": {}, "attention held": {1.0: CLEAN}}
    for line, change in enumerate(tally.changes, start=1):
        if change.start == read.layer:
            lines[str(change.labels["direction"])][change.labels["alpha"]] = line
    free = [lines["reference"][alpha] for alpha in alphas]
    answers = read.kind == "mlp" and len(lines["attention held"]) == len(alphas)
    held = [lines["attention held"][alpha] for alpha in alphas] if answers else free
    probe, counts = (
        tally.probes[read.kind][:, :, read.layer].numpy() / read.n_gates,
        tally.counts["far"].numpy(),
    )

    def interval(values: np.ndarray) -> list[np.ndarray]:
        parts = ratio_interval(values.transpose(1, 0, 2), counts, setting.weights)
        return [part_or_nan(part, (len(alphas), probe.shape[-1])) for part in parts]

    return {
        "measured": interval(probe[free]),
        "change": interval(probe[free] - probe[CLEAN]),
        "attention_held": interval(probe[held]),
        "attention_held_change": interval(probe[held] - probe[CLEAN]),
    }


def _rows(
    labels: dict[str, object], predicted: Tensor, alphas: Sequence[float], measured: Measured
) -> list[dict[str, object]]:
    """A row an alpha and level: predicted and measured."""
    shares = predicted.numpy()
    changes = shares - shares[alphas.index(1.0)]
    rows: list[dict[str, object]] = []
    for i, alpha in enumerate(alphas):
        for j, level in enumerate(LEVEL_NAMES):
            row: dict[str, object] = {
                **labels, "alpha": alpha, "level": level,
                "predicted": float(shares[i, j]), "predicted_change": float(changes[i, j]),
            }  # fmt: skip
            for name, ends in measured.items():
                estimate, low, high = (float(end[i, j]) for end in ends)
                of = "" if name == "measured" else f"{name}_"
                error = float((changes if name.endswith("change") else shares)[i, j]) - estimate
                row |= {name: estimate, f"{of}low": low, f"{of}high": high, f"{of}error": error}
            rows.append(row)
    return rows


def _locations(
    labels: dict[str, object], location: Tensor, alphas: Sequence[float], measured: Measured
) -> list[dict[str, object]]:
    estimate, low, high = (part[:, -1] for part in measured["measured"])
    held = measured["attention_held"][0][:, -1]
    return [
        {
            **labels,
            "alpha": alpha,
            "predicted": (mean := float(location[i].mean())),
            "measured": estimate[i],
            "low": low[i],
            "high": high[i],
            "error": mean - estimate[i],
            "attention_held": held[i],
            "attention_held_error": mean - held[i],
        }
        for i, alpha in enumerate(alphas)
    ]
