"""Checkpoints in order, numbers that are each checkpoint's own, failures as rows, nothing measured twice or lost."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from development import write_model, write_run, write_texts, write_tokenizer

import analyses.reference_development as verb
from analyses.reference_development import Config, run
from satlens import load_model
from satlens.carried.order import half_way, order_table, which_first
from satlens.cli import main
from satlens.errors import UserError
from satlens.reading import Reading
from satlens.run import open_run
from satlens.training.checkpoints import read_run

GELU = {"mlp": "gelu", "mlp_bias": True}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two runs of two arms, a text, and a tokenizer."""
    folder = tmp_path_factory.mktemp("development")
    tokenizer = write_tokenizer(folder)
    return {
        "folder": folder,
        "tokenizer": tokenizer,
        "text": write_texts(folder),
        "gelu": write_run(folder / "gelu-7", tokenizer, **GELU),
        "off": write_run(folder / "off-7", tokenizer, (0, 4), **GELU, attention_disabled=True),
    }


def reading(place: dict[str, Path], runs: Path, **changes: Any) -> Reading:
    return Reading(**{"text": place["text"], "runs": runs, "resamples": 100, "batch_size": 3, **changes})


@pytest.fixture(scope="module")
def finished(place: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Any:
    runs = tmp_path_factory.mktemp("runs")
    config = Config(training=(place["gelu"], place["off"]), sequences=4, reading=reading(place, runs))
    made = run(config)
    assert made is not None
    return open_run(made)


# --- what a training run left ---


def test_checkpoints_come_in_order_of_their_steps_with_their_tokens(place: dict[str, Path]) -> None:
    found = read_run(place["gelu"])
    assert [c.step for c in found.checkpoints] == [0, 2, 9]
    assert [c.tokens for c in found.checkpoints] == [0, 2 * 600, 9 * 600]  # 3 x 50 x 2, two processes
    assert (found.name, found.mlp, found.attention, found.seed) == ("gelu-7", "gelu", True, 7)
    assert found.tokenizer == place["gelu"] / "final"
    assert read_run(place["off"]).attention is False


def test_an_unfinished_run_is_read_from_its_state(place: dict[str, Path], tmp_path: Path) -> None:
    out = write_run(tmp_path / "run", place["tokenizer"], (0,))
    (out / "final").rename(tmp_path / "elsewhere")
    state = out / "state-00000005"
    state.mkdir()
    recipe = {"batch_size": 4, "seq_length": 10, "seed": 3, "processes": 1}
    (state / "progress.json").write_text(json.dumps({"recipe": recipe}))
    found = read_run(out)
    assert (found.seed, found.tokenizer, found.mlp) == (3, None, "swiglu")
    (out / "snapshots" / "step-00000000.part").mkdir()
    assert len(read_run(out).checkpoints) == 1


def test_any_folder_of_checkpoints_named_by_steps_is_a_run(place: dict[str, Path], tmp_path: Path) -> None:
    for name, step in (("step1000", 3), ("checkpoint-20", 2), ("5", 1)):
        write_model(tmp_path / "run" / name, step, 340, place["tokenizer"] if name == "5" else None)
    (tmp_path / "run" / "notes").mkdir()
    found = read_run(tmp_path / "run")
    assert [c.step for c in found.checkpoints] == [5, 20, 1000]
    assert (found.seed, found.checkpoints[0].tokens) == (None, None)
    assert found.tokenizer == tmp_path / "run" / "5"


def test_a_folder_without_checkpoints_is_refused(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(UserError, match=r"no checkpoints in .*give the folder of a training run"):
            read_run(folder)


# --- what comes first ---

PLANTED = [
    ([0, 1, 2, 4], [0.0, 0.1, 0.9, 1.0], (1, 2)),
    ([0, 1, 2, 4], [0.5, 0.5, 0.5, 0.1], (2, 4)),
    ([0, 1, 2, 4, 8], [0.0, 0.9, 0.2, 0.9, 1.0], (2, 4)),  # it went back once: for good only later
    ([0, 1, 2], [0.0, 5.0, 0.01], (None, None)),  # ended where it began
    ([0, 1, 2], [0.0, np.nan, 1.0], (None, None)),
    ([0], [0.3], (None, None)),
]


@pytest.mark.parametrize("steps, values, expected", PLANTED)
def test_half_way_is_the_pair_of_checkpoints_between_which_it_is_passed_for_good(
    steps: list[int], values: list[float], expected: tuple[int | None, int | None]
) -> None:
    assert half_way(np.array(steps), np.array(values)) == expected


STEPS = (0, 2, 4, 8)


def grown(**values: list[float]) -> dict[str, pd.DataFrame]:
    """Tables of one run ``r`` in which every quantity not named stays where it is."""
    columns = {"run": "r", "step": STEPS, "layer": 1}
    names = {
        "development": ("coupling", "resting", "duty_median", "share"),
        "induction": ("induction", "loss_drop"),
    }
    flat = {
        table: pd.DataFrame({**columns, **{n: values.get(n, [0.5] * 4) for n in own}})
        for table, own in names.items()
    }
    return {**flat, "loss": pd.DataFrame({**columns, "loss": [9.0, 8.0, 5.0, 4.0]})}


@pytest.mark.parametrize(
    "coupling, induction, said",
    [
        ([0, -1, -1, -1], [0, 0, 0, 1], "coupling"),
        ([0, 0, 0, -1], [0, 1, 1, 1], "induction"),
        ([0, 0, -1, -1], [0, 0, 1, 1], "no order: between the same checkpoints"),
        ([0, -1, -1, -1], [0.01, 0.02, 0.0, 0.01], "no order: induction did not move"),
        ([0, 0, 0, 0.01], [0, 0, 0, 1], "no order: coupling did not move"),
    ],
)
def test_what_came_first_is_said_only_where_checkpoints_tell_it(
    coupling: list[float], induction: list[float], said: str
) -> None:
    order = order_table(grown(coupling=coupling, induction=induction), 1)
    assert which_first(order, "r") == said
    loss = order.set_index("quantity").loc["loss"]
    assert (loss["before"], loss["after"], loss["status"]) == (2, 4, "moved")


def test_patterns_that_are_written_nowhere_have_no_order() -> None:
    order = order_table(grown(coupling=[0, -1, -1, -1], induction=[0, 0, 0, 1]), 1, {"r"})
    assert which_first(order, "r") == "no order: induction attention off"
    row = order.set_index("quantity").loc["induction"]
    assert pd.isna(row["before"]) and (row["first"], row["last"]) == (0, 1)


# --- the verb ---


def test_every_checkpoint_and_layer_is_a_row(finished: Any) -> None:
    table = finished.tables["development"]
    expected = {("gelu-7", step, layer) for step in (0, 2, 9) for layer in range(3)}
    expected |= {("off-7", step, layer) for step in (0, 4) for layer in range(3)}
    assert set(zip(table["run"], table["step"], table["layer"], strict=True)) == expected
    assert len(finished.tables["induction"]) == len(finished.tables["checkpoints"]) == 5
    assert set(finished.tables["checkpoints"]["status"]) == {"measured"}
    for name in ("carried_object", "carried_writes", "carried_rank", "carried_geometry"):
        assert {"run", "step"} <= set(finished.tables[name].columns), name
    assert (table["duty_low"] <= table["duty"]).all() and (table["duty"] <= table["duty_high"]).all()


@pytest.mark.parametrize("run_name, step", [("gelu-7", 2), ("off-7", 4)])
def test_a_row_is_what_a_loop_over_documents_finds(
    place: dict[str, Path], finished: Any, run_name: str, step: int
) -> None:
    from satlens.checkpoint import load_tokenizer

    folder = place["gelu" if run_name == "gelu-7" else "off"]
    model = load_model(folder / "snapshots" / f"step-{step:08d}")
    tokenizer = load_tokenizer(folder / "final")
    texts = [json.loads(line)["text"] for line in place["text"].read_text().splitlines()]
    documents = [tokenizer(text, add_special_tokens=False)["input_ids"][:96] for text in texts]
    documents = [ids for ids in documents if len(ids) >= 64]
    far: dict[str, list[torch.Tensor]] = {"fit": [], "evaluate": []}
    up = model.model.layers[1].mlp.up_proj
    for number, ids in enumerate(documents):
        seen: list[torch.Tensor] = []
        handle = up.register_forward_pre_hook(lambda _, args, seen=seen: seen.append(args[0]))
        with torch.no_grad():
            model(torch.tensor([ids]))
        handle.remove()
        far["evaluate" if number % 2 else "fit"].append(seen[0][0, 16:].double())
    weight, bias = up.weight.detach().double(), up.bias.detach().double()
    coupling = weight @ torch.cat(far["fit"]).mean(0)
    duty = (torch.cat(far["evaluate"]) @ weight.T + bias > 0).double().mean(0)
    table = finished.tables["development"]
    row = table[(table["run"] == run_name) & (table["step"] == step) & (table["layer"] == 1)].iloc[0]
    assert row["coupling"] == pytest.approx(float(np.median(coupling)), abs=1e-5)
    assert row["resting"] == pytest.approx(float(np.median(coupling + bias)), abs=1e-5)
    assert row["duty"] == pytest.approx(float(duty.mean()), abs=2e-3)
    assert row["dominance"] == pytest.approx(float((coupling.abs() > bias.abs()).double().mean()))


def test_the_loss_is_that_of_the_models_own_logits(place: dict[str, Path], finished: Any) -> None:
    from satlens.checkpoint import load_tokenizer

    model = load_model(place["gelu"] / "snapshots" / "step-00000009")
    tokenizer = load_tokenizer(place["gelu"] / "final")
    texts = [json.loads(line)["text"] for line in place["text"].read_text().splitlines()]
    documents = [tokenizer(text, add_special_tokens=False)["input_ids"][:96] for text in texts]
    losses = []
    for ids in [ids for ids in documents if len(ids) >= 64][1::2]:
        with torch.no_grad():
            log_p = model(torch.tensor([ids])).logits[0].double().log_softmax(-1)
        losses += [-float(log_p[t, ids[t + 1]]) for t in range(16, len(ids) - 1)]
    table = finished.tables["loss"]
    row = table[(table["run"] == "gelu-7") & (table["step"] == 9)].iloc[0]
    assert row["loss"] == pytest.approx(np.mean(losses), abs=1e-5)
    assert row["n_predictions"] == len(losses) and row["loss_low"] < row["loss"] < row["loss_high"]


def test_the_summary_says_of_every_run_what_came_first(finished: Any) -> None:
    said = finished.manifest.summary["off-7_first"]
    assert said.startswith("no order: ") and "gelu-7_first" in finished.manifest.summary
    table = finished.tables["order"]
    assert set(
        table.loc[table["run"] == "off-7"].set_index("quantity").loc[["induction", "loss_drop"], "status"]
    ) == {"attention off"}


def test_a_run_without_attention_gains_nothing_from_a_repeat(finished: Any) -> None:
    table = finished.tables["induction"].set_index("run")
    assert table.loc["off-7", "loss_drop"].abs().max() < 1e-6
    assert table.loc["gelu-7", "loss_drop"].abs().max() > 1e-4


def test_the_same_command_again_measures_nothing_and_says_the_same(
    place: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = Config(training=(place["off"],), sequences=3, reading=reading(place, tmp_path))
    first = open_run(run(config))

    def measured_again(*_: Any) -> Any:
        raise AssertionError("measured again")

    monkeypatch.setattr(verb, "measure_one", measured_again)
    second = open_run(run(config))
    for name in first.tables:
        pd.testing.assert_frame_equal(first.tables[name], second.tables[name])
    other = Config(training=(place["off"],), sequences=4, reading=reading(place, tmp_path))
    with pytest.raises(AssertionError, match="measured again"):  # another question has no answer yet
        run(other)


def test_what_was_measured_before_a_crash_is_kept(
    place: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = Config(training=(place["off"],), sequences=3, reading=reading(place, tmp_path))
    plain, calls = verb.measure_one, []

    def crashing(reader: Any, *rest: Any) -> Any:
        calls.append(reader.name)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return plain(reader, *rest)

    with monkeypatch.context() as patched:
        patched.setattr(verb, "measure_one", crashing)
        with pytest.raises(KeyboardInterrupt):
            run(config)
        calls.append("after")
        run(config)
    assert calls == ["step-00000000", "step-00000004", "after", "step-00000004"]


def test_a_checkpoint_that_fails_is_a_row_with_the_reason(place: dict[str, Path], tmp_path: Path) -> None:
    out = write_run(tmp_path / "bad", place["tokenizer"], (0, 3), **GELU)
    (out / "snapshots" / "step-00000003" / "model.safetensors").write_bytes(b"cut short")
    made = open_run(run(Config(training=(out,), sequences=3, reading=reading(place, tmp_path / "runs"))))
    table = made.tables["checkpoints"].set_index("step")
    assert table.loc[0, "status"] == "measured" and table.loc[3, "status"] == "failed"
    assert "is damaged or incomplete" in table.loc[3, "reason"]
    assert set(made.tables["development"]["step"]) == {0}
    assert made.manifest.summary["failed"] == 1


def test_when_nothing_can_be_measured_the_command_fails(
    place: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = write_run(tmp_path / "bad", place["tokenizer"], (0,))
    (out / "snapshots" / "step-00000000" / "model.safetensors").write_bytes(b"cut short")
    flags = ["--text", str(place["text"]), "--runs", str(tmp_path / "runs")]
    assert main(["reference-development", str(out), *flags]) == 1
    assert "no checkpoint could be measured" in capsys.readouterr().err


def test_a_run_without_tokenizer_asks_for_one(place: dict[str, Path], tmp_path: Path) -> None:
    out = write_run(tmp_path / "new", place["tokenizer"], (0,))
    (out / "final").rename(tmp_path / "elsewhere")
    config = {"sequences": 3, "reading": reading(place, tmp_path / "runs")}
    with pytest.raises(UserError, match="new has no tokenizer yet: give --tokenizer"):
        run(Config(training=(out,), **config))
    made = run(Config(training=(out,), tokenizer=place["tokenizer"], **config))
    assert len(open_run(made).tables["development"]) == 3


@pytest.mark.parametrize(
    "changes, words", [({"training": ()}, "at least one"), ({"sequences": 1}, "at least 2")]
)
def test_flags_that_make_no_sense_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        Config(**{"training": (Path("x"),), **changes})
