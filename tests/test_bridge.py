"""The bridge: same logits as the model, every site live, weights folded rightly, blocks that run singly."""

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from satlens import load_bridge
from satlens.architectures import families, steps, wrap
from satlens.errors import SatlensError, UserError
from satlens.hf import MODELS
from tests.rivals import VARIANTS, tiny

Make = Callable[..., Any]
variants = pytest.mark.parametrize("variant", VARIANTS)
model_types = pytest.mark.parametrize("model_type", MODELS)
with_memory = pytest.mark.parametrize("model_type", ["SATFormer", "ResFormer", "denseformer", "muddformer"])
value_residual = pytest.mark.parametrize("model_type", ["SATFormer", "ResFormer"])


def _run(bridge: Any, ids: Tensor, mask: Tensor | None = None) -> Tensor:
    state = steps.begin(bridge, ids, mask)
    for layer in range(len(bridge.blocks)):
        state = steps.step(bridge, layer, state)
    return _logits(bridge, state)


def _logits(bridge: Any, state: Any) -> Tensor:
    return steps.unembed(bridge, steps.normed(bridge, steps.end(bridge, state)))


def _times(factor: float, memory: Any) -> Any:
    """A memory with every tensor in it scaled."""
    if memory is None or isinstance(memory, Tensor):
        return None if memory is None else factor * memory
    return tuple(_times(factor, part) for part in memory)


def _leaves(memory: Any) -> list[Tensor]:
    if isinstance(memory, tuple):
        return [leaf for part in memory for leaf in _leaves(part)]
    return [] if memory is None else [memory]


@pytest.fixture
def make_model() -> Make:
    """Models whose coefficients are far from their start."""
    return tiny


@pytest.fixture(autouse=True)
def _no_grad() -> Any:
    with torch.no_grad():
        yield


def test_every_model_type_has_a_bridge() -> None:
    assert set(families()) == set(MODELS)


@variants
def test_bridge_logits_are_bit_equal_to_the_models(make_model: Make, ids: Tensor, variant: str) -> None:
    model = make_model(**VARIANTS[variant])
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    plain, padded = model(ids).logits, model(ids, attention_mask=mask).logits
    bridge, _ = load_bridge(model)
    assert torch.equal(bridge(ids), plain)
    assert torch.equal(bridge(ids, attention_mask=mask)[mask.bool()], padded[mask.bool()])
    assert torch.equal(bridge.original_model(ids).logits, plain)


@variants
def test_every_site_is_live_fires_once_and_leaves_no_trace(
    make_model: Make, ids: Tensor, variant: str
) -> None:
    bridge, sites = load_bridge(make_model(**VARIANTS[variant]))
    plain = bridge(ids)
    for role in sites.roles():
        for layer in sites.layers(role):
            sizes = _sizes(sites, ids, bridge.original_model.config, role, layer)
            expected = tuple(sizes[axis] for axis in sites.axes(role))
            shapes: list[tuple[int, ...]] = []

            def skew(x: Tensor, hook: Any, shapes: list[tuple[int, ...]] = shapes) -> Tensor:
                shapes.append(tuple(x.shape))
                return x * torch.linspace(0.5, 1.6, x.shape[-1])  # a uniform factor would vanish in a norm

            with bridge.hooks(fwd_hooks=[(sites.name(role, layer), skew)]):
                edited = bridge(ids)
            assert shapes == [expected], (role, layer)
            assert not torch.allclose(edited, plain, atol=1e-4), (role, layer)
            assert torch.equal(bridge(ids), plain), (role, layer)


def _sizes(sites: Any, ids: Tensor, config: Any, role: str, layer: int) -> dict[str, int]:
    n_streams, dilation = getattr(config, "expansion_rate", 0), getattr(config, "dwa_dilation", 1)
    return {
        "batch": ids.shape[0],
        "pos": ids.shape[1],
        "key": ids.shape[1],
        "head": sites.n_heads,
        "kv_head": sites.n_kv_heads,
        "d_head": sites.d_head,
        "d_model": sites.d_model,
        "d_mlp": config.mlp_width_of(layer),
        "stream": n_streams,
        "column": n_streams + 1,
        "way": 1 if layer == sites.n_layers - 1 else 4,
        "output": layer + 2
        if role == "depth_weights"
        else len(range((layer + 1) % dilation, layer + 2, dilation)),
    }


@variants
def test_an_identity_edit_is_bit_exact_except_where_attention_is_laid_open(
    make_model: Make, ids: Tensor, variant: str
) -> None:
    bridge, sites = load_bridge(make_model(**VARIANTS[variant]))
    plain = bridge(ids)
    for role in sites.roles():
        hooks = [(sites.name(role, layer), lambda x, hook: x.clone()) for layer in sites.layers(role)]
        with bridge.hooks(fwd_hooks=hooks):
            same = bridge(ids)
        if role == "pattern":
            torch.testing.assert_close(same, plain, atol=1e-5, rtol=1e-5)
        else:
            assert torch.equal(same, plain), role


@variants
def test_every_hook_of_the_bridge_fires(make_model: Make, ids: Tensor, variant: str) -> None:
    bridge, _ = load_bridge(make_model(**VARIANTS[variant]))
    _, cache = bridge.run_with_cache(ids)
    assert {hook.name for hook in bridge.hook_dict.values()} <= set(cache.keys())


def test_zeroing_the_gate_hook_equals_zeroing_the_gate_weights(make_model: Make, ids: Tensor) -> None:
    bridge, sites = load_bridge(make_model())
    closed = make_model()
    for layer in sites.layers("gate"):
        closed.model.layers[layer].attn.value_residual_mixing.alpha_proj.weight.zero_()
    hooks = [
        (sites.name("gate", layer), lambda x, hook: torch.zeros_like(x)) for layer in sites.layers("gate")
    ]
    with bridge.hooks(fwd_hooks=hooks):
        assert torch.equal(bridge(ids), closed(ids).logits)


@value_residual
def test_editing_written_v1_equals_editing_all_its_reads_and_spares_layer_0(
    make_model: Make, ids: Tensor, model_type: str
) -> None:
    bridge, sites = load_bridge(make_model(model_type))

    def double(x: Tensor, hook: Any) -> Tensor:
        return 2 * x

    with bridge.hooks(fwd_hooks=[(sites.name("first_value", 0), double)]):
        written, cache = bridge.run_with_cache(ids, names_filter=[sites.name("attn_out", 0)])
    with bridge.hooks(fwd_hooks=[(sites.name("first_value", layer), double) for layer in (1, 2, 3)]):
        read = bridge(ids)
    assert torch.equal(written, read)
    _, clean = bridge.run_with_cache(ids, names_filter=[sites.name("attn_out", 0)])
    assert torch.equal(cache[sites.name("attn_out", 0)], clean[sites.name("attn_out", 0)])


def test_an_edit_of_the_mid_stream_reaches_the_stream_itself(make_model: Make, ids: Tensor) -> None:
    bridge, sites = load_bridge(make_model())
    shift = torch.randn(24, generator=torch.Generator().manual_seed(3))
    silent_mlp = (sites.name("mlp_out", 3), lambda x, hook: 0 * x)
    with bridge.hooks(fwd_hooks=[silent_mlp, (sites.name("resid_mid", 3), lambda x, hook: x + shift)]):
        _, moved = bridge.run_with_cache(ids, names_filter=[sites.name("resid_post", 3)])
    with bridge.hooks(fwd_hooks=[silent_mlp]):
        _, plain = bridge.run_with_cache(ids, names_filter=[sites.name("resid_post", 3)])
    name = sites.name("resid_post", 3)
    assert torch.equal(moved[name], plain[name] + shift)


def test_norm_scale_hooks_are_live_though_unused_ones_cost_nothing(make_model: Make, ids: Tensor) -> None:
    bridge, _ = load_bridge(make_model())
    plain = bridge(ids)
    with (
        warnings.catch_warnings(),
        bridge.hooks(fwd_hooks=[("blocks.1.ln1.hook_scale", lambda x, hook: 2 * x)]),
    ):
        warnings.simplefilter("ignore")  # the library says that edits take its own path
        assert not torch.allclose(bridge(ids), plain, atol=1e-4)
    assert torch.equal(bridge(ids), plain)


def test_gate_gradients_reach_the_cache(make_model: Make, ids: Tensor) -> None:
    bridge, sites = load_bridge(make_model())
    name = sites.name("gate", 2)
    with torch.enable_grad():
        _, cache = bridge.run_with_cache(ids, names_filter=[name], incl_bwd=True, return_type="loss")
    slopes = cache[f"{name}_grad"].abs()
    epsilon, index = 1e-2, tuple(int(i) for i in (slopes == slopes.max()).nonzero()[0])

    def loss(sign: int) -> float:
        def nudge(x: Tensor, hook: Any) -> Tensor:
            x = x.clone()
            x[index] += sign * epsilon
            return x

        with bridge.hooks(fwd_hooks=[(name, nudge)]):
            return float(bridge(ids, return_type="loss"))

    slope = (loss(1) - loss(-1)) / (2 * epsilon)
    assert float(cache[f"{name}_grad"][index]) == pytest.approx(slope, rel=0.05)


def test_position_slices_of_head_sites_cut_positions(make_model: Make, ids: Tensor) -> None:
    bridge, sites = load_bridge(make_model())
    names = [sites.name(role, 1) for role in ("first_value", "mixed_value", "value", "gate", "z")]
    _, whole = bridge.run_with_cache(ids, names_filter=names)
    _, last = bridge.run_with_cache(ids, names_filter=names, pos_slice=(-2, None))
    for name in names:
        assert torch.equal(last[name], whole[name][:, -2:]), name


@variants
def test_folding_the_norms_keeps_the_predictions(make_model: Make, ids: Tensor, variant: str) -> None:
    bridge, _ = load_bridge(make_model(**VARIANTS[variant]))
    before = bridge(ids).log_softmax(-1)
    bridge.enable_compatibility_mode(fold_value_biases=False, disable_warnings=True)
    norms = ("ln1_q", "ln1_k", "ln1_v") if "mudd" in variant else ("ln1",)
    for norm in norms:
        assert torch.equal(getattr(bridge.blocks[2], norm).weight, torch.ones(24))
    torch.testing.assert_close(bridge(ids).log_softmax(-1), before, atol=2e-5, rtol=1e-4)


def test_folding_the_norms_folds_the_gate_projection(make_model: Make, ids: Tensor) -> None:
    bridge, sites = load_bridge(make_model())
    names = [sites.name("gate_logit", layer) for layer in sites.layers("gate_logit")]
    _, before = bridge.run_with_cache(ids, names_filter=names)
    bridge.enable_compatibility_mode(fold_value_biases=False, disable_warnings=True)
    _, after = bridge.run_with_cache(ids, names_filter=names)
    for name in names:
        torch.testing.assert_close(after[name], before[name], atol=2e-5, rtol=1e-4)


@value_residual
@pytest.mark.parametrize("kv_heads", [2, 4])
def test_folding_value_biases_is_refused_where_it_is_wrong_and_harms_nothing(
    make_model: Make, ids: Tensor, model_type: str, kv_heads: int
) -> None:
    bridge, _ = load_bridge(make_model(model_type, qkv_bias=True, num_kv_heads=kv_heads))
    before = bridge(ids)
    with pytest.raises(UserError, match="pass fold_value_biases=False"):
        bridge.process_weights(fold_value_biases=True)
    assert torch.equal(bridge(ids), before)


def test_folding_value_biases_is_right_without_them(make_model: Make, ids: Tensor) -> None:
    bridge, _ = load_bridge(make_model())
    before = bridge(ids).log_softmax(-1)
    bridge.enable_compatibility_mode(disable_warnings=True)
    torch.testing.assert_close(bridge(ids).log_softmax(-1), before, atol=2e-5, rtol=1e-4)


@variants
@pytest.mark.parametrize("padding", ["none", "left", "right"])
def test_running_block_by_block_is_bit_equal(
    make_model: Make, ids: Tensor, variant: str, padding: str
) -> None:
    bridge, _ = load_bridge(make_model(**VARIANTS[variant]))
    mask = None if padding == "none" else torch.ones_like(ids)
    if mask is not None:
        mask[0, : 4 if padding == "left" else 0] = 0
        mask[0, -3 if padding == "right" else ids.shape[1] :] = 0
    expected = bridge(ids) if mask is None else bridge(ids, attention_mask=mask)
    assert torch.equal(_run(bridge, ids, mask), expected)


@variants
def test_hooks_fire_block_by_block_too(make_model: Make, ids: Tensor, variant: str) -> None:
    bridge, sites = load_bridge(make_model(**VARIANTS[variant]))
    fired: list[str] = []
    names = [sites.name(role, layer) for role in sites.roles() for layer in sites.layers(role)]
    hooks = [(name, lambda x, hook, name=name: fired.append(name)) for name in names]
    with bridge.hooks(fwd_hooks=hooks):
        _run(bridge, ids)
    assert sorted(fired) == sorted(names)


@model_types
def test_a_restart_from_the_middle_is_bit_equal(make_model: Make, ids: Tensor, model_type: str) -> None:
    bridge, _ = load_bridge(make_model(model_type))
    state = steps.begin(bridge, ids)
    for layer in range(4):
        begun = state
        for rest in range(layer, 4):
            begun = steps.step(bridge, rest, begun)
        assert torch.equal(_logits(bridge, begun), bridge(ids)), layer
        state = steps.step(bridge, layer, state)


@with_memory
def test_a_restart_needs_what_earlier_layers_left(make_model: Make, ids: Tensor, model_type: str) -> None:
    bridge, _ = load_bridge(make_model(model_type))
    saved = steps.step(bridge, 1, steps.step(bridge, 0, steps.begin(bridge, ids)))
    state = replace(saved, memory=_times(0.5, saved.memory))
    for layer in (2, 3):
        state = steps.step(bridge, layer, state)
    assert not torch.allclose(_logits(bridge, state), bridge(ids), atol=1e-4)


@value_residual
def test_a_restart_without_v1_is_refused(make_model: Make, ids: Tensor, model_type: str) -> None:
    bridge, _ = load_bridge(make_model(model_type))
    state = steps.step(bridge, 0, steps.begin(bridge, ids))
    with pytest.raises(ValueError, match="mixes first-layer values but got none"):
        steps.step(bridge, 1, replace(state, memory=None))


@model_types
@pytest.mark.parametrize("padded", [False, True])
def test_joined_states_run_as_they_do_alone(
    make_model: Make, ids: Tensor, model_type: str, padded: bool
) -> None:
    bridge, _ = load_bridge(make_model(model_type))
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    first = steps.step(bridge, 0, steps.begin(bridge, ids, mask if padded else None))
    second = replace(first, residual=first.residual * 1.5, memory=_times(0.7, first.memory))
    joined = steps.step(bridge, 1, steps.cat([first, second]))
    for index, alone in enumerate((first, second)):
        part, expected = steps.rows(joined, 2 * index, 2 * index + 2), steps.step(bridge, 1, alone)
        mine, theirs = (
            [state.residual, *_leaves(state.memory), steps.step(bridge, 2, state).residual]
            for state in (part, expected)
        )
        assert len(mine) == len(theirs) and all(len(tensor) == 2 for tensor in mine)
        for tensor, other in zip(mine, theirs, strict=True):
            torch.testing.assert_close(tensor, other, atol=1e-5, rtol=1e-5)


@model_types
def test_states_of_rows_with_different_padding_can_be_joined(
    make_model: Make, ids: Tensor, model_type: str
) -> None:
    bridge, _ = load_bridge(make_model(model_type))
    masks = torch.ones_like(ids)
    masks[0, :3] = 0
    masks[1, :5] = 0
    parts = [steps.begin(bridge, ids[i : i + 1], masks[i : i + 1]) for i in range(2)]
    whole, joined = steps.begin(bridge, ids, masks), steps.cat(parts)
    for layer in range(4):
        whole, joined = steps.step(bridge, layer, whole), steps.step(bridge, layer, joined)
    assert torch.equal(steps.end(bridge, whole), steps.end(bridge, joined))


@with_memory
def test_states_at_different_stages_are_not_joined(make_model: Make, ids: Tensor, model_type: str) -> None:
    bridge, _ = load_bridge(make_model(model_type))
    start = steps.begin(bridge, ids)
    with pytest.raises(SatlensError, match="all must stand before the same layer"):
        steps.cat([start, steps.step(bridge, 0, start)])


@model_types
def test_stopping_at_a_layer_returns_its_input(make_model: Make, ids: Tensor, model_type: str) -> None:
    bridge, sites = load_bridge(make_model(model_type))
    name = sites.name("streams" if model_type == "dhc" else "resid_pre", 2)
    _, cache = bridge.run_with_cache(ids, names_filter=[name])
    assert torch.equal(bridge(ids, stop_at_layer=2), cache[name])


@model_types
def test_the_wrapped_model_still_generates_with_its_cache(
    make_model: Make, ids: Tensor, model_type: str
) -> None:
    model = make_model(model_type, eos_token_id=None)
    options = {"max_new_tokens": 5, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    before = model.generate(ids, **options)
    load_bridge(model)
    assert torch.equal(model.generate(ids, **options), before)


@model_types
def test_bfloat16_bridges_are_bit_equal_too(make_model: Make, ids: Tensor, model_type: str) -> None:
    model = make_model(model_type).to(torch.bfloat16)
    plain = model(ids).logits
    bridge, _ = load_bridge(model)
    assert torch.equal(bridge(ids), plain) and plain.dtype == torch.bfloat16


def test_an_unknown_architecture_is_refused(make_model: Make) -> None:
    model = make_model()
    model.config.model_type = "mystery"
    with pytest.raises(UserError, match="no bridge for model type 'mystery'"):
        wrap(model)
