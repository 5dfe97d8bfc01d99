"""The report is one offline page that says everything its runs say and lets no text in them become code."""

import base64
import re

import pandas as pd
import plotly.graph_objects as go
import pytest

from satlens.bootstrap import Interval
from satlens.errors import UserError
from satlens.plots import export, theme
from satlens.report import assemble, page
from satlens.run import digest, open_run, start_run

EVIL = "</script><script>alert(1)</script>"


def make(root, verb, figure=True, summary=None, n_documents=12):
    run = start_run(root, verb, {"seed": 5}, ["satlens", verb, "reference/satformer"], run_id="00")
    words = ["=1+1", "-2 cats", "@x", "plain", EVIL]
    run.table("words", pd.DataFrame({"token": words, "delta": [-1.0, -2.5, 3.0, 0.0, None]}))
    if figure:
        fig = go.Figure(go.Bar(x=["a", EVIL], y=[1, 2]))
        run.figure("bars", theme.style(fig, f"Bars of {verb}", "10 tokens", f"Caption of {verb} <b>"))
    model = {"name": "SAT<i>", "digest": "d" * 64}
    data = {"name": "held-out", "n_tokens": 4321, "n_documents": n_documents, "first_ids": [7, 8, 9]}
    return run.finish(summary or {}, model=model, data=data)


def test_nothing_on_the_page_comes_from_the_network(tmp_path):
    text = assemble([make(tmp_path, "gates")], tmp_path / "out").read_text()
    assert text.count("plotly.js v") == 1
    own = re.sub(r"<script>/\*\*.*?</script>", "", text, flags=re.S)
    assert len(own) < 200_000
    assert not re.findall(r"""(?:src|href)=["']?(?:https?:)?//|@import|url\(""", own)
    assert "default-src 'none'" in own


def test_the_same_runs_give_the_same_bytes(tmp_path):
    runs = [make(tmp_path, "gates"), make(tmp_path, "lens")]
    first = assemble(runs, tmp_path / "a").read_bytes()
    assert assemble(runs, tmp_path / "b").read_bytes() == first


def test_sections_stand_in_reading_order_and_every_link_leads_somewhere(tmp_path):
    runs = [make(tmp_path, verb) for verb in ("zebra", "doctor", "lens", "ablate", "gates", "reference")]
    text = assemble([*runs, runs[0]], tmp_path / "out").read_text()
    headings = re.findall(r"<h2>(\w+): SAT&lt;i&gt;</h2>", text)
    assert headings == ["gates", "ablate", "lens", "reference", "doctor", "zebra"]
    targets = set(re.findall(r'href="#([^"]+)"', text))
    assert len(targets) == 7 and targets <= set(re.findall(r'id="([^"]+)"', text))


def test_text_from_a_run_never_becomes_markup(tmp_path):
    text = assemble(
        [make(tmp_path, "gates"), make(tmp_path, "doctor", figure=False)], tmp_path / "out"
    ).read_text()
    assert "alert(1)" in text
    assert "<script>alert(1)" not in text and "SAT<i>" not in text and "gates <b>" not in text


def test_csv_cells_that_look_like_formulas_are_defused_and_numbers_are_not(tmp_path):
    text = assemble([make(tmp_path, "gates")], tmp_path / "out").read_text()
    (data,) = re.findall(r'href="data:text/csv;charset=utf-8;base64,([^"]+)"', text)
    lines = base64.b64decode(data).decode().splitlines()
    assert lines[:4] == ["token,delta", "'=1+1,-1.0", "'-2 cats,-2.5", "'@x,3.0"]
    assert lines[4] == "plain,0.0"


def test_key_numbers_have_interval_unit_and_tokens(tmp_path):
    summary = {
        "perplexity": Interval(31.4159, 30.5, 32.5),
        "worst_layer": {
            "estimate": 0.05,
            "low": None,
            "high": None,
            "unit": "nats per token",
            "n_tokens": 99,
        },
        "crossover": {"layer": None},
    }
    text = assemble([make(tmp_path, "gates", summary=summary)], tmp_path / "out").read_text()
    assert "<td>perplexity</td><td>31.416</td><td>[30.5, 32.5]</td><td>4,321</td>" in text
    assert "<td>worst layer</td><td>0.05 nats per token</td><td>no interval</td><td>99</td>" in text
    assert "<td>crossover: layer</td><td>not defined</td>" in text


def test_a_number_carries_the_tokens_its_run_counted_before_those_of_its_text(tmp_path):
    summary = {"n_tokens": 4200, "perplexity": {"estimate": 31.5, "low": 30.0, "high": 33.0}}
    text = assemble([make(tmp_path, "ablate", summary=summary)], tmp_path / "out").read_text()
    row = text[text.index("perplexity</t") :]
    assert "4,200" in row[: row.index("</tr>")]


def test_one_document_is_named_as_the_reason_for_a_missing_interval(tmp_path):
    run = make(tmp_path, "gates", summary={"perplexity": Interval(31.5, None, None)}, n_documents=1)
    text = assemble([run], tmp_path / "out").read_text()
    assert "<td>31.5</td><td>no interval: fewer than two documents</td>" in text


def test_provenance_names_command_seed_digests_and_first_ids(tmp_path):
    path = make(tmp_path, "gates")
    text = assemble([path], tmp_path / "out").read_text()
    for fact in ("satlens gates reference/satformer", "d" * 64, "7, 8, 9", digest(open_run(path)), path.name):
        assert fact in text
    assert str(tmp_path) not in text


def test_a_run_whose_files_changed_is_pointed_out(tmp_path):
    path = make(tmp_path, "gates")
    assert "differ from the manifest" not in assemble([path], tmp_path / "out").read_text()
    figure = path / "figures/bars.json"
    figure.write_text(figure.read_text() + " ")
    assert (
        "Files differ from the manifest: figures/bars.json" in assemble([path], tmp_path / "out").read_text()
    )


def test_figures_are_described_in_words(tmp_path):
    text = assemble([make(tmp_path, "gates")], tmp_path / "out").read_text()
    assert 'role="img" aria-label="Bars of gates. Caption of gates &lt;b&gt;"' in text
    assert "<figcaption>Caption of gates &lt;b&gt;</figcaption>" in text


def test_a_run_without_figures_shows_its_short_tables(tmp_path):
    text = assemble([make(tmp_path, "doctor", figure=False)], tmp_path / "out").read_text()
    assert "<td>plain</td><td>0</td>" in text
    assert "plotly.js v" not in text


def test_a_large_table_is_named_instead_of_embedded(tmp_path, monkeypatch):
    monkeypatch.setattr(page, "CSV_LIMIT", 10)
    path = make(tmp_path, "gates")
    text = assemble([path], tmp_path / "out").read_text()
    assert "data:text/csv" not in text and f"{path.name}/tables/words.parquet" in text


def test_a_static_page_is_small_and_has_alternative_text(tmp_path, monkeypatch):
    def draw(figures, paths, suffix):
        for path in paths:
            path.write_text("<svg/>")

    monkeypatch.setattr(export, "cannot_draw", lambda: "")
    monkeypatch.setattr(export, "_draw", draw)
    text = assemble([make(tmp_path, "gates")], tmp_path / "out", static=True).read_text()
    assert len(text) < 50_000 and "<script" not in text
    picture = base64.b64encode(b"<svg/>").decode()
    assert (
        f'alt="Bars of gates. Caption of gates &lt;b&gt;" src="data:image/svg+xml;base64,{picture}"' in text
    )


def test_without_a_browser_the_static_page_is_a_live_one_and_says_so(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(export, "cannot_draw", lambda: "no browser")
    text = assemble([make(tmp_path, "gates")], tmp_path / "out", static=True).read_text()
    assert "plotly.js v" in text
    assert capsys.readouterr().err == "no static page: no browser; writing the live one\n"


def test_no_run_or_an_unfinished_run_is_the_users_mistake(tmp_path):
    with pytest.raises(UserError, match="at least one run"):
        assemble([], tmp_path / "out")
    run = start_run(tmp_path, "gates", {}, [])
    with pytest.raises(UserError, match="not finished"):
        assemble([run.path], tmp_path / "out")
