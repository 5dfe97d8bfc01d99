"""What is called a write is what reaches the stream, in families that norm or scale it on its way."""

from typing import Any

import numpy as np
import pytest
import torch
from test_carried_check_families import FITTED, random_model

from satlens.carried.documents import SKIP, DocumentSets
from satlens.carried.opening import read_model
from satlens.carried.statics import measure, tables

ADDING: dict[str, dict[str, Any]] = {
    "Gemma2": {"num_key_value_heads": 1, "head_dim": 8, "query_pre_attn_scalar": 8},
    "Olmo2": {"num_key_value_heads": 1},
    "Phi3": {"num_key_value_heads": 1},
    "Cohere": {"num_key_value_heads": 1},
}


@pytest.mark.parametrize("family", ADDING)
def test_embeddings_and_writes_are_the_whole_of_every_mean(family):
    reader = read_model(random_model(family, **ADDING[family]), None)
    out = tables(measure(reader, DocumentSets(FITTED, FITTED, True)), 20, 0)
    np.testing.assert_allclose(out["carried_sources"].groupby("target")["share"].sum(), 1, atol=1e-5)
    assert out["carried_writes"]["share"].sum() == pytest.approx(1, abs=1e-5)


def test_writes_that_are_scaled_on_their_way_are_no_shares():
    model = random_model("Granite", num_key_value_heads=1, residual_multiplier=0.5)
    out = tables(measure(read_model(model, None), DocumentSets(FITTED, FITTED, True)), 20, 0)
    assert out["carried_writes"]["share"].isna().all()
    assert set(out["carried_sources"]["target"]) == {0}


def test_the_embedding_norms_bias_is_the_constant_part_of_the_embedding():
    model = random_model("Bloom", n_head=2, n_layer=3)
    out = tables(measure(read_model(model, None), DocumentSets(FITTED, FITTED, True)), 20, 0)
    seen: list[np.ndarray] = []
    model.transformer.h[2].register_forward_pre_hook(
        lambda _, a: seen.append(a[0][0, SKIP:].double().numpy())
    )
    with torch.no_grad():
        for ids in FITTED.ids:
            model(torch.from_numpy(ids)[None])
    m = np.concatenate(seen).mean(0)
    bias = model.transformer.word_embeddings_layernorm.bias.detach().double().numpy()
    assert out["carried_writes"]["constant_share"][0] == pytest.approx(bias @ m / (m @ m), abs=1e-6)


def test_a_vector_of_five_coordinates_has_no_twenty_largest():
    out = tables(measure(read_model(random_model("Phi3"), None), DocumentSets(FITTED, FITTED, True)), 20, 0)
    table = out["carried_geometry"]
    assert "jaccard" not in set(table[table["direction"] == "massive"]["metric"])
    assert "energy" in set(table[table["direction"] == "massive"]["metric"])
