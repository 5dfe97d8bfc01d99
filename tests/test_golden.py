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
SITES = {"v_mixed": "mixed_value", "alpha": "gate", "attn_out": "attn_out", "mlp_out": "mlp_out"}


def _folder(case: Path) -> Path:
    return case / "final" if (case / "final").is_dir() else case


def _name(case: Path) -> str:
    return f"{case.parent.name}-{case.name}"


def _require_close(found: Tensor, expected: Tensor, what: str) -> None:
    bound = 1e-5 * max(1.0, float(expected.abs().max()))
    assert found.shape == expected.shape, what
    assert float((found - expected).abs().max()) <= bound, what


def test_all_official_cases_are_here() -> None:
    assert len(CASES) == 11 and len(FULL) == 10


@pytest.mark.parametrize("case", CASES, ids=_name)
def test_logits_and_loss_equal_the_reference(case: Path) -> None:
    io, model = load_file(case / "io.safetensors"), load_model(_folder(case))
    with torch.no_grad():
        out = model(io["input_ids"], labels=io["input_ids"])
    _require_close(out.logits, io["logits"], "logits")
    assert abs(float(out.loss - io["loss"])) <= 1e-5


@pytest.mark.parametrize("case", FULL, ids=_name)
def test_hidden_states_equal_the_reference(case: Path) -> None:
    io, model = load_file(case / "io.safetensors"), load_model(case)
    with torch.no_grad():
        states = model(io["input_ids"], output_hidden_states=True).hidden_states
    assert len(states) == model.config.num_hidden_layers + 1
    for i, state in enumerate(states):
        _require_close(state, io[f"hidden_states.{i}"], f"hidden_states.{i}")


@pytest.mark.parametrize("case", FULL, ids=_name)
def test_gradients_equal_the_reference(case: Path) -> None:
    io, model = load_file(case / "io.safetensors"), load_model(case)
    model(io["input_ids"], labels=io["input_ids"]).loss.backward()
    for name, weight in model.named_parameters():
        expected = float(io[f"grad_norm.{name}"])
        found = float(weight.grad.norm()) if weight.grad is not None else 0.0
        assert found == pytest.approx(expected, rel=1e-4, abs=1e-6), name
        if f"grad.{name}" in io:
            _require_close(weight.grad, io[f"grad.{name}"], f"grad.{name}")


@pytest.mark.parametrize("case", FULL, ids=_name)
def test_every_reference_tensor_is_found_at_its_site(case: Path) -> None:
    io, (bridge, sites) = load_file(case / "io.safetensors"), load_bridge(case)
    with torch.no_grad():
        _, cache = bridge.run_with_cache(io["input_ids"])
    for i in range(sites.n_layers):
        _require_close(cache[sites.name("resid_pre", i)], io[f"hidden_states.{i}"], f"resid_pre.{i}")
        _require_close(cache[sites.name("resid_post", i)], io[f"block_out.{i}"], f"resid_post.{i}")
        mid = cache[sites.name("resid_pre", i)] + cache[sites.name("attn_out", i)]
        assert torch.equal(cache[sites.name("resid_mid", i)], mid)
    checked = 0
    for key, expected in io.items():
        stem, _, layer = key.rpartition(".")
        if stem in SITES:
            _require_close(cache[sites.name(SITES[stem], int(layer))], expected, key)
            checked += 1
    assert checked == 2 * sites.n_layers + 2 * len(sites.layers("gate"))
    if "v1" in io:
        for layer in sites.layers("first_value"):
            _require_close(cache[sites.name("first_value", layer)], io["v1"], f"v1 at layer {layer}")
        _require_close(cache[sites.name("value", 0)], io["v1"], "value at layer 0")


@pytest.mark.parametrize("case", FULL, ids=_name)
def test_gate_is_its_nonlinearity_of_the_logit(case: Path) -> None:
    io, (bridge, sites) = load_file(case / "io.safetensors"), load_bridge(case)
    with torch.no_grad():
        _, cache = bridge.run_with_cache(io["input_ids"])
    for layer in sites.layers("gate"):
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
