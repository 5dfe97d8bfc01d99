"""What both bench verbs do: check the flags, time the models in turn, write a run with a table and a figure."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from satlens.errors import SatlensError, UserError
from satlens.log import progress

ARCHITECTURES = ("transformer", "resformer", "satformer", "denseformer", "muddformer", "hyperconnections")
UNITS = {
    "seconds": "seconds of a step, median",
    "tokens_per_second": "tokens",
    "peak_mib": "MiB over the process before the model",
    "time_ratio": "to the first model, within a round",
    "saved_mib": "MiB kept for the backward pass, parameters left out",
    "memory_ratio": "to the first model, within a round",
    "saved_ratio": "to the first model",
}


@dataclass(frozen=True, kw_only=True)
class Config:
    """Flags of `satlens bench train` and `satlens bench forward`."""

    preset: str = "reference"
    """Scale of the models: small, medium, large, thin, xl (the paper's), reference or study (CPU sizes)."""
    archs: tuple[str, ...] = ARCHITECTURES
    """Models to time; ratios are to the first."""
    batch_size: int = 4
    """Rows of a step."""
    seq_length: int | None = None
    """Tokens in a row; left out, the preset's."""
    rounds: int = 5
    """Times that every model is started; more rounds, steadier ratios."""
    steps: int = 5
    """Timed steps of a process, after the warm-up."""
    warmup: int = 2
    """Steps before the timed ones."""
    d_vocab: int = 8192
    """Token ids; the paper's models have 32000."""
    device: str = "cpu"
    """Where the models run: cpu, cuda, cuda:1."""
    precision: Literal["bf16", "fp32"] = "fp32"
    """bf16 autocasts the forward pass."""
    compile: bool = False
    """Use torch.compile."""
    threads: int = 1
    """CPU threads."""
    runs: Path = Path("runs")
    """Folder that finished runs go to."""

    def __post_init__(self) -> None:
        for name in ("batch_size", "rounds", "steps", "threads", "d_vocab"):
            if getattr(self, name) < 1:
                raise UserError(f"{name.replace('_', '-')} must be at least 1, got {getattr(self, name)}")
        if self.seq_length is not None and self.seq_length < 2:
            raise UserError(f"a row of {self.seq_length} tokens predicts nothing: use at least 2")
        if not self.archs or len(set(self.archs)) < len(self.archs):
            raise UserError("name every one of --archs once")


def bench(what: str, config: Config, argv: Sequence[str]) -> Path:
    """Time the models; returns the run directory.

    Raises:
        UserError: an unknown preset or architecture, or a device that is not there.
        SatlensError: no model could be timed.
    """
    import torch

    from satlens.efficiency.alternate import alternate, table
    from satlens.efficiency.child import Job
    from satlens.efficiency.figures import FIGURES
    from satlens.run import start_run
    from satlens.training.preset import preset

    if config.device.startswith("cuda") and not torch.cuda.is_available():
        raise UserError(f"device {config.device} is not there: this torch sees no GPU")
    fields = {arch: preset(config.preset, arch) for arch in config.archs}
    jobs = {
        arch: Job(
            what=what,
            scale=config.preset,
            arch=arch,
            batch_size=config.batch_size,
            seq_length=config.seq_length or fields[arch]["seq_length"],
            steps=config.steps,
            warmup=config.warmup,
            d_vocab=config.d_vocab,
            device=config.device,
            precision=config.precision,
            compile=config.compile,
            threads=config.threads,
        )
        for arch in config.archs
    }
    verb = f"bench-{what}"
    out = start_run(config.runs, verb, config, list(argv))
    with progress() as bar:
        task = bar.add_task(f"{what}: {len(jobs)} models in turn", total=config.rounds * len(jobs))
        found = alternate(jobs, config.rounds, lambda name: bar.update(task, advance=1))
    clock = "seconds" if config.device.startswith("cuda") else "cpu_seconds"
    made = table(found, jobs, clock)
    measured = made[made["status"] == "measured"]
    if measured.empty:
        raise SatlensError(f"no model could be timed: {made.iloc[0]['reason']}; take a smaller --batch-size")
    out.table("efficiency", made, {name: unit for name, unit in UNITS.items() if name in made})
    first = next(iter(jobs.values()))
    device = torch.cuda.get_device_name() if config.device.startswith("cuda") else "CPU"
    info = {
        "what": what,
        "clock": "wall" if clock == "seconds" else "CPU",
        "device": device,
        "preset": config.preset,
        "batch": f"{first.batch_size} x {first.seq_length}",
        "precision": config.precision,
        "compile": config.compile,
        "rounds": config.rounds,
        "base": config.archs[0],
    }
    for name, figure in FIGURES.items():
        out.figure(name, figure({"efficiency": measured}, info))
    numbers = {
        f"{row['model']}_{word}": row[f"{word}_ratio"]
        for row in measured.to_dict("records")
        for word in ("time", "memory", "saved")
        if row.get(f"{word}_ratio", math.nan) > 0
    }
    failed = made[made["status"] == "failed"]
    return out.finish(
        {**info, **numbers, "failed": dict(zip(failed["model"], failed["reason"], strict=True))}
    )
