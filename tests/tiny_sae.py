"""A small V1 dictionary on disk, made by hand, and a judge in this process whose word the test decides."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from sae.dictionary import Counts, Dictionary
from sae.judges import CATEGORY, PURITY, Answer, Question
from sae.save import dictionary_of, save_dictionary
from sae.table import split_counts, v1_rows
from satlens.checkpoint import load_model, load_tokenizer, model_facts
from satlens.tokens import open_corpus


def write_dictionary(
    folder: Path, checkpoint: Path, text: Path, name: str = "made", d_sae: int = 24, k: int = 4, **facts: Any
) -> Path:
    """Random latents on the model's V1 table; latent 0 never fires, latent 1 fires on two token ids alone."""
    rows = v1_rows(load_model(checkpoint))
    d_vocab, d_in = rows.shape
    generator = torch.Generator().manual_seed(5)
    W_dec = torch.nn.functional.normalize(torch.randn(d_sae, d_in, generator=generator), dim=-1)
    b_enc = torch.zeros(d_sae)
    b_enc[0] = -1e4
    counts = split_counts(open_corpus(text, load_tokenizer(checkpoint)), d_vocab)
    projected = (rows - rows.mean(0)) @ W_dec[1]
    seen = torch.where(counts.total > 0, projected, -torch.inf)
    second, third = seen.sort(descending=True).values[1:3]
    W_enc = W_dec.T.clone()
    W_enc[:, 1] *= 1e3  # so that it is among the k largest wherever it is above 0
    b_enc[1] = -1e3 * (second + third) / 2
    described = {
        "site": "v1",
        "model": {
            "name": name,
            "digest": model_facts(checkpoint)["digest"],
            "n_kv_heads": 2,
            "d_head": d_in // 2,
        },
        "seed": 7,
        "tokens": 1000,
        "data": {"text": text.name, "n_tokens": int(counts.total.sum())},
    }
    tensors = {"W_enc": W_enc.contiguous(), "b_enc": b_enc, "W_dec": W_dec, "b_dec": rows.mean(0)}
    path = folder / f"sae-{len(list(folder.glob('sae-*')))}" / "seed-7"
    dictionary: Dictionary = dictionary_of(
        tensors, k, {**described, **facts}, kept_counts(counts, facts), path
    )
    return save_dictionary(dictionary, torch.full((d_sae,), 0.1))


def kept_counts(counts: Counts, facts: dict[str, Any]) -> Counts | None:
    """Only V1 has counts."""
    return counts if facts.get("site", "v1") == "v1" else None


class TestJudge:
    """A judge that answers by a function of the question: a number, a category or an Answer."""

    __test__ = False

    def __init__(self, word: Callable[[Question], Any], name: str = "made") -> None:
        self.word, self.asked, self.closed = word, [], False
        self.facts: dict[str, Any] = {"judge": name, "model": "m", "read": "answer", "digest": "d"}

    def check(self) -> None:
        """Always there."""

    def ask(
        self, questions: Sequence[Question], on_answer: Callable[[Answer], None] | None = None
    ) -> list[Answer]:
        """Ten prompt tokens and one completion token an answer."""
        answers = []
        for index, question in enumerate(questions):
            self.asked.append(question)
            said = self.word(question)
            cost = {"prompt_tokens": 10, "completion_tokens": 1, "index": index, "raw": str(said)}
            if isinstance(said, Answer):
                answers.append(said)
            elif question.kind == PURITY:
                answers.append(Answer(score=float(said), **cost))
            else:
                assert question.kind == CATEGORY
                answers.append(Answer(category=said, **cost))
            if on_answer is not None:
                on_answer(answers[-1])
        return answers

    def close(self) -> None:
        """Remember it."""
        self.closed = True
