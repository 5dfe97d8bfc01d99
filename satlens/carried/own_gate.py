"""SATFormer's own gate: does the carried direction hold access to V1 shut, and what is it worth beside the gate?"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from satlens.bootstrap import Floats, delta_interval, ratio_interval
from satlens.carried.edits import Change, Edit, Where, dose, edit, matched
from satlens.carried.ledger import value_ledger
from satlens.carried.norms import Norm
from satlens.carried.outcomes import effects_table, part_or_nan
from satlens.carried.setting import Setting, own_gate_probe
from satlens.carried.tally import CLEAN, Tally
from satlens.errors import UserError


def own_gates(setting: Setting) -> tuple[dict[str, pd.DataFrame], Tally]:
    """Removing m^ where the attention norm reads it, at every layer with a gate, beside closing the gate.

    Kinds: ``removed`` and ``doubled`` (the whole layer sees it), ``removed for the gate`` (queries, keys, values and
    the MLP see the clean stream: only alpha changes), ``zeroed`` (alpha = 0), and ``setting.draws`` matched controls.
    Tables: ``gate`` (a row a change: share of open gates and mean alpha at its layer, clean and changed, perplexity,
    KL), ``gate_controls`` (against the control distribution), ``gate_heads`` (the same by KV head).

    Raises:
        UserError: the model has no gate of its own.
    """
    reader = setting.reader
    if not reader.value_reads:
        raise UserError(f"{reader.name} has no gate on first-layer values: leave the gate experiment out")
    norms = value_ledger(reader)
    changes = [
        c for read in reader.value_reads for c in _layer_changes(setting, read.layer, norms[read.layer])
    ]
    tally = setting.run("own gates", changes, {"own": own_gate_probe(reader)})
    table = effects_table(tally, reader, setting.weights)
    sums, counts = _gate_sums(tally), tally.counts["far"].numpy()
    for name, values in sums.items():
        clean, changed = values.mean(-1)
        table[f"{name}_clean"] = clean.sum(0) / counts.sum()
        table[name] = changed.sum(0) / counts.sum()
        moved = ratio_interval(changed - clean, counts, setting.weights)
        for end, part in zip(("", "_low", "_high"), moved, strict=True):
            table[f"delta_{name}{end}"] = part_or_nan(part, (len(changes),))
    table = pd.concat([table, _perplexity(tally, setting)], axis=1)
    heads = _heads(tally, sums, counts, setting)
    return {"gate": table, "gate_controls": _controls(table), "gate_heads": heads}, tally


def _layer_changes(setting: Setting, layer: int, norm: Norm | None) -> Iterator[Change]:
    m = setting.unit(layer)
    removal, site = edit(dose(m, 0.0)), ("resid", layer)

    def labels(kind: str, draw: int = -1) -> dict[str, object]:
        return {"kind": kind, "draw": draw}

    yield Change(edits={site: removal}, labels=labels("removed"))
    yield Change(edits={site: edit(dose(m, 2.0))}, labels=labels("doubled"))
    if norm is not None:
        yield Change(edits=gate_only(layer, removal, norm), labels=labels("removed for the gate"))
    yield Change(edits={("value_gate", layer): lambda x, where: torch.zeros_like(x)}, labels=labels("zeroed"))
    for draw, other in enumerate(setting.randoms(layer)):
        yield Change(edits={site: edit(matched(m, other, 0.0))}, labels=labels("matched", draw))


def gate_only(layer: int, change: Edit, norm: Norm) -> dict[tuple[str, int], Edit]:
    """Edits that show a changed stream to the layer's gate projection and to nothing else."""
    kept: dict[str, Tensor] = {}

    def remember(resid: Tensor, where: Where) -> Tensor:
        kept["resid"] = resid
        return resid

    def read_anew(read: Tensor, where: Where) -> Tensor:
        new: Tensor = norm.module(change(kept["resid"], where))
        return torch.where(where.far[..., None], new, read)

    return {("resid", layer): remember, ("value_read", layer): read_anew}


def _gate_sums(tally: Tally) -> dict[str, Floats]:
    """``open`` and ``alpha``: sums ``[clean or changed, doc, change, head]`` at each change's own layer."""
    own = tally.probes["own"].numpy()
    at = np.array([change.start for change in tally.changes])
    lines = np.arange(1, tally.n_lines)
    clean, changed = own[CLEAN][:, at], own[lines, :, at].transpose(1, 0, 2)
    n_heads = own.shape[-1] // 2
    both = np.stack([clean, changed])
    return {"open": both[..., :n_heads], "alpha": both[..., n_heads:]}


def _perplexity(tally: Tally, setting: Setting) -> pd.DataFrame:
    nll, counts = tally.outputs["nll_scored"].numpy(), tally.counts["scored"].numpy()
    delta = delta_interval(nll[1:].T, nll[CLEAN], counts, setting.weights).perplexity
    clean = float(np.exp(nll[CLEAN].sum() / counts.sum()))
    columns: dict[str, Any] = {"perplexity_clean": clean}
    for end, part in zip(("", "_low", "_high"), delta, strict=True):
        columns[f"delta_ppl{end}"] = part_or_nan(part, (len(tally.changes),))
    return pd.DataFrame(columns)


def _controls(table: pd.DataFrame) -> pd.DataFrame:
    """Removal against the matched controls of its layer; signed, since opening and closing differ."""
    rows = []
    for layer, group in table.groupby("layer"):
        removed = group[group["kind"] == "removed"].iloc[0]
        matched_rows = group[group["kind"] == "matched"]
        for name in ("delta_open", "delta_alpha", "delta_nll"):
            controls = matched_rows[name].to_numpy(float)
            rows.append(
                {
                    "layer": layer,
                    "measure": name,
                    "reference": removed[name],
                    "control_mean": controls.mean(),
                    "control_low": controls.min(),
                    "control_high": controls.max(),
                    "percentile": 100 * float((controls < removed[name]).mean()),
                    "n_controls": len(controls),
                }
            )
    return pd.DataFrame(rows)


def _heads(tally: Tally, sums: dict[str, Floats], counts: Floats, setting: Setting) -> pd.DataFrame:
    rows = []
    moved = {
        name: ratio_interval(values[1] - values[0], counts, setting.weights) for name, values in sums.items()
    }
    shape = sums["open"].shape[2:]
    ends = {name: [part_or_nan(part, shape) for part in interval] for name, interval in moved.items()}
    for place, change in enumerate(tally.changes):
        if change.labels["kind"] == "matched":
            continue
        for head in range(shape[1]):
            row: dict[str, Any] = {"layer": change.start, "kind": change.labels["kind"], "kv_head": head}
            for name, values in sums.items():
                row[f"{name}_clean"] = values[0, :, place, head].sum() / counts.sum()
                for end, part in zip(("", "_low", "_high"), ends[name], strict=True):
                    row[f"delta_{name}{end}"] = float(part[place, head])
            rows.append({**row, "n_tokens": int(counts.sum())})
    return pd.DataFrame(rows)
