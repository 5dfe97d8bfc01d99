"""Figures of training runs: arms told apart, the untrained model in its place, nothing shown that is not there."""

import json
from typing import Any

import numpy as np
import pandas as pd
import pytest

from analyses.figures.reference_development import FIGURES


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
            copying.append({"run": name, "step": step, "induction": 0.1, "loss_drop": 0.2, "loss": 5.0})
    order = [
        {"run": name, "quantity": q, "before": before, "after": after}
        for name in runs
        for q, before, after in (("coupling", 10, 100), ("share", 0, 1), ("induction", None, None))
    ]
    return {
        "development": pd.DataFrame(gates),
        "induction": pd.DataFrame(copying),
        "loss": pd.DataFrame(copying),
        "order": pd.DataFrame(order),
    }


def info_of(*runs: tuple[str, str, bool, int]) -> dict[str, Any]:
    rows = [
        {"run": name, "mlp": mlp, "attention": attention, "seed": seed, "distinct": True}
        for name, mlp, attention, seed in runs
    ]
    texts = {"n_tokens": 900, "n_documents": 4}
    return {
        "runs": rows,
        "layer": 3,
        "n_layers": 6,
        "least_change": {"others": 0.05, "loss_drop": 0.15},
        "chance": 0.01,
        **texts,
    }


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
    lines = [trace for trace in figure.data if trace.mode == "lines+markers"]
    assert list(lines[0].y) == [5.0] * 4  # the loss, which no layer has of its own
    line = lines[1]
    assert list(line.x) == pytest.approx([1 / 3, 1, 10, 100]) and list(line.y) == [0, 0, 0, 0.5]


@pytest.mark.parametrize("steps, words", [((539,), ["539"]), ((2000, 8000), ["2k", "8k"])])
@pytest.mark.parametrize("name", FIGURES)
def test_steps_within_a_decade_have_ticks_too(name: str, steps: tuple[int, ...], words: list[str]) -> None:
    figure = FIGURES[name](tables_of(steps, {"a": 0.5}), info_of(RUNS[0]))
    assert list(figure.layout.xaxis.ticktext) == words


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
