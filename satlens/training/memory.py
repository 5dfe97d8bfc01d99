"""What to say when a batch does not fit in memory: which one, and which two numbers of the recipe to change."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from satlens.errors import UserError
from satlens.training.recipe import Recipe
from satlens.training.state import latest_state

# how allocators say it: CUDA, MPS and torch.AcceleratorError; the CPU's on Linux, and elsewhere; cuBLAS and cuDNN
_WORDS = ("out of memory", "can't allocate memory", "not enough memory", "ALLOC_FAILED")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed; a CPU allocator says so only in words."""
    known = isinstance(error, torch.OutOfMemoryError | MemoryError)
    return known or (isinstance(error, RuntimeError) and any(word in str(error) for word in _WORDS))


@contextmanager
def batch_in_memory(recipe: Recipe, what: str, device: torch.device) -> Iterator[None]:
    """Make a failed allocation one line; ``what`` names the batch.

    Raises:
        UserError: the batch did not fit. Any other error passes unchanged.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        rows = f"{recipe.batch_size} x {recipe.seq_length} tokens"
        told = f"{what} ({rows}, {recipe.arch}) does not fit in the memory of {device}: {_advice(recipe)}"
        if (state := latest_state(recipe.out)) is not None:  # it would refuse a recipe with another batch
            told += f"; {state} was made with the old batch, so take another --out or delete it"
        raise UserError(told) from error


@contextmanager
def model_in_memory(arch: str, device: torch.device) -> Iterator[None]:
    """The same for the weights themselves.

    Raises:
        UserError: the model did not fit. Any other error passes unchanged.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise UserError(
            f"the {arch} of this recipe does not fit in the memory of {device}, before any batch: take a smaller "
            "model, or shard it over several GPUs (accelerate launch --use_fsdp --fsdp_version 2)"
        ) from error


def _advice(recipe: Recipe) -> str:
    """The same tokens a step in smaller pieces, as far as rows can be split."""
    parts = next((n for n in (2, 3, 5, 7) if recipe.batch_size % n == 0), recipe.batch_size)
    if parts > 1:
        smaller, more = recipe.batch_size // parts, recipe.accumulation * parts
        return f"set batch_size = {smaller} and accumulation = {more} (the same tokens a step)"
    other = "" if recipe.precision == "bf16" else ' or precision = "bf16"'
    return f"one row is the smallest batch, so take a shorter seq_length{other}, a smaller model or more processes"
