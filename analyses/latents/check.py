"""Do scores predict what a latent is worth to a head? Take it away there, and random ones like it, and see."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float

from analyses.latents.removal import CleanEnd, LogitChange, change_size, contribution, remove
from analyses.latents.traced import Flow, strongest
from satlens.accumulators import NllByDocument
from satlens.bootstrap import Weights, percentile_interval, ratio_interval, resampled_ratios
from satlens.errors import SatlensError
from satlens.interventions import Calibration, zero
from satlens.stream import Condition

TOP, CONTROL = "top", "control"
"""One latent taken away: one of the head's strongest, or a random one that is about as frequent."""
TOP_GROUP, CONTROL_GROUP, LABELLED, ALL = (
    "top ten together",
    "ten controls together",
    "all labelled",
    "all of V1",
)
"""Many at once: a single latent is a small part of V1, and its effect on the NLL may drown."""
N_MATCHED = 20
PREDICTORS, EFFECTS = ("score", "intake", "share"), ("logit_change", "delta_nll")


@dataclass(frozen=True, kw_only=True)
class Removal:
    """One thing to take away from one head."""

    kind: str
    at: int
    """Which of the gated layers."""
    kv_head: int
    latents: tuple[int, ...]
    """Of all of V1: none is named."""

    @property
    def latent(self) -> int | None:
        """The latent of a single removal."""
        return self.latents[0] if self.kind in (TOP, CONTROL) else None


@dataclass(frozen=True, kw_only=True)
class Check:
    """A removal and the pass that measures it."""

    removal: Removal
    condition: Condition


def plan(flow: Flow, n_heads: int, n_latents: int, seed: int) -> list[Removal]:
    """For each chosen head its strongest latents and as many controls, one by one and together; and more at once."""
    generator = np.random.default_rng(seed)
    labelled = tuple(flow.labels.features["latent"].tolist())
    out = []
    for at, head in chosen_heads(flow, n_heads):
        best = strongest(flow, at, head)
        controls = matched(flow, best, generator)
        single = [(TOP, (latent,)) for latent in best[:n_latents]]
        single += [(CONTROL, (latent,)) for latent in controls[:n_latents]]
        groups = [(TOP_GROUP, tuple(best)), (CONTROL_GROUP, tuple(controls)), (LABELLED, labelled), (ALL, ())]
        kinds = [(kind, latents) for kind, latents in [*single, *groups] if latents or kind == ALL]
        out += [Removal(kind=kind, at=at, kv_head=head, latents=latents) for kind, latents in kinds]
    return out


def chosen_heads(flow: Flow, n_heads: int) -> list[tuple[int, int]]:
    """Heads with the largest scores added over latents: the first of every layer, then the second, and so on.

    Depths are mixed on purpose; the loudest heads alone could all stand in one layer.
    """
    total = np.abs(flow.score).sum(0)
    place = (-total).argsort(axis=1, kind="stable").argsort(axis=1)
    order = sorted(np.ndindex(*total.shape), key=lambda cell: (place[cell], -total[cell]))
    return [(int(at), int(head)) for at, head in order if total[at, head] > 0][:n_heads]


def matched(flow: Flow, wanted: list[int], generator: np.random.Generator) -> list[int]:
    """For each latent a random other one out of the 20 that are active about as often; none twice."""
    active = flow.features.n_active.numpy()
    out: list[int] = []
    for latent in wanted:
        free = np.setdiff1d(np.flatnonzero(active), [*wanted, *out])
        distance = np.abs(np.log(active[free] / active[latent]))
        nearest = free[np.argsort(distance, kind="stable")[:N_MATCHED]]
        if len(nearest):
            out.append(int(generator.choice(nearest)))
    return out


def conditions(
    flow: Flow, chosen: list[Removal], bridge: Any, sites: Any, n_documents: int
) -> tuple[Condition, list[Check]]:
    """The unchanged model, and one condition for each removal."""
    end, size = CleanEnd(sites.n_layers - 1), change_size(bridge)
    clean = Condition(name="clean", accumulators=(NllByDocument(n_documents), end))
    checks = []
    for removal in chosen:
        layer = flow.gates.layers[removal.at]
        kept = (NllByDocument(n_documents), LogitChange(n_documents, end, size))
        condition = Condition(
            name=f"{removal.kind} {removal.latent or ''} out of layer {layer} head {removal.kv_head}",
            edits=(_edit(flow, removal, layer),),
            accumulators=kept,
            # a head that is shut wherever a latent is active loses nothing with it: that is a result, no dead site
            moved=True,
        )
        checks.append(Check(removal=removal, condition=condition))
    return clean, checks


def _edit(flow: Flow, removal: Removal, layer: int) -> Any:
    if removal.kind == ALL:
        nothing = torch.zeros(1, 1)
        return zero(layer, (removal.kv_head,), Calibration(mean=nothing, sample=nothing[..., None]), 0)
    latents = torch.tensor(removal.latents, dtype=torch.long)
    table = contribution(flow.dictionary, flow.codes, latents, removal.kv_head, flow.gates.n_heads)
    return remove(layer, removal.kv_head, table)


def check_table(flow: Flow, clean: Condition, checks: list[Check], weights: Weights) -> pd.DataFrame:
    """Score and effect of every removal, effects with paired intervals over documents.

    Raises:
        SatlensError: nothing that was taken away changed a logit, so the site is dead.
    """
    base: Any = clean.accumulators[0]
    count = base.count.numpy()
    named = flow.labels.features.set_index("latent")["category"]
    rows = []
    for check in checks:
        removal, (nll, change) = check.removal, sums_of(check)
        cell = (removal.latent, removal.at, removal.kv_head)
        known = removal.latent is not None
        row = {
            "kind": removal.kind,
            "layer": flow.gates.layers[removal.at],
            "kv_head": removal.kv_head,
            "latent": removal.latent,
            "category": named.get(removal.latent) if known else None,
            "positions": int(flow.features.n_active[removal.latent]) if known else None,
            "score": flow.score[cell] if known else np.nan,
            "intake": flow.intake[cell] if known else np.nan,
            "share": float(flow.whole.share[cell]) if known else np.nan,
        }
        for name, sums in (("logit_change", change), ("delta_nll", nll - base.nll.numpy())):
            interval = ratio_interval(sums, count, weights)
            row |= {name: interval.estimate, f"{name}_low": interval.low, f"{name}_high": interval.high}
        rows.append({**row, "n_tokens": int(count.sum())})
    table = pd.DataFrame(rows).astype({"latent": "Int64", "positions": "Int64"})
    if not (table["logit_change"] > 0).any():
        raise SatlensError(
            "nothing that was taken out of V1 changed a logit: a dead site, or gates shut on this text"
        )
    return table


def sums_of(check: Check) -> tuple[Float[np.ndarray, " doc"], Float[np.ndarray, " doc"]]:
    """NLL, and size of the change of logits, summed by document."""
    nll, change = check.condition.accumulators
    return nll.nll.numpy(), change.total.numpy()  # type: ignore[attr-defined]


def correlations(
    table: pd.DataFrame, clean: Condition, checks: list[Check], weights: Weights, seed: int
) -> pd.DataFrame:
    """Spearman correlation of predictions with effects over single latents, resampling removals and documents.

    Gates below 0 make scores and shares negative, so predictions enter by their size.
    """
    base: Any = clean.accumulators[0]
    single = table["latent"].notna().to_numpy()
    used = [check for check, keep in zip(checks, single, strict=True) if keep]
    sums = {
        "logit_change": np.stack([sums_of(check)[1] for check in used], axis=1),
        "delta_nll": np.stack([sums_of(check)[0] - base.nll.numpy() for check in used], axis=1),
    }
    draws = np.random.default_rng(seed).integers(len(used), size=(len(weights), len(used)))
    rows = []
    for effect, by_document in sums.items():
        estimate, samples = resampled_ratios(by_document, base.count.numpy(), weights)
        for predictor in PREDICTORS:
            size = table.loc[single, predictor].abs().to_numpy()
            low, high = None, None
            if samples is not None:
                pairs = zip(draws, samples, strict=False)
                low, high = percentile_interval(np.array([spearman(size[i], moved[i]) for i, moved in pairs]))
            rows.append((predictor, effect, spearman(size, estimate), low, high, len(used)))
    return pd.DataFrame(rows, columns=["predictor", "effect", "spearman", "low", "high", "n_removals"])


def spearman(x: Float[np.ndarray, " n"], y: Float[np.ndarray, " n"]) -> float:
    """Rank correlation, ties averaged; NaN when one side is constant."""
    a, b = (_ranks(values) - (len(values) + 1) / 2 for values in (x, y))
    length = np.sqrt((a @ a) * (b @ b))
    return float(a @ b / length) if length > 0 else np.nan


def _ranks(values: Float[np.ndarray, " n"]) -> Float[np.ndarray, " n"]:
    _, place, times = np.unique(values, return_inverse=True, return_counts=True)
    return (times.cumsum() - (times - 1) / 2)[place]
