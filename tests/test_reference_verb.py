"""`satlens reference`: from a folder to a finished run with tables, figures and a summary."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
import torch
from development import SHAPE, write_model, write_texts, write_tokenizer
from transformers import AutoTokenizer

from analyses import reference
from satlens.cli import main
from satlens.errors import UserError
from satlens.reading import Reading
from satlens.run import FinishedRun, open_run, verify


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("reference")


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Path:
    return write_tokenizer(folder)


@pytest.fixture(scope="module")
def text(folder: Path) -> Path:
    return write_texts(folder, 8)


@pytest.fixture(scope="module")
def finished(folder: Path, tokenizer: Path, text: Path) -> FinishedRun:
    write_model(folder / "model", 1, len(AutoTokenizer.from_pretrained(tokenizer)), tokenizer)
    reading = Reading(text=text, runs=folder / "runs", resamples=100)
    path = reference.run(reference.Config(model=str(folder / "model"), reading=reading))
    assert path is not None
    return open_run(path)


def test_the_run_is_whole_and_named_after_the_verb(finished):
    assert verify(finished) == []
    assert finished.manifest.verb == "reference"
    assert finished.manifest.data["n_documents"] == 4
    assert finished.manifest.data["fit_digest"] != finished.manifest.data["digest"]
    assert finished.manifest.summary["linearity_error"] < 1e-5


def test_every_table_and_figure_is_there(finished):
    measured = (
        "object stability rotation writes sources constant_share parameter_share resting gates rank geometry"
    )
    assert {f"carried_{name}" for name in measured.split()} | {"carried_ledger"} <= set(finished.tables)
    assert "carried_value_gates" not in finished.tables
    assert {f"carried_{name}" for name in "object resting duty writes rank geometry".split()} == set(
        finished.figures
    )
    for name in finished.figures:
        layout = finished.figures[name]["layout"]
        assert "tokens in 4 documents" in layout["title"]["subtitle"]["text"]
        assert layout["meta"]["caption"]


def test_numbers_stand_with_their_interval(finished):
    for table, column in (("object", "share"), ("resting", "duty"), ("writes", "norm"), ("rank", "rho")):
        rows = finished.tables[f"carried_{table}"]
        known = rows[rows[column].notna() & rows[f"{column}_low"].notna()]
        assert len(known) and (known[f"{column}_low"] <= known[f"{column}_high"]).all()


def test_the_same_command_gives_the_same_artifacts(finished, folder, text):
    reading = Reading(text=text, runs=folder / "again", resamples=100, batch_size=8)
    path = reference.run(reference.Config(model=str(folder / "model"), reading=reading))
    digests = [{a.path: a.sha256 for a in run.manifest.artifacts} for run in (finished, open_run(path))]
    assert digests[0] == digests[1]


def test_layers_that_are_named_are_the_ones_tabled(folder, text, finished):
    reading = Reading(text=text, runs=folder / "layers", resamples=100)
    run = open_run(reference.run(reference.Config(model=str(folder / "model"), layers=(1,), reading=reading)))
    assert set(run.tables["carried_resting"]["layer"]) == {1}
    assert set(run.tables["carried_geometry"]["layer"]) == {1}
    assert set(run.tables["carried_object"]["layer"]) == {0, 1, 2}
    with pytest.raises(UserError, match="no layer 7"):
        reference.run(reference.Config(model=str(folder / "model"), layers=(7,), reading=reading))


def test_a_huggingface_folder_opens_without_remote_code(folder, tokenizer, text):
    import transformers

    size = len(AutoTokenizer.from_pretrained(tokenizer))
    config = transformers.GPTNeoXConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24, vocab_size=size,
        max_position_embeddings=128, initializer_range=0.3,
    )  # fmt: skip
    torch.manual_seed(0)
    path = folder / "neox"
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(path)
    AutoTokenizer.from_pretrained(tokenizer).save_pretrained(path)
    reading = Reading(text=text, runs=folder / "neox-runs", resamples=100)
    run = open_run(reference.run(reference.Config(model=str(path), same_docs=True, reading=reading)))
    assert set(run.tables["carried_ledger"]["block"]) == {"parallel"}
    assert set(run.tables["carried_ledger"]["norm"]) == {"post_attention_layernorm"}
    assert run.manifest.summary["same_documents"] is True
    assert len(run.manifest.model["digest"]) == 64


def test_one_document_gives_no_interval_and_says_so(folder, tokenizer, finished, capsys):
    from tiny import documents

    text = folder / "one.jsonl"
    text.write_text(json.dumps({"text": " ".join(documents(8))}), encoding="utf-8")
    reading = Reading(text=text, runs=folder / "one-runs", resamples=100)
    run = open_run(reference.run(reference.Config(model=str(folder / "model"), reading=reading)))
    assert run.tables["carried_resting"]["duty_low"].isna().all()
    assert "no interval" in capsys.readouterr().err
    assert "no interval" in run.figures["carried_resting"]["layout"]["title"]["subtitle"]["text"]


def test_mistakes_end_in_one_line(folder, text, finished, capsys):
    short = folder / "short.jsonl"
    short.write_text(json.dumps({"text": "too short"}), encoding="utf-8")
    assert main(["reference", str(folder / "model"), "--text", str(short), "--runs", str(folder / "no")]) == 2
    assert "none of 1 documents has 64 tokens" in capsys.readouterr().err
    assert main(["reference", str(folder / "nothing"), "--text", str(text)]) == 2
    assert "no config.json" in capsys.readouterr().err


def test_satformers_own_gates_are_tabled_and_drawn(folder, tokenizer, text):
    from satlens.hf import MODELS
    from satlens.training.save import save_model

    size = len(AutoTokenizer.from_pretrained(tokenizer))
    torch.manual_seed(0)
    model = MODELS["SATFormer"](MODELS["SATFormer"].config_class(**SHAPE, vocab_size=size))
    save_model(model, dict(model.state_dict()), folder / "satformer", tokenizer)
    reading = Reading(text=text, runs=folder / "sat-runs", resamples=100)
    run = open_run(reference.run(reference.Config(model=str(folder / "satformer"), reading=reading)))
    table = run.tables["carried_value_gates"]
    assert set(table["layer"]) == {1, 2} and "carried_value_gates" in run.figures
    assert table["duty"].between(0, 1).all()
    assert (table["resting"] - table["mean_logit"]).abs().max() < 1  # fitted on other documents


def test_what_a_folder_says_of_its_weights_is_in_manifest_and_figures(folder, tokenizer, text):
    write_model(folder / "noted", 1, len(AutoTokenizer.from_pretrained(tokenizer)), tokenizer)
    note = "4-bit weights dequantised"
    (folder / "noted" / "satlens.json").write_text(json.dumps({"weights": note}), encoding="utf-8")
    reading = Reading(text=text, runs=folder / "noted-runs", resamples=100)
    run = open_run(reference.run(reference.Config(model=str(folder / "noted"), reading=reading)))
    assert run.manifest.model["weights"] == run.manifest.summary["weights"] == note
    for figure in run.figures.values():
        assert figure["layout"]["title"]["subtitle"]["text"].startswith(f"noted: {note} · ")


def test_two_processes_measure_what_one_does(finished, folder, text):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", port]
    command += [
        "-m",
        "satlens.cli",
        "reference",
        str(folder / "model"),
        "--text",
        str(text),
        "--resamples",
        "100",
    ]
    alone = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [*command, "--runs", str(folder / "two")], capture_output=True, text=True, env={**os.environ, **alone}
    )
    assert done.returncode == 0, done.stderr
    run = open_run(Path(done.stdout.strip()))
    assert set(run.tables) == set(finished.tables) and set(run.figures) == set(finished.figures)
    for name, table in finished.tables.items():
        pd.testing.assert_frame_equal(run.tables[name], table, rtol=1e-5, atol=1e-6)
