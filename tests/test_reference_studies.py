"""The studies of reports/reference_direction: OPT read as published and as it is, published numbers, commands."""

import importlib
import re
import shlex
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import tyro
from planted import LAYERS, MLP, plant

from satlens.carried.documents import SKIP, split
from satlens.carried.opening import read_model
from satlens.carried.statics import measure
from satlens.carried.summary import layer_rows, layer_tables

FOLDER = Path(__file__).parents[1] / "reports" / "reference_direction"


def study(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(FOLDER))
    sys.modules.pop(name, None)
    return importlib.import_module(name)


# --- OPT ---


@pytest.mark.parametrize("style", ["opt-pre", "opt-post"])
def test_a_planted_opt_returns_its_coupling_and_the_published_indexing_does_not(style: str) -> None:
    made = plant(style)
    documents = made.documents
    statics = measure(read_model(made.model, None, name=style), split(documents, same=True))
    table = layer_rows(layer_tables(statics, 100), LAYERS).set_index("layer")
    for layer in range(LAYERS):
        linear, reads = made.model.model.decoder.layers[layer].fc1, []
        handle = linear.register_forward_pre_hook(lambda _, inp, reads=reads: reads.append(inp[0][0, SKIP:]))
        with torch.no_grad():
            for ids in documents.ids:
                made.model(torch.from_numpy(ids)[None])
        handle.remove()
        # features of one token: the stream is no wider than the positions skipped, so that nothing is left of it
        assert {x.dim() for x in reads} == {1} and sum(x.numel() for x in reads) == 0
        row = table.loc[layer]
        assert row["coupling"] == pytest.approx(float(np.median(made.coupling[layer])), abs=1e-3)
        assert row["resting"] == pytest.approx(
            float(np.median(made.coupling[layer] + made.bias[layer])), abs=1e-3
        )
        assert row["duty"] == pytest.approx(float(made.duty[layer].mean()), abs=1e-6)
        assert row["n_gates"] == MLP


def test_the_published_indexing_loses_a_planted_reference_and_ours_finds_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    table = study("opt_defect", monkeypatch).demonstration()
    assert len(table) == 4
    ours, published = (table[table["read"] == name] for name in ("ours", "published"))
    assert (ours["resting"] < -0.1).all() and (ours["dominance"] == 1).all() and (ours["rho"] > 0.9).all()
    assert (ours["duty"] < 0.15).all()
    # what the paper reports of OPT: no resting term to speak of, and ranks that a constant cannot have
    assert (published["resting"].abs() < 0.02).all() and (published["rho"] == 0).all()


# --- published numbers ---


def test_every_published_number_names_its_source() -> None:
    for name in ("published.csv", "published_single.csv"):
        table = pd.read_csv(FOLDER / name)
        assert table["source"].str.contains(r"\.json|section|table").all(), name
        assert not table.drop(columns="source").duplicated().any(), name


def test_numbers_of_both_lists_are_found_in_the_runs_that_hold_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    compare = study("compare", monkeypatch)
    known = {"resting": -1.5, "resting_low": -1.6, "resting_high": -1.4, "dominance": 0.9, "ratio": 50.0}
    row = {"model": "phi-2", "layer": 6, **dict.fromkeys(compare.COLUMNS.values()), **known}
    statics = pd.DataFrame([row])
    object_table = pd.DataFrame(
        {
            "layer": [1, 2, 28, 29],
            "b_norm": [None] * 4,
            "share": [0.1, 0.3, 0.5, 0.9],
            "stream_norm": [1.0, 2.0, 8.0, 99.0],
        }
    )
    runs = [
        fake(tmp_path, "reference-scan", scan=statics),
        fake(tmp_path, "reference", carried_object=object_table),
    ]
    monkeypatch.setattr(compare, "static_rows", lambda run: run.tables.get("scan", pd.DataFrame()))
    table, extra = compare.compared(runs)
    row = table[(table["model"] == "microsoft/phi-2") & (table["layer"] == 6)].set_index("quantity")
    assert row.loc["resting_median", "published"] == -1.5682
    assert list(row.loc["resting_median", ["re-measured", "low", "high"]]) == [-1.5, -1.6, -1.4]
    assert table["re-measured"].notna().sum() == 3 and extra.empty  # resting, dominance, ratio
    found = compare.singles(runs).set_index("quantity")["re-measured"]
    assert found["share of m^ in the stream, lowest of L2 to L28"] == 0.3
    assert found["growth of the stream's norm from L2 to L28"] == 4.0
    assert found.notna().sum() == 3


def fake(folder: Path, verb: str, **tables: pd.DataFrame) -> Any:
    from types import SimpleNamespace

    manifest = SimpleNamespace(verb=verb, model={"name": "phi-2"}, summary={"n_layers": 32})
    return SimpleNamespace(manifest=manifest, tables=tables, path=folder / verb)


# --- findings ---

ARMS = [
    ("on-1", "gelu", True, -1.0),
    ("on-2", "gelu", True, -0.6),
    ("off-1", "gelu", False, -0.4),
    ("b", "swiglu", True, -9.0),
]


def test_what_is_left_without_attention_is_told_as_a_share(monkeypatch: pytest.MonkeyPatch) -> None:
    findings = study("findings", monkeypatch)
    checkpoints = pd.DataFrame(
        [(run, mlp, on) for run, mlp, on, _ in ARMS], columns=["run", "mlp", "attention"]
    )
    gates = pd.DataFrame(
        [(run, step, c * step) for run, _, _, c in ARMS for step in (0, 1)],
        columns=["run", "step", "coupling"],
    )
    words = findings.arm_words(checkpoints, gates)
    assert "0.50 with gelu (-0.400 against -0.800)" in words and "swiglu" not in words
    assert "lie up to 0.400 apart" in words


@pytest.mark.parametrize("rises", [True, False])
def test_an_order_is_claimed_only_where_copying_was_learnt(
    monkeypatch: pytest.MonkeyPatch, rises: bool
) -> None:
    findings = study("findings", monkeypatch)
    induction = ("induction", 8, 9, "moved") if rises else ("induction", None, None, "did not move")
    order = pd.DataFrame(
        [("coupling", 1, 2, "moved"), induction], columns=["quantity", "before", "after", "status"]
    )
    copying = pd.DataFrame(
        {"run": "a", "step": [0, 9], "induction": [0.01, 0.9 if rises else 0.02], "chance": 0.01}
    )
    words = findings.order_words({"order": order.assign(run="a").convert_dtypes(), "induction": copying})
    assert "between steps 1 and 2" in words
    assert ("First came: a: coupling." in words) == rises and ("is not decided here" in words) != rises


# --- commands ---

README = (FOLDER / "README.md").read_text(encoding="utf-8")
LINES = [line for line in re.findall(r"satlens reference[a-z-]* [^`\n]+", README) if "--" in line]


@pytest.mark.parametrize("line", LINES)
def test_every_documented_command_is_one_that_the_verb_understands(line: str) -> None:
    _, verb, *flags = shlex.split(line)
    module = importlib.import_module(f"analyses.{verb.replace('-', '_')}")
    config = tyro.cli(module.Config, args=flags)
    assert config.reading.tokens <= 12_000


def test_the_readme_documents_every_model_of_the_scan() -> None:
    models = {name.split("/")[-1] for name in pd.read_csv(FOLDER / "published.csv")["model"]}
    assert all(f"models/{name} " in README or f"`{name}`" in README for name in models)
