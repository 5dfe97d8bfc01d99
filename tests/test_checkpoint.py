"""Checkpoint folders: the three layouts open, and each way of being unusable is named in one line."""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from satlens import load_bridge, load_model
from satlens.checkpoint import digest, load_tokenizer, model_facts
from satlens.errors import UserError
from satlens.hf import MODELS
from tests.conftest import tiny_model

Make = Callable[..., Any]


@pytest.fixture
def final(make_model: Make, tmp_path: Path) -> Path:
    """An official ``final/`` folder of a tied SATFormer."""
    make_model().save_pretrained(tmp_path / "final")
    return tmp_path / "final"


def _latest(model: Any, folder: Path, prefix: str = "") -> Path:
    """An official ``latest/`` folder, with a training state that must never be opened."""
    folder.mkdir()
    model.config.save_pretrained(folder)
    torch.save(
        {prefix + name: tensor for name, tensor in model.state_dict().items()}, folder / "pytorch_model.bin"
    )
    (folder / "training_state.pt").write_bytes(b"not a pickle")
    return folder


def _edit_config(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def _edit_tensors(folder: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("model_type", ["SATFormer", "transformer"])
def test_all_layouts_open_to_the_same_model_and_digest(
    make_model: Make, ids: Tensor, tmp_path: Path, model_type: str, tied: bool
) -> None:
    model = make_model(model_type, tie_word_embeddings=tied)
    model.save_pretrained(tmp_path / "final")
    model.save_pretrained(tmp_path / "shards", max_shard_size="8KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 1
    folders = [
        tmp_path / "final",
        tmp_path / "shards",
        _latest(model, tmp_path / "latest"),
        _latest(model, tmp_path / "compiled", "_orig_mod."),
    ]
    assert ("lm_head.weight" in load_file(tmp_path / "final" / "model.safetensors")) != tied
    with torch.no_grad():
        for folder in folders:
            opened = load_model(folder)
            assert torch.equal(opened(ids).logits, model(ids).logits)
            assert not opened.training
            assert (opened.lm_head.weight is opened.model.embeddings.weight) == tied
            assert digest(folder) == digest(opened) == digest(model)


def test_digest_sees_values_names_and_dtype(make_model: Make) -> None:
    model, other = make_model(), make_model()
    assert digest(model) == digest(other)
    with torch.no_grad():
        other.model.norm.weight[0] += 1e-6
    assert digest(model) != digest(other)
    assert digest(model) != digest(make_model().to(torch.bfloat16))
    load_bridge(model)
    with pytest.raises(UserError, match="before wrapping"):
        digest(model)


def test_weights_take_the_dtype_asked_for(make_model: Make, final: Path) -> None:
    for dtype in (torch.bfloat16, torch.float64):
        model = load_model(final, dtype=dtype)
        assert {weight.dtype for weight in model.parameters()} == {dtype} and model.config.dtype == dtype
        torch.testing.assert_close(model.model.norm.weight, make_model().model.norm.weight.to(dtype))


def test_a_bridge_opens_from_a_folder(make_model: Make, final: Path, ids: Tensor) -> None:
    bridge, sites = load_bridge(final)
    with torch.no_grad():
        assert torch.equal(bridge(ids), make_model()(ids).logits)
    assert sites.layers("gate") == (1, 2, 3)


def test_facts_of_an_official_checkpoint(make_model: Make, final: Path) -> None:
    _edit_config(final, value_residual_lambda2_init=0.5)
    facts = model_facts(final)
    assert facts["architecture"] == "SATFormer" and facts["gate"] == "relu"
    assert facts["n_parameters"] == sum(weight.numel() for weight in make_model().parameters())
    assert facts["digest"] == digest(final) and facts["dtype"] == "float32"
    assert facts["layout"] == {"kind": "stream", "bos": False, "eos": True}
    assert facts["notes"] == ["config key value_residual_lambda2_init has no effect in a SATFormer"]
    assert str(final) not in json.dumps(facts)


def test_our_own_facts_override_the_official_layout(final: Path) -> None:
    layout = {"kind": "document", "bos": True, "eos": False}
    (final / "satlens.json").write_text(json.dumps({"layout": layout, "tokens_seen": 7}))
    facts = model_facts(final)
    assert facts["layout"] == layout and facts["checkpoint"]["tokens_seen"] == 7


def test_harmless_keys_of_other_releases_pass(final: Path) -> None:
    _edit_config(
        final, torch_dtype="bfloat16", value_residual_lambda2_init=0.5, torchscript=False, auto_map={}
    )
    assert load_model(final).config.value_residual_gate == "relu"


def test_a_tied_head_that_is_not_the_embedding_is_refused(make_model: Make, tmp_path: Path) -> None:
    folder = _latest(make_model(), tmp_path / "latest")
    state = torch.load(folder / "pytorch_model.bin", weights_only=True)
    state["lm_head.weight"] = state["lm_head.weight"] + 1
    torch.save(state, folder / "pytorch_model.bin")
    with pytest.raises(UserError, match=r"lm_head\.weight differs from model\.embeddings\.weight"):
        load_model(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "llama"}, r"model_type 'llama', satlens opens transformer, SATFormer"),
        ({"model_type": None}, r"model_type None"),
        ({"hidden_size": 2048, "num_heads": 24}, r"24 heads do not divide hidden_size 2048"),
        ({"num_kv_heads": 3}, r"num_kv_heads 3 does not divide num_heads 4"),
        ({"value_residual_gate": "swish"}, r"unknown gate 'swish'; known: relu, sigmoid"),
        ({"value_residual_gates": "relu"}, r"value_residual_gates \(did you mean value_residual_gate\?\)"),
        ({"hidden_size": "wide"}, r"'hidden_size' expected int"),
        ({"hidden_act": "gelu"}, r"only 'swish'"),
        ({"hidden_size": 32}, r"has shape \[\d+(, \d+)?\], config\.json implies \[\d+(, \d+)?\]"),
        (
            {"num_hidden_layers": 5},
            r"missing weights: model\.layers\.4\.attn\.k_norm\.weight, .* and \d+ more",
        ),
        ({"num_hidden_layers": 3}, r"weights that this SATFormer does not have: model\.layers\.3\."),
        ({"tie_word_embeddings": False}, r"missing weights: lm_head\.weight"),
    ],
)
def test_a_config_that_cannot_work_says_why(final: Path, changes: dict[str, Any], message: str) -> None:
    _edit_config(final, **changes)
    with pytest.raises(UserError, match=message) as caught:
        load_model(final)
    assert "\n" not in str(caught.value)


@pytest.fixture(scope="module")
def six(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A checkpoint of every architecture."""
    folders = {name: tmp_path_factory.mktemp("six") / name for name in MODELS}
    for name, folder in folders.items():
        tiny_model(name).save_pretrained(folder)
    return folders


@pytest.mark.parametrize(("held", "called"), list(permutations(MODELS, 2)))
def test_a_model_type_changed_by_hand_is_told_with_weights_and_owner(
    held: str, called: str, six: dict[str, Path], tmp_path: Path
) -> None:
    folder = shutil.copytree(six[held], tmp_path / "folder")
    _edit_config(folder, model_type=called)
    with pytest.raises(UserError) as caught:
        load_model(folder)
    mine, theirs = (set(tiny_model(name).state_dict()) for name in (held, called))
    said = str(caught.value)
    assert "\n" not in said and "model_type" in said and re.search(rf"(hold|of) a {held}\b", said)
    assert called in said and any(name in said for name in mine ^ theirs)


def test_weights_of_no_other_model_are_merely_missing(final: Path) -> None:
    gates = "value_residual_mixing"
    _edit_tensors(final, lambda tensors: [tensors.pop(name) for name in list(tensors) if "layers.3" in name])
    with pytest.raises(UserError, match=r"missing weights: .* incomplete or another") as caught:
        load_model(final)
    assert "seems to hold" not in str(caught.value)
    _edit_tensors(final, lambda tensors: [tensors.pop(name) for name in list(tensors) if gates in name])
    with pytest.raises(UserError, match="incomplete or another"):
        load_model(final)  # a layer is lost too: what is left is no whole transformer either


def test_a_shape_mismatch_names_tensor_expected_and_found(final: Path) -> None:
    name = "model.layers.2.attn.value_residual_mixing.alpha_proj.weight"
    _edit_tensors(final, lambda tensors: tensors.update({name: torch.zeros(4, 24)}))
    with pytest.raises(UserError, match=rf"{name} has shape \[4, 24\], config\.json implies \[2, 24\]"):
        load_model(final)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_values_that_are_not_finite_are_counted(final: Path, bad: float) -> None:
    def spoil(tensors: dict[str, Tensor]) -> None:
        tensors["model.norm.weight"][3:5] = bad

    _edit_tensors(final, spoil)
    with pytest.raises(UserError, match=r"model\.norm\.weight: 2 of 24 values are NaN or infinite"):
        load_model(final)


def test_a_missing_folder_file_or_level_is_named(final: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no folder"):
        load_model(tmp_path / "nowhere")
    with pytest.raises(UserError, match="is a file"):
        load_model(final / "config.json")
    with pytest.raises(UserError, match=r"no config\.json in .*; it contains final: give .*final"):
        load_model(tmp_path)
    (final / "model.safetensors").unlink()
    with pytest.raises(UserError, match=r"no weights in .*: expected model\.safetensors"):
        load_model(final)
    (final / "config.json").write_text("{")
    with pytest.raises(UserError, match="cannot be read"):
        load_model(final)


def test_a_lost_shard_is_named(make_model: Make, tmp_path: Path) -> None:
    make_model().save_pretrained(tmp_path, max_shard_size="8KB")
    lost = sorted(tmp_path.glob("*.safetensors"))[1]
    lost.unlink()
    with pytest.raises(UserError, match=f"lacks {lost.name}"):
        load_model(tmp_path)


@pytest.mark.parametrize("kept", [0, 4, 100, 0.5, 0.999])
def test_truncated_files_are_refused(final: Path, make_model: Make, tmp_path: Path, kept: float) -> None:
    latest = _latest(make_model(), tmp_path / "latest")
    for file in (final / "model.safetensors", latest / "pytorch_model.bin"):
        content = file.read_bytes()
        file.write_bytes(content[: int(kept * len(content)) if isinstance(kept, float) else kept])
        with pytest.raises(UserError, match=f"{file.name} (is damaged|holds more)"):
            load_model(file.parent)


class _Bomb:
    """Unpickling it would create a file."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.target,))


def test_code_inside_a_pickle_never_runs(make_model: Make, tmp_path: Path) -> None:
    folder = _latest(make_model(), tmp_path / "latest")
    torch.save({"model.norm.weight": _Bomb(tmp_path / "ran")}, folder / "pytorch_model.bin")
    with pytest.raises(UserError, match="opening it would run its code, so it stays shut"):
        load_model(folder)
    assert not (tmp_path / "ran").exists()


def test_a_pickle_of_something_else_is_refused(make_model: Make, tmp_path: Path) -> None:
    folder = _latest(make_model(), tmp_path / "latest")
    torch.save({"step": 3}, folder / "pytorch_model.bin")
    with pytest.raises(UserError, match="must hold a state dict of tensors"):
        load_model(folder)


def test_a_missing_or_broken_tokenizer_is_named(final: Path) -> None:
    with pytest.raises(UserError, match="no tokenizer in"):
        load_tokenizer(final)
    (final / "tokenizer.json").write_text("{")
    with pytest.raises(UserError, match="does not open"):
        load_tokenizer(final)


def test_a_tokenizer_beside_the_weights_opens(final: Path) -> None:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"<unk>": 0, "a": 1}, unk_token="<unk>"))
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>").save_pretrained(final)
    assert load_tokenizer(final).convert_tokens_to_ids("a") == 1


def test_importing_satlens_does_not_import_torch() -> None:
    code = "import satlens, sys; assert satlens.load_model.__name__ if 0 else 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_an_unknown_export_is_an_attribute_error() -> None:
    import satlens

    with pytest.raises(AttributeError, match="no attribute 'load_everything'"):
        _ = satlens.load_everything  # type: ignore[attr-defined]
