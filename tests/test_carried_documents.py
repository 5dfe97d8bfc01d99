"""Which documents are used, how they are split, and which of their positions count."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from satlens.carried.documents import SKIP, DocumentSet, read_documents, rows_of, split
from satlens.errors import UserError


class Words:
    """A tokenizer of numbers: ``"3 1 4"`` is ``[3, 1, 4]``."""

    eos_token_id = 0

    def __len__(self) -> int:
        return 1000

    def __call__(self, texts: list[str], add_special_tokens: bool = True) -> dict[str, Any]:
        return {"input_ids": [[int(word) for word in text.split()] for text in texts]}


def write(folder: Path, lengths: list[int]) -> Path:
    texts = [" ".join(str(1 + (i + j) % 9) for j in range(length)) for i, length in enumerate(lengths)]
    path = folder / "texts.jsonl"
    path.write_text("\n".join(json.dumps({"text": text}) for text in texts), encoding="utf-8")
    return path


def test_short_documents_are_left_out_and_long_ones_cut(tmp_path):
    path = write(tmp_path, [63, 64, 300, 100])
    found = read_documents(path, Words(), 256)
    assert [len(ids) for ids in found.ids] == [64, 256, 100]
    assert found.far_counts.tolist() == [48, 240, 84]
    assert [len(ids) for ids in read_documents(path, Words(), 80).ids] == [64, 80, 80]


def test_a_first_token_is_put_before_documents_without_it(tmp_path):
    path = write(tmp_path, [64, 300])
    found = read_documents(path, Words(), 256, bos=7)
    assert [ids[0] for ids in found.ids] == [7, 7]
    assert [len(ids) for ids in found.ids] == [65, 256]
    again = read_documents(path, Words(), 256, bos=1)  # the first document begins with it
    assert len(again.ids[0]) == 64


def test_the_limit_counts_tokens_that_are_used(tmp_path):
    path = write(tmp_path, [300, 300, 300])
    assert read_documents(path, Words(), 256, limit=512).n_documents == 2
    assert read_documents(path, Words(), 256, limit=10).n_documents == 1


def test_only_short_documents_are_the_users_mistake(tmp_path):
    with pytest.raises(UserError, match="none of 2 documents has 64 tokens"):
        read_documents(write(tmp_path, [10, 63]), Words(), 256)
    with pytest.raises(UserError, match="none of 1 documents has 64 tokens"):
        read_documents(write(tmp_path, [300]), Words(), 32)


def documents(lengths: list[int]) -> DocumentSet:
    names = tuple(str(i) for i in range(len(lengths)))
    return DocumentSet(ids=tuple(np.arange(n) for n in lengths), names=names, kinds=names)


def test_fit_and_evaluated_documents_share_none_unless_asked():
    sets = split(documents([70, 71, 72, 73, 74]))
    assert set(sets.fit.names).isdisjoint(sets.evaluate.names) and not sets.same
    assert len(sets.fit.names) + len(sets.evaluate.names) == 5
    both = split(documents([70, 71]), same=True)
    assert both.same and both.fit is both.evaluate
    assert split(documents([70])).same


def test_far_and_scored_positions():
    rows = rows_of([np.arange(20), np.arange(30)], np.array([4, 9]))
    assert rows.input_ids.shape == (2, 32)
    assert rows.far.nonzero().tolist() == [[0, t] for t in range(SKIP, 20)] + [
        [1, t] for t in range(SKIP, 30)
    ]
    assert rows.scored.sum(1).tolist() == [3, 13]
    assert rows.last.tolist() == [19, 29]
    assert rows.targets().tolist() == [*range(17, 20), *range(17, 30)]
    assert rows.docs_of(rows.scored).tolist() == [4] * 3 + [9] * 13


def test_every_document_is_in_one_batch_of_one_process():
    whole = documents([70, 90, 80, 100, 64, 99])
    seen = [
        int(doc)
        for rank in range(2)
        for rows in whole.batches(2, rank=rank, world=2)
        for doc, n in zip(rows.doc, rows.real.sum(1), strict=True)
        if len(whole.ids[int(doc)]) == int(n)
    ]
    assert sorted(seen) == list(range(6))


def test_padding_content_is_read_by_no_real_position(make_model):
    from satlens.carried.opening import read_model

    reader = read_model(make_model("SATFormer"), None)
    documents = [np.arange(1, 20), np.arange(1, 30)]
    one, other = rows_of(documents, np.arange(2), pad=0), rows_of(documents, np.arange(2), pad=33)
    assert torch.equal(reader.run(one.input_ids)[one.real], reader.run(other.input_ids)[other.real])


@pytest.mark.parametrize(("n", "words"), [(1, "a single document"), (3, "sets of one"), (4, "")])
def test_too_few_documents_for_an_interval_are_told(n, words, capsys):
    ids = tuple(np.arange(64, dtype=np.int64) for _ in range(n))
    found = split(DocumentSet(ids=ids, names=("d",) * n, kinds=("d",) * n))
    said = capsys.readouterr().err
    assert (words in said and "no interval" in said) if words else said == ""
    assert min(found.fit.n_documents, found.evaluate.n_documents) == max(1, n // 2)
