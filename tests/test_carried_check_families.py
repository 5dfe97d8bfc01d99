"""Whole numbers of random models of many families, made again with plain hooks and their own weights by name.

Planted models are nearly linear; these are not, so attention answers an edit and constants pass through real norms.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers

from satlens.carried.documents import DocumentSet, DocumentSets
from satlens.carried.doses import dose_response
from satlens.carried.fit import fit
from satlens.carried.opening import read_model
from satlens.carried.setting import new_setting
from satlens.carried.statics import measure, tables

D, LAYERS, HEADS, MLP, VOCAB, SKIP = 16, 3, 2, 24, 31, 16


def random_model(family: str, **fields: Any) -> Any:
    """A model whose weights are all far from their start, biases and norms too."""
    shape = {
        "hidden_size": D, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "intermediate_size": MLP,
        "max_position_embeddings": 128, "vocab_size": VOCAB, "pad_token_id": None, "bos_token_id": None,
        "eos_token_id": None, "tie_word_embeddings": False,
    }  # fmt: skip
    torch.manual_seed(1)
    config = getattr(transformers, f"{family}Config")(**{**shape, **fields})
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim == 1:
                weight.add_(0.3 * torch.randn_like(weight))
            elif "embed" in name:
                weight.normal_()
            else:
                weight.mul_(10)
    return model


def document_set(seed: int, lengths: tuple[int, ...]) -> DocumentSet:
    rng = np.random.default_rng(seed)
    ids = tuple(rng.integers(2, VOCAB, n) for n in lengths)
    return DocumentSet(ids=ids, names=tuple(map(str, lengths)), kinds=("a",) * len(ids))


FITTED, EVALUATED = document_set(1, (70, 64, 90, 81)), document_set(2, (66, 100, 73))


def given(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    return args[0] if args else kwargs["hidden_states"]


@dataclass(frozen=True)
class Family:
    """A random model and where its parts are, by name."""

    make: Callable[[], Any]
    layers: str
    gate: str
    activation: Callable[[torch.Tensor], torch.Tensor]
    n_gates: int | None = None
    """First outputs of the linear that are gates; None for all."""


def tanh_gelu(x: torch.Tensor) -> torch.Tensor:
    return F.gelu(x, approximate="tanh")


DOSED = {
    "phi3": Family(
        lambda: random_model("Phi3", num_key_value_heads=1), "model.layers", "mlp.gate_up_proj", F.silu, MLP
    ),
    "opt-post": Family(
        lambda: random_model("OPT", ffn_dim=MLP, word_embed_proj_dim=D, do_layer_norm_before=False),
        "model.decoder.layers", "fc1", torch.relu,
    ),
    "phi": Family(lambda: random_model("Phi"), "model.layers", "mlp.fc1", tanh_gelu),
    "bloom": Family(
        lambda: random_model("Bloom", n_head=HEADS, n_layer=LAYERS), "transformer.h", "mlp.dense_h_to_4h", tanh_gelu
    ),
}  # fmt: skip


def one_run(family: Family, model: Any, ids: np.ndarray, change: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities and far pre-activations of layer 1 of one document alone, its input changed in float64."""
    block, seen = model.get_submodule(f"{family.layers}.1"), []

    def edit(_: Any, args: Any, kwargs: Any) -> Any:
        x = given(args, kwargs)
        new = x.double().clone()
        new[:, SKIP:] = change(new[:, SKIP:])
        new = new.to(x.dtype)
        return ((new, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": new})

    def keep(_: Any, __: Any, out: torch.Tensor) -> None:
        seen.append(out.view(len(ids), -1)[SKIP:, : family.n_gates].double())

    handles = [block.get_submodule(family.gate).register_forward_hook(keep)]
    if change is not None:
        handles.append(block.register_forward_pre_hook(edit, with_kwargs=True))
    with torch.no_grad():
        logits = model(torch.from_numpy(ids)[None]).logits[0].double()
    for handle in handles:
        handle.remove()
    return logits.log_softmax(-1), seen[0]


def mean_at_layer_1(family: Family, model: Any) -> torch.Tensor:
    seen = []
    block = model.get_submodule(f"{family.layers}.1")
    handle = block.register_forward_pre_hook(
        lambda _, args, kwargs: seen.append(given(args, kwargs)[0, SKIP:].double()), with_kwargs=True
    )
    with torch.no_grad():
        for ids in FITTED.ids:
            model(torch.from_numpy(ids)[None])
    handle.remove()
    return torch.cat(seen).mean(0)


def displaced(row: Any, m: torch.Tensor, randoms: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    """The row's edit, by its definition in the table of experiments."""
    other = randoms[int(row.draw)]

    def change(x: torch.Tensor) -> torch.Tensor:
        along, own = (x @ m)[..., None], (x @ other)[..., None]
        by = {
            "reference": along * m, "matched": along.abs() * other, "matched-signed": along * other,
            "published-unmatched": own.abs() * other,
        }[row.direction]  # fmt: skip
        new = x + (row.alpha - 1) * by
        return new * x.norm(dim=-1, keepdim=True) / new.norm(dim=-1, keepdim=True) if row.norm_kept else new

    return change


def slow_measures(family: Family, model: Any, change: Any) -> dict[str, np.ndarray]:
    """Sums for each document."""
    rows = []
    for ids in EVALUATED.ids:
        (p, before), (q, after) = one_run(family, model, ids, None), one_run(family, model, ids, change)
        kl, targets = (p.exp() * (p - q)).sum(-1), torch.from_numpy(ids)[SKIP + 1 :, None]
        fires = [(family.activation(z) > 0.5).double().mean(-1).sum() for z in (before, after)]
        duty = [(z > 0).double().mean(-1).sum() for z in (before, after)]
        rows.append(
            {
                "kl_final": kl[-1], "kl_far": kl[SKIP:].sum(),
                "delta_nll": (p - q)[SKIP:-1].gather(1, targets).sum(),
                "delta_entropy": ((p.exp() * p).sum(-1) - (q.exp() * q).sum(-1))[SKIP:].sum(),
                "release": fires[1] - fires[0], "delta_duty": duty[1] - duty[0],
                "top1": (p.argmax(-1) == q.argmax(-1))[SKIP:].sum(),
            }
        )  # fmt: skip
    return {name: np.array([float(row[name]) for row in rows]) for name in rows[0]}


@pytest.mark.parametrize("name", DOSED)
def test_every_row_of_the_dose_table_is_that_of_plain_hooks(name):
    family = DOSED[name]
    model = family.make()
    reader = read_model(model, None)
    setting = new_setting(reader, fit(reader, FITTED), EVALUATED, (1,), n_resamples=20, batch_size=2)
    controls = ("matched", "matched-signed", "published-unmatched")
    table = dose_response(setting, (0.0, 2.0), controls)[0]["dose"]
    table = table[table["draw"] < 2]
    m = mean_at_layer_1(family, model)
    m, randoms = m / m.norm(), setting.randoms(1).double()
    far, scored = (np.array([len(ids) - less for ids in EVALUATED.ids]) for less in (SKIP, SKIP + 1))
    for row in table.itertuples():
        for measure_name, sums in slow_measures(family, model, displaced(row, m, randoms)).items():
            counts = {"kl_final": np.ones(3), "delta_nll": scored}.get(measure_name, far)
            assert getattr(row, measure_name) == pytest.approx(sums.sum() / counts.sum(), abs=2e-6), (
                measure_name
            )
            middle = getattr(row, f"{measure_name}_median")
            assert middle == pytest.approx(np.median(sums / counts), abs=2e-6), measure_name


def value_bias(block: Any, family: str) -> torch.Tensor:
    """The bias of the values, as the out-projection gets it."""
    width = D // HEADS
    if family == "StableLm":
        return block.self_attn.v_proj.bias.repeat(HEADS)
    if family == "GPTBigCode":
        return block.attn.c_attn.bias[D + width :].repeat(HEADS)
    if family == "Falcon":
        return block.self_attention.query_key_value.bias[-width:].repeat(HEADS)
    return block.self_attention.query_key_value.bias.view(HEADS, 3, width)[:, 2].flatten()


PATHS = {
    "StableLm": ("model.layers", "self_attn.o_proj", "post_attention_layernorm", "mlp.gate_proj", "mlp.down_proj"),
    "GPTBigCode": ("transformer.h", "attn.c_proj", "ln_2", "mlp.c_fc", "mlp.c_proj"),
    "Bloom": (
        "transformer.h", "self_attention.dense", "post_attention_layernorm", "mlp.dense_h_to_4h", "mlp.dense_4h_to_h",
    ),
    "Falcon": (
        "transformer.h", "self_attention.dense", "input_layernorm", "mlp.dense_h_to_4h", "mlp.dense_4h_to_h",
    ),
}  # fmt: skip
FIELDS: dict[str, dict[str, Any]] = {
    "StableLm": {"num_key_value_heads": 1, "use_qkv_bias": True},
    "GPTBigCode": {"n_embd": D, "n_layer": LAYERS, "n_head": HEADS, "n_inner": MLP, "n_positions": 128},
    "Bloom": {"n_head": HEADS, "n_layer": LAYERS},
    "Falcon": {"new_decoder_architecture": False, "parallel_attn": True, "bias": True, "alibi": False},
}


@pytest.mark.parametrize("family", PATHS)
def test_parameter_share_is_that_of_the_biases_named_by_hand(family):
    """Constants followed by name through the real norm at every position's own sigma, attention far from silent."""
    model = random_model(family, **FIELDS[family])
    reader = read_model(model, None)
    got = tables(measure(reader, DocumentSets(FITTED, FITTED, True)), 20, 0)["carried_parameter_share"]
    layers, out, norm, gate, mlp_out = PATHS[family]
    stream = torch.zeros(D).double()
    if family == "Bloom":
        stream = model.transformer.word_embeddings_layernorm.bias.double()
    for layer, block in enumerate(model.get_submodule(layers)):
        part, normed, read = block.get_submodule(out), [], []
        hooks = [
            block.get_submodule(name).register_forward_pre_hook(lambda _, a, to=to: to.append(a[0][0, SKIP:].double()))
            for name, to in ((norm, normed), (gate, read))
        ]  # fmt: skip
        with torch.no_grad():
            for ids in FITTED.ids:
                model(torch.from_numpy(ids)[None])
            for hook in hooks:
                hook.remove()
            attention = (
                part.weight @ value_bias(block, family) + (0 if part.bias is None else part.bias)
            ).double()
            at, module = stream + (0 if family == "Falcon" else attention), block.get_submodule(norm)
            sigma = (torch.cat(normed).var(-1, correction=0) + module.eps).sqrt()[:, None]
            through = (module.weight.double() * (at - at.mean()) / sigma + module.bias.double()).mean(0)
            b, own = torch.cat(read).mean(0), block.get_submodule(mlp_out).bias
            assert got["share"][layer] == pytest.approx(float(through @ b / (b @ b)), abs=2e-5)
            stream = stream + attention + (0 if own is None else own.double())
