"""Contracts every intervention keeps, whoever adds one."""

import pytest
import torch

from satlens.errors import UserError
from satlens.interventions import INTERVENTIONS, Calibration, position_hash
from satlens.tokens import Batch

KNOWN = Calibration(
    mean=torch.tensor([[0.0, 0.0, 0.0], [0.5, 1.5, 4.0]]),
    sample=torch.arange(2 * 3 * 5.0).view(2, 3, 5) + 100,
)


def batch(rows=(0, 1), n_pos=7):
    shape = (len(rows), n_pos)
    yes = torch.ones(shape, dtype=torch.bool)
    zeros = torch.zeros(shape, dtype=torch.long)
    return Batch(input_ids=zeros, real=yes, scored=yes, doc=zeros, text=yes, row=torch.tensor(rows))


@pytest.mark.parametrize("kind", INTERVENTIONS)
def test_no_head_is_a_bit_exact_no_op(kind):
    alpha = torch.randn(2, 7, 3)
    assert torch.equal(INTERVENTIONS[kind](1, (), KNOWN, 0).apply(alpha, batch()), alpha)


@pytest.mark.parametrize("kind", INTERVENTIONS)
def test_only_the_named_head_changes_and_the_input_is_left_alone(kind):
    alpha = torch.full((2, 7, 3), 0.25)
    kept = alpha.clone()
    new = INTERVENTIONS[kind](1, (2,), KNOWN, 0).apply(alpha, batch())
    assert torch.equal(alpha, kept)
    assert torch.equal(new[..., :2], alpha[..., :2])
    assert not torch.equal(new[..., 2], alpha[..., 2])


@pytest.mark.parametrize("kind", INTERVENTIONS)
def test_a_head_that_is_not_there_is_refused(kind):
    with pytest.raises(UserError, match="no KV head 3"):
        INTERVENTIONS[kind](1, (3,), KNOWN, 0).apply(torch.zeros(2, 7, 3), batch())


def test_zero_mean_and_head_mean_set_the_values_they_promise():
    alpha = torch.rand(2, 7, 3)
    assert not INTERVENTIONS["zero"](1, None, KNOWN, 0).apply(alpha, batch()).any()
    assert torch.equal(
        INTERVENTIONS["mean"](1, None, KNOWN, 0).apply(alpha, batch()), torch.full((2, 7, 3), 2.0)
    )
    heads = INTERVENTIONS["head-mean"](1, None, KNOWN, 0).apply(alpha, batch())
    assert torch.equal(heads, torch.tensor([0.5, 1.5, 4.0]).expand(2, 7, 3))


def test_resample_draws_each_head_from_its_own_sample_and_all_of_it():
    many = batch(tuple(range(40)), 50)
    drawn = INTERVENTIONS["resample"](1, None, KNOWN, 0).apply(torch.zeros(40, 50, 3), many)
    for head in range(3):
        values, counts = drawn[..., head].unique(return_counts=True)
        assert values.tolist() == KNOWN.sample[1, head].tolist()
        assert (counts - 400).abs().max() < 100  # 2,000 draws over five values, five standard deviations


def test_resample_is_the_same_for_a_row_whatever_its_company():
    draw = INTERVENTIONS["resample"](1, None, KNOWN, 5).apply
    alone = draw(torch.zeros(1, 7, 3), batch((9,)))
    together = draw(torch.zeros(3, 12, 3), batch((4, 9, 2), 12))
    assert torch.equal(together[1, :7], alone[0])
    other = INTERVENTIONS["resample"](1, None, KNOWN, 6).apply(torch.zeros(1, 7, 3), batch((9,)))
    assert not torch.equal(other, alone)


def test_position_hash_is_non_negative_and_spread():
    values = position_hash(torch.arange(64), 64, 4, 0)
    assert (values >= 0).all() and values.unique().numel() == values.numel()
    assert abs(float((values % 2).double().mean()) - 0.5) < 0.02
    assert abs(float((values < 2**62).double().mean()) - 0.5) < 0.02
