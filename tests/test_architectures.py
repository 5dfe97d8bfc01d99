"""What each rival's sites mean: coefficients that act as the paper's formulas say, and passes that begin anywhere."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from satlens import load_bridge
from satlens.accumulators import GateStatistics, LensNll, NllByDocument
from satlens.hf import MODELS
from satlens.interventions import Calibration, Edit, zero
from satlens.stream import Condition, nll_of, stream
from satlens.tokens import Layout, batches, corpus_from_documents
from tests.rivals import tiny
from tests.tiny import plain_nll

DOCS = [
    torch.randint(3, 53, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (9, 14, 3, 21)
]
model_types = pytest.mark.parametrize("model_type", MODELS)


@pytest.fixture(autouse=True)
def _no_grad() -> Any:
    with torch.no_grad():
        yield


def _edited(bridge: Any, ids: Tensor, *hooks: tuple[str, Callable[[Tensor], Tensor]]) -> Tensor:
    with bridge.hooks(fwd_hooks=[(name, lambda x, hook, f=f: f(x)) for name, f in hooks]):
        return bridge(ids)


def _rows(**layout: Any) -> Any:
    return batches(corpus_from_documents(DOCS), Layout(**layout), 12, 3, eos=2)


def test_a_resformer_gate_at_zero_is_lambda_1_at_zero(ids: Tensor) -> None:
    (bridge, sites), double = load_bridge(tiny("ResFormer")), tiny("ResFormer")
    manager, lambdas = double.model.lambda_manager, double.model.lambda_manager()
    assert bool((lambdas != 0).all())
    manager.forward = lambda: lambdas * torch.tensor([1.0, 0.0, 1.0])  # layer 2's
    assert torch.equal(_edited(bridge, ids, (sites.name("gate", 2), torch.zeros_like)), double(ids).logits)


def test_a_resformer_gate_and_own_scale_are_its_two_scalars(ids: Tensor) -> None:
    (bridge, sites), double = load_bridge(tiny("ResFormer")), tiny("ResFormer")
    _, cache = bridge.run_with_cache(ids)
    for layer in (1, 2, 3):
        mixing = double.model.layers[layer].attn.value_residual_mixing
        assert bool((cache[sites.name("gate", layer)] == double.model.lambda_manager()[layer - 1]).all())
        assert bool((cache[sites.name("own_scale", layer)] == mixing.lambda2).all())
        mixed = (
            double.model.lambda_manager()[layer - 1] * cache[sites.name("first_value", layer)]
            + mixing.lambda2 * cache[sites.name("value", layer)]
        )
        torch.testing.assert_close(cache[sites.name("mixed_value", layer)], mixed)


def test_shut_gates_make_a_resformer_a_transformer_with_scaled_values(ids: Tensor) -> None:
    (bridge, sites), double = load_bridge(tiny("ResFormer")), tiny("ResFormer")
    config = {k: v for k, v in double.config.to_dict().items() if "value_residual" not in k}
    twin = MODELS["transformer"](
        MODELS["transformer"].config_class(**{**config, "model_type": "transformer"})
    )
    weights = {
        k: v for k, v in double.state_dict().items() if "value_residual" not in k and "lambda" not in k
    }
    for layer in (1, 2, 3):
        key = f"model.layers.{layer}.attn.v_proj.weight"
        weights[key] = weights[key] * double.model.layers[layer].attn.value_residual_mixing.lambda2
    twin.eval().load_state_dict(weights)
    shut = _edited(bridge, ids, *((sites.name("gate", n), torch.zeros_like) for n in (1, 2, 3)))
    torch.testing.assert_close(shut, twin(ids).logits, atol=1e-5, rtol=1e-5)


def test_a_denseformer_that_averages_nothing_is_a_transformer(ids: Tensor) -> None:
    (bridge, sites), double = load_bridge(tiny("denseformer")), tiny("denseformer")
    config = {k: v for k, v in double.config.to_dict().items() if not k.startswith("dwa")}
    twin = MODELS["transformer"](
        MODELS["transformer"].config_class(**{**config, "model_type": "transformer"})
    )
    twin.eval().load_state_dict({k: v for k, v in double.state_dict().items() if "dwa" not in k})

    def only_the_latest(weights: Tensor) -> Tensor:
        return torch.cat((torch.zeros_like(weights[..., :-1]), torch.ones_like(weights[..., -1:])), dim=-1)

    alone = _edited(bridge, ids, *((sites.name("average_weights", n), only_the_latest) for n in range(4)))
    torch.testing.assert_close(alone, twin(ids).logits, atol=1e-6, rtol=1e-6)


def test_an_average_can_be_edited_at_one_position(ids: Tensor) -> None:
    bridge, sites = load_bridge(tiny("denseformer"))

    def at_position_7(weights: Tensor) -> Tensor:
        weights = weights.clone()  # the site is a view of one row of weights
        weights[:, 7] = 0
        return weights

    plain = bridge(ids)
    edited = _edited(bridge, ids, (sites.name("average_weights", 1), at_position_7))
    assert torch.equal(edited[:, :7], plain[:, :7]) and not torch.allclose(edited[:, 7:], plain[:, 7:])


def test_a_muddformer_without_depth_weights_reads_its_latest_output(ids: Tensor) -> None:
    bridge, sites = load_bridge(
        tiny("muddformer")
    )  # under post-norms a stream is the latest output plus the mix
    shut = [(sites.name("depth_weights", n), lambda x, hook: torch.zeros_like(x)) for n in range(4)]
    with bridge.hooks(fwd_hooks=shut):
        _, cache = bridge.run_with_cache(ids)
    for layer in (1, 2, 3):
        latest = cache[sites.name("resid_post", layer - 1)]
        for role in ("query_stream", "key_stream", "value_stream", "resid_pre"):
            assert torch.equal(cache[sites.name(role, layer)], latest)


@pytest.mark.parametrize("role", ["resid_pre", "resid_mid", "resid_post"])
def test_an_edit_of_the_sum_over_streams_is_spread_evenly(ids: Tensor, role: str) -> None:
    bridge, sites = load_bridge(tiny("dhc"))
    shift = torch.randn(24, generator=torch.Generator().manual_seed(3))

    def in_place(total: Tensor) -> Tensor:
        total += shift
        return total

    if role == "resid_pre":
        spread = _edited(bridge, ids, (sites.name("streams", 2), lambda x: x + shift / 4))
        edited = _edited(bridge, ids, (sites.name(role, 2), in_place))
        torch.testing.assert_close(edited, spread, atol=1e-5, rtol=1e-4)
    else:
        hooks = [(sites.name(role, 2), lambda x, hook: in_place(x))]
        with bridge.hooks(fwd_hooks=hooks):
            _, moved = bridge.run_with_cache(ids)
        _, plain = bridge.run_with_cache(ids)
        name = "blocks.2.mlp_hc.hook_in" if role == "resid_mid" else sites.name("streams", 3)
        torch.testing.assert_close(
            moved[name] - plain[name], (shift / 4).expand_as(plain[name]), atol=1e-5, rtol=1e-4
        )


def test_hyper_connection_sites_are_the_matrices_that_move_the_streams(ids: Tensor) -> None:
    bridge, sites = load_bridge(tiny("dhc"))
    _, cache = bridge.run_with_cache(ids)
    streams, out = cache[sites.name("streams", 1)], cache[sites.name("attn_out", 1)]
    alpha, beta = (cache[sites.name(f"attn_connection_{name}", 1)] for name in ("alpha", "beta"))
    moved = torch.einsum("btrc,btrd->btcd", alpha, streams)
    torch.testing.assert_close(cache["blocks.1.ln1.hook_in"], moved[:, :, 0], atol=1e-5, rtol=1e-4)
    written = moved[:, :, 1:] + beta[..., None] * out[:, :, None]
    torch.testing.assert_close(cache["blocks.1.mlp_hc.hook_in"], written, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(cache[sites.name("resid_mid", 1)], written.sum(2), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("model_type", ["transformer", "SATFormer", "denseformer", "dhc"])
def test_the_stream_is_what_a_model_would_end_with_if_it_were_cut_behind_the_layer(
    ids: Tensor, model_type: str
) -> None:
    (bridge, sites), double = load_bridge(tiny(model_type)), tiny(model_type)
    _, cache = bridge.run_with_cache(ids)
    for n_layers in (1, 2, 3, 4):
        config = double.config.to_dict() | {"num_hidden_layers": n_layers}
        cut = MODELS[model_type](MODELS[model_type].config_class(**config)).eval()
        cut.load_state_dict({k: v for k, v in double.state_dict().items() if k in cut.state_dict()})
        ended = cut.model.norm(cache[sites.name("stream", n_layers - 1)])
        torch.testing.assert_close(ended, cut.model(ids).last_hidden_state, atol=1e-5, rtol=1e-4)


@model_types
@pytest.mark.parametrize("kind", ["stream", "document"])
def test_a_pass_measures_the_untouched_model_whatever_the_padding(model_type: str, kind: str) -> None:
    (bridge, sites), double = load_bridge(tiny(model_type)), tiny(model_type)
    clean = Condition(name="clean", accumulators=(NllByDocument(4),))
    stream(bridge, sites, _rows(kind=kind), [clean])
    total = torch.zeros(4, dtype=torch.float64)
    for batch in _rows(kind=kind):
        for row in range(len(batch.row)):
            ids = batch.input_ids[row][batch.real[row]][None]  # alone and without padding
            nll, docs = plain_nll(double, ids)[0], batch.doc[row][batch.real[row]][1:]
            keep = batch.scored[row][: len(nll)]
            total.index_add_(0, docs[keep], nll[keep])
    torch.testing.assert_close(clean.accumulators[0].nll, total, rtol=0, atol=2e-5)


@model_types
@pytest.mark.parametrize("role", ["attn_out", "resid_post", "mlp_gate_pre"])
def test_a_pass_that_begins_at_its_edit_equals_the_whole_pass(model_type: str, role: str) -> None:
    bridge, sites = load_bridge(tiny(model_type))
    conditions = [Condition(name="clean", accumulators=(NllByDocument(4),))]
    for layer in range(4):
        edit = Edit(role=role, layer=layer, apply=lambda x, _: 1.5 * x)
        conditions.append(Condition(name=str(layer), edits=(edit,), accumulators=(NllByDocument(4),)))
    stream(bridge, sites, _rows(), conditions)
    for layer in range(4):
        total = torch.zeros(4, dtype=torch.float64)
        for batch in _rows():
            logits = _edited(bridge, batch.input_ids, (sites.name(role, layer), lambda x: 1.5 * x)).double()
            nll = -logits[:, :-1].log_softmax(-1).gather(-1, batch.input_ids[:, 1:, None])[..., 0]
            scored = batch.scored[:, : nll.shape[1]]
            total.index_add_(0, batch.doc[:, 1:][scored], nll[scored])
        torch.testing.assert_close(conditions[layer + 1].accumulators[0].nll, total, rtol=0, atol=2e-5)


@model_types
def test_the_lens_of_the_last_layer_is_the_model_and_of_others_reads_their_stream(model_type: str) -> None:
    bridge, sites = load_bridge(tiny(model_type))
    lens = LensNll(4, sites, lambda residual, batch: nll_of(bridge, residual, batch))
    nll = NllByDocument(4)
    stream(bridge, sites, _rows(), [Condition(name="clean", accumulators=(lens, nll))])
    assert torch.equal(lens.layers[3].nll, nll.nll)
    for layer in range(4):
        total = torch.zeros(4, dtype=torch.float64)
        for batch in _rows():
            _, cache = bridge.run_with_cache(batch.input_ids)
            model = bridge.original_model
            hidden = model.model.norm(cache[sites.name("stream", layer)])
            logits = model.lm_head(hidden).double()
            score = -logits[:, :-1].log_softmax(-1).gather(-1, batch.input_ids[:, 1:, None])[..., 0]
            scored = batch.scored[:, : score.shape[1]]
            total.index_add_(0, batch.doc[:, 1:][scored], score[scored])
        torch.testing.assert_close(lens.layers[layer].nll, total, rtol=0, atol=2e-5)


@pytest.mark.parametrize("kind", ["stream", "document"])
def test_static_gates_are_counted_once_a_text_position_whatever_the_padding(kind: str) -> None:
    model = tiny("ResFormer")
    model.model.lambda_manager.lambda_scale.fill_(-2.0)  # lambda_1 may be negative, and zero
    model.model.lambda_manager.lambda_logits.copy_(torch.tensor([0.3, -torch.inf, 0.1]))
    lambdas = model.model.lambda_manager().double()
    bridge, sites = load_bridge(model)
    stats = GateStatistics(4, sites)
    stream(bridge, sites, _rows(kind=kind), [Condition(name="clean", accumulators=(stats,))])
    lengths = torch.tensor([len(doc) for doc in DOCS], dtype=torch.float64)
    assert torch.equal(stats.doc_count, lengths)
    expected = lengths[:, None, None] * lambdas[None, :, None].expand(4, 3, 2)
    torch.testing.assert_close(stats.doc_sum, expected, atol=1e-5, rtol=1e-6)
    assert torch.equal(
        stats.doc_closed, lengths[:, None, None] * (lambdas == 0).double()[None, :, None].expand(4, 3, 2)
    )
    filled = stats.histogram.sum(1)  # over heads
    for at, value in enumerate(lambdas.float()):
        low, high = stats.edges[:-1] <= value, value < stats.edges[1:]
        inside = filled[at] * (low & high) if value else stats.exact_zero[at].sum()
        assert float(inside.sum()) == 2 * float(lengths.sum())


def test_zeroing_a_resformers_gates_restarts_exactly_where_it_begins() -> None:
    bridge, sites = load_bridge(tiny("ResFormer"))
    known = Calibration(mean=torch.zeros(4, 2), sample=torch.zeros(4, 2, 3))
    edits = {"one": (2,), "all": (1, 2, 3), "none": ()}
    conditions = [Condition(name="clean", accumulators=(NllByDocument(4),))]
    for name, layers in edits.items():
        heads = () if name == "none" else None
        made = tuple(zero(n, heads, known, 0) for n in layers or (1, 2, 3))
        conditions.append(Condition(name=name, edits=made, accumulators=(NllByDocument(4),)))
    stream(bridge, sites, _rows(), conditions)
    clean, one, everything, nothing = (c.accumulators[0].nll for c in conditions)
    assert torch.equal(nothing, clean)
    assert not torch.equal(one, clean) and not torch.equal(everything, one)
