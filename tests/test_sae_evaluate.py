"""What is said about a dictionary as a whole: its tables, its loss when V1 is replaced, against slow sums."""

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor

from sae.baselines import EXACT
from sae.dictionary import decode, encode, open_dictionary
from sae.evaluate import evaluate_dictionaries
from sae.figures.dictionary import FIGURES
from sae.replacement import (
    Losses,
    loss_recovered,
    measure_losses,
    readers,
    replace_v1,
    replacement_table,
    scale_tables,
)
from sae.save import dictionary_of, save_dictionary
from sae.table import split_counts, v1_rows, withheld_types
from satlens.accumulators import NllByDocument
from satlens.bootstrap import document_weights
from satlens.checkpoint import load_model
from satlens.errors import UserError
from satlens.interventions import Edit
from satlens.reading import Reading, open_subject, open_text
from satlens.run import digest, open_run, verify
from satlens.stream import Condition, stream
from satlens.tokens import split_calibration
from tests.test_sae_variance import slow_fve
from tests.tiny import plain_nll, write_pair, write_texts


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """A tiny pair, its texts, and for each of both models two dictionaries and a control."""
    folder = tmp_path_factory.mktemp("evaluate")
    made = SimpleNamespace(folder=folder, text=write_texts(folder), **write_pair(folder))
    made.reading = Reading(text=made.text, tokens=0, resamples=200, runs=folder / "runs")
    made.subject = open_subject(str(made.SATFormer), made.reading)
    made.plain = open_subject(str(made.transformer), made.reading)
    made.corpus = open_text(made.subject, made.reading)
    made.heldout = split_calibration(made.corpus)[0]
    made.rows = v1_rows(made.subject.bridge)
    made.counts = split_counts(made.corpus, len(made.rows))
    made.seeds = [dictionary(made, made.subject, seed) for seed in (0, 1)]
    made.control = dictionary(made, made.subject, 0, withheld_types(made.counts, 0.2, 0).tolist())
    return made


def dictionary(
    place: SimpleNamespace, subject: Any, seed: int, withheld: list[int] | None = None, **facts: Any
) -> Path:
    """Random directions with tied encoder, of which latent 0 never fires and latent 1 on a single token type."""
    rows = v1_rows(subject.bridge)
    rng = torch.Generator().manual_seed(seed + (100 if withheld else 0))
    W_dec = torch.nn.functional.normalize(torch.randn(24, rows.shape[1], generator=rng), dim=-1)
    mean = rows.mean(0)
    b_enc = torch.zeros(24)
    b_enc[0] = -1e4
    common = int(place.counts.train.argmax())
    W_dec[1] = torch.nn.functional.normalize(rows[common] - mean, dim=0)
    best = ((rows - mean) @ W_dec[1]).sort().values
    b_enc[1] = -(best[-1] + best[-2]) / 2
    W_enc = 0.5 * W_dec.T
    W_enc[:, 1] *= 2e3
    b_enc[1] *= 1e3
    model = {"name": subject.name, "digest": subject.facts["digest"], "n_kv_heads": 2, "d_head": 8}
    described = {"site": "v1", "model": model, "seed": seed, "tokens": 9, "withheld": withheld or []}
    folder = place.folder / f"{subject.name}-{seed}-{len(withheld or [])}-{'-'.join(facts)}"
    tensors = {"W_enc": W_enc, "b_enc": b_enc, "W_dec": W_dec, "b_dec": mean}
    made = dictionary_of(tensors, 4, {**described, **facts}, place.counts, folder)
    return save_dictionary(made, torch.full((24,), 0.1))


def evaluate(place: SimpleNamespace, subject: Any = None, **changes: Any) -> Path:
    """The run of both seeds and the control, or what ``changes`` says."""
    asked = {"folders": place.seeds, "types_folder": place.control, "corpus": place.corpus, **changes}
    subject = subject or place.subject
    return evaluate_dictionaries(
        subject, asked["corpus"], asked["folders"], asked["types_folder"], place.reading, {"seed": 0}
    )


@pytest.fixture(scope="module")
def run(place: SimpleNamespace) -> Any:
    return open_run(evaluate(place))


def test_reading_the_exact_table_changes_nothing_and_zeros_shut_every_gate(place: SimpleNamespace) -> None:
    subject, tables = place.subject, {"exact": place.rows, **scale_tables(place.rows, place.counts.train)}
    losses = measure_losses(subject, place.heldout, tables, place.reading)
    np.testing.assert_allclose(losses.replaced["exact"], losses.clean, rtol=1e-5)
    assert not np.allclose(losses.replaced["mean"], losses.clean, rtol=1e-3)
    shut = Condition(
        name="gates shut",
        edits=tuple(
            Edit(role="gate", layer=layer, apply=lambda alpha, _: torch.zeros_like(alpha))
            for layer in subject.sites.layers("gate")
        ),
        accumulators=(NllByDocument(place.heldout.n_documents),),
    )
    stream(subject.bridge, subject.sites, subject.batches(place.heldout, 8), [shut])
    np.testing.assert_array_equal(losses.replaced["zero"], shut.accumulators[0].nll.numpy())


def test_replacement_reaches_the_later_layers_and_not_the_first(place: SimpleNamespace) -> None:
    """Independent of the bridge: the plain model, whose reading layers are handed another tensor."""
    table = place.rows + torch.randn(place.rows.shape, generator=torch.Generator().manual_seed(2))
    losses = measure_losses(
        place.subject, place.heldout, {"zero": place.rows * 0, "other": table}, place.reading
    )
    model, eos = load_model(place.SATFormer), place.subject.tokenizer.eos_token_id
    current: dict[str, Tensor] = {}
    for n, layer in enumerate(model.model.layers):
        if n:
            layer.attn.first_value.register_forward_hook(lambda m, i, out: table[current["ids"]].view_as(out))
    documents = [place.heldout.document(i).tolist() for i in range(place.heldout.n_documents)]
    run = [(token, doc) for doc, ids in enumerate(documents) for token in (*ids, eos)]
    total = np.zeros(len(documents))
    for start in range(0, len(run), 32):
        ids, docs = zip(*run[start : start + 32], strict=True)
        current["ids"] = torch.tensor([ids])
        for at, value in enumerate(plain_nll(model, current["ids"])[0].tolist()):
            total[docs[at + 1]] += value * (ids[at + 1] != eos)
    np.testing.assert_allclose(losses.replaced["other"], total, rtol=1e-5)


def test_loss_recovered_is_one_for_clean_zero_for_zero_and_undefined_without_a_loss() -> None:
    rng = np.random.default_rng(0)
    clean, count = rng.uniform(2, 3, 9), np.full(9, 5.0)
    zero, made = clean + rng.uniform(1, 2, 9), clean + rng.uniform(0.1, 0.2, 9)
    losses = Losses(clean=clean, count=count, replaced={"zero": zero, "made": made})
    weights = document_weights(9, 300, seed=0)
    table = replacement_table(losses, weights).set_index("condition")["loss_recovered"]
    assert table["clean"] == 1 and table["zero"] == 0
    assert table["made"] == pytest.approx((zero - made).sum() / (zero - clean).sum())
    interval = loss_recovered(losses, made, weights)
    drawn = [(w @ (zero - made)) / (w @ (zero - clean)) for w in weights]
    np.testing.assert_allclose((interval.low, interval.high), np.percentile(drawn, [2.5, 97.5]))
    idle = Losses(clean=clean, count=count, replaced={"zero": clean})
    assert loss_recovered(idle, clean, weights).estimate is None


def test_a_plain_transformer_has_no_readers_and_says_so(place: SimpleNamespace) -> None:
    assert readers(place.plain.sites) == () and readers(place.subject.sites) == (1, 2, 3)
    with pytest.raises(UserError, match="no layer of this transformer reads V1"):
        replace_v1(place.plain.sites, place.rows)
    with pytest.raises(UserError, match="cannot stand for V1"):
        replace_v1(place.subject.sites, place.rows[1:])


def test_the_run_is_whole_and_two_are_alike(place: SimpleNamespace, run: Any) -> None:
    assert verify(run) == []
    assert set(run.figures) == set(FIGURES)
    assert run.manifest.verb == "sae" and len(run.manifest.inputs) == 3
    assert digest(open_run(evaluate(place))) == digest(run)


def test_every_fve_of_the_run_equals_the_slow_formula(place: SimpleNamespace, run: Any) -> None:
    table = run.tables["dictionaries"].set_index(["method", "fit", "seed"])
    withheld = open_dictionary(place.control).facts["withheld"]
    for folder, seed, fit in [(f, s, "all types") for s, f in enumerate(place.seeds)] + [
        (place.control, 0, "some withheld")
    ]:
        opened, row = open_dictionary(folder), table.loc[("sae", fit, seed)]
        made = decode(opened, encode(opened, place.rows))
        train, part = place.counts.train.clone(), torch.zeros(len(place.rows), dtype=torch.long)
        if fit != "all types":
            train[withheld] = 0
            part[withheld] = 1
            assert row["fve_types_withheld"] == pytest.approx(slow_fve(place.rows, made, part))
            assert row["n_types_withheld"] == len(withheld)
        else:
            assert pd.isna(row["fve_types_withheld"])
        for name, weights in {
            "fve_train": train,
            "fve_heldout": place.counts.heldout,
            "fve_types": (place.counts.total > 0).long(),
            "fve_types_trained": (train > 0).long(),
            "fve_types_new": ((place.counts.total > 0) & (place.counts.train == 0)).long(),
        }.items():
            assert row[name] == pytest.approx(slow_fve(place.rows, made, weights)), name
        assert row["fve_heldout_low"] <= row["fve_heldout"] <= row["fve_heldout_high"]
        active = (encode(opened, place.rows).act > 0).sum(1)
        assert row["l0"] == pytest.approx(
            float(active @ place.counts.total) / float(place.counts.total.sum())
        )
        assert row["never"] >= 1
    exact = table.xs(EXACT).iloc[0]
    assert exact["fve_heldout"] == pytest.approx(1) and abs(exact["delta_nll"]) < 1e-5


def test_intervals_can_be_drawn_again_from_the_stored_sums(run: Any) -> None:
    sums, table = run.tables["heldout_by_document"], run.tables["dictionaries"]
    replaced = run.tables["replacement"].set_index("condition")
    for row in table[table["fit"] == "all types"].itertuples():
        name = row.method if pd.isna(row.seed) else f"{row.method} seed {row.seed}"
        assert 1 - sums[f"residual {name}"].sum() / sums["total"].sum() == pytest.approx(row.fve_heldout)
        if name == "k-means seed 1":  # one pass less
            assert name not in replaced.index and pd.isna(row.delta_nll)
            continue
        delta = (sums[f"nll {name}"] - sums["nll clean"]).sum() / sums["n_scored"].sum()
        assert replaced.loc[name, "delta_nll"] == pytest.approx(delta, abs=1e-12)
        assert row.delta_nll == replaced.loc[name, "delta_nll"]
    assert "sae seed 0 separators kept" in replaced.index
    assert set(replaced.index) >= {"clean", "zero", "mean", "memory", "pca-k", "sae seed 1", "k-means seed 0"}


def test_the_mean_that_stands_for_v1_is_that_of_the_training_text(place: SimpleNamespace, run: Any) -> None:
    tables = {"zero": place.rows * 0, "mean": scale_tables(place.rows, place.counts.train)["mean"]}
    losses = measure_losses(place.subject, place.heldout, tables, place.reading)
    stored = run.tables["heldout_by_document"]
    for name, nll in losses.replaced.items():
        np.testing.assert_array_equal(stored[f"nll {name}"], nll)


def test_seeds_are_summed_up_by_mean_and_range(run: Any) -> None:
    table, spread = run.tables["dictionaries"], run.tables["over_seeds"]
    own = table[(table["method"] == "sae") & (table["fit"] == "all types")]["fve_heldout"]
    row = spread.query("method == 'sae' and fit == 'all types' and score == 'fve_heldout'").iloc[0]
    assert (row["mean"], row["lowest"], row["highest"]) == pytest.approx((own.mean(), own.min(), own.max()))
    assert row["n_seeds"] == 2 and own.nunique() == 2


def test_tables_by_type_list_every_seen_type_once_a_dictionary(place: SimpleNamespace, run: Any) -> None:
    table, seen = run.tables["per_type"], (place.counts.total > 0).nonzero().squeeze(1).tolist()
    opened = open_dictionary(place.seeds[1])
    made = decode(opened, encode(opened, place.rows)).double().numpy()
    x, train = place.rows.double().numpy(), place.counts.train.numpy()
    mean = (train[:, None] * x).sum(0) / train.sum()
    mine = table[(table["seed"] == 1) & (table["fit"] == "all types")].set_index("token_id")
    assert mine.index.tolist() == seen and len(table) == 3 * len(seen)
    for token in seen[::17]:
        left = ((x[token] - made[token]) ** 2).sum() / ((x[token] - mean) ** 2).sum()
        assert mine.loc[token, "fve"] == pytest.approx(1 - left)
        assert mine.loc[token, "n_tokens"] == place.counts.total[token]
    quantiles = run.tables["type_quantiles"]
    whole = quantiles[quantiles["count_low"].isna()]
    assert whole.groupby(["seed", "fit"])["n_types"].sum().tolist() == [len(seen)] * 3
    binned = quantiles[quantiles["count_low"].notna()]
    assert binned.groupby(["seed", "fit"])["n_types"].sum().tolist() == [len(seen)] * 3
    first = whole.iloc[0]
    assert first["q50"] == pytest.approx(
        table[table["seed"] == 0].query("fit == 'all types'")["fve"].median()
    )


def test_what_memories_of_single_tokens_hold_is_what_switching_them_off_costs(
    place: SimpleNamespace, run: Any
) -> None:
    opened = open_dictionary(place.seeds[0])
    codes = encode(opened, place.rows)
    dense = torch.zeros(len(place.rows), 24).scatter_(1, codes.latent, codes.act)
    types = (dense[place.counts.total > 0] > 0).sum(0)
    rows = run.tables["memories"].query("seed == 0 and fit == 'all types'").set_index("at_most")
    for at_most in (1, 2, 9):
        few = (types > 0) & (types <= at_most)
        made = dense.masked_fill(few, 0) @ opened.W_dec + opened.b_dec
        assert rows.loc[at_most, "n_latents"] == int(few.sum())
        held = slow_fve(place.rows, decode(opened, codes), place.counts.train)
        held -= slow_fve(place.rows, made, place.counts.train)
        assert rows.loc[at_most, "fve_held"] == pytest.approx(held, abs=1e-6)
    assert rows.loc[1, "n_latents"] >= 1 and rows.loc[1, "fve_held"] != 0


def test_a_plain_transformers_dictionary_is_measured_without_replacement(
    place: SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    run = open_run(
        evaluate(place, place.plain, folders=[dictionary(place, place.plain, 0)], types_folder=None)
    )
    assert "no layer of transformer reads V1" in capsys.readouterr().err
    assert "replacement" not in run.tables and set(run.figures) == set(FIGURES) - {"replacement"}
    assert run.tables["dictionaries"]["fve_heldout"].notna().all()
    assert "loss_recovered" not in run.manifest.summary


def test_what_does_not_belong_together_is_refused_before_anything_is_written(place: SimpleNamespace) -> None:
    before = sorted((place.folder / "runs").iterdir())
    changed = [
        ("was trained on", {"subject": place.plain}),
        ("other text", {"corpus": place.corpus.take(np.arange(8))}),
        ("no control", {"types_folder": place.seeds[0]}),
        ("only be the control", {"folders": [place.control]}),
        ("same seed", {"folders": [place.seeds[1], place.seeds[1]]}),
        ("only dictionaries of V1", {"folders": [dictionary(place, place.subject, 3, site="resid_post.2")]}),
    ]
    for words, changes in changed:
        with pytest.raises(UserError, match=words):
            evaluate(place, **changes)
    wide = dataclasses.replace(open_dictionary(place.seeds[0]), k=5, path=place.folder / "wide")
    save_dictionary(wide, torch.full((24,), 0.1))
    with pytest.raises(UserError, match="different sizes"):
        evaluate(place, folders=[place.seeds[1], place.folder / "wide"])
    assert sorted((place.folder / "runs").iterdir()) == before


@pytest.mark.parametrize("name", FIGURES)
def test_figures_say_what_they_show_and_are_the_same_every_time(run: Any, name: str) -> None:
    info = run.manifest.summary
    fig = FIGURES[name](run.tables, info)
    assert fig.layout.title.text and len(fig.layout.meta["caption"]) > 60
    assert info["model"] in fig.layout.title.subtitle.text
    assert fig.layout.xaxis.title.text and fig.layout.yaxis.title.text
    assert fig.to_json(remove_uids=False) == FIGURES[name](run.tables, info).to_json(remove_uids=False)
    bare = {
        key: table.assign(
            **dict.fromkeys([c for c in table if c.endswith(("_low", "_high")) and "count" not in c])
        )
        for key, table in run.tables.items()
    }
    assert FIGURES[name](bare, info).layout.title.text == fig.layout.title.text


def test_figures_show_the_tables_numbers(run: Any) -> None:
    info, tables = run.manifest.summary, run.tables
    dots = FIGURES["fve"](tables, info).data[0]
    own = tables["dictionaries"].query("method == 'sae' and fit == 'all types'")
    assert dots.customdata[1] == pytest.approx(
        [own["fve_heldout"].mean(), own["fve_heldout"].min(), own["fve_heldout"].max()]
    )
    assert dots.y[1] == pytest.approx(1 - own["fve_heldout"].mean())
    bars = FIGURES["density"](tables, info).data[0]
    alive = tables["density"].query("seed == 0 and fit == 'all types' and not dead")
    assert sum(bars.y) == len(alive)
    marks = FIGURES["replacement"](tables, info).data[0]
    known = tables["replacement"].set_index("condition")["delta_nll"].drop(["clean", EXACT])
    assert sorted(point[0] for point in marks.customdata) == pytest.approx(sorted(known))
    alone = dict(tables) | {"dictionaries": tables["dictionaries"].query("fit == 'all types'")}
    assert "withheld" not in FIGURES["fve"](alone, info).layout.meta["caption"]
