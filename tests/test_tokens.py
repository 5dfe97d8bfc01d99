"""Every token lands in one row, every countable prediction is counted once, and for the right document."""

import numpy as np
import pandas as pd
import pytest
import torch

from satlens.errors import UserError
from satlens.tokens import (
    Layout,
    batches,
    corpus_from_documents,
    count_rows,
    open_corpus,
    split_calibration,
)

BOS, EOS = 1, 2
DOCS = [[10, 11, 12, 13, 14], [20], [30, 31, 32], [40, 41, 42, 43, 44, 45, 46, 47, 48]]


class FakeTokenizer:
    """Just what reading a token file asks of a tokenizer."""

    eos_token_id = EOS

    def __len__(self) -> int:
        return 60


def rows(layout, window, batch_size=3, docs=DOCS, **place):
    """All rows as lists, in row order: (ids, scored targets, their documents)."""
    corpus = corpus_from_documents(docs)
    out = {}
    for batch in batches(corpus, layout, window, batch_size, bos=BOS, eos=EOS, **place):
        for line, row in enumerate(batch.row.tolist()):
            real = batch.real[line]
            scored = [
                (int(batch.input_ids[line, t + 1]), int(batch.doc[line, t + 1]))
                for t in range(batch.input_ids.shape[1])
                if batch.scored[line, t]
            ]
            out[row] = (batch.input_ids[line][real].tolist(), scored)
    return [out[row] for row in sorted(out)]


def test_stream_is_one_run_of_tokens_cut_at_multiples_of_the_window():
    got = rows(Layout(), 6)
    run = [token for doc in DOCS for token in (*doc, EOS)]
    assert [token for ids, _ in got for token in ids] == run
    assert [len(ids) for ids, _ in got] == [6, 6, 6, 4]


def test_stream_scores_every_document_token_except_the_first_of_a_window():
    got = rows(Layout(), 6)
    run = [(token, doc) for doc, ids in enumerate(DOCS) for token in (*ids, EOS)]
    expected = [(token, doc) for place, (token, doc) in enumerate(run) if place % 6 and token != EOS]
    assert [pair for _, scored in got for pair in scored] == expected


def test_eos_targets_count_only_when_asked():
    with_eos = sum(len(s) for _, s in rows(Layout(score_eos=True), 50))
    without = sum(len(s) for _, s in rows(Layout(), 50))
    assert with_eos - without == len(DOCS)


def test_document_layout_never_crosses_documents():
    for ids, scored in rows(Layout(kind="document"), 4):
        assert len({token // 10 for token in ids if token != EOS}) <= 1
        assert len({doc for _, doc in scored}) <= 1


def test_document_layout_leaves_a_one_token_document_unscored():
    got = rows(Layout(kind="document"), 50)
    assert all(doc != 1 for _, scored in got for _, doc in scored)
    assert sum(len(scored) for _, scored in got) == sum(len(doc) - 1 for doc in DOCS)


def test_bos_is_put_before_documents_and_never_doubled_nor_scored():
    docs = [[BOS, 10, 11], [20, 21]]
    got = rows(Layout(kind="document", bos=True), 50, docs=docs)
    assert sorted(ids for ids, _ in got) == [[BOS, 10, 11, EOS], [BOS, 20, 21, EOS]]
    assert sorted(token for _, scored in got for token, _ in scored) == [10, 11, 20, 21]


def test_bos_already_in_the_text_is_not_scored_even_without_a_bos_layout():
    got = rows(Layout(), 50, docs=[[10, 11], [BOS, 20]])
    assert [token for _, scored in got for token, _ in scored] == [11, 20]


def test_text_marks_document_tokens_only():
    corpus = corpus_from_documents(DOCS)
    total = sum(int(b.text.sum()) for b in batches(corpus, Layout(bos=True), 5, 2, bos=BOS, eos=EOS))
    assert total == sum(len(doc) for doc in DOCS)


@pytest.mark.parametrize("kind", ["stream", "document"])
def test_processes_share_the_rows_without_gap_or_overlap(kind):
    layout = Layout(kind=kind)
    shares = [rows(layout, 4, rank=r, world=3) for r in range(3)]
    together = sorted(ids for share in shares for ids, _ in share)
    assert together == sorted(ids for ids, _ in rows(layout, 4))


@pytest.mark.parametrize("kind", ["stream", "document"])
def test_rows_are_counted_before_they_are_made(kind):
    layout = Layout(kind=kind)
    assert count_rows(corpus_from_documents(DOCS), layout, 4) == len(rows(layout, 4))


def test_empty_documents_are_left_out_and_counted():
    corpus = corpus_from_documents([[], [5, 6], []])
    assert (corpus.n_documents, corpus.n_empty, corpus.n_tokens) == (1, 2, 2)


def test_text_without_any_token_is_the_users_mistake():
    with pytest.raises(UserError, match="no tokens at all"):
        corpus_from_documents([[], []])


def test_a_window_of_one_token_is_refused():
    with pytest.raises(UserError, match="scores nothing"):
        next(batches(corpus_from_documents(DOCS), Layout(), 1, 1, eos=EOS))


def test_calibration_and_scored_documents_are_disjoint_and_complete():
    corpus = corpus_from_documents([[i, i] for i in range(3, 14)])
    calibration, scored = split_calibration(corpus)
    one, two = set(calibration.starts.tolist()), set(scored.starts.tolist())
    assert not one & two and one | two == set(corpus.starts.tolist()) and one and two
    with pytest.raises(UserError, match="at least two documents"):
        split_calibration(corpus.take(np.array([0])))


def test_a_prefix_holds_whole_documents():
    corpus = corpus_from_documents(DOCS)
    assert corpus.first_tokens(6).n_documents == 2
    assert corpus.first_tokens(1).n_documents == 1
    assert corpus.first_tokens(10**9).n_documents == len(DOCS)


def test_official_token_file_without_an_index_splits_at_eos(tmp_path):
    run = np.array([10, 11, EOS, EOS, 20, EOS, 30, 31], dtype="<u2")
    (tmp_path / "val.bin").write_bytes(run.tobytes())
    corpus = open_corpus(tmp_path / "val.bin", FakeTokenizer())
    assert [corpus.document(i).tolist() for i in range(corpus.n_documents)] == [[10, 11], [20], [30, 31]]
    assert corpus.n_empty == 1
    assert corpus.document(0).dtype == np.int64 and corpus.document(0).flags.writeable


def test_a_truncated_token_file_and_a_foreign_one_are_refused(tmp_path):
    (tmp_path / "odd.bin").write_bytes(b"\x01\x00\x02")
    with pytest.raises(UserError, match="odd number of bytes"):
        open_corpus(tmp_path / "odd.bin", FakeTokenizer())
    (tmp_path / "big.bin").write_bytes(np.array([5, 999], dtype="<u2").tobytes())
    with pytest.raises(UserError, match="holds id 999"):
        open_corpus(tmp_path / "big.bin", FakeTokenizer())
    (tmp_path / "empty.bin").write_bytes(b"")
    with pytest.raises(UserError, match="holds no tokens"):
        open_corpus(tmp_path / "empty.bin", FakeTokenizer())
    with pytest.raises(UserError, match="no token file"):
        open_corpus(tmp_path / "none.bin", FakeTokenizer())


def test_digest_sees_ids_and_document_borders():
    digests = {corpus_from_documents(d).digest() for d in ([[5, 6], [7]], [[5], [6, 7]], [[5, 6], [8]])}
    assert len(digests) == 3


def test_padding_is_none_when_nothing_is_padded():
    batch = next(batches(corpus_from_documents([[5, 6, 7, 8]]), Layout(eos=False), 4, 1))
    assert batch.padding is None
    assert torch.equal(batch.targets(), torch.tensor([6, 7, 8]))


@pytest.mark.parametrize("kind", ["stream", "document"])
@pytest.mark.parametrize("window", [2, 3, 7, 100])
def test_rows_equal_cutting_the_written_out_text(kind, window):
    layout = Layout(kind=kind, bos=True)
    written = [[BOS, *doc, EOS] for doc in DOCS]
    if kind == "stream":
        written = [[token for doc in written for token in doc]]
    expected = [doc[i : i + window] for doc in written for i in range(0, len(doc), window)]
    assert [ids for ids, _ in rows(layout, window)] == expected


def test_an_index_of_another_build_is_refused(tmp_path):
    (tmp_path / "val.bin").write_bytes(np.array([10, 11, EOS], dtype="<u2").tobytes())
    index = pd.DataFrame({"start": [0, 3], "n_tokens": [3, 5], "source": ["a", "b"]})
    index.to_parquet(tmp_path / "val.docs.parquet")
    with pytest.raises(UserError, match="points beyond the end"):
        open_corpus(tmp_path / "val.bin", FakeTokenizer())
