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
from analyses.figures.reference_development import FIGURES
from analyses.reference_development import Config, half_way, run
from satlens import load_model
from satlens.cli import main
from satlens.errors import SatlensError, UserError
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
    with pytest.raises(SatlensError, match="new has no tokenizer yet: give --tokenizer"):
        run(Config(training=(out,), **config))
    made = run(Config(training=(out,), tokenizer=place["tokenizer"], **config))
    assert len(open_run(made).tables["development"]) == 3


@pytest.mark.parametrize(
    "changes, words", [({"training": ()}, "at least one"), ({"sequences": 1}, "at least 2")]
)
def test_flags_that_make_no_sense_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        Config(**{"training": (Path("x"),), **changes})


# --- figures ---


def tables_of(steps: tuple[int, ...], runs: dict[str, float]) -> dict[str, pd.DataFrame]:
    gates, copying = [], []
    for name, size in runs.items():
        for step in steps:
            for layer in range(6):
                value = size * (step > 10)
                gates.append(
                    {"run": name, "step": step, "layer": layer, "duty_low": 0.1, "duty_high": 0.3}
                    | {key: value for key in ("coupling", "resting", "duty_median", "share")}
                    | {f"{key}_{end}": value for key in ("coupling", "share") for end in ("low", "high")}
                )
            copying.append({"run": name, "step": step, "induction": 0.1, "loss_drop": 0.2})
    order = [
        {"run": name, "quantity": q, "before": before, "after": after}
        for name in runs
        for q, before, after in (("coupling", 10, 100), ("share", 0, 1), ("induction", None, None))
    ]
    return {
        "development": pd.DataFrame(gates),
        "induction": pd.DataFrame(copying),
        "order": pd.DataFrame(order),
    }


def info_of(*runs: tuple[str, str, bool, int]) -> dict[str, Any]:
    rows = [
        {"run": name, "mlp": mlp, "attention": attention, "seed": seed, "distinct": True}
        for name, mlp, attention, seed in runs
    ]
    return {"runs": rows, "layer": 3, "n_layers": 6, "least_change": 0.05, "n_tokens": 900, "n_documents": 4}


RUNS = [("a", "gelu", True, 1), ("b", "gelu", True, 2), ("c", "gelu", False, 1), ("d", "swiglu", True, 1)]


@pytest.mark.parametrize("name", FIGURES)
def test_figures_are_strict_json_with_a_caption_and_the_same_every_time(name: str) -> None:
    tables, info = tables_of((0, 1, 10, 100), {run[0]: 0.5 for run in RUNS}), info_of(*RUNS)
    first, second = (
        json.dumps(json.loads(FIGURES[name](tables, info).to_json()), allow_nan=False) for _ in range(2)
    )
    assert first == second
    figure = FIGURES[name](tables, info)
    assert len(figure.layout.meta["caption"]) > 80 and "900 tokens in 4 documents" in str(figure.layout.title)


def test_the_untrained_model_stands_at_the_left_edge_of_the_step_axis() -> None:
    figure = FIGURES["development"](tables_of((0, 1, 10, 100), {"a": 0.5}), info_of(RUNS[0]))
    assert figure.layout.xaxis.type == "log"
    assert dict(
        zip(figure.layout.xaxis.ticktext, figure.layout.xaxis.tickvals, strict=True)
    ) == pytest.approx({"0": 1 / 3, "1": 1, "10": 10, "100": 100})
    line = next(trace for trace in figure.data if trace.mode == "lines+markers")
    assert list(line.x) == pytest.approx([1 / 3, 1, 10, 100]) and list(line.y) == [0, 0, 0, 0.5]


def test_arms_differ_in_colour_or_dash_and_seeds_in_neither() -> None:
    figure = FIGURES["development"](tables_of((0, 1, 100), {run[0]: 0.5 for run in RUNS}), info_of(*RUNS))
    looks = {
        trace.legendgroup: (trace.line.color, trace.line.dash) for trace in figure.data if trace.showlegend
    }
    assert looks["a"] == looks["b"] and len({looks[name] for name in "acd"}) == 3
    assert looks["c"][1] == "dash" and looks["a"][1] == looks["d"][1] == "solid"
    names = [trace.name for trace in figure.data if trace.showlegend]
    assert "gelu, attention off, seed 1" in names and len(set(names)) == 4


def test_a_quantity_that_went_nowhere_has_no_mark_in_the_order() -> None:
    figure = FIGURES["order"](tables_of((0, 1, 10, 100), {"a": 0.5, "b": 0.5}), info_of(*RUNS[:2]))
    marks = {trace.name: list(trace.x) for trace in figure.data}
    assert [len(x) for x in marks.values()] == [2, 2, 0]
    assert marks["coupling w·b, median gate"] == pytest.approx([np.sqrt(1000)] * 2)
    assert marks["m^ in the stream"] == pytest.approx([np.sqrt(1 / 3)] * 2)
