"""Statics of models that nobody planted, against a slow calculation: one document at a time, float64, plain hooks."""

from typing import Any

import numpy as np
import pytest
import torch
from planted import STYLES, D, plant

from satlens.carried.documents import SKIP, DocumentSets
from satlens.carried.opening import read_model
from satlens.carried.proofs import prove
from satlens.carried.resting import couplings
from satlens.carried.statics import Statics, measure, tables
from satlens.hf import MODELS

PARTS = {"transformer": ("attn_norm", "attn.o_proj"), "qwen2": ("input_layernorm", "self_attn.o_proj")}


def model_of(name: str, **changes: Any) -> Any:
    """A random model, loud enough that writes and gates differ between tokens."""
    torch.manual_seed(3)
    if name == "qwen2":
        model = STYLES[name].make()
    else:
        config = MODELS[name].config_class(
            hidden_size=D, num_hidden_layers=3, num_heads=2, intermediate_size=24, vocab_size=8,
            max_position_embeddings=64, pad_token_id=None, **changes,
        )  # fmt: skip
        model = MODELS[name](config)
    with torch.no_grad():
        for part, weight in model.named_parameters():
            if not (
                changes.get("attention_disabled") and part.endswith("attn.o_proj.weight")
            ):  # off stays off
                weight.add_(0.3 * torch.randn_like(weight))
    return model.eval()


def measured(model: Any) -> tuple[Statics, dict[str, Any], DocumentSets]:
    documents = plant("llama").documents
    sets = DocumentSets(documents.take([0, 2, 4, 6]), documents.take([1, 3, 5]), False)
    statics = measure(read_model(model, None), sets, batch_size=2)
    return statics, tables(statics, 200, 0), sets


def watched(model: Any, ids: Any, name: str) -> dict[tuple[str, int], np.ndarray]:
    """Tensors of one document's far positions by plain hooks: streams ``x``, writes, what a gate gets and gives."""
    seen: dict[tuple[str, int], np.ndarray] = {}

    def keep(key: tuple[str, int], value: Any) -> None:
        seen[key] = value[0, SKIP:].double().numpy()

    handles = []
    for layer, block in enumerate(model.model.layers):
        gate = getattr(block.mlp, "gate_proj", None) or block.mlp.up_proj
        norm, o = (block.get_submodule(part) for part in PARTS[name])
        handles += [
            norm.register_forward_pre_hook(lambda _, args, layer=layer: keep(("x", layer), args[0])),
            o.register_forward_hook(lambda _, __, out, layer=layer: keep(("attention", layer), out)),
            gate.register_forward_hook(lambda _, args, out, layer=layer: keep(("b", layer), args[0])),
            gate.register_forward_hook(lambda _, args, out, layer=layer: keep(("z", layer), out)),
            block.mlp.down_proj.register_forward_hook(
                lambda _, __, out, layer=layer: keep(("mlp", layer), out)
            ),
        ]
    with torch.no_grad():
        model(input_ids=torch.from_numpy(ids)[None], use_cache=False)
    for handle in handles:
        handle.remove()
    return seen


def near(one: Any, other: Any) -> None:
    np.testing.assert_allclose(
        np.asarray(one, dtype=float), np.asarray(other, dtype=float), rtol=2e-5, atol=2e-6
    )


@pytest.mark.parametrize("name", PARTS)
def test_statics_are_those_of_a_slow_calculation(name):
    model = model_of(name)
    statics, out, sets = measured(model)
    exact = model.double()
    fit = [watched(exact, ids, name) for ids in sets.fit.ids]
    seen = [watched(exact, ids, name) for ids in sets.evaluate.ids]
    for layer in range(3):
        m, b = (np.concatenate([doc[key, layer] for doc in fit]).mean(0) for key in "xb")
        unit = m / np.linalg.norm(m)
        x, z = (np.concatenate([doc[key, layer] for doc in seen]) for key in "xz")
        row = out["carried_object"].iloc[layer]
        near(row["share"], (x @ unit / np.linalg.norm(x, axis=1)).mean())
        near(row["share_abs"], np.abs(x @ unit / np.linalg.norm(x, axis=1)).mean())
        near([row["m_norm"], row["b_norm"]], [np.linalg.norm(m), np.linalg.norm(b)])
        near(row["cos_b_m"], unit @ b / np.linalg.norm(b))
        near(couplings(statics, statics.reads[layer]), statics.reads[layer].weight.double().numpy() @ b)
        assert out["carried_resting"]["duty"][layer] == pytest.approx((z > 0).mean(), abs=1e-12)
        post = z / (1 + np.exp(-z))
        assert out["carried_resting"]["firing_05"][layer] == pytest.approx((post > 0.5).mean(), abs=1e-12)
        for write in ("attention", "mlp"):
            halves = [np.concatenate([doc[write, layer] for doc in seen[at::2]]) for at in (0, 1)]
            whole, means = np.concatenate(halves), [half.mean(0) for half in halves]
            along = (means[0] @ unit) * (means[1] @ unit)
            square = np.square(whole @ unit).mean()
            share = out["carried_constant_share"].query(f"layer == {layer} and write == {write!r}")
            near(
                share["constant_share"],
                [along / square, (means[0] @ means[1] - along) / (np.square(whole).sum(1).mean() - square)],
            )
            deep = np.concatenate([doc["x", 2] for doc in seen]).mean(0)
            row = out["carried_writes"].query(f"layer == {layer} and write == {write!r}").iloc[0]
            mean = whole.mean(0)
            near([row["norm"], row["cosine"]],
                 [np.linalg.norm(mean), mean @ deep / np.linalg.norm(mean) / np.linalg.norm(deep)])  # fmt: skip


@pytest.mark.parametrize("arm", [{}, {"mlp": "gelu", "mlp_bias": True}])
@pytest.mark.parametrize("name", ["SATFormer", "transformer"])
def test_where_attention_is_off_all_of_the_mean_is_embeddings_and_mlps(name, arm):
    model = model_of(name, attention_disabled=True, **arm)
    reader = read_model(model, None)
    prove(reader)
    assert reader.value_reads == () and not any(entry for entry in reader.sites.get("value_pre", {}))
    _, out, _ = measured(model)
    writes = out["carried_writes"]
    assert (writes[writes["write"] == "attention"]["norm"] == 0).all()
    near(writes["share"].sum(), 1)
    assert out["carried_ledger"]["attention_bias"].eq(0).all() and set(out["carried_ledger"]["block"]) == {
        "sequential"
    }
    constant = out["carried_constant_share"]
    assert constant[constant["write"] == "attention"]["constant_share"].isna().all()
    assert constant[constant["write"] == "mlp"]["constant_share"].notna().all()
    share = out["carried_parameter_share"]
    assert (
        share["share"].iloc[0] == 0 and share["reason"].isna().all()
    )  # RMSNorm, and no write before layer 0's
    assert (share["share"].iloc[1:] != 0).all() == bool(arm)
    assert "carried_value_gates" not in out
