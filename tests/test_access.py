"""The verbs on all six architectures, and how much first-layer value reaches a layer, against a plain loop."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from analyses.access import relative
from satlens.checkpoint import load_model, load_tokenizer
from satlens.cli import main
from satlens.hf import MODELS
from satlens.run import FinishedRun, open_run, verify
from tests.rivals import write_all
from tests.tiny import documents, write_texts

WITHOUT = ("transformer", "denseformer", "muddformer", "dhc")
"""Architectures without access to first-layer values."""


@pytest.fixture(scope="module")
def place(tmp_path_factory: Any) -> Any:
    """Six tiny checkpoints and their text."""
    folder = tmp_path_factory.mktemp("place")
    return SimpleNamespace(folder=folder, text=write_texts(folder), models=write_all(folder))


def call(place: Any, capsys: Any, *argv: Any) -> tuple[int, FinishedRun | None, str]:
    """Exit code, the run, and what was said."""
    common = ("--text", str(place.text), "--runs", str(place.folder / "runs"), "--resamples", "200")
    code = main([*map(str, argv), *common])
    out = capsys.readouterr()
    return code, open_run(out.out.strip()) if code == 0 else None, out.err


def slowly(path: Path) -> tuple[np.ndarray, np.ndarray, int]:
    """Relative coefficient and share of length by layer, one token of one head at a time."""
    model, tokenizer = load_model(path), load_tokenizer(path)
    docs = tokenizer(documents(), add_special_tokens=False)["input_ids"]
    run = [token for ids in docs for token in (*ids, tokenizer.eos_token_id)]
    kept: dict[int, list[tuple[Any, ...]]] = {}

    def keep(module: Any, args: tuple[Any, ...], layer: int) -> None:
        kept.setdefault(layer, []).append(args)

    for n, layer in enumerate(model.model.layers):
        if n:
            mixing = layer.attn.value_residual_mixing
            mixing.register_forward_pre_hook(lambda m, args, n=n: keep(m, args, n))
    rows = [run[i : i + 32] for i in range(0, len(run), 32)]
    for row in rows:
        with torch.no_grad():
            model(torch.tensor([row]))
    first, own, share = np.zeros(3), np.zeros(3), np.zeros(3)
    for n in (1, 2, 3):
        mixing = model.model.layers[n].attn.value_residual_mixing
        for row, (v, v1, third) in zip(rows, kept[n], strict=True):
            for t, token in enumerate(row):
                if token == tokenizer.eos_token_id:
                    continue
                for head in range(2):
                    with torch.no_grad():
                        is_gate = model.config.model_type == "SATFormer"
                        c1 = float(mixing.alpha_proj(third[0, t])[head].clamp(min=0) if is_gate else third)
                        c2 = 1.0 if is_gate else float(mixing.lambda2)
                    of_first = abs(c1) * float(v1[0, t, head].double().norm())
                    of_own = abs(c2) * float(v[0, t, head].double().norm())
                    first[n - 1] += c1
                    own[n - 1] += c2
                    share[n - 1] += of_first / (of_first + of_own)
    count = sum(map(len, docs))
    return first / own, share / (2 * count), count


def test_access_equals_a_plain_loop_in_both_architectures(place: Any, capsys: Any) -> None:
    code, run, _ = call(place, capsys, "access", place.models["SATFormer"], place.models["ResFormer"])
    assert code == 0 and run is not None and verify(run) == []
    table = run.tables["access"]
    assert set(run.figures) == {"access"}
    for model_type, gate in (("SATFormer", "relu"), ("ResFormer", "static")):
        rows = table[table["model"] == f"tiny-{model_type.lower()}"].sort_values("layer")
        coefficient, share, count = slowly(place.models[model_type])
        assert list(rows["layer"]) == [1, 2, 3] and set(rows["gate"]) == {gate}
        np.testing.assert_allclose(rows["coefficient"], coefficient, rtol=1e-5)
        np.testing.assert_allclose(rows["share"], share, rtol=1e-5)
        assert set(rows["n_tokens"]) == {count}
        assert (rows["share_low"] < rows["share"]).all() and (rows["share"] < rows["share_high"]).all()
        constant = gate == "static"
        assert np.allclose(rows["low"], rows["high"], rtol=1e-12) == constant


def test_access_can_be_resampled_from_its_sums_alone(place: Any, capsys: Any) -> None:
    _, run, _ = call(place, capsys, "access", place.models["SATFormer"])
    assert run is not None
    sums = run.tables["access_by_document"].groupby("layer")[["first", "own", "share", "n_tokens"]].sum()
    table = run.tables["access"].set_index("layer")
    pd.testing.assert_series_equal(sums["first"] / sums["own"], table["coefficient"], check_names=False)
    pd.testing.assert_series_equal(sums["share"] / sums["n_tokens"], table["share"], check_names=False)


def test_no_own_values_leave_the_relative_coefficient_undefined() -> None:
    got = relative(np.array([[1.0, 0.0], [1.0, 4.0]]))
    assert np.isnan(got[0]) and got[1] == 0.25


def test_a_model_named_twice_is_refused(place: Any, capsys: Any) -> None:
    code, _, err = call(place, capsys, "access", place.models["SATFormer"], place.models["SATFormer"])
    assert code == 2 and "name each model once" in err and err.strip().count("\n") == 0


@pytest.mark.parametrize("verb", ["access", "gates", "ablate"])
@pytest.mark.parametrize("model_type", WITHOUT)
def test_models_without_first_values_are_refused_in_one_line(
    place: Any, capsys: Any, verb: str, model_type: str
) -> None:
    code, _, err = call(place, capsys, verb, place.models[model_type])
    assert code == 2 and err.strip().count("\n") == 0
    assert f"is a {model_type}: it has no gate on first-layer values" in err


@pytest.mark.parametrize("model_type", MODELS)
def test_lens_and_doctor_work_on_every_architecture(place: Any, capsys: Any, model_type: str) -> None:
    code, run, err = call(place, capsys, "lens", place.models[model_type])
    assert code == 0 and run is not None, err
    assert len(run.tables["lens"]) == 4 and run.tables["lens"]["perplexity"].notna().all()
    code, run, err = call(place, capsys, "doctor", place.models[model_type])
    assert code == 0 and run is not None, err
    assert run.tables["checks"]["passed"].all()


def test_gates_of_a_resformer_are_its_constants(place: Any, capsys: Any) -> None:
    code, run, err = call(place, capsys, "gates", place.models["ResFormer"])
    assert code == 0 and run is not None, err
    lambdas = load_model(place.models["ResFormer"]).model.lambda_manager().detach().numpy()
    profile = run.tables["gate_profile"].sort_values("layer")
    for end in ("mean", "low", "high"):
        np.testing.assert_allclose(profile[end], lambdas, rtol=1e-6)
    assert (profile["zero_fraction"] == 0).all() and (profile["cv"] < 1e-12).all()
    assert run.manifest.summary["closed_rule"] == "lambda_1 exactly 0"
    counts = run.tables["gate_histogram"]
    assert (counts[counts["count"] > 0].groupby(["layer", "kv_head"]).size() == 1).all()
    assert set(run.figures) == {"fig8_profile"} and "gate_top_tokens" not in run.tables


def test_ablating_a_resformer_zeroes_and_nothing_else(place: Any, capsys: Any) -> None:
    model = place.models["ResFormer"]
    scopes = ("--scopes", "layer", "head", "upward", "downward")
    code, run, err = call(place, capsys, "ablate", model, *scopes)
    assert code == 0 and run is not None, err
    table = run.tables["ablation"]
    assert set(table["condition"]) == {"zero"} and (table["delta_nll"] != 0).all()
    for kind in ("mean", "head-mean", "resample"):
        code, _, err = call(place, capsys, "ablate", model, "--kinds", "zero", kind)
        assert code == 2 and err.strip().count("\n") == 0
        assert f"{kind} would only put that constant back" in err
