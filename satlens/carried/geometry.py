"""Is the carried direction one of the known ones: first token, sink, massive coordinates, outlier dimensions."""

from collections.abc import Callable
from itertools import combinations

import numpy as np
import pandas as pd

from satlens.bootstrap import Floats, Interval, Weights, statistic_interval
from satlens.carried.documents import SKIP
from satlens.carried.mean import columns
from satlens.carried.statics import Statics

N_MASSIVE, N_OUTLIER = 5, 20
"""Coordinates of a massive-activation vector, and outlier dimensions (and of a Jaccard comparison)."""
RANKS = (8, 32, 128, 512)
"""Leading eigenvectors of the stream's covariance that a subspace is made of; those below d_model are used."""

Metric = Callable[[Floats, Floats], float]


def geometry_table(statics: Statics, fit: Weights) -> pd.DataFrame:
    """Similarity of m^ to each proxy under each metric, beside the median and the 95th percentile of a null.

    Metrics: raw cosine, covariance-weighted cosine, cosine within the top-r subspace, Jaccard of the 20 largest
    coordinates, and m's energy on the proxy's coordinates. Null: the same metric between deviations from the mean of
    single positions in 16 documents, every two of them. ``read mean`` is the positive control. Intervals of the raw
    cosine resample the fit documents behind m (spec part B, geometry).
    """
    samples = statics.evaluate["samples"]
    rows = []
    for layer in statics.geometry:
        m = statics.fit["resid"][:, layer].sum(0) / statics.fit["count"].sum()
        metrics = _metrics(_covariance(statics, layer), len(m))
        deviations = samples[:, layer] - m
        pairs = [(deviations[i], deviations[j]) for i, j in combinations(range(len(deviations)), 2)]
        nulls = {name: [metric(one, other) for one, other in pairs] for name, metric in metrics.items()}
        for direction, (vector, coordinates) in proxies(statics, layer).items():
            for name, metric in metrics.items():
                if (
                    name == "jaccard"
                    and coordinates is not None
                    and len(coordinates) < min(N_OUTLIER, len(m))
                ):
                    continue  # five coordinates have no twenty largest: the others would be zeros in order of place
                ends = (
                    columns("value", _raw_interval(statics, layer, fit, vector)) if name == "cosine" else {}
                )
                null = np.abs(nulls[name]) if pairs else np.array([np.nan])
                rows.append(
                    {
                        "layer": layer,
                        "direction": direction,
                        "metric": name,
                        "value": metric(m, vector),
                        "value_low": ends.get("value_low"),
                        "value_high": ends.get("value_high"),
                        "null_median": float(np.median(null)),
                        "null_95": float(np.quantile(null, 0.95)),
                        "n_null": len(pairs),
                    }
                )
            if coordinates is not None:
                energy = float(np.square(m[coordinates]).sum() / np.square(m).sum())
                rows.append({"layer": layer, "direction": direction, "metric": "energy", "value": energy})
    return pd.DataFrame(rows)


def proxies(statics: Statics, layer: int) -> dict[str, tuple[Floats, np.ndarray | None]]:
    """The known directions as vectors, and the coordinates that two of them are defined by.

    First token: mean stream at position 0 of the layer where its largest coordinate is largest. Massive: that
    vector's five largest coordinates alone. Sink: mean stream of positions below 16 at this layer. Outlier: the mean at
    the final norm's input, on its 20 coordinates of largest mean square (all as in the paper's code).
    """
    data, n = statics.evaluate, len(statics.evaluate["count"])
    first = data["first"] / n
    where = int(np.abs(first[:-1]).max(1).argmax())
    massive = np.argsort(-np.abs(first[where]), kind="stable")[:N_MASSIVE]
    outlier = np.argsort(-data["final_square"], kind="stable")[:N_OUTLIER]
    final = data["resid"][:, -1].sum(0) / data["count"].sum()
    return {
        "read mean": (statics.fit["read"][:, layer].sum(0), None),
        "first token": (first[where], None),
        "sink": (data["sink"][layer] / (n * SKIP), None),
        "massive": (_only(first[where], massive), massive),
        "outlier": (_only(final, outlier), outlier),
    }


def _metrics(covariance: Floats, d_model: int) -> dict[str, Metric]:
    _, vectors = np.linalg.eigh(covariance)
    out: dict[str, Metric] = {"cosine": _cosine, "covariance": lambda u, v: _weighted(u, v, covariance)}
    for rank in (rank for rank in RANKS if rank < d_model):
        out[f"top {rank}"] = _within(vectors[:, -rank:])
    return {**out, "jaccard": _jaccard}


def _within(basis: Floats) -> Metric:
    """Cosine of the parts in a subspace."""
    return lambda one, other: _cosine(basis.T @ one, basis.T @ other)


def _covariance(statics: Statics, layer: int) -> Floats:
    """Covariance of the stream at a layer over every fourth position, about the mean of these positions."""
    data = statics.evaluate
    second: Floats = data[f"covariance_{layer}"] / data["covariance_count"]
    mean = data[f"deviation_{layer}"] / data["covariance_count"]
    return second - np.outer(mean, mean)


def _raw_interval(statics: Statics, layer: int, fit: Weights, vector: Floats) -> Interval:
    unit = vector / np.linalg.norm(vector)
    sums, count = statics.fit["resid"][:, layer], statics.fit["count"]
    return statistic_interval(sums, count, fit, lambda m: (m @ unit) / np.linalg.norm(m, axis=-1))


def _cosine(one: Floats, other: Floats) -> float:
    length = np.linalg.norm(one) * np.linalg.norm(other)
    return float(one @ other / length) if length else float("nan")


def _weighted(one: Floats, other: Floats, covariance: Floats) -> float:
    """Cosine in the metric of the covariance: how alike two directions read the stream."""
    left, right = covariance @ one, covariance @ other
    scale = (one @ left) * (other @ right)
    return float(one @ right / np.sqrt(scale)) if scale > 0 else float("nan")


def _jaccard(one: Floats, other: Floats) -> float:
    """Overlap of the sets of largest coordinates."""
    sets = [set(np.argsort(-np.abs(vector), kind="stable")[:N_OUTLIER].tolist()) for vector in (one, other)]
    return len(sets[0] & sets[1]) / len(sets[0] | sets[1])


def _only(vector: Floats, coordinates: np.ndarray) -> Floats:
    out = np.zeros_like(vector)
    out[coordinates] = vector[coordinates]
    return out
