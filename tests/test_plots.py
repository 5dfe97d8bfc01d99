"""The theme tells the truth about intervals, and export never fails for want of a browser."""

import json
import re

import numpy as np
import plotly.graph_objects as go
import pytest

from satlens.plots import export, theme


@pytest.fixture
def figure():
    fig = go.Figure()
    theme.series(fig, [1, 2, 3], [0.1, 0.2, 0.3], [0.0, 0.1, 0.2], [0.2, 0.3, 0.4], "curve")
    return theme.style(fig, "A title", theme.subtitle(1234, 5, True), "A caption.")


def test_subtitle_names_tokens_documents_and_interval():
    assert theme.subtitle(1234567, 89, True, "m") == (
        "m · 1,234,567 tokens in 89 documents · 95 % bootstrap interval over documents"
    )
    assert theme.subtitle(10, 1, False) == "10 tokens in 1 document · no interval: fewer than two documents"
    assert theme.subtitle(10, None, None) == "10 tokens"


def test_a_band_is_drawn_only_where_both_ends_are_known():
    fig = go.Figure()
    theme.series(fig, [1, 2, 3], [1.0, 2.0, 3.0], [0.5, None, 2.5], [1.5, 2.5, 3.5], "curve")
    band, curve = fig.data
    assert band.fill == "toself" and list(band.x) == [1, 3, 3, 1] and list(band.y) == [1.5, 3.5, 2.5, 0.5]
    assert list(curve.text) == ["[0.5, 1.5]", "", "[2.5, 3.5]"]


def test_without_intervals_there_is_neither_band_nor_bar():
    for bars in (False, True):
        fig = go.Figure()
        theme.series(fig, [1, 2], [1.0, 2.0], [None, None], [None, None], "curve", bars=bars)
        assert len(fig.data) == 1 and fig.data[0].error_y.array is None


def test_error_bars_end_at_low_and_high():
    fig = go.Figure()
    theme.series(fig, [1], [2.0], [1.5], [3.0], "point", bars=True, offset=0.25)
    (trace,) = fig.data
    assert (list(trace.error_y.array), list(trace.error_y.arrayminus)) == ([1.0], [0.5])
    assert list(trace.x) == [1.25] and list(trace.customdata) == [1]


def test_differences_are_coloured_symmetrically_about_zero():
    trace = theme.heatmap(np.array([[-0.5, 0.1], [np.nan, 0.2]]), "nats", diverging=True)
    assert (trace.zmin, trace.zmax) == (-0.5, 0.5)
    assert theme.heatmap(np.array([[0.5, 2.0]]), "alpha").zmin == 0
    assert theme.heatmap(np.zeros((2, 2)), "alpha").zmax == 1


def test_ticks_are_whole_layers_and_never_more_than_fit():
    assert theme.ticks(8) == list(range(8))
    assert theme.ticks(60, 24) == list(range(0, 60, 3))


def test_log_ticks_are_whole_numbers_and_cover_the_data():
    fig = go.Figure()
    theme.log_axis(fig, [31.0, 1800.0, np.nan], "perplexity")
    assert {"50", "100", "1,000"} <= set(fig.layout.yaxis.ticktext)
    low, high = fig.layout.yaxis.range
    assert 10**low < 31 and 10**high > 1800


def test_layer_zero_is_shaded_from_edge_to_edge():
    fig = go.Figure()
    theme.grey_layer_zero(fig)
    (shape,) = fig.layout.shapes
    assert (shape.x0, shape.x1, shape.fillcolor) == (-0.5, 0.5, theme.GREYED)
    assert "produces V1" in fig.layout.annotations[0].text


def test_export_writes_json_and_an_offline_page(figure, tmp_path):
    written = export.export({"one": figure}, tmp_path, formats=())
    assert {path.name for path in written} == {"one.json", "one.html"}
    assert json.loads((tmp_path / "one.json").read_text())["layout"]["meta"]["caption"] == "A caption."
    page = (tmp_path / "one.html").read_text()
    assert re.findall(r'<(?:script|link)[^>]*(?:src|href)="([^"]+)"', page) == ["plotly.min.js"]
    assert (tmp_path / "plotly.min.js").stat().st_size > 1_000_000


def test_export_is_the_same_bytes_every_time(figure, tmp_path):
    for folder in ("a", "b"):
        export.export({"one": figure.to_dict()}, tmp_path / folder, formats=())
    for name in ("one.json", "one.html"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_without_a_browser_one_line_is_said_and_nothing_fails(figure, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(export.shutil, "which", lambda name: None)
    monkeypatch.delenv("BROWSER_PATH", raising=False)
    written = export.export({"one": figure}, tmp_path, formats=("svg",))
    assert {path.suffix for path in written} == {".json", ".html"}
    assert capsys.readouterr().err.count("\n") == 1


def test_a_browser_that_breaks_or_skips_a_figure_is_reported(figure, tmp_path, monkeypatch, capsys):
    def breaks(figures, paths, suffix):
        paths[0].write_text('<svg id="topdefs-0a1b2c"/>')
        raise RuntimeError("it crashed\nat length")

    monkeypatch.setattr(export, "cannot_draw", lambda: "")
    monkeypatch.setattr(export, "_draw", breaks)
    assert export.images({"a": figure, "b": figure}, tmp_path) == [tmp_path / "a.svg"]
    error = capsys.readouterr().err
    assert "b.svg" in error and "it crashed" in error and error.count("\n") == 1


def test_random_ids_become_the_figures_name():
    svg = '<g id="topdefs-0a1b2c"/><g id="clip0a1b2cxy"/><path fill="#0a1b2c"/>'
    assert export.fix_ids(svg, "one") == '<g id="topdefs-one-"/><g id="clipone-xy"/><path fill="#0a1b2c"/>'


@pytest.mark.browser
def test_the_same_figure_is_drawn_with_the_same_bytes(figure, tmp_path):
    if reason := export.cannot_draw():
        pytest.skip(reason)
    first, second = export.images({"a": figure, "b": go.Figure(figure)}, tmp_path)
    assert "A title" in first.read_text()
    assert re.sub(r"(clip|defs-|legend|\bg)a-", r"\1b-", first.read_text()) == second.read_text()
