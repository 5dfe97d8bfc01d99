"""How far does the gate let a feature in: mean alpha over a feature's positions, averaged by category and resampled.

A position belongs to a feature when the feature is active on its token (spec part A, Fig. 6). All of it comes from sums
that are stored by token and by document, so nothing here sees a model.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from jaxtyping import Float, Int

from sae.taxonomy import BROAD, CATEGORIES
from satlens.bootstrap import document_weights, resample
from satlens.gate_sums import GateSums, Pairs

WEIGHTINGS = ("feature", "position")
"""Each feature counts once, or as often as it has positions."""
GROUPS = (*(("broad", name) for name in BROAD), *(("fine", name) for name in CATEGORIES))
"""Level and name of everything that gets a mean."""
CHUNK_VALUES = 1 << 22
"""Float64 values of resampled features held at once (32 MiB)."""
N_STRATA = 10
Group = tuple[str, str]


@dataclass(frozen=True, kw_only=True)
class Members:
    """The accepted features of one dictionary that the text has, and the tokens of each."""

    table: pd.DataFrame
    """One row a feature: latent, category, broad."""
    n_unseen: int
    """Accepted features left out because no position holds any of their tokens."""
    starts: Int[np.ndarray, " boundary"]
    """Where each feature's entries begin in ``token``, and last the end of all."""
    token: Int[np.ndarray, " entry"]
    """Token ids that the text has, feature after feature."""

    def group(self, group: Group) -> Int[np.ndarray, " member"]:
        """Rows of the features of one group."""
        level, name = group
        return np.flatnonzero(self.table["broad" if level == "broad" else "category"].to_numpy() == name)

    def tokens(self, first: int, last: int) -> tuple[Int[np.ndarray, " entry"], Int[np.ndarray, " entry"]]:
        """``(feature, token)`` of the features from ``first`` to before ``last``, features counted from 0."""
        part = slice(self.starts[first], self.starts[last])
        sizes = np.diff(self.starts[first : last + 1])
        return np.repeat(np.arange(last - first), sizes), self.token[part]


@dataclass(frozen=True, kw_only=True)
class Sampled:
    """A mean per layer: on all the data, and in each resample of documents, features, both, or permuted tokens."""

    estimate: Float[np.ndarray, " layer"]
    documents: Float[np.ndarray, "resample layer"]
    features: Float[np.ndarray, "resample layer"]
    joint: Float[np.ndarray, "resample layer"]
    null: Float[np.ndarray, "resample layer"]

    def minus(self, other: "Sampled") -> "Sampled":
        """The paired difference: both were resampled together."""
        return Sampled(**{name: value - getattr(other, name) for name, value in vars(self).items()})


def average(parts: Sequence[Sampled]) -> Sampled:
    """The mean over several dictionaries, resample by resample."""
    return Sampled(
        **{name: np.mean([getattr(part, name) for part in parts], axis=0) for name in vars(parts[0])}
    )


def members(features: pd.DataFrame, activations: pd.DataFrame, count: Int[np.ndarray, " d_vocab"]) -> Members:
    """Features with their tokens, both limited to what the text has (``count`` positions of each token id)."""
    kept = activations[count[activations["token_id"].to_numpy()] > 0]
    kept = kept[kept["latent"].isin(features["latent"]) & (kept["act"] > 0)]
    table = features[features["latent"].isin(kept["latent"])].sort_values("latent")
    table = table[["latent", "category", "broad"]].reset_index(drop=True)
    kept = kept.sort_values(["latent", "token_id"], kind="stable")
    place = np.searchsorted(table["latent"].to_numpy(), kept["latent"].to_numpy())
    starts = np.searchsorted(place, np.arange(len(table) + 1))
    tokens = kept["token_id"].to_numpy(np.int64)
    return Members(table=table, n_unseen=len(features) - len(table), starts=starts, token=tokens)


def feature_means(
    known: Members, gates: GateSums
) -> tuple[Float[np.ndarray, "feature layer kv_head"], Int[np.ndarray, " feature"]]:
    """Mean alpha over each feature's positions, and how many positions these are."""
    if not len(known.table):
        return np.zeros((0, *gates.sum.shape[1:])), np.zeros(0, dtype=np.int64)
    n_tokens = np.add.reduceat(gates.count[known.token], known.starts[:-1])
    totals = np.stack(
        [gates.sum[known.token[a:b]].sum(0) for a, b in zip(known.starts[:-1], known.starts[1:], strict=True)]
    )
    return totals / n_tokens[:, None, None], n_tokens


def sampled_means(
    known: Members, gates: GateSums, n_resamples: int, seed: int, stream: int
) -> dict[tuple[Group, str], Sampled]:
    """Mean alpha of every group under both weightings, with all its resamples; groups without features are absent.

    Documents are drawn by ``seed`` alone, so that several dictionaries see the same ones; features also by
    ``stream``, within each group.
    """
    present = [group for group in GROUPS if len(known.group(group))]
    draws = {
        group: _feature_draws(len(known.group(group)), n_resamples, [seed, stream, i])
        for i, group in enumerate(present)
    }
    weights = document_weights(gates.pairs.n_docs, n_resamples, seed)
    documents, joint = _over_documents(known, gates, weights, draws)
    means, n_tokens = feature_means(known, gates)
    by_layer = means.mean(2)
    null = _null(known, gates, n_resamples, seed, n_tokens)
    out = {}
    for group in present:
        rows = known.group(group)
        for weighting in WEIGHTINGS:
            weight = np.ones(len(rows)) if weighting == "feature" else n_tokens[rows].astype(float)
            shares = draws[group] * weight
            out[group, weighting] = Sampled(
                estimate=weight @ by_layer[rows] / weight.sum(),
                documents=documents[group, weighting],
                features=shares @ by_layer[rows] / shares.sum(1, keepdims=True),
                joint=joint[group, weighting],
                null=null[group, weighting],
            )
    return out


def _feature_draws(n_features: int, n_resamples: int, seed: list[int]) -> Int[np.ndarray, "resample member"]:
    """How often each feature of a group is drawn in each resample.

    One fewer are drawn than there are: with n draws a mean of n would vary too little by (n - 1) / n, which for a few
    features is much (Rao and Wu 1988). A single feature is drawn always, and says nothing of others.
    """
    share = np.full(n_features, 1.0 / n_features)
    draws = np.random.default_rng(seed).multinomial(max(n_features - 1, 1), share, size=n_resamples)
    return draws.astype(np.int32)


def _over_documents(
    known: Members, gates: GateSums, weights: np.ndarray, draws: Mapping[Group, np.ndarray]
) -> tuple[dict[tuple[Group, str], np.ndarray], dict[tuple[Group, str], np.ndarray]]:
    """Group means in every resample of documents, and of documents and features together.

    A feature that a resample holds no position of has no mean there, and does not enter that resample's group mean.
    """
    n_resamples, n_layers = len(weights), len(gates.layers)
    sums = {
        (group, weighting, both): [np.zeros((n_resamples, n_layers)), np.zeros((n_resamples, 1))]
        for group in draws
        for weighting in WEIGHTINGS
        for both in (False, True)
    }
    for first, last, count, total in _resampled_features(known, gates, weights):
        held = count > 0
        mean = np.divide(total, count[..., None], out=np.zeros_like(total), where=held[..., None])
        for group, drawn in draws.items():
            rows = known.group(group)
            inside = (rows >= first) & (rows < last)
            if not inside.any():
                continue
            at = rows[inside] - first
            for both in (False, True):
                times = drawn[:, inside].astype(float) if both else np.ones((n_resamples, len(at)))
                for weighting, top, below in (("feature", mean, held), ("position", total, count)):
                    numerator, denominator = sums[group, weighting, both]
                    numerator += np.matmul(times[:, None], top[:, at])[:, 0]
                    denominator += (times * below[:, at]).sum(1, keepdims=True)
    ratios = {
        key: np.divide(top, below, out=np.full_like(top, np.nan), where=below > 0)
        for key, (top, below) in sums.items()
    }
    split = [{key[:2]: value for key, value in ratios.items() if key[2] is both} for both in (False, True)]
    return split[0], split[1]


def _resampled_features(
    known: Members, gates: GateSums, weights: np.ndarray
) -> Iterator[tuple[int, int, np.ndarray, np.ndarray]]:
    """``(first, last, count [resample feature], alpha [resample feature layer])`` of some features at a time."""
    n_layers, n_resamples = len(gates.layers), len(weights)
    step = max(1, CHUNK_VALUES // (max(n_resamples, gates.pairs.n_docs) * (n_layers + 1)))
    for first in range(0, len(known.table), step):
        last = min(first + step, len(known.table))
        count, total = document_sums(known, gates.pairs, first, last)
        yield first, last, resample(count, weights), resample(total / gates.n_heads, weights)


def document_sums(
    known: Members, pairs: Pairs, first: int, last: int
) -> tuple[Float[np.ndarray, "doc feature"], Float[np.ndarray, "doc feature layer"]]:
    """Positions, and alpha summed over positions and heads, of some features in each document."""
    feature, token = known.tokens(first, last)
    begin, sizes = pairs.starts[token], pairs.starts[token + 1] - pairs.starts[token]
    at = np.arange(sizes.sum()) + np.repeat(begin - (sizes.cumsum() - sizes), sizes)
    cell = pairs.doc[at].astype(np.int64) * (last - first) + np.repeat(feature, sizes)
    shape, n_cells = (pairs.n_docs, last - first), pairs.n_docs * (last - first)
    count = np.bincount(cell, pairs.count[at], n_cells).reshape(shape)
    layers = [np.bincount(cell, column[at], n_cells).reshape(shape) for column in pairs.sum.T]
    return count, np.stack(layers, axis=-1)


def _null(
    known: Members, gates: GateSums, n_resamples: int, seed: int, n_tokens: np.ndarray
) -> dict[tuple[Group, str], np.ndarray]:
    """Group means when the token types of one frequency stratum trade their gate values.

    What is left of a category's mean, and of a difference of categories, is what token frequency alone explains.
    """
    seen = np.flatnonzero(gates.count)
    value = gates.sum[seen].mean(2) / gates.count[seen, None]
    weights = _type_weights(known, gates, n_tokens, seen)
    stacked = np.stack(list(weights.values())) if weights else np.zeros((0, len(seen)))
    strata = frequency_strata(gates.count[seen])
    generator = np.random.default_rng([seed, len(seen)])
    samples = np.empty((n_resamples, len(stacked), value.shape[1]))
    for at in range(n_resamples):
        # a random key within each stratum: ordering by it is a permutation that stays inside
        traded = np.lexsort((generator.random(len(seen)), strata))
        permuted = np.empty_like(value)
        permuted[np.argsort(strata, kind="stable")] = value[traded]
        samples[at] = stacked @ permuted
    return {key: samples[:, i] for i, key in enumerate(weights)}


def _type_weights(
    known: Members, gates: GateSums, n_tokens: np.ndarray, seen: np.ndarray
) -> dict[tuple[Group, str], Float[np.ndarray, " type"]]:
    """A group's mean as a weighted sum of the means of token types: these weights."""
    feature, token = known.tokens(0, len(known.table))
    place, positions = np.searchsorted(seen, token), gates.count[token].astype(float)
    out = {}
    for group in GROUPS:
        rows = known.group(group)
        if not len(rows):
            continue
        inside = np.isin(feature, rows)
        for weighting in WEIGHTINGS:
            once = weighting == "feature"
            share = positions / n_tokens[feature] / len(rows) if once else positions / n_tokens[rows].sum()
            out[group, weighting] = np.bincount(place[inside], share[inside], len(seen))
    return out


def frequency_strata(count: Int[np.ndarray, " type"]) -> Int[np.ndarray, " type"]:
    """Tenths of token types by how often they occur; types that occur equally often stay together."""
    edges = np.quantile(count, np.arange(1, N_STRATA) / N_STRATA)
    return np.searchsorted(edges, count, side="left")
