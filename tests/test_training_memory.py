"""A batch that does not fit in memory ends training in one line that says which, and what to change."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from test_training import MODEL, contents, data, finished, recipe, weights  # noqa: F401 - two are fixtures

import satlens.training.train_command as train_command
from satlens.cli import main
from satlens.errors import UserError
from satlens.training.loop import Objective, train
from satlens.training.memory import is_out_of_memory
from satlens.training.state import latest_state

CPU = RuntimeError(
    "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to "
    "allocate 4398046511104 bytes. Error code 12 (Cannot allocate memory)"
)
CUDA = torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.\nGPU 0 has 79 GiB")
CUBLAS = RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")
NUMPY = MemoryError("Unable to allocate 8.00 TiB for an array")


def failing(monkeypatch: pytest.MonkeyPatch, error: BaseException, when: Callable[[int, bool], bool]) -> None:
    """Make the forward pass raise ``error`` the first time that ``when(calls so far, training)`` holds."""
    whole, calls = Objective.forward, iter(range(10**6))

    def forward(self: Objective, *given: Any) -> Any:
        if when(next(calls), torch.is_grad_enabled()):
            raise error
        return whole(self, *given)

    monkeypatch.setattr(Objective, "forward", forward)


@pytest.mark.parametrize("error", [CPU, CUDA, CUBLAS, NUMPY], ids=["cpu", "cuda", "cublas", "numpy"])
def test_the_line_names_the_batch_and_the_two_numbers(
    error: BaseException,
    data: Path,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    failing(monkeypatch, error, lambda call, training: call == 0)
    words = (
        r"a batch of step 0 \(2 x 32 tokens, SATFormer\) does not fit in the memory of cpu: "
        r"set batch_size = 1 and accumulation = 4 \(the same tokens a step\)$"
    )
    with pytest.raises(UserError, match=words) as caught:
        train(recipe(data, tmp_path / "run"))
    assert "\n" not in str(caught.value)


def test_what_it_advises_is_the_same_training(
    data: Path,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given = {"batch_size": 6, "accumulation": 1, "max_tokens": 2 * 6 * 32, "save_dtype": "float32"}
    train(recipe(data, tmp_path / "whole", **given))
    with monkeypatch.context() as patch:
        failing(patch, CPU, lambda call, training: call == 0)
        with pytest.raises(UserError, match="set batch_size = 3 and accumulation = 2 "):
            train(recipe(data, tmp_path / "run", **given))
    train(recipe(data, tmp_path / "run", **{**given, "batch_size": 3, "accumulation": 2}))  # the same --out
    ours, whole = (weights(tmp_path / name / "final") for name in ("run", "whole"))
    for name in whole:  # tiny gradients, whose sums round otherwise, move a weight by a share of the rate
        torch.testing.assert_close(ours[name], whole[name], rtol=0, atol=1e-4, msg=name)


def test_what_was_written_before_is_whole_and_the_state_still_resumes(
    data: Path,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    finished: Path,  # noqa: F811
) -> None:
    run, before = recipe(data, tmp_path / "run"), 2 * 6 + 3
    with (
        monkeypatch.context() as patch
    ):  # six steps of two micro-steps and an evaluation of three batches come first
        failing(patch, CUDA, lambda call, training: training and call >= before)
        with pytest.raises(
            UserError, match=r"a batch of step 6 .*; .*state-00000005 was made with the old batch"
        ):
            train(run)
    left = [path.name for path in run.out.rglob("*")]
    assert not [name for name in left if name.endswith(".part")] and "final" not in left
    assert latest_state(run.out) == run.out / "state-00000005"
    train(run)
    assert contents(run.out) == contents(finished)


def test_a_held_out_batch_beyond_memory_is_named_as_one(
    data: Path,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    failing(monkeypatch, CPU, lambda call, training: not training)
    with pytest.raises(UserError, match="a held-out batch after step 5 "):
        train(recipe(data, tmp_path / "run"))


def test_one_row_that_does_not_fit_has_other_advice(
    data: Path,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    failing(monkeypatch, CPU, lambda call, training: True)
    with pytest.raises(UserError, match=r'one row is the smallest batch, .* or precision = "bf16"'):
        train(recipe(data, tmp_path / "run", batch_size=1))


def test_a_model_beyond_memory_is_told_before_any_batch(data: Path, tmp_path: Path) -> None:  # noqa: F811
    huge = {**MODEL, "intermediate_size": 1 << 45}  # an allocation that no machine grants
    with pytest.raises(UserError, match="the SATFormer of this recipe does not fit in the memory of cpu"):
        train(recipe(data, tmp_path / "run", model=huge))
    assert not (tmp_path / "run").exists()


def test_the_command_ends_in_one_line_and_exit_code_2(
    data: Path,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    failing(monkeypatch, CUDA, lambda call, training: True)
    monkeypatch.setattr(train_command, "recipe_of", lambda config: recipe(data, tmp_path / "run"))
    flags = ["--preset", "study", "--arch", "satformer", "--data", str(data), "--out", str(tmp_path / "run")]
    assert main(["train", *flags]) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.strip().splitlines()[-1].startswith("satlens: a batch of step 0 ")
    assert "Traceback" not in said.err


def test_another_error_is_not_called_a_lack_of_memory(
    data: Path,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    other = RuntimeError("mat1 and mat2 shapes cannot be multiplied")
    assert not is_out_of_memory(other) and not is_out_of_memory(ValueError("out of memory"))
    failing(monkeypatch, other, lambda call, training: True)
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        train(recipe(data, tmp_path / "run"))
