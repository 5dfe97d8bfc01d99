"""The verbs end to end on a tiny trained-from-nothing pair: files, tables against slow sums, figures, report."""

import dataclasses
import json
import os
import socket
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch

from analyses import suite
from analyses.gates import variation_across_heads
from analyses.lens import first_lasting_lead
from satlens.checkpoint import load_model, load_tokenizer
from satlens.cli import main
from satlens.errors import UserError
from satlens.reading import Reading
from satlens.run import open_run, verify
from tests.tiny import documents, plain_nll, write_pair, write_texts


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A tiny pair and its texts on disk."""
    folder = tmp_path_factory.mktemp("place")
    return SimpleNamespace(folder=folder, text=write_texts(folder), **write_pair(folder))


def call(place, capsys, *argv):
    """Run a verb on the place's text; the runs it made."""
    common = ("--text", str(place.text), "--runs", str(place.folder / "runs"), "--resamples", "200")
    code = main([*map(str, argv), *common])
    out = capsys.readouterr()
    assert code == 0, out.err
    return [open_run(line) for line in out.out.split() if "/runs/" in line]


def free_port():
    """A port nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def model_and_ids(place):
    """The untouched model and each document's ids, as one stream with EOS after each, in rows of the context."""
    model, tokenizer = load_model(place.SATFormer), load_tokenizer(place.SATFormer)
    docs = tokenizer(documents(), add_special_tokens=False)["input_ids"]
    run = [(token, doc) for doc, ids in enumerate(docs) for token in (*ids, tokenizer.eos_token_id)]
    rows = [run[i : i + 32] for i in range(0, len(run), 32)]
    return model, docs, rows, tokenizer.eos_token_id


def test_gates_run_is_whole_and_its_means_equal_a_plain_loop(place, capsys):
    (run,) = call(place, capsys, "gates", place.SATFormer)
    assert verify(run) == []
    model, docs, rows, eos = model_and_ids(place)
    total, shut, count = torch.zeros(3, 2, dtype=torch.float64), torch.zeros(3, 2, dtype=torch.float64), 0
    alphas = {}
    for n, layer in enumerate(model.model.layers):
        if n:
            gate = layer.attn.value_residual_mixing.gate
            gate.register_forward_hook(lambda m, i, out, n=n: alphas.__setitem__(n - 1, out[0].double()))
    for row in rows:
        with torch.no_grad():
            model(torch.tensor([[token for token, _ in row]]))
        keep = torch.tensor([token != eos for token, _ in row])
        count += int(keep.sum())
        for at in range(3):
            total[at] += alphas[at][keep].sum(0)
            shut[at] += (alphas[at][keep] == 0).sum(0)
    heat = run.tables["gate_heatmap"].sort_values(["layer", "kv_head"])
    np.testing.assert_allclose(heat["mean"], (total / count).flatten(), atol=1e-5)
    np.testing.assert_array_equal(heat["zero_fraction"], (shut / count).flatten())
    assert (heat["low"] <= heat["mean"]).all() and (heat["mean"] <= heat["high"]).all()
    assert set(heat["n_tokens"]) == {count} == {sum(map(len, docs))}
    profile = run.tables["gate_profile"].sort_values("layer")
    np.testing.assert_allclose(profile["mean"], (total / count).mean(1), atol=1e-5)
    means = (total / count).numpy()
    expected = np.sqrt(((means - means.mean(1, keepdims=True)) ** 2).mean(1)) / means.mean(1)
    np.testing.assert_allclose(profile["cv"], expected, atol=1e-5)
    assert run.tensors["by_token"]["token_sum"].sum() == pytest.approx(float(total.sum()), abs=1e-4)
    assert set(run.figures) == {"fig3_heatmap", "fig8_profile", "distribution"}


def test_gates_can_be_resampled_from_the_stored_sums_alone(place, capsys):
    (run,) = call(place, capsys, "gates", place.SATFormer)
    table = run.tables["gate_by_document"]
    sums = (
        table.groupby(["layer", "kv_head"])["sum"].sum()
        / table.groupby(["layer", "kv_head"])["n_tokens"].sum()
    )
    heat = run.tables["gate_heatmap"].set_index(["layer", "kv_head"])["mean"]
    pd.testing.assert_series_equal(sums, heat, check_names=False)


def test_ablate_deltas_are_paired_and_equal_the_stored_sums(place, capsys):
    (run,) = call(place, capsys, "ablate", place.SATFormer, "--scopes", "layer", "head", "upward", "downward")
    sums, table = run.tables["nll_by_document"], run.tables["ablation"]
    clean = sums["clean"].sum() / sums["n_tokens"].sum()
    for row in table.itertuples():
        head = "" if pd.isna(row.kv_head) else f" head {row.kv_head}"
        nll = sums[f"{row.condition} {row.scope} {row.layer}{head}"].sum() / sums["n_tokens"].sum()
        assert row.delta_nll == pytest.approx(nll - clean, abs=1e-12)
        assert row.delta_ppl == pytest.approx(np.exp(nll) - np.exp(clean), abs=1e-9)
        assert row.delta_nll_low <= row.delta_nll <= row.delta_nll_high
    counts = table.groupby("scope").size().to_dict()
    assert counts == {"layer": 12, "head": 6, "upward": 3, "downward": 3}
    whole = table.set_index(["scope", "layer"])["delta_nll"]
    assert whole["upward", 1] == whole["downward", 3]  # both are: every gated layer at once
    assert set(run.figures) == {"fig4_layers", "ladder", "heads", "cumulative"}


def test_ablation_constants_come_from_documents_that_are_not_scored(place, capsys):
    (run,) = call(place, capsys, "ablate", place.SATFormer, "--kinds", "mean")
    scored = set(run.tables["nll_by_document"]["source"])
    calibrating = {f"doc{i}" for i in range(12)} - scored
    assert scored and calibrating == {"doc4", "doc9"}


def test_ablation_can_stop_when_its_intervals_are_narrow_enough(place, capsys, monkeypatch):
    monkeypatch.setattr("analyses.ablate.EACH_BATCHES", 1)
    asked = ("--kinds", "zero", "--layers", "1", "--batch-size", "1")
    (whole,) = call(place, capsys, "ablate", place.SATFormer, *asked)
    main(
        [
            "ablate",
            str(place.SATFormer),
            *asked,
            "--until-width",
            "1e9",
            "--text",
            str(place.text),
            "--runs",
            str(place.folder / "early"),
            "--resamples",
            "200",
        ]
    )
    early = open_run(capsys.readouterr().out.strip())
    assert early.manifest.summary["n_tokens"] < whole.manifest.summary["n_tokens"]


def test_lens_ends_at_the_models_perplexity_and_compares_on_the_same_tokens(place, capsys):
    (run,) = call(place, capsys, "lens", place.SATFormer, "--baseline", place.transformer)
    model, _, rows, eos = model_and_ids(place)
    nll, count = 0.0, 0
    for row in rows:
        ids = torch.tensor([[token for token, _ in row]])
        keep = ids[0, 1:] != eos
        if len(keep):
            nll += float(plain_nll(model, ids)[0][keep].sum())
            count += int(keep.sum())
    lens = run.tables["lens"]
    last = lens[(lens["model"] == "satformer") & (lens["layer"] == 3)].iloc[0]
    assert last["n_tokens"] == count
    assert last["perplexity"] == pytest.approx(np.exp(nll / count), rel=1e-5)
    pivot = lens.pivot(index="layer", columns="model", values="nll")
    gap = run.tables["lens_difference"].set_index("layer")["delta_nll"]
    np.testing.assert_allclose(gap, pivot["satformer"] - pivot["transformer"], atol=1e-12)
    assert set(run.figures) == {"fig5_lens", "difference"}


def test_lens_of_one_model_has_no_difference(place, capsys):
    (run,) = call(place, capsys, "lens", place.transformer)
    assert set(run.figures) == {"fig5_lens"} and "lens_difference" not in run.tables


def test_models_with_other_tokenizers_are_not_compared(place, capsys, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    for file in place.transformer.iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    a, b = "a", "b"
    vocab[a], vocab[b] = vocab[b], vocab[a]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    code = main(["lens", str(place.SATFormer), "--baseline", str(other), "--text", str(place.text)])
    assert code == 2 and "they would read other tokens" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["SATFormer", "transformer"])
def test_doctor_finds_a_sound_model_sound(place, capsys, name):
    (run,) = call(place, capsys, "doctor", getattr(place, name))
    assert run.tables["checks"]["passed"].all()
    assert len(run.tables["checks"]) >= 6


def test_suite_measures_everything_once_and_writes_the_page(place, capsys):
    out = place.folder / "page"
    twins = (place.SATFormer, "--baseline", place.transformer)
    small = ("--sae-tokens", "20000", "--sae-batch", "200", "--seeds", "0")
    runs = call(place, capsys, "suite", *twins, *small, "--out", out)
    described = ["sae", "sae-label"] * 2 + ["judge", "flow"]  # an untrained model has no feature to label
    assert [run.manifest.verb for run in runs] == ["gates", "ablate", "lens", *described, "doctor"]
    page = (out / "index.html").read_text()
    assert "Mean gate value by layer and KV head" in page
    digests = {run.manifest.data["digest"] for run in runs[:3]}
    assert len(digests) == 1
    (alone,) = call(place, capsys, "ablate", place.SATFormer)
    mine = runs[1].tables["ablation"]
    mine = mine[mine["scope"] == "layer"].reset_index(drop=True)
    pd.testing.assert_frame_equal(mine, alone.tables["ablation"], check_exact=False, atol=1e-7)


def test_the_suite_says_on_what_gates_rest_where_documents_are_long_enough(place, tmp_path, capsys):
    small = Reading(tokens=2000, resamples=100, runs=tmp_path)
    (made,) = suite.rest(suite.Config(model="reference-transformer", reading=small))
    assert open_run(made).manifest.verb == "reference"
    short = dataclasses.replace(small, text=place.text)
    assert suite.rest(suite.Config(model=str(place.SATFormer), reading=short)) == []
    assert "the carried direction is left out" in capsys.readouterr().err


def test_two_processes_equal_one(place, capsys):
    runs = place.folder / "shared"
    asked = [str(place.SATFormer), "--text", str(place.text), "--runs", str(runs), "--batch-size", "2"]
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "--master-addr",
        "127.0.0.1",
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MASTER_PORT": str(free_port())}
    for verb, table, column in (("gates", "gate_heatmap", "mean"), ("ablate", "ablation", "delta_nll")):
        module = ["--master-port", environment["MASTER_PORT"], "-m", "satlens.cli", verb]
        done = subprocess.run(
            [*command, *module, *asked], env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr[-2000:]
        (line,) = [line for line in done.stdout.split() if "/shared/" in line]
        (alone,) = call(place, capsys, verb, place.SATFormer)
        np.testing.assert_allclose(
            open_run(line).tables[table][column], alone.tables[table][column], atol=1e-6
        )


def test_same_seed_gives_the_same_bytes(place, capsys):
    tables = []
    for _ in range(2):
        (run,) = call(place, capsys, "ablate", place.SATFormer, "--kinds", "resample")
        tables.append({a.path: a.sha256 for a in run.manifest.artifacts})
    assert tables[0] == tables[1]


def test_manifest_says_how_text_was_laid_out_and_what_came_first(place, capsys):
    (run,) = call(place, capsys, "gates", place.SATFormer, "--layout", "document", "--window", "16")
    data = run.manifest.data
    assert data["layout"]["kind"] == "document" and data["window"] == 16
    tokenizer = load_tokenizer(place.SATFormer)
    longest = max(tokenizer(documents(), add_special_tokens=False)["input_ids"], key=len)
    assert len(data["first_ids"]) == 16 and data["first_ids"][0] in longest
    assert str(place.folder) not in run.path.joinpath("manifest.json").read_text()


def test_a_single_document_gets_numbers_without_intervals(place, capsys, tmp_path):
    text = write_texts(tmp_path, 1)
    code = main(["gates", str(place.SATFormer), "--text", str(text), "--runs", str(tmp_path / "runs")])
    run = open_run(capsys.readouterr().out.strip())
    heat = run.tables["gate_heatmap"]
    assert code == 0 and heat["mean"].notna().all() and heat["low"].isna().all()


def test_rows_longer_than_the_training_context_work_and_are_pointed_out(place, capsys, tmp_path):
    asked = ["--text", str(place.text), "--runs", str(tmp_path / "runs"), "--window", "48"]
    code = main(["lens", str(place.SATFormer), *asked])
    out = capsys.readouterr()
    assert code == 0 and "rows of 48 tokens are longer than the 32" in out.err
    assert open_run(out.out.strip()).manifest.data["window"] == 48


def test_what_is_not_finished_is_no_run(place, capsys, tmp_path, monkeypatch):
    def fail(*args, **kwargs):
        raise RuntimeError("power cut")

    monkeypatch.setattr("analyses.gates.finish", fail)
    with pytest.raises(RuntimeError, match="power cut"):
        main(["gates", str(place.SATFormer), "--text", str(place.text), "--runs", str(tmp_path)])
    (left,) = tmp_path.iterdir()
    with pytest.raises(UserError, match="not finished"):
        open_run(left)


def test_variation_across_heads_is_the_population_one():
    means = np.array([[1.0, 3.0], [0.0, 0.0]])
    got = variation_across_heads(means)
    assert got[0] == 0.5 and np.isnan(got[1])


@pytest.mark.parametrize(
    ("delta", "layer"),
    [([1, -1, -1], 1), ([-1, 1, -1], 2), ([-1, -1, -1], 0), ([-1, -1, 1], None), ([1, 0, 0], None)],
)
def test_crossover_is_the_first_lead_that_lasts(delta, layer):
    got = first_lasting_lead(np.array(delta, dtype=float))
    assert np.isnan(got) if layer is None else got == layer
