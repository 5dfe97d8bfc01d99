"""Causal experiments: planted effects computed by hand, controls, and every table against slow loops."""

from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from planted import LAYERS, STYLES, plant

from satlens.carried import doses, identity, own_gate, reach, texts
from satlens.carried.documents import SKIP, DocumentSet
from satlens.carried.fit import fit
from satlens.carried.opening import read_model, twin
from satlens.carried.outcomes import against_controls, by_document, effects_table
from satlens.carried.setting import new_setting
from satlens.errors import UserError
from tests.conftest import tiny_model

FAST = {"n_resamples": 100, "batch_size": 3}


def document_set(lengths=(40, 33, 28, 36), vocab=53, seed=0):
    rng = np.random.default_rng(seed)
    ids = tuple(rng.integers(3, vocab, n) for n in lengths)
    return DocumentSet(ids=ids, names=tuple(f"d{i}" for i in range(len(ids))), kinds=("a",) * len(ids))


@pytest.fixture(scope="module")
def tiny():
    """A tiny SATFormer with m^ fitted on other documents than those evaluated."""
    reader = read_model(tiny_model(), None)
    fitted = document_set(seed=5)
    setting = new_setting(reader, fit(reader, fitted), document_set(), (1, 2), **FAST)
    return SimpleNamespace(setting=setting, fitted=fitted)


@pytest.mark.parametrize("style", STYLES)
def test_doses_do_to_planted_gates_what_the_formula_says(style):
    made = plant(style)
    reader = read_model(made.model, None)
    setting = new_setting(reader, fit(reader, made.documents), made.documents, range(LAYERS), **FAST)
    changes = [c for n in range(LAYERS) for c in doses.reference_doses(setting, n, (0.0, 0.5, 2.0))]
    tally = setting.run("planted", changes)
    for line, change in enumerate(changes, start=1):
        layer, alpha = change.start, change.labels["alpha"]
        m = made.mean(made.stream)[layer]
        unit = m / np.linalg.norm(m)
        stream = made.stream[layer]
        new = stream + (alpha - 1) * np.outer(stream @ unit, unit)
        if made.style.block != "parallel":
            new = new + made.writes["attention"][layer]
        norm = next(e.norm for e in _ledger(reader) if e.layer == layer)
        moved = new - new.mean(-1, keepdims=True) if made.style.centred else new
        sigma = np.sqrt(np.square(moved).mean(-1, keepdims=True) + norm.eps)
        read = norm.gain.double().numpy() * moved / sigma + norm.bias.double().numpy()
        z = read @ reader.reads[layer].weight.double().numpy().T + made.bias[layer]
        sure = np.abs(z) > 5e-3  # the planted model is faintly more than its formula
        expected, slack = (z > 0).sum(1), (~sure).sum(1)
        for doc, ids in enumerate(made.documents.ids):
            got = float(tally.probes["gates"][line, doc, layer, 0])
            assert abs(got - expected[ids[SKIP:]].sum()) <= slack[ids[SKIP:]].sum()


def _ledger(reader):
    from satlens.carried.ledger import ledger

    return ledger(reader)


def test_the_fitted_direction_is_the_planted_mean():
    made = plant("llama")
    reference = fit(read_model(made.model, None), made.documents, gates=[1])
    mean = made.mean(made.stream)
    np.testing.assert_allclose(reference.mean.numpy(), mean, rtol=1e-4, atol=1e-4)
    share = made.counts / made.counts.sum()
    spread = np.sqrt(np.einsum("ltd,t->ld", np.square(made.stream - mean[:, None]), share))
    np.testing.assert_allclose(reference.deviation.numpy(), spread, rtol=1e-3, atol=1e-3)
    assert set(reference.gate_mean) == {("mlp", 1)}
    np.testing.assert_allclose(reference.gate_mean["mlp", 1], (made.coupling + made.bias)[1], atol=2e-3)
    assert reference.n_tokens == made.counts.sum()


@pytest.fixture(scope="module")
def dosed(tiny):
    return doses.dose_response(
        tiny.setting, (0.0, 1.0, 2.0), ("matched", "matched-signed", "published-unmatched")
    )


def test_the_dose_table_has_every_setting_once(dosed):
    table = dosed[0]["dose"]
    sizes = table.groupby(["layer", "direction", "norm_kept"]).size().to_dict()
    for layer in (1, 2):
        assert sizes[layer, "reference", False] == 3 and sizes[layer, "reference", True] == 2
        assert sizes[layer, "matched", False] == 16 and sizes[layer, "matched", True] == 8
        assert sizes[layer, "matched-signed", False] == sizes[layer, "published-unmatched", False] == 8
    one = table[table["alpha"] == 1]
    assert not one["altered"].any() and table[table["alpha"] != 1]["altered"].all()
    for name in ("kl_final", "kl_far", "delta_nll", "delta_entropy", "release", "delta_duty"):
        assert (one[name] == 0).all()
    assert (one["top1"] == 1).all()


def test_release_is_the_median_and_mean_over_documents_of_firing_minus_clean(tiny, dosed):
    tables, tally = dosed
    far = tally.counts["far"].numpy()
    for place, row in tables["dose"].iterrows():
        gates = tally.probes["gates"][:, :, row["layer"], 1].numpy()
        each = [(gates[1 + place, doc] - gates[0, doc]) / (far[doc] * 40) for doc in range(4)]
        assert row["release_median"] == pytest.approx(np.median(each), abs=1e-12)
        whole = (gates[1 + place].sum() - gates[0].sum()) / (far.sum() * 40)
        assert row["release"] == pytest.approx(whole, abs=1e-12)
        assert row["release_low"] <= row["release"] + 1e-12 and row["release"] <= row["release_high"] + 1e-12
        assert row["firing"] - row["firing_clean"] == pytest.approx(whole, abs=1e-12)


def test_effects_are_sums_over_counts_of_paired_documents(dosed):
    tables, tally = dosed
    row = tables["dose"].iloc[0]
    nll, scored = tally.outputs["nll_scored"].numpy(), tally.counts["scored"].numpy()
    assert row["delta_nll"] == pytest.approx((nll[1] - nll[0]).sum() / scored.sum())
    assert row["delta_nll_median"] == pytest.approx(np.median((nll[1] - nll[0]) / scored))
    assert row["kl_final"] == pytest.approx(tally.outputs["kl_final"][1].mean().item())
    assert row["n_tokens"] == tally.counts["far"].sum() and row["n_documents"] == 4


def test_ratio_and_percentile_are_taken_over_the_control_distribution(tiny, dosed):
    tables, _ = dosed
    table = tables["dose"]
    versus = tables["dose_controls"].set_index(["layer", "alpha", "norm_kept", "control", "measure"])
    for layer in (1, 2):
        own = table[(table["layer"] == layer) & (table["alpha"] == 0) & ~table["norm_kept"]]
        controls = own.loc[own["direction"] == "matched", "kl_far"].to_numpy()
        reference = own.loc[own["direction"] == "reference", "kl_far"].item()
        row = versus.loc[(layer, 0.0, False, "matched", "kl_far")]
        assert row["ratio"] == pytest.approx(reference / controls.mean())
        assert row["percentile"] == pytest.approx(100 * (controls < reference).mean())
        assert row["ratio_low"] <= row["ratio"] <= row["ratio_high"]
        assert row["n_controls"] == 8
    assert "published-unmatched" in set(tables["dose_controls"]["control"])


def test_later_layers_are_those_from_the_edit_on(dosed):
    table = dosed[0]["dose_layers"]
    assert (table["layer"] >= table["edited_layer"]).all()
    assert set(table.loc[table["edited_layer"] == 2, "layer"]) == {2, 3}
    at = table[table["layer"] == table["edited_layer"]].reset_index(drop=True)
    np.testing.assert_allclose(at["release"], dosed[0]["dose"]["release"], atol=1e-12)


def test_one_document_has_no_interval(tiny):
    setting = new_setting(tiny.setting.reader, tiny.setting.reference, document_set((40,)), (2,), **FAST)
    tables, _ = doses.dose_response(setting, (0.0,))
    assert tables["dose"]["release_low"].isna().all() and tables["dose"]["kl_far_median_high"].isna().all()
    assert tables["dose"]["kl_far"].notna().all()
    assert tables["dose_controls"]["ratio_low"].isna().all()


def test_twins_have_their_own_direction_and_another_shape_is_refused(tiny):
    other = twin(tiny.setting.reader, 3)
    tables = doses.twin_doses(tiny.setting, other, tiny.fitted, (0.0, 1.0))
    assert set(tables["twin"]["twin"]) == {other.name}
    own = fit(other, tiny.fitted).mean.norm(dim=1)
    many = tables["twin_co_removal"]
    assert {"reference", "matched"} <= set(many["direction"]) and set(many["twin"]) == {other.name}
    setting = new_setting(other, fit(other, tiny.fitted), tiny.setting.documents, (1, 2), **FAST)
    alone = reach.co_removal(setting)[0]["co_removal"]
    np.testing.assert_allclose(many["kl_far"], alone["kl_far"], atol=1e-9)
    rows = tables["twin"]
    for layer in (1, 2):
        assert set(rows.loc[rows["layer"] == layer, "m_norm"]) == {float(own[layer])}
    wrong = read_model(tiny_model(intermediate_size=48), None, name="wider")
    with pytest.raises(UserError, match=r"wider is no twin of model: gates a layer 48, not 40"):
        doses.twin_doses(tiny.setting, wrong, tiny.fitted)
    with pytest.raises(UserError, match="layers 3, not 4"):
        doses.require_same_shape(tiny.setting.reader, read_model(tiny_model(num_hidden_layers=3), None))


def test_replacements_change_less_the_nearer_they_are_and_nothing_at_cosine_one(tiny):
    tables, _ = identity.replacements(tiny.setting)
    table = tables["replacement"]
    itself = table[table["replacement"] == "m^ itself"]
    np.testing.assert_allclose(itself["cosine"], 1, atol=1e-6)
    assert (itself["kl_far"] == 0).all() and (itself["release"] == 0).all()
    random = table[table["replacement"] == "random"]
    np.testing.assert_allclose(random["cosine"], 0, atol=1e-6)
    units = {layer: tiny.setting.unit(layer).double() for layer in range(4)}
    for row in table[table["replacement"] == "m^ of another layer"].itertuples():
        assert row.cosine == pytest.approx(float(units[row.layer] @ units[row.source]), abs=1e-6)
        assert row.source != row.layer
    for norm_kept in (False, True):
        part = table[(table["layer"] == 1) & (table["norm_kept"] == norm_kept)]
        counts = part["replacement"].value_counts().to_dict()
        assert counts["random"] == 8 and counts["permuted m^"] == 3 and counts["m^ of another layer"] == 3


def test_noise_rows_state_their_imbalance_and_removal_its_own_length(tiny):
    tables, _ = identity.noises(tiny.setting, (0.33,))
    table = tables["noise"]
    arms = table[table["layer"] == 1]["arm"].value_counts().to_dict()
    plain = {"reference": 3, "random": 3, "isotropic": 3, "shaped": 3}
    assert arms == {"removal": 1, **plain, **{f"{arm}, norm kept": 1 for arm in plain}}
    versus = tables["noise_versus"].set_index(["layer", "what", "measure"])
    at = table[table["layer"] == 1].set_index("arm")["kl_far"]
    assert versus.loc[(1, "removal", "kl_far"), "ratio"] == pytest.approx(
        at["removal"] / at["isotropic"].mean()
    )
    first = at["reference"].iloc[0]
    assert versus.loc[(1, "noise along m^", "kl_far"), "ratio"] == pytest.approx(first / at["random"].mean())
    removal = table[(table["arm"] == "removal") & (table["layer"] == 1)].iloc[0]
    reader, m = tiny.setting.reader, tiny.setting.unit(1)
    shares = []
    for ids in tiny.setting.documents.ids:
        _, states = reader.run_keeping(torch.from_numpy(ids)[None], [1])
        x = states[1].residual[0, SKIP:]
        shares += ((x @ m).abs() / x.norm(dim=-1)).tolist()
    assert removal["share"] == pytest.approx(np.mean(shares), rel=1e-5)
    assert table.loc[table["arm"] != "removal", "imbalance"].between(0, 1).all()


def test_the_noise_of_the_table_is_the_noise_of_a_whole_run(tiny):
    """The restarted pass must add the same noise to a document as a run of it alone, and measure it alike."""
    from satlens.carried import noise
    from satlens.carried.edits import Where

    tables, _ = identity.noises(tiny.setting, (1.0,))
    table = tables["noise"]
    row = table[(table["arm"] == "isotropic") & (table["layer"] == 2) & (table["draw"] == 1)].iloc[0]
    by, reader, total = noise.noise(noise.isotropic(), 1.0, 101 * 2 + 1), tiny.setting.reader, 0.0
    for doc, ids in enumerate(tiny.setting.documents.ids):
        where = Where(far=torch.arange(len(ids))[None] >= SKIP, doc=torch.tensor([doc]))
        tensor = torch.from_numpy(ids)[None]
        runs = [
            reader.logits(reader.run(tensor, hooks))[0, SKIP:].double().log_softmax(-1)
            for hooks in ([], [("resid", 2, lambda x, where=where: x + by(x, where))])
        ]
        total += float((runs[0].exp() * (runs[0] - runs[1])).sum())
    assert row["kl_far"] == pytest.approx(total / tiny.setting.documents.far_counts.sum(), rel=1e-4)


def test_layer_sets_are_the_papers_in_its_own_depth_and_distinct_in_a_small_one():
    sets = reach.layer_sets(32)
    assert sets["every 4th from 6"] == (6, 10, 14, 18, 22, 26, 30)
    assert sets["every 4th from 14"] == (14, 18, 22, 26, 30)
    assert sets["every layer from 6"] == tuple(range(6, 32))
    small = reach.layer_sets(8)
    assert small == {"every layer from 1": tuple(range(1, 8)), "every layer from 3": tuple(range(3, 8))}


def test_co_removal_is_the_removal_at_each_layer_of_what_is_left(tiny):
    tables, tally = reach.co_removal(tiny.setting)
    reader = tiny.setting.reader
    sets = reach.layer_sets(4)
    ids = torch.from_numpy(tiny.setting.documents.ids[0])[None]
    clean = reader.logits(reader.run(ids)).double().log_softmax(-1)[0]
    for place, change in enumerate(tally.changes):
        if change.labels["direction"] != "reference":
            continue

        def remove(layer):
            m = tiny.setting.unit(layer)

            def step(x):
                new = x.clone()
                new[:, SKIP:] -= (x[:, SKIP:] @ m)[..., None] * m
                return new

            return step

        hooks = [("resid", n, remove(n)) for n in sets[change.labels["layer_set"]]]
        q = reader.logits(reader.run(ids, hooks)).double().log_softmax(-1)[0]
        kl = float((clean.exp() * (clean - q)).sum(-1)[SKIP:].sum())
        assert float(tally.outputs["kl_far"][1 + place, 0]) == pytest.approx(kl, rel=1e-4)
    assert set(tables["co_removal_controls"]["layer_set"]) == set(sets)


def test_recovery_is_the_mean_cosine_with_each_layers_own_direction(tiny):
    tables, _ = reach.recovery(tiny.setting)
    table = tables["recovery"].set_index(["edited_layer", "direction", "layer"])
    reader = tiny.setting.reader
    cosines = []
    for ids in tiny.setting.documents.ids:
        _, states = reader.run_keeping(torch.from_numpy(ids)[None], [2, 3])
        cosines += torch.cosine_similarity(
            states[3].residual[0, SKIP:], tiny.setting.unit(3)[None], dim=-1
        ).tolist()
    assert table.loc[(2, "reference", 3), "cosine_clean"] == pytest.approx(np.mean(cosines), abs=1e-6)
    assert table.loc[(2, "reference", 2), "cosine"] == pytest.approx(0, abs=1e-6)  # it was removed there
    row = table.loc[(2, "reference", 4)]  # what leaves the last block is read too
    assert row["dip"] == pytest.approx(row["cosine"] - row["cosine_clean"], abs=1e-9)
    assert row["cosine_low"] <= row["cosine"] <= row["cosine_high"]


def test_greedy_continuations_and_their_first_difference(tiny):
    prompts = torch.from_numpy(np.stack([ids[:20] for ids in tiny.setting.documents.ids]))
    got = reach.greedy(tiny.setting, prompts, None, steps=3)
    ids = prompts.clone()
    for _ in range(3):
        ids = torch.cat([ids, tiny.setting.reader.model(ids).logits[:, -1].argmax(-1)[:, None]], 1)
    assert torch.equal(got, ids[:, 20:])
    one = torch.tensor([[1, 2, 3], [1, 2, 3], [1, 2, 3]])
    other = torch.tensor([[1, 2, 3], [1, 9, 3], [9, 2, 9]])
    assert reach.first_difference(one, other).tolist() == [4, 2, 1]


def test_a_window_is_read_after_it_and_refused_where_nothing_follows():
    reader = read_model(tiny_model(max_position_embeddings=128), None)
    docs = document_set((110, 90, 74))
    setting = new_setting(reader, fit(reader, docs), docs, (1,), **FAST)
    tables, tally = reach.windows(setting)
    assert tally.counts["after"].tolist() == [32, 18, 2]
    table = tables["window"]
    row = table[table["direction"] == "reference"].iloc[0]
    assert row["kl_after"] == pytest.approx(float(tally.outputs["kl_after"][1].sum()) / 52)
    assert row["kl_after"] > 0
    controls = table.loc[table["direction"] == "matched", "kl_after"]
    (versus,) = tables["window_controls"].to_dict("records")
    assert versus["ratio"] == pytest.approx(row["kl_after"] / controls.mean())
    assert versus["ratio_low"] <= versus["ratio"] <= versus["ratio_high"] and versus["n_controls"] == 8
    greedy = tables["window_greedy"]
    assert set(greedy["n_documents"]) == {1} and set(greedy["direction"]) == {"reference", "matched"}
    assert (greedy["differs"] == (greedy["step"] <= reach.GREEDY)).all()  # of one document
    short = new_setting(reader, setting.reference, document_set((72, 40)), (1,), **FAST)
    with pytest.raises(UserError, match="longer than 72 tokens"):
        reach.windows(short)


def test_own_gate_shares_and_alpha_equal_a_slow_loop(tiny):
    tables, _ = own_gate.own_gates(tiny.setting)
    table = tables["gate"]
    assert set(table["layer"]) == {1, 2, 3}
    reader, layer = tiny.setting.reader, 2
    m = tiny.setting.unit(layer)

    def removed(x):
        new = x.clone()
        new[:, SKIP:] -= (x[:, SKIP:] @ m)[..., None] * m
        return new

    found = {"clean": [], "removed": []}
    for ids in tiny.setting.documents.ids:
        for name, hooks in (("clean", []), ("removed", [("resid", layer, removed)])):
            keep = lambda a, name=name: found[name].append(a[0, SKIP:].clone())  # noqa: E731
            reader.run(torch.from_numpy(ids)[None], [*hooks, ("value_gate", layer, keep)])
    alpha = {name: torch.cat(values).double() for name, values in found.items()}
    row = table[(table["layer"] == layer) & (table["kind"] == "removed")].iloc[0]
    assert row["open_clean"] == pytest.approx(float((alpha["clean"] > 0).double().mean()))
    assert row["open"] == pytest.approx(float((alpha["removed"] > 0).double().mean()))
    assert row["delta_alpha"] == pytest.approx(
        float(alpha["removed"].mean() - alpha["clean"].mean()), abs=1e-6
    )
    heads = tables["gate_heads"]
    head = heads[(heads["layer"] == layer) & (heads["kind"] == "removed")].set_index("kv_head")
    for at in range(2):
        assert head.loc[at, "alpha_clean"] == pytest.approx(float(alpha["clean"][:, at].mean()), abs=1e-6)
    only = table[(table["layer"] == layer) & (table["kind"] == "removed for the gate")].iloc[0]
    assert only["open"] == row["open"] and only["alpha"] == pytest.approx(row["alpha"], abs=1e-7)
    assert only["kl_far"] < row["kl_far"]  # all but the gate saw the clean stream
    zeroed = table[(table["layer"] == layer) & (table["kind"] == "zeroed")].iloc[0]
    assert zeroed["open"] == zeroed["alpha"] == 0


def test_closing_the_gate_costs_what_the_ablation_costs(tiny):
    """The same number as ``satlens ablate`` would give on these tokens: delta NLL with alpha = 0."""
    tables, _ = own_gate.own_gates(tiny.setting)
    reader, total, count = tiny.setting.reader, 0.0, 0
    for ids in tiny.setting.documents.ids:
        tensor = torch.from_numpy(ids)[None]
        pair = [
            -reader.logits(reader.run(tensor, hooks))[0, SKIP:-1]
            .double()
            .log_softmax(-1)
            .gather(1, tensor[0, SKIP + 1 :, None])
            for hooks in ([], [("value_gate", 1, torch.zeros_like)])
        ]
        total, count = total + float((pair[1] - pair[0]).sum()), count + len(pair[0])
    table = tables["gate"]
    row = table[(table["layer"] == 1) & (table["kind"] == "zeroed")].iloc[0]
    assert row["delta_nll"] == pytest.approx(total / count, abs=1e-5)


def test_a_model_without_its_own_gate_is_told_so(tiny):
    reader = read_model(tiny_model("transformer"), None)
    setting = new_setting(reader, fit(reader, tiny.fitted), tiny.setting.documents, (1,), **FAST)
    with pytest.raises(UserError, match="has no gate on first-layer values"):
        own_gate.own_gates(setting)


def test_the_rungs_of_the_ladder_keep_what_they_say_they_keep():
    documents, rng = document_set((200, 150), vocab=30), np.random.default_rng(0)
    everything = np.concatenate(documents.ids)
    types = np.unique(everything)
    for one, other in zip(documents.ids, texts.shuffled(documents, rng), strict=True):
        assert sorted(one) == sorted(other) and one[0] == other[0] and not np.array_equal(one, other)
    for made in (texts.frequency_matched(documents, rng), texts.uniform(documents, rng)):
        assert [len(ids) for ids in made] == [200, 150]
        assert set(np.concatenate(made)) <= set(types)
    for one, ids in zip(documents.ids, texts.repeated(documents, rng), strict=True):
        assert len(set(ids)) == 1 and ids[0] in types and len(ids) == len(one)
    skewed = DocumentSet(
        ids=(np.array([1] * 500 + [2] * 300 + list(range(3, 203))),), names=("a",), kinds=("a",)
    )
    (made,) = texts.frequency_matched(skewed, np.random.default_rng(1))
    assert (made[1:500] == 1).all()  # alone in its group of like frequency
    assert not np.isin(made[800:], [1, 2]).any()


def test_the_ladder_measures_each_rung_on_its_own_text(tiny):
    table = texts.text_ladder(tiny.setting)["ladder"]
    assert list(dict.fromkeys(table["text"])) == list(texts.LADDER)
    prose = table[table["text"] == "prose"].set_index("layer")
    tally = tiny.setting.run("clean", [])
    for layer in range(4):
        expected = tally.probes["gates"][0, :, layer, 0].sum() / (tally.counts["far"].sum() * 40)
        assert prose.loc[layer, "duty"] == pytest.approx(float(expected))
    assert prose["cosine"].between(0.5, 1).all()


def test_helpers_agree_with_tables(tiny, dosed):
    """``by_document`` is what every table is made from: a ratio of its sums is the table's mean."""
    tables, tally = dosed
    table = effects_table(tally, tiny.setting.reader, tiny.setting.weights)
    for name, (sums, counts) in by_document(tally, tiny.setting.reader).items():
        np.testing.assert_allclose(table[name], sums.sum(0) / counts.sum())
    again = against_controls(table, tally, tiny.setting.reader, tiny.setting.weights, ("alpha", "norm_kept"))
    pd.testing.assert_frame_equal(again, tables["dose_controls"])


def test_every_experiment_says_what_becomes_of_satformers_own_gate(tiny, dosed):
    """The gate's own experiment and the dose-response are two ways to the same removal."""
    gate = own_gate.own_gates(tiny.setting)[0]["gate"]
    removed = gate[gate["kind"] == "removed"].set_index("layer")
    tables, _ = dosed
    dose = tables["dose"]
    dose = dose[(dose["direction"] == "reference") & (dose["alpha"] == 0) & ~dose["norm_kept"]].set_index(
        "layer"
    )
    for layer in sorted(set(removed.index) & set(dose.index)):
        for name in ("delta_open", "delta_alpha"):
            assert dose.loc[layer, name] == pytest.approx(removed.loc[layer, name], abs=1e-12)
            assert dose.loc[layer, f"{name}_low"] <= dose.loc[layer, name] <= dose.loc[layer, f"{name}_high"]
    controls = tables["dose_controls"]
    assert {"delta_open", "delta_alpha"} <= set(controls["measure"])
    ladder = texts.text_ladder(tiny.setting)["ladder"]
    assert ladder.loc[ladder["layer"] == 0, "open"].isna().all()
    assert ladder.loc[ladder["layer"] > 0, "open"].between(0, 1).all()


@pytest.mark.parametrize("name", ["recovery", "co_removal"])
def test_removal_is_also_made_at_the_norm_the_stream_had(tiny, name):
    tables, _ = getattr(reach, name)(tiny.setting)
    table = tables[name]
    assert {"reference", reach.NORM_KEPT, "matched"} == set(table["direction"])
    if name == "co_removal":
        assert set(tables["co_removal_controls"]["control"]) == {"matched"}
    column = "cosine" if name == "recovery" else "kl_far"
    kept, plain = (table[table["direction"] == d][column].to_numpy() for d in (reach.NORM_KEPT, "reference"))
    assert not np.allclose(kept, plain)
