"""Training a dictionary is sae-lens's training on i.i.d. tokens, and a run that was killed ends in the same bytes."""

import json
import math
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import sae.train as train_module
from sae.dictionary import Counts
from sae.train import Learner, Recipe, draws, make_dictionary, train
from satlens.errors import SatlensError, UserError
from satlens.training.state import latest_state

VOCAB, D_IN = 60, 12


def table() -> Tensor:
    return torch.randn(VOCAB, D_IN, generator=torch.Generator().manual_seed(0)) * 2 + 0.5


def counts() -> Tensor:
    """Unequal, some 0."""
    many = torch.randint(0, 40, (VOCAB,), generator=torch.Generator().manual_seed(1))
    many[::7] = 0
    return many


def recipe(**changes: Any) -> Recipe:
    given = {"k": 3, "expansion": 4, "tokens": 3000, "batch": 100, "lr": 5e-3, "seed": 0}
    return Recipe(**{**given, **changes})


def facts(**changes: Any) -> dict[str, Any]:
    given = {
        "site": "v1",
        "model": {"name": "tiny", "digest": "0" * 64},
        "seed": 0,
        "tokens": 3000,
        "withheld": [],
    }
    return {**given, **changes}


# --- the mathematics ---


def test_a_batch_is_independent_draws_by_count():
    """Chi-square over many batches, mean and variance of single counts; what has no count is never drawn."""
    n, c = 2000, counts()
    draw = draws(c, recipe(batch=50))
    seen = torch.zeros(n, VOCAB, dtype=torch.float64)
    for step in range(n):
        ids, share = draw(step)
        assert float(share.sum()) == pytest.approx(1) and len(ids.unique()) == len(ids)
        seen[step, ids] = share * 50
    p = c.double() / c.sum()
    assert float(seen[:, p == 0].sum()) == 0
    p, seen = p[p > 0], seen[:, p > 0]
    chi = float(((seen.sum(0) - n * 50 * p).square() / (n * 50 * p)).sum())
    free = len(p) - 1
    assert abs(chi - free) < 4 * math.sqrt(2 * free)
    torch.testing.assert_close(seen.var(0), 50 * p * (1 - p), rtol=0.2, atol=0)
    common = int(p.argmax())
    others = [i for i in range(len(p)) if i != common]
    covariance = ((seen[:, [common]] - 50 * p[common]) * (seen[:, others] - 50 * p[others])).mean(0).sum()
    assert float(covariance) == pytest.approx(float(-50 * p[common] * p[others].sum()), rel=0.2)


def test_a_step_draws_the_same_whatever_was_drawn_before():
    draw = draws(counts(), recipe())
    first = draw(7)
    draw(3)
    again = draw(7)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(draw(8)[1], first[1])
    other = draws(counts(), recipe(seed=1))(7)
    assert not (torch.equal(other[0], first[0]) and torch.equal(other[1], first[1]))


def test_training_equals_sae_lenss_trainer_on_the_expanded_batches(monkeypatch):
    """In float64, through clipping, cosine, Adam and latents that die and are revived."""
    from sae_lens import TopKTrainingSAE, TopKTrainingSAEConfig
    from sae_lens.config import SAETrainerConfig
    from sae_lens.training.sae_trainer import SAETrainer

    monkeypatch.setattr(train_module, "DEAD_AFTER", 3)
    given = recipe(tokens=4050, batch=100, k=2)
    rows, draw = table().double(), draws(counts(), given)
    learner = Learner(rows, draw, given)
    config = TopKTrainingSAEConfig(d_in=D_IN, d_sae=4 * D_IN, k=2, dtype="float64")
    made = TopKTrainingSAE(config)
    with torch.no_grad():
        made.W_enc.copy_(learner.sae.encoder.T)
        made.W_dec.copy_(learner.sae.decoder)

    def batches() -> Any:
        for step in range(40):
            ids, share = draw(step)
            yield rows[ids].repeat_interleave((share * 100).round().long(), 0)

    trainer = SAETrainer(
        cfg=SAETrainerConfig(
            total_training_samples=4000,
            train_batch_size_samples=100,
            lr=5e-3,
            lr_end=0.0,
            lr_scheduler_name="cosineannealing",
            dead_feature_window=3,
        ),
        sae=made,
        data_provider=batches(),
    )
    revived = clipped = 0
    for batch in batches():
        rate = trainer.optimizer.param_groups[0]["lr"]
        dead = int(trainer.dead_neurons.sum())
        theirs, ours = trainer.step(batch), learner.take_step()
        trainer.n_training_steps += 1
        assert (ours.n_dead, ours.lr) == (dead, pytest.approx(rate, rel=1e-12))
        torch.testing.assert_close(ours.step.mse + ours.step.aux, theirs.loss, rtol=1e-9, atol=0)
        revived += float(ours.step.aux) > 0
        clipped += ours.grad_norm > 1
    assert revived > 5 and clipped > 5
    torch.testing.assert_close(learner.sae.encoder, made.W_enc.T, rtol=1e-7, atol=1e-10)
    torch.testing.assert_close(learner.sae.decoder, made.W_dec, rtol=1e-7, atol=1e-10)
    torch.testing.assert_close(learner.sae.b_enc, made.b_enc, rtol=1e-7, atol=1e-10)
    torch.testing.assert_close(learner.sae.b_dec, made.b_dec, rtol=1e-7, atol=1e-10)
    assert torch.equal(learner.sae.silent, trainer.n_forward_passes_since_fired.long())


def test_training_explains_what_it_draws_and_the_journal_says_so(tmp_path):
    sae = train(table(), counts(), recipe(tokens=60_000), facts(), tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert lines[-1]["step"] == 600 and lines[-1]["tokens"] == 60_000
    assert lines[0]["fve"] < 0.5 < 0.9 < lines[-1]["fve"]
    share = (counts() / counts().sum()).double()
    folded = sae.folded()
    pre = (table() - folded["b_dec"]) @ folded["W_enc"] + folded["b_enc"]
    values, places = pre.topk(3)
    made = torch.zeros_like(pre).scatter_(1, places, values.relu()) @ folded["W_dec"] + folded["b_dec"]
    mean = share @ table().double()
    error, spread = ((table() - x).double().square().sum(1) for x in (made, mean))
    assert lines[-1]["fve"] == pytest.approx(float(1 - (share @ error) / (share @ spread)), abs=0.02)


def test_a_token_that_is_not_counted_changes_nothing(tmp_path):
    known, changed = table(), table()
    changed[counts() == 0] = 1e6
    first, second = (
        train(rows, counts(), recipe(), facts(), tmp_path / str(i)) for i, rows in enumerate((known, changed))
    )
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))


# --- interruption ---

SCRIPT = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, {tests!r})
import torch
torch.set_num_threads(1)
import sae.save as save, sae.train as train, satlens.training.state as state
import test_sae_train as here
kill = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
out = Path({out!r})
{patch}
here.make(out)
"""
BETWEEN_STATES = """
train.SAVE_SECONDS, whole = 1e9, train.Learner.take_step
def step(self):
    if self.step == 10:
        self.save(out / "one.training", train.identity(here.facts()))
    return kill() if self.step == 13 else whole(self)
train.Learner.take_step = step
"""
IN_A_STATE = """
train.SAVE_SECONDS, sync = 0, state._sync
state._sync = lambda path: kill() if "00000012" in str(path) else sync(path)
"""
KILLS = {
    "between two states": BETWEEN_STATES,
    "while a state is written": IN_A_STATE,
    "while the folder is written": "save._sync = kill",
    "after the folder has its name": "train.shutil.rmtree = lambda path, **_: kill() if path.stem == 'one' else None",
}


def make(out: Path, **changes: Any) -> Path:
    return make_dictionary(
        table(), Counts(train=counts(), heldout=counts()), recipe(**changes), facts(), out / "one"
    )


def contents(out: Path) -> dict[str, bytes]:
    return {str(p.relative_to(out)): p.read_bytes() for p in out.rglob("*") if p.is_file()}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A training that nobody interrupted."""
    out = tmp_path_factory.mktemp("whole")
    make(out)
    return out


@pytest.mark.parametrize("moment", KILLS)
def test_a_training_killed_ends_in_the_same_bytes(moment: str, whole: Path, tmp_path: Path) -> None:
    code = SCRIPT.format(tests=str(Path(__file__).parent), out=str(tmp_path), patch=KILLS[moment])
    killed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert (tmp_path / "one.training").exists()
    if moment == "between two states":
        state, log = latest_state(tmp_path / "one.training"), tmp_path / "one.training" / "log.jsonl"
        assert state is not None and state.name == "state-00000010"
        assert json.loads(log.read_text().splitlines()[-1])["step"] == 13
        with log.open("a") as file:
            file.write('{"step": 14, "ms')  # a line cut short
    torch.manual_seed(999)  # must not matter
    make(tmp_path)
    assert contents(tmp_path) == contents(whole)
    assert set(contents(whole)) == {
        f"one/{name}"
        for name in (
            "cfg.json",
            "sae_weights.safetensors",
            "counts.safetensors",
            "sparsity.safetensors",
            "log.jsonl",
        )
    }


def test_a_finished_dictionary_is_left_alone(tmp_path: Path) -> None:
    make(tmp_path)
    before = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*")}
    make(tmp_path)
    assert {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*")} == before


# --- bad input ---


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"k": 49}, "k is 49, but there are 48 latents"),
        ({"k": 0}, "k is 0"),
        ({"expansion": 0}, "expansion 0 leaves no latents"),
        ({"batch": 3001}, "no whole batch"),
        ({"batch": 0}, "batch"),
        ({"lr": 0.0}, "above 0"),
        ({"lr": math.nan}, "above 0"),
    ],
)
def test_a_recipe_that_cannot_work_is_refused(changes, words, tmp_path):
    with pytest.raises(UserError, match=words):
        make(tmp_path, **changes)
    assert not list(tmp_path.iterdir())


def test_a_finished_dictionary_of_another_request_is_refused_with_the_differences(whole):
    asked = facts(seed=3, model={"name": "tiny", "digest": "1" * 64})
    pair = Counts(train=counts(), heldout=counts())
    with pytest.raises(UserError, match=r"model.digest: is 000.*asked for 111.*; seed: is 0, asked for 3"):
        make_dictionary(table(), pair, recipe(), asked, whole / "one")


def test_a_state_of_another_request_is_refused_with_the_differences(tmp_path):
    train(table(), counts(), recipe(), facts(), tmp_path)
    renamed = facts(model={"name": "other", "digest": "0" * 64})
    train(table(), counts(), recipe(), renamed, tmp_path)  # the digest says that it is the same
    with pytest.raises(UserError, match=r"model.digest: was 000.*, now 111"):
        train(table(), counts(), recipe(), facts(model={"name": "tiny", "digest": "1" * 64}), tmp_path)


def test_a_loss_that_is_no_number_stops_the_training_and_names_the_step(tmp_path):
    broken = table()
    broken[int(counts().argmax())] = torch.nan
    with pytest.raises(SatlensError, match=r"the loss is nan .* at step 0 "):
        train(broken, counts(), recipe(), facts(), tmp_path)
    huge = table() * 1e25  # squares are beyond float32
    with pytest.raises(SatlensError, match="at step 0 "):
        train(huge, counts(), recipe(), facts(), tmp_path / "huge")


def test_withheld_types_are_never_drawn_and_text_without_others_is_refused(tmp_path):
    pair = Counts(train=counts(), heldout=counts())
    seen = counts().nonzero().flatten().tolist()
    changed = table()
    changed[seen[:5]] = 1e6
    made = [
        make_dictionary(rows, pair, recipe(), facts(withheld=seen[:5]), tmp_path / str(i) / "one")
        for i, rows in enumerate((table(), changed))
    ]
    first, second = (folder.joinpath("sae_weights.safetensors").read_bytes() for folder in made)
    assert first == second
    with pytest.raises(UserError, match="withhold fewer types"):
        make_dictionary(table(), pair, recipe(), facts(withheld=seen), tmp_path / "none")


def test_a_full_disk_keeps_the_last_state_and_leaves_no_half_folder(tmp_path, monkeypatch):
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("sae.save._write", full)
    with pytest.raises(SatlensError, match=r"No space left.*make room"):
        make(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["one.training"]
    monkeypatch.undo()
    monkeypatch.setattr(Learner, "take_step", full)  # nothing is left to train
    assert make(tmp_path).joinpath("cfg.json").exists()
