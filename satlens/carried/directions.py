"""The directions an edit moves along: m^ itself, and what it is compared with."""

import torch
from jaxtyping import Float
from torch import Tensor

from satlens.errors import UserError

LEAST_CONTROLS = 8
"""Random directions below which a percentile of the control distribution says nothing."""

FUNCTION_WORDS = """
the of and to a in that is was for on with as by at from it be are this which or an but not he his they have had
were their has its been you we her she him all will would there can if more when so no them than about into only
""".split()
"""Common English function words; those that are one token make the function-word direction."""


def unit(vector: Float[Tensor, " d_model"]) -> Float[Tensor, " d_model"]:
    """The vector at length 1, divided in float64 so that its length is 1 to float32 precision.

    Raises:
        UserError: a zero vector or one that is not finite has no direction.
    """
    long = vector.double()
    length = long.norm()
    if not bool(torch.isfinite(length)) or float(length) == 0:
        raise UserError("a mean of length 0 (or not a number) has no direction: look at the layer's residual")
    return (long / length).float()


def random_units(
    away_from: Float[Tensor, " d_model"], n: int, generator: torch.Generator
) -> Float[Tensor, "draw d_model"]:
    """``n`` random unit vectors orthogonal to ``away_from``, drawn on the CPU so that every device has the same.

    Raises:
        UserError: fewer than ``LEAST_CONTROLS``, which would make no distribution to compare with.
    """
    if n < LEAST_CONTROLS:
        raise UserError(f"{n} random directions make no control distribution: use at least {LEAST_CONTROLS}")
    m = away_from.double().cpu()
    m = m / m.norm()
    drawn = torch.randn(n, len(m), generator=generator, dtype=torch.float64)
    drawn = drawn - (drawn @ m)[:, None] * m
    return (drawn / drawn.norm(dim=1, keepdim=True)).float().to(away_from.device)


def permuted(vector: Float[Tensor, " d_model"], generator: torch.Generator) -> Float[Tensor, " d_model"]:
    """The same coordinates in another order: as heavy-tailed as m^, but another direction."""
    order = torch.randperm(len(vector), generator=generator)
    return vector[order.to(vector.device)]


def function_words(tokenizer: object, d_vocab: int) -> list[int]:
    """Token ids of the function words that are one token, with their leading space where that is one token too."""
    found = []
    for word in FUNCTION_WORDS:
        for written in (f" {word}", word):
            ids = tokenizer(written, add_special_tokens=False)["input_ids"]  # type: ignore[operator]
            if len(ids) == 1 and ids[0] < d_vocab:
                found.append(int(ids[0]))
                break
    return sorted(set(found))


def function_word_direction(
    unembedding: Float[Tensor, "d_vocab d_model"], ids: list[int]
) -> Float[Tensor, " d_model"]:
    """Unit sum of the unit unembedding rows of ``ids``: a content direction that is no mean (spec part B, replacement).

    Raises:
        UserError: no function word is a single token of this tokenizer.
    """
    if not ids:
        raise UserError("no English function word is one token of this tokenizer: leave that replacement out")
    rows = unembedding[ids].double()
    return unit((rows / rows.norm(dim=1, keepdim=True)).sum(0).float())
