"""Measures of a change against slow float64 loops: KL, NLL, entropy, top-1, duty and firing."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from satlens.carried import effects


def distributions(seed=0, n=11, d=6, vocab=37, apart=0.3):
    """Final hidden states of a clean model and of three changed ones, and a head."""
    rng = torch.Generator().manual_seed(seed)
    head = torch.randn(vocab, d, generator=rng)
    clean = torch.randn(n, d, generator=rng)
    changed = clean + apart * torch.randn(3, n, d, generator=rng)
    return head, clean, changed, torch.randint(0, vocab, (n,), generator=rng)


@pytest.mark.parametrize("chunk", [37, 100, 10_000])
@pytest.mark.parametrize("apart", [3.0, 0.3, 1e-3, 0.0])
def test_output_effects_equal_a_slow_float64_loop(chunk, apart):
    head, clean, changed, targets = distributions(apart=apart)
    got = effects.compare_outputs(lambda h: h @ head.T, clean, changed, targets, 37, chunk)
    for c in range(3):
        for t in range(len(clean)):
            p = (clean[t].double() @ head.double().T).log_softmax(0)
            q = (changed[c, t].double() @ head.double().T).log_softmax(0)
            expected = {
                "kl": float((p.exp() * (p - q)).sum()),
                "nll": -float(q[targets[t]]),
                "entropy": -float((q.exp() * q).sum()),
                "top1": float(p.argmax() == q.argmax()),
            }
            for name, value in expected.items():
                assert float(got[name][c, t]) == pytest.approx(
                    value, rel=2e-6, abs=1e-5 if name != "kl" else 1e-6
                )


def test_an_unchanged_distribution_is_exactly_no_divergence():
    head, clean, _, targets = distributions()
    got = effects.compare_outputs(lambda h: h @ head.T, clean, clean[None], targets, 37)
    assert float(got["kl"].max()) == 0
    assert bool((got["top1"] == 1).all())


def test_a_tiny_divergence_on_huge_logits_survives_float32():
    """The normalisers are about 40 here; in float32 they would be off by more than this KL."""
    logits = 40 + torch.randn(1, 500, generator=torch.Generator().manual_seed(0))
    moved = logits.clone()
    moved[0, 3] += 0.05
    got = effects.compare_outputs(lambda h: h, logits, moved[None], torch.tensor([0]), 500)
    p, q = logits.double().log_softmax(-1), moved.double().log_softmax(-1)
    true = float((p.exp() * (p - q)).sum())
    assert 0 < true < 3e-5
    assert float(got["kl"]) == pytest.approx(true, abs=1e-7)


@pytest.mark.parametrize("name", ["relu", "gelu", "silu", "sigmoid"])
def test_firing_by_threshold_is_firing_by_activation(name):
    activation = getattr(torch, name, None) or getattr(F, name)
    levels = effects.thresholds(SimpleNamespace(activate=activation))
    z = 2 * torch.randn(3, 5, 700, generator=torch.Generator().manual_seed(1))
    far = torch.ones(3, 5, dtype=torch.bool)
    far[0, :2], far[2, 4] = False, False
    got = effects.count_above(z, far, levels)
    for row in range(3):
        for at, level in enumerate(effects.LEVELS):
            value = z[row, far[row]] if level == 0 else activation(z[row, far[row]])
            assert int(got[row, at]) == int((value > level).sum())


def test_sums_by_region_read_no_other_position():
    values = {"kl": torch.tensor([[[1.0, float("nan"), 2.0], [4.0, 5.0, float("inf")]]])}
    far = torch.tensor([[True, False, True], [True, True, False]])
    last = torch.tensor([[False, False, True], [False, True, False]])
    got = effects.by_document(values, {"far": far, "final": last})
    assert got["kl_far"].tolist() == [[3.0, 9.0]]
    assert got["kl_final"].tolist() == [[2.0, 5.0]]
    assert got["kl_far"].dtype == torch.float64


def test_spread_puts_values_back_in_their_places():
    mask = torch.tensor([[False, True, True], [True, False, False]])
    back = effects.spread(torch.tensor([[1.0, 2.0, 3.0]]), mask)
    assert back.tolist() == [[[0.0, 1.0, 2.0], [3.0, 0.0, 0.0]]]
