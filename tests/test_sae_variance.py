"""Variance explained and the baselines that it is compared with, against sums over single tokens."""

import numpy as np
import pytest
import torch
from sae_lens.evals import ExplainedVarianceCalculator
from torch import Tensor

from sae.baselines import BASELINES, EXACT, Budget, kmeans, memory, pca
from sae.variance import fve, fve_interval, squared_error, sums_by_document, weighted_mean
from satlens.bootstrap import document_weights
from satlens.errors import SatlensError


@pytest.fixture
def vectors() -> tuple[Tensor, Tensor]:
    """Vectors far from the origin, and counts with zeros among them."""
    rng = torch.Generator().manual_seed(0)
    return torch.randn(30, 8, generator=rng) * 2 + 3, torch.arange(30) % 4 * (torch.arange(30) % 5)


def expanded(x: Tensor, counts: Tensor) -> np.ndarray:
    """One row a token, as if nobody had counted."""
    return np.repeat(x.double().numpy(), counts.numpy(), axis=0)


def slow_fve(x: Tensor, made: Tensor, counts: Tensor) -> float:
    """The formula on every token: residual over total sum of squares about the mean."""
    tokens, other = expanded(x, counts), expanded(made, counts)
    return 1 - ((tokens - other) ** 2).sum() / ((tokens - tokens.mean(0)) ** 2).sum()


def test_fve_of_known_reconstructions(vectors: tuple[Tensor, Tensor]) -> None:
    x, counts = vectors
    mean = weighted_mean(x, counts)
    total = float(counts.double() @ (x.double() - mean).square().sum(1))
    assert fve(x, x, counts) == 1
    assert fve(x, mean.expand_as(x), counts) == pytest.approx(0, abs=1e-12)
    offset = torch.full((8,), 0.5)
    assert fve(x, x + offset, counts) == pytest.approx(1 - int(counts.sum()) * 8 * 0.25 / total)
    square = float(counts.double() @ x.double().square().sum(1))
    assert fve(x, torch.zeros_like(x), counts) == pytest.approx(1 - square / total)
    assert (
        fve(x, torch.zeros_like(x), counts) < 0
    )  # zero is worse than the mean of vectors far from the origin


def test_fve_equals_the_sums_over_single_tokens_and_sae_lens(vectors: tuple[Tensor, Tensor]) -> None:
    x, counts = vectors
    made = x + torch.randn(x.shape, generator=torch.Generator().manual_seed(1))
    assert fve(x, made, counts) == pytest.approx(slow_fve(x, made, counts), abs=1e-12)
    assert fve(x, made, torch.ones(30)) == pytest.approx(slow_fve(x, made, torch.ones(30, dtype=torch.long)))
    theirs = ExplainedVarianceCalculator()
    for start in range(0, int(counts.sum()), 7):
        parts = [torch.tensor(expanded(t, counts)[start : start + 7], dtype=torch.float32) for t in (made, x)]
        theirs.add_batch(*parts)
    assert fve(x, made, counts) == pytest.approx(theirs.compute(), abs=1e-6)


def test_fve_of_like_vectors_is_undefined_where_sae_lens_says_one_or_zero() -> None:
    x, counts = torch.full((4, 3), 0.1), torch.ones(4)
    theirs = ExplainedVarianceCalculator()
    theirs.add_batch(x, x)
    assert theirs.compute() == 1 and np.isnan(fve(x, x, counts))
    with pytest.raises(SatlensError, match="no mean"):
        fve(x, x, torch.zeros(4))


def test_fve_is_the_same_in_chunks_and_moved_together(
    vectors: tuple[Tensor, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    x, counts = vectors
    made = x * 0.9
    whole = fve(x, made, counts)
    monkeypatch.setattr("sae.variance._CHUNK_VALUES", 24)
    assert fve(x, made, counts) == pytest.approx(whole, abs=1e-12)
    assert fve(x + 100, made + 100, counts) == pytest.approx(whole, abs=1e-5)


def test_heldout_interval_resamples_documents_about_one_mean(vectors: tuple[Tensor, Tensor]) -> None:
    x, _ = vectors
    rng = np.random.default_rng(0)
    documents = [rng.integers(0, 30, size=n) for n in (3, 8, 5, 1, 9, 12)]
    counts = torch.from_numpy(np.bincount(np.concatenate(documents), minlength=30))
    made, mean = x * 0.8, weighted_mean(x, counts)
    sums = sums_by_document(documents, squared_error(x, made), squared_error(x, mean))
    weights = document_weights(6, 200, seed=3)
    interval = fve_interval(sums, weights)
    assert interval.estimate == pytest.approx(slow_fve(x, made, counts))
    a, b, m = x.double().numpy(), made.double().numpy(), mean.numpy()
    drawn = []
    for row in weights:
        tokens = np.concatenate([np.tile(d, n) for d, n in zip(documents, row, strict=True)])
        drawn.append(1 - ((a - b)[tokens] ** 2).sum() / ((a[tokens] - m) ** 2).sum())
    np.testing.assert_allclose((interval.low, interval.high), np.percentile(drawn, [2.5, 97.5]))


def test_pca_is_the_best_of_its_rank_and_equals_an_svd_of_single_tokens(
    vectors: tuple[Tensor, Tensor],
) -> None:
    x, counts = vectors
    tokens = expanded(x, counts)
    _, _, directions = np.linalg.svd(tokens - tokens.mean(0), full_matrices=False)
    for rank in (1, 3, 8):
        expected = (
            tokens.mean(0) + (x.double().numpy() - tokens.mean(0)) @ directions[:rank].T @ directions[:rank]
        )
        np.testing.assert_allclose(pca(x, counts, rank), expected, atol=1e-5)
    assert fve(x, pca(x, counts, 8), counts) == pytest.approx(1)
    assert fve(x, pca(x, counts, 0), counts) == pytest.approx(0, abs=1e-9)


def test_kmeans_puts_centres_at_weighted_means_and_rows_at_the_nearest(
    vectors: tuple[Tensor, Tensor],
) -> None:
    x, counts = vectors
    made = kmeans(x, counts, 5, torch.Generator().manual_seed(0), steps=100)
    centres = torch.unique(made, dim=0)
    assert len(centres) == 5
    nearest = torch.cdist(x.double(), centres.double()).argmin(1)
    assert torch.equal(made, centres[nearest])
    for n in range(5):
        mine = (nearest == n) & (counts > 0)
        expected = np.average(x[mine].double(), axis=0, weights=counts[mine])
        np.testing.assert_allclose(centres[n], expected, rtol=1e-5)
    again = kmeans(x, counts, 5, torch.Generator().manual_seed(0), steps=100)
    other = kmeans(x, counts, 5, torch.Generator().manual_seed(1), steps=100)
    assert torch.equal(made, again) and not torch.equal(made, other)
    first = kmeans(x, counts, 5, torch.Generator().manual_seed(0), steps=1)
    assert fve(x, made, counts) > fve(x, first, counts)


def test_kmeans_moves_centres_that_lose_their_rows_and_keeps_few_rows_as_they_are(
    vectors: tuple[Tensor, Tensor],
) -> None:
    x, counts = vectors
    known = int((counts > 0).sum())
    exact = kmeans(x, counts, known + 3, torch.Generator().manual_seed(0))
    assert torch.equal(exact[counts > 0], x[counts > 0])
    twins = torch.cat([x[:1].expand(6, -1), x[1:5]])  # six alike: their centres but one stand empty
    for seed in range(10):
        made = kmeans(
            twins, torch.ones(10, dtype=torch.long), 5, torch.Generator().manual_seed(seed), steps=20
        )
        assert torch.equal(made, twins), seed


def test_memory_explains_the_share_it_remembers(vectors: tuple[Tensor, Tensor]) -> None:
    x, counts = vectors
    made, mean = memory(x, counts, 4), weighted_mean(x, counts)
    kept = sorted(range(30), key=lambda i: (-int(counts[i]), i))[:4]
    assert torch.equal(made[kept], x[kept])
    cost = counts.double() * (x.double() - mean).square().sum(1)
    assert fve(x, made, counts) == pytest.approx(float(cost[kept].sum() / cost.sum()))
    assert torch.equal(memory(x, counts, 30)[counts > 0], x[counts > 0])


def test_budgets_are_counted(vectors: tuple[Tensor, Tensor]) -> None:
    x, counts = vectors
    budget = Budget(d_sae=4096, k=32)
    assert budget.same_bits() == 44  # 32 numbers of 32 bits and 32 names of 12 bits
    made = {name: make(x, counts, Budget(d_sae=10, k=2), 0) for name, make in BASELINES.items()}
    assert (made["pca-k"].l0, made["pca-k"].n_stored) == (2, 3 * 8)
    assert made[EXACT].l0 == 8 and torch.allclose(made[EXACT].made, x, atol=1e-5)
    assert (made["k-means"].l0, made["k-means"].n_stored) == (1, 80)
    assert made["memory"].n_stored == 11 * 8
    assert all(name == reconstruction.method for name, reconstruction in made.items())
