"""Edits of the residual: exact where nothing changes, as long as they must be, computed by hand elsewhere."""

import math
from types import SimpleNamespace

import pytest
import torch

from satlens.carried import directions, noise
from satlens.carried.edits import Change, Where, dose, edit, inside, matched, published_unmatched, replacement
from satlens.errors import UserError

D, K = 40, 8


@pytest.fixture
def stream():
    """A residual stream of three documents with signed zeros, its mean direction and random ones."""
    rng = torch.Generator().manual_seed(0)
    x = 3 * torch.randn(3, 24, D, generator=rng)
    x[0, 20, :5] = -0.0
    far = torch.zeros(3, 24, dtype=torch.bool)
    far[0, 16:], far[1, 16:21], far[2, 16:18] = True, True, True
    where = Where(far=far, doc=torch.tensor([4, 0, 9]))
    unit = directions.unit(torch.randn(D, generator=rng))
    return SimpleNamespace(x=x, where=where, unit=unit, random=directions.random_units(unit, K, rng), rng=rng)


def same_bits(a, b):
    return torch.equal(a.view(torch.int32 if a.dtype == torch.float32 else torch.int16), b.view_as(a).view(
        torch.int32 if b.dtype == torch.float32 else torch.int16
    ))  # fmt: skip


FAMILIES = {
    "dose": lambda s: dose(s.unit, 1.0),
    "matched": lambda s: matched(s.unit, s.random[0], 1.0),
    "matched signed": lambda s: matched(s.unit, s.random[0], 1.0, signed=True),
    "published unmatched": lambda s: published_unmatched(s.random[0], 1.0),
    "replaced by itself": lambda s: replacement(s.unit, s.unit),
    "noise along": lambda s: noise.noise(noise.along(s.unit), 0.0, 3),
    "noise isotropic": lambda s: noise.noise(noise.isotropic(), 0.0, 3),
    "noise shaped": lambda s: noise.noise(noise.shaped(s.x.flatten(0, 1).std(0)), 0.0, 3),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("keep_norm", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_identity_setting_changes_no_bit(stream, family, keep_norm, dtype):
    x = stream.x.to(dtype)
    assert same_bits(edit(FAMILIES[family](stream), keep_norm)(x, stream.where), x)


ACTIVE = {
    "dose": lambda s: dose(s.unit, 0.5),
    "matched": lambda s: matched(s.unit, s.random[0], 0.0),
    "published unmatched": lambda s: published_unmatched(s.random[0], 0.0),
    "replacement": lambda s: replacement(s.unit, s.random[0]),
    "noise": lambda s: noise.noise(noise.isotropic(), 0.3, 3),
}


@pytest.mark.parametrize("keep_norm", [False, True])
@pytest.mark.parametrize("family", ACTIVE)
def test_only_far_positions_change_and_the_input_is_left_alone(stream, family, keep_norm):
    before = stream.x.clone()
    new = edit(ACTIVE[family](stream), keep_norm)(stream.x, stream.where)
    assert torch.equal(stream.x, before)
    changed = (new != stream.x).any(-1)
    assert torch.equal(changed, stream.where.far)


@pytest.mark.parametrize("family", ACTIVE)
def test_norm_preserving_edits_keep_the_length_and_the_direction(stream, family):
    plain = edit(ACTIVE[family](stream))(stream.x, stream.where)
    kept = edit(ACTIVE[family](stream), keep_norm=True)(stream.x, stream.where)
    torch.testing.assert_close(kept.norm(dim=-1), stream.x.norm(dim=-1), rtol=2e-6, atol=0)
    torch.testing.assert_close(
        torch.cosine_similarity(kept, plain, dim=-1), torch.ones(3, 24), rtol=0, atol=2e-6
    )


def test_a_norm_preserving_removal_of_all_there_is_stays_finite():
    unit = torch.eye(4)[0]
    where = Where(far=torch.ones(1, 1, dtype=torch.bool), doc=torch.zeros(1, dtype=torch.long))
    new = edit(dose(unit, 0.0), keep_norm=True)(7 * unit.view(1, 1, 4), where)
    assert torch.equal(new, torch.zeros(1, 1, 4))


def test_a_dose_scales_the_projection_and_nothing_else(stream):
    far, m = stream.where.far, stream.unit
    for alpha in (0.0, 0.5, 1.5, 2.0):
        new = edit(dose(m, alpha))(stream.x, stream.where)[far].double()
        old = stream.x[far].double()
        torch.testing.assert_close(new @ m.double(), alpha * (old @ m.double()), rtol=1e-5, atol=3e-6)
        rest = new - (new @ m.double())[:, None] * m.double()
        torch.testing.assert_close(rest, old - (old @ m.double())[:, None] * m.double(), rtol=0, atol=3e-6)


@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize("alpha", [0.0, 0.5, 2.0])
def test_every_control_moves_every_position_as_far_as_the_dose(stream, alpha, signed):
    length = dose(stream.unit, alpha)(stream.x, stream.where).norm(dim=-1)
    for other in stream.random:
        by = matched(stream.unit, other, alpha, signed)(stream.x, stream.where)
        torch.testing.assert_close(by.norm(dim=-1), length, rtol=1e-6, atol=1e-7)
        by, projection = by.double(), (stream.x * stream.unit).sum(-1).double()
        sign = (by @ other.double()).sign() * math.copysign(1, alpha - 1)
        assert torch.equal(sign, projection.sign() if signed else torch.ones_like(sign))


def test_the_published_control_moves_by_its_own_projection_and_so_much_less(stream):
    carried = stream.x + 40 * stream.unit  # a stream that carries its reference, as the paper's do
    unmatched = published_unmatched(stream.random[0], 0.0)(carried, stream.where)
    expected = -(carried @ stream.random[0]).abs()[..., None] * stream.random[0]
    torch.testing.assert_close(unmatched, expected, rtol=0, atol=1e-5)
    true = dose(stream.unit, 0.0)(carried, stream.where)
    assert float(true.norm(dim=-1).mean() / unmatched.norm(dim=-1).mean()) > 8


def test_a_replacement_carries_the_projection_over_with_its_sign(stream):
    other = stream.random[2]
    new = edit(replacement(stream.unit, other))(stream.x, stream.where)[stream.where.far].double()
    old, m, c = stream.x[stream.where.far].double(), stream.unit.double(), other.double()
    torch.testing.assert_close(new @ m, torch.zeros(len(new), dtype=torch.float64), rtol=0, atol=3e-6)
    torch.testing.assert_close(new @ c - old @ c, old @ m, rtol=0, atol=3e-6)


def test_a_window_touches_its_positions_only(stream):
    new = edit(dose(stream.unit, 0.0), window=(18, 20))(stream.x, stream.where)
    expected = torch.zeros(3, 24, dtype=torch.bool)
    expected[:2, 18:20] = True
    assert torch.equal((new != stream.x).any(-1), expected)
    assert torch.equal(inside(stream.where.far, (18, 20)), expected)
    with pytest.raises(UserError, match="holds nothing"):
        edit(dose(stream.unit, 0.0), window=(20, 20))


def test_a_change_begins_at_its_first_layer(stream):
    step = edit(dose(stream.unit, 0.0))
    assert Change(edits={("resid", 6): step, ("value_gate", 2): step}).start == 2


def test_random_directions_are_unit_orthogonal_to_the_reference_and_set_by_the_seed(stream):
    drawn = directions.random_units(stream.unit, 16, torch.Generator().manual_seed(5))
    again = directions.random_units(stream.unit, 16, torch.Generator().manual_seed(5))
    assert torch.equal(drawn, again)
    torch.testing.assert_close(drawn.norm(dim=1), torch.ones(16), rtol=1e-6, atol=0)
    assert float((drawn @ stream.unit).abs().max()) < 1e-6
    with pytest.raises(UserError, match="at least 8"):
        directions.random_units(stream.unit, 7, torch.Generator())


def test_a_permuted_direction_has_the_same_coordinates(stream):
    other = directions.permuted(stream.unit, torch.Generator().manual_seed(1))
    assert torch.equal(other.sort().values, stream.unit.sort().values)
    assert not torch.equal(other, stream.unit)


def test_a_zero_mean_has_no_direction():
    with pytest.raises(UserError, match="no direction"):
        directions.unit(torch.zeros(4))
    with pytest.raises(UserError, match="no direction"):
        directions.unit(torch.tensor([1.0, float("nan")]))


def test_the_function_word_direction_sums_unit_rows_of_single_tokens():
    known = {" the": [3], " of": [1, 2], "of": [4], " and": [5], "and": [6]}

    def tokenizer(text, add_special_tokens):
        return {"input_ids": known.get(text, [0, 0])}

    ids = directions.function_words(tokenizer, 10)
    assert ids == [3, 4, 5]  # " of" is two tokens, so "of" stands for it
    rows = torch.randn(10, 6, generator=torch.Generator().manual_seed(0))
    expected = sum(rows[i] / rows[i].norm() for i in ids)
    torch.testing.assert_close(
        directions.function_word_direction(rows, ids), expected / expected.norm(), rtol=0, atol=1e-6
    )
    with pytest.raises(UserError, match="leave that replacement out"):
        directions.function_word_direction(rows, [])


ARMS = {
    "reference": lambda s: noise.along(s.unit),
    "isotropic": lambda s: noise.isotropic(),
    "shaped": lambda s: noise.shaped(torch.linspace(0.1, 5, D)),
}


@pytest.mark.parametrize("arm", ARMS)
def test_noise_has_exactly_its_energy_at_every_far_position_and_nearly_no_mean(stream, arm):
    by = noise.noise(ARMS[arm](stream), 0.33, seed=2)(stream.x, stream.where)
    far = stream.where.far
    torch.testing.assert_close(by[far].norm(dim=-1), 0.33 * stream.x[far].norm(dim=-1), rtol=2e-6, atol=0)
    assert not bool(by[~far].any())
    whole = torch.zeros_like(far)
    whole[0, 16:] = True  # eight positions, four pairs: what is left is what neighbours in length differ by
    left = noise.imbalance(by, Where(far=whole, doc=stream.where.doc), stream.unit)[0]
    lengths = stream.x[0, 16:].norm(dim=-1).sort().values
    most = 0.33 * float((lengths[1::2] - lengths[::2]).sum()) / 8
    assert float(left) <= most + 1e-5


def test_shaped_noise_is_as_uneven_as_the_residual():
    deviation = torch.tensor([1.0, 4.0])
    where = Where(far=torch.ones(1, 4000, dtype=torch.bool), doc=torch.tensor([0]))
    by = noise.noise(noise.shaped(deviation), 1.0, 0)(torch.ones(1, 4000, 2), where)[0]
    # for a normalised pair (u, 4v), E[first^2] / E[second^2] = 1 / 4 whatever the distribution's scale
    assert float(by[:, 0].square().mean() / by[:, 1].square().mean()) == pytest.approx(0.25, abs=0.04)


def test_noise_of_a_document_does_not_depend_on_its_batch(stream):
    by = noise.noise(noise.isotropic(), 0.2, 7)
    whole = by(stream.x, stream.where)
    for row in range(3):
        one = Where(far=stream.where.far[row : row + 1], doc=stream.where.doc[row : row + 1])
        assert torch.equal(by(stream.x[row : row + 1], one), whole[row : row + 1])
    assert not torch.equal(noise.noise(noise.isotropic(), 0.2, 8)(stream.x, stream.where), whole)
