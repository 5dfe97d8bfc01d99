"""Gating by category from stored sums: against loops over positions, its three bootstraps, its null, and the verb."""

from collections import Counter
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch

from analyses.figures import categories as figures
from analyses.latents.gating import (
    GROUPS,
    average,
    feature_means,
    frequency_strata,
    members,
    sampled_means,
)
from satlens.bootstrap import document_weights
from satlens.checkpoint import load_model, load_tokenizer, model_facts
from satlens.cli import main
from satlens.plots import theme
from satlens.run import open_run, verify
from tests.labelled import Positions, write_labels
from tests.tiny import documents, write_pair, write_texts

FINE = {
    "Entity Marker Fragments": ("semantic", {3: [1, 2], 5: [2, 4, 9], 8: [3], 11: [1, 5, 0]}),
    "Multilingual Unicode": ("functional", {2: [6, 7]}),
    "Structural Punctuation": ("structural", {4: [1, 8], 9: [5, 6]}),
    "Code Formatting Symbols": ("structural", {7: [2, 3, 4], 12: [0]}),
}
N_RESAMPLES = 40


def labelled():
    """Features and their tokens; latent 12 is active only on token 0, which the text lacks."""
    features, active = [], []
    for category, (broad, latents) in FINE.items():
        for latent, tokens in latents.items():
            features.append((latent, category, broad))
            active += [(latent, token, 1.5) for token in tokens]
    active.append((99, 1, 2.0))  # of a latent that was not accepted
    return (
        pd.DataFrame(features, columns=["latent", "category", "broad"]),
        pd.DataFrame(active, columns=["latent", "token_id", "act"]),
    )


def tokens_of(latent):
    return next(latents[latent] for _, latents in FINE.values() if latent in latents)


def world(**changes):
    text = Positions(**changes)
    gates = text.sums()
    return text, gates, members(*labelled(), gates.count)


def slow_means(text, repeats=None):
    """``{latent: (mean alpha per layer, positions)}`` by going through the positions, each as often as its document."""
    found = {}
    for _, latents in FINE.values():
        for latent, tokens in latents.items():
            total, count = np.zeros(text.alpha.shape[1]), 0
            for doc, token, alpha in zip(text.doc, text.token, text.alpha, strict=True):
                if token in tokens:
                    times = 1 if repeats is None else repeats[doc]
                    total, count = total + times * alpha.mean(1), count + times
            if count:
                found[latent] = (total / count, count)
    return found


def slow_group(means, latents, weighting):
    """The mean over these features (a feature may be there several times), as the spec words it."""
    used = [means[latent] for latent in latents if latent in means]
    weight = [1 if weighting == "feature" else count for _, count in used]
    return sum(w * mean for w, (mean, _) in zip(weight, used, strict=True)) / sum(weight)


def latents_of(level, name):
    groups = [
        latents
        for category, (broad, latents) in FINE.items()
        if name == (broad if level == "broad" else category)
    ]
    return sorted(latent for latents in groups for latent in latents if latent != 12)


def test_feature_means_equal_a_loop_over_positions():
    text, gates, known = world()
    means, counts = feature_means(known, gates)
    slow = slow_means(text)
    assert known.table["latent"].tolist() == sorted(slow) and known.n_unseen == 1
    for at, latent in enumerate(known.table["latent"]):
        np.testing.assert_allclose(means[at].mean(1), slow[latent][0])
        assert counts[at] == slow[latent][1]
    inside = np.isin(text.token, tokens_of(5))
    at = known.table["latent"].tolist().index(5)
    np.testing.assert_allclose(means[at], text.alpha[inside].mean(0))  # by head


@pytest.mark.parametrize("weighting", ["feature", "position"])
def test_category_means_and_all_three_bootstraps_equal_slow_resampling(weighting):
    text, gates, known = world()
    found = sampled_means(known, gates, N_RESAMPLES, 7, 2)
    weights = document_weights(text.n_docs, N_RESAMPLES, 7)
    clean, resampled = slow_means(text), [slow_means(text, row) for row in weights]
    present = [group for group in GROUPS if latents_of(*group)]
    assert {group for group, _ in found} == set(present)
    for place, group in enumerate(present):
        latents, sampled = latents_of(*group), found[group, weighting]
        np.testing.assert_allclose(sampled.estimate, slow_group(clean, latents, weighting))
        share = np.full(len(latents), 1 / len(latents))
        draws = np.random.default_rng([7, 2, place]).multinomial(
            max(len(latents) - 1, 1), share, size=N_RESAMPLES
        )
        for at in range(N_RESAMPLES):
            drawn = np.repeat(latents, draws[at])
            documents = slow_group(resampled[at], latents, weighting)
            np.testing.assert_allclose(sampled.documents[at], documents, rtol=1e-6)
            np.testing.assert_allclose(sampled.features[at], slow_group(clean, drawn, weighting))
            np.testing.assert_allclose(
                sampled.joint[at], slow_group(resampled[at], drawn, weighting), rtol=1e-6
            )


def test_the_bootstrap_over_features_has_the_spread_of_a_mean_even_for_three_of_them():
    _, gates, known = world()
    rows = known.group(("broad", "structural"))
    found = sampled_means(known, gates, 20_000, 0, 0)[("broad", "structural"), "feature"].features
    means = feature_means(known, gates)[0].mean(2)[rows]
    assert len(rows) == 3
    np.testing.assert_allclose(found.std(0), means.std(0, ddof=1) / np.sqrt(3), rtol=0.03)


def test_chunks_of_features_change_nothing(monkeypatch):
    _, gates, known = world()
    whole = sampled_means(known, gates, N_RESAMPLES, 0, 0)
    monkeypatch.setattr("analyses.latents.gating.CHUNK_VALUES", 1)
    for key, sampled in sampled_means(known, gates, N_RESAMPLES, 0, 0).items():
        for name, values in vars(sampled).items():
            np.testing.assert_allclose(values, getattr(whole[key], name), rtol=1e-12)


def test_differences_are_paired():
    _, gates, known = world()
    found = sampled_means(known, gates, N_RESAMPLES, 0, 0)
    first, second = (found[("broad", name), "feature"] for name in ("semantic", "structural"))
    difference = first.minus(second)
    np.testing.assert_array_equal(difference.joint, first.joint - second.joint)
    assert (first.minus(first).joint == 0).all()
    both = average([first, second])
    np.testing.assert_allclose(both.documents, (first.documents + second.documents) / 2)


def test_a_gate_that_depends_on_frequency_alone_stays_inside_its_null():
    text = Positions(n=900)
    count = np.bincount(text.token, minlength=text.n_ids)
    strata = np.full(text.n_ids, -1)
    strata[count > 0] = frequency_strata(count[count > 0])
    text.alpha = np.broadcast_to(strata[text.token][:, None, None] + 1.0, text.alpha.shape).copy()
    gates = text.sums()
    found = sampled_means(members(*labelled(), gates.count), gates, N_RESAMPLES, 0, 0)
    for sampled in found.values():
        # trading values inside a stratum, where all are alike, must give the measured mean every time
        np.testing.assert_allclose(sampled.null, np.broadcast_to(sampled.estimate, sampled.null.shape))


def test_permuted_token_types_keep_their_strata_and_lose_their_category():
    rng = np.random.default_rng(0)
    text = Positions(n_ids=60, n=4000)
    text.token = rng.integers(1, 60, size=4000)
    high = np.isin(text.token, [1, 2, 4, 9])  # tokens of semantic features
    text.alpha = np.where(high, 5.0, 1.0)[:, None, None] + np.zeros((4000, 3, 2))
    gates = text.sums()
    found = sampled_means(members(*labelled(), gates.count), gates, 400, 0, 0)
    difference = found[("broad", "semantic"), "feature"].minus(found[("broad", "structural"), "feature"])
    low, high = np.quantile(difference.null[:, 0], [0.025, 0.975])
    assert difference.estimate[0] > high and low < 0 < high


def test_types_that_occur_equally_often_share_a_stratum():
    count = np.array([1, 1, 1, 1, 1, 1, 1, 2, 2, 30, 40, 50, 60, 70])
    strata = frequency_strata(count)
    assert strata[0] == strata[6] < strata[7] == strata[8] < strata[9] < strata[-1]
    assert (np.diff(strata) >= 0).all()


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A tiny pair, its gates run, and labels of two dictionaries of one model and one of the other."""
    folder = tmp_path_factory.mktemp("categories")
    made = SimpleNamespace(
        folder=folder, runs=folder / "runs", text=write_texts(folder), **write_pair(folder)
    )
    made.facts = {
        name: {"name": path.name, **model_facts(path)}
        for name, path in (("sat", made.SATFormer), ("plain", made.transformer))
    }
    argv = ["gates", made.SATFormer, "--text", made.text, "--runs", made.runs, "--layout", "document"]
    assert main([str(word) for word in argv]) == 0
    tokenizer = load_tokenizer(made.SATFormer)
    ids = [i for document in tokenizer(documents(), add_special_tokens=False)["input_ids"] for i in document]
    seen = [token for token, _ in Counter(ids).most_common()]
    assert 0 not in seen and len(seen) > 50
    made.digits = seen[3::9][:3]
    many = {latent: ("Structural Punctuation", seen[3 * latent : 3 * latent + 2]) for latent in range(6)}
    some = {10 + i: ("Entity Marker Fragments", [seen[4 + 6 * i], seen[43 + i]]) for i in range(7)}
    tail = {
        30: ("Numerical Digit Fragments", made.digits),
        31: (None, [3]),
        32: ("Byte-Level Fallbacks", [0]),
    }
    made.labels = [
        write_labels(made.runs, made.facts["sat"], {**many, **some, **tail}, seed=0),
        write_labels(made.runs, made.facts["sat"], {**some, 40: many[2], 41: many[3]}, seed=1),
        write_labels(made.runs, made.facts["plain"], {**some, **tail}, seed=0),
    ]
    return made


def ask(place, capsys, *labels, more=()):
    """Exit code, the run if there is one, and stderr."""
    argv = [
        "categories",
        place.SATFormer,
        "--runs",
        place.runs,
        "--resamples",
        "200",
        "--labels",
        *labels,
        *more,
    ]
    code = main([str(word) for word in argv])
    out = capsys.readouterr()
    return code, open_run(out.out.strip()) if code == 0 else None, out.err


def slow_alpha(place, tokens):
    """Sum of alpha per layer, mean over heads, at the positions of these tokens, and how many there are."""
    model, tokenizer = load_model(place.SATFormer), load_tokenizer(place.SATFormer)
    total, count, alphas = np.zeros(3), 0, {}
    for n, layer in enumerate(model.model.layers):
        if n:
            gate = layer.attn.value_residual_mixing.gate
            gate.register_forward_hook(
                lambda m, i, out, n=n: alphas.__setitem__(n - 1, out[0].double().numpy())
            )
    for ids in tokenizer(documents(), add_special_tokens=False)["input_ids"]:
        ids = [*ids, tokenizer.eos_token_id]
        for start in range(0, len(ids), 32):
            with torch.no_grad():
                model(torch.tensor([ids[start : start + 32]]))
            for pos, token in enumerate(ids[start : start + 32]):
                if token in tokens:
                    total += [alphas[n][pos].mean() for n in range(3)]
                    count += 1
    return total, count


def test_the_verb_runs_no_model_and_its_means_are_those_of_the_model(place, capsys, monkeypatch):
    monkeypatch.setattr("satlens.checkpoint.load_model", None)  # nothing may open it
    code, run, err = ask(place, capsys, place.labels[0])
    monkeypatch.undo()
    assert code == 0, err
    assert verify(run) == []
    total, count = slow_alpha(place, place.digits)
    table = run.tables["category_gating"]
    rows = table[(table["category"] == "Numerical Digit Fragments") & (table["weighting"] == "feature")]
    assert count > 0 and set(rows["n_tokens"]) == {count} and set(rows["n_features"]) == {1}
    np.testing.assert_allclose(rows.sort_values("layer")["mean"], total / count, atol=1e-5)
    assert (
        rows["low"].isna().all() and rows["low_documents"].notna().all()
    )  # one feature says nothing of others
    heads = run.tables["category_gating_heads"].query(
        "category == 'Numerical Digit Fragments' and weighting == 'feature'"
    )
    np.testing.assert_allclose(heads.groupby("layer")["mean"].mean(), total / count, atol=1e-5)
    feature = run.tables["feature_gating"].query("latent == 30")
    np.testing.assert_allclose(feature["mean"], total / count, atol=1e-5)
    assert run.manifest.summary["without_positions_by_seed"] == {"0": 1}  # token 0 never occurs
    assert [item["verb"] for item in run.manifest.inputs] == ["gates", "sae-label"]


def test_several_seeds_give_a_mean_with_their_spread(place, capsys):
    _, run, _ = ask(place, capsys, place.labels[1], place.labels[0])
    for name, keys in (
        ("category_gating", ["level", "category", "weighting", "layer"]),
        ("differences", ["difference", "weighting", "layer"]),
    ):
        table = run.tables[name].set_index([*keys, "seed"])["mean"].unstack("seed")
        if name == "category_gating":
            table = table.loc[table["1"].notna()]
        rows = run.tables[name].query("seed == 'mean'").set_index(keys).loc[table.index]
        if (
            name == "differences"
        ):  # the second dictionary has no functional feature: the mean is over the first alone
            alone = table["1"].isna()
            assert alone.any() and (table["mean"] == table["0"])[alone].all()
            table, rows = table[~alone], rows[~alone]
        np.testing.assert_allclose(table["mean"], (table["0"] + table["1"]) / 2)
        np.testing.assert_allclose(rows["seed_low"], table[["0", "1"]].min(axis=1))
        np.testing.assert_allclose(rows["seed_high"], table[["0", "1"]].max(axis=1))
    assert run.tables["category_gating"].query("seed != 'mean'")["seed_low"].isna().all()
    known = (
        run.tables["differences"]
        .query("difference == 'semantic - structural'")
        .groupby("seed")["low"]
        .count()
    )
    assert known.to_dict() == {
        "0": 6,
        "1": 0,
        "mean": 6,
    }  # two structural features of seed 1 alone are too few


def test_the_joint_interval_is_wider_than_each_of_its_parts(place, capsys):
    _, run, _ = ask(place, capsys, place.labels[0])
    table = run.tables["category_gating"].query("level == 'broad' and category == 'semantic'")
    joint = table["high"] - table["low"]
    for part in ("documents", "features"):
        assert (joint > 0.9 * (table[f"high_{part}"] - table[f"low_{part}"])).all()
    assert (joint > table["high_documents"] - table["low_documents"]).mean() > 0.9


def test_distribution_counts_every_category_of_both_models(place, capsys):
    _, run, _ = ask(place, capsys, *place.labels, more=("--baseline", place.transformer))
    table = run.tables["distribution"].query("level == 'fine'")
    assert table.groupby(["model", "seed"], sort=False).size().to_dict() == {
        ("satformer", "0"): 10,
        ("satformer", "1"): 10,
        ("transformer", "0"): 10,
    }
    assert table.groupby(["model", "seed"])["share"].sum().tolist() == pytest.approx([1, 1, 1])
    digits = table.query("category == 'Numerical Digit Fragments'")
    assert digits["n"].tolist() == [1, 0, 1] and digits["share"].tolist() == [1 / 15, 0, 1 / 9]
    assert run.manifest.baseline["digest"] == place.facts["plain"]["digest"]
    points = [t for t in run.figures["fig9_distribution"]["data"] if len(t["x"]) > 1]
    assert len(points) == 3  # two seeds and their mean, and the baseline's only seed


@pytest.mark.parametrize(
    ("which", "more", "words"),
    [
        ([2], (), "labels another model"),
        ([2], ("--baseline", "transformer"), "no labels of satformer"),
        ([0], ("--baseline", "transformer"), "no labels of transformer"),
        ([0, 0], (), "both label a dictionary of seed 0"),
        ([0], ("--runs", "elsewhere"), "no run of satlens gates for satformer below"),
        ([0], ("--gates", "label"), "is a run of sae-label, not of satlens gates"),
        ([0], ("--resamples", "20"), "use at least 100"),
    ],
)
def test_what_does_not_belong_together_is_refused_in_one_line(place, capsys, which, more, words):
    named = {"transformer": place.transformer, "elsewhere": place.folder / "none", "label": place.labels[0]}
    before = set(place.runs.iterdir())
    labels = [place.labels[i] for i in which]
    code, _, err = ask(place, capsys, *labels, more=[named.get(word, word) for word in more])
    assert code == 2 and words in err and err.strip().count("\n") == 0
    assert set(place.runs.iterdir()) == before


def test_judges_are_not_mixed_and_no_feature_is_no_answer(place, capsys, tmp_path):
    other = write_labels(
        tmp_path, place.facts["sat"], {1: ("Structural Punctuation", [100])}, seed=5, judge="llm"
    )
    code, _, err = ask(place, capsys, place.labels[0], other)
    assert code == 2 and "labels by different judges (llm, rules)" in err
    empty = write_labels(tmp_path, place.facts["sat"], {1: (None, [100])}, seed=6)
    code, _, err = ask(place, capsys, empty)
    assert code == 2 and "accepted no feature" in err
    unseen = write_labels(tmp_path, place.facts["sat"], {1: ("Structural Punctuation", [0])}, seed=7)
    code, _, err = ask(place, capsys, unseen)
    assert code == 2 and "no accepted feature has a position" in err


def test_a_model_without_gates_is_told_so(place, capsys):
    argv = ["categories", place.transformer, "--labels", place.labels[2], "--runs", place.runs]
    assert main([str(word) for word in argv]) == 2
    assert "has no gates to ask about" in capsys.readouterr().err


def test_the_same_seed_gives_the_same_bytes(place, capsys):
    runs = [ask(place, capsys, *place.labels[:2])[1] for _ in range(2)]
    first, second = ({a.path: a.sha256 for a in run.manifest.artifacts} for run in runs)
    assert first == second


def test_one_document_gives_numbers_without_intervals_and_the_figures_say_so(place, capsys, tmp_path):
    argv = ["gates", place.SATFormer, "--text", write_texts(tmp_path, 1), "--runs", tmp_path]
    assert main([str(word) for word in argv]) == 0
    gates = capsys.readouterr().out.strip()
    code, run, err = ask(place, capsys, place.labels[0], more=("--gates", gates))
    assert code == 0, err
    table = run.tables["category_gating"].query("level == 'broad'")
    assert table["mean"].notna().all() and table["low"].isna().all()
    assert "no interval" in run.figures["fig6_gating"]["layout"]["title"]["subtitle"]["text"]


@pytest.fixture(scope="module")
def drawn(place):
    """Tables and facts of a run with two seeds and a baseline."""
    argv = ["categories", place.SATFormer, "--runs", place.folder / "drawn", "--resamples", "200"]
    argv += [
        "--gates",
        next(place.runs.glob("gates-*")),
        "--baseline",
        place.transformer,
        "--labels",
        *place.labels,
    ]
    assert main([str(word) for word in argv]) == 0
    run = open_run(next((place.folder / "drawn").iterdir()))
    return {name: run.tables[name] for name in run.tables}, run.manifest.summary


@pytest.mark.parametrize("name", figures.FIGURES)
def test_every_figure_says_what_it_shows_and_is_the_same_each_time(drawn, name):
    tables, info = drawn
    fig = figures.FIGURES[name](tables, info)
    assert fig.layout.title.text and len(fig.layout.meta["caption"]) > 60
    assert "judge: rules" in fig.layout.title.subtitle.text
    assert all(fig.layout[axis].title.text for axis in ("xaxis", "yaxis"))
    again = figures.FIGURES[name](tables, info)
    assert fig.to_json(remove_uids=False) == again.to_json(remove_uids=False)


def test_gating_curves_are_the_means_over_seeds_with_their_sizes_and_a_grey_layer_0(drawn):
    tables, info = drawn
    fig = figures.fig6_gating(tables, info)
    curves = {t.name: t for t in fig.data if t.name}
    assert list(curves) == [
        "semantic, 7 features",
        "functional, 0 to 1 features",
        "structural, 2 to 6 features",
    ]
    mean = tables["category_gating"].query(
        "seed == 'mean' and category == 'semantic' and weighting == 'feature'"
    )
    assert list(curves["semantic, 7 features"].y) == mean["mean"].tolist()
    assert fig.layout.shapes[0].fillcolor == theme.GREYED and "V1" in fig.layout.annotations[0].text


def test_a_share_of_zero_is_drawn_hollow_at_the_edge_and_not_dropped(drawn):
    fig = figures.fig9_distribution(*drawn)
    axis = fig.layout.xaxis
    assert axis.type == "log" and axis.ticktext[0] == "0"
    edge = axis.tickvals[0]
    for trace in fig.data:
        if len(trace.x) > 1:
            assert len(trace.x) == len(trace.customdata)
            for x, symbol, (share, _, _) in zip(trace.x, trace.marker.symbol, trace.customdata, strict=True):
                assert x == (share or edge) and symbol.endswith("-open") == (share == 0)
    positive = drawn[0]["distribution"]["share"]
    assert edge < positive[positive > 0].min()


def test_differences_stand_beside_what_frequency_explains(drawn):
    tables, info = drawn
    fig = figures.fig6_differences(tables, info)
    rows = tables["differences"].query(
        "seed == 'mean' and weighting == 'feature' and difference == 'semantic - structural'"
    )
    null = next(trace for trace in fig.data if trace.name == "token frequency alone")
    assert list(null.y[: len(rows)]) == rows["null_high"].tolist()
    assert fig.layout.annotations[0].text == "semantic (7 features) minus structural (2 to 6 features)"
