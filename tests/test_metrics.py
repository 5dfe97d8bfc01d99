"""Chunked NLL equals the full log-softmax, also where the fast path would overflow."""

import pytest
import torch
import torch.nn.functional as F

from satlens.metrics import chunked_nll


def oracle(hidden, unembed, targets):
    return F.cross_entropy(hidden.double() @ unembed.double().T, targets, reduction="none")


@pytest.mark.parametrize("chunk_logits", [1, 60, 10_000_000])
def test_nll_equals_full_cross_entropy_for_any_chunk(chunk_logits):
    rng = torch.Generator().manual_seed(0)
    hidden, unembed = torch.randn(37, 16, generator=rng), torch.randn(53, 16, generator=rng)
    targets = torch.randint(53, (37,), generator=rng)
    got = chunked_nll(hidden, unembed, targets, chunk_logits)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), oracle(hidden, unembed, targets), rtol=0, atol=3e-6)


@pytest.mark.parametrize("shift", [-200.0, 150.0])
def test_logits_beyond_the_range_of_exp_are_done_the_safe_way(shift):
    rng = torch.Generator().manual_seed(1)
    hidden = torch.cat([torch.randn(9, 4, generator=rng), torch.full((9, 1), shift)], 1)
    unembed = torch.cat([torch.randn(7, 4, generator=rng), torch.ones(7, 1)], 1)
    targets = torch.randint(7, (9,), generator=rng)
    got = chunked_nll(hidden, unembed, targets)
    torch.testing.assert_close(got.double(), oracle(hidden, unembed, targets), rtol=0, atol=5e-5)


def test_not_a_number_stays_not_a_number():
    nll = chunked_nll(torch.full((2, 3), float("nan")), torch.ones(5, 3), torch.tensor([0, 1]))
    assert torch.isnan(nll).all()


def test_no_scored_position_gives_no_nll():
    assert chunked_nll(torch.zeros(0, 3), torch.ones(5, 3), torch.zeros(0, dtype=torch.long)).shape == (0,)
