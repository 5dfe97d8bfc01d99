"""Induction: planted attention gives its planted score, and the score is what a slow loop over positions finds."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from satlens.bootstrap import document_weights
from satlens.carried.induction import attention_to_successor, even_attention, induction, repeated_ids
from satlens.carried.opening import read_model
from satlens.errors import UserError

WEIGHTS = document_weights(6, 200, 0)


class Words:
    """A tokenizer that is asked for nothing but its size and its special ids."""

    def __init__(self, size: int = 53, special: tuple[int, ...] = (1, 2)) -> None:
        self.size, self.all_special_ids = size, list(special)

    def __len__(self) -> int:
        return self.size


def reader_of(model: Any, bos: int | None = None) -> Any:
    return read_model(model, Words(), name="tiny", bos=bos)


# --- planted attention ---


def planted(length: int, lead: int) -> Tensor:
    """Four heads: all attention on the successor, on itself, spread evenly over the past, and half on the successor."""
    n = lead + 2 * length
    pattern = torch.zeros(2, 4, n, n)
    for t in range(n):
        successor = t - length + 1 if t >= lead + length else t
        pattern[:, 0, t, successor] = 1.0
        pattern[:, 1, t, t] = 1.0
        pattern[:, 2, t, : t + 1] = 1 / (t + 1)
        pattern[:, 3, t, successor] += 0.5
        pattern[:, 3, t, 0] += 0.5
    return pattern


@pytest.mark.parametrize("lead", [0, 1])
def test_planted_attention_gives_its_score(lead: int) -> None:
    length = 5
    found = attention_to_successor(planted(length, lead), length, lead)
    even = np.mean([1 / (t + 1) for t in range(lead + length, lead + 2 * length - 1)])
    torch.testing.assert_close(found, torch.tensor([1.0, 0.0, even, 0.5]).float().expand(2, 4))
    assert even_attention(length, lead) == pytest.approx(even)


def copier(shown: float, length: int = 8, d_vocab: int = 24) -> Any:
    """A planted model: head (1, 2) attends to the successor with weight ``shown``, and the logits copy from there.

    The prediction at t is ``log(d_vocab - 1)`` in favour of the token after the previous occurrence, none before it
    has been seen: a chance of 1/2 for the copy in the second half, 1 / d_vocab in the first.
    """

    def stack(input_ids: Tensor, **_: Any) -> Any:
        batch, n = input_ids.shape
        attentions = [torch.zeros(batch, 3, n, n) for _ in range(2)]
        hidden = torch.zeros(batch, n, d_vocab)
        for t in range(n):
            if t < length:
                continue
            attentions[1][:, 2, t, t - length + 1] = shown
            hidden[torch.arange(batch), t, input_ids[:, t - length + 1]] = float(np.log(d_vocab - 1))
        return SimpleNamespace(last_hidden_state=hidden, attentions=tuple(attentions))

    def nll(hidden: Tensor, rows: Any) -> Tensor:
        return -hidden.log_softmax(-1)[rows.scored].gather(1, rows.targets()[:, None])[:, 0]

    config = SimpleNamespace(_attn_implementation="sdpa")
    seen: list[str] = []
    model = SimpleNamespace(config=config, base_model=stack, set_attn_implementation=seen.append)
    reader = SimpleNamespace(
        name="planted", bos=None, n_ctx=2 * length, model=model, device="cpu", nll=nll, d_vocab=d_vocab
    )
    reader.tokenizer, reader.switched = Words(d_vocab, ()), seen
    return reader


@pytest.mark.parametrize("shown", [1.0, 0.25])
def test_a_planted_copier_scores_its_attention_and_its_gain(shown: float) -> None:
    reader = copier(shown)
    found = induction(reader, sequences=6, length=8, batch_size=4)
    assert found.best() == (1, 2) and found.n_predictions == 6 * 7
    assert found.heads()[1, 2] == pytest.approx(shown, abs=1e-7)
    assert np.delete(found.heads().ravel(), 5).max() == 0
    score, drop = found.score(WEIGHTS), found.loss_drop(WEIGHTS)
    assert score.low == pytest.approx(score.estimate) == pytest.approx(score.high)
    assert drop.estimate == pytest.approx(np.log(24) - np.log(2), abs=1e-6)
    assert reader.switched == ["eager", "sdpa"]  # attention weights exist in eager attention only


def test_attention_that_is_not_shown_is_refused_and_the_model_left_as_it_was() -> None:
    reader = copier(1.0)
    stack = reader.model.base_model
    reader.model.base_model = lambda **kwargs: SimpleNamespace(
        last_hidden_state=stack(**kwargs).last_hidden_state, attentions=(None, None)
    )
    with pytest.raises(UserError, match="planted does not show its attention weights"):
        induction(reader, sequences=2)
    assert reader.switched == ["eager", "sdpa"]


# --- the sequences ---


@pytest.mark.parametrize("bos", [None, 1])
def test_sequences_are_distinct_ordinary_tokens_twice_in_a_row(bos: int | None) -> None:
    reader = copier(1.0)
    reader.tokenizer, reader.bos, reader.d_vocab = Words(30, (1, 2)), bos, 24
    ids = repeated_ids(reader, 50, 9, torch.Generator().manual_seed(3))
    lead = int(bos is not None)
    assert ids.shape == (50, lead + 18) and (bos is None or bool((ids[:, 0] == bos).all()))
    assert torch.equal(ids[:, lead : lead + 9], ids[:, lead + 9 :])
    assert all(len(set(row.tolist())) == 9 for row in ids[:, lead : lead + 9])
    assert set(ids[:, lead:].flatten().tolist()) == set(range(24)) - {1, 2}
    assert len({tuple(row.tolist()) for row in ids}) == 50


def test_the_same_seed_gives_the_same_sequences_and_another_seed_others() -> None:
    one, two, other = (
        repeated_ids(copier(1.0), 3, 8, torch.Generator().manual_seed(seed)) for seed in (0, 0, 1)
    )
    assert torch.equal(one, two) and not torch.equal(one, other)


def test_too_few_tokens_and_too_short_a_context_are_refused() -> None:
    reader = copier(1.0)
    with pytest.raises(UserError, match="24 tokens are too few for a sequence of 25"):
        repeated_ids(reader, 1, 25, torch.Generator())
    reader.n_ctx = 7
    with pytest.raises(UserError, match="a context of 7 tokens is too short to repeat"):
        induction(reader)


# --- real models ---


@pytest.mark.parametrize("bos", [None, 2])
def test_the_scores_are_those_of_a_slow_loop_over_positions(make_model: Any, bos: int | None) -> None:
    model = make_model("transformer", num_kv_heads=None)
    reader = reader_of(model, bos)
    found = induction(reader, sequences=5, length=10, seed=4, batch_size=2)
    ids = repeated_ids(reader, 5, 10, torch.Generator().manual_seed(4))
    lead = int(bos is not None)
    with torch.no_grad():
        out = model(ids, output_attentions=True)
    log_p = out.logits.double().log_softmax(-1)
    for row in range(5):
        for layer in range(4):
            for head in range(4):
                pattern = out.attentions[layer][row, head]
                steps = [float(pattern[t, t - 9]) for t in range(lead + 10, lead + 19)]
                assert found.attention[row, layer, head] == pytest.approx(np.mean(steps), abs=1e-6)
        for copy, values in enumerate((found.first, found.second)):
            start = lead + 10 * copy
            nll = [-float(log_p[row, t, ids[row, t + 1]]) for t in range(start, start + 9)]
            assert values[row] == pytest.approx(np.mean(nll), abs=1e-5)


def test_a_model_without_attention_gains_nothing_from_a_repeat(make_model: Any) -> None:
    found = induction(reader_of(make_model("transformer", attention_disabled=True)), sequences=4, length=8)
    np.testing.assert_allclose(found.first, found.second, rtol=0, atol=1e-6)


def test_answers_do_not_depend_on_the_batch_size(make_model: Any) -> None:
    reader = reader_of(make_model())
    one, all_ = (induction(reader, sequences=5, length=8, batch_size=size) for size in (1, 5))
    np.testing.assert_allclose(one.attention, all_.attention, rtol=0, atol=1e-6)
    np.testing.assert_allclose(one.second, all_.second, rtol=0, atol=1e-5)


def test_a_foreign_model_shows_its_attention_and_keeps_its_kernel() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=24, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4, vocab_size=53,
        max_position_embeddings=64, attn_implementation="sdpa",
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    found = induction(reader_of(model), sequences=3, length=8)
    assert found.attention.shape == (3, 2, 4) and 0 < found.heads().max() < 1
    assert model.config._attn_implementation == "sdpa"


def test_intervals_resample_sequences(make_model: Any) -> None:
    found = induction(reader_of(make_model()), sequences=6, length=8)
    score, drop = found.score(WEIGHTS), found.loss_drop(WEIGHTS)
    assert score.low < score.estimate < score.high and score.estimate == found.heads().max()
    slow = [np.average(found.first - found.second, weights=row) for row in WEIGHTS]
    assert (drop.low, drop.high) == pytest.approx(tuple(np.quantile(slow, [0.025, 0.975])))
