"""One training step on distinct rows equals sae-lens's on the whole batch, with and without dead latents."""

from typing import Any

import numpy as np
import pytest
import torch
from sae_lens import TopKTrainingSAE, TopKTrainingSAEConfig
from sae_lens.saes.sae import TrainStepInput
from torch import Tensor

import sae.topk as topk
from sae.topk import Step, TopK, largest, loss_and_gradients

D_IN, D_SAE, K, ROWS = 24, 192, 8, 60
NAMES = {"encoder": "W_enc", "decoder": "W_dec", "b_enc": "b_enc", "b_dec": "b_dec"}


def started(seed: int = 0, noise: float = 0.05) -> TopK:
    """A dictionary away from its start: unequal decoder lengths, biases, encoder no longer the decoder's copy."""
    rng = torch.Generator().manual_seed(seed)
    sae = TopK(D_IN, D_SAE, rng)
    with torch.no_grad():
        for parameter in sae.parameters():
            parameter += noise * torch.randn(parameter.shape, generator=rng)
    return sae


def theirs(sae: TopK, dtype: str, k: int = K, aux: float = 1.0) -> Any:
    """The same dictionary as sae-lens trains it."""
    d_sae, d_in = sae.decoder.shape
    config = TopKTrainingSAEConfig(d_in=d_in, d_sae=d_sae, k=k, dtype=dtype, aux_loss_coefficient=aux)
    made = TopKTrainingSAE(config)
    with torch.no_grad():
        made.W_enc.copy_(sae.encoder.T)
        for name in ("decoder", "b_enc", "b_dec"):
            getattr(made, NAMES[name]).copy_(getattr(sae, name))
    return made


def their_step(sae: Any, batch: Tensor, dead: Tensor) -> Any:
    """Loss and gradients (left in the parameters) of a whole batch."""
    given = TrainStepInput(
        sae_in=batch.to(sae.W_enc.dtype),
        dead_neuron_mask=dead,
        coefficients={},
        n_training_steps=0,
        is_logging_step=False,
    )
    out = sae.training_forward_pass(given)
    out.loss.backward()
    return out


def data(seed: int = 1) -> tuple[Tensor, Tensor]:
    """Distinct rows, and how often the batch has each."""
    rng = torch.Generator().manual_seed(seed)
    return torch.randn(ROWS, D_IN, generator=rng) + 0.3, torch.randint(1, 9, (ROWS,), generator=rng)


def dead_mask(n: int) -> Tensor:
    mask = torch.zeros(D_SAE, dtype=torch.bool)
    mask[torch.randperm(D_SAE, generator=torch.Generator().manual_seed(2))[:n]] = True
    return mask


def relative(found: Tensor, true: Tensor) -> float:
    """Length of the difference over the length of the truth."""
    return float((found.detach().double() - true.detach().double()).norm() / true.detach().double().norm())


def assert_equal_steps(ours: Step, out: Any, made: Any, bound: float) -> None:
    assert relative(ours.mse + ours.aux, out.loss) < bound
    for name, gradient in ours.gradients.items():
        grad = getattr(made, NAMES[name]).grad
        assert relative(gradient, grad.T if name == "encoder" else grad) < bound, name
    assert torch.equal(ours.fired, out.feature_acts.bool().any(0))


def test_the_start_is_sae_lenss():
    ours = TopK(D_IN, D_SAE, torch.Generator().manual_seed(3))
    torch.manual_seed(3)
    made = TopKTrainingSAE(TopKTrainingSAEConfig(d_in=D_IN, d_sae=D_SAE, k=K))
    assert torch.equal(ours.encoder.T, made.W_enc) and torch.equal(ours.decoder, made.W_dec)
    assert torch.equal(ours.b_enc, made.b_enc) and torch.equal(ours.b_dec, made.b_dec)
    torch.testing.assert_close(ours.decoder.norm(dim=1), torch.full((D_SAE,), 0.1))


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("n_dead", [0, 5, D_IN // 2, 100])
def test_loss_and_gradients_equal_sae_lenss_on_the_expanded_batch(n_dead, dtype):
    sae, (rows, counts), dead = started(), data(), dead_mask(n_dead)
    ours = loss_and_gradients(sae, rows, counts / counts.sum(), dead, K)
    made = theirs(sae, dtype)
    out = their_step(made, rows.repeat_interleave(counts, 0), dead)
    assert_equal_steps(ours, out, made, 1e-6)
    assert (ours.aux > 0) == (n_dead > 0)
    assert ours.aux == 0 or relative(ours.aux, out.losses["auxiliary_reconstruction_loss"]) < 1e-6


@pytest.mark.parametrize("aux", [0.0, 1 / 32])
def test_the_coefficient_scales_the_auxiliary_loss(aux):
    sae, (rows, counts), dead = started(), data(), dead_mask(40)
    ours = loss_and_gradients(sae, rows, counts / counts.sum(), dead, K, aux)
    made = theirs(sae, "float64", aux=aux)
    assert_equal_steps(ours, their_step(made, rows.repeat_interleave(counts, 0), dead), made, 1e-6)


def test_negative_activations_decode_nothing_but_count_among_the_dead():
    sae, (rows, counts) = started(), data()
    with torch.no_grad():
        sae.b_enc -= 1.2  # few latents are above 0 on any row, so most of the k largest are negative
    dead = dead_mask(30)
    ours = loss_and_gradients(sae, rows, counts / counts.sum(), dead, K)
    made = theirs(sae, "float64")
    out = their_step(made, rows.repeat_interleave(counts, 0), dead)
    active = out.feature_acts.bool().sum(1)
    assert int(active.min()) < K and int(active.sum()) > 0
    assert_equal_steps(ours, out, made, 1e-6)


def test_rows_given_twice_equal_rows_of_twice_the_share():
    sae, (rows, counts), dead = started(), data(), dead_mask(20)
    once = loss_and_gradients(sae, rows, counts / counts.sum(), dead, K)
    order = torch.arange(ROWS).repeat_interleave(counts)
    order = order[torch.randperm(len(order), generator=torch.Generator().manual_seed(4))]
    all_rows = loss_and_gradients(sae, rows[order], torch.full((len(order),), 1 / len(order)), dead, K)
    assert relative(once.mse, all_rows.mse) < 1e-6 and relative(once.aux, all_rows.aux) < 1e-6
    for name, gradient in once.gradients.items():
        assert relative(gradient, all_rows.gradients[name]) < 1e-6, name


def test_of_latents_that_tie_it_does_not_matter_which_is_taken():
    sae, (rows, counts) = started(), data()
    half = D_SAE // 2
    with torch.no_grad():  # each latent has a twin, and an odd k must part one pair
        for parameter in (sae.encoder, sae.decoder, sae.b_enc):
            parameter[half:] = parameter[:half]
    ours = loss_and_gradients(sae, rows, counts / counts.sum(), dead_mask(0), 7)
    made = theirs(sae, "float64", k=7)
    out = their_step(made, rows.repeat_interleave(counts, 0), dead_mask(0))
    assert relative(ours.mse, out.loss) < 1e-6
    pair_sums = {
        "encoder": (ours.gradients["encoder"], made.W_enc.grad.T),
        "decoder": (ours.gradients["decoder"], made.W_dec.grad),
        "b_enc": (ours.gradients["b_enc"], made.b_enc.grad),
    }
    for name, (found, true) in pair_sums.items():
        assert relative(found[:half] + found[half:], true[:half] + true[half:]) < 1e-6, name


def test_the_gradients_are_the_slopes_of_the_loss():
    """Independent of any other code: central differences in float64, along random directions."""
    sae, (rows, counts), dead = started().double(), data(), dead_mask(0)
    rows, share = rows.double(), (counts / counts.sum()).double()
    found = loss_and_gradients(sae, rows, share, dead, K)
    rng = torch.Generator().manual_seed(5)
    for name, parameter in sae.named_parameters():
        direction = torch.randn(parameter.shape, generator=rng, dtype=torch.float64)
        sides = []
        for sign in (1, -1):
            with torch.no_grad():
                parameter += sign * 1e-7 * direction
                sides.append(loss_and_gradients(sae, rows, share, dead, K).mse)
                parameter -= sign * 1e-7 * direction
        slope = (sides[0] - sides[1]) / 2e-7
        torch.testing.assert_close((found.gradients[name] * direction).sum(), slope, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("held", [1, 1 << 10, 1 << 20])
def test_how_many_rows_are_encoded_at_once_changes_nothing(held, monkeypatch):
    sae, (rows, counts), dead = started(), data(), dead_mask(30)
    whole = loss_and_gradients(sae, rows, counts / counts.sum(), dead, K)
    monkeypatch.setattr(topk, "CPU_VALUES", held)
    parts = loss_and_gradients(sae, rows, counts / counts.sum(), dead, K)
    assert relative(parts.mse, whole.mse) < 1e-6 and relative(parts.aux, whole.aux) < 1e-6
    assert torch.equal(parts.fired, whole.fired)


@pytest.mark.parametrize(("n", "k"), [(512, 32), (512, 1), (512, 512), (511, 32), (96, 32), (4, 4), (1, 1)])
def test_the_largest_are_those_of_a_full_sort(n, k):
    rng = np.random.default_rng(n + k)
    values = torch.from_numpy(rng.normal(size=(40, n)).astype(np.float32))
    values[3] = 1.0  # all equal
    values[4] = values[4].round()  # many equal
    values[5] = -values[5].abs()
    values[6, : n // 2] = -torch.inf
    places = largest(values, k)
    assert places.shape == (40, k) and all(len(set(row.tolist())) == k for row in places)
    expected = values.sort(dim=1, descending=True).values[:, :k]
    assert torch.equal(values.gather(1, places).sort(dim=1, descending=True).values, expected)


def test_folding_keeps_what_it_computes():
    sae, (rows, _) = started(), data()
    folded, made = sae.folded(), theirs(sae, "float64")
    torch.testing.assert_close(folded["W_dec"].norm(dim=1), torch.ones(D_SAE))
    expected = made.encode(rows.double())
    pre = (rows - folded["b_dec"]) @ folded["W_enc"] + folded["b_enc"]
    values, places = pre.topk(K)
    acts = torch.zeros_like(pre).scatter_(1, places, values.relu())
    assert torch.equal(acts > 0, expected > 0) and relative(acts, expected) < 1e-6
    assert relative(acts @ folded["W_dec"] + folded["b_dec"], made.decode(expected)) < 1e-6
