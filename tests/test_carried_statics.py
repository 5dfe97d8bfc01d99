"""Every static statistic on planted models: what was put in comes out, and slow loops agree where it was not."""

from typing import Any

import numpy as np
import pytest
import torch
from planted import LAYERS, MLP, STYLES, VOCAB, plant

from satlens.carried.documents import SKIP, DocumentSet, DocumentSets
from satlens.carried.mean import stability_table
from satlens.carried.opening import read_model
from satlens.carried.resting import average_ranks, spearman
from satlens.carried.statics import Statics, measure, tables, unit_means
from satlens.carried.sums import far_sums, inverse
from satlens.errors import SatlensError, UserError


def same_documents(documents: DocumentSet) -> DocumentSets:
    return DocumentSets(documents, documents, True)


@pytest.fixture(scope="module", params=STYLES)
def found(request: pytest.FixtureRequest) -> tuple[Any, Statics, dict[str, Any]]:
    made = plant(request.param)
    statics = measure(read_model(made.model, None), same_documents(made.documents), batch_size=3)
    return made, statics, tables(statics, 200, 0)


def near(one: Any, other: Any, loose: float = 2e-3) -> None:
    one, other = np.asarray(one, dtype=float), np.asarray(other, dtype=float)
    assert np.abs(one - other).max() <= loose * max(1.0, np.abs(other).max())


def test_means_and_share_are_the_planted_ones(found):
    made, statics, out = found
    m = made.mean(made.stream)
    near(statics.fit["resid"].sum(0) / statics.fit["count"].sum(), m)
    near(statics.fit["read"].sum(0) / statics.fit["count"].sum(), made.mean(made.read))
    unit = m[:-1] / np.linalg.norm(m[:-1], axis=-1, keepdims=True)
    length = np.linalg.norm(made.stream[:-1], axis=-1)
    weight = made.counts / made.counts.sum()
    table = out["carried_object"]
    near(table["share"], np.einsum("ltd,ld->lt", made.stream[:-1], unit) / length @ weight)
    near(table["stream_norm"], length @ weight)
    near(table["m_norm"], np.linalg.norm(m[:-1], axis=-1))
    near(table["b_norm"], np.linalg.norm(made.mean(made.read), axis=-1))
    near(out["carried_rotation"]["cosine"], (unit @ unit.T).ravel())


def test_couplings_biases_dominance_and_duty_are_the_planted_ones(found):
    made, _, out = found
    table = out["carried_resting"].query("kind == 'mlp'")
    c, bias = made.coupling, made.bias
    near(table["coupling"], np.median(c, axis=1))
    near(table["bias"], np.median(bias, axis=1))
    near(table["resting"], np.median(c + bias, axis=1))
    near(table["dominance"], (np.abs(c) > np.abs(bias)).mean(1))
    near(table["negative"], (c + bias < 0).mean(1))
    near(table["duty"], made.duty.mean(1), 1e-9)
    near(table["duty_median"], np.median(made.duty, axis=1), 1e-9)
    gates = out["carried_gates"].query("kind == 'mlp'")
    near(gates["coupling"], c.ravel())
    near(gates["mean_pre"], (c + bias).ravel())
    near(gates["duty"], made.duty.ravel(), 1e-9)


def test_resting_term_is_the_measured_mean_pre_activation(found):
    _, _, out = found
    assert (out["carried_resting"]["linearity_error"] < 1e-5).all()


def test_firing_is_counted_after_the_activation(found):
    made, statics, out = found
    for layer, row in enumerate(out["carried_resting"].query("kind == 'mlp'").itertuples()):
        read = statics.reads[layer]
        z = made.read[layer] @ read.weight.double().numpy().T + made.bias[layer]
        post = read.activate(torch.from_numpy(z)).numpy()
        weight = made.counts / made.counts.sum()
        near(row.firing_05, ((post > 0.5).mean(1)) @ weight, 1e-9)
        near(row.firing_1, ((post > 1).mean(1)) @ weight, 1e-9)


def test_writes_are_the_planted_constants_and_add_up(found):
    made, _, out = found
    m = made.mean(made.stream)[LAYERS - 1]
    table = out["carried_writes"]
    for write in ("attention", "mlp"):
        rows = table[table["write"] == write]
        near(rows["norm"], np.linalg.norm(made.writes[write], axis=1))
        near(rows["share"][:-1], made.writes[write][:-1] @ m / (m @ m))
        near(rows["constant_share"][:-1], made.writes[write][:-1] @ m / (m @ m))
        assert rows["share"].isna().iloc[-1]
    if made.style.block != "post-norm":
        near(table["share"].sum(), 1.0)
        near(out["carried_sources"].groupby("target")["share"].sum(), np.ones(LAYERS))


def test_parameter_share_follows_every_constant_through_the_norm_that_is_read(found):
    made, _, out = found
    weight = made.counts / made.counts.sum()
    b = made.mean(made.read)
    constant = np.einsum("ltd,t->ld", made.constant, weight)
    table = out["carried_parameter_share"]
    near(table["share"], np.einsum("ld,ld->l", constant, b) / np.square(b).sum(1))
    assert table["reason"].isna().all()
    if made.style.centred:
        assert (table["share"].abs() > 0.01).all()
    if not any(np.abs(writes).max() for writes in made.writes.values()):
        near(table["share"], np.zeros(LAYERS))


def test_constant_writes_have_constant_share_one_along_the_direction(found):
    made, _, out = found
    table = out["carried_constant_share"]
    for row in table[table["write"] == "mlp"].itertuples():
        if np.abs(made.writes["mlp"][row.layer]).max():
            near(row.constant_share, 1.0)


def test_ledger_table_names_norm_and_style(found):
    made, _, out = found
    table = out["carried_ledger"]
    assert set(table["block"]) == {made.style.block} and set(table["norm"]) == {made.style.mlp_norm}
    near(table["mlp_bias"], np.linalg.norm(made.writes["mlp"], axis=1))


def test_batch_size_and_merging_change_nothing():
    made = plant("gpt2")
    reader, sets = read_model(made.model, None), same_documents(made.documents)
    whole = measure(reader, sets, batch_size=7)
    small = measure(reader, sets, batch_size=1)

    def two_processes(first: Any) -> Any:
        from satlens.carried.document_sums import Sums

        fresh = Sums(
            reader, first_entries, made.documents, means=first.means,
            covariances=whole.geometry if first.means is not None else (),
        )  # fmt: skip
        first.merge(fresh.run(made.documents, 2, None, 1, 2))
        return first

    first_entries = whole.entries
    merged = measure(reader, sets, batch_size=2, gather=two_processes, place=(0, 2))
    for name, values in whole.evaluate.items():
        near(small.evaluate[name], values, 1e-6)
        near(merged.evaluate[name], values, 1e-6)


def test_resampled_intervals_hold_the_estimate_and_vanish_for_one_document():
    made = plant("qwen2")
    reader = read_model(made.model, None)
    out = tables(measure(reader, same_documents(made.documents)), 300, 0)["carried_resting"]
    assert (out["duty_low"] <= out["duty"]).all() and (out["duty"] <= out["duty_high"]).all()
    assert (out["duty_low"] < out["duty_high"]).all()
    alone = made.documents.take([6])
    single = tables(measure(reader, same_documents(alone)), 300, 0)
    assert single["carried_resting"]["duty_low"].isna().all()
    assert single["carried_object"]["share_low"].isna().all()
    assert single["carried_rotation"]["cosine_low"].isna().all()


def test_same_seed_gives_the_same_tables():
    made = plant("llama")
    statics = measure(read_model(made.model, None), same_documents(made.documents))
    one, other = tables(statics, 200, 3), tables(statics, 200, 3)
    assert all(one[name].equals(other[name]) for name in one)
    assert not one["carried_rank"].equals(tables(statics, 200, 4)["carried_rank"])


def test_value_gates_of_satformer_rest_on_the_attention_norms_mean():
    made = plant("satformer")
    reader = read_model(made.model, None)
    statics = measure(reader, same_documents(made.documents))
    table = tables(statics, 200, 0)["carried_value_gates"]
    logits: dict[int, list[Any]] = {1: [], 2: []}
    for place in range(len(made.documents.ids)):
        ids = torch.from_numpy(made.documents.ids[place])[None]
        hooks = [
            ("value_pre", layer, lambda x, to=seen: to.append(x[0, SKIP:].double()))
            for layer, seen in logits.items()
        ]
        reader.run(ids, hooks)
    for layer, seen in logits.items():
        z = torch.cat(seen).numpy()
        rows = table[table["layer"] == layer]
        near(rows["resting"], z.mean(0), 1e-5)
        near(rows["duty"], (z > 0).mean(0), 1e-9)
        alpha = reader.read(layer, "value").activate(torch.from_numpy(z)[None])[0].numpy()
        near(rows["duty"], 1 - (alpha == 0).mean(0), 1e-9)


def test_constant_share_agrees_with_a_slow_loop(make_model):
    reader = read_model(make_model("transformer", vocab_size=VOCAB), None)
    documents = plant("llama").documents
    statics = measure(reader, same_documents(documents), batch_size=2)
    table = tables(statics, 200, 0)["carried_constant_share"].set_index(["layer", "write", "channel"])
    m = unit_means(statics.fit)[2]
    writes: list[np.ndarray] = []
    for ids in documents.ids:
        reader.run(
            torch.from_numpy(ids)[None],
            [("attn_out", 2, lambda x: writes.append(x[0, SKIP:].double().numpy()))],
        )
    even, odd = np.concatenate(writes[::2]), np.concatenate(writes[1::2])
    every = np.concatenate(writes)
    along = (even @ m).mean() * (odd @ m).mean() / np.square(every @ m).mean()
    rest = [x - np.outer(x @ m, m) for x in (even, odd, every)]
    orthogonal = rest[0].mean(0) @ rest[1].mean(0) / np.square(rest[2]).sum(1).mean()
    near(table.loc[(2, "attention", "along"), "constant_share"], along, 1e-5)
    near(table.loc[(2, "attention", "orthogonal"), "constant_share"], orthogonal, 1e-5)


def test_covariance_and_proxies_agree_with_the_streams(make_model):
    from satlens.carried.geometry import _covariance, proxies

    reader = read_model(make_model("transformer", vocab_size=VOCAB), None)
    documents = plant("llama").documents
    statics = measure(reader, same_documents(documents), batch_size=3, layers=[1])
    streams: dict[int, list[np.ndarray]] = {layer: [] for layer in range(5)}
    for ids in documents.ids:
        hooks = [
            ("resid", layer, lambda x, to=seen: to.append(x[0].double().numpy()))
            for layer, seen in streams.items()
        ]
        reader.run(torch.from_numpy(ids)[None], hooks)
    strided = np.concatenate([x[[t for t in range(SKIP, len(x)) if t % 4 == 0]] for x in streams[1]])
    near(_covariance(statics, 1), np.cov(strided.T, bias=True), 1e-5)
    found = proxies(statics, 1)
    first = {layer: np.mean([x[0] for x in seen], axis=0) for layer, seen in streams.items()}
    where = max(range(4), key=lambda layer: np.abs(first[layer]).max())
    near(found["first token"][0], first[where], 1e-5)
    near(found["sink"][0], np.mean([x[:SKIP].mean(0) for x in streams[1]], axis=0), 1e-5)
    square = np.square(np.concatenate([x[SKIP:] for x in streams[4]])).mean(0)
    assert set(found["outlier"][1]) == set(np.argsort(-square)[:20])


def test_kinds_are_compared_where_each_has_two_documents():
    made = plant("llama")
    statics = measure(read_model(made.model, None), same_documents(made.documents))
    table = stability_table(statics, np.ones((100, 7), dtype=np.int32), 0)
    kinds = table[table["comparison"] == "kinds"]

    def mean_of(wanted: str) -> Any:
        of_kind = zip(made.documents.ids, made.documents.kinds, strict=True)
        return made.stream[0][np.concatenate([ids[SKIP:] for ids, kind in of_kind if kind == wanted])].mean(0)

    one, other = mean_of("a"), mean_of("b")
    near(kinds["cosine"].iloc[0], one @ other / np.linalg.norm(one) / np.linalg.norm(other), 1e-5)
    assert (kinds["n_first"] == 4).all() and (kinds["n_second"] == 3).all()
    assert set(table[table["comparison"] == "halves"]["n_second"]) == {4}


def test_ranks_share_ties_and_match_a_slow_count():
    values = np.array([[3.0, 1.0, 3.0, 2.0, 1.0, 1.0]])
    slow = [
        np.mean([1 + (values[0] < v).sum() + i for i in range((values[0] == v).sum())]) - 1 for v in values[0]
    ]
    assert average_ranks(values)[0].tolist() == slow
    assert np.isnan(spearman(average_ranks(np.ones((1, 6))), values)).all()
    assert spearman(average_ranks(values), 5 * values**3)[0, 0] == pytest.approx(1.0)


def test_far_sums_are_exact_on_integers():
    x = torch.randint(-9, 9, (3, 32, 5), generator=torch.Generator().manual_seed(0)).float()
    far = torch.rand(3, 32, generator=torch.Generator().manual_seed(1)).round()
    assert torch.equal(far_sums(x, far), (x.double() * far[..., None].double()).sum(1))


@pytest.mark.parametrize("name", ["gelu", "gelu_new", "silu", "relu", "gelu_pytorch_tanh"])
def test_inverse_is_where_an_activation_crosses_its_level(name):
    from transformers.activations import ACT2FN

    for level in (0.5, 1.0):
        at = inverse(ACT2FN[name], level)
        below, above = ACT2FN[name](torch.tensor([at - 1e-4, at + 1e-4], dtype=torch.float64))
        assert below < level < above
    assert inverse(torch.sigmoid, 1.0) == float("inf")


def test_overflow_stops_the_run_with_layer_and_site():
    made = plant("gpt2")
    reader = read_model(made.model, None)
    with torch.no_grad():
        made.model.transformer.h[1].mlp.c_proj.bias[0] = float("inf")
    with pytest.raises(SatlensError, match=r"values of mlp_out in layer 1 are not finite"):
        measure(reader, same_documents(made.documents))


def test_a_layer_that_is_not_there_is_refused():
    made = plant("llama")
    with pytest.raises(UserError, match="no layer 3"):
        measure(read_model(made.model, None), same_documents(made.documents), layers=[3])
    assert made.coupling.shape == (LAYERS, MLP)
