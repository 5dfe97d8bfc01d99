"""How good is a reconstruction of V1: variance explained by set of tokens, by type, by frequency and by latent."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sae.baselines import Reconstruction
from sae.dictionary import Codes, Counts, Dictionary, decode
from sae.features import Features
from sae.variance import Sums, fve, fve_interval, squared_error, sums_by_document, weighted_mean
from satlens.bootstrap import Weights

ALL, PART = "all types", "some withheld"
"""What a reconstruction was fitted on: every type of the training text, or all but a random tenth or so."""
SAE = "sae"
AT_MOST = (1, 2, 9)
"""Token types that a latent may be active on to count as a memory of tokens rather than a feature."""
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)


@dataclass(frozen=True, kw_only=True)
class Text:
    """The table of V1, and the text that weights it."""

    rows: Float[Tensor, "d_vocab d_in"]
    counts: Counts
    heldout: list[np.ndarray]
    """Ids of each held-out document."""
    weights: Weights
    """Resamples of the held-out documents."""

    @property
    def seen(self) -> Bool[Tensor, " d_vocab"]:
        """Token ids that the text has, to train on or held out."""
        return self.counts.total > 0


@dataclass(frozen=True, kw_only=True)
class Fitted:
    """A reconstruction, and what it was allowed to see."""

    fit: str
    """``ALL`` or ``PART``."""
    seed: int | None
    """None for what needs none."""
    made: Reconstruction
    withheld: Int[Tensor, " type"]
    """Token ids that it never saw; none for ``ALL``."""
    dictionary: Dictionary | None = None
    codes: Codes | None = None
    features: Features | None = None

    @property
    def name(self) -> str:
        """As tables of documents and conditions name it."""
        words = [self.made.method, "" if self.seed is None else f"seed {self.seed}"]
        return " ".join(filter(None, [*words, "" if self.fit == ALL else self.fit]))

    def trained(self, text: Text) -> Int[Tensor, " d_vocab"]:
        """How often it was shown each token id."""
        counts = text.counts.train.clone()
        counts[self.withheld] = 0
        return counts


def heldout_sums(fitted: Fitted, text: Text) -> Sums:
    """Residual and total variance of each held-out document; the mean is that of all held-out documents."""
    mean = weighted_mean(text.rows, text.counts.heldout)
    residual, total = squared_error(text.rows, fitted.made.made), squared_error(text.rows, mean)
    return sums_by_document(text.heldout, residual, total)


def quality_row(fitted: Fitted, text: Text, sums: Sums) -> dict[str, Any]:
    """FVE of one reconstruction on every set of weights, its budget, and its latents."""
    made, trained = fitted.made.made, fitted.trained(text)
    withheld = torch.zeros_like(text.seen)
    withheld[fitted.withheld] = True
    sets = {
        "types": text.seen,  # every type of the text
        "types_trained": trained > 0,  # those it was fitted on
        "types_withheld": withheld & text.seen,  # those kept from it on purpose
        "types_new": text.seen & (text.counts.train == 0),  # those only the held-out documents have
    }
    interval = fve_interval(sums, text.weights)
    row = {
        "method": fitted.made.method,
        "seed": fitted.seed,
        "fit": fitted.fit,
        "budget": fitted.made.budget,
        "n_stored": fitted.made.n_stored,
        "l0": fitted.made.l0,
        "fve_train": fve(text.rows, made, trained),
        "fve_heldout": interval.estimate,
        "fve_heldout_low": interval.low,
        "fve_heldout_high": interval.high,
    }
    for name, chosen in sets.items():
        some = int(chosen.sum()) > 1
        row[f"fve_{name}"] = fve(text.rows, made, chosen) if some else None
        row[f"n_{name}"] = int(chosen.sum())
    return row | _latent_counts(fitted.features)


def _latent_counts(features: Features | None) -> dict[str, Any]:
    if features is None:
        return dict.fromkeys(("d_sae", "dead", "never"))
    return {
        "d_sae": features.d_sae,
        "dead": int(features.dead.sum()),
        "never": int(features.never.sum()),
    }


def quality_table(fitted: Sequence[Fitted], text: Text, sums: Sequence[Sums]) -> pd.DataFrame:
    """One row a reconstruction."""
    table = pd.DataFrame([quality_row(f, text, s) for f, s in zip(fitted, sums, strict=True)])
    whole = ["seed", "d_sae", "dead", "never"]
    return table.astype({**dict.fromkeys(whole, "Int64"), **_floats(table, "fve_")})


def over_seeds(table: pd.DataFrame) -> pd.DataFrame:
    """Mean and range over seeds of every score, one row a method, fit and score."""
    columns = [str(c) for c in table]
    scores = [c for c in columns if c.startswith("fve_") and not c.endswith(("_low", "_high"))]
    scores += [c for c in ("l0", "dead", "loss_recovered", "delta_nll") if c in table]
    long = table.melt(["method", "fit"], scores, "score", "value").dropna(subset="value")
    long["value"] = long["value"].astype(float)
    spread = long.groupby(["method", "fit", "score"], sort=False)["value"]
    return spread.agg(mean="mean", lowest="min", highest="max", n_seeds="count").reset_index()


def per_type_table(fitted: Sequence[Fitted], text: Text, pieces: Sequence[str]) -> pd.DataFrame:
    """Each dictionary on each token type of the text: how much it explains, with how many latents.

    ``fve`` of one type is ``1 - |x - xhat|^2 / |x - m|^2`` with ``m`` the mean of the training counts; ``pieces`` are
    those of the seen ids in order.
    """
    ids = text.seen.nonzero().squeeze(1)
    mean = weighted_mean(text.rows, text.counts.train)
    total = squared_error(text.rows[ids], mean).cpu()
    parts = []
    for f in fitted:
        assert f.codes is not None
        residual = squared_error(text.rows[ids], f.made.made[ids]).cpu()
        trained = f.trained(text)[ids]
        parts.append(
            pd.DataFrame(
                {
                    "seed": f.seed,
                    "fit": f.fit,
                    "token_id": ids.numpy(),
                    "piece": pieces,
                    "n_train": trained.numpy(),
                    "n_heldout": text.counts.heldout[ids].numpy(),
                    "n_tokens": text.counts.total[ids].numpy(),
                    "withheld": torch.isin(ids, f.withheld).numpy(),
                    "fve": (1 - residual / total).numpy(),
                    "l0": (f.codes.act.cpu()[ids] > 0).sum(1).numpy(),
                }
            )
        )
    return pd.concat(parts, ignore_index=True)


def type_quantiles(per_type: pd.DataFrame) -> pd.DataFrame:
    """Quantiles over token types of their FVE: for each set as a whole, and by how often the text has the type.

    ``count_low`` (included) and ``count_high`` (not) bound a doubling of frequency; both are null for the whole set.
    """
    rows = []
    for (seed, fit, withheld), table in per_type.groupby(["seed", "fit", "withheld"], sort=False):
        group = {"seed": seed, "fit": fit, "set": "withheld" if withheld else "not withheld"}
        rows.append(group | {"count_low": None, "count_high": None} | _quantiles(table["fve"]))
        doubling = np.log2(table["n_tokens"].to_numpy()).astype(int)
        for power, part in table.groupby(doubling):
            bounds = {"count_low": 2 ** int(power), "count_high": 2 ** (int(power) + 1)}
            rows.append(group | bounds | _quantiles(part["fve"]))
    return pd.DataFrame(rows).astype({"count_low": "Int64", "count_high": "Int64"})


def density_table(fitted: Sequence[Fitted]) -> pd.DataFrame:
    """Each latent of each dictionary: on how many positions and token ids it is active."""
    parts = []
    for f in fitted:
        assert f.features is not None
        parts.append(
            pd.DataFrame(
                {
                    "seed": f.seed,
                    "fit": f.fit,
                    "latent": range(f.features.d_sae),
                    "n_active": f.features.n_active.numpy(),
                    "density": f.features.density.numpy(),
                    "n_types": f.features.n_types.numpy(),
                    "n_types_seen": f.features.n_types_seen.numpy(),
                    "dead": f.features.dead.numpy(),
                    "never": f.features.never.numpy(),
                }
            )
        )
    return pd.concat(parts, ignore_index=True)


def memories_table(fitted: Sequence[Fitted], text: Text) -> pd.DataFrame:
    """How much of each dictionary is memory of single tokens: latents active on few types, and what they explain.

    With about as many latents as distinct vectors, a latent can be one token's own direction. ``fve_held`` is how far
    FVE on the training counts falls when every latent that is active on at most ``at_most`` types of the text is
    switched off. ``n_latents_by_all_ids`` counts latents by all ids they are active on, seen in the text or not.
    """
    rows = []
    for f in fitted:
        assert f.features is not None and f.dictionary is not None and f.codes is not None
        trained = f.trained(text)
        whole = fve(text.rows, f.made.made, trained)
        for at_most in AT_MOST:
            few = ~f.features.dead & (f.features.n_types_seen <= at_most)
            off = few.to(f.codes.latent.device)[f.codes.latent]
            without = decode(f.dictionary, replace(f.codes, act=f.codes.act.masked_fill(off, 0.0)))
            rows.append(
                {
                    "seed": f.seed,
                    "fit": f.fit,
                    "at_most": at_most,
                    "n_latents": int(few.sum()),
                    "share_of_latents": int(few.sum()) / f.features.d_sae,
                    "n_latents_by_all_ids": int(((f.features.n_types <= at_most) & ~f.features.never).sum()),
                    "fve_held": whole - fve(text.rows, without, trained),
                    "fve_without": fve(text.rows, without, trained),
                }
            )
    return pd.DataFrame(rows)


def _quantiles(values: pd.Series) -> dict[str, Any]:
    found = {f"q{round(100 * q):02d}": float(values.quantile(q)) for q in QUANTILES}
    return {"n_types": len(values), "mean": float(values.mean()), **found}


def _floats(table: pd.DataFrame, prefix: str) -> dict[str, str]:
    return {str(c): "float64" for c in table if str(c).startswith(prefix)}
