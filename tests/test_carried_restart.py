"""The shared pass against whole runs of one document and one change at a time, in full float64 logits."""

import copy
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from satlens.carried import directions
from satlens.carried.documents import SKIP, DocumentSet
from satlens.carried.doses import dose_response
from satlens.carried.edits import Change, Where, after_attention, dose, edit, matched, replacement
from satlens.carried.effects import LEVELS, count_above, thresholds
from satlens.carried.fit import fit
from satlens.carried.opening import read_model
from satlens.carried.restart import measure
from satlens.carried.setting import new_setting
from satlens.carried.tally import CLEAN, Probe
from satlens.errors import SatlensError
from tests.conftest import tiny_model


def document_set(lengths=(30, 23, 40, 18, 25), vocab=53):
    rng = np.random.default_rng(0)
    ids = tuple(rng.integers(3, vocab, n) for n in lengths)
    return DocumentSet(ids=ids, names=("x",) * len(ids), kinds=("x",) * len(ids))


@pytest.fixture(scope="module")
def world():
    """A tiny SATFormer, five unequal documents, a direction, and changes of every kind."""
    reader = read_model(tiny_model(), None)
    rng = torch.Generator().manual_seed(0)
    m = directions.unit(torch.randn(24, generator=rng))
    other = directions.random_units(m, 8, rng)[0]
    remove = edit(dose(m, 0.0))
    changes = [
        Change(edits={("resid", 2): edit(dose(m, 2.0))}, labels={"control": "reference", "alpha": 2.0}),
        Change(edits={("resid", 2): edit(matched(m, other, 0.0))}, labels={"control": "random"}),
        Change(edits={("resid", 0): edit(replacement(m, other), keep_norm=True)}, labels={"control": "c"}),
        Change(edits={("resid", 1): remove, ("resid", 3): remove}, labels={"control": "co-removal"}),
        Change(edits={("value_gate", 2): lambda x, where: torch.zeros_like(x)}, labels={"control": "zero"}),
        Change(edits={("resid", 2): edit(dose(m, 0.0), window=(18, 20))}, labels={"control": "window"}),
    ]
    levels = thresholds(reader.reads[0])
    gates = Probe(
        role="pre",
        columns=("duty", "fires", "fires_hard"),
        sums=lambda z, rows, layer: count_above(z, rows.far, levels),
    )
    open_gate = Probe(
        role="value_gate",
        columns=("open", "alpha"),
        sums=lambda a, rows, layer: torch.stack(
            [((a > 0) * rows.far[..., None]).sum((1, 2)), (a * rows.far[..., None]).sum((1, 2))], -1
        ).double(),
    )
    return SimpleNamespace(
        reader=reader, docs=document_set(), m=m, changes=changes, probes={"gates": gates, "own": open_gate}
    )


def after_window(rows):
    at = torch.arange(rows.far.shape[1])
    return {"after": rows.far & (at >= 20) & (at < 24)}


@pytest.fixture(scope="module")
def tally(world):
    return measure(
        world.reader, world.docs, world.changes, world.probes, batch_size=3, group=2, regions=after_window
    )


def slowly(world, ids, change):
    """Logits of one document in float64, and every ``pre`` and ``value_gate`` the run had."""
    seen = {}
    where = Where(far=torch.arange(len(ids))[None] >= SKIP, doc=torch.tensor([0]))
    hooks = (
        [] if change is None else [(r, n, lambda x, e=e: e(x, where)) for (r, n), e in change.edits.items()]
    )
    for role in ("pre", "value_gate"):
        hooks += [
            (role, n, lambda x, key=(role, n): seen.__setitem__(key, x[0, SKIP:].clone()))
            for n in world.reader.sites[role]
        ]
    hidden = world.reader.run(torch.tensor(np.array(ids))[None], hooks)
    return world.reader.logits(hidden)[0].double(), seen


def test_every_change_equals_a_whole_run_of_each_document_alone(world, tally):
    for doc, ids in enumerate(world.docs.ids):
        clean, _ = slowly(world, ids, None)
        p = clean.log_softmax(-1)
        for line, change in enumerate([None, *world.changes]):
            logits, seen = slowly(world, ids, change)
            q = logits.log_softmax(-1)
            kl = (p.exp() * (p - q)).sum(-1)[SKIP:]
            nll = -q[SKIP:-1].gather(1, torch.tensor(np.array(ids))[SKIP + 1 :, None]).sum()
            expected = {
                "kl_far": kl.sum(),
                "kl_final": kl[-1],
                "kl_after": kl[20 - SKIP : 24 - SKIP].sum(),
                "nll_scored": nll,
                "entropy_far": -(q.exp() * q).sum(-1)[SKIP:].sum(),
                "top1_far": (p.argmax(-1) == q.argmax(-1))[SKIP:].sum(),
            }
            assert set(tally.outputs) == set(expected)
            for name, value in expected.items():
                assert float(tally.outputs[name][line, doc]) == pytest.approx(float(value), abs=5e-5), name
            for layer in range(4):
                z = seen["pre", layer]
                wanted = [
                    (z > 0).sum(),
                    (torch.nn.functional.silu(z) > 0.5).sum(),
                    (torch.nn.functional.silu(z) > 1).sum(),
                ]
                assert tally.probes["gates"][line, doc, layer].tolist() == [int(w) for w in wanted]
            for layer in (1, 2, 3):
                a = seen["value_gate", layer]
                assert float(tally.probes["own"][line, doc, layer, 1]) == pytest.approx(
                    float(a.sum()), abs=1e-4
                )
    assert bool(tally.probes["own"][:, :, 0].isnan().all())  # layer 0 has no gate of its own
    assert len(LEVELS) == 3


def test_final_kl_is_equal_to_a_slow_loop_to_a_millionth(world, tally):
    for doc, ids in enumerate(world.docs.ids):
        p = slowly(world, ids, None)[0][-1].log_softmax(-1)
        for line, change in enumerate(world.changes, start=1):
            q = slowly(world, ids, change)[0][-1].log_softmax(-1)
            kl = float((p.exp() * (p - q)).sum())
            assert float(tally.outputs["kl_final"][line, doc]) == pytest.approx(kl, rel=1e-5, abs=1e-6)


def test_counts_are_those_of_the_documents(world, tally):
    lengths = torch.tensor([len(ids) for ids in world.docs.ids]).double()
    assert torch.equal(tally.counts["far"], lengths - SKIP)
    assert torch.equal(tally.counts["scored"], lengths - SKIP - 1)
    assert torch.equal(tally.counts["final"], torch.ones(5).double())
    assert torch.equal(tally.counts["after"], (lengths - 20).clamp(0, 4))


@pytest.mark.parametrize(("batch_size", "group"), [(1, 1), (2, 8), (5, 3)])
def test_answers_do_not_depend_on_batch_or_group(world, tally, batch_size, group):
    other = measure(
        world.reader,
        world.docs,
        world.changes,
        world.probes,
        batch_size=batch_size,
        group=group,
        regions=after_window,
    )
    for name, sums in tally.outputs.items():
        torch.testing.assert_close(other.outputs[name], sums, rtol=0, atol=3e-5)
    for name, sums in tally.probes.items():
        torch.testing.assert_close(other.probes[name], sums, rtol=0, atol=3e-5, equal_nan=True)


def test_alpha_one_is_exactly_the_clean_model(world):
    still = [
        Change(edits={("resid", n): edit(dose(world.m, 1.0), keep)}, labels={"alpha": 1.0}, identity=True)
        for n in (0, 3)
        for keep in (False, True)
    ]
    tally = measure(world.reader, world.docs, still, world.probes)
    for line in range(1, 5):
        assert float(tally.outputs["kl_far"][line].abs().max()) == 0
        assert torch.equal(tally.outputs["top1_far"][line], tally.counts["far"])
        for name in ("nll_scored", "entropy_far"):
            assert torch.equal(tally.outputs[name][line], tally.outputs[name][CLEAN])
        for sums in tally.probes.values():
            torch.testing.assert_close(sums[line], sums[CLEAN], rtol=0, atol=0, equal_nan=True)
    assert tally.altered == set()


def test_a_restart_from_an_edited_residual_is_the_whole_run_bit_for_bit(world):
    ids = torch.tensor(np.array(world.docs.ids[2]))[None]
    where = Where(far=torch.arange(ids.shape[1])[None] >= SKIP, doc=torch.tensor([0]))
    _, states = world.reader.run_keeping(ids, [0, 2])
    change = edit(dose(world.m, 0.0))
    for layer, state in states.items():
        whole = world.reader.run(ids, [("resid", layer, lambda x: change(x, where))])
        assert torch.equal(world.reader.run_from(state.with_residual(change(state.residual, where))), whole)


def test_layers_before_the_edit_keep_the_clean_values(world, tally):
    gates = tally.probes["gates"]
    for line, change in enumerate(world.changes, start=1):
        assert torch.equal(gates[line, :, : change.start], gates[CLEAN, :, : change.start])


def test_an_identity_that_changes_something_stops(world):
    wrong = Change(edits={("resid", 1): edit(dose(world.m, 0.9))}, labels={"alpha": 1.0}, identity=True)
    with pytest.raises(SatlensError, match=r"alpha 1\.0: the setting that changes nothing"):
        measure(world.reader, world.docs, [wrong], {})


def test_an_edit_of_a_site_the_layer_lacks_is_refused(world):
    wrong = Change(edits={("value_gate", 0): lambda x, where: x * 0})
    with pytest.raises(Exception, match="layer 0 has no value_gate"):
        measure(world.reader, world.docs, [wrong], {})


def test_an_overflow_is_counted_and_named(world):
    reader = read_model(tiny_model().half(), None)
    blow = Change(edits={("resid", 2): edit(dose(world.m, 1e6))}, labels={"alpha": 1e6})
    with pytest.raises(
        SatlensError, match=r"alpha 1000000\.0: \d+ of \d+ values of resid in layer 2 are not finite"
    ):
        measure(reader, world.docs, [blow], {}, batch_size=1)


def test_an_overflow_inside_the_model_is_named_where_it_begins():
    model = tiny_model()
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight.mul_(5e4)
    reader = read_model(model.half(), None)
    with pytest.raises(
        SatlensError, match=r"clean: \d+ of \d+ values of mlp_out in layer 1 are not finite \(overflow in"
    ):
        measure(reader, document_set(), [], {}, batch_size=2)


def test_every_process_stops_with_what_any_of_them_met(monkeypatch):
    """Otherwise the others would wait for its sums, or take the next experiment's for them."""
    from satlens import stream

    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)

    def others(found, mine):
        found[:] = [mine, SatlensError("3 of 9 values of resid in layer 1 are not finite")]

    monkeypatch.setattr(torch.distributed, "all_gather_object", others)
    with pytest.raises(SatlensError, match="3 of 9 values of resid in layer 1"):
        stream.agree(None)


def hooked_by_hand(model, ids, layer, change):
    """Float64 logits and the layer's gate pre-activations, with torch's own hooks on the model's own modules."""
    seen = []
    block = model.model.layers[layer]
    handles = [
        block.register_forward_pre_hook(lambda _, args: (change(args[0]), *args[1:])),
        block.mlp.gate_proj.register_forward_hook(lambda _, args, z: seen.append(z[0, SKIP:].clone())),
    ]
    with torch.no_grad():
        logits = model(ids).logits[0]
    for handle in handles:
        handle.remove()
    return logits.log_softmax(-1), seen[0]


@pytest.mark.parametrize("kind", ["removal", "norm kept", "doubled", "control"])
def test_the_dose_table_is_that_of_a_float64_model_hooked_by_hand(kind):
    """Nothing of the reader, the restart or the tally is used by the other side."""
    model, docs, layer = tiny_model(), document_set(), 2
    reader = read_model(model, None)
    setting = new_setting(reader, fit(reader, document_set((30, 40))), docs, (layer,), n_resamples=100)
    table = dose_response(setting, (0.0, 2.0), ("matched",))[0]["dose"]
    m, r = setting.unit(layer).double(), setting.randoms(layer)[5].double()
    alpha, direction, draw = {"control": (0.0, "matched", 5), "doubled": (2.0, "reference", -1)}.get(
        kind, (0.0, "reference", -1)
    )

    def change(x):
        new, part = x.clone(), x[:, SKIP:]
        along = (part @ m)[..., None]
        moved = part - along.abs() * r if kind == "control" else part + (alpha - 1) * along * m
        if kind == "norm kept":
            moved = moved * part.norm(dim=-1, keepdim=True) / moved.norm(dim=-1, keepdim=True)
        new[:, SKIP:] = moved
        return new

    slow, n_far = copy.deepcopy(model).double(), sum(len(ids) - SKIP for ids in docs.ids)
    sums = dict.fromkeys(("kl_far", "kl_final", "delta_nll", "delta_entropy", "release", "delta_duty"), 0.0)
    for tokens in docs.ids:
        ids = torch.from_numpy(tokens)[None]
        (p, before), (q, after) = (hooked_by_hand(slow, ids, layer, how) for how in (torch.clone, change))
        kl, targets = (p.exp() * (p - q)).sum(-1), ids[0, SKIP + 1 :, None]
        sums["kl_far"] += float(kl[SKIP:].sum()) / n_far
        sums["kl_final"] += float(kl[-1]) / 5
        sums["delta_nll"] += float((p - q)[SKIP:-1].gather(1, targets).sum()) / (n_far - 5)
        sums["delta_entropy"] += float(((p.exp() * p).sum(-1) - (q.exp() * q).sum(-1))[SKIP:].sum()) / n_far
        fires = [(torch.nn.functional.silu(z) > 0.5).double().mean(1).sum() for z in (before, after)]
        duty = [(z > 0).double().mean(1).sum() for z in (before, after)]
        sums["release"] += float(fires[1] - fires[0]) / n_far
        sums["delta_duty"] += float(duty[1] - duty[0]) / n_far
    row = table[
        (table["alpha"] == alpha)
        & (table["direction"] == direction)
        & (table["draw"] == draw)
        & (table["norm_kept"] == (kind == "norm kept"))
    ]
    for name, value in sums.items():
        assert row[name].item() == pytest.approx(value, rel=1e-5, abs=2e-6), name


def test_a_dose_behind_attention_is_one_that_attention_did_not_answer(world):
    """The same as a dosed stream with attention's clean write put back by hand."""
    by = dose(world.m, 0.0)
    change = Change(edits=after_attention(2, by), labels={"direction": "attention held"})
    tally = measure(world.reader, world.docs, [change], world.probes, batch_size=3)
    for doc, tokens in enumerate(world.docs.ids):
        ids, seen = torch.from_numpy(tokens)[None], {}
        where = Where(far=torch.arange(ids.shape[1])[None] >= SKIP, doc=torch.tensor([doc]))
        world.reader.run(ids, [("attn_out", 2, lambda x, seen=seen: seen.update(write=x.clone()))])
        hooks = [
            ("resid", 2, lambda x, where=where: edit(by)(x, where)),
            ("attn_out", 2, lambda x, seen=seen: seen["write"]),
            ("pre", 2, lambda z, seen=seen: seen.update(pre=z[0, SKIP:].clone())),
        ]
        world.reader.run(ids, hooks)
        assert int(tally.probes["gates"][1, doc, 2, 0]) == int((seen["pre"] > 0).sum())
