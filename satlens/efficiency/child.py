"""Time one model in a process of its own: ``python -m satlens.efficiency.child JSON`` prints JSON."""

import json
import resource
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F

from satlens.hf import MODELS
from satlens.training.memory import is_out_of_memory
from satlens.training.preset import preset


@dataclass(frozen=True, kw_only=True)
class Job:
    """One timing."""

    what: str
    """``train`` (forward, backward, clip, AdamW) or ``forward`` (logits of every position, no gradients)."""
    scale: str
    arch: str
    batch_size: int
    seq_length: int
    steps: int
    warmup: int
    d_vocab: int
    device: str
    precision: str
    """``bf16`` autocasts (weights stay float32), ``fp32`` does not."""
    compile: bool
    threads: int


def main() -> None:
    """Read a job, time it, print what was found. A batch that does not fit is an answer, not a crash."""
    job = Job(**json.loads(sys.argv[1]))
    try:
        found = timed(job)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        found = {"failed": f"a batch of {job.batch_size} x {job.seq_length} does not fit in memory"}
    print(json.dumps(found))


def timed(job: Job) -> dict[str, Any]:
    """Median seconds of a step (wall and CPU), and peak memory over what the process held before the model."""
    torch.set_num_threads(job.threads)
    cuda = job.device.startswith("cuda")
    before = _peak(cuda, job.device)
    model = build(job)
    step = train_step(job, model) if job.what == "train" else forward_step(job, model)
    wall, cpu = [], []
    for number in range(job.warmup + job.steps):
        began = time.perf_counter(), time.process_time()
        step()
        if cuda:
            torch.cuda.synchronize(job.device)
        if number >= job.warmup:
            wall.append(time.perf_counter() - began[0])
            cpu.append(time.process_time() - began[1])
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "seconds": statistics.median(wall),
        "cpu_seconds": statistics.median(cpu),
        "peak_mib": _peak(cuda, job.device) - before,
        **({"saved_mib": saved_mib(job, model)} if job.what == "train" else {}),
    }


def build(job: Job) -> Any:
    """The preset's model, drawn from a fixed seed, on its device."""
    fields = preset(job.scale, job.arch)
    torch.manual_seed(0)
    config_class = MODELS[fields["arch"]].config_class
    config = config_class(**fields["model"], vocab_size=job.d_vocab, max_position_embeddings=job.seq_length)
    with torch.device(job.device):  # drawn where it will run: a billion weights take long on one CPU thread
        model: Any = MODELS[fields["arch"]](config)
    return model


def train_step(job: Job, model: Any) -> Callable[[], None]:
    """One optimizer step on random ids, as the trainer takes it."""
    model.train()
    ids = _ids(job)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True
    )
    forward = torch.compile(_loss) if job.compile else _loss

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with _autocast(job):
            loss = forward(model, ids)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return step


def saved_mib(job: Job, model: Any) -> float:
    """MiB that one forward pass keeps for its backward pass, parameters left out: exact, unlike a process's peak."""
    weights = {weight.untyped_storage().data_ptr() for weight in model.parameters()}
    kept: dict[int, int] = {}
    alive: list[torch.Tensor] = []  # memory that is given back would be counted once for two tensors

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
            alive.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor), _autocast(job):
        _loss(model, _ids(job))
    return sum(kept.values()) / 2**20


def forward_step(job: Job, model: Any) -> Callable[[], None]:
    """Logits of every position."""
    model.eval()
    ids = _ids(job)
    forward = torch.compile(_logits) if job.compile else _logits

    def step() -> None:
        with torch.no_grad(), _autocast(job):
            forward(model, ids)

    return step


def _loss(model: Any, ids: torch.Tensor) -> torch.Tensor:
    logits = model(ids, use_cache=False).logits
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())


def _logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    logits: torch.Tensor = model(ids, use_cache=False).logits
    return logits


def _ids(job: Job) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, job.d_vocab, (job.batch_size, job.seq_length), generator=generator)
    return ids.to(job.device)


def _autocast(job: Job) -> Any:
    kind = job.device.split(":")[0]
    return torch.autocast(kind, dtype=torch.bfloat16, enabled=job.precision == "bf16")


def _peak(cuda: bool, device: str) -> float:
    """MiB: what the allocator ever held on a GPU, what the process ever held on a CPU."""
    if cuda:
        return torch.cuda.max_memory_allocated(device) / 2**20
    unit = 2**20 if sys.platform == "darwin" else 2**10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit


def as_text(job: Job) -> str:
    """The job as the one argument of this process."""
    return json.dumps(asdict(job))


if __name__ == "__main__":
    main()
