"""What a user can get wrong with `satlens reference`: each ends in one line that says what to do, and exit code 2."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from development import write_model, write_texts, write_tokenizer
from transformers import AutoTokenizer

from satlens.cli import main


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("mistakes")
    tokenizer = write_tokenizer(made)
    write_texts(made, 6)
    write_model(made / "model", 1, len(AutoTokenizer.from_pretrained(tokenizer)), tokenizer)
    return made


def save(folder: Path, name: str, kind: str = "GPTNeoX", **changes: Any) -> Path:
    """A model of transformers with the small tokenizer beside it."""
    import transformers

    tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
    shape = {
        "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24,
        "vocab_size": len(tokenizer), "max_position_embeddings": 128, **changes,
    }  # fmt: skip
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**shape)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder / name)
    tokenizer.save_pretrained(folder / name)
    return folder / name


def refused(capsys: pytest.CaptureFixture[str], folder: Path, model: Path, *flags: str) -> str:
    """The one line that the command ends with; nothing on stdout, no run left behind."""
    runs = folder / "refused"
    text = [] if "--text" in flags else ["--text", str(folder / "long.jsonl")]
    assert main(["reference", str(model), *text, "--runs", str(runs), *flags]) == 2
    out, err = capsys.readouterr()
    assert out == "" and "Traceback" not in err
    assert not [path for path in runs.glob("*") if (path / "manifest.json").exists()]
    return err.strip().splitlines()[-1]


def test_a_mixture_of_experts_has_no_gate_linear(folder, capsys):
    shape = {"num_key_value_heads": 1, "num_local_experts": 2}
    line = refused(capsys, folder, save(folder, "experts", "Mixtral", **shape))
    assert "no MLP gate linear" in line


def test_an_overflow_is_counted_and_placed(folder, capsys):
    path = save(folder, "loud")
    from safetensors.torch import load_file, save_file

    weights = load_file(path / "model.safetensors")
    weights["gpt_neox.layers.1.mlp.dense_4h_to_h.weight"] *= 1e9
    weights["gpt_neox.layers.1.mlp.dense_4h_to_h.weight"].clamp_(-6e4, 6e4)
    weights["gpt_neox.layers.1.mlp.dense_h_to_4h.bias"] += 1e3
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    line = refused(capsys, folder, path, "--dtype", "float16")
    assert "values of mlp_out in layer 1 are not finite in float16" in line and "float32" in line
    assert (
        main(["reference", str(path), "--text", str(folder / "long.jsonl"), "--runs", str(folder / "fine")])
        == 0
    )


def test_a_folder_that_is_not_there(folder, capsys):
    assert "no config.json" in refused(capsys, folder, folder / "nothing")


def test_a_layer_that_the_model_lacks(folder, capsys):
    assert "has layers 0 to 2" in refused(capsys, folder, folder / "model", "--layers", "1", "3")


def test_weights_that_are_a_pickle_alone(folder, capsys):
    path = save(folder, "pickle")
    from safetensors.torch import load_file

    torch.save(load_file(path / "model.safetensors"), path / "pytorch_model.bin")
    (path / "model.safetensors").unlink()
    assert "save the model as safetensors" in refused(capsys, folder, path)


def test_a_model_with_code_of_its_own_is_not_run(folder, capsys):
    path = save(folder, "code")
    config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    config |= {"model_type": "mine", "auto_map": {"AutoModelForCausalLM": "modeling_mine.Mine"}}
    (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    ran = folder / "ran"
    (path / "modeling_mine.py").write_text(f"open({str(ran)!r}, 'w')", encoding="utf-8")
    assert "auto_map" in refused(capsys, folder, path)
    assert not ran.exists()


def test_a_weight_that_is_missing_is_not_drawn_at_random(folder, capsys):
    path = save(folder, "holes")
    from safetensors.torch import load_file, save_file

    weights = load_file(path / "model.safetensors")
    del weights["gpt_neox.layers.0.mlp.dense_h_to_4h.bias"]
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    assert "lacks 1 weights" in refused(capsys, folder, path)


def test_a_tokenizer_of_another_model(folder, capsys):
    assert "the tokenizer is not the model's" in refused(capsys, folder, save(folder, "small", vocab_size=40))


def test_a_device_that_is_not_there(folder, capsys):
    if torch.cuda.is_available():
        pytest.skip("this machine has one")
    assert "cannot use device cuda" in refused(capsys, folder, save(folder, "there"), "--device", "cuda")
    assert "cannot use device cuda" in refused(capsys, folder, folder / "model", "--device", "cuda")


def test_documents_packed_into_rows(folder, capsys):
    assert "one document a row" in refused(capsys, folder, folder / "model", "--layout", "stream")
