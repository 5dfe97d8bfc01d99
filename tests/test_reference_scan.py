"""The scan: rows that are each model's own, at the paper's depths, and models that fail as rows with the reason."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from development import write_model, write_texts, write_tokenizer

import analyses.reference_scan as verb
from analyses.figures.reference_scan import FIGURES
from analyses.reference_scan import Config, labels, run
from satlens.carried.pieces import EDITION, attempt, piece
from satlens.carried.statics import depths
from satlens.carried.summary import ranks
from satlens.cli import main
from satlens.errors import SatlensError, UserError
from satlens.reading import Reading
from satlens.run import open_run


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A model of ours, a GPT-2, a folder that is no model, and a text."""
    from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel

    folder = tmp_path_factory.mktemp("scan")
    tokenizer = write_tokenizer(folder)
    write_model(folder / "ours", 1, 340, tokenizer, mlp="gelu", mlp_bias=True, num_hidden_layers=4)
    torch.manual_seed(2)
    config = GPT2Config(
        n_embd=24, n_layer=3, n_head=4, n_positions=96, vocab_size=340, initializer_range=0.2,
        bos_token_id=2, eos_token_id=2,
    )  # fmt: skip
    model = GPT2LMHeadModel(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("bias"):
                weight.add_(0.3 * torch.randn_like(weight))
    model.save_pretrained(folder / "gpt2")
    AutoTokenizer.from_pretrained(tokenizer).save_pretrained(folder / "gpt2")
    (folder / "empty").mkdir()
    return {"folder": folder, "text": write_texts(folder)}


def config(place: dict[str, Path], runs: Path, *names: str, **changes: Any) -> Config:
    reading = Reading(text=place["text"], runs=runs, resamples=100, batch_size=3)
    return Config(models=tuple(str(place["folder"] / name) for name in names), reading=reading, **changes)


@pytest.fixture(scope="module")
def finished(place: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Any:
    runs = tmp_path_factory.mktemp("runs")
    return open_run(run(config(place, runs, "ours", "empty", "gpt2", twins=1)))


def test_layers_are_the_integer_parts_of_depth_fractions() -> None:
    assert depths(24) == (4, 8, 12, 15) and depths(22) == (4, 7, 11, 14) and depths(28) == (5, 9, 14, 18)


def test_one_row_a_model_and_layer_and_one_for_a_failure(finished: Any) -> None:
    table = finished.tables["scan"]
    own = table[table["status"] == "measured"]
    assert {(m, layer) for m, layer in zip(own["model"], own["layer"], strict=True)} == {
        *(("ours", layer) for layer in (0, 1, 2)),
        *(("ours twin 1", layer) for layer in (0, 1, 2)),
        *(("gpt2", layer) for layer in (0, 1)),
        *(("gpt2 twin 1", layer) for layer in (0, 1)),
    }
    failed = table[table["status"] == "failed"]
    assert list(failed["model"]) == ["empty"] and "no config.json" in failed["reason"].iloc[0]
    assert (
        own["depth"].tolist() == (own["layer"] / own["model"].map(lambda m: 4 if "ours" in m else 3)).tolist()
    )
    assert finished.manifest.summary["n_failed"] == 1 and finished.manifest.summary["n_models"] == 2


def test_models_in_folders_of_one_name_are_told_apart() -> None:
    given = ("runs/a-1/final", "runs/b-1/final", "phi-2", "x/phi-2", "reference-transformer")
    names = ["a-1/final", "b-1/final", "phi-2", "x/phi-2", "reference-transformer"]
    assert list(labels(given).values()) == names
    assert list(labels(("final", "final")).values()) == ["final"]


def test_models_say_what_their_gates_are(finished: Any) -> None:
    table = finished.tables["models"].set_index("model")
    assert table.loc["gpt2", "gate"] == "transformer.h.0.mlp.c_fc"
    assert table.loc["ours", "gate"] == "model.layers.0.mlp.up_proj"
    assert not table.loc["ours", "gated"] and bool(table.loc["ours", "gate_bias"])
    assert (table.loc["gpt2", "block"], table.loc["ours", "block"]) == ("sequential", "sequential")
    assert table.loc["empty", "status"] == "failed"


def test_the_row_of_a_gpt2_is_what_a_loop_over_documents_finds(place: dict[str, Path], finished: Any) -> None:
    from transformers import AutoTokenizer, GPT2LMHeadModel

    folder = place["folder"] / "gpt2"
    model, tokenizer = GPT2LMHeadModel.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    texts = [json.loads(line)["text"] for line in place["text"].read_text().splitlines()]
    ids = [tokenizer(text, add_special_tokens=False)["input_ids"][:96] for text in texts]
    ids = [row for row in ids if len(row) >= 64]
    fc, reads, seen = model.transformer.h[1].mlp.c_fc, [], []
    fc.register_forward_pre_hook(lambda _, args: seen.append(args[0][0, 16:].double()))
    for row in ids:
        with torch.no_grad():
            model(torch.tensor([row]))
        reads.append(seen.pop())
    weight, bias = fc.weight.detach().double().T, fc.bias.detach().double()
    coupling = weight @ torch.cat(reads[::2]).mean(0)
    table = finished.tables["scan"]
    row = table[(table["model"] == "gpt2") & (table["layer"] == 1)].iloc[0]
    assert row["coupling"] == pytest.approx(float(np.median(coupling)), abs=1e-5)
    assert row["bias"] == pytest.approx(float(np.median(bias)), abs=1e-6)
    assert row["ratio"] == pytest.approx(float(np.median(coupling.abs()) / np.median(bias.abs())), rel=1e-4)
    assert row["negative"] == pytest.approx(float((coupling + bias < 0).double().mean()))


def test_random_directions_count_by_the_size_of_their_correlation() -> None:
    rank = pd.DataFrame(
        [
            (0, name, rho, rho, rho)
            for name, rho in [("random", r) for r in (-0.3, 0.1, 0.2)] + [("resting", -0.5)]
        ],
        columns=["layer", "predictor", "rho", "rho_low", "rho_high"],
    )
    row = ranks(rank).loc[0]
    assert row["rho_random"] == 0.2 and row["rho_resting"] == -0.5


def test_models_measured_one_by_one_are_gathered_without_measuring_again(
    place: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("ours", "gpt2"):
        run(config(place, tmp_path, name))
    monkeypatch.setattr(verb, "measure_one", lambda *_: pytest.fail("measured again"))
    both = open_run(run(config(place, tmp_path, "ours", "gpt2")))
    assert set(both.tables["scan"]["model"]) == {"ours", "gpt2"}


def test_weights_cut_short_are_a_row_with_the_reason(place: dict[str, Path], tmp_path: Path) -> None:
    shutil.copytree(place["folder"] / "gpt2", tmp_path / "cut")
    file = tmp_path / "cut" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    given = config(place, tmp_path / "runs", "gpt2", str(tmp_path / "cut"))
    table = open_run(run(given)).tables["scan"].set_index("model")
    assert set(table.loc[["gpt2"], "status"]) == {"measured"}
    assert "cut does not open as a causal language model" in table.loc["cut", "reason"]


def test_a_twin_that_fails_costs_its_model_nothing(
    place: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_twin(*_: Any) -> Any:
        raise SatlensError("out of memory")

    monkeypatch.setattr("satlens.carried.opening.twin", no_twin)
    table = open_run(run(config(place, tmp_path, "gpt2", twins=1))).tables["scan"]
    own, twin = table[table["twin"].isna()], table[table["twin"] == 1]
    assert set(own["status"]) == {"measured"} and len(own) == 2
    assert list(twin[["model", "status", "reason"]].iloc[0]) == ["gpt2 twin 1", "failed", "out of memory"]


def test_when_every_model_fails_the_command_fails(
    place: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--text", str(place["text"]), "--runs", str(tmp_path)]
    assert main(["reference-scan", str(place["folder"] / "empty"), *flags]) == 1
    assert "none of 1 models could be measured: no config.json" in capsys.readouterr().err


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"models": ()}, "at least one model"),
        ({"depths": (1.0,)}, "below 1"),
        ({"twins": -1}, "cannot be -1"),
    ],
)
def test_flags_that_make_no_sense_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        Config(**{"models": ("x",), **changes})


# --- pieces ---


def test_a_piece_is_computed_once_and_again_for_another_identity(tmp_path: Path) -> None:
    calls: list[int] = []

    def compute() -> dict[str, list[dict[str, Any]]]:
        calls.append(1)
        return {"table": [{"layer": 0, "value": float("nan")}, {"layer": 1, "value": 0.1 + 0.2}]}

    first, old = piece(tmp_path, {"weights": "a"}, compute)
    again, kept = piece(tmp_path, {"weights": "a"}, compute)
    assert (old, kept, len(calls)) == (False, True, 1)
    assert first == again == {"table": [{"layer": 0, "value": None}, {"layer": 1, "value": 0.1 + 0.2}]}
    assert piece(tmp_path, {"weights": "b"}, compute)[1] is False


def test_a_piece_of_an_older_edition_is_computed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    piece(tmp_path, {"weights": "a"}, lambda: {"table": [{"x": 1}]})
    monkeypatch.setattr("satlens.carried.pieces.EDITION", EDITION + 1)
    assert piece(tmp_path, {"weights": "a"}, lambda: {"table": [{"x": 2}]}) == ({"table": [{"x": 2}]}, False)


def test_a_piece_cut_short_is_computed_again(tmp_path: Path) -> None:
    piece(tmp_path, {"weights": "a"}, lambda: {"table": [{"x": 1}]})
    (file,) = tmp_path.glob("*.json")
    file.write_text(file.read_text()[:20])
    assert piece(tmp_path, {"weights": "a"}, lambda: {"table": [{"x": 2}]}) == ({"table": [{"x": 2}]}, False)
    assert [path.name for path in tmp_path.iterdir()] == [file.name]


def test_a_mistake_in_the_code_is_no_failed_model() -> None:
    def broken() -> Any:
        raise TypeError("a bug")

    def missing() -> Any:
        raise SatlensError("two\nlines")

    with pytest.raises(TypeError, match="a bug"):
        attempt("m", broken)
    assert attempt("m", missing) == ({}, "two lines")


# --- the figure ---


def scanned(bias: bool) -> pd.DataFrame:
    rows = [
        {
            "model": model,
            "layer": layer,
            "depth": layer / 10,
            "status": "measured",
            "twin": None,
            "resting": -0.5,
            "duty_median": 0.2,
        }
        | {"ratio": 20.0 if bias else np.nan, "share": 0.3, "share_low": 0.2, "share_high": 0.4}
        for model in [f"m{i}" for i in range(9)]
        for layer in (2, 5)
    ]
    twins = [{**row, "model": f"{row['model']} twin 1", "twin": 1, "resting": 0.0} for row in rows]
    return pd.DataFrame([*rows, *twins, {"model": "lost", "status": "failed", "reason": "no weights"}])


@pytest.mark.parametrize("bias", [True, False])
def test_the_figure_is_strict_json_and_names_what_failed(bias: bool) -> None:
    figure = FIGURES["scan"]({"scan": scanned(bias)}, {"n_tokens": 900, "n_documents": 4})
    json.dumps(json.loads(figure.to_json()), allow_nan=False)
    assert "Not measured: lost" in figure.layout.meta["caption"]
    entries = [trace for trace in figure.data if trace.showlegend]
    models = [t for t in entries if t.name != "random-init twins"]
    assert len({(t.line.color, t.line.dash, t.marker.symbol) for t in models}) == len(models) == 9
    assert len(entries) == 10 and "9 models" in str(figure.layout.title)
    texts = [annotation.text for annotation in figure.layout.annotations]
    assert ("no model here has gate biases" in texts) != bias
