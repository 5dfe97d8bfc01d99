"""The verb `reference-causal` end to end on a tiny pair: files, figures, failures, mistakes."""

import json
import os
import re
import socket
import subprocess
import sys
import textwrap
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch

from analyses import reference_causal
from analyses.figures.reference_causal import FIGURES, NEEDS
from satlens.cli import main
from satlens.errors import SatlensError
from satlens.run import open_run, verify
from tests.tiny import documents


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A tiny SATFormer and its twin with documents long enough to be measured, on disk."""
    from safetensors.torch import save_file

    from satlens.hf import MODELS
    from satlens.training.tokenizer import train_tokenizer

    folder = tmp_path_factory.mktemp("causal")
    texts_ = [" ".join(documents(12)[i : i + 4]) for i in range(8)]
    text = folder / "texts.jsonl"
    text.write_text(
        "\n".join(json.dumps({"text": t, "source": f"doc{i}"}) for i, t in enumerate(texts_)) + "\n"
    )
    tokenizer = train_tokenizer(texts_, 340, folder / "tokenizer")
    paths = {}
    for kind, width in (("SATFormer", 48), ("transformer", 48), ("wider", 64)):
        model_type = kind if kind in MODELS else "transformer"
        torch.manual_seed(3)
        config = MODELS[model_type].config_class(
            hidden_size=32, num_hidden_layers=4, num_heads=4, num_kv_heads=2, intermediate_size=width,
            vocab_size=len(tokenizer), max_position_embeddings=128, qk_norm=True, initializer_range=0.25,
            tie_word_embeddings=True,
        )  # fmt: skip
        model = MODELS[model_type](config)
        path = folder / kind.lower()
        path.mkdir()
        config.save_pretrained(path)
        tensors = {k: v.clone() for k, v in model.state_dict().items() if k != "lm_head.weight"}
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
        tokenizer.save_pretrained(path)
        paths[kind] = path
    return SimpleNamespace(folder=folder, text=text, **paths)


def call(place, capsys, *argv):
    common = ("--text", str(place.text), "--runs", str(place.folder / "runs"), "--resamples", "100")
    code = main(["reference-causal", *map(str, argv), *common])
    out = capsys.readouterr()
    return code, out.out, out.err


EVERYTHING = tuple(reference_causal.EXPERIMENTS)


def test_the_verb_runs_every_experiment_and_draws_every_figure(place, capsys):
    code, out, err = call(
        place, capsys, place.SATFormer, "--layers", 1, 2, "--alphas", 0, 1, 2, "--twins", 1,
        "--experiments", *EVERYTHING,
    )  # fmt: skip
    assert code == 0, err
    run = open_run(out.strip())
    assert verify(run) == [] and run.manifest.verb == "reference-causal"
    assert set(run.figures) == set(FIGURES) and set(NEEDS) == set(FIGURES)
    assert run.manifest.summary["failed"] == {}
    versus = run.tables["dose_controls"].set_index(["layer", "alpha", "norm_kept", "control", "measure"])
    times = run.manifest.summary["layer_2_removal_kl_far_over_controls"]
    assert times["estimate"] == versus.loc[(2, 0.0, False, "matched", "kl_far"), "ratio"]
    assert times["low"] < times["estimate"] < times["high"]
    assert re.match(
        r"predicted change off by 0\.\d{3} on average", run.manifest.summary["prediction_value_duty"]
    )
    assert set(run.tables["twin"]["twin"]) and run.tables["dose"]["n_documents"].unique() == [4]
    assert run.manifest.data["digest"] != run.manifest.data["fit_digest"]
    stored, table = run.tensors["dose_by_document"], run.tables["dose"]
    again = stored["kl_far"][1:].sum(1) / stored["count_far"].sum()
    np.testing.assert_allclose(again, table["kl_far"])
    for name, figure in run.figures.items():
        assert "caption" in figure["layout"]["meta"], name


def test_the_same_seed_gives_the_same_bytes(place, capsys):
    flags = ("--layers", 1, "--alphas", 0, "--experiments", "dose", "noise")
    runs = [open_run(call(place, capsys, place.SATFormer, *flags)[1].strip()) for _ in range(2)]
    digests = [{a.path: a.sha256 for a in run.manifest.artifacts} for run in runs]
    assert digests[0] == digests[1]


def test_a_failed_experiment_costs_no_other(place, capsys, monkeypatch):
    def fails(bench):
        raise SatlensError("37 values of resid in layer 2 are not finite")

    monkeypatch.setitem(reference_causal.EXPERIMENTS, "replacement", fails)
    code, out, err = call(
        place,
        capsys,
        place.transformer,
        "--layers",
        1,
        "--alphas",
        0,
        "--experiments",
        "replacement",
        "recovery",
    )
    assert code == 1 and out == ""
    assert "37 values of resid in layer 2 are not finite" in err
    path = err.strip().rsplit("is in ", 1)[1].rstrip(")")
    run = open_run(path)
    assert "recovery" in run.tables and "replacement" not in run.tables
    assert run.manifest.summary["failed"] == {"replacement": "37 values of resid in layer 2 are not finite"}


def test_a_twin_of_another_shape_is_the_users_mistake_and_loses_nothing(place, capsys):
    code, _, err = call(
        place, capsys, place.transformer, "--layers", 1, "--alphas", 0, "--experiments", "recovery", "twin",
        "--twins", 0, "--twin-models", place.wider,
    )  # fmt: skip
    assert code == 2 and "wider is no twin of transformer: gates a layer 64, not 48" in err
    assert "recovery" in open_run(err.strip().rsplit("is in ", 1)[1].rstrip(")")).tables


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("--layers", "9"), "layers 0 to 3, there is no layer 9"),
        (("--draws", "3"), "use at least 8"),
        (("--experiments", "gate"), "has no gate on first-layer values"),
        (("--experiments", "twin", "--twins", "0"), "needs --twins of at least 1"),
        (("--experiments",), "name at least one of --experiments"),
    ],
)
def test_mistakes_are_said_before_anything_is_measured(place, capsys, argv, words):
    code, out, err = call(place, capsys, place.transformer, *argv)
    assert (code, out) == (2, "") and words in err


def kept_run(err):
    """The run that a failure's message names."""
    return open_run(err.strip().rsplit("is in ", 1)[1].rstrip(")"))


def test_an_overflow_in_an_edit_is_counted_and_the_other_experiments_are_kept(place, capsys):
    code, out, err = call(
        place, capsys, place.transformer, "--dtype", "float16", "--layers", 2, "--alphas", 0, 1e6,
        "--experiments", "dose", "recovery",
    )  # fmt: skip
    assert (code, out) == (1, "")
    words = r"dose: transformer, alpha 1000000\.0, .*: \d+ of \d+ values of resid in layer 2 are not finite \(overflow"
    assert re.search(words, err)
    run = kept_run(err)
    assert "recovery" in run.tables and "dose" not in run.tables and verify(run) == []


def test_one_document_is_measured_without_an_interval_and_that_is_said(place, capsys):
    one = place.folder / "one.jsonl"
    one.write_text(place.text.read_text().splitlines()[0] + "\n")
    code = main(
        ["reference-causal", str(place.SATFormer), "--text", str(one), "--runs", str(place.folder / "runs"),
         "--layers", "1", "--alphas", "0", "--experiments", "dose", "prediction", "recovery"]
    )  # fmt: skip
    out = capsys.readouterr()
    assert code == 0
    assert "a single document, so the same one fits and is evaluated, and no interval is given" in out.err
    run = open_run(out.out.strip())
    table = run.tables["dose"]
    assert table["kl_far"].notna().all() and table["kl_far_low"].isna().all()
    assert "no interval: fewer than two documents" in json.dumps(run.figures["dose_response"])
    assert "no interval to hold it against" in run.manifest.summary["prediction_mlp_duty"]


def test_two_processes_are_one(place, capsys):
    """Documents shared out over two processes by torchrun, and the same numbers."""
    flags = ["--layers", "1", "--alphas", "0", "--experiments", "dose", "noise", "--resamples", "100"]
    code, alone, err = call(place, capsys, place.SATFormer, *flags)
    assert code == 0, err
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        f"--master-port={port}",
    ]
    command += ["-m", "satlens.cli", "reference-causal", str(place.SATFormer), *flags]
    command += ["--text", str(place.text), "--runs", str(place.folder / "both")]
    env = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **env})
    assert done.returncode == 0, done.stderr
    one, both = open_run(alone.strip()), open_run(done.stdout.strip())
    for name in ("dose", "dose_layers", "noise"):
        pd.testing.assert_frame_equal(one.tables[name], both.tables[name], rtol=1e-4, atol=1e-6)


def test_the_example_for_notebooks_runs_as_it_is_written():
    from satlens.carried import setting

    example = textwrap.dedent(setting.__doc__.split("::\n", 1)[1])
    names = {}
    exec(example, names)
    assert names["removal"]["layer"].tolist() == [4]
    assert 0.05 < names["removal"]["release"].item() < 0.5  # gates of the reference open when it is removed
