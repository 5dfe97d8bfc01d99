"""Every figure works for every shape of result, and shows the numbers of its tables and no others."""

import itertools

import numpy as np
import pandas as pd
import pytest

from analyses.figures import ablate, gates, lens
from satlens.plots import theme

FIGURES = {**gates.FIGURES, **ablate.FIGURES, **lens.FIGURES}
INFO = {"model": "SAT", "baseline": "Plain", "gate": "relu", "n_tokens": 4321, "n_documents": 12}
SIZE = {"n_tokens": 4321, "n_documents": 12}


def gate_tables(n_layers, n_heads, rng):
    heat, profile, bins = [], [], []
    for layer in range(1, n_layers):
        means = rng.gamma(1.0, layer, n_heads)
        for head in range(n_heads):
            m = means[head]
            heat.append((layer, head, m, m * 0.9, m * 1.1, 0.5, 0.4, 0.6, 4321))
            bins += [(layer, head, 0.0, 0.0, 60), (layer, head, 0.0, 1.0, 30), (layer, head, 1.0, 2.0, 10)]
        cv = means.std() / means.mean()
        profile.append((layer, means.mean(), 0.9, 1.1, 0.5, 0.4, 0.6, cv, cv * 0.9, cv * 1.1, 4321))
    ends = ["mean", "low", "high", "zero_fraction", "zero_low", "zero_high"]
    return {
        "gate_heatmap": pd.DataFrame(heat, columns=["layer", "kv_head", *ends, "n_tokens"]),
        "gate_profile": pd.DataFrame(
            profile, columns=["layer", *ends, "cv", "cv_low", "cv_high", "n_tokens"]
        ),
        "gate_histogram": pd.DataFrame(bins, columns=["layer", "kv_head", "bin_low", "bin_high", "count"]),
    }


def ablation_row(condition, scope, layer, head, delta):
    row = {"condition": condition, "scope": scope, "layer": layer, "kv_head": head, **SIZE, "nll": 3 + delta}
    row["perplexity"] = np.exp(3 + delta)
    for name, scale in (("delta_nll", 1.0), ("delta_ppl", 20.0)):
        row |= {
            name: scale * delta,
            f"{name}_low": scale * (delta - 0.01),
            f"{name}_high": scale * (delta + 0.01),
        }
    return row


def ablate_tables(n_layers, n_heads, rng):
    rows = []
    for layer in range(1, n_layers):
        rows += [ablation_row(c, "layer", layer, None, rng.normal(0.03, 0.02)) for c in ablate.CONDITIONS]
        rows += [ablation_row("zero", "head", layer, h, rng.normal(0.0, 0.02)) for h in range(n_heads)]
        rows += [ablation_row("zero", scope, layer, None, 0.1) for scope in ("upward", "downward")]
    table = pd.DataFrame(rows)
    table["kv_head"] = table["kv_head"].astype("Int64")
    clean = {"nll": 3.0, "perplexity": np.exp(3), "low": 19.0, "high": 21.0, **SIZE}
    return {"ablation": table, "baseline": pd.DataFrame([clean])}


def lens_tables(n_layers, n_heads, rng):
    rows, difference = [], []
    for layer in range(n_layers):
        for name, nll in (("Plain", 6 - 0.3 * layer), ("SAT", 6.2 - 0.4 * layer)):
            ppl = np.exp(nll)
            rows.append({"model": name, "layer": layer, **SIZE, "nll": nll, "perplexity": ppl})
            rows[-1] |= {"low": ppl * 0.95, "high": ppl * 1.05}
        delta = 0.2 - 0.1 * layer
        difference.append({"layer": layer, "delta_nll": delta, "low": delta - 0.02, "high": delta + 0.02})
    crossover = {
        "layer": 3.0,
        "low": 2.0,
        "high": 3.0,
        "share_of_resamples_with_crossover": 0.97,
        "rule": "a rule.",
    }
    return {
        "lens": pd.DataFrame(rows),
        "lens_difference": pd.DataFrame(difference),
        "crossover": pd.DataFrame([crossover]),
    }


def make(n_layers=4, n_heads=3):
    rng = np.random.default_rng(0)
    parts = [build(n_layers, n_heads, rng) for build in (gate_tables, ablate_tables, lens_tables)]
    return {name: table for part in parts for name, table in part.items()}


def without_intervals(tables):
    stripped = {}
    for name, table in tables.items():
        ends = [c for c in table if c.endswith(("low", "high")) and not c.startswith("bin")]
        stripped[name] = table.assign(**dict.fromkeys(ends, None))
    return stripped


@pytest.mark.parametrize("shape", [(4, 3), (2, 1), (30, 4)], ids=str)
@pytest.mark.parametrize("name", FIGURES)
def test_every_figure_says_what_it_shows(name, shape):
    fig = FIGURES[name](make(*shape), INFO)
    assert fig.layout.title.text and len(fig.layout.meta["caption"]) > 60
    assert "4,321 tokens in 12 documents" in fig.layout.title.subtitle.text
    for axis in ("xaxis", "yaxis"):
        assert fig.layout[axis].title.text or name == "distribution"
    labels = [t for t in fig.layout.xaxis.ticktext or [] if "V1" not in t]
    assert all(t.isdigit() for t in labels) and len(labels) <= 24


@pytest.mark.parametrize("name", FIGURES)
def test_every_figure_works_without_intervals_and_says_so(name):
    tables = make()
    fig = FIGURES[name](without_intervals(tables), INFO)
    assert name == "distribution" or theme.NO_INTERVAL in fig.layout.title.subtitle.text
    assert not any(trace.fill for trace in fig.data if trace.type == "scatter")
    assert FIGURES[name](tables, INFO).to_json() != fig.to_json() or name == "distribution"


@pytest.mark.parametrize("name", FIGURES)
def test_the_same_tables_give_the_same_bytes(name):
    first, second = (FIGURES[name](make(), INFO).to_json(remove_uids=False) for _ in range(2))
    assert first == second


def test_heatmap_cells_are_the_table_and_layer_zero_is_empty_and_grey():
    tables = make()
    fig = gates.fig3_heatmap(tables, INFO)
    cells = np.array(fig.data[0].z)
    assert np.isnan(cells[0]).all()
    for row in tables["gate_heatmap"].itertuples():
        assert cells[row.layer, row.kv_head] == row.mean
    assert fig.layout.shapes[0].fillcolor == theme.GREYED and "V1" in fig.layout.annotations[0].text


def test_a_gate_that_is_never_exactly_zero_has_no_panel_of_zeros_and_signed_colours():
    tables = make()
    tables["gate_heatmap"]["mean"] -= 3
    info = {**INFO, "gate": "tanh"}
    assert len([a for a in gates.fig8_profile(tables, info).layout.annotations if "exactly 0" in a.text]) == 0
    assert len([a for a in gates.fig8_profile(tables, INFO).layout.annotations if "exactly 0" in a.text]) == 1
    heat = gates.fig3_heatmap(tables, info).data[0]
    assert heat.zmin == -heat.zmax < 0
    assert "exactly 0" not in gates.distribution(tables, info).layout.annotations[0].text


def test_distribution_states_zeros_apart_and_its_bars_are_shares_of_all_pairs():
    fig = gates.distribution(make(), INFO)
    assert fig.layout.annotations[0].text == "layer 1 · 60.0 % exactly 0"
    for bars in fig.data:
        assert list(bars.y) == pytest.approx([0.3, 0.1])
        assert list(bars.width) == [1.0, 1.0]


def test_a_first_bin_from_zero_gets_a_left_end_on_a_log_axis():
    edges = np.array([0.0, 0.01, 0.1, 1.0, 10.0])
    rows = [(1, 0, low, high, 5) for low, high in itertools.pairwise(edges)]
    table = pd.DataFrame(rows, columns=["layer", "kv_head", "bin_low", "bin_high", "count"])
    fig = gates.distribution({"gate_histogram": table}, INFO)
    assert fig.layout.xaxis.type == "log" and list(fig.data[0].x) == pytest.approx([0.001, 0.01, 0.1, 1.0])


def test_layers_figure_has_zero_and_mean_only_and_names_the_unchanged_perplexity():
    tables = make()
    fig = ablate.fig4_layers(tables, INFO)
    assert [trace.name for trace in fig.data] == ["zero", "mean"]
    table = tables["ablation"]
    zero = table[(table["condition"] == "zero") & (table["scope"] == "layer")]
    assert list(fig.data[0].y) == zero["delta_ppl"].tolist()
    assert "unchanged PPL 20.09 [19, 21]" in fig.layout.title.subtitle.text


def test_ladder_goes_from_blunt_to_fine():
    names = [trace.name for trace in ablate.ladder(make(), INFO).data]
    assert names == ["zero", "mean", "head-mean", "resample"]


def test_exactly_the_heads_whose_interval_includes_zero_are_crossed():
    tables = make(6, 5)
    heat, crosses = ablate.heads(tables, INFO).data
    table = tables["ablation"][tables["ablation"]["scope"] == "head"]
    unsure = table[(table["delta_nll_low"] <= 0) & (table["delta_nll_high"] >= 0)]
    assert 0 < len(unsure) < len(table)
    assert set(zip(crosses.y, crosses.x, strict=True)) == set(
        zip(unsure["layer"], unsure["kv_head"], strict=True)
    )
    assert heat.zmin == -heat.zmax


def test_crossover_is_marked_with_its_interval():
    for draw in (lens.fig5_lens, lens.difference):
        fig = draw(make(), INFO)
        assert "crossover at layer 3 [2, 3], found in 97 % of resamples" in fig.layout.title.subtitle.text
        lines = [shape for shape in fig.layout.shapes if shape.type == "line"]
        assert [(line.x0, line.x1) for line in lines] == [(3.0, 3.0)]
        assert "a rule." in fig.layout.meta["caption"]


def test_no_crossover_is_said_and_not_drawn():
    tables = make()
    tables["crossover"] = tables["crossover"].assign(
        layer=None, low=None, high=None, share_of_resamples_with_crossover=0.04
    )
    fig = lens.fig5_lens(tables, INFO)
    assert fig.layout.title.subtitle.text.startswith("no crossover (there is one in 4 % of resamples)")
    assert not [shape for shape in fig.layout.shapes if shape.type == "line"]


def test_one_model_alone_has_a_lens_and_no_word_of_another():
    tables = make()
    alone = {"lens": tables["lens"][tables["lens"]["model"] == "SAT"]}
    fig = lens.fig5_lens(alone, {**INFO, "baseline": None})
    assert [trace.name for trace in fig.data if trace.name] == ["SAT"]
    assert "crossover" not in fig.layout.title.subtitle.text + fig.layout.meta["caption"].lower()


def test_the_model_comes_first_whatever_the_table_says():
    assert [trace.name for trace in lens.fig5_lens(make(), INFO).data if trace.name] == ["SAT", "Plain"]


def test_difference_names_only_the_sides_that_occur():
    tables = make()
    tables["lens_difference"] = tables["lens_difference"].assign(delta_nll=0.5)
    words = " ".join(annotation.text for annotation in lens.difference(tables, INFO).layout.annotations)
    assert "Plain predicts better" in words and "SAT predicts better" not in words
