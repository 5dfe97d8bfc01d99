"""The official reference's outputs, reproduced by the plain models and seen through the bridge's sites."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from satlens import load_bridge, load_model

GOLDEN = Path(__file__).parent / "golden"
CASES = sorted(path for path in GOLDEN.glob("*/*") if path.is_dir())
FULL = [case for case in CASES if not (case / "final").is_dir()]
SITES = {
    "v_mixed": "mixed_value",
    "alpha": "gate",
    "attn_out": "attn_out",
    "mlp_out": "mlp_out",
    "dwa_out": "stream",
}
STREAMS = ("query_stream", "key_stream", "value_stream", "resid_pre")
"""MUDDFormer's streams in the order the reference numbers them."""


def _folder(case: Path) -> Path:
    return case / "final" if (case / "final").is_dir() else case


def _name(case: Path) -> str:
    return f"{case.parent.name}-{case.name}"


def _loose(model: Any) -> float:
    """Hyper-connections are worse conditioned: the tolerances are those of the reference's own README."""
    return 2.0 if model.config.model_type == "dhc" else 1.0


def _require_close(found: Tensor, expected: Tensor, what: str, loose: float = 1.0) -> None:
    bound = loose * 1e-5 * max(1.0, float(expected.abs().max()))
    assert found.shape == expected.shape, what
    assert float((found - expected).abs().max()) <= bound, what


def test_all_official_cases_are_here() -> None:
    assert len(CASES) == 20 and len(FULL) == 18


@pytest.mark.parametrize("case", CASES, ids=_name)
def test_logits_and_loss_equal_the_reference(case: Path) -> None:
    io, model = load_file(case / "io.safetensors"), load_model(_folder(case))
    with torch.no_grad():
        out = model(io["input_ids"], labels=io["input_ids"])
    _require_close(out.logits, io["logits"], "logits", _loose(model))
    assert abs(float(out.loss - io["loss"])) <= 1e-5


@pytest.mark.parametrize("case", FULL, ids=_name)
def test_hidden_states_equal_the_reference(case: Path) -> None:
    io, model = load_file(case / "io.safetensors"), load_model(case)
    with torch.no_grad():
        states = model(io["input_ids"], output_hidden_states=True).hidden_states
    assert len(states) == model.config.num_hidden_layers + 1
    for i, state in enumerate(states):
        _require_close(state, io[f"hidden_states.{i}"], f"hidden_states.{i}", _loose(model))


@pytest.mark.parametrize("case", FULL, ids=_name)
def test_gradients_equal_the_reference(case: Path) -> None:
    io, model = load_file(case / "io.safetensors"), load_model(case)
    model(io["input_ids"], labels=io["input_ids"]).loss.backward()
    # in float64 ours is as far from the reference's float32 gradients of hyper-connections as in float32
    rel = 5e-4 if model.config.model_type == "dhc" else 1e-4
    for name, weight in model.named_parameters():
        expected = float(io[f"grad_norm.{name}"])
        found = float(weight.grad.norm()) if weight.grad is not None else 0.0
        assert found == pytest.approx(expected, rel=rel, abs=1e-6), name
        if f"grad.{name}" in io:
            _require_close(weight.grad, io[f"grad.{name}"], f"grad.{name}", rel / 1e-5 if rel > 1e-4 else 1.0)


@pytest.mark.parametrize("case", FULL, ids=_name)
def test_every_reference_tensor_is_found_at_its_site(case: Path) -> None:
    io, (bridge, sites) = load_file(case / "io.safetensors"), load_bridge(case)
    with torch.no_grad():
        _, cache = bridge.run_with_cache(io["input_ids"])
    for key, expected in io.items():
        if key.startswith("grad") or key in ("input_ids", "logits", "loss"):
            continue
        places = _places(key, sites)
        assert places, key
        for name in places:
            found = cache[name][0, 0, 0] if key.startswith("lambda1") else cache[name]
            wanted = expected[int(name.split(".")[1]) - 1] if key == "lambda1" else expected
            _require_close(found, wanted, f"{key} at {name}", _loose(bridge.original_model))


def _places(key: str, sites: Any) -> list[str]:
    """Hook names where a tensor of the reference must stand, by what the specification says of it."""
    stem, *numbers = key.split(".")
    kind, last = sites.architecture, sites.n_layers - 1
    layer = int(numbers[0]) if numbers else -1
    if key == "v1":
        return [sites.name("value", 0), *(sites.name("first_value", n) for n in sites.layers("first_value"))]
    if key == "lambda1":
        return [sites.name("gate", n) for n in sites.layers("gate")]
    if stem == "hidden_states":
        if layer > last:
            return ["ln_final.hook_out"]
        if kind == "muddformer" and layer:  # there the reference reports raw outputs, not streams
            return [sites.name("resid_post", layer - 1)]
        return [sites.name("resid_pre", layer)]
    if stem == "block_out" and kind == "dhc":
        return [f"blocks.{layer}.hook_out"] + ([sites.name("streams", layer + 1)] if layer < last else [])
    if stem == "block_out":
        return [sites.name("resid_post", layer)]
    if stem == "da_out":
        way = int(numbers[1])
        ahead = [sites.name(STREAMS[way], layer + 1)] if layer < last else []
        return ahead + ([sites.name("stream", layer)] if layer == last or way == 3 else [])
    return [sites.name(SITES[stem], layer)]


@pytest.mark.parametrize("case", FULL, ids=_name)
def test_the_streams_of_a_block_add_up(case: Path) -> None:
    io, (bridge, sites) = load_file(case / "io.safetensors"), load_bridge(case)
    with torch.no_grad():
        _, cache = bridge.run_with_cache(io["input_ids"])
    for i in range(sites.n_layers):
        before, attention, middle, mlp, after = (
            cache[sites.name(role, i)]
            for role in ("resid_pre", "attn_out", "resid_mid", "mlp_out", "resid_post")
        )
        if sites.architecture != "dhc":  # there the sum before a block is mixed, not carried
            assert torch.equal(middle, before + attention) and torch.equal(after, middle + mlp)
    end = cache[sites.name("stream", sites.n_layers - 1)]
    assert torch.equal(cache["ln_final.hook_in"], end)


@pytest.mark.parametrize("case", FULL, ids=_name)
def test_gate_is_its_nonlinearity_of_the_logit(case: Path) -> None:
    io, (bridge, sites) = load_file(case / "io.safetensors"), load_bridge(case)
    with torch.no_grad():
        _, cache = bridge.run_with_cache(io["input_ids"])
    for layer in sites.layers("gate_logit"):
        alpha = _gate(str(sites.gate_kind), cache[sites.name("gate_logit", layer)])
        torch.testing.assert_close(cache[sites.name("gate", layer)], alpha)


def _gate(kind: str, z: Tensor) -> Tensor:
    """The table of the specification, spelled independently of the model."""
    share = z.exp() / z.exp().sum(-1, keepdim=True) * z.shape[-1]
    squashed = 1 / (1 + (-z).exp())
    table: dict[str, Any] = {
        "relu": z.clamp(min=0),
        "sigmoid": squashed,
        "tanh": (z.exp() - (-z).exp()) / (z.exp() + (-z).exp()),
        "identity": z,
        "softmax": share,
        "softmax_sigmoid": share * squashed,
    }
    return table[kind]
