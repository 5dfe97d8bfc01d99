"""What is said about a latent is exact: every list, count and score equals a plain loop over the vocabulary."""

from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from sae.dictionary import Dictionary
from sae.features import (
    activations_table,
    input_embeddings,
    latent_features,
    mono_score,
    token_sets,
)
from satlens.errors import UserError
from tests.conftest import tiny_model

VOCAB, D_IN, D_SAE, K = 60, 6, 14, 3


def dictionary(W_enc: Tensor, b_enc: Tensor, k: int = K) -> Dictionary:
    """A dictionary of these weights whose decoder is the encoder's directions at length 1."""
    W_dec = torch.nn.functional.normalize(W_enc.T, dim=-1)
    return Dictionary(
        path=Path("made"),
        W_enc=W_enc,
        b_enc=b_enc,
        W_dec=W_dec,
        b_dec=torch.zeros(len(W_enc)),
        k=k,
        facts={"site": "v1"},
        counts=None,
        digest="",
    )


@pytest.fixture
def made() -> tuple[Dictionary, Tensor, Tensor]:
    """Latents at random, of which 0 never fires; vectors; counts, a third of them 0."""
    rng = torch.Generator().manual_seed(0)
    W_enc = torch.nn.functional.normalize(torch.randn(D_SAE, D_IN, generator=rng), dim=-1).T.contiguous()
    b_enc = torch.zeros(D_SAE)
    b_enc[0] = -1e4
    rows = torch.randn(VOCAB, D_IN, generator=rng)
    counts = torch.arange(VOCAB) % 3 * (torch.arange(VOCAB) % 7)
    return dictionary(W_enc, b_enc), rows, counts


def by_loop(made: tuple[Dictionary, Tensor, Tensor]) -> dict[int, list[tuple[float, int]]]:
    """Latent -> (activation, token id), the strongest first, ties by id: one token and one latent at a time."""
    d, rows, _ = made
    found: dict[int, list[tuple[float, int]]] = {latent: [] for latent in range(d.d_sae)}
    for token, x in enumerate(rows):
        pre = (x - d.b_dec) @ d.W_enc + d.b_enc
        for latent in sorted(range(d.d_sae), key=lambda n: -float(pre[n]))[: d.k]:
            if pre[latent] > 0:
                found[latent].append((float(pre[latent]), token))
    return {latent: sorted(pairs, key=lambda pair: (-pair[0], pair[1])) for latent, pairs in found.items()}


def test_lists_and_counts_equal_a_plain_loop(made: tuple[Dictionary, Tensor, Tensor]) -> None:
    d, rows, counts = made
    features, expected = latent_features(d, rows, counts), by_loop(made)
    assert features.starts[0] == 0 and features.starts[-1] == len(features.token) == len(features.act)
    for latent, pairs in expected.items():
        token, act = features.of(latent)
        assert token.tolist() == [t for _, t in pairs]
        np.testing.assert_allclose(act, [a for a, _ in pairs], rtol=1e-5, atol=1e-6)
        seen = [t for _, t in pairs if counts[t] > 0]
        assert int(features.n_active[latent]) == sum(int(counts[t]) for t in seen)
        assert int(features.n_types[latent]) == len(pairs)
        assert int(features.n_types_seen[latent]) == len(seen)
        assert bool(features.dead[latent]) == (not seen)
        assert bool(features.never[latent]) == (not pairs)
        assert float(features.density[latent]) == int(features.n_active[latent]) / int(counts.sum())
    every_position = [
        len([1 for pairs in expected.values() if t in [i for _, i in pairs]]) for t in range(VOCAB)
    ]
    assert features.l0 == sum(c * n for c, n in zip(counts.tolist(), every_position, strict=True)) / int(
        counts.sum()
    )


def test_a_latent_that_never_fires_is_there_with_nothing(made: tuple[Dictionary, Tensor, Tensor]) -> None:
    d, rows, counts = made
    features = latent_features(d, rows, counts)
    assert features.d_sae == D_SAE and bool(features.never[0]) and bool(features.dead[0])
    assert [len(part) for part in features.of(0)] == [0, 0]
    assert token_sets(features, 0, counts) is None
    assert torch.isnan(mono_score(features, rows, counts)[0])
    assert len(activations_table(features, [0])) == 0
    assert activations_table(features, []).columns.tolist() == ["latent", "token_id", "act"]


def test_a_latent_that_only_unseen_tokens_activate_is_dead_but_not_never(made: Any) -> None:
    d, rows, counts = made
    full = latent_features(d, rows, counts)
    latent = int(full.n_types_seen.argmax())
    without = counts.clone()
    without[full.of(latent)[0]] = 0
    features = latent_features(d, rows, without)
    assert bool(features.dead[latent]) and not bool(features.never[latent])
    assert int(features.n_active[latent]) == 0 and int(features.n_types[latent]) == int(full.n_types[latent])


def mono_by_loop(pairs: list[tuple[float, int]], embeddings: np.ndarray) -> float:
    """Weighted mean over pairs of tokens, written out."""
    centred = embeddings - embeddings.mean(0)
    above, below = 0.0, 0.0
    for (a, i), (b, j) in combinations(pairs, 2):
        u, v = centred[i], centred[j]
        above += a * b * float(u @ v) / float(np.linalg.norm(u) * np.linalg.norm(v))
        below += a * b
    return above / below


@pytest.mark.parametrize("seen_only", [True, False])
@pytest.mark.parametrize("top", [3, 5, 20])
def test_mono_score_equals_the_mean_over_pairs(
    made: tuple[Dictionary, Tensor, Tensor], top: int, seen_only: bool
) -> None:
    d, rows, counts = made
    embeddings = torch.randn(VOCAB, 9, generator=torch.Generator().manual_seed(4)) + 0.7
    scores = mono_score(latent_features(d, rows, counts), embeddings, counts, top, seen_only)
    assert scores.dtype == torch.float64
    scored = 0
    for latent, pairs in by_loop(made).items():
        listed = [(a, t) for a, t in pairs if counts[t] > 0 or not seen_only][:top]
        if len(listed) < 3:
            assert torch.isnan(scores[latent])
        else:
            expected = mono_by_loop(listed, embeddings.double().numpy())
            assert float(scores[latent]) == pytest.approx(expected, abs=1e-6)
            scored += 1
    assert scored > 3


def test_mono_score_is_one_for_like_embeddings_whatever_is_added_to_all(made: Any) -> None:
    d, rows, counts = made
    features = latent_features(d, rows, torch.ones_like(counts))
    latent = int(features.n_types.argmax())
    embeddings = torch.randn(VOCAB, 9, generator=torch.Generator().manual_seed(4))
    embeddings[features.of(latent)[0]] = torch.ones(9) * 3
    ones = torch.ones_like(counts)
    score = mono_score(features, embeddings, ones, top=VOCAB)[latent]
    assert float(score) == pytest.approx(1)
    moved = mono_score(features, embeddings + 5, ones, top=VOCAB)[latent]
    assert float(moved) == pytest.approx(1)


def hand(acts: list[float]) -> tuple[Dictionary, Tensor]:
    """One latent of one dimension that fires on token i with ``acts[i]``."""
    return dictionary(torch.ones(1, 1), torch.zeros(1), k=1), torch.tensor(acts, dtype=torch.float32)[:, None]


def test_ties_go_by_token_id() -> None:
    d, rows = hand([3, 5, 1, 5, 5, 2])
    assert latent_features(d, rows, torch.ones(6, dtype=torch.long)).of(0)[0].tolist() == [1, 3, 4, 0, 5, 2]


def test_sets_are_dealt_in_turn_from_the_strongest_seen_tokens() -> None:
    d, rows = hand([1, 9, 2, 8, 3, 7, 4, 6, 5, 10])
    counts = torch.ones(10, dtype=torch.long)
    counts[9] = 0  # the strongest, but the text lacks it
    features = latent_features(d, rows, counts)
    first, second = token_sets(features, 0, counts, m=4) or pytest.fail("sets expected")
    assert first.tolist() == [1, 5, 8, 4]  # activations 9 7 5 3
    assert second.tolist() == [3, 7, 6, 2]  # activations 8 6 4 2
    assert not set(first.tolist()) & set(second.tolist())


@pytest.mark.parametrize(("n", "sizes"), [(2, None), (5, None), (6, (3, 3)), (7, (4, 3)), (30, (10, 10))])
def test_sets_need_three_tokens_each(n: int, sizes: tuple[int, int] | None) -> None:
    d, rows = hand([float(i + 1) for i in range(n)])
    counts = torch.ones(n, dtype=torch.long)
    sets = token_sets(latent_features(d, rows, counts), 0, counts)
    assert (None if sets is None else (len(sets[0]), len(sets[1]))) == sizes


@pytest.mark.parametrize(("n", "scored"), [(2, False), (3, True)])
def test_mono_score_needs_three_tokens(n: int, scored: bool) -> None:
    d, rows = hand([float(i + 1) for i in range(n)] + [-1.0])
    counts = torch.ones(n + 1, dtype=torch.long)
    embeddings = torch.randn(n + 1, 4, generator=torch.Generator().manual_seed(0))
    assert bool(torch.isfinite(mono_score(latent_features(d, rows, counts), embeddings, counts)[0])) == scored


def test_activations_table_lists_every_activation_in_the_order_asked_for(made: Any) -> None:
    d, rows, counts = made
    features = latent_features(d, rows, counts)
    table, expected = activations_table(features, [5, 0, 2]), by_loop(made)
    assert table["latent"].tolist() == [5] * len(expected[5]) + [2] * len(expected[2])
    assert table["token_id"].tolist() == [t for latent in (5, 2) for _, t in expected[latent]]
    assert table["act"].dtype == np.float32


def test_what_does_not_fit_is_refused(made: tuple[Dictionary, Tensor, Tensor]) -> None:
    d, rows, counts = made
    with pytest.raises(UserError, match="another tokenizer"):
        latent_features(d, rows, counts[:-1])
    with pytest.raises(UserError, match="no token"):
        latent_features(d, rows, torch.zeros_like(counts))
    features = latent_features(d, rows, counts)
    for ask in (features.of, lambda n: activations_table(features, [n])):
        with pytest.raises(UserError, match="no latent 14"):
            ask(D_SAE)


def test_input_embeddings_are_the_models_own() -> None:
    from satlens.architectures import wrap

    model = tiny_model()
    weight = model.model.embeddings.weight
    bridge, _ = wrap(model)
    assert torch.equal(input_embeddings(bridge), weight)
