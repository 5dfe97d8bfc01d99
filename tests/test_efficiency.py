"""The benches time what they say, in processes of their own, and a model that does not fit is a row with a reason."""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from satlens.cli import main
from satlens.efficiency import alternate as alternate_module
from satlens.efficiency.alternate import alternate, run_child, table
from satlens.efficiency.child import Job, build, forward_step, saved_mib, timed, train_step
from satlens.errors import SatlensError
from satlens.run import open_run, verify

SMALL = {
    "what": "train",
    "scale": "study",
    "arch": "satformer",
    "batch_size": 1,
    "seq_length": 16,
    "steps": 2,
    "warmup": 1,
    "d_vocab": 64,
    "device": "cpu",
    "precision": "fp32",
    "compile": False,
    "threads": 1,
}


def job(**changes: Any) -> Job:
    return Job(**{**SMALL, **changes})


def test_a_training_step_moves_every_weight_and_a_forward_pass_none() -> None:
    for what, moves in (("train", True), ("forward", False)):
        model = build(job(what=what))
        before = [weight.detach().clone() for weight in model.parameters()]
        (train_step if what == "train" else forward_step)(job(what=what), model)()
        moved = [bool((a != b).any()) for a, b in zip(before, model.parameters(), strict=True)]
        assert all(moved) if moves else not any(moved)


def test_what_is_found_is_of_the_model_asked_for() -> None:
    found = timed(job(arch="transformer"))
    layer = 4 * 128 * 128 + 3 * 128 * 512 + 2 * 128 + 2 * 32
    assert found["parameters"] == 64 * 128 + 6 * layer + 128
    assert found["seconds"] > 0 and found["cpu_seconds"] > 0 and found["peak_mib"] >= 0


def test_what_is_kept_for_the_backward_pass_is_counted_exactly() -> None:
    # a linear map keeps its input, its weight is no activation; a sum keeps nothing
    model = torch.nn.Module()
    model.linear = torch.nn.Linear(8, 4, bias=False)  # type: ignore[assignment]
    model.forward = lambda ids, use_cache: SimpleNamespace(  # type: ignore[method-assign]
        logits=model.linear(torch.ones(1, 16, 8))
    )
    # cross_entropy keeps its log-softmax of 15 rows of 4 and its 15 targets (int64)
    expected = 16 * 8 * 4 + 15 * 4 * 4 + 15 * 8
    assert saved_mib(job(d_vocab=4), model) * 2**20 == pytest.approx(expected, rel=0.25)


def test_ratios_are_taken_within_a_round(monkeypatch: pytest.MonkeyPatch) -> None:
    # the machine is twice as slow in the second round: a ratio of medians over rounds would still be right here, one of
    # the first's slow to the second's fast moment would not
    times = iter([1.0, 1.5, 2.0, 3.2, 1.0, 1.6])

    def answer(name: str, _: Job) -> dict[str, Any]:
        return {"parameters": 7, "seconds": next(times), "cpu_seconds": 1.0, "peak_mib": 10.0}

    monkeypatch.setattr(alternate_module, "run_child", answer)
    jobs = {"a": job(), "b": job()}
    rows = table(alternate(jobs, 3), jobs, "seconds").set_index("model")
    assert rows.loc["b", "time_ratio"] == pytest.approx(1.6)
    assert (rows.loc["b", "time_low"], rows.loc["b", "time_high"]) == pytest.approx((1.5, 1.6))
    assert rows.loc["a", "time_ratio"] == 1 and rows.loc["b", "memory_ratio"] == 1
    assert rows.loc["a", "tokens_per_second"] == pytest.approx(16 / 1.0)


def test_a_model_that_does_not_fit_is_tried_once_and_costs_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def answer(name: str, _: Job) -> dict[str, Any]:
        asked.append(name)
        if name == "big":
            return {"failed": "a batch of 1 x 16 does not fit in memory"}
        return {"parameters": 7, "seconds": 1.0, "cpu_seconds": 1.0, "peak_mib": 10.0}

    monkeypatch.setattr(alternate_module, "run_child", answer)
    jobs = {"small": job(), "big": job()}
    rows = table(alternate(jobs, 3), jobs, "seconds").set_index("model")
    assert asked.count("big") == 1 and asked.count("small") == 3
    assert rows.loc["big", "status"] == "failed" and "does not fit" in rows.loc["big", "reason"]
    assert math.isnan(rows.loc["big", "time_ratio"]) and rows.loc["small", "time_ratio"] == 1


def test_a_batch_beyond_memory_is_an_answer() -> None:
    found = run_child("satformer", job(batch_size=1 << 20, seq_length=1 << 14, what="forward"))
    assert "does not fit in memory" in found["failed"]


def test_a_child_that_breaks_says_why() -> None:
    with pytest.raises(SatlensError, match=r"satformer could not be timed: .*huge"):
        run_child("satformer", job(scale="huge"))


@pytest.mark.parametrize("verb", ["train", "forward"])
def test_the_verb_leaves_a_whole_run(verb: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = "--preset study --archs transformer satformer --batch-size 1 --seq-length 16"
    flags += " --rounds 1 --steps 1 --warmup 0"
    assert main(["bench", verb, *flags.split(), "--d-vocab", "64", "--runs", str(tmp_path)]) == 0
    run = open_run(Path(capsys.readouterr().out.strip()))
    assert verify(run) == [] and run.manifest.verb == f"bench-{verb}"
    rows = run.tables["efficiency"].set_index("model")
    assert list(rows.index) == ["transformer", "satformer"] and (rows["status"] == "measured").all()
    assert rows.loc["transformer", "time_ratio"] == 1 and "ratios" in run.figures


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--preset", "huge"], "no scale 'huge'"),
        (["--archs", "mamba"], "no architecture 'mamba'"),
        (["--archs", "satformer", "satformer"], "name every one of --archs once"),
        (["--rounds", "0"], "rounds must be at least 1"),
        (["--seq-length", "1"], "predicts nothing"),
        (["--device", "cuda:7"], "this torch sees no GPU"),
    ],
)
def test_a_mistake_is_one_line(
    flags: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "train", *flags, "--runs", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert words in said and "Traceback" not in said and not any(tmp_path.iterdir())
