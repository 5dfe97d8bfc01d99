"""What satlens gates stores by document and token: against a loop over positions, and opened for one model only."""

import shutil

import numpy as np
import pytest
import torch

from satlens import accumulators
from satlens.accumulators import GateStatistics, PairSums
from satlens.checkpoint import load_bridge, model_facts
from satlens.cli import main
from satlens.errors import UserError
from satlens.gate_sums import open_gates
from satlens.run import open_run
from satlens.stream import Condition, stream
from satlens.tokens import Layout, batches, corpus_from_documents
from tests.conftest import tiny_model
from tests.tiny import write_pair, write_texts

EOS = 2


def corpus(n=7):
    rng = torch.Generator().manual_seed(5)
    return corpus_from_documents(
        [torch.randint(3, 20, (5 + 3 * i,), generator=rng).tolist() for i in range(n)]
    )


def statistics(rows, n_documents=7):
    """Gate statistics of a tiny model on some batches, and every alpha it saw with document and token."""
    bridge, sites = load_bridge(tiny_model())
    stats, seen = GateStatistics(n_documents, sites), {}

    class Everything:
        reads = ("gate",)

        def update(self, batch, role, layer, tensor):
            for row, pos in batch.text.nonzero().tolist():
                key = (int(batch.doc[row, pos]), int(batch.input_ids[row, pos]))
                seen.setdefault(key, {}).setdefault(layer, []).append(tensor[row, pos].double().sum().item())

        def merge(self, other):
            raise AssertionError

    stream(bridge, sites, rows, [Condition(name="clean", accumulators=(stats, Everything()))])
    return stats, seen


def rows(batch_size=3, **place):
    return batches(corpus(), Layout(), 12, batch_size, eos=EOS, **place)


def test_pairs_equal_a_loop_over_positions():
    stats, seen = statistics(rows())
    stored = stats.pairs.result()
    assert [a.dtype.name for a in stored.values()] == ["int32", "int32", "int32", "float32"]
    found = list(zip(stored["doc"].tolist(), stored["token"].tolist(), strict=True))
    assert sorted(found) == sorted(seen) and len(set(found)) == len(found)
    for at, key in enumerate(found):
        assert stored["count"][at] == len(seen[key][1])
        expected = [sum(seen[key][layer]) for layer in (1, 2, 3)]
        np.testing.assert_allclose(stored["sum"][at], expected, rtol=1e-6)


def test_over_documents_pairs_add_up_to_the_sums_by_token():
    stats, _ = statistics(rows())
    stored = stats.pairs.result()
    total, count = np.zeros((53, 3)), np.zeros(53)
    np.add.at(total, stored["token"], stored["sum"])
    np.add.at(count, stored["token"], stored["count"])
    np.testing.assert_allclose(total, stats.token_sum.sum(2), rtol=1e-6)
    np.testing.assert_array_equal(count, stats.token_count)


def test_pairs_do_not_depend_on_batches_or_processes(monkeypatch):
    whole = statistics(rows(50))[0].pairs.result()
    monkeypatch.setattr(PairSums, "SETTLE_AT", 4)  # pairs are put together many times on the way
    one = statistics(rows(1))[0].pairs.result()
    halves = [statistics(rows(2, rank=rank, world=2))[0] for rank in range(2)]
    halves[0].merge(halves[1])
    for other in (one, halves[0].pairs.result()):
        for name, expected in whole.items():
            np.testing.assert_allclose(other[name], expected, rtol=1e-6)


def test_documents_beyond_the_limit_are_joined_and_nothing_is_lost(monkeypatch):
    apart = statistics(rows())[0].pairs.result()
    monkeypatch.setattr(accumulators, "N_BLOCKS", 3)
    joined = statistics(rows())[0].pairs.result()
    assert set(joined["doc"]) == {0, 1, 2}
    expected = {}
    for doc, token, count in zip(apart["doc"], apart["token"], apart["count"], strict=True):
        expected[doc % 3, token] = expected.get((doc % 3, token), 0) + count
    found = dict(zip(zip(joined["doc"], joined["token"], strict=True), joined["count"], strict=True))
    assert found == expected


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gates")
    return {"runs": folder / "runs", "text": write_texts(folder), **write_pair(folder)}


def measure(place, capsys, *more):
    asked = [
        "gates",
        str(place["SATFormer"]),
        "--text",
        str(place["text"]),
        "--runs",
        str(place["runs"]),
        *more,
    ]
    assert main(asked) == 0
    return open_run(capsys.readouterr().out.strip())


def test_the_newest_run_of_this_model_is_opened_and_no_other(place, capsys):
    facts = {"name": "sat", **model_facts(place["SATFormer"])}
    with pytest.raises(
        UserError, match=r"no run of satlens gates for sat below .*: make one with satlens gates x"
    ):
        open_gates(None, place["runs"], facts, "satlens gates x")
    first = measure(place, capsys, "--tokens", "60")
    second = measure(place, capsys)
    sums = open_gates(None, place["runs"].parent, facts, "")
    assert sums.run.manifest.run == max(first.path.name, second.path.name)
    assert open_gates(first.path, place["runs"], facts, "").run.manifest.run == first.path.name
    assert sums.layers == (1, 2, 3) and sums.n_heads == 2 and sums.kind == "relu"
    for token in range(len(sums.count)):
        part = slice(sums.pairs.starts[token], sums.pairs.starts[token + 1])
        assert (sums.pairs.token[part] == token).all()
        assert sums.pairs.count[part].sum() == sums.count[token]
    with pytest.raises(UserError, match="measured another model"):
        open_gates(first.path, place["runs"], {**facts, "digest": "0" * 64}, "")


def test_a_run_without_these_sums_is_passed_over_and_refused_when_named(place, capsys, tmp_path):
    run = measure(place, capsys)
    facts = {"name": "sat", **model_facts(place["SATFormer"])}
    old = tmp_path / run.path.name
    shutil.copytree(run.path, old)
    manifest = (old / "manifest.json").read_text()
    (old / "manifest.json").write_text(manifest.replace("by_document_token", "another_name"))
    (tmp_path / "gates-damaged").mkdir()
    (tmp_path / "gates-damaged" / "manifest.json").write_text("{")
    with pytest.raises(UserError, match="has no sums by document and token"):
        open_gates(old, tmp_path, facts, "")
    with pytest.raises(UserError, match="no run of satlens gates"):
        open_gates(None, tmp_path, facts, "")
