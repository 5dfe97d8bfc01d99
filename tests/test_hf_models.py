"""The HuggingFace-native models: caching, padding, windows, checkpointing, saving, and how the two relate."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from satlens.hf import GATES, MODELS
from satlens.hf.decoder import CACHE_FIELD

TYPES = tuple(MODELS)
Make = Callable[..., Any]


@pytest.mark.parametrize("model_type", TYPES)
@pytest.mark.parametrize("window", [None, 4])
def test_cached_decoding_equals_the_full_forward(
    make_model: Make, ids: Tensor, model_type: str, window: int | None
) -> None:
    model = make_model(model_type, window_size=window)
    with torch.no_grad():
        full = model(ids).logits
        out = model(ids[:, :5], use_cache=True)
        steps = [out.logits]
        for t in range(5, ids.shape[1]):
            out = model(ids[:, t : t + 1], past_key_values=out[CACHE_FIELD], use_cache=True)
            steps.append(out.logits)
    torch.testing.assert_close(torch.cat(steps, dim=1), full, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("model_type", TYPES)
def test_cached_decoding_in_chunks_with_left_padding_equals_the_unpadded_row(
    make_model: Make, ids: Tensor, model_type: str
) -> None:
    model, row = make_model(model_type), ids[:1]
    padded = torch.cat((torch.zeros_like(row[:, :3]), row), dim=1)
    mask = (torch.arange(padded.shape[1]) >= 3).long()[None]
    with torch.no_grad():
        first = model(padded[:, :8], attention_mask=mask[:, :8], use_cache=True)
        rest = model(padded[:, 8:], attention_mask=mask, past_key_values=first[CACHE_FIELD], use_cache=True)
        plain = model(row).logits
    found = torch.cat((first.logits[:, 3:], rest.logits), dim=1)
    torch.testing.assert_close(found, plain, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("model_type", TYPES)
@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_rows_equal_unpadded_rows(make_model: Make, ids: Tensor, model_type: str, side: str) -> None:
    model = make_model(model_type)
    short = ids[:1, :6]
    pad, real = torch.full_like(ids[:1, :5], 7), torch.ones_like(short)
    row = torch.cat((pad, short) if side == "left" else (short, pad), dim=1)
    mask = torch.cat((0 * pad, real) if side == "left" else (real, 0 * pad), dim=1)
    with torch.no_grad():
        both = model(torch.cat((row, ids[1:])), attention_mask=torch.cat((mask, torch.ones_like(ids[1:]))))
        alone, other = model(short).logits, model(ids[1:]).logits
    kept = both.logits[:1, 5:] if side == "left" else both.logits[:1, :6]
    torch.testing.assert_close(kept, alone, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(both.logits[1:], other, atol=1e-5, rtol=1e-5)
    assert torch.isfinite(both.logits).all()


@pytest.mark.parametrize("model_type", TYPES)
def test_a_window_hides_what_lies_before_it(make_model: Make, ids: Tensor, model_type: str) -> None:
    model = make_model(model_type, window_size=3, num_hidden_layers=1, tie_word_embeddings=False)
    changed = ids.clone()
    changed[:, 4] = (changed[:, 4] % 52) + 1
    with torch.no_grad():
        before, after = model(ids).logits, model(changed).logits
    moved = (before != after).any(-1).any(0)
    assert moved.tolist() == [4 <= t < 7 for t in range(ids.shape[1])]


@pytest.mark.parametrize("model_type", TYPES)
def test_a_window_as_long_as_the_input_changes_nothing(
    make_model: Make, ids: Tensor, model_type: str
) -> None:
    with torch.no_grad():
        wide = make_model(model_type, window_size=ids.shape[1])(ids).logits
        assert torch.equal(wide, make_model(model_type)(ids).logits)


def test_attention_weights_on_request_are_causal_and_leave_logits_unchanged(
    make_model: Make, ids: Tensor
) -> None:
    model = make_model()
    with torch.no_grad():
        out, plain = model(ids, output_attentions=True), model(ids)
    torch.testing.assert_close(out.logits, plain.logits, atol=1e-5, rtol=1e-5)
    assert plain.attentions is None and len(out.attentions) == 4
    for weights in out.attentions:
        torch.testing.assert_close(weights.sum(-1), torch.ones(2, 4, ids.shape[1]))
        assert float(weights.triu(1).abs().max()) == 0


@pytest.mark.parametrize("model_type", TYPES)
@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_gives_the_same_gradients(
    make_model: Make, ids: Tensor, model_type: str, reentrant: bool
) -> None:
    plain, saving = make_model(model_type).train(), make_model(model_type).train()
    # the older name warns from transformers 5.24 on
    enable = getattr(saving, "activation_checkpointing_enable", None) or saving.gradient_checkpointing_enable
    enable({"use_reentrant": reentrant})
    saving.enable_input_require_grads()  # reentrant checkpointing needs an input that asks for gradients
    for model in (plain, saving):
        model(ids, labels=ids, use_cache=False).loss.backward()
    assert saving.model.layers[0].gradient_checkpointing
    for (name, a), (_, b) in zip(plain.named_parameters(), saving.named_parameters(), strict=True):
        torch.testing.assert_close(b.grad, a.grad, msg=lambda text, name=name: f"{name}: {text}")


def test_v1_carries_gradient_to_the_first_value_projection(make_model: Make, ids: Tensor) -> None:
    model = make_model(tie_word_embeddings=False)
    seen: list[Tensor] = []
    model.model.layers[0].attn.first_value.register_forward_hook(
        lambda m, i, o: (o.retain_grad(), seen.append(o))[1]
    )
    model(ids, labels=ids).loss.backward()
    assert seen[0].grad is not None and float(seen[0].grad.abs().sum()) > 0


@pytest.mark.parametrize("model_type", TYPES)
@pytest.mark.parametrize("tied", [True, False])
def test_saving_and_loading_keeps_the_model(
    make_model: Make, ids: Tensor, tmp_path: Path, model_type: str, tied: bool
) -> None:
    model = make_model(model_type, tie_word_embeddings=tied)
    model.save_pretrained(tmp_path)
    config, again = AutoConfig.from_pretrained(tmp_path), AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(again) is type(model) and type(config) is type(model.config)
    assert (again.lm_head.weight is again.model.embeddings.weight) == tied
    with torch.no_grad():
        assert torch.equal(again(ids).logits, model(ids).logits)
        assert torch.equal(type(model).from_pretrained(tmp_path)(ids).logits, model(ids).logits)


@pytest.mark.parametrize("model_type", TYPES)
def test_greedy_generation_equals_an_explicit_argmax_loop(
    make_model: Make, ids: Tensor, model_type: str
) -> None:
    model, prompt = make_model(model_type, eos_token_id=None), ids[:, :4]
    with torch.no_grad():
        generated = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=8, do_sample=False
        )
        tokens = prompt
        for _ in range(8):
            tokens = torch.cat((tokens, model(tokens).logits[:, -1:].argmax(-1)), dim=1)
    assert generated.tolist() == tokens.tolist()


def test_zero_gate_equals_a_plain_transformer_with_the_same_weights(make_model: Make, ids: Tensor) -> None:
    gated, plain = make_model("SATFormer"), make_model("transformer", seed=9)
    assert set(gated.state_dict()) - set(plain.state_dict()) == {
        f"model.layers.{i}.attn.value_residual_mixing.alpha_proj.weight" for i in (1, 2, 3)
    }
    plain.load_state_dict({k: v for k, v in gated.state_dict().items() if "value_residual" not in k})
    with torch.no_grad():
        assert not torch.equal(gated(ids).logits, plain(ids).logits)
        for layer in gated.model.layers[1:]:
            layer.attn.value_residual_mixing.alpha_proj.weight.zero_()
        assert torch.equal(gated(ids).logits, plain(ids).logits)


@pytest.mark.parametrize(("last_k", "mixing"), [(None, [1, 2, 3]), (0, []), (2, [2, 3]), (9, [1, 2, 3])])
def test_last_k_decides_which_layers_mix(make_model: Make, last_k: int | None, mixing: list[int]) -> None:
    model = make_model(value_residual_last_k=last_k)
    assert [i for i, block in enumerate(model.model.layers) if block.attn.mixes] == mixing
    keys = [key for key in model.state_dict() if "value_residual_mixing" in key]
    assert len(keys) == len(mixing)


def test_switching_value_residuals_off_leaves_a_transformer(make_model: Make, ids: Tensor) -> None:
    off, plain = make_model(use_value_residual=False), make_model("transformer")
    plain.load_state_dict(off.state_dict())
    with torch.no_grad():
        assert torch.equal(off(ids).logits, plain(ids).logits)


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_every_gate_runs_with_every_head_grouping(
    make_model: Make, ids: Tensor, gate: str, kv_heads: int
) -> None:
    model = make_model(
        value_residual_gate=gate, num_kv_heads=kv_heads, value_residual_proj_bias=True, qkv_bias=True
    )
    with torch.no_grad():
        assert torch.isfinite(model(ids).logits).all()


def test_logits_to_keep_returns_the_last_positions(make_model: Make, ids: Tensor) -> None:
    model = make_model()
    with torch.no_grad():
        torch.testing.assert_close(model(ids, logits_to_keep=3).logits, model(ids).logits[:, -3:])
    with pytest.raises(ValueError, match="logits_to_keep"):
        model(ids, labels=ids, logits_to_keep=3)


def test_loss_scores_the_next_token_and_skips_ignored_ones(make_model: Make, ids: Tensor) -> None:
    model, labels = make_model(), ids.clone()
    labels[0, 4:] = -100
    with torch.no_grad():
        out = model(ids, labels=labels)
    logp = out.logits.double().log_softmax(-1)
    scored = [(b, t) for b in range(2) for t in range(ids.shape[1] - 1) if labels[b, t + 1] != -100]
    expected = -sum(float(logp[b, t, labels[b, t + 1]]) for b, t in scored) / len(scored)
    assert float(out.loss) == pytest.approx(expected, abs=1e-5)


def test_an_untrained_model_is_initialised_as_the_reference(make_model: Make) -> None:
    from satlens.hf import SATFormerConfig

    torch.manual_seed(0)
    config = SATFormerConfig(hidden_size=128, num_hidden_layers=2, num_heads=4, vocab_size=500, qkv_bias=True)
    for name, weight in MODELS["SATFormer"](config).named_parameters():
        if "norm" in name:
            assert bool((weight == 1).all()), name
        elif name.endswith("bias"):
            assert bool((weight == 0).all()), name
        else:
            assert float(weight.detach().std()) == pytest.approx(0.02, rel=0.15), name


def test_heads_that_do_not_divide_the_width_are_refused(make_model: Make) -> None:
    with pytest.raises(ValueError, match="24 heads do not divide hidden_size 2048"):
        make_model(hidden_size=2048, num_heads=24)


SMALL = {
    "vocab_size": 32000,
    "hidden_size": 768,
    "num_hidden_layers": 11,
    "num_heads": 12,
    "intermediate_size": 3072,
}
OFFICIAL_COUNTS = {
    "transformer": 128_404_096,
    "ResFormer": 128_404_117,
    "SATFormer": 128_496_256,
    "denseformer": 128_404_173,
    "muddformer": 128_729_008,
    "dhc": 128_522_940,
}


@pytest.mark.parametrize("model_type", TYPES)
def test_the_small_preset_has_the_official_number_of_parameters(model_type: str) -> None:
    config = MODELS[model_type].config_class(**SMALL, qk_norm=True, tie_word_embeddings=True)
    with torch.device("meta"):
        model = MODELS[model_type](config)
    assert sum(p.numel() for p in model.parameters()) == OFFICIAL_COUNTS[model_type]


RIVALS = ("ResFormer", "denseformer", "muddformer", "dhc")


@pytest.mark.parametrize("model_type", ("denseformer", "muddformer", "dhc"))
def test_an_untrained_rival_starts_as_a_transformer(ids: Tensor, model_type: str) -> None:
    shape = {
        "hidden_size": 24,
        "num_hidden_layers": 3,
        "num_heads": 4,
        "intermediate_size": 256,
        "vocab_size": 53,
    }
    extra = {"param_realloc": False} if model_type == "muddformer" else {}
    torch.manual_seed(0)
    rival = MODELS[model_type](MODELS[model_type].config_class(**shape, **extra)).eval()
    plain = MODELS["transformer"](MODELS["transformer"].config_class(**shape)).eval()
    own = {name.replace("attn_norm_q", "attn_norm"): tensor for name, tensor in rival.state_dict().items()}
    plain.load_state_dict({name: own[name] for name in plain.state_dict()})
    with torch.no_grad():
        found, expected = (m(ids, output_hidden_states=True).hidden_states[1:-1] for m in (rival, plain))
    # what is said of hyper-connections is the sum of their four streams, which start out equal
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one / (4 if model_type == "dhc" else 1), other, atol=1e-6, rtol=1e-5)


def test_resformer_starts_with_the_official_lambdas(make_model: Make) -> None:
    config = MODELS["ResFormer"].config_class(hidden_size=24, num_hidden_layers=4, num_heads=4, vocab_size=53)
    model = MODELS["ResFormer"](config)
    torch.testing.assert_close(model.model.lambda_manager().detach(), torch.full((3,), 4 / 3))
    assert [b.attn.value_residual_mixing.lambda2.item() for b in model.model.layers[1:]] == [0.5] * 3


def test_hyper_connections_start_as_the_reference_draws_them() -> None:
    torch.manual_seed(0)
    config = MODELS["dhc"].config_class(hidden_size=128, num_hidden_layers=2, num_heads=4, vocab_size=500)
    for layer, block in enumerate(MODELS["dhc"](config).model.layers):
        for place, hc in ((2 * layer, block.attn_hc), (2 * layer + 1, block.mlp_hc)):
            expected = torch.cat((torch.eye(4)[:, [place % 4]], torch.eye(4)), dim=1)
            assert torch.equal(hc.static_alpha, expected) and torch.equal(hc.static_beta, torch.ones(4))
            assert hc.dynamic_alpha_scale.item() == hc.dynamic_beta_scale.item() == pytest.approx(0.01)
            assert not hc.dynamic_alpha_proj.any() and not hc.dynamic_beta_proj.any()
        for linear, std in (
            (block.attn.o_proj, 0.01),
            (block.mlp.down_proj, 0.01),
            (block.attn.q_proj, 0.02),
        ):
            assert float(linear.weight.detach().std()) == pytest.approx(std, rel=0.05)


def test_muddformer_hands_width_out_by_depth() -> None:
    config = MODELS["muddformer"].config_class(**SMALL)
    # the reference's rule, spelled again: half the width first, one and a half times last, to multiples of 256
    shares = [(0.5 * (11 - m) + 1.5 * (m - 1)) / 10 for m in range(1, 12)]
    assert [config.mlp_width_of(i) for i in range(11)] == [
        max(256, 256 * ((round(share * 3072) + 127) // 256)) for share in shares
    ]


@pytest.mark.parametrize(
    ("model_type", "changes", "words"),
    [
        ("denseformer", {"dwa_dilation": 0}, "dwa_dilation is 0"),
        ("denseformer", {"dwa_period": 0}, "dwa_period is 0"),
        ("muddformer", {"num_ways": 3}, "num_ways is 3"),
        ("dhc", {"expansion_rate": 0}, "expansion_rate is 0"),
    ],
)
def test_a_rival_that_cannot_be_built_says_why(model_type: str, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        MODELS[model_type].config_class(**changes)


@pytest.mark.parametrize("model_type", RIVALS)
def test_every_parameter_of_a_rival_matters(make_model: Make, ids: Tensor, model_type: str) -> None:
    model = make_model(model_type, tie_word_embeddings=False)
    with torch.no_grad():
        for weight in model.parameters():  # some start at 0, and with them the gradients of others
            weight.add_(0.1 * torch.randn_like(weight))
    model(ids, labels=ids).loss.backward()
    still = [name for name, p in model.named_parameters() if p.grad is None or not bool(p.grad.any())]
    assert still == []
