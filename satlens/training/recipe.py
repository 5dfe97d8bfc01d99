"""What a training run is told: model, data, schedule and bookkeeping, read from a TOML file."""

import dataclasses
import math
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from satlens.errors import UserError

# Limits of the numbers: field -> (lowest, highest, is the lowest itself allowed).
_LIMITS: dict[str, tuple[float, float, bool]] = {
    **dict.fromkeys(
        ("max_tokens", "batch_size", "accumulation", "epochs", "query_blocks"), (1, math.inf, True)
    ),
    **dict.fromkeys(("eval_interval", "save_interval", "log_interval"), (1, math.inf, True)),
    "seq_length": (2, math.inf, True),
    **dict.fromkeys(("weight_decay", "seed", "snapshots", "eval_windows"), (0, math.inf, True)),
    **dict.fromkeys(("lr", "grad_clip"), (0, math.inf, False)),
    **dict.fromkeys(("min_lr_ratio", "warmup_ratio", "beta1", "beta2"), (0, 1, True)),
}


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """The paper's recipe (spec section 10): AdamW, linear warm-up, cosine to a tenth, clip 1, weight decay 0.1."""

    arch: str
    """Model type: transformer, SATFormer, ResFormer, denseformer, muddformer or dhc (HyperConnections)."""
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
    """Held-out windows per evaluation; 0 never evaluates."""
    save_interval: int = 500
    """Optimizer steps between resumable states."""
    snapshots: int = 12
    """Log-spaced intermediate checkpoints kept for development studies; 0 keeps none."""
    save_dtype: Literal["bfloat16", "float32"] = "float32"
    """Dtype of the final weights."""
    log_interval: int = 20
    """Optimizer steps between log lines."""

    def __post_init__(self) -> None:
        for spec in dataclasses.fields(self):
            _check_type(spec.name, getattr(self, spec.name), spec.type)
        for name, (low, high, closed) in _LIMITS.items():
            value = getattr(self, name)
            if not (low <= value <= high and math.isfinite(value)) or (value == low and not closed):
                words = f"at least {low}" if closed else f"above {low}"
                limit = "" if high == math.inf else f" and at most {high}"
                raise UserError(f"{name} must be {words}{limit}, got {value}")

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
        """Log-spaced numbers of finished steps: at most ``snapshots`` of them, the last and 0 among them."""
        total = self.max_steps(world)
        if self.snapshots < 3:
            return set([total, 0][: self.snapshots])
        gaps = self.snapshots - 2
        return {0, *(round(total ** (i / gaps)) for i in range(gaps + 1))}

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready, without folders: what must agree for a resumed run to be the same run."""
        plain = dataclasses.asdict(self)
        return {key: value for key, value in plain.items() if key not in ("data", "out")}


def read_recipe(path: Path, **overrides: Any) -> Recipe:
    """A recipe from TOML; folders in it are relative to the working directory.

    Raises:
        UserError: no such file, bad TOML, unknown or missing fields, or a value that makes no sense.
    """
    if not path.is_file():
        raise UserError(f"no recipe at {path}")
    try:
        given = {**tomllib.loads(path.read_text(encoding="utf-8")), **overrides}
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not valid TOML: {error}") from error
    return new_recipe(given, str(path))


def new_recipe(given: dict[str, Any], path: str) -> Recipe:
    """A recipe from plain fields; ``path`` says in messages where they come from.

    Raises:
        UserError: unknown or missing fields, or a value that makes no sense.
    """
    specs = {spec.name: spec for spec in dataclasses.fields(Recipe)}
    if unknown := sorted(set(given) - set(specs)):
        raise UserError(f"{path}: unknown fields {', '.join(unknown)}; known: {', '.join(sorted(specs))}")
    needed = [n for n, s in specs.items() if s.default is s.default_factory is dataclasses.MISSING]
    if missing := [name for name in needed if name not in given]:
        raise UserError(f"{path}: missing fields {', '.join(missing)}")
    for folder in ("data", "out"):
        _check_type(folder, given[folder], str)
    try:
        return Recipe(**{**given, "data": Path(given["data"]), "out": Path(given["out"])})
    except UserError as error:
        raise UserError(f"{path}: {error}") from error


def _check_type(name: str, value: Any, kind: Any) -> None:
    """TOML has types of its own, and a string where a number belongs would fail far from here."""
    if get_origin(kind) is Literal:
        if value not in get_args(kind):
            raise UserError(f"{name} must be one of {', '.join(get_args(kind))}, got {value!r}")
        return
    plain = get_origin(kind) or kind
    wanted = (int, float) if plain is float else plain
    if not isinstance(value, wanted) or (isinstance(value, bool) and plain is not bool):
        raise UserError(f"{name} must be of type {plain.__name__}, got {value!r}")
