"""Roles, layers, axes: what exists, and what is said about what does not."""

from collections.abc import Callable
from typing import Any

import pytest

from satlens import load_bridge
from satlens.errors import SatlensError, UserError
from satlens.sites import AXES

Make = Callable[..., Any]
VOCABULARY = {"batch", "pos", "key", "head", "kv_head", "d_model", "d_head", "d_mlp"}
RIVALS = {"stream", "column", "way", "output"}
OF_VALUES = {"gate", "gate_logit", "mixed_value", "first_value"}
OWN = {
    "transformer": set(),
    "SATFormer": OF_VALUES,
    "ResFormer": OF_VALUES - {"gate_logit"} | {"own_scale"},
    "denseformer": {"average_weights"},
    "muddformer": {"query_stream", "key_stream", "value_stream", "depth_weights"},
    "dhc": {"streams"}
    | {f"{part}_connection_{weight}" for part in ("attn", "mlp") for weight in ("alpha", "beta")},
}
"""Roles of an architecture beyond those of a Transformer."""


def test_axes_use_the_house_vocabulary() -> None:
    assert {axis for axes in AXES.values() for axis in axes} <= VOCABULARY | RIVALS


@pytest.mark.parametrize("model_type", OWN)
def test_an_architecture_offers_a_transformers_roles_and_its_own(make_model: Make, model_type: str) -> None:
    shared = set(AXES) - set().union(*OWN.values())
    _, sites = load_bridge(make_model(model_type))
    assert set(sites.roles()) == shared | OWN[model_type]
    for role in shared - {"pattern"}:
        assert sites.layers(role) == (0, 1, 2, 3), role


@pytest.mark.parametrize(("model_type", "kind"), [("SATFormer", "relu"), ("ResFormer", "static")])
def test_first_values_are_written_by_layer_0_and_read_by_the_others(
    make_model: Make, model_type: str, kind: str
) -> None:
    _, sites = load_bridge(make_model(model_type))
    assert sites.layers("gate") == sites.layers("mixed_value") == (1, 2, 3)
    assert sites.layers("first_value") == sites.layers("resid_post") == (0, 1, 2, 3)
    assert (sites.gate_kind, sites.n_layers, sites.n_heads, sites.n_kv_heads) == (kind, 4, 4, 2)
    assert (sites.d_model, sites.d_head, sites.d_mlp, sites.d_vocab, sites.n_ctx) == (24, 6, 40, 53, 64)


@pytest.mark.parametrize("model_type", ["transformer", "denseformer", "muddformer", "dhc"])
def test_models_without_first_values_say_so_and_name_their_own_coefficients(
    make_model: Make, model_type: str
) -> None:
    _, sites = load_bridge(make_model(model_type))
    assert sites.layers("gate") == () and sites.gate_kind is None
    with pytest.raises(UserError, match=f"{model_type} does not mix first-layer values, so it has no gate"):
        sites.name("gate", 1)
    words = sites.why_no_gate("mine")
    assert words.startswith(f"mine is a {model_type}: it has no gate on first-layer values")
    named = [role for role in OWN[model_type] if "weights" in role or "connection" in role]
    assert all(role in words for role in named) and (named or words.endswith("values"))


def test_averages_stand_only_where_their_period_puts_them(make_model: Make) -> None:
    _, sites = load_bridge(make_model("denseformer", dwa_period=2))
    assert sites.layers("average_weights") == (1, 3) and sites.layers("stream") == (0, 1, 2, 3)
    assert sites.name("stream", 2) == sites.name("resid_post", 2) != sites.name("stream", 1)
    with pytest.raises(UserError, match="layer 2 has no average_weights; layers with average_weights: 1, 3"):
        sites.name("average_weights", 2)


def test_another_architectures_role_is_refused(make_model: Make) -> None:
    _, sites = load_bridge(make_model())
    with pytest.raises(
        UserError, match="this SATFormer has no depth_weights; layers with depth_weights: none"
    ):
        sites.name("depth_weights", 1)


def test_layer_0_is_said_to_produce_v1(make_model: Make) -> None:
    _, sites = load_bridge(make_model())
    with pytest.raises(UserError, match="layer 0 produces V1 and has no gate; layers with gate: 1, 2, 3"):
        sites.name("gate", 0)


def test_only_the_last_k_layers_have_gates(make_model: Make) -> None:
    _, sites = load_bridge(make_model(value_residual_last_k=2))
    assert sites.layers("gate") == (2, 3) and sites.layers("first_value") == (0, 2, 3)
    with pytest.raises(UserError, match="layer 1 does not mix first-layer values"):
        sites.name("gate_logit", 1)


def test_v1_that_nobody_reads_is_not_a_site(make_model: Make) -> None:
    _, sites = load_bridge(make_model(value_residual_last_k=0))
    assert sites.layers("first_value") == () and sites.gate_kind is None


def test_a_derived_mlp_width_is_resolved(make_model: Make) -> None:
    bridge, sites = load_bridge(make_model(intermediate_size=None))
    assert sites.d_mlp == bridge.cfg.d_mlp == 256


def test_negative_layers_count_from_the_end(make_model: Make) -> None:
    _, sites = load_bridge(make_model())
    assert sites.name("gate", -1) == sites.name("gate", 3)


@pytest.mark.parametrize("layer", [4, -5])
def test_an_absent_layer_is_refused(make_model: Make, layer: int) -> None:
    _, sites = load_bridge(make_model())
    with pytest.raises(UserError, match=f"no layer {layer}: this SATFormer has layers 0 to 3"):
        sites.name("resid_post", layer)


def test_an_unknown_role_is_refused(make_model: Make) -> None:
    _, sites = load_bridge(make_model())
    for call in (sites.axes, sites.layers, lambda role: sites.name(role, 1)):
        with pytest.raises(UserError, match="unknown site 'gates'; known: resid_pre"):
            call("gates")


def test_a_name_the_bridge_lacks_is_an_error(make_model: Make) -> None:
    bridge, sites = load_bridge(make_model())
    known = set(bridge.hook_dict) - {sites.name("gate", 2)}
    with pytest.raises(SatlensError, match=r"no hook blocks\.2\.attn\.mix\.gate\.hook_out"):
        sites.check(known)
