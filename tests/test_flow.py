"""The flow of V1 latents: intake and shares against loops over positions, the direct path against the model's own
modules, removal against plain hooks on an untouched model, and the verb."""

import html
import math
import pickle
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch

from analyses.figures import flow as figures
from analyses.latents import check, intake, traced
from analyses.latents.removal import (
    CleanEnd,
    LogitChange,
    PartsByDocument,
    change_size,
    contribution,
    remove,
)
from sae.dictionary import decode, encode
from sae.features import latent_features
from sae.table import v1_rows
from satlens.accumulators import GateStatistics, NllByDocument
from satlens.bootstrap import document_weights
from satlens.checkpoint import load_bridge, load_tokenizer, model_facts
from satlens.cli import main
from satlens.interventions import Calibration, zero
from satlens.run import open_run, verify
from satlens.stream import Condition, stream
from satlens.tokens import Layout, batches, corpus_from_documents
from tests.conftest import tiny_model
from tests.labelled import Positions, random_dictionary, write_dictionary, write_labels
from tests.tiny import documents, plain_nll, write_pair, write_texts

EOS, N_KV, D_HEAD, D_SAE, K = 2, 2, 6, 40, 4


@pytest.fixture(scope="module")
def world():
    """A tiny SATFormer with four query heads on two KV heads, a random dictionary of its V1, and a few documents."""
    bridge, sites = load_bridge(tiny_model())
    rows = v1_rows(bridge)
    dictionary = random_dictionary(N_KV * D_HEAD, D_SAE, K, len(rows))
    rng = torch.Generator().manual_seed(5)
    docs = [torch.randint(3, 53, (n,), generator=rng).tolist() for n in (9, 14, 3, 21, 5)]
    return SimpleNamespace(
        bridge=bridge,
        sites=sites,
        double=tiny_model(),
        rows=rows,
        dictionary=dictionary,
        codes=encode(dictionary, rows),
        corpus=corpus_from_documents(docs),
    )


def text(world, batch_size=3):
    return batches(world.corpus, Layout(), 12, batch_size, eos=EOS)


def labels(categories):
    """Accepted latents as ``open_labels`` gives them: latent -> broad kind."""
    rows = [(latent, f"fine {broad}", broad) for latent, broad in categories.items()]
    return SimpleNamespace(
        features=pd.DataFrame(rows, columns=["latent", "category", "broad"]), judge="rules"
    )


def flow_of(world, gates, labelled=None):
    """What ``trace`` would know, from parts made by hand (it opens a tokenizer, which these models have not)."""
    whole = intake.head_intake(world.dictionary, world.codes, world.rows, gates)
    path = intake.direct_path(world.bridge, world.sites)
    sizes = intake.logit_sizes(world.dictionary, path, N_KV)
    norms = intake.by_head(world.dictionary, N_KV).norm(dim=-1)
    counts = torch.from_numpy(gates.count)
    return traced.Flow(
        dictionary=world.dictionary,
        rows=world.rows,
        codes=world.codes,
        gates=gates,
        labels=labels(labelled or {1: "semantic", 7: "structural", 12: "structural"}),
        features=latent_features(world.dictionary, world.rows, counts, world.codes),
        whole=whole,
        path=path,
        query_size=sizes.numpy(),
        intake=(whole.activation * norms[:, None]).numpy(),
        score=(whole.activation * intake.kv_sizes(sizes, N_KV)).numpy(),
        texts=[f"<{i}>" for i in range(53)],
    )


def activations(world, token):
    """Active latents of a token id, with their activations, by the definition of a Top-K SAE."""
    d = world.dictionary
    pre = (world.rows[token] - d.b_dec) @ d.W_enc + d.b_enc
    order = pre.argsort(descending=True)[:K].tolist()
    return {latent: float(pre[latent]) for latent in order if pre[latent] > 0}


@pytest.mark.parametrize("signed", [False, True])
def test_intake_and_shares_equal_a_loop_over_positions(world, signed):
    made = Positions(n_ids=53, n=120, signed=signed)
    flow = flow_of(world, made.sums())
    cut = world.dictionary.W_dec.double().view(D_SAE, N_KV, D_HEAD)
    bias = world.dictionary.b_dec.double().view(N_KV, D_HEAD)
    taken, share = np.zeros((D_SAE, 3, N_KV)), np.zeros((D_SAE, 3, N_KV))
    total, biased = np.zeros((3, N_KV)), np.zeros((3, N_KV))
    for token, alpha in zip(made.token, made.alpha, strict=True):
        v1 = world.rows[token].double().view(N_KV, D_HEAD)
        for head in range(N_KV):
            length = float(v1[head].norm())
            total[:, head] += alpha[:, head] * length
            biased[:, head] += alpha[:, head] * float(bias[head] @ v1[head]) / length
            for latent, act in activations(world, token).items():
                taken[latent, :, head] += alpha[:, head] * act * float(cut[latent, head].norm())
                along = float(act * cut[latent, head] @ v1[head]) / length
                share[latent, :, head] += alpha[:, head] * along
    np.testing.assert_allclose(flow.intake, taken / 120, atol=1e-6)
    np.testing.assert_allclose(flow.whole.share, share / total, atol=1e-6)
    np.testing.assert_allclose(flow.whole.bias, biased / total, atol=1e-6)
    np.testing.assert_allclose(flow.whole.length, total / 120, rtol=1e-6)


@pytest.mark.parametrize("signed", [False, True])
def test_parts_of_a_heads_intake_add_up_to_one(world, signed):
    flow = flow_of(world, Positions(n_ids=53, signed=signed).sums())
    shares = traced.head_shares(flow)
    np.testing.assert_allclose(shares.sum(-1), 1, atol=1e-12)
    assert shares.shape == (3, N_KV, len(traced.PARTS))
    single = flow.whole.share.numpy()
    np.testing.assert_allclose(shares[..., traced.PARTS.index("semantic")], single[1])
    np.testing.assert_allclose(shares[..., traced.PARTS.index("structural")], single[7] + single[12])
    assert (shares[..., traced.PARTS.index("functional")] == 0).all()
    table = traced.shares_table(flow, None, None)
    assert table.groupby(["layer", "kv_head"])["share"].sum().tolist() == pytest.approx([1.0] * 6)
    assert table["low"].isna().all()


def test_parts_of_every_token_add_up_to_the_length_of_its_v1(world):
    parts = traced.token_parts(flow_of(world, Positions(n_ids=53).sums()))
    expected = world.rows.double().unflatten(1, (N_KV, D_HEAD)).norm(dim=-1)
    torch.testing.assert_close(parts.sum(-1), expected, rtol=0, atol=1e-12)


def test_chunks_change_nothing(world, monkeypatch):
    gates = Positions(n_ids=53).sums()
    whole, parts = flow_of(world, gates), traced.token_parts(flow_of(world, gates))
    monkeypatch.setattr(intake, "CHUNK_VALUES", 100)
    small = flow_of(world, gates)
    np.testing.assert_allclose(small.whole.share, whole.whole.share, atol=1e-14)
    np.testing.assert_allclose(small.score, whole.score, rtol=1e-12)
    assert torch.equal(traced.token_parts(small), parts)


def test_a_head_that_is_shut_takes_in_nothing_and_has_no_shares(world):
    made = Positions(n_ids=53)
    made.alpha[:, 1, 0] = 0
    flow = flow_of(world, made.sums())
    assert np.isnan(traced.head_shares(flow)[1, 0]).all()
    assert (flow.score[:, 1, 0] == 0).all() and flow.whole.length[1, 0] == 0
    tops = traced.top_latents(flow)
    assert len(tops[(tops["layer"] == 2) & (tops["kv_head"] == 0)]) == 0
    assert (1, 0) not in check.chosen_heads(flow, 6) and len(check.chosen_heads(flow, 6)) == 5


def test_direct_path_goes_through_the_models_own_output_map_norm_gain_and_head(world):
    path = intake.direct_path(world.bridge, world.sites)
    sizes = intake.logit_sizes(world.dictionary, path, N_KV)
    model = world.double
    for at, layer in enumerate((1, 2, 3)):
        for head in range(4):
            vector = world.dictionary.W_dec[5].view(N_KV, D_HEAD)[head // 2]
            z = torch.zeros(4, D_HEAD)
            z[head] = vector
            with torch.no_grad():
                written = model.model.layers[layer].attn.o_proj(z.flatten()) * model.model.norm.weight
                logits = model.lm_head(written)
            centred = logits - logits.mean()
            torch.testing.assert_close(path.logits(at, head, vector[None])[0], centred, rtol=0, atol=1e-5)
            assert float(sizes[5, at, head]) == pytest.approx(float(centred.square().mean().sqrt()), rel=1e-4)
    together = intake.kv_sizes(sizes, N_KV)
    assert float(together[5, 0, 1]) == pytest.approx(math.hypot(float(sizes[5, 0, 2]), float(sizes[5, 0, 3])))


def test_a_score_is_intake_times_logit_size(world):
    made = Positions(n_ids=53)
    flow = flow_of(world, made.sums())
    table = traced.top_latents(flow)
    row = table[(table["layer"] == 2) & (table["kv_head"] == 1)].iloc[0]
    assert row["score"] == flow.score[:, 1, 1].max() and row["rank"] == 0
    assert row["score"] == pytest.approx(row["intake"] * row["logit_size"])
    logits = flow.path.logits(
        1, int(row["head"]), world.dictionary.W_dec[row["latent"]].view(N_KV, D_HEAD)[1:]
    )[0]
    assert row["promoted"].split()[0] == f"<{int(logits.argmax())}>"
    assert row["suppressed"].split()[0] == f"<{int(logits.argmin())}>"
    assert row["head"] in (2, 3)
    seen = [
        token for token in range(53) if row["latent"] in activations(world, token) and token in made.token
    ]
    strongest = max(seen, key=lambda token: activations(world, token)[row["latent"]])
    assert row["tokens"].split()[0] == f"<{strongest}>"
    assert row["positions"] == sum(token in seen for token in made.token)


def test_a_gate_below_zero_turns_a_latents_direction_around(world):
    made = Positions(n_ids=53)
    made.alpha[:] = -np.abs(made.alpha)
    flow, mirrored = flow_of(world, made.sums()), Positions(n_ids=53)
    mirrored.alpha[:] = np.abs(mirrored.alpha)
    first, second = traced.top_latents(flow), traced.top_latents(flow_of(world, mirrored.sums()))
    assert (first["score"] < 0).all() and first["latent"].tolist() == second["latent"].tolist()
    assert first["promoted"].str.split().str[0].tolist() == second["suppressed"].str.split().str[0].tolist()


def test_top_heads_are_those_with_the_largest_scores(world):
    gates = Positions(n_ids=53).sums()
    latent = int(flow_of(world, gates).score.sum((1, 2)).argmax())
    flow = flow_of(world, gates, {latent: "semantic"})
    table = traced.top_heads(flow)
    scores = flow.score[latent].ravel()
    order = np.argsort(-scores)[:5]
    assert [(row.layer - 1) * N_KV + row.kv_head for row in table.itertuples()] == order.tolist()
    assert table["part_of_latent"].tolist() == pytest.approx((scores[order] / scores.sum()).tolist())


def test_spaces_are_seen_and_long_runs_counted():
    assert traced.visible(" a b") == "␣a␣b" and traced.visible(" " * 23 + "if") == "␣×23if"


def contribution_of(world, latents, head):
    return contribution(world.dictionary, world.codes, torch.tensor(latents), head, N_KV)


def test_contributions_are_activation_times_decoder_row_and_add_up_to_the_reconstruction(world):
    cut = world.dictionary.W_dec.view(D_SAE, N_KV, D_HEAD)
    table = contribution_of(world, [5, 9], 1)
    for token in range(53):
        active = activations(world, token)
        expected = sum((active.get(latent, 0.0) * cut[latent, 1] for latent in (5, 9)), torch.zeros(D_HEAD))
        torch.testing.assert_close(table[token], expected, rtol=0, atol=1e-5)
    whole = contribution_of(world, list(range(D_SAE)), 1) + world.dictionary.b_dec.view(N_KV, D_HEAD)[1]
    decoded = decode(world.dictionary, world.codes).view(-1, N_KV, D_HEAD)[:, 1]
    torch.testing.assert_close(whole, decoded, rtol=0, atol=1e-5)


def measured(world, edit, batch_size=3):
    """NLL by document under an edit, its logit change, and the clean NLL."""
    n = world.corpus.n_documents
    end = CleanEnd(3)
    clean = Condition(name="clean", accumulators=(NllByDocument(n), end))
    kept = (NllByDocument(n), LogitChange(n, end, change_size(world.bridge)))
    stream(
        world.bridge,
        world.sites,
        text(world, batch_size),
        [clean, Condition(name="x", edits=(edit,), accumulators=kept)],
    )
    return kept[0].nll, kept[1].total, clean.accumulators[0].nll


def test_taking_all_of_v1_from_a_head_is_shutting_its_gate(world):
    everything = contribution_of(world, list(range(D_SAE)), 1) + world.dictionary.b_dec.view(N_KV, D_HEAD)[1]
    error = (world.rows - decode(world.dictionary, world.codes)).view(-1, N_KV, D_HEAD)[:, 1]
    nothing = Calibration(mean=torch.zeros(4, N_KV), sample=torch.zeros(4, N_KV, 1))
    nll, change, clean = measured(world, remove(2, 1, everything + error))
    shut, shut_change, _ = measured(world, zero(2, (1,), nothing, 0))
    torch.testing.assert_close(nll, shut, rtol=0, atol=1e-4)
    torch.testing.assert_close(change, shut_change, rtol=0, atol=1e-3)
    assert (shut - clean).abs().max() > 1e-2


@pytest.mark.parametrize("layer", [1, 3])
def test_removal_equals_a_hook_on_an_untouched_model(world, layer):
    table = contribution_of(world, list(range(0, D_SAE, 3)), 0)
    nll, change, clean = measured(world, remove(layer, 0, table))
    expected, moved, base = (torch.zeros(world.corpus.n_documents, dtype=torch.float64) for _ in range(3))
    for batch in text(world, 1):
        ids = batch.input_ids

        def edit(module, inputs, out, ids=ids):
            out = out.clone()
            out[0, :, 0] -= table[ids[0]]
            return out

        with torch.no_grad():
            plain, before = world.double(ids).logits.double(), plain_nll(world.double, ids)[0]
            handle = world.double.model.layers[layer].attn.first_value.register_forward_hook(edit)
            changed, after = world.double(ids).logits.double(), plain_nll(world.double, ids)[0]
            handle.remove()
        size = (changed - plain)[0].std(dim=-1, correction=0)
        for pos in range(ids.shape[1] - 1):
            if batch.scored[0, pos]:
                doc = int(batch.doc[0, pos + 1])
                expected[doc] += after[pos]
                base[doc] += before[pos]
                moved[doc] += size[pos]
    torch.testing.assert_close(nll, expected, rtol=0, atol=1e-4)
    torch.testing.assert_close(clean, base, rtol=0, atol=1e-4)
    torch.testing.assert_close(change, moved, rtol=1e-3, atol=1e-4)
    assert moved.sum() > 0.1


def test_removal_does_not_depend_on_batching(world):
    edit = remove(1, 1, contribution_of(world, [0, 3, 6], 1))
    for one, other in zip(measured(world, edit, 1), measured(world, edit, 50), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-4)


def test_halves_of_the_rows_add_up_after_travelling_between_processes(world, real):
    edit = remove(1, 1, contribution_of(world, [0, 3, 6], 1))
    n, travelled = world.corpus.n_documents, []
    for rank in range(2):
        end = CleanEnd(3)
        parts = PartsByDocument(n, (1, 2, 3), traced.token_parts(real))
        change = LogitChange(n, end, change_size(world.bridge))
        clean = Condition(name="clean", accumulators=(NllByDocument(n), end, parts))
        edited = Condition(name="x", edits=(edit,), accumulators=(NllByDocument(n), change))
        rows = batches(world.corpus, Layout(), 12, 2, eos=EOS, rank=rank, world=2)
        stream(world.bridge, world.sites, rows, [clean, edited])
        travelled.append(pickle.loads(pickle.dumps((change, parts, end))))
    for mine, other in zip(*travelled, strict=True):
        mine.merge(other)
    change, parts, _ = travelled[0]
    torch.testing.assert_close(change.total, measured(world, edit)[1], rtol=0, atol=1e-4)
    expected = torch.from_numpy(traced.head_shares(real) * real.whole.length.numpy()[..., None])
    torch.testing.assert_close(parts.total.sum(0) / real.gates.count.sum(), expected, rtol=0, atol=1e-6)


@pytest.fixture(scope="module")
def real(world):
    """The flow that follows from the gates the model really has on these documents."""
    stats = GateStatistics(world.corpus.n_documents, world.sites)
    stream(world.bridge, world.sites, text(world), [Condition(name="clean", accumulators=(stats,))])
    sums = Positions(n_ids=53).sums()
    gates = type(sums)(
        run=None,
        layers=(1, 2, 3),
        count=stats.token_count.numpy().astype(np.int64),
        sum=stats.token_sum.numpy(),
        pairs=sums.pairs,
    )
    return flow_of(world, gates)


def test_intake_split_in_the_pass_equals_intake_from_stored_sums(world, real):
    parts = PartsByDocument(world.corpus.n_documents, (1, 2, 3), traced.token_parts(real))
    stream(world.bridge, world.sites, text(world), [Condition(name="clean", accumulators=(parts,))])
    total = parts.total.sum(0)
    shares = (total / total.sum(-1, keepdim=True)).numpy()
    np.testing.assert_allclose(shares, traced.head_shares(real), atol=1e-9)
    assert (parts.total.sum((1, 2, 3)) > 0).all()  # every document has its own


def test_the_plan_takes_strongest_latents_and_controls_that_are_about_as_frequent(real):
    chosen = check.plan(real, 3, 2, 0)
    assert {removal.at for removal in chosen} == {0, 1, 2}  # the best head of every layer comes first
    active = real.features.n_active.numpy()
    for at, head in check.chosen_heads(real, 3):
        here = [removal for removal in chosen if (removal.at, removal.kv_head) == (at, head)]
        best = traced.strongest(real, at, head)
        single = {kind: [r.latent for r in here if r.kind == kind] for kind in (check.TOP, check.CONTROL)}
        groups = {r.kind: r.latents for r in here if r.latent is None}
        assert single[check.TOP] == best[:2] and groups[check.TOP_GROUP] == tuple(best)
        controls = groups[check.CONTROL_GROUP]
        assert single[check.CONTROL] == list(controls[:2]) and len(set(controls)) == len(controls)
        assert not set(controls) & set(best) and (active[list(controls)] > 0).all()
        assert groups[check.LABELLED] == (1, 7, 12) and groups[check.ALL] == ()
    assert check.plan(real, 3, 2, 0) == chosen != check.plan(real, 3, 2, 1)


def test_controls_come_from_the_nearest_by_frequency(real, monkeypatch):
    monkeypatch.setattr(check, "N_MATCHED", 1)
    active = real.features.n_active.numpy()
    wanted = traced.strongest(real, 0, 0)[:1]
    (found,) = check.matched(real, wanted, np.random.default_rng(0))
    others = [i for i in range(D_SAE) if i not in wanted and active[i] > 0]
    gaps = {i: abs(math.log(active[i] / active[wanted[0]])) for i in others}
    assert gaps[found] == min(gaps.values())


def test_rank_correlation_averages_ties():
    rng = np.random.default_rng(0)
    for _ in range(5):
        x, y = rng.integers(0, 4, 12).astype(float), rng.random(12)
        assert check.spearman(x, y) == pytest.approx(pd.Series(x).rank().corr(pd.Series(y).rank()))
    assert check.spearman(np.arange(4.0), np.arange(4.0) ** 3) == 1
    assert np.isnan(check.spearman(np.ones(4), np.arange(4.0)))


def test_correlation_interval_resamples_documents_and_removals_together(real):
    rng = np.random.default_rng(1)
    n_docs, count = 5, torch.tensor([3.0, 8, 5, 9, 4], dtype=torch.float64)
    chosen = [r for r in check.plan(real, 2, 2, 0) if r.latent is not None]
    effects = torch.from_numpy(rng.random((n_docs, len(chosen))))
    clean = Condition(name="clean", accumulators=(NllByDocument(n_docs),))
    clean.accumulators[0].count = count
    checks = []
    for at, removal in enumerate(chosen):
        nll, change = NllByDocument(n_docs), LogitChange(n_docs, CleanEnd(3), torch.dist)
        nll.nll, change.total = -effects[:, at], effects[:, at].clone()
        checks.append(check.Check(removal=removal, condition=Condition(name="x", accumulators=(nll, change))))
    weights = document_weights(n_docs, 300, 4)
    table = check.check_table(real, clean, checks, weights)
    found = check.correlations(table, clean, checks, weights, 9).set_index(["predictor", "effect"])
    score = np.array([real.score[r.latent, r.at, r.kv_head] for r in chosen])
    draws, values = np.random.default_rng(9).integers(len(chosen), size=(300, len(chosen))), []
    for drawn, times in zip(draws, weights, strict=True):
        moved = (times[:, None] * effects.numpy()).sum(0) / (times * count.numpy()).sum()
        values.append(pd.Series(score[drawn]).rank().corr(pd.Series(moved[drawn]).rank()))
    row = found.loc[("score", "logit_change")]
    np.testing.assert_allclose([row["low"], row["high"]], np.nanquantile(values, [0.025, 0.975]))
    assert found.loc[("score", "delta_nll"), "spearman"] == pytest.approx(-row["spearman"])
    assert table["logit_change"].tolist() == pytest.approx((effects.sum(0) / count.sum()).tolist())


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A tiny pair, its gates, a dictionary on disk and its labels."""
    folder = tmp_path_factory.mktemp("flow")
    made = SimpleNamespace(
        folder=folder, runs=folder / "runs", text=write_texts(folder), **write_pair(folder)
    )
    made.facts = {"name": "satformer", **model_facts(made.SATFormer)}
    argv = ["gates", made.SATFormer, "--text", made.text, "--runs", made.runs]
    assert main([str(word) for word in argv]) == 0
    tokenizer = load_tokenizer(made.SATFormer)
    made.sae = folder / "sae" / "seed-0"
    dictionary = write_dictionary(made.sae, random_dictionary(16, 48, 5, len(tokenizer), 3), made.facts)
    made.digest = dictionary.digest
    seen = sorted({i for ids in tokenizer(documents(), add_special_tokens=False)["input_ids"] for i in ids})
    named = {
        5: ("Structural Punctuation", seen[:4]),
        9: ("Entity Marker Fragments", seen[2:7]),
        11: (None, seen[:2]),
    }
    made.labels = write_labels(made.runs, made.facts, named, sae_digest=made.digest)
    return made


def ask(place, capsys, *more, sae=None, labels=None):
    """Exit code, the run if there is one, and stderr."""
    argv = ["flow", place.SATFormer, "--sae", sae or place.sae, "--labels", labels or place.labels]
    argv += ["--text", place.text, "--runs", place.runs, "--resamples", "200", *more]
    code = main([str(word) for word in argv])
    out = capsys.readouterr()
    return code, open_run(out.out.strip()) if code == 0 else None, out.err


def test_the_verb_traces_and_checks(place, capsys):
    code, run, err = ask(place, capsys, "--check-heads", "3", "--check-latents", "2")
    assert code == 0, err
    assert verify(run) == []
    shares = run.tables["head_shares"]
    np.testing.assert_allclose(shares.groupby(["layer", "kv_head"])["share"].sum(), 1, atol=1e-12)
    assert ((shares["low"] <= shares["share"]) & (shares["share"] <= shares["high"])).mean() > 0.9
    table = run.tables["flow_check"]
    assert table.groupby("kind").size().to_dict() == {
        "all labelled": 3, "all of V1": 3, "control": 6, "ten controls together": 3, "top": 6, "top ten together": 3,
    }  # fmt: skip
    assert (table["logit_change"] >= 0).all()
    assert (
        (table["delta_nll_low"] <= table["delta_nll"]) & (table["delta_nll"] <= table["delta_nll_high"])
    ).all()
    whole = table[table["kind"] == "all of V1"].iloc[0]
    (ablated,) = ablation(place, capsys, int(whole["layer"]), int(whole["kv_head"]))
    assert whole["delta_nll"] == pytest.approx(ablated, abs=1e-6)
    single = table[table["latent"].notna()]
    rho = run.tables["flow_correlation"].set_index(["predictor", "effect"])["spearman"]
    expected = single["score"].rank().corr(single["logit_change"].rank())
    assert rho["score", "logit_change"] == pytest.approx(expected)
    assert set(run.figures) == set(figures.FIGURES)
    heads = run.tables["top_heads"]
    assert set(heads["latent"]) <= {5, 9} and set(heads["broad"]) <= {"structural", "semantic"}
    assert run.manifest.summary["sae_digest"] == place.digest


def ablation(place, capsys, layer, head):
    """Delta NLL of one head by a plain loop: all documents scored, its gate at 0."""
    from satlens.checkpoint import load_model

    model, tokenizer = load_model(place.SATFormer), load_tokenizer(place.SATFormer)
    docs = tokenizer(documents(), add_special_tokens=False)["input_ids"]
    run = [token for ids in docs for token in (*ids, tokenizer.eos_token_id)]
    totals, count = [0.0, 0.0], 0

    def shut(module, inputs, out):
        out = out.clone()
        out[..., head] = 0
        return out

    for start in range(0, len(run), 32):
        ids = torch.tensor([run[start : start + 32]])
        keep = ids[0, 1:] != tokenizer.eos_token_id
        if ids.shape[1] < 2:
            continue
        totals[0] += float(plain_nll(model, ids)[0][keep].sum())
        handle = model.model.layers[layer].attn.value_residual_mixing.gate.register_forward_hook(shut)
        totals[1] += float(plain_nll(model, ids)[0][keep].sum())
        handle.remove()
        count += int(keep.sum())
    yield (totals[1] - totals[0]) / count


def test_without_a_check_nothing_is_taken_away(place, capsys):
    code, run, err = ask(place, capsys, "--check-heads", "0")
    assert code == 0, err
    assert "flow_check" not in run.tables and set(run.figures) == {"head_shares", "strongest_latents"}
    assert run.tables["head_shares"]["low"].notna().all()


def test_other_text_than_that_of_the_gates_gives_no_interval_of_shares(place, capsys):
    code, run, err = ask(place, capsys, "--check-heads", "1", "--tokens", "100")
    assert code == 0 and "not the one of the gates run" in err
    assert run.tables["head_shares"]["low"].isna().all() and len(run.tables["flow_check"])


def test_the_check_can_be_limited_to_fewer_tokens(place, capsys):
    _, run, _ = ask(place, capsys, "--check-heads", "1", "--check-tokens", "150")
    n_tokens = run.tables["flow_check"]["n_tokens"].iloc[0]
    assert 0 < n_tokens <= 150 < run.manifest.summary["n_tokens"]
    assert run.tables["head_shares"]["low"].notna().all()


def test_the_same_seed_gives_the_same_bytes(place, capsys):
    runs = [ask(place, capsys, "--check-heads", "1")[1] for _ in range(2)]
    first, second = ({a.path: a.sha256 for a in run.manifest.artifacts} for run in runs)
    assert first == second


def test_what_does_not_belong_together_is_refused_in_one_line(place, capsys, tmp_path):
    facts, other = place.facts, {**place.facts, "digest": "0" * 64}
    sound = random_dictionary(16, 48, 5, 300, 3)
    write_dictionary(tmp_path / "other", sound, other)
    write_dictionary(tmp_path / "site", sound, facts, site="resid_post.3")
    write_dictionary(tmp_path / "unlabelled", random_dictionary(16, 48, 5, 300, 4), facts)
    foreign = write_labels(tmp_path, other, {5: ("Structural Punctuation", [3])}, sae_digest=place.digest)
    before = set(place.runs.iterdir())
    for words, asked in (
        ("was trained on satformer", {"sae": tmp_path / "other"}),
        ("heads re-read v1", {"sae": tmp_path / "site"}),
        ("labels another dictionary", {"sae": tmp_path / "unlabelled"}),
        ("labels another model", {"labels": foreign}),
        ("no cfg.json in", {"sae": tmp_path}),
    ):
        code, _, err = ask(place, capsys, **asked)
        assert code == 2 and words in err and err.strip().count("\n") == 0
    code, _, err = ask(place, capsys, "--gates", place.labels)
    assert code == 2 and "not of satlens gates" in err
    assert set(place.runs.iterdir()) == before


def test_a_model_without_gates_is_told_so(place, capsys):
    argv = ["flow", place.transformer, "--sae", place.sae, "--labels", place.labels, "--text", place.text]
    assert main([str(word) for word in argv]) == 2
    assert "no head of it reads V1 again" in capsys.readouterr().err


def tables(n_layers=3, n_heads=2, token="a"):
    """Small tables of every figure."""
    rng = np.random.default_rng(0)
    cells = [(layer, head) for layer in range(1, n_layers + 1) for head in range(n_heads)]
    shares = [(*cell, part, 1 / 6, 0.1, 0.2, 2.0) for cell in cells for part in traced.PARTS]
    shares[:6] = [(*row[:3], np.nan, np.nan, np.nan, 0.0) for row in shares[:6]]
    strongest = [
        (rank, 10 + rank, "Entity Marker Fragments" if rank else None, token, *cell, rng.random())
        for rank in range(3)
        for cell in cells
    ]
    checks = [
        (
            "top" if i % 2 else "control",
            1,
            0,
            i,
            0.01 * i,
            0.02 * i,
            0.01 * i,
            0.03 * i,
            1e-4 * i,
            -1e-4,
            2e-3,
        )
        for i in range(6)
    ]
    ends = [
        "logit_change",
        "logit_change_low",
        "logit_change_high",
        "delta_nll",
        "delta_nll_low",
        "delta_nll_high",
    ]
    rho = [(p, e, 0.5, 0.1, 0.9, 6) for p in check.PREDICTORS for e in check.EFFECTS]
    return {
        "head_shares": pd.DataFrame(
            shares, columns=["layer", "kv_head", "part", "share", "low", "high", "length"]
        ),
        "strongest_latents": pd.DataFrame(
            strongest, columns=["rank", "latent", "category", "tokens", "layer", "kv_head", "score"]
        ),
        "flow_check": pd.DataFrame(checks, columns=["kind", "layer", "kv_head", "latent", "score", *ends]),
        "flow_correlation": pd.DataFrame(
            rho, columns=["predictor", "effect", "spearman", "low", "high", "n_removals"]
        ),
    }


INFO = {
    "model": "SAT",
    "gate": "relu",
    "judge": "rules",
    "n_layers": 4,
    "n_tokens": 4321,
    "n_documents": 12,
    "n_tokens_check": 4321,
    "n_documents_check": 12,
    "n_latents": 40,
    "n_features": 3,
}


@pytest.mark.parametrize("shape", [(3, 2), (1, 1), (11, 24)], ids=str)
@pytest.mark.parametrize("name", figures.FIGURES)
def test_every_figure_says_what_it_shows_and_is_the_same_each_time(name, shape):
    fig = figures.FIGURES[name](tables(*shape), INFO)
    assert fig.layout.title.text and len(fig.layout.meta["caption"]) > 60
    assert "4,321 tokens in 12 documents" in fig.layout.title.subtitle.text
    assert fig.layout.yaxis.title.text
    again = figures.FIGURES[name](tables(*shape), INFO)
    assert fig.to_json(remove_uids=False) == again.to_json(remove_uids=False)


def test_token_text_is_data_in_a_figure():
    nasty = '<b>x</b>&<script>alert("1")</script>'
    labels = figures.strongest_latents(tables(token=nasty), INFO).layout.yaxis.ticktext
    assert all("<" not in label and '"' in label for label in labels)  # plotly would show &quot; as it stands
    assert html.unescape(labels[0]) == f"10: {nasty}" and labels[1].startswith("11 Entity Marker Fragments: ")


def test_shares_stack_to_one_and_a_shut_head_is_named():
    fig = figures.head_shares(tables(), INFO)
    assert [trace.name for trace in fig.data[:6]] == list(traced.PARTS) and fig.layout.barmode == "relative"
    total = np.nansum([trace.y for trace in fig.data[6:12]], axis=0)
    np.testing.assert_allclose(total, 1)
    assert sum(note.text == "shut" for note in fig.layout.annotations) == 1


def test_points_at_zero_stay_on_the_logarithmic_axes():
    fig = figures.check(tables(), INFO)
    control = next(trace for trace in fig.data if trace.name == figures.KINDS["control"])
    assert min(control.x) > 0 and min(control.y) > 0 and len(control.x) == 3
    assert "Spearman 0.50 [0.10, 0.90], 6 removals" in [note.text for note in fig.layout.annotations]
