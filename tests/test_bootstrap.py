"""The paired bootstrap against plain loops, closed forms and data whose truth is known."""

import numpy as np
import pytest

from satlens import bootstrap
from satlens.errors import SatlensError


@pytest.fixture
def documents():
    """Per-document NLL sums that depend on the document far more than on the condition, and token counts."""
    rng = np.random.default_rng(7)
    counts = rng.integers(20, 400, 60)
    baseline = counts * rng.normal(3.0, 0.5, 60)
    changed = baseline + counts * rng.normal(0.05, 0.02, 60)
    return counts, baseline, changed


def test_every_resample_draws_as_many_documents_as_there_are():
    weights = bootstrap.document_weights(37, 50, seed=1)
    assert weights.shape == (50, 37)
    assert (weights.sum(axis=1) == 37).all()


def test_same_seed_same_weights_and_another_seed_others():
    first, again = bootstrap.document_weights(9, 30, seed=4), bootstrap.document_weights(9, 30, seed=4)
    assert (first == again).all()
    assert (first != bootstrap.document_weights(9, 30, seed=5)).any()


def test_chunking_changes_nothing(monkeypatch):
    sums = np.arange(33.0).reshape(11, 3)
    weights = bootstrap.document_weights(11, 40, seed=2)
    whole = bootstrap.resample(sums, weights)
    monkeypatch.setattr(bootstrap, "_CHUNK_VALUES", 25)
    assert (bootstrap.document_weights(11, 40, seed=2) == weights).all()
    assert (bootstrap.resample(sums, weights) == whole).all()


def test_ratio_interval_equals_a_plain_loop(documents):
    counts, baseline, _ = documents
    weights = bootstrap.document_weights(60, 200, seed=3)
    ratios = []
    for row in weights:
        total = sum(int(w) * float(s) for w, s in zip(row, baseline, strict=True))
        ratios.append(total / sum(int(w) * int(c) for w, c in zip(row, counts, strict=True)))
    interval = bootstrap.ratio_interval(baseline, counts, weights)
    assert interval.estimate == pytest.approx(sum(baseline) / sum(counts), rel=1e-12)
    assert interval.low == pytest.approx(np.percentile(ratios, 2.5), rel=1e-12)
    assert interval.high == pytest.approx(np.percentile(ratios, 97.5), rel=1e-12)


def test_delta_perplexity_equals_the_difference_of_two_perplexities(documents):
    counts, baseline, changed = documents
    weights = bootstrap.document_weights(60, 200, seed=3)
    differences = []
    for row in weights:
        tokens = (row * counts).sum()
        differences.append(np.exp((row * changed).sum() / tokens) - np.exp((row * baseline).sum() / tokens))
    delta = bootstrap.delta_interval(changed, baseline, counts, weights).perplexity
    expected = np.exp(changed.sum() / counts.sum()) - np.exp(baseline.sum() / counts.sum())
    assert delta.estimate == pytest.approx(expected, rel=1e-9)
    assert (delta.low, delta.high) == pytest.approx(tuple(np.percentile(differences, [2.5, 97.5])), rel=1e-9)


def test_identical_inputs_differ_by_exactly_zero(documents):
    counts, baseline, _ = documents
    weights = bootstrap.document_weights(60, 300)
    stacked = np.stack([baseline, baseline], axis=1)
    for interval in bootstrap.delta_interval(stacked, baseline, counts, weights):
        for value in interval:
            assert (value == 0.0).all()


def test_paired_interval_is_narrower_than_unpaired(documents):
    counts, baseline, changed = documents
    weights = bootstrap.document_weights(60, 1000)
    paired = bootstrap.delta_interval(changed, baseline, counts, weights).nll
    _, first = bootstrap.resampled_ratios(changed, counts, bootstrap.document_weights(60, 1000, seed=1))
    _, second = bootstrap.resampled_ratios(baseline, counts, bootstrap.document_weights(60, 1000, seed=2))
    low, high = bootstrap.percentile_interval(first - second)
    assert paired.high - paired.low < 0.2 * (high - low)


def test_ninety_five_percent_intervals_cover_the_truth_about_that_often():
    rng = np.random.default_rng(11)
    weights = bootstrap.document_weights(80, 400, seed=6)
    counts = np.full(80, 10)
    hits = 0
    for _ in range(300):
        interval = bootstrap.ratio_interval(counts * rng.normal(2.0, 1.0, 80), counts, weights)
        hits += interval.low <= 2.0 <= interval.high
    assert 0.90 <= hits / 300 <= 0.98


def test_perplexity_interval_is_exp_of_the_nll_samples(documents):
    counts, baseline, _ = documents
    weights = bootstrap.document_weights(60, 201)
    _, samples = bootstrap.resampled_ratios(baseline, counts, weights)
    interval = bootstrap.perplexity_interval(baseline, counts, weights)
    assert interval.estimate == pytest.approx(np.exp(baseline.sum() / counts.sum()))
    assert interval.low == pytest.approx(np.percentile(np.exp(samples), 2.5))


def test_one_document_with_tokens_has_an_estimate_and_no_interval():
    interval = bootstrap.ratio_interval([6.0, 0.0], [3, 0], bootstrap.document_weights(2, 50))
    assert interval == (2.0, None, None)
    delta = bootstrap.delta_interval([[6.0]], [5.0], [3], bootstrap.document_weights(1, 50))
    assert delta.nll.low is None and delta.perplexity.high is None


def test_a_document_without_tokens_changes_no_estimate_and_makes_no_nan():
    interval = bootstrap.ratio_interval([6.0, 4.0, 0.0], [3, 4, 0], bootstrap.document_weights(3, 500))
    assert interval.estimate == pytest.approx(10 / 7)
    assert 1.0 <= interval.low <= interval.high <= 2.0


def test_statistic_sees_every_resample_and_its_undefined_values_are_left_out():
    sums = np.array([[1.0, 3.0, 0.0], [1.0, 3.0, 0.0], [1.0, 3.0, 0.0]])
    weights = bootstrap.document_weights(3, 20)

    def variation(ratios):
        mean = ratios.mean(axis=-1)
        return np.where(mean > 0, ratios.std(axis=-1) / mean, np.nan)

    closed_form = np.std([1.0, 3.0, 0.0]) / np.mean([1.0, 3.0, 0.0])
    assert bootstrap.statistic_interval(sums, [1, 1, 1], weights, variation) == pytest.approx(
        (closed_form,) * 3
    )
    assert bootstrap.statistic_interval(0 * sums, [1, 1, 1], weights, variation) == (None, None, None)


def test_an_undefined_entry_leaves_the_other_intervals_alone():
    samples = np.array([[1.0, np.nan], [2.0, np.nan], [3.0, np.nan]])
    low, high = bootstrap.percentile_interval(samples, level=0.5)
    assert (low[0], high[0]) == (1.5, 2.5)
    assert np.isnan(low[1]) and np.isnan(high[1])


def test_discrete_intervals_end_on_observed_values():
    samples = np.array([4.0] * 97 + [7.0] * 3)
    assert bootstrap.percentile_interval(samples, discrete=True) == (4.0, 7.0)


@pytest.mark.parametrize(
    "call",
    [
        lambda: bootstrap.document_weights(0),
        lambda: bootstrap.ratio_interval([1.0, 2.0], [0, 0], bootstrap.document_weights(2)),
        lambda: bootstrap.ratio_interval([1.0, 2.0], [1, 1, 1], bootstrap.document_weights(2)),
        lambda: bootstrap.ratio_interval([1.0, 2.0], [1, 1], bootstrap.document_weights(3)),
        lambda: bootstrap.ratio_interval([1.0, 2.0], [1, 1], bootstrap.document_weights(2), level=95),
    ],
)
def test_what_cannot_be_resampled_is_refused(call):
    with pytest.raises(SatlensError):
        call()


def test_median_interval_is_that_of_medians_of_repeated_documents():
    rng = np.random.default_rng(3)
    values = rng.normal(size=(9, 2))
    values[4, 1] = np.nan
    weights = bootstrap.document_weights(9, 300, 1)
    got = bootstrap.median_interval(values, weights)
    for column in range(2):
        known = ~np.isnan(values[:, column])
        slow = [
            np.median(np.repeat(values[known, column], row[known])) for row in weights if row[known].any()
        ]
        np.testing.assert_allclose(got.estimate[column], np.median(values[known, column]))
        np.testing.assert_allclose(got.low[column], np.quantile(slow, 0.025))
        np.testing.assert_allclose(got.high[column], np.quantile(slow, 0.975))


def test_median_of_one_document_has_no_interval():
    assert bootstrap.median_interval(np.array([2.0, np.nan]), bootstrap.document_weights(2, 100, 0)) == (
        2.0,
        None,
        None,
    )
