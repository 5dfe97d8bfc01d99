"""Models on the same tokens: seeds averaged, documents resampled, and what was not made alike is said."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tiny import plain_nll, write_pair, write_texts

from analyses.compare import unequal
from satlens.checkpoint import load_model, load_tokenizer
from satlens.cli import main
from satlens.run import open_run, verify

RECIPE = {"arch": "transformer", "model": {}, "seed": 1, "lr": 0.1, "max_tokens": 640}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """Three models as the trainer leaves them: plain with two seeds (the same weights), gated with one."""
    folder = tmp_path_factory.mktemp("compare")
    pair, text = write_pair(folder), write_texts(folder)
    models = {}
    for name, kind in (("plain-1", "transformer"), ("plain-2", "transformer"), ("gated-1", "SATFormer")):
        out = folder / name
        out.mkdir()
        (out / "final").symlink_to(pair[kind])
        models[name] = out / "final"
    for name, kind in (("plain-1", "transformer"), ("gated-1", "SATFormer")):
        facts = {
            "recipe": {**RECIPE, "arch": kind},
            "tokens_seen": 640,
            "steps": 10,
            "data_sha256": {"train": "a"},
        }
        (pair[kind] / "satlens.json").write_text(json.dumps(facts))
        lines = [{"step": step, "val_loss": 6.0 - step / 10} for step in (5, 10, 10)]
        (folder / name / "log.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return SimpleNamespace(
        folder=folder, text=text, **{key.replace("-", "_"): str(path) for key, path in models.items()}
    )


def compared(place: SimpleNamespace, capsys: Any, *argv: str) -> Any:
    common = ("--text", str(place.text), "--layout", "document", "--runs", str(place.folder / "runs"))
    assert main(["compare", *argv, *common, "--resamples", "200"]) == 0
    return open_run(Path(capsys.readouterr().out.strip()))


def test_deltas_are_those_of_a_slow_loop(place: SimpleNamespace, capsys: Any) -> None:
    run = compared(place, capsys, place.plain_1, place.gated_1)
    assert verify(run) == [] and run.manifest.verb == "compare"
    tokenizer = load_tokenizer(place.plain_1)
    texts = [json.loads(line)["text"] for line in place.text.read_text().splitlines()]
    found = {}
    for name in ("plain_1", "gated_1"):
        model, total, count = load_model(getattr(place, name)), 0.0, 0
        for text in texts:
            import torch

            ids = tokenizer(text, add_special_tokens=False)["input_ids"]
            for start in range(0, len(ids), 32):
                piece = torch.tensor([ids[start : start + 32]])
                total, count = total + float(plain_nll(model, piece).sum()), count + piece.shape[1] - 1
        found[name] = total / count
    rows = run.tables["groups"].set_index("group")
    assert rows.loc["plain", "nll"] == pytest.approx(found["plain_1"], abs=1e-5)
    assert rows.loc["gated", "delta_nll"] == pytest.approx(found["gated_1"] - found["plain_1"], abs=1e-5)
    assert rows.loc["plain", "delta_nll"] == 0 and rows.loc["plain", "delta_nll_high"] == 0


def test_held_out_loss_is_taken_from_the_logs_once_a_step(place: SimpleNamespace, capsys: Any) -> None:
    run = compared(place, capsys, place.plain_1, place.gated_1)
    curves = run.tables["curves"]
    assert curves["val_loss"].tolist() == [5.5, 5.0, 5.5, 5.0] and curves["tokens"].tolist() == [320, 640] * 2
    assert {"delta", "curves"} <= set(run.figures)


def test_models_are_told_side_by_side(place: SimpleNamespace, capsys: Any) -> None:
    common = ("--text", str(place.text), "--runs", str(place.folder / "runs"), "--resamples", "100")
    assert main(["compare", place.plain_1, place.gated_1, *common]) == 0
    lines = [line for line in capsys.readouterr().err.splitlines() if "parameters" in line]
    assert lines[0].startswith("plain-1: ") and "tokens 640, seed 1, data and order a" in lines[0]
    assert (
        all(line.endswith("; made like the first") or "not alike: " in line for line in lines)
        and len(lines) == 2
    )


def test_what_was_not_alike_is_named() -> None:
    base = {
        "group": "a",
        "seed": 1,
        "parameters": 100,
        "tokens_seen": 5,
        "steps": 2,
        "data": "x",
        "rest": {"lr": 0.1},
    }
    other = {
        **base,
        "group": "b",
        "seed": 2,
        "parameters": 105,
        "tokens_seen": 6,
        "data": "y",
        "rest": {"lr": 0.2},
    }
    same = {**base, "group": "c", "parameters": 101}
    assert unequal([base, other, same]) == ["", "parameters +5.0 %, tokens, data, lr, seeds", ""]


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["plain_1"], "at least two models"),
        (["plain_1", "plain_1"], "named twice"),
        (["plain_1", "gated_1", "--bench", "nowhere"], "nowhere"),
    ],
)
def test_a_mistake_is_one_line(place: SimpleNamespace, capsys: Any, argv: list[str], words: str) -> None:
    argv = [getattr(place, word, word) for word in argv]
    assert main(["compare", *argv, "--text", str(place.text), "--runs", str(place.folder / "none")]) == 2
    said = capsys.readouterr().err
    assert words in said and "Traceback" not in said and not (place.folder / "none").exists()


def test_the_mean_over_seeds_is_of_both(place: SimpleNamespace) -> None:
    from analyses.compare import groups_table
    from satlens.bootstrap import document_weights

    nll, count = np.array([[2.0, 4.0, 9.0], [4.0, 6.0, 3.0]]), np.array([2.0, 2.0])
    models = [{"group": group, "architecture": "t", "parameters": 1} for group in ("a", "a", "b")]
    rows = groups_table(models, nll, count, document_weights(2, 200, 0)).set_index("group")
    assert rows.loc["a", "nll"] == pytest.approx(4.0 / 2) and rows.loc["a", "seeds"] == 2
    assert (rows.loc["a", "nll_seed_low"], rows.loc["a", "nll_seed_high"]) == (1.5, 2.5)
    assert rows.loc["b", "delta_nll"] == pytest.approx(12 / 4 - 2.0)
