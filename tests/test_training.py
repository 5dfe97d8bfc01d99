"""Training is plain AdamW on the data in a known order, and a run that was killed ends in the same bytes."""

import json
import math
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tiny import write_texts
from torch import Tensor, nn
from transformers import AutoTokenizer

import satlens.training.loop as loop_module
import satlens.training.state as state_module
from satlens import load_model
from satlens.cli import main
from satlens.errors import SatlensError, UserError
from satlens.hf import MODELS
from satlens.training.data import DataConfig, build_data
from satlens.training.inputs import WindowOrder
from satlens.training.loop import train
from satlens.training.recipe import Recipe
from satlens.training.save import save_model
from satlens.training.state import drop_unfinished, latest_state, load_state, save_state

MODEL = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "intermediate_size": 48,
    "qk_norm": True,
    "tie_word_embeddings": True,
}
STEPS = 12


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """About 250 training windows of 32 tokens, and 20 held out."""
    folder = tmp_path_factory.mktemp("data")
    source = write_texts(folder, 120)
    config = DataConfig(sources=(str(source),), out=folder / "data", vocab_size=340, val_fraction=0.1)
    return build_data(config)


def recipe(data: Path, out: Path, **changes: Any) -> Recipe:
    """Twelve steps of two micro-steps of two windows."""
    given = {
        "arch": "SATFormer",
        "model": MODEL,
        "data": data,
        "out": out,
        "max_tokens": STEPS * 2 * 2 * 32,
        "seq_length": 32,
        "batch_size": 2,
        "accumulation": 2,
        "lr": 1e-2,
        "warmup_ratio": 0.2,
        "precision": "fp32",
        "save_interval": 5,
        "eval_interval": 5,
        "eval_windows": 7,
        "snapshots": 4,
        "log_interval": 1,
    }
    return Recipe(**{**given, **changes})


def weights(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")


def lines(out: Path, timed: bool = False) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    return rows if timed else [{k: v for k, v in row.items() if k != "tokens_per_second"} for row in rows]


def contents(out: Path) -> dict[str, bytes]:
    """Every file that must not depend on when the run was interrupted."""
    timed = {"log.jsonl", "progress.json", "satlens.json"}
    return {
        str(p.relative_to(out)): p.read_bytes() for p in out.rglob("*") if p.is_file() and p.name not in timed
    }


@pytest.fixture(scope="module")
def finished(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nobody interrupted."""
    out = tmp_path_factory.mktemp("runs") / "whole"
    train(recipe(data, out))
    return out


# --- the mathematics ---


def plain_adamw(data: Path, arch: str, steps: int) -> dict[str, Tensor]:
    """The same recipe as a loop over tensors: no accelerate, no torch.optim, no cross_entropy, no scheduler."""
    ids = np.fromfile(data / "train.bin", dtype="<u2").astype(np.int64)
    windows = torch.from_numpy(ids[: (len(ids) - 1) // 32 * 32]).reshape(-1, 32)
    order = np.random.default_rng(42).permutation(len(windows))
    torch.manual_seed(42)
    tokenizer = AutoTokenizer.from_pretrained(data / "tokenizer")
    model: nn.Module = MODELS[arch](
        MODELS[arch].config_class(**MODEL, vocab_size=len(tokenizer), max_position_embeddings=32)
    ).train()
    parameters = dict(model.named_parameters())
    first = {name: torch.zeros_like(p) for name, p in parameters.items()}
    second = {name: torch.zeros_like(p) for name, p in parameters.items()}
    for step in range(steps):
        batch = windows[order[step * 4 : step * 4 + 4]]
        log_p = model(batch).logits[:, :-1].log_softmax(-1)
        loss = -log_p.gather(-1, batch[:, 1:, None]).mean()
        grads = dict(zip(parameters, torch.autograd.grad(loss, list(parameters.values())), strict=True))
        norm = math.sqrt(sum(float(g.double().square().sum()) for g in grads.values()))
        rate = (
            1e-2 * (step + 1) / 2 if step < 2 else 1e-3 + 9e-3 * (1 + math.cos(math.pi * (step - 2) / 10)) / 2
        )
        with torch.no_grad():
            for name, p in parameters.items():
                g = grads[name] * min(1.0, 1.0 / norm)
                first[name] = 0.9 * first[name] + 0.1 * g
                second[name] = 0.95 * second[name] + 0.05 * g * g
                unbiased = second[name] / (1 - 0.95 ** (step + 1))
                p -= rate * 0.1 * p
                p -= rate * first[name] / (1 - 0.9 ** (step + 1)) / (unbiased.sqrt() + 1e-8)
    return {name: p.detach() for name, p in parameters.items()}


@pytest.mark.parametrize("arch", list(MODELS))
def test_three_steps_equal_adamw_written_out(arch: str, data: Path, tmp_path: Path) -> None:
    stopped = recipe(data, tmp_path / arch, arch=arch, snapshots=4)  # keeps 0, 1, 3 and 12 finished steps
    train(stopped)
    assert sorted(p.name[-2:] for p in (tmp_path / arch / "snapshots").iterdir()) == ["00", "01", "03", "12"]
    # weights that start at 0 give gradients near Adam's epsilon, where rounding decides part of a step (of 1e-2)
    bound = 5e-5 if arch in ("muddformer", "dhc") else 2e-6
    for steps in (0, 1, 3):
        expected = plain_adamw(data, arch, steps)
        for name, tensor in weights(tmp_path / arch / "snapshots" / f"step-{steps:08d}").items():
            torch.testing.assert_close(tensor, expected[name], rtol=0, atol=bound)


def test_the_logged_loss_is_the_mean_nll_of_the_windows_of_that_step(data: Path, finished: Path) -> None:
    model = load_model(finished / "snapshots" / "step-00000003")
    windows = np.fromfile(data / "train.bin", dtype="<u2").astype(np.int64)
    count = (len(windows) - 1) // 32
    order = np.random.default_rng(42).permutation(count)
    batch = torch.from_numpy(windows[: count * 32].reshape(count, 32)[order[12:16]])
    with torch.no_grad():
        log_p = model(batch).logits.double().log_softmax(-1)
    nll = float(-log_p[:, :-1].gather(-1, batch[:, 1:, None]).mean())
    logged = [row["loss"] for row in lines(finished) if row["step"] == 4 and "loss" in row]
    assert logged == pytest.approx([nll], abs=1e-5)


def test_held_out_loss_is_the_mean_nll_of_the_first_held_out_windows(data: Path, finished: Path) -> None:
    model = load_model(finished / "final")
    ids = np.fromfile(data / "val.bin", dtype="<u2").astype(np.int64)
    batch = torch.from_numpy(ids[: 6 * 32]).reshape(6, 32)  # of 7 windows, 3 whole batches of 2
    with torch.no_grad():
        log_p = model(batch).logits.double().log_softmax(-1)
    nll = float(-log_p[:, :-1].gather(-1, batch[:, 1:, None]).mean())
    last = lines(finished)[-1]
    assert last["step"] == STEPS
    assert last["val_loss"] == pytest.approx(nll, abs=1e-5)
    assert last["val_perplexity"] == pytest.approx(math.exp(nll), rel=1e-4)


def test_two_micro_steps_of_two_equal_one_step_of_four(data: Path, finished: Path, tmp_path: Path) -> None:
    train(recipe(data, tmp_path / "out", batch_size=4, accumulation=1))
    one, two = weights(tmp_path / "out" / "final"), weights(finished / "final")
    for name in two:
        torch.testing.assert_close(one[name], two[name], rtol=0, atol=1e-4)
    losses = [[row["loss"] for row in lines(out) if "loss" in row] for out in (tmp_path / "out", finished)]
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)


def test_loss_falls_on_a_small_text(data: Path, tmp_path: Path) -> None:
    train(
        recipe(
            data, tmp_path / "out", max_tokens=40 * 128, precision="bf16", model={**MODEL, "hidden_size": 64}
        )
    )
    losses = [row["loss"] for row in lines(tmp_path / "out") if "loss" in row]
    assert losses[0] == pytest.approx(math.log(340), abs=0.2)  # an untrained model knows nothing
    assert losses[-1] < losses[0] - 1.5


def test_bf16_keeps_float32_master_weights_and_moments(data: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    train(recipe(data, out, precision="bf16", save_dtype="bfloat16"))
    state = latest_state(out)
    assert state is not None and state.name == "state-00000012"
    for name in ("weights", "moments"):
        assert {t.dtype for t in load_file(state / f"{name}.safetensors").values()} == {torch.float32}
    master, final = load_file(state / "weights.safetensors"), weights(out / "final")
    assert any(not torch.equal(t, t.bfloat16().float()) for t in master.values())
    for name, tensor in final.items():
        assert torch.equal(tensor, master[f"net.{name}"].bfloat16())


# --- the data order ---


@pytest.mark.parametrize("world, accumulation", [(1, 1), (2, 1), (1, 3), (4, 2)])
def test_a_step_sees_the_same_windows_however_it_is_shared(world: int, accumulation: int) -> None:
    per = 24 // world // accumulation
    expected = np.concatenate([np.random.default_rng(7 + epoch).permutation(50) for epoch in range(3)])
    for step in range(6):  # 144 windows: into the third epoch
        seen = [
            WindowOrder(7, 50).rows(((step * accumulation + micro) * world + rank) * per, per)
            for micro in range(accumulation)
            for rank in range(world)
        ]
        assert np.concatenate(seen).tolist() == expected[step * 24 : step * 24 + 24].tolist()


# --- interruption ---

KILLED = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, {tests!r})
import torch
torch.set_num_threads(1)
import satlens.training.loop as loop_module
from test_training import recipe
whole, done = loop_module._Run._step, []
def step(self, number):
    if number == 8:
        os.kill(os.getpid(), signal.SIGKILL)
    return whole(self, number)
loop_module._Run._step = step
loop_module.train(recipe(Path({data!r}), Path({out!r})))
"""


def test_a_run_killed_half_way_ends_in_the_same_bytes(data: Path, finished: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    code = KILLED.format(tests=str(Path(__file__).parent), data=str(data), out=str(out))
    killed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    state = latest_state(out)
    assert state is not None and state.name == "state-00000005"
    assert lines(out)[-1]["step"] == 8  # three steps more than the state knows
    with (out / "log.jsonl").open("a") as log:
        log.write('{"step": 9, "lo')  # a line cut short
    torch.manual_seed(999)  # the resumed run must not care
    train(recipe(data, out))
    assert contents(out) == contents(finished)
    assert lines(out) == lines(finished)
    facts = [json.loads((folder / "final" / "satlens.json").read_text()) for folder in (out, finished)]
    assert [fact.pop("seconds") > 0 for fact in facts] == [True, True] and facts[0] == facts[1]


def test_a_finished_run_started_again_changes_nothing(data: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    train(recipe(data, out))
    before, log = contents(out), lines(out, timed=True)
    train(recipe(data, out))
    assert contents(out) == before and lines(out, timed=True) == log


def test_the_state_restores_the_random_numbers(data: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    train(recipe(data, out))
    after = torch.rand(4)
    train(recipe(data, out))  # nothing left to do: only the state is read
    assert torch.equal(torch.rand(4), after)


def test_another_recipe_is_refused_with_the_differences(data: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    train(recipe(data, out))
    with pytest.raises(UserError, match=r"another recipe \(lr: was 0.01, now 0.02; seed: was 42, now 1\)"):
        train(recipe(data, out, lr=0.02, seed=1))


def test_other_data_are_refused(data: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    train(recipe(data, out))
    other = build_data(
        DataConfig(
            sources=(str(write_texts(tmp_path, 90)),), out=tmp_path / "d", vocab_size=340, val_fraction=0.1
        )
    )
    with pytest.raises(UserError, match="data_sha256: was"):
        train(recipe(other, out))


def test_a_nan_loss_stops_with_the_step_and_keeps_the_state_before(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, plain = tmp_path / "out", loop_module._Run._batch
    forward = loop_module.Objective.forward
    calls: list[int] = []

    def counted(self: Any, step: int, micro: int) -> Tensor:
        calls.append(step)
        return plain(self, step, micro)

    def spoiled(self: Any, ids: Tensor, tables: Any) -> Tensor:
        return forward(self, ids, tables) * (math.nan if calls[-1] == 7 else 1.0)

    with monkeypatch.context() as patched:
        patched.setattr(loop_module._Run, "_batch", counted)
        patched.setattr(loop_module.Objective, "forward", spoiled)
        with pytest.raises(SatlensError, match=r"loss is nan .* at step 7"):
            train(recipe(data, out))
    state = latest_state(out)
    assert state is not None and state.name == "state-00000005"
    assert not (out / "final").exists()
    train(recipe(data, out))
    assert (out / "final" / "model.safetensors").exists()


def test_a_broken_gradient_stops_although_the_loss_is_a_number(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = loop_module.Objective.forward

    def spoiled(self: Any, ids: Tensor, tables: Any) -> Tensor:
        loss = forward(self, ids, tables)
        loss.register_hook(lambda grad: grad * math.inf)
        return loss

    monkeypatch.setattr(loop_module.Objective, "forward", spoiled)
    with pytest.raises(SatlensError, match=r"gradient norm (nan|inf) at step 0"):
        train(recipe(data, tmp_path / "out"))


def test_a_full_disk_leaves_the_state_before(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, save = tmp_path / "out", state_module.save_file

    def full(tensors: Any, path: Path, **kwargs: Any) -> None:
        if "state-00000010" in str(path) and path.name == "moments.safetensors":
            raise OSError(28, "No space left on device")
        save(tensors, path, **kwargs)

    with monkeypatch.context() as patched:
        patched.setattr(state_module, "save_file", full)
        with pytest.raises(
            SatlensError, match=r"state-00000010 could not be written .*No space left.*state-00000005"
        ):
            train(recipe(data, out))
    assert sorted(p.name for p in out.glob("state-*")) == ["state-00000005"]
    train(recipe(data, out))
    assert sorted(p.name for p in out.glob("state-*")) == ["state-00000012"]


def test_what_a_crash_left_half_written_is_ignored_and_removed(tmp_path: Path) -> None:
    for name in ("state-00000005", "state-00000010.part", "state-notes"):
        (tmp_path / name).mkdir()
    (tmp_path / "state-00000010.part" / "weights.safetensors").write_bytes(b"half")
    assert latest_state(tmp_path) == tmp_path / "state-00000005"
    drop_unfinished(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["state-00000005", "state-notes"]


def test_a_damaged_state_is_refused_with_advice(data: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    train(recipe(data, out))
    (out / "state-00000012" / "moments.safetensors").write_bytes(b"short")
    with pytest.raises(UserError, match=r"state-00000012 is damaged .*delete it"):
        train(recipe(data, out))


@pytest.mark.parametrize("kind", ["tied", "copy", "slice", "other"])
def test_a_head_is_written_once_and_comes_back_whatever_its_memory(kind: str, tmp_path: Path) -> None:
    def build(start: float) -> nn.Module:
        table = start + torch.arange(12.0).reshape(4, 3)
        heads = {"tied": table, "copy": table.clone(), "slice": table[:2], "other": table + 1}
        module = nn.ModuleDict(
            {"model": nn.ModuleDict({"embeddings": nn.Embedding(4, 3)}), "lm_head": nn.Linear(3, 4)}
        )
        module["model"]["embeddings"].weight = nn.Parameter(table)
        head = module["model"]["embeddings"].weight if kind == "tied" else nn.Parameter(heads[kind])
        module["lm_head"].weight, module["lm_head"].bias = head, nn.Parameter(torch.empty(0))
        return module

    module, fresh = build(0.0), build(5.0)
    save_state(tmp_path, module, torch.optim.AdamW(module.parameters()), {"step": 1, "recipe": {}}, True)
    written = load_file(tmp_path / "state-00000001" / "weights.safetensors")
    assert ("lm_head.weight" in written) == (kind in ("slice", "other"))
    assert (
        load_state(tmp_path / "state-00000001", fresh, torch.optim.AdamW(fresh.parameters()), {})["step"] == 1
    )
    for name, tensor in module.state_dict().items():
        assert torch.equal(fresh.state_dict()[name], tensor)


def test_a_tied_head_that_was_trained_apart_is_not_left_out(tmp_path: Path, make_model: Any) -> None:
    model = make_model()
    torn = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    torn["lm_head.weight"] += 1
    with pytest.raises(SatlensError, match="trained apart"):
        save_model(model, torn, tmp_path / "final")
    assert not (tmp_path / "final").exists()


# --- what comes out, and what is refused ---


def test_the_final_folder_opens_with_its_tokenizer_and_facts(data: Path, finished: Path) -> None:
    final = finished / "final"
    model = load_model(final)
    tokenizer = AutoTokenizer.from_pretrained(final)
    assert model.config.vocab_size == len(tokenizer) and model.config.eos_token_id == tokenizer.eos_token_id
    assert "lm_head.weight" not in weights(final)
    facts, manifest = (json.loads(path.read_text()) for path in (final / "satlens.json", data / "data.json"))
    assert facts["layout"] == {"kind": "stream", "bos": False, "eos": True}
    assert facts["tokenizer_sha256"] == manifest["tokenizer_sha256"]
    assert (facts["steps"], facts["tokens_seen"]) == (STEPS, STEPS * 128)
    state = load_file(finished / "state-00000012" / "weights.safetensors")
    for name, tensor in model.state_dict().items():
        assert torch.equal(
            tensor, state[f"net.{name}" if name != "lm_head.weight" else "net.model.embeddings.weight"]
        )


def test_an_untied_head_is_trained_saved_and_resumed(data: Path, tmp_path: Path) -> None:
    given = recipe(data, tmp_path / "out", arch="transformer", model={**MODEL, "tie_word_embeddings": False})
    train(given)
    before = weights(tmp_path / "out" / "final")
    assert not torch.equal(before["lm_head.weight"], before["model.embeddings.weight"])
    train(given)
    assert all(
        torch.equal(tensor, before[name]) for name, tensor in weights(tmp_path / "out" / "final").items()
    )


REFUSED = [
    (
        {"max_tokens": 10**7},
        r"10,000,000 tokens need 312,500 windows of 32, but the data hold \d+ and epochs is 1",
    ),
    ({"max_tokens": 100}, "max_tokens 100 is less than one step of 128"),
    ({"arch": "mamba"}, "unknown arch 'mamba'; known: transformer, SATFormer, ResFormer"),
    ({"model": {**MODEL, "num_head": 3}}, "fields that SATFormer does not know: num_head"),
    ({"model": {**MODEL, "num_heads": 5}}, "5 heads do not divide hidden_size 32"),
    ({"model": {**MODEL, "qk_norm": "yes"}}, "the model section is wrong: .*qk_norm"),
    ({"model": {**MODEL, "vocab_size": 300}}, "vocab_size 300 is below the tokenizer's 340"),
    ({"seq_length": 9000, "max_tokens": 40000}, "less than one window of 9000"),
]


@pytest.mark.parametrize(
    "changes, words", REFUSED, ids=lambda case: None if isinstance(case, str) else str(list(case))
)
def test_a_run_that_cannot_work_is_refused(changes: Any, words: str, data: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=words):
        train(recipe(data, tmp_path / "out", **changes))
    assert not (tmp_path / "out").exists()


def test_a_second_epoch_is_allowed_when_asked_for(data: Path, tmp_path: Path) -> None:
    windows = (np.fromfile(data / "train.bin", dtype="<u2").size - 1) // 32
    long = {
        "max_tokens": (windows + 8) * 32,
        "batch_size": 8,
        "accumulation": 1,
        "eval_windows": 0,
        "snapshots": 0,
    }
    with pytest.raises(UserError, match="raise epochs"):
        train(recipe(data, tmp_path / "one", **long))
    train(recipe(data, tmp_path / "two", **long, epochs=2))
    assert not any("val_loss" in row for row in lines(tmp_path / "two"))
    assert not (tmp_path / "two" / "snapshots").exists()


def test_a_folder_without_a_finished_build_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no finished data build at .*run `satlens data build` first"):
        train(recipe(tmp_path, tmp_path / "out"))


def test_data_changed_after_the_build_are_refused(tmp_path: Path) -> None:
    source = write_texts(tmp_path, 60)
    built = build_data(
        DataConfig(sources=(str(source),), out=tmp_path / "d", vocab_size=340, val_fraction=0.2)
    )
    with (built / "train.bin").open("ab") as file:
        file.write(bytes(2))
    with pytest.raises(UserError, match=r"train\.bin is not the file that .* describes"):
        train(recipe(built, tmp_path / "out"))


def test_no_held_out_text_is_refused_unless_nothing_is_evaluated(tmp_path: Path) -> None:
    source = write_texts(tmp_path, 60)
    built = build_data(
        DataConfig(sources=(str(source),), out=tmp_path / "d", vocab_size=340, val_fraction=0.0)
    )
    with pytest.raises(UserError, match="hold out more with --val-fraction, or set eval_windows = 0"):
        train(recipe(built, tmp_path / "out"))
    train(recipe(built, tmp_path / "out", eval_windows=0))


def test_the_command_trains_by_a_file_and_prints_the_final_folder(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = "\n".join(f"{k} = {str(v).lower()}" for k, v in MODEL.items())
    places = 'data = "nowhere"\nout = "nowhere"'
    numbers = "max_tokens = 300\nseq_length = 32\nbatch_size = 2"
    (tmp_path / "r.toml").write_text(f'arch = "transformer"\n{places}\n{numbers}\n[model]\n{model}\n')
    flags = ["--data", str(data), "--out", str(tmp_path / "out"), "--threads", "1"]
    assert main(["train", str(tmp_path / "r.toml"), *flags]) == 0
    printed = capsys.readouterr()
    assert printed.out == f"{tmp_path / 'out' / 'final'}\n"
    assert "starting: transformer, " in printed.err and "4 steps" in printed.err
    assert main(["train", str(tmp_path / "r.toml"), *flags[:-1], "0"]) == 2
    assert "threads must be at least 1" in capsys.readouterr().err
