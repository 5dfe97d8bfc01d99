"""Everything about the flow of V1 latents that follows from weights and stored sums, and its tables."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor

from analyses.latents import intake
from sae.dictionary import Codes, Dictionary, encode
from sae.features import Features, latent_features
from sae.labels import Labels
from sae.pieces import pieces
from sae.table import v1_rows
from sae.taxonomy import BROAD
from satlens.bootstrap import percentile_interval, resample
from satlens.gate_sums import GateSums

PARTS = (*BROAD, "unlabelled", "bias", "error")
"""What a head's V1 intake is made of: labelled features by kind, other latents, decoder bias, reconstruction error."""
UNLABELLED, BIAS, ERROR = (PARTS.index(name) for name in PARTS[3:])
N_TOP, N_TOP_HEADS, N_STRONGEST, N_EXAMPLES = 10, 5, 20, 8
_DESCRIBED = ["latent", "category", "broad", "positions", "tokens"]
_NUMBERS = ["score", "intake", "logit_size", "share"]


@dataclass(frozen=True, kw_only=True)
class Flow:
    """What is known of every latent and head before anything is taken away."""

    dictionary: Dictionary
    rows: Float[Tensor, "d_vocab d_in"]
    codes: Codes
    gates: GateSums
    labels: Labels
    features: Features
    """Tokens of each latent, counted in the text of the gates run."""
    whole: intake.Intake
    path: intake.DirectPath
    query_size: Float[np.ndarray, "latent layer head"]
    """Direct-path logit size of each decoder row."""
    intake: Float[np.ndarray, "latent layer kv_head"]
    """Mean of alpha x activation x length of the decoder row."""
    score: Float[np.ndarray, "latent layer kv_head"]
    """Mean of alpha x activation x direct-path logit size. Ranks go by its size: a gate below 0 makes it negative."""
    texts: list[str]
    """Each token id, printable, spaces visible."""


def trace(
    bridge: Any, sites: Any, tokenizer: Any, dictionary: Dictionary, labels: Labels, gates: GateSums
) -> Flow:
    """Encode the table, weigh it with the gates, and look along the direct path."""
    rows = v1_rows(bridge).cpu()
    codes = encode(dictionary, rows)
    whole = intake.head_intake(dictionary, codes, rows, gates)
    path = intake.direct_path(bridge, sites)
    sizes = intake.logit_sizes(dictionary, path, gates.n_heads)
    norms = intake.by_head(dictionary, gates.n_heads).norm(dim=-1)
    return Flow(
        dictionary=dictionary,
        rows=rows,
        codes=codes,
        gates=gates,
        labels=labels,
        features=latent_features(dictionary, rows, torch.from_numpy(gates.count), codes),
        whole=whole,
        path=path,
        query_size=sizes.numpy(),
        intake=(whole.activation * norms[:, None]).numpy(),
        score=(whole.activation * intake.kv_sizes(sizes, gates.n_heads)).numpy(),
        texts=[visible(text) for text in pieces(tokenizer, sites.d_vocab)["text"]],
    )


def visible(text: str) -> str:
    """Printable token text with its spaces as ␣; a long run of them (indentation) as its length."""
    return re.sub(" {5,}", lambda run: f"␣×{len(run[0])}", text).replace(" ", "␣")


def part_of(flow: Flow) -> Int[np.ndarray, " latent"]:
    """Index in PARTS of each latent: the kind of a labelled one, or unlabelled."""
    out = np.full(flow.dictionary.d_sae, UNLABELLED)
    out[flow.labels.features["latent"]] = [PARTS.index(broad) for broad in flow.labels.features["broad"]]
    return out


def token_parts(flow: Flow) -> Float[Tensor, "d_vocab kv_head part"]:
    """Length of each token's V1 by head and part."""
    part = torch.from_numpy(part_of(flow))
    n_ids, k = flow.codes.act.shape
    out = torch.zeros(n_ids, flow.gates.n_heads, len(PARTS), dtype=torch.float64)
    for ids in intake.chunks(n_ids, k, flow.dictionary.d_in, 1):
        here = Codes(latent=flow.codes.latent[ids], act=flow.codes.act[ids])
        split = intake.lengths(flow.dictionary, here, flow.rows[ids], flow.gates.n_heads)
        index = part[here.latent][..., None].expand_as(split.active)
        out[ids].scatter_add_(2, index.transpose(1, 2), split.active.transpose(1, 2))
        out[ids, :, BIAS], out[ids, :, ERROR] = split.bias, split.error
    return out


def head_shares(flow: Flow) -> Float[np.ndarray, "layer kv_head part"]:
    """Each head's intake by part; adds up to 1 (NaN for a head that takes in nothing)."""
    part, shares = part_of(flow), flow.whole.share.numpy()
    cells = [shares[part == at].sum(0) for at in range(BIAS)]
    out = np.stack([*cells, flow.whole.bias.numpy(), flow.whole.error.numpy()], axis=-1)
    out[np.isnan(out[..., BIAS])] = np.nan  # a kind without any feature would say 0 of nothing
    return out


def shares_table(
    flow: Flow, by_document: Float[np.ndarray, "doc layer kv_head part"] | None, weights: Any
) -> pd.DataFrame:
    """Each head's intake by part, with intervals when the parts are known by document."""
    share = head_shares(flow)
    low = high = np.full(share.shape, np.nan)
    if by_document is not None and len(by_document) > 1:
        sums = resample(by_document, weights)
        with np.errstate(divide="ignore", invalid="ignore"):
            low, high = percentile_interval(sums / sums.sum(-1, keepdims=True))
    names = ["layer", "kv_head", "part"]
    index = pd.MultiIndex.from_product([flow.gates.layers, range(flow.gates.n_heads), PARTS], names=names)
    columns = {"share": share.ravel(), "low": low.ravel(), "high": high.ravel()}
    table = pd.DataFrame(columns, index=index).reset_index()
    table["length"] = np.repeat(flow.whole.length.numpy().ravel(), len(PARTS))
    table["n_tokens"] = int(flow.gates.count.sum())
    return table


def top_latents(flow: Flow) -> pd.DataFrame:
    """The ten latents with the largest score for every head, and what the direct path makes of each."""
    rows = []
    for at, layer in enumerate(flow.gates.layers):
        for head in range(flow.gates.n_heads):
            for rank, latent in enumerate(strongest(flow, at, head)):
                told = (*_described(flow, latent), *_numbers(flow, latent, at, head))
                rows.append((layer, head, rank, *told, *_promoted(flow, latent, at, head)))
    columns = ["layer", "kv_head", "rank", *_DESCRIBED, *_NUMBERS, "head", "promoted", "suppressed"]
    return pd.DataFrame(rows, columns=columns)


def strongest(flow: Flow, at: int, head: int) -> list[int]:
    """At most ten latents by falling size of their score in one head; ``at`` counts the gated layers."""
    strength = np.abs(flow.score[:, at, head])
    best = np.argsort(-strength, kind="stable")[:N_TOP]
    return [int(latent) for latent in best if strength[latent] > 0]


def top_heads(flow: Flow) -> pd.DataFrame:
    """For every labelled feature the five heads with the largest score."""
    rows = []
    for latent in flow.labels.features["latent"]:
        strength = np.abs(flow.score[latent])
        total = strength.sum()
        best = np.argsort(-strength.ravel(), kind="stable")[:N_TOP_HEADS]
        for rank, place in enumerate(best):
            at, head = divmod(int(place), flow.gates.n_heads)
            if strength[at, head] > 0:
                told = (*_described(flow, latent), rank, flow.gates.layers[at], head)
                rows.append((*told, *_numbers(flow, latent, at, head), strength[at, head] / total))
    columns = [*_DESCRIBED, "rank", "layer", "kv_head", *_NUMBERS, "part_of_latent"]
    return pd.DataFrame(rows, columns=columns)


def strongest_everywhere(flow: Flow) -> pd.DataFrame:
    """The latents whose scores over all heads add up to most, in every head."""
    total = np.abs(flow.score).sum((1, 2))
    rows = []
    for rank, latent in enumerate(np.argsort(-total, kind="stable")[:N_STRONGEST]):
        told = _described(flow, latent)
        for at, layer in enumerate(flow.gates.layers):
            rows += [
                (rank, *told, layer, head, float(flow.score[latent, at, head]))
                for head in range(flow.gates.n_heads)
            ]
    return pd.DataFrame(rows, columns=["rank", *_DESCRIBED, "layer", "kv_head", "score"])


def _promoted(flow: Flow, latent: int, at: int, head: int) -> tuple[int, str, str]:
    """The query head of the group that writes a latent largest, and the tokens it raises and lowers most there."""
    group = flow.path.n_heads // flow.gates.n_heads
    query = head * group + int(flow.query_size[latent, at, head * group : (head + 1) * group].argmax())
    row = flow.dictionary.W_dec[latent].cpu().unflatten(0, (flow.gates.n_heads, -1))[head]
    # a gate below 0 turns the direction around
    logits = flow.path.logits(at, query, row[None])[0] * float(np.sign(flow.score[latent, at, head]))
    order = logits.argsort(stable=True).tolist()
    return query, _words(flow, order[::-1]), _words(flow, order)


def _words(flow: Flow, ids: Sequence[int]) -> str:
    return " ".join(flow.texts[i] for i in ids[:N_EXAMPLES])


def _described(flow: Flow, latent: int) -> tuple[Any, ...]:
    """What a latent is: its label if it has one, how often it is active, and on what."""
    features = flow.labels.features
    label = features[features["latent"] == latent]
    named = (label["category"].iloc[0], label["broad"].iloc[0]) if len(label) else (None, None)
    tokens, _ = flow.features.of(int(latent))
    seen = [i for i in tokens.tolist() if flow.gates.count[i] > 0]
    return (int(latent), *named, int(flow.features.n_active[latent]), _words(flow, seen))


def _numbers(flow: Flow, latent: int, at: int, head: int) -> tuple[float, ...]:
    """Score, intake, logit size per unit of intake, share of the head's intake."""
    score, taken = float(flow.score[latent, at, head]), float(flow.intake[latent, at, head])
    return score, taken, score / taken if taken else np.nan, float(flow.whole.share[latent, at, head])
