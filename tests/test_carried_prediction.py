"""The location-scale prediction: exact where it claims to be, and right where its assumptions hold by construction."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from planted import LAYERS, plant

from satlens.carried import directions
from satlens.carried.documents import SKIP
from satlens.carried.doses import ALPHAS
from satlens.carried.fit import fit
from satlens.carried.forecast import LEVEL_NAMES, clean_pass, forecast
from satlens.carried.norms import Norm
from satlens.carried.opening import read_model
from satlens.carried.prediction import GatePass, predict
from satlens.carried.reads import GateRead
from satlens.carried.setting import new_setting
from tests.conftest import tiny_model


@pytest.fixture(
    scope="module", params=["gpt2", "neox-parallel", "opt-pre", "opt-post", "llama", "gemma", "transformer"]
)
def planted(request):
    """A planted model, its fit on its documents, and the passes of all layers."""
    made = plant(request.param)
    reader = read_model(made.model, None)
    reference = fit(reader, made.documents, gates=range(LAYERS))
    setting = new_setting(reader, reference, made.documents, range(LAYERS), n_resamples=100)
    return SimpleNamespace(made=made, setting=setting, passes=clean_pass(setting, made.documents, ALPHAS))


def dosed(made, layer, unit, alpha, held):
    """What a token's gate reads under a dose, by the block's formula; ``held``: divided by the clean sigma."""
    style = made.style
    stream = made.stream[layer]
    write = 0 if style.block == "parallel" else made.writes["attention"][layer]
    clean = stream + write
    new = clean + (alpha - 1) * np.outer(stream @ unit, unit)

    def centre(x):
        return x - x.mean(-1, keepdims=True) if style.centred else x

    at = clean if held else new
    sigma = np.sqrt(np.square(centre(at)).mean(-1, keepdims=True) + 1e-6)
    clean_sigma = np.sqrt(np.square(centre(clean)).mean(-1, keepdims=True) + 1e-6)
    # the gain and bias follow from the clean read, which the planted model states
    rows = np.concatenate([centre(clean) / clean_sigma, np.ones((len(clean), 1))], axis=1)
    return centre(new) / sigma, rows


@pytest.mark.parametrize("held", [False, True])
def test_the_location_is_the_exact_mean_of_the_dosed_gate(planted, held):
    made, share = planted.made, planted.made.counts / planted.made.counts.sum()
    for found in planted.passes:
        layer, norm, weight = found.read.layer, found.norm, found.read.weight.double().numpy()
        unit = planted.setting.unit(layer).double().numpy()
        got = predict(found, "held" if held else "rescaled").location
        for at, alpha in enumerate(ALPHAS):
            normed, _ = dosed(made, layer, unit, alpha, held)
            read = norm.gain.double().numpy() * normed + norm.bias.double().numpy()
            z = read @ weight.T + made.bias[layer]
            np.testing.assert_allclose(got[at].numpy(), share @ z, rtol=2e-3, atol=4e-3)


def test_at_alpha_one_own_shapes_return_the_measured_duty_to_a_bin(planted):
    for found in planted.passes:
        made = predict(found)
        at = ALPHAS.index(1.0)
        torch.testing.assert_close(made.location[at], found.mean.double().cpu(), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(made.scale[at], found.deviation.double().cpu(), rtol=1e-3, atol=1e-3)
        duty = planted.made.duty[found.read.layer]
        # a threshold inside a bin splits it: at most the bin's own share is off
        share = found.sums["histogram"] / found.count
        assert bool(
            (
                np.abs(made.above["empirical"][at, 0].numpy() - duty) <= share.max(1).values.numpy() + 1e-9
            ).all()
        )


def test_the_shape_counts_every_far_position_once(planted):
    far = sum(len(ids) - SKIP for ids in planted.made.documents.ids)
    for found in planted.passes:
        assert found.count == far
        assert bool((found.sums["histogram"].sum(1) == far).all())


def gate_read(weight, bias):
    """A ReLU gate read of these rows."""
    linear = torch.nn.Linear(weight.shape[1], weight.shape[0])
    with torch.no_grad():
        linear.weight.copy_(weight)
        linear.bias.copy_(bias)
    return GateRead(
        layer=0, kind="mlp", name="g", linear=linear, activation="relu", activate=F.relu, gated=False
    )  # fmt: skip


def gaussian_world(n=60_000, d=12, gates=30, eps=1e8, seed=0):
    """A norm that divides by the same number everywhere, and a Gaussian stream: the model's assumptions hold."""
    rng = torch.Generator().manual_seed(seed)
    mix = torch.randn(d, d, generator=rng)
    r = (torch.randn(n, d, generator=rng) @ mix + 3 * torch.randn(d, generator=rng))[None]
    gain = 0.5 + torch.rand(d, generator=rng)
    norm = Norm(
        name="n",
        gain=gain * eps**0.5,
        bias=torch.randn(d, generator=rng),
        centred=False,
        eps=eps,
        module=torch.nn.Identity(),
    )
    weight, bias = torch.randn(gates, d, generator=rng) / 4, torch.randn(gates, generator=rng)
    read = gate_read(weight, bias)
    m = directions.unit(r[0].mean(0))

    def z(alpha):
        new = r + (alpha - 1) * (r @ m)[..., None] * m
        x = norm.gain * new * norm.inverse_sigma(new)[..., None] + norm.bias
        return x, x @ weight.T + bias

    return SimpleNamespace(r=r, norm=norm, read=read, m=m, z=z, n=n)


def test_where_its_assumptions_hold_both_shapes_predict_every_gate():
    world = gaussian_world()
    x, clean = world.z(1.0)
    found = GatePass(
        read=world.read, norm=world.norm, m=world.m, alphas=ALPHAS,
        mean=clean[0].double().mean(0), deviation=clean[0].double().std(0, correction=0),
    )  # fmt: skip
    rows = SimpleNamespace(far=torch.ones(1, world.n, dtype=torch.bool))
    found.add(world.r, world.r, x, clean, rows)
    made = predict(found)
    for at, alpha in enumerate(ALPHAS):
        z = world.z(alpha)[1][0].double()
        torch.testing.assert_close(made.location[at], z.mean(0), rtol=1e-3, atol=2e-3)
        torch.testing.assert_close(made.scale[at], z.std(0), rtol=2e-3, atol=2e-3)
        for level, threshold in enumerate((0.0, 0.5, 1.0)):
            truth = (z > threshold).double().mean(0)
            for shape in ("gaussian", "empirical"):
                # three standard errors of a share at this many positions, and half a bin
                torch.testing.assert_close(made.above[shape][at, level], truth, rtol=0, atol=0.012)


def test_a_coupling_of_zero_predicts_no_change_of_location_when_the_norm_is_held():
    world = gaussian_world()
    x, _ = world.z(1.0)
    read = world.read
    h = world.norm.gain * world.m
    flat = read.weight - torch.outer(read.weight @ h, h) / (h @ h)
    z = x[0] @ flat.T + read.bias
    found = GatePass(
        read=gate_read(flat, read.bias), norm=world.norm, m=world.m, alphas=ALPHAS,
        mean=z.double().mean(0), deviation=z.double().std(0, correction=0),
    )  # fmt: skip
    found.add(world.r, world.r, x, z[None], SimpleNamespace(far=torch.ones(1, world.n, dtype=torch.bool)))
    location = predict(found, "held").location
    torch.testing.assert_close(location, location[2].expand_as(location), rtol=0, atol=1e-3)


def test_forecast_tables_hold_prediction_measure_and_error():
    reader = read_model(tiny_model(), None)
    rng = np.random.default_rng(0)
    ids = tuple(rng.integers(3, 53, n) for n in (40, 33, 28, 36))
    from satlens.carried.documents import DocumentSet

    docs = DocumentSet(ids=ids, names=("a",) * 4, kinds=("a",) * 4)
    reference = fit(reader, docs, gates=(1, 2))
    setting = new_setting(reader, reference, docs, (1, 2), n_resamples=100)
    tables, tally = forecast(setting, docs, (0.0, 1.0))
    table = tables["prediction"]
    assert len(table) == 2 * 2 * 2 * 3 * 2 * 2  # kinds, layers, alphas, levels, shapes, norms
    np.testing.assert_allclose(table["error"], table["predicted"] - table["measured"])
    assert set(table["level"]) == set(LEVEL_NAMES)
    summary = tables["prediction_summary"]
    for row in summary.to_dict("records"):
        part = table
        for key in ("kind", "level", "shape", "norm", "alpha"):
            part = part[part[key] == row[key]]
        clean = table[(table["alpha"] == 1)].set_index(["kind", "level", "shape", "norm", "layer"])
        at = [clean.loc[(row["kind"], row["level"], row["shape"], row["norm"], n)] for n in (1, 2)]
        predicted = part["predicted"].to_numpy() - [c["predicted"] for c in at]
        measured = part["measured"].to_numpy() - [c["measured"] for c in at]
        np.testing.assert_allclose(part["change_error"], predicted - measured, atol=1e-12)
        assert row["mean_absolute_error"] == pytest.approx(np.abs(predicted - measured).mean())
        outside = (predicted < part["change_low"]) | (predicted > part["change_high"])
        assert row["n_outside"] == outside.sum() and row["n_layers"] == 2
        held = np.abs(part["predicted_change"] - part["attention_held_change"]).mean()
        assert row["mean_absolute_error_attention_held"] == pytest.approx(held)
        assert abs(row["worst_error"]) == pytest.approx(np.abs(predicted - measured).max())
    assert set(summary["alpha"]) == {0.0}  # at alpha = 1 nothing changes
    clean = table[(table["alpha"] == 1) & (table["kind"] == "mlp") & (table["level"] == "duty")]
    duty = tally.probes["gates"][0, :, [1, 2], 0].sum(0) / tally.counts["far"].sum() / 40
    for layer, value in zip((1, 2), duty.tolist(), strict=True):
        np.testing.assert_allclose(clean.loc[clean["layer"] == layer, "measured"], value)
    where = tables["prediction_location"]
    # what is wrong with the location is attention's answer, and nothing else: none where it may not answer
    exact = where[where["norm"] == "rescaled"]
    np.testing.assert_allclose(exact["attention_held_error"], 0, atol=1e-4)
    mlp = exact[(exact["kind"] == "mlp") & (exact["alpha"] == 0)]
    assert (mlp["error"].abs() > 1e-3).all()
    own = table[table["kind"] == "value"]
    np.testing.assert_array_equal(own["attention_held"], own["measured"])  # no attention before these gates
    # fitted and measured on the same documents: at alpha = 1 the location is the measured mean
    np.testing.assert_allclose(where.loc[where["alpha"] == 1, "error"], 0, atol=1e-4)
    # SATFormer's own gate reads the stream through one norm with no attention between: exact at every dose
    own = where[(where["kind"] == "value") & (where["norm"] == "rescaled")]
    np.testing.assert_allclose(own["error"], 0, atol=1e-4)
