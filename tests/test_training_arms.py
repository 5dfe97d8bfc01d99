"""The trainer's two arms for development studies: attention that writes nothing for ever, and a plain GELU MLP."""

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_training import MODEL, contents, data, recipe, weights  # noqa: F401 - data is a fixture
from torch import Tensor

from satlens import load_bridge, load_model
from satlens.errors import UserError
from satlens.hf import MODELS
from satlens.training.loop import new_optimizer, train

Make = Callable[..., Any]
GELU = {"mlp": "gelu", "mlp_bias": True}
OFF = {"attention_disabled": True}
ARMS = {"gelu": GELU, "gelu_off": {**GELU, **OFF}, "swiglu_off": OFF, "swiglu_bias": {"mlp_bias": True}}
TYPES = ("SATFormer", "transformer")


def snapshots(out: Path) -> list[Path]:
    return sorted((out / "snapshots").iterdir())


# --- the models ---


@pytest.mark.parametrize("model_type", TYPES)
def test_the_plain_mlp_is_gelu_between_two_affine_maps(make_model: Make, model_type: str) -> None:
    mlp = make_model(model_type, **GELU).model.layers[1].mlp
    x = torch.randn(2, 5, 24, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    mlp = mlp.double()
    pre = x @ mlp.up_proj.weight.T + mlp.up_proj.bias
    expected = pre * (1 + torch.erf(pre / 2**0.5)) / 2 @ mlp.down_proj.weight.T + mlp.down_proj.bias
    with torch.no_grad():
        torch.testing.assert_close(mlp(x), expected, atol=1e-12, rtol=0)
    assert bool(mlp.up_proj.bias.any()) and bool(mlp.down_proj.bias.any())


@pytest.mark.parametrize("mlp_bias", [False, True])
@pytest.mark.parametrize("mlp", ["swiglu", "gelu"])
def test_biases_are_there_only_when_asked_for(make_model: Make, mlp: str, mlp_bias: bool) -> None:
    model = make_model("transformer", mlp=mlp, mlp_bias=mlp_bias)
    biases = {name.split(".mlp.")[1] for name, _ in model.named_parameters() if name.endswith("bias")}
    named = {"up_proj.bias", "down_proj.bias"} | ({"gate_proj.bias"} if mlp == "swiglu" else set())
    assert biases == (named if mlp_bias else set())


def test_the_defaults_are_the_official_model(make_model: Make) -> None:
    plain = make_model("transformer")
    named = make_model("transformer", mlp="swiglu", mlp_bias=False, attention_disabled=False)
    assert list(plain.state_dict()) == list(named.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), named.parameters(), strict=True))
    assert all(parameter.requires_grad for parameter in plain.parameters())


def test_a_derived_width_is_four_times_the_stream_for_the_plain_mlp(make_model: Make) -> None:
    assert make_model("transformer", intermediate_size=None, mlp="gelu").config.mlp_width == 96
    assert make_model("transformer", intermediate_size=None, mlp="swiglu").config.mlp_width == 256


def test_the_config_names_the_nonlinearity_that_other_libraries_read(make_model: Make) -> None:
    assert make_model("transformer", mlp="gelu").config.hidden_act == "gelu"
    assert make_model("transformer").config.hidden_act == "swish"
    assert load_bridge(make_model("transformer", mlp="gelu"))[0].cfg.act_fn == "gelu"
    with pytest.raises(ValueError, match="hidden_act is 'silu'; only 'gelu' is defined for a gelu MLP"):
        make_model("transformer", mlp="gelu", hidden_act="silu")


def test_an_unknown_mlp_is_refused(make_model: Make) -> None:
    with pytest.raises(ValueError, match="unknown mlp 'relu'; known: swiglu, gelu"):
        make_model("transformer", mlp="relu")


@pytest.mark.parametrize("model_type", TYPES)
def test_disabled_attention_lets_no_token_see_another(make_model: Make, ids: Tensor, model_type: str) -> None:
    model, changed = make_model(model_type, **OFF), ids.clone()
    changed[:, 3] = (changed[:, 3] % 52) + 1
    with torch.no_grad():
        before, after = model(ids).logits, model(changed).logits
    assert (before != after).any(-1).any(0).tolist() == [t == 3 for t in range(ids.shape[1])]


@pytest.mark.parametrize("model_type", TYPES)
def test_all_other_weights_of_a_seed_are_those_of_the_model_whose_attention_works(
    make_model: Make, model_type: str
) -> None:
    on, off = make_model(model_type).state_dict(), make_model(model_type, **OFF).state_dict()
    differ = {name for name in on if not torch.equal(on[name], off[name])}
    assert differ == {f"model.layers.{i}.attn.o_proj.weight" for i in range(4)}
    assert not any(bool(off[name].any()) for name in differ)


@pytest.mark.parametrize("arm", ARMS)
@pytest.mark.parametrize("model_type", TYPES)
def test_every_site_of_an_arm_is_live(make_model: Make, ids: Tensor, model_type: str, arm: str) -> None:
    bridge, sites = load_bridge(make_model(model_type, **ARMS[arm]))
    with torch.no_grad():
        plain = bridge(ids)
        for role in sites.roles():
            for layer in sites.layers(role):
                fired: list[tuple[int, ...]] = []

                def skew(x: Tensor, hook: Any, fired: list[tuple[int, ...]] = fired) -> Tensor:
                    fired.append(tuple(x.shape))
                    return x * torch.linspace(0.5, 1.6, x.shape[-1]) + 0.1

                with bridge.hooks(fwd_hooks=[(sites.name(role, layer), skew)]):
                    moved = bridge(ids)
                assert len(fired) == 1 and not torch.allclose(moved, plain, atol=1e-5), (role, layer)
                assert torch.equal(bridge(ids), plain), (role, layer)


def test_a_disabled_attention_has_no_roles_inside(make_model: Make) -> None:
    on = set(load_bridge(make_model())[1].roles())
    bridge, sites = load_bridge(make_model(**OFF))
    inside = {"q", "k", "value", "pattern", "z", "gate", "gate_logit", "first_value", "mixed_value"}
    assert on - set(sites.roles()) == inside and sites.gate_kind is None
    assert "blocks.0.attn.hook_out" in bridge.hook_dict


@pytest.mark.parametrize("model_type", TYPES)
def test_the_gate_sites_of_the_plain_mlp_hold_its_affine_map_and_its_gelu(
    make_model: Make, ids: Tensor, model_type: str
) -> None:
    model = make_model(model_type, **GELU)
    up = model.model.layers[2].mlp.up_proj
    weight, bias = up.weight.detach().clone(), up.bias.detach().clone()
    bridge, sites = load_bridge(model)
    assert sites.d_mlp == 40 == len(bias)
    names = [sites.name(role, 2) for role in ("mlp_gate_pre", "mlp_post")]
    with torch.no_grad():
        _, cache = bridge.run_with_cache(ids)
    read = cache["blocks.2.ln2.hook_out"]
    torch.testing.assert_close(cache[names[0]], read @ weight.T + bias, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(cache[names[1]], torch.nn.functional.gelu(cache[names[0]]))


@pytest.mark.parametrize("arm", ARMS)
def test_bridges_of_an_arm_are_bit_equal_and_fold(make_model: Make, ids: Tensor, arm: str) -> None:
    model = make_model("transformer", **ARMS[arm])
    with torch.no_grad():
        plain = model(ids).logits
        bridge, _ = load_bridge(model)
        assert torch.equal(bridge(ids), plain)
        bridge.enable_compatibility_mode(fold_value_biases=False, disable_warnings=True)
        torch.testing.assert_close(bridge(ids).log_softmax(-1), plain.log_softmax(-1), atol=2e-5, rtol=1e-4)


# --- training ---


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("arch", TYPES)
def test_a_frozen_zero_stays_zero_and_all_else_learns(
    data: Path,  # noqa: F811
    tmp_path: Path,
    arch: str,
    precision: str,
) -> None:
    out = tmp_path / "out"
    model = {**MODEL, **GELU, **OFF}
    train(recipe(data, out, arch=arch, model=model, precision=precision, weight_decay=10.0))
    first, last = weights(snapshots(out)[0]), weights(snapshots(out)[-1])
    for name, tensor in last.items():
        if name.endswith("o_proj.weight"):
            assert not bool(tensor.any()), name
        else:
            assert not torch.equal(tensor, first[name]), name


def test_the_optimizer_never_sees_a_frozen_parameter(make_model: Make, tmp_path: Path) -> None:
    model = make_model(**OFF)
    optimizer = new_optimizer(recipe(tmp_path, tmp_path), model)
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    frozen = [p for name, p in model.named_parameters() if name.endswith("o_proj.weight")]
    assert len(frozen) == 4 and not any(id(p) in held for p in frozen)
    assert len(held) == sum(1 for _ in model.parameters()) - 4


def test_attention_weights_only_decay_when_attention_writes_nothing(data: Path, tmp_path: Path) -> None:  # noqa: F811
    out = tmp_path / "out"
    train(recipe(data, out, model={**MODEL, **OFF}, weight_decay=0.0))
    first, last = weights(snapshots(out)[0]), weights(snapshots(out)[-1])
    silent = {name for name in first if torch.equal(first[name], last[name])}
    assert silent == {n for n in first if ".attn." in n and "norm" not in n} | {
        n for n in first if "q_norm" in n or "k_norm" in n or ".attn_norm." in n
    }


KILLED = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, {tests!r})
import torch
torch.set_num_threads(1)
import satlens.training.loop as loop_module
from test_training import MODEL, recipe
whole = loop_module._Run._step
def step(self, number):
    if number == 8:
        os.kill(os.getpid(), signal.SIGKILL)
    return whole(self, number)
loop_module._Run._step = step
loop_module.train(recipe(Path({data!r}), Path({out!r}), arch="transformer", model={{**MODEL, **{arm!r}}}))
"""


def test_an_arm_killed_half_way_ends_in_the_same_bytes(data: Path, tmp_path: Path) -> None:  # noqa: F811
    arm = {**GELU, **OFF}
    out, whole = tmp_path / "out", tmp_path / "whole"
    given = {"arch": "transformer", "model": {**MODEL, **arm}}
    train(recipe(data, whole, **given))
    code = KILLED.format(tests=str(Path(__file__).parent), data=str(data), out=str(out), arm=arm)
    killed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    torch.manual_seed(999)
    train(recipe(data, out, **given))
    assert contents(out) == contents(whole)


@pytest.mark.parametrize("arm", ARMS)
def test_a_finished_arm_says_what_it_is_and_opens_again(
    data: Path,  # noqa: F811
    tmp_path: Path,
    ids: Tensor,
    arm: str,
) -> None:
    out = tmp_path / "out"
    train(recipe(data, out, arch="transformer", model={**MODEL, **ARMS[arm]}))
    facts = json.loads((out / "final" / "satlens.json").read_text())
    config = json.loads((out / "final" / "config.json").read_text())
    assert facts["attention_disabled"] == ARMS[arm].get("attention_disabled", False)
    assert all(config[key] == facts["recipe"]["model"][key] == value for key, value in ARMS[arm].items())
    model, last = load_model(out / "final"), weights(out / "final")
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    assert frozen == {n for n in last if n.endswith("o_proj.weight") and facts["attention_disabled"]}
    _, sites = load_bridge(out / "final")
    assert sites.layers("mlp_gate_pre") == (0, 1)
    again = MODELS["transformer"].from_pretrained(out / "final")
    with torch.no_grad():
        assert torch.equal(again(ids).logits, load_model(out / "final")(ids).logits)


def test_weights_that_contradict_a_disabled_attention_are_refused(make_model: Make, tmp_path: Path) -> None:
    make_model(**OFF).save_pretrained(tmp_path)
    load_model(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.2.attn.o_proj.weight"][0, 0] = 1e-3
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        UserError, match=r"attention_disabled, but model\.layers\.2\.attn\.o_proj\.weight is not"
    ):
        load_model(tmp_path)
