"""What a training run is told: model, data, schedule and bookkeeping, read from a TOML file."""

import dataclasses
import math
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from satlens.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """The paper's recipe (spec section 10): AdamW, linear warm-up, cosine to a tenth, clip 1, weight decay 0.1."""

    arch: str
    """Model type: transformer or SATFormer."""
    model: dict[str, Any] = field(default_factory=dict)
    """Config fields of the model, under their official names."""
    data: Path
    """Folder made by `satlens data build`."""
    out: Path
    """Folder for checkpoints, logs and the final model."""
    max_tokens: int
    """Training tokens in all."""
    seq_length: int = 4096
    """Tokens in a window (the model's context)."""
    batch_size: int = 16
    """Windows per process and micro-step."""
    accumulation: int = 1
    """Micro-steps per optimizer step."""
    lr: float = 1e-3
    """Peak learning rate."""
    min_lr_ratio: float = 0.1
    """Final learning rate as a share of the peak."""
    warmup_ratio: float = 0.01
    """Share of the tokens spent warming up."""
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """Shape of the decay after warm-up."""
    weight_decay: float = 0.1
    """Applied to every parameter, as the official recipe does."""
    beta1: float = 0.9
    """Adam's first decay rate."""
    beta2: float = 0.95
    """Adam's second decay rate."""
    grad_clip: float = 1.0
    """Largest global gradient norm."""
    seed: int = 42
    """Decides weights and data order."""
    precision: Literal["bf16", "fp32"] = "bf16"
    """bf16 autocasts the forward pass; master weights and moments stay float32."""
    compile: bool = False
    """Use torch.compile (slow to start, faster to run)."""
    query_blocks: int = 1
    """Above 1: attention in query blocks instead of the fused kernel (faster when compiled on CPU)."""
    epochs: int = 1
    """Passes over the data that are allowed before running out is an error."""
    eval_interval: int = 500
    """Optimizer steps between evaluations on held-out windows."""
    eval_windows: int = 100
    """Held-out windows per evaluation."""
    save_interval: int = 500
    """Optimizer steps between resumable states."""
    snapshots: int = 12
    """Log-spaced intermediate checkpoints kept for development studies."""
    save_dtype: Literal["bfloat16", "float32"] = "float32"
    """Dtype of the final weights."""
    log_interval: int = 20
    """Optimizer steps between log lines."""

    def __post_init__(self) -> None:
        positive = ("max_tokens", "seq_length", "batch_size", "accumulation", "epochs", "save_interval")
        for name in positive:
            if getattr(self, name) < 1:
                raise UserError(f"{name} must be at least 1, got {getattr(self, name)}")

    def tokens_per_step(self, world: int) -> int:
        """Tokens that one optimizer step sees over all processes."""
        return self.batch_size * self.seq_length * self.accumulation * world

    def max_steps(self, world: int) -> int:
        """Optimizer steps in all."""
        return self.max_tokens // self.tokens_per_step(world)

    def learning_rate(self, step: int, world: int) -> float:
        """The rate of 0-based ``step`` (spec section 10): warm-up, then decay to ``min_lr_ratio``."""
        total = self.max_steps(world)
        warm = int(self.warmup_ratio * self.max_tokens) // self.tokens_per_step(world)
        low = self.lr * self.min_lr_ratio
        if step < warm:
            return self.lr * (step + 1) / warm
        if step >= total:
            return low
        progress = (step - warm) / (total - warm)
        shapes = {"cosine": (1 + math.cos(math.pi * progress)) / 2, "linear": 1 - progress, "constant": 1.0}
        return low + shapes[self.schedule] * (self.lr - low)

    def snapshot_steps(self, world: int) -> set[int]:
        """Log-spaced numbers of finished steps, 0 and the last included."""
        total = self.max_steps(world)
        if not self.snapshots:
            return set()
        ratio = max(self.snapshots - 2, 1)
        return {0, *(round(total ** (i / ratio)) for i in range(ratio + 1))}

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready, without folders: what must agree for a resumed run to be the same run."""
        plain = dataclasses.asdict(self)
        return {key: value for key, value in plain.items() if key not in ("data", "out")}


def read_recipe(path: Path, **overrides: Any) -> Recipe:
    """A recipe from TOML; folders in it are relative to the working directory.

    Raises:
        UserError: no such file, bad TOML, unknown or missing fields, or a value that makes no sense.
    """
    if not path.exists():
        raise UserError(f"no recipe at {path}")
    try:
        given = {**tomllib.loads(path.read_text(encoding="utf-8")), **overrides}
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{path} is not valid TOML: {error}") from error
    fields = {f.name: f for f in dataclasses.fields(Recipe)}
    if unknown := sorted(set(given) - set(fields)):
        raise UserError(f"{path}: unknown fields {', '.join(unknown)}; known: {', '.join(sorted(fields))}")
    missing = [n for n in ("arch", "data", "out", "max_tokens") if n not in given]
    if missing:
        raise UserError(f"{path}: missing fields {', '.join(missing)}")
    return Recipe(**{**given, "data": Path(given["data"]), "out": Path(given["out"])})
