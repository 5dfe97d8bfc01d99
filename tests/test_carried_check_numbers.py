"""Numbers of the carried direction by other roads: a model that is exactly location-scale, numpy, scipy, plain text."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from planted import LAYERS, plant
from scipy.stats import spearmanr

from satlens.carried import geometry
from satlens.carried.documents import SKIP, DocumentSet, DocumentSets
from satlens.carried.fit import fit
from satlens.carried.forecast import clean_pass, forecast
from satlens.carried.opening import read_model
from satlens.carried.prediction import predict
from satlens.carried.resting import average_ranks, spearman
from satlens.carried.setting import new_setting
from satlens.carried.statics import measure, tables
from tests.conftest import tiny_model

D, GATES, VOCAB = 16, 20, 600
ALPHAS = (0.0, 0.5, 1.0, 1.5, 2.0)
EPSILON = 1e8
"""So large that the norm divides every position by the same number: then gates are exactly location-scale."""


@pytest.fixture(scope="module")
def scaled():
    """Token t embeds as ``a_t`` along one direction and no block writes: gate n of layer 1 has ``c_n a_t + beta_n``."""
    rng = np.random.default_rng(0)
    config = transformers.LlamaConfig(
        hidden_size=D, num_hidden_layers=2, num_attention_heads=2, intermediate_size=GATES, vocab_size=VOCAB,
        max_position_embeddings=256, rms_norm_eps=EPSILON, mlp_bias=True, tie_word_embeddings=False,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    a, c, beta = rng.normal(2, 1, VOCAB), rng.uniform(-1.5, 1, GATES), rng.uniform(-0.5, 1, GATES)
    along = rng.normal(size=D)
    along /= np.linalg.norm(along)
    block = model.model.layers[1]
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(torch.from_numpy(np.outer(a, along)))
        for layer in model.model.layers:
            for part in (layer.self_attn.o_proj, layer.mlp.down_proj):
                part.weight.zero_()
            layer.mlp.down_proj.bias.zero_()
        block.post_attention_layernorm.weight.fill_(EPSILON**0.5)
        across = rng.normal(size=(GATES, D))
        across -= np.outer(across @ along, along)
        block.mlp.gate_proj.weight.copy_(torch.from_numpy(np.outer(c, along) + across))
        block.mlp.gate_proj.bias.copy_(torch.from_numpy(beta))
    ids = tuple(rng.integers(2, VOCAB, 256) for _ in range(12))
    docs = DocumentSet(ids=ids, names=("d",) * 12, kinds=("a",) * 12)
    far = np.concatenate([i[SKIP:] for i in ids])
    reader = read_model(model, None)
    setting = new_setting(reader, fit(reader, docs, gates=(1,)), docs, (1,), n_resamples=50)
    z = np.array([alpha * np.outer(a[far], c) + beta for alpha in ALPHAS])
    return SimpleNamespace(setting=setting, docs=docs, z=z)


def test_where_the_dose_is_exactly_location_scale_prediction_is_measurement(scaled):
    (found,) = clean_pass(scaled.setting, scaled.docs, ALPHAS)
    made = predict(found)
    np.testing.assert_allclose(made.location, scaled.z.mean(1), atol=2e-4)
    np.testing.assert_allclose(
        made.scale, scaled.z.std(1), atol=3e-3
    )  # at 0 what float32 leaves of a variance
    silu = F.silu(torch.from_numpy(scaled.z)).numpy()
    truth = np.stack([(scaled.z > 0).mean(1), (silu > 0.5).mean(1), (silu > 1).mean(1)], axis=1)
    # own shapes are exact but within a bin, which holds 1/20 of the positions at most: half of that
    assert np.abs(made.above["empirical"].numpy() - truth).max() < 0.025
    table = forecast(scaled.setting, scaled.docs, ALPHAS)[0]["prediction"]
    for norm in ("rescaled", "held"):  # sigma does not move, so that the two are one
        rows = table[(table["shape"] == "empirical") & (table["norm"] == norm)]
        measured = rows.pivot(index="alpha", columns="level", values="measured")
        np.testing.assert_allclose(measured[["duty", "firing", "firing_hard"]], truth.mean(-1), atol=1e-9)
        assert rows["error"].abs().max() < 2e-3


def test_rank_correlations_are_scipys_with_ties():
    rng = np.random.default_rng(1)
    one, other = rng.integers(0, 5, (3, 60)).astype(float), rng.integers(0, 4, (2, 60)).astype(float)
    expected = [[spearmanr(x, y).statistic for y in other] for x in one]
    np.testing.assert_allclose(spearman(average_ranks(one), other), expected, atol=1e-12)


def test_first_positions_enter_no_far_number():
    """What stands at positions below 16 may be anything: with attention off, no statistic but the sinks' moves."""
    model = tiny_model("transformer", attention_disabled=True)
    reader, rng = read_model(model, None), np.random.default_rng(3)
    ids = [rng.integers(3, 53, 30 + 2 * i) for i in range(4)]
    other = [np.concatenate([rng.integers(3, 53, SKIP), row[SKIP:]]) for row in ids]
    made = []
    for rows in (ids, other):
        docs = DocumentSet(ids=tuple(rows), names=("d",) * 4, kinds=("a",) * 4)
        made.append(tables(measure(reader, DocumentSets(docs, docs, True), batch_size=2), 50, 0))
    for name, table in made[0].items():
        if name != "carried_geometry":
            assert table.equals(made[1][name]), name
    raw = [table["carried_geometry"].query("direction == 'first token'")["value"] for table in made]
    assert not raw[0].equals(raw[1])


def stream(reader, documents, layer):
    seen = []
    for ids in documents.ids:
        hook = ("resid", layer, lambda x: seen.append(x[0, SKIP:].double().numpy()))
        reader.run(torch.from_numpy(ids)[None], [hook])
    return np.concatenate(seen)


def test_geometry_under_each_metric_is_that_of_plain_numpy():
    reader, rng = read_model(tiny_model("transformer"), None), np.random.default_rng(3)
    docs = DocumentSet(
        ids=tuple(rng.integers(3, 53, 64) for _ in range(20)), names=("d",) * 20, kinds=("a",) * 20
    )
    statics = measure(reader, DocumentSets(docs, docs, True), layers=[2])
    table = tables(statics, 50, 0)["carried_geometry"].set_index(["direction", "metric"])
    x = stream(reader, docs, 2)
    m, first = x.mean(0), geometry.proxies(statics, 2)["sink"][0]
    assert table.loc[("sink", "cosine"), "value"] == pytest.approx(
        m @ first / np.linalg.norm(m) / np.linalg.norm(first)
    )
    b = statics.fit["read"][:, 2].sum(0) / statics.fit["count"].sum()
    largest = [set(np.argsort(-np.abs(v))[:20]) for v in (m, b)]
    overlap = len(largest[0] & largest[1]) / len(largest[0] | largest[1])
    assert table.loc[("read mean", "jaccard"), "value"] == pytest.approx(overlap)
    assert table["n_null"].max() == 120  # every two of 16 documents


def test_a_share_along_the_direction_is_the_mean_cosine_and_growth_the_ratio_of_norms():
    made = plant("gpt2")
    reader, docs = read_model(made.model, None), made.documents
    table = tables(measure(reader, DocumentSets(docs, docs, True)), 50, 0)["carried_object"]
    norms = []
    for layer in range(LAYERS):
        x = stream(reader, docs, layer)
        m = x.mean(0) / np.linalg.norm(x.mean(0))
        norms.append(np.linalg.norm(x, axis=1).mean())
        assert table["share"][layer] == pytest.approx((x @ m / np.linalg.norm(x, axis=1)).mean(), abs=1e-6)
    np.testing.assert_allclose(table["growth"], np.array(norms) / norms[1], rtol=1e-6)
