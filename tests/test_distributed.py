"""Two processes are one process with twice the batch, whole weights or sharded, interrupted or not."""

import json
import os
import socket
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from safetensors.torch import load_file
from tiny import write_texts

from satlens.errors import UserError
from satlens.hf import MODELS
from satlens.training.data import DataConfig, build_data
from satlens.training.loop import Objective, train
from satlens.training.recipe import read_recipe
from satlens.training.state import latest_state

RECIPE = """
arch = "SATFormer"
data = "nowhere"
out = "nowhere"
max_tokens = 2304
seq_length = 32
batch_size = {batch_size}
accumulation = 2
lr = 1e-2
warmup_ratio = 0.2
precision = "fp32"
save_interval = 4
eval_interval = 3
eval_windows = {eval_windows}
snapshots = 4
log_interval = 1
[model]
hidden_size = 32
num_hidden_layers = 2
num_heads = 4
num_kv_heads = 2
intermediate_size = 48
qk_norm = true
tie_word_embeddings = true
"""

# Runs the recipe in two processes: stopped before step 6 and resumed, first whole (DDP), then sharded. Accelerate
# offers FSDP on accelerators alone, so the sharding it would do (every block, then the rest) is done here.
WORKER = """
import sys
from pathlib import Path
import torch
torch.set_num_threads(1)
import torch.distributed as dist
from accelerate import Accelerator
from torch.distributed.fsdp import fully_shard
import satlens.training.loop as loop
from satlens.training.recipe import read_recipe

class Stop(Exception):
    pass

whole, end = loop._Run._step, Accelerator.end_training
Accelerator.end_training = lambda self: None  # it closes the group that the next run needs

def stopped(self, number):
    if number == 6:
        raise Stop
    return whole(self, number)

def sharded(self, objective, optimizer):
    for block in objective.net.model.layers:
        fully_shard(block)
    fully_shard(objective)
    return objective, loop.new_optimizer(recipe, objective)

for kind in ("ddp", "fsdp"):
    recipe = read_recipe(Path(sys.argv[1]), data=sys.argv[2], out=f"{sys.argv[3]}/{kind}")
    if kind == "fsdp":
        Accelerator.prepare = sharded
    loop._Run._step = stopped
    try:
        loop.train(recipe)
    except Stop:
        dist.barrier()
    loop._Run._step = whole
    loop.train(recipe)
dist.destroy_process_group()
"""


# The rivals, two steps each: whole weights (ResFormer also with no layer that mixes, where nothing reads its lambdas),
# then sharded ones (ResFormer has scalars, which cannot be).
RIVALS = {
    "resformer": {"arch": "ResFormer"},
    "resformer_unmixed": {"arch": "ResFormer", "value_residual_last_k": 0},
    "denseformer": {"arch": "denseformer"},
    "muddformer": {"arch": "muddformer"},
    "hyperconnections": {"arch": "dhc"},
}
RIVAL_WORKER = """
import json
import sys
from pathlib import Path
import torch
torch.set_num_threads(1)
import torch.distributed as dist
from accelerate import Accelerator
from torch.distributed.fsdp import fully_shard
import satlens.training.loop as loop
from satlens.training.recipe import read_recipe

Accelerator.end_training = lambda self: None  # it closes the group that the next run needs
whole = Accelerator.prepare

def sharded(self, objective, optimizer):
    for block in objective.net.model.layers:
        fully_shard(block)
    fully_shard(objective)
    return objective, loop.new_optimizer(recipe, objective)

for name, given in json.loads(Path(sys.argv[2]).read_text()).items():
    for kind in ("ddp", "fsdp"):
        if kind == "fsdp" and name.startswith("resformer"):
            continue
        Accelerator.prepare = whole if kind == "ddp" else sharded
        recipe = read_recipe(Path(sys.argv[1]), out=f"{sys.argv[3]}/{kind}/{name}", **given)
        loop.train(recipe)
dist.destroy_process_group()
"""


def launch(*arguments: str) -> str:
    """``accelerate launch`` of two processes on this machine's CPU; returns stdout."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    command = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"]
    command += ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"]
    command += ["--main_process_ip", "127.0.0.1", "--main_process_port", port]
    alone = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([*command, *arguments], capture_output=True, text=True, env={**os.environ, **alone})
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data, a recipe for two processes (two.toml) and its equal for one (one.toml)."""
    folder = tmp_path_factory.mktemp("distributed")
    source = write_texts(folder, 120)
    build_data(DataConfig(sources=(str(source),), out=folder / "data", vocab_size=340, val_fraction=0.1))
    # six held-out windows are three batches of two, so that the last one has no partner
    (folder / "two.toml").write_text(RECIPE.format(batch_size=2, eval_windows=6))
    (folder / "one.toml").write_text(RECIPE.format(batch_size=4, eval_windows=6))
    (folder / "worker.py").write_text(WORKER)
    return folder


@pytest.fixture(scope="module")
def alone(work: Path) -> Path:
    """One process, twice the batch."""
    train(read_recipe(work / "one.toml", data=str(work / "data"), out=str(work / "one")))
    return work / "one"


@pytest.fixture(scope="module")
def launched(work: Path) -> tuple[Path, str]:
    """Two processes through the command line, never interrupted; the folder and what they printed."""
    out = work / "two"
    printed = launch(
        *("-m", "satlens.cli", "train", str(work / "two.toml")),
        *("--data", str(work / "data"), "--out", str(out), "--threads", "1"),
    )
    return out, printed


@pytest.fixture(scope="module")
def resumed(work: Path) -> Path:
    """Two processes, interrupted and resumed: ``ddp`` and ``fsdp``."""
    launch(str(work / "worker.py"), str(work / "two.toml"), str(work / "data"), str(work / "resumed"))
    return work / "resumed"


def rival_recipe(work: Path, name: str) -> dict[str, Any]:
    """Two steps of a rival, as overrides of two.toml or one.toml."""
    model = tomllib.loads((work / "two.toml").read_text())["model"]
    own = {key: value for key, value in RIVALS[name].items() if key != "arch"}
    model |= {"num_hidden_layers": 3, **own}  # of two layers a softmax over all but the first cannot learn
    given = {"arch": RIVALS[name]["arch"], "model": model, "data": str(work / "data")}
    return {**given, "max_tokens": 2 * 4 * 2 * 32, "snapshots": 2}


@pytest.fixture(scope="module")
def rivals(work: Path) -> Path:
    """Two processes for every rival: ``ddp/<name>`` and ``fsdp/<name>``."""
    (work / "rival_worker.py").write_text(RIVAL_WORKER)
    (work / "rivals.json").write_text(json.dumps({name: rival_recipe(work, name) for name in RIVALS}))
    launch(*(str(work / name) for name in ("rival_worker.py", "two.toml", "rivals.json", "rivals")))
    return work / "rivals"


def rows(out: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k != "tokens_per_second"} for line in lines]


def same_training(one: Path, other: Path, atol: float = 1e-5) -> None:
    """Weights of every snapshot, moments, losses and norms agree to float32 rounding (weights within ``atol``)."""
    state, model = latest_state(one), "model.safetensors"
    assert state is not None
    files = [
        f"{folder.relative_to(one)}/{model}" for folder in [*(one / "snapshots").iterdir(), one / "final"]
    ]
    files += [f"{state.name}/weights.safetensors", f"{state.name}/moments.safetensors"]
    for file in files:
        mine, theirs = load_file(one / file), load_file(other / file)
        assert set(mine) == set(theirs)
        for name in mine:
            torch.testing.assert_close(mine[name], theirs[name], rtol=0, atol=atol, msg=f"{file}: {name}")
    for field in ("loss", "lr", "grad_norm", "tokens", "step"):
        mine, theirs = ([row[field] for row in rows(out) if "loss" in row] for out in (one, other))
        assert mine == pytest.approx(theirs, rel=1e-4)


def test_two_processes_equal_one_with_twice_the_batch(alone: Path, launched: tuple[Path, str]) -> None:
    same_training(alone, launched[0])


def test_many_processes_print_the_result_once(launched: tuple[Path, str]) -> None:
    out, printed = launched
    assert printed == f"{out / 'final'}\n"


def test_held_out_loss_is_of_the_same_windows_for_any_number_of_processes(
    work: Path, launched: tuple[Path, str]
) -> None:
    # one process with batches of two scores the very windows that two processes share
    given = {"data": str(work / "data"), "batch_size": 2, "accumulation": 4, "out": str(work / "shared")}
    train(read_recipe(work / "two.toml", **given))
    mine, theirs = (
        [r["val_loss"] for r in rows(out) if "val_loss" in r] for out in (work / "shared", launched[0])
    )
    assert mine == pytest.approx(theirs, abs=1e-5) and len(mine) == 3


def test_two_interrupted_processes_end_in_the_same_bytes(launched: tuple[Path, str], resumed: Path) -> None:
    whole, again = launched[0], resumed / "ddp"
    for file in whole.rglob("*.safetensors"):
        assert file.read_bytes() == (again / file.relative_to(whole)).read_bytes(), file.name
    assert rows(again) == rows(whole)


def test_sharded_weights_train_save_and_resume_like_whole_ones(alone: Path, resumed: Path) -> None:
    same_training(alone, resumed / "fsdp")


@pytest.mark.parametrize("name", RIVALS)
def test_two_processes_train_a_rival_as_one_does(name: str, work: Path, rivals: Path) -> None:
    alone = work / "rivals-alone" / name
    train(read_recipe(work / "one.toml", out=str(alone), **rival_recipe(work, name)))
    start, end = (load_file(p / "model.safetensors") for p in sorted((alone / "snapshots").iterdir()))
    still = {part for part in start if torch.equal(start[part], end[part])}
    assert still == ({part for part in start if "lambda" in part} if name == "resformer_unmixed" else set())
    for kind in ("ddp", "fsdp"):
        if (rivals / kind / name).exists():
            # Adam's first steps divide a gradient by its own size, so rounding of a tiny one is a share of lr = 1e-2
            same_training(alone, rivals / kind / name, atol=1e-4)
    assert (rivals / "fsdp" / name).exists() != name.startswith("resformer")


def test_sharding_scalars_is_refused_before_anything_is_written(
    work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # what accelerate says of itself under --use_fsdp, which it offers on accelerators alone
    monkeypatch.setattr(Accelerator, "distributed_type", DistributedType.FSDP)
    monkeypatch.setattr(Accelerator, "is_fsdp2", True)
    given = {**rival_recipe(work, "resformer"), "out": str(work / "refused")}
    with pytest.raises(
        UserError, match=r"ResFormer has 3 scalar parameters \(.*lambda.*\), which FSDP cannot"
    ):
        train(read_recipe(work / "two.toml", **given))
    assert not (work / "refused").exists()


@pytest.mark.parametrize("arch", MODELS)
def test_the_blocks_that_accelerate_shards_one_by_one_are_the_models_own(arch: str, make_model: Any) -> None:
    model = make_model(arch)
    named = {type(block).__name__ for block in model.model.layers}
    assert set(Objective(model)._no_split_modules) == set(model._no_split_modules) == named


def test_a_state_of_two_processes_is_not_resumed_by_one(work: Path, launched: tuple[Path, str]) -> None:
    with pytest.raises(UserError, match="processes: was 2, now 1"):
        train(read_recipe(work / "two.toml", data=str(work / "data"), out=str(launched[0])))


def test_processes_that_do_not_know_each_other_are_refused(
    work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match="2 processes were started, but accelerate joins none"):
        train(read_recipe(work / "two.toml", data=str(work / "data"), out=str(work / "never")))
