"""A saved dictionary opens in satlens and in sae-lens, and both compute the same from it."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from sae.dictionary import Codes, Counts, decode, encode, open_dictionary
from sae.features import latent_features
from sae.save import dictionary_of, flat, save_dictionary
from sae.table import split_counts, token_counts, v1_rows, withheld_types
from sae.topk import TopK
from satlens.errors import UserError
from satlens.tokens import corpus_from_documents
from tests.conftest import tiny_model

D_IN, D_SAE, K, VOCAB = 12, 96, 5, 40
FACTS = {
    "site": "v1",
    "model": {"name": "tiny", "digest": "ab" * 32, "architecture": "SATFormer", "n_kv_heads": 2, "d_head": 6},
    "seed": 0,
    "tokens": 1000,
    "withheld": [3, 5],
}


def table() -> Tensor:
    return torch.randn(VOCAB, D_IN, generator=torch.Generator().manual_seed(0)) + 0.2


def counts() -> Counts:
    train = torch.arange(VOCAB) % 7
    return Counts(train=train, heldout=(torch.arange(VOCAB) * 3) % 5)


def write(folder: Path, held: Counts | None = None, **changes: Any) -> Path:
    """A dictionary away from its start, saved."""
    rng = torch.Generator().manual_seed(1)
    sae = TopK(D_IN, D_SAE, rng)
    with torch.no_grad():
        for parameter in sae.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=rng)
        sae.b_enc[0] = -1e6  # never fires
    held = held or counts()
    made = dictionary_of(sae.folded(), K, {**FACTS, **changes}, held, folder)
    return save_dictionary(made, latent_features(made, table(), held.total).density)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("dictionary") / "seed-0")


def dense(codes: Codes) -> Tensor:
    return torch.zeros(len(codes.latent), D_SAE).scatter_(1, codes.latent, codes.act)


def test_sae_lens_opens_the_folder_and_computes_the_same(folder):
    from sae_lens import SAE

    theirs, ours = SAE.load_from_disk(str(folder)), open_dictionary(folder)
    assert type(theirs).__name__ == "TopKSAE" and (theirs.cfg.d_in, theirs.cfg.d_sae) == (D_IN, D_SAE)
    codes = encode(ours, table())
    with torch.no_grad():
        acts = theirs.encode(table())
        torch.testing.assert_close(dense(codes), acts, rtol=1e-6, atol=1e-6)
        assert torch.equal(dense(codes) > 0, acts > 0)
        torch.testing.assert_close(decode(ours, codes), theirs(table()), rtol=1e-6, atol=1e-6)


def test_sae_lens_finds_the_decoder_already_folded(folder):
    from sae_lens import SAE

    before, after = SAE.load_from_disk(str(folder)), SAE.load_from_disk(str(folder), fold_W_dec_norm=True)
    torch.testing.assert_close(before.W_dec.norm(dim=1), torch.ones(D_SAE))
    torch.testing.assert_close(before.W_enc, after.W_enc, rtol=1e-6, atol=1e-6)


def test_metadata_survives_sae_lens(folder):
    from sae_lens import SAE

    metadata = SAE.load_from_disk(str(folder)).cfg.metadata
    assert metadata["satlens"] == FACTS == open_dictionary(folder).facts
    assert (metadata["model_name"], metadata["hook_name"], metadata["training_tokens"]) == (
        "tiny",
        "v1",
        1000,
    )


def test_sparsity_is_the_logarithm_of_the_exact_density(folder):
    ours = open_dictionary(folder)
    assert ours.counts is not None
    tokens = torch.arange(VOCAB).repeat_interleave(ours.counts.total)  # every position, one by one
    pre = (table()[tokens] - ours.b_dec) @ ours.W_enc + ours.b_enc
    kept = torch.zeros_like(pre).scatter_(1, pre.topk(K).indices, 1.0) * (pre > 0)
    sparsity = load_file(folder / "sparsity.safetensors")["sparsity"]
    torch.testing.assert_close(sparsity.double(), (kept.double().mean(0) + 1e-10).log10(), rtol=1e-6, atol=0)
    assert float(sparsity[0]) == -10


def test_the_folder_round_trips_counts_and_digest(folder):
    ours = open_dictionary(folder)
    assert ours.counts is not None and torch.equal(ours.counts.train, counts().train)
    assert torch.equal(ours.counts.heldout, counts().heldout)
    assert ours.digest == open_dictionary(folder).digest and (ours.d_in, ours.d_sae, ours.k) == (
        D_IN,
        D_SAE,
        K,
    )
    assert sorted(p.name for p in folder.iterdir()) == [
        "cfg.json",
        "counts.safetensors",
        "sae_weights.safetensors",
        "sparsity.safetensors",
    ]


def test_a_text_that_reads_a_single_token_is_saved(tmp_path):
    train = torch.zeros(VOCAB, dtype=torch.int64)
    train[3] = 1
    folder = write(tmp_path / "one", Counts(train=train, heldout=torch.zeros_like(train)))
    sparsity = load_file(folder / "sparsity.safetensors")["sparsity"]
    always = sparsity > -1e-6
    assert torch.equal(sparsity[~always], torch.full((D_SAE - int(always.sum()),), -10.0))
    assert 0 < int(always.sum()) <= K


def test_encoding_is_the_k_largest_of_a_plain_product_whatever_the_chunk(folder):
    ours = open_dictionary(folder)
    pre = (table().double() - ours.b_dec.double()) @ ours.W_enc.double() + ours.b_enc.double()
    order = pre.argsort(dim=1, descending=True)[:, :K]
    expected = torch.zeros_like(pre).scatter_(1, order, pre.gather(1, order).clamp(min=0))
    for chunk in (1, 7, 2048):
        found = dense(encode(ours, table(), chunk))
        assert torch.equal(found > 0, expected > 0)
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-6)


# --- what is wrong with a folder is said in one line ---


def test_a_folder_of_another_kind_is_refused(folder, tmp_path):
    with pytest.raises(UserError, match=r"no cfg.json in .*give one of .*seed-0"):
        open_dictionary(folder.parent)
    with pytest.raises(UserError, match=r"no cfg.json in .*nowhere"):
        open_dictionary(tmp_path / "nowhere")
    config = json.loads((folder / "cfg.json").read_text())
    del config["metadata"]["satlens"]
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "cfg.json").write_text(json.dumps(config))
    (foreign / "sae_weights.safetensors").write_bytes((folder / "sae_weights.safetensors").read_bytes())
    with pytest.raises(UserError, match="satlens did not train"):
        open_dictionary(foreign)


def damaged(folder: Path, to: Path, change: Any) -> Path:
    """A copy of the folder with its weights changed."""
    to.mkdir()
    for path in folder.iterdir():
        (to / path.name).write_bytes(path.read_bytes())
    tensors = load_file(folder / "sae_weights.safetensors")
    change(tensors)
    save_file(tensors, to / "sae_weights.safetensors")
    return to


def test_damaged_weights_are_refused(folder, tmp_path):
    def nan(tensors: dict[str, Tensor]) -> None:
        tensors["W_enc"][0, 0] = torch.nan

    def short(tensors: dict[str, Tensor]) -> None:
        tensors["W_dec"] = tensors["W_dec"][:-1].contiguous()

    def missing(tensors: dict[str, Tensor]) -> None:
        del tensors["b_dec"]

    for name, change, words in (
        ("nan", nan, "not numbers"),
        ("short", short, "W_dec"),
        ("missing", missing, "b_dec"),
    ):
        with pytest.raises(UserError, match=words):
            open_dictionary(damaged(folder, tmp_path / name, change))
    cut = damaged(folder, tmp_path / "cut", lambda tensors: None)
    (cut / "sae_weights.safetensors").write_bytes((folder / "sae_weights.safetensors").read_bytes()[:-9])
    with pytest.raises(UserError, match="does not open"):
        open_dictionary(cut)


def test_vectors_of_another_width_and_another_model_are_refused(folder):
    ours = open_dictionary(folder)
    with pytest.raises(UserError, match=r"reads vectors of 12 values, these have 8"):
        encode(ours, torch.zeros(2, 8))
    ours.require_model({"name": "tiny", "digest": "ab" * 32})
    with pytest.raises(UserError, match=r"trained on tiny .*not on other"):
        ours.require_model({"name": "other", "digest": "cd" * 32})


# --- the table and the counts ---


def test_counts_are_those_of_the_documents_and_every_fifth_is_held_out():
    rng = np.random.default_rng(0)
    documents = [rng.integers(0, VOCAB, size=rng.integers(1, 30)) for _ in range(11)]
    found = split_counts(corpus_from_documents(documents), VOCAB)
    heldout = np.concatenate([documents[4], documents[9]])
    train = np.concatenate([d for i, d in enumerate(documents) if i not in (4, 9)])
    assert found.heldout.tolist() == [int((heldout == i).sum()) for i in range(VOCAB)]
    assert found.train.tolist() == [int((train == i).sum()) for i in range(VOCAB)]
    assert torch.equal(token_counts(corpus_from_documents(documents), VOCAB), found.total)
    with pytest.raises(UserError, match="two documents"):
        split_counts(corpus_from_documents(documents[:1]), VOCAB)


def test_withheld_types_are_a_share_of_those_the_text_has():
    found = withheld_types(counts(), 0.25, 0)
    seen = counts().total.nonzero().flatten()
    assert len(found) == round(0.25 * len(seen)) and set(found.tolist()) <= set(seen.tolist())
    assert torch.equal(found, withheld_types(counts(), 0.25, 0))
    assert not torch.equal(found, withheld_types(counts(), 0.25, 1))
    assert len(withheld_types(counts(), 0.0, 0)) == 0


@pytest.mark.parametrize("model_type", ["SATFormer", "transformer"])
def test_the_rows_are_what_the_first_layer_computes(model_type):
    model = tiny_model(model_type)
    seen: list[Tensor] = []
    model.model.layers[0].attn.v_proj.register_forward_hook(lambda m, i, out: seen.append(out))
    ids = torch.arange(53)[None]
    with torch.no_grad():
        model(ids)
    torch.testing.assert_close(v1_rows(model), seen[0][0])


def test_facts_are_compared_name_by_name():
    assert flat({"a": {"b": 1, "c": [1, 2]}, "d": None}) == {"a.b": 1, "a.c": [1, 2], "d": None}
    long = flat({"ids": list(range(100))})["ids"]
    assert long.startswith("100 values, ") and long != flat({"ids": list(range(1, 101))})["ids"]
