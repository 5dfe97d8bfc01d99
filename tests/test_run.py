"""A run is whole or it is not a run, says nothing about who made it, and notices when its files change."""

import json
import subprocess
import sys
from collections import namedtuple
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import pytest

from satlens.errors import SatlensError, UserError
from satlens.run import digest, git_state, open_run, plain, start_run, verify


def make(root, run_id="000001", value=1.5):
    run = start_run(root, "gates", {"seed": 3}, ["satlens", "gates"], run_id=run_id)
    run.table("profile", pd.DataFrame({"layer": [1, 2], "mean": [value, 0.25]}), units={"mean": "alpha"})
    run.tensor("sums", {"alpha": np.arange(6.0).reshape(2, 3)})
    run.figure("bars", go.Figure(go.Bar(y=np.array([1.0, 2.0]))))
    return run


def strict(text):
    def refuse(word):
        raise AssertionError(f"{word} is not JSON")

    return json.loads(text, parse_constant=refuse)


def test_a_run_is_open_only_after_finish(tmp_path):
    run = make(tmp_path)
    with pytest.raises(UserError, match="not finished or not a run"):
        open_run(run.path)
    assert run.finish({}) == run.path
    assert open_run(run.path).manifest.verb == "gates"


def test_what_goes_in_comes_out(tmp_path):
    run = open_run(
        make(tmp_path).finish({"ppl": 31.25}, model={"name": "m"}, data={"n_tokens": 9}, precision="float32")
    )
    assert list(run.tables) == ["profile"] and list(run.tensors) == ["sums"] and list(run.figures) == ["bars"]
    assert run.tables["profile"]["mean"].tolist() == [1.5, 0.25]
    assert run.tensors["sums"]["alpha"].tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
    assert run.figures["bars"]["data"][0]["type"] == "bar"
    table = next(artifact for artifact in run.manifest.artifacts if artifact.path == "tables/profile.parquet")
    assert table.rows == 2 and table.units == {"mean": "alpha"}
    assert run.manifest.summary == {"ppl": 31.25}
    assert (run.manifest.seed, run.manifest.precision, run.manifest.data["n_tokens"]) == (3, "float32", 9)
    assert set(run.manifest.versions) == {"satlens", "torch", "transformer-lens", "transformers", "numpy"}


def test_a_column_without_values_is_stored_as_null_numbers(tmp_path):
    run = start_run(tmp_path, "lens", {}, [])
    run.table("lens", pd.DataFrame({"nll": [1.0, 2.0], "low": [None, None]}))
    table = open_run(run.finish({})).tables["lens"]
    assert table["low"].dtype == np.float64 and table["low"].isna().all()


def test_no_absolute_path_or_home_is_kept(tmp_path):
    @dataclass
    class Config:
        text: Path
        note: str

    config = Config(Path("/home/bob/texts/book.txt"), "copied from /home/bob/texts/book.txt today")
    run = start_run(
        tmp_path, "gates", config, ["/home/bob/bin/satlens", "--out=/home/bob/runs", "~bob/x", "../bob/y"]
    )
    run.log("read", path=Path("/home/bob/texts/book.txt"), words="opened /home/bob/a.txt, 3 tokens/s")
    path = run.finish(
        {"where": "/home/bob/runs"}, model={"path": "/home/bob/model"}, data={"file": "/home/bob/t"}
    )
    written = (path / "manifest.json").read_text() + (path / "log.jsonl").read_text()
    assert "bob" not in written and str(tmp_path) not in written
    manifest = open_run(path).manifest
    assert manifest.argv == ["satlens", "--out=runs", "x", "y"]
    assert manifest.config == {"text": "book.txt", "note": "copied from book.txt today"}


def test_manifest_and_log_are_strict_json(tmp_path):
    run = make(tmp_path)
    run.log("step", loss=float("nan"), rate=np.float32("inf"))
    path = run.finish({"ppl": np.nan, "heads": np.array([1.0, np.nan])})
    assert strict((path / "manifest.json").read_text())["summary"] == {"ppl": None, "heads": [1.0, None]}
    assert strict((path / "log.jsonl").read_text())["loss"] is None


def test_named_tuples_keep_their_names_and_strange_objects_are_refused():
    point = namedtuple("point", "estimate low high")
    assert plain(point(1.0, None, np.float64(2))) == {"estimate": 1.0, "low": None, "high": 2.0}
    with pytest.raises(SatlensError, match="object does not fit"):
        plain({"x": object()})


def test_digest_depends_on_results_and_not_on_time_or_name(tmp_path):
    first, same = open_run(make(tmp_path, "a").finish({})), open_run(make(tmp_path, "b").finish({}))
    other = open_run(make(tmp_path, "c", value=1.75).finish({}))
    assert digest(first) == digest(same) != digest(other)


def test_inputs_are_named_by_digest(tmp_path):
    source = open_run(make(tmp_path, "a").finish({}))
    run = start_run(tmp_path, "compare", {}, [])
    (entry,) = open_run(run.finish({}, inputs=[source])).manifest.inputs
    assert entry == {"run": source.manifest.run, "verb": "gates", "digest": digest(source)}


def test_verify_finds_changed_and_missing_files(tmp_path):
    run = open_run(make(tmp_path).finish({}))
    assert verify(run) == []
    (run.path / "figures/bars.json").write_text("{}")
    (run.path / "tables/profile.parquet").unlink()
    assert verify(run) == ["tables/profile.parquet: missing", "figures/bars.json: changed since the run"]


def test_a_failed_write_leaves_no_artifact(tmp_path):
    run = start_run(tmp_path, "gates", {}, [])
    with pytest.raises(Exception, match=r"tuple|object|convert"):
        run.table("bad", pd.DataFrame({"x": [object(), (1, 2)]}))
    assert open_run(run.finish({})).manifest.artifacts == []
    assert not list(run.path.rglob("bad.parquet"))


@pytest.mark.parametrize(
    "wrong",
    [
        lambda run: run.table("profile", pd.DataFrame({"x": [1]})),
        lambda run: run.table("../up", pd.DataFrame({"x": [1]})),
        lambda run: run.table("two.dots", pd.DataFrame({"x": [1]})),
        lambda run: run.table("new", pd.DataFrame({"x": [1]}), units={"y": "nats"}),
    ],
)
def test_names_are_unique_and_plain_and_units_belong_to_columns(tmp_path, wrong):
    with pytest.raises(SatlensError):
        wrong(make(tmp_path))


def test_a_finished_run_does_not_change(tmp_path):
    run = make(tmp_path)
    run.finish({})
    with pytest.raises(SatlensError, match="finished"):
        run.table("late", pd.DataFrame({"x": [1]}))
    with pytest.raises(SatlensError, match="finished"):
        run.finish({})


def test_an_unreadable_manifest_says_so(tmp_path):
    path = make(tmp_path).finish({})
    (path / "manifest.json").write_text('{"verb": "gates"}')
    with pytest.raises(UserError, match="cannot be read"):
        open_run(path)


def test_git_state_is_the_commit_and_whether_files_differ(tmp_path):
    def git(*words):
        subprocess.run(
            ["git", "-C", str(tmp_path), "-c", "user.name=n", "-c", "user.email=e", *words], check=True
        )

    assert git_state(tmp_path / "missing") is None
    git("init", "-q")
    (tmp_path / "a").write_text("1")
    git("add", "a")
    git("commit", "-q", "-m", "first")
    assert git_state(tmp_path)["dirty"] is False
    (tmp_path / "a").write_text("2")
    assert git_state(tmp_path)["dirty"] is True
    (tmp_path / "inner").mkdir()
    assert git_state(tmp_path / "inner") is None


def test_runs_statistics_plots_and_reports_do_not_import_torch():
    modules = "satlens.run, satlens.bootstrap, satlens.plots.export, satlens.plots.theme, satlens.report"
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
