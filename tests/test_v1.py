"""V1 is a table of the token id, and the check that says so notices when it is not."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from satlens import load_bridge
from satlens.errors import SatlensError
from satlens.v1 import check_v1_table, v1_table

Make = Callable[..., Any]


@pytest.mark.parametrize("model_type", ["SATFormer", "transformer"])
@pytest.mark.parametrize("bias", [True, False])
def test_table_equals_its_formula(make_model: Make, model_type: str, bias: bool) -> None:
    model = make_model(model_type, qkv_bias=bias)
    embedding, layer = model.model.embeddings.weight.double(), model.model.layers[0]
    rms = embedding / (embedding.square().mean(-1, keepdim=True) + model.config.norm_eps).sqrt()
    values = (rms * layer.attn_norm.weight.double()) @ layer.attn.v_proj.weight.double().T
    if bias:
        values = values + layer.attn.v_proj.bias.double()
    torch.testing.assert_close(v1_table(model).double(), values.reshape(53, 2, 6), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("model_type", ["SATFormer", "transformer"])
def test_table_rows_are_the_values_at_every_position(make_model: Make, ids: Tensor, model_type: str) -> None:
    bridge, sites = load_bridge(make_model(model_type))
    with torch.no_grad():
        _, cache = bridge.run_with_cache(ids)
    table = v1_table(bridge)
    torch.testing.assert_close(cache[sites.name("value", 0)], table[ids], atol=1e-6, rtol=1e-5)
    if model_type == "SATFormer":
        torch.testing.assert_close(cache[sites.name("first_value", 3)], table[ids], atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(v1_table(bridge, ids[0]), table[ids[0]], atol=1e-6, rtol=1e-5)


def test_reading_the_table_fires_no_hook(make_model: Make) -> None:
    bridge, _ = load_bridge(make_model())
    fired: list[str] = []
    with bridge.hooks(fwd_hooks=[(lambda name: True, lambda x, hook: fired.append(hook.name))]):
        v1_table(bridge)
    assert fired == []


def test_the_check_notices_values_that_depend_on_position(make_model: Make, ids: Tensor) -> None:
    bridge, sites = load_bridge(make_model())
    check_v1_table(bridge, sites, ids)
    place = torch.arange(ids.shape[1])[None, :, None, None] * 1e-3
    with (
        bridge.hooks(fwd_hooks=[(sites.name("value", 0), lambda x, hook: x + place)]),
        pytest.raises(SatlensError, match="not a table of the token id"),
    ):
        check_v1_table(bridge, sites, ids)


def test_the_check_holds_in_bfloat16(make_model: Make, ids: Tensor) -> None:
    bridge, sites = load_bridge(make_model().to(torch.bfloat16))
    check_v1_table(bridge, sites, ids)
    with (
        bridge.hooks(fwd_hooks=[(sites.name("value", 0), lambda x, hook: x * 1.2)]),
        pytest.raises(SatlensError, match="differ"),
    ):
        check_v1_table(bridge, sites, ids)
