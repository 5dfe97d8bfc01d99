"""V1 is a table of the token id, and the check that says so notices when it is not."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from satlens import load_bridge
from satlens.errors import SatlensError
from satlens.hf import MODELS
from satlens.v1 import check_v1_table, v1_table
from tests.rivals import VARIANTS, tiny

Make = Callable[..., Any]


@pytest.mark.parametrize("model_type", MODELS)
@pytest.mark.parametrize("bias", [True, False])
def test_table_equals_its_formula(make_model: Make, model_type: str, bias: bool) -> None:
    model = tiny(model_type, qkv_bias=bias)
    embedding, layer = model.model.embeddings.weight.double(), model.model.layers[0]
    read, norm = embedding, layer.attn_norm_v if model_type == "muddformer" else layer.attn_norm
    if model_type == "dhc":
        read = embedding * _first_column(layer.attn_hc, embedding)
    rms = read / (read.square().mean(-1, keepdim=True) + model.config.norm_eps).sqrt()
    values = (rms * norm.weight.double()) @ layer.attn.v_proj.weight.double().T
    if bias:
        values = values + layer.attn.v_proj.bias.double()
    bound = (
        1e-4 if model_type == "dhc" else 1e-6
    )  # streams may cancel, and the norm magnifies what rounding left
    torch.testing.assert_close(v1_table(model).double(), values.reshape(53, 2, 6), atol=bound, rtol=1e-5)


def _first_column(connection: Any, embedding: Tensor) -> Tensor:
    """What layer 0 reads is the embedding times this: the first column of A, summed over equal streams."""
    static, scale = connection.static_alpha[:, 0].double(), connection.dynamic_alpha_scale.double()
    rms = embedding / (embedding.square().mean(-1, keepdim=True) + torch.finfo(torch.float32).eps).sqrt()
    towards = (rms * connection.norm.weight.double()) @ connection.dynamic_alpha_proj[:, :1].double()
    return static.sum() + len(static) * scale * towards.tanh()


@pytest.mark.parametrize("variant", VARIANTS)
def test_table_rows_are_the_values_at_every_position(ids: Tensor, variant: str) -> None:
    bridge, sites = load_bridge(tiny(**VARIANTS[variant]))
    with torch.no_grad():
        _, cache = bridge.run_with_cache(ids)
    table = v1_table(bridge)
    torch.testing.assert_close(cache[sites.name("value", 0)], table[ids], atol=1e-6, rtol=1e-5)
    if sites.layers("first_value"):
        torch.testing.assert_close(cache[sites.name("first_value", 3)], table[ids], atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(v1_table(bridge, ids[0]), table[ids[0]], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("model_type", MODELS)
def test_reading_the_table_fires_no_hook(make_model: Make, model_type: str) -> None:
    bridge, _ = load_bridge(make_model(model_type))
    fired: list[str] = []
    with bridge.hooks(fwd_hooks=[(lambda name: True, lambda x, hook: fired.append(hook.name))]):
        v1_table(bridge)
    assert fired == []


@pytest.mark.parametrize("model_type", MODELS)
def test_the_check_notices_values_that_depend_on_position(ids: Tensor, model_type: str) -> None:
    bridge, sites = load_bridge(tiny(model_type))
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
