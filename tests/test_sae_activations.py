"""The verb end to end on a tiny pair, and other sites: sae-lens gets the activations of the model itself."""

import json
from itertools import chain, islice
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from sae.activations import activations, explained_variance, parse_site, repeated, shuffled, train_site, width
from sae.dictionary import decode, encode, open_dictionary
from sae.train import Recipe
from sae.train_command import Config, recipe_of
from satlens.checkpoint import load_model
from satlens.cli import main
from satlens.errors import SatlensError, UserError
from satlens.reading import Reading, open_subject, open_text
from tests.tiny import write_pair, write_texts


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A tiny pair and its texts on disk."""
    folder = tmp_path_factory.mktemp("place")
    return SimpleNamespace(folder=folder, text=write_texts(folder), **write_pair(folder))


def opened(place, layout=None, model="SATFormer"):
    reading = Reading(text=place.text, tokens=0, layout=layout)
    subject = open_subject(str(getattr(place, model)), reading)
    return subject, open_text(subject, reading)


def hidden(model: Any, role: str, layer: int, ids: Tensor) -> Tensor:
    """What the untouched model computes at a site, by a plain forward hook on its module."""
    block = model.model.layers[layer]
    module = {"resid_post": block, "mlp_out": block.mlp, "value": block.attn.v_proj}
    if role == "mixed_value":
        module[role] = block.attn.value_residual_mixing
    seen: list[Tensor] = []

    def keep(_: Any, inputs: Any, out: Any) -> None:
        seen.append(out[0] if isinstance(out, tuple) else out)

    handle = module[role].register_forward_hook(keep)
    with torch.no_grad():
        model(ids)
    handle.remove()
    return seen[0].flatten(2)[0]


# --- activations ---


@pytest.mark.parametrize("layout", ["stream", "document"])
@pytest.mark.parametrize(
    ("role", "layer"), [("value", 0), ("mixed_value", 2), ("resid_post", 3), ("mlp_out", 1)]
)
def test_activations_are_the_models_at_every_text_token_and_no_other(place, role, layer, layout):
    subject, corpus = opened(place, layout)
    found = torch.cat(list(activations(subject, corpus, role, layer, 3)))
    assert found.shape == (corpus.n_tokens, width(role, subject.sites))
    model, expected = load_model(place.SATFormer), []
    for batch in subject.batches(corpus, 1):  # one row at a time: nothing is padded
        row = hidden(model, role, layer, batch.input_ids)
        expected.append(row[batch.text[0]])
    torch.testing.assert_close(found, torch.cat(expected), rtol=1e-4, atol=1e-5)


def test_blocks_above_the_site_are_not_run(place):
    subject, corpus = opened(place)
    ran = []
    for number, block in enumerate(subject.bridge.blocks):
        block.register_forward_hook(lambda *_, number=number: ran.append(number))
    next(activations(subject, corpus, "resid_post", 1, 2))
    assert ran == [0, 1]


def test_a_site_is_a_role_and_a_layer_that_the_model_has(place):
    sites, plain = (opened(place, model=name)[0].sites for name in ("SATFormer", "transformer"))
    assert parse_site("resid_post.3", sites) == ("resid_post", 3) == parse_site("resid_post.-1", sites)
    for site in ("V1", "resid_post", "resid_post.", "resid_post.x", "gate.2", "pattern.1", "3", ""):
        with pytest.raises(UserError, match=r"give v1, or one of value\.N, mixed_value\.N"):
            parse_site(site, sites)
    for site, words in (
        ("value.9", "layers 0 to 3"),
        ("value.-5", "layers 0 to 3"),
        ("mixed_value.0", "layer 0 produces V1"),
    ):
        with pytest.raises(UserError, match=words):
            parse_site(site, sites)
    with pytest.raises(UserError, match="does not mix first-layer values"):
        parse_site("mixed_value.2", plain)


# --- the buffer ---


def numbered(sizes: Any) -> Any:
    """Parts of these sizes, their vectors numbered through."""
    start = 0
    for size in sizes:
        yield torch.arange(start, start + size, dtype=torch.float32)[:, None]
        start += size


def test_the_buffer_gives_exact_batches_each_vector_at_most_once_and_mixes_them():
    parts = numbered([5, 0, 17, 1, 3] * 100)
    found = list(islice(shuffled(parts, 10, 60, torch.Generator().manual_seed(0)), 50))
    assert {tuple(batch.shape) for batch in found} == {(10, 1)}
    given = torch.cat(found).flatten().long().tolist()
    assert len(set(given)) == len(given)
    assert max(given) < 60 + 50 * 10  # nothing is read ahead of the buffer
    for at, batch in enumerate(found):
        assert float(batch.max()) < 60 + 10 * at
    lag = torch.tensor(given) - torch.arange(len(given))
    assert int(lag.max() - lag.min()) > 60
    again = islice(shuffled(numbered([500]), 10, 60, torch.Generator().manual_seed(0)), 40)
    assert all(torch.equal(a, b) for a, b in zip(again, found, strict=False))


def test_text_is_read_again_when_it_ends_and_text_without_vectors_is_refused():
    passes = repeated(lambda: numbered([2, 1]))
    assert torch.cat(list(islice(passes, 5))).flatten().tolist() == [0, 1, 2, 0, 1, 2, 0, 1]
    with pytest.raises(UserError, match="no vector"):
        next(x for x in repeated(lambda: iter([torch.zeros(0, 3)])) if len(x))


def test_explained_variance_is_that_of_all_vectors_together(place, tmp_path):
    subject, corpus = opened(place)
    made = open_dictionary(trained(subject, corpus, tmp_path / "seed-0"))
    parts = list(activations(subject, corpus, "resid_post", 2, 4))
    x = torch.cat(parts).double()
    error = (x - decode(made, encode(made, x.float())).double()).square().sum()
    expected = 1 - error / (x - x.mean(0)).square().sum()
    assert explained_variance(made, iter(parts)) == pytest.approx(float(expected), rel=1e-9)
    assert explained_variance(made, iter([x[:1].float()] * 3)) != explained_variance(made, iter(parts))


# --- sae-lens's trainer ---

FACTS = {
    "site": "resid_post.2",
    "model": {"name": "tiny", "digest": "ab" * 32, "n_kv_heads": 2, "d_head": 8},
    "seed": 0,
    "tokens": 4800,
    "withheld": [],
}


def recipe(**changes: Any) -> Recipe:
    given = {"k": 4, "expansion": 2, "tokens": 4850, "batch": 40, "lr": 3e-3, "seed": 0}
    return Recipe(**{**given, **changes})


def trained(subject: Any, corpus: Any, folder: Any, **changes: Any) -> Any:
    return train_site(subject, corpus, recipe(**changes), FACTS, folder, 4)


def test_a_site_is_trained_by_sae_lens_saved_without_counts_and_repeats_to_the_byte(place, tmp_path):
    subject, corpus = opened(place)
    torch.manual_seed(1)
    folder = trained(subject, corpus, tmp_path / "a" / "seed-0")
    torch.manual_seed(2)  # the global generator must not matter
    before = torch.get_rng_state()
    again = trained(subject, corpus, tmp_path / "b" / "seed-0")
    assert torch.equal(torch.get_rng_state(), before)
    assert sorted(p.name for p in folder.parent.iterdir()) == ["seed-0"]
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == {
        p.name: p.read_bytes() for p in again.iterdir()
    }
    made = open_dictionary(folder)
    assert made.counts is None and not made.is_v1 and made.facts == FACTS
    torch.testing.assert_close(made.W_dec.norm(dim=1), torch.ones(made.d_sae))
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    assert lines[-2]["step"] == 121 and lines[-2]["mse"] < 0.7 * lines[0]["mse"]
    assert lines[-2]["lr"] < 1e-5 < lines[0]["lr"] == 3e-3
    assert 0.3 < lines[-1]["heldout_fve"] < 1
    sparsity = load_file(folder / "sparsity.safetensors")["sparsity"]
    assert 0 < float((10.0 ** sparsity.double()).sum()) < 4.001  # L0


def test_a_loss_that_is_no_number_names_the_step(place, tmp_path, monkeypatch):
    subject, corpus = opened(place)
    good = torch.randn(400, 32)
    bad = good.clone()
    bad[7] = torch.nan
    monkeypatch.setattr("sae.activations.activations", lambda *_: chain([good] * 4, [bad]))
    with pytest.raises(SatlensError, match=r"nan.* at step \d+ "):
        trained(subject, corpus, tmp_path / "seed-0")
    assert not (tmp_path / "seed-0").exists()


# --- the verb ---


def call(place: Any, capsys: Any, *argv: str) -> tuple[int, list[str], str]:
    common = ("--text", str(place.text), "--runs", str(place.folder / "runs"), "--resamples", "200")
    code = main(["sae", "train", str(place.SATFormer), *argv, *common])
    out = capsys.readouterr()
    return code, out.out.split(), out.err


SMALL = ("--k", "4", "--expansion", "2", "--sae-tokens", "6000", "--sae-batch", "100", "--lr", "1e-2")


def test_the_verb_trains_seeds_and_a_control_measures_them_and_skips_what_is_there(place, capsys):
    out = place.folder / "dictionaries"
    argv = (*SMALL, "--seeds", "0", "3", "--out", str(out))
    code, printed, err = call(place, capsys, *argv)
    assert code == 0, err
    assert printed[1:] == [str(out / "seed-0"), str(out / "seed-3")]
    assert sorted(p.name for p in out.iterdir()) == ["seed-0", "seed-0-types", "seed-3"]
    first, other, types = (open_dictionary(out / name) for name in ("seed-0", "seed-3", "seed-0-types"))
    assert first.digest != other.digest != types.digest != first.digest
    assert (first.facts["seed"], other.facts["seed"], types.facts["seed"]) == (0, 3, 0)
    assert first.counts is not None and first.counts.total.sum() == first.facts["data"]["n_tokens"]
    withheld = types.facts["withheld"]
    seen = first.counts.total.nonzero().flatten().tolist()
    assert (
        not first.facts["withheld"] and len(withheld) == round(0.1 * len(seen)) and set(withheld) <= set(seen)
    )
    before = {p: p.read_bytes() for p in out.rglob("*") if p.is_file()}
    code, printed, err = call(place, capsys, *argv)
    assert code == 0 and {p: p.read_bytes() for p in out.rglob("*") if p.is_file()} == before
    code, printed, err = call(place, capsys, *argv, "--k", "5")
    assert (code, printed) == (2, []) and "k: is 4, asked for 5" in err and "--out" in err


def test_another_site_by_the_same_verb(place, capsys):
    out = place.folder / "residual"
    code, printed, err = call(place, capsys, *SMALL, "--site", "resid_post.-1", "--out", str(out))
    assert code == 0, err
    assert printed == [str(out / "seed-0")] and "held-out documents" in err
    assert open_dictionary(out / "seed-0").facts["site"] == "resid_post.3"


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("--site", "mixed_value.0"), "layer 0 produces V1"),
        (("--site", "value.4"), "layers 0 to 3"),
        (("--site", "gate.1"), "give v1, or one of"),
        (("--k", "1000"), "k is 1000"),
        (("--expansion", "0"), "expansion 0"),
        (("--sae-tokens", "10", "--sae-batch", "100"), "no whole batch"),
        (("--sae-batch", "0"), "no whole batch of 0"),
        (("--sae-batch", "0", "--site", "value.1"), "no whole batch of 0"),
        (("--withhold-types", "1"), "withheld types"),
        (("--seeds", "1", "1"), "distinct"),
        (("--seeds", "-1"), "distinct and not negative"),
        (("--tokens", "1"), "two documents"),
    ],
)
def test_a_mistake_is_one_line_and_leaves_nothing(place, capsys, argv, words):
    out = place.folder / "mistakes"
    code, printed, err = call(place, capsys, "--out", str(out), *argv)
    assert (code, printed) == (2, []) and words in err
    assert len(err.strip().splitlines()) == 1 and not out.exists()


def test_the_batch_left_out_depends_on_whether_rows_merge():
    batches = [recipe_of(Config(site=site), 0, 32).batch for site in ("v1", "value.1")]
    assert batches == [16_384, 4_096]
    assert recipe_of(Config(site="value.1", sae_batch=7), 0, 32).batch == 7
