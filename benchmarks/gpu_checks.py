"""What must be the same on a GPU: logits, loss and gradients of the six models, and the shipped pair's measurements."""

import argparse
import copy
import math
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from satlens.hf import MODELS
from satlens.training.loop import Objective
from satlens.training.preset import preset

TOLERANCES = {
    "fp32": {"logits": 1e-4, "loss": 1e-4},
    "bf16 autocast": {"logits": 4e-2, "loss": 1e-2},
    "bf16 weights": {"logits": 5e-2, "loss": 1e-2},
    "flash": {"logits": 3e-2},
    "compile": {"gradients": 1e-3, "loss": 3e-5},
    "compile, tiny": {"gradients": 1e-4, "loss": 1e-5},
    "pair": {"alpha": 1e-4, "share shut": 1e-3, "nats": 1e-4},
}
"""Logits and gradients: norm of the difference over the norm; loss and nats: nats a token. float32 sums round by their
order (1e-6 or so each); bfloat16 keeps eight bits (4e-3 a rounding) and a model rounds often: these shapes show up to
2e-2 in the logits and 1e-3 nats on a CPU. Compiled, 2e-5 of a gradient's norm was seen, 3e-6 at the tiny shapes."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The small models that are compared."""

    scale: str
    layers: int
    d_vocab: int
    rows: int
    pos: int


FULL = Shape(scale="small", layers=3, d_vocab=2048, rows=2, pos=256)
QUICK = Shape(scale="study", layers=2, d_vocab=128, rows=2, pos=32)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of the report."""

    check: str
    model: str
    found: str
    allowed: str
    verdict: str
    """``holds``, ``**fails**`` or ``skipped``."""


def compared(
    check: str, model: str, found: dict[str, float], allowed: dict[str, float], note: str = ""
) -> Row:
    """Differences against what is allowed; one that is not a number fails."""
    holds = all(found[what] <= allowed[what] for what in found)
    words = ", ".join(f"{what} {value:.1e}" for what, value in found.items())
    limits = ", ".join(f"{what} {allowed[what]:.0e}" for what in found)
    verdict = "holds" if holds else "**fails**"
    return Row(check=check, model=model, found=words + note, allowed=limits, verdict=verdict)


def guarded(check: str, model: str, measure: Callable[[], Row]) -> Row:
    """The row, or one that says what broke: a kernel that is missing must not hide the other checks."""
    try:
        return measure()
    except Exception as error:  # whatever a driver, a compiler or a kernel raises
        reason = " ".join(str(error).split())[:160] or type(error).__name__
        return Row(
            check=check,
            model=model,
            found=f"{type(error).__name__}: {reason}",
            allowed="",
            verdict="**fails**",
        )


# --- the six models ---


def small_model(arch: str, shape: Shape) -> Any:
    """A preset's model with few layers, its norms and learned coefficients moved by noise, on the CPU.

    At their start the coefficients make every architecture a Transformer, and would hide their own arithmetic.
    """
    fields = preset(shape.scale, arch)
    changes = {
        "num_hidden_layers": shape.layers,
        "vocab_size": shape.d_vocab,
        "max_position_embeddings": shape.pos,
    }
    if arch == "denseformer":  # its averages stand five layers apart
        changes |= {"dwa_period": 1, "dwa_dilation": 2}
    model_class = MODELS[fields["arch"]]
    torch.manual_seed(0)
    model = model_class(model_class.config_class(**{**fields["model"], **changes})).train()
    with torch.no_grad():
        for module in model.modules():
            if not isinstance(module, nn.Linear | nn.Embedding):
                for weight in module.parameters(recurse=False):
                    weight.add_(0.2 * torch.randn_like(weight))
    return model


def ids_for(shape: Shape, device: str) -> Tensor:
    """The same random ids everywhere."""
    rng = torch.Generator().manual_seed(0)
    return torch.randint(0, shape.d_vocab, (shape.rows, shape.pos), generator=rng).to(device)


def autocast(device: str, enabled: bool = True) -> Any:
    """bfloat16 as the trainer uses it."""
    return torch.autocast(torch.device(device).type, dtype=torch.bfloat16, enabled=enabled)


def gap(found: Tensor, truth: Tensor) -> float:
    """Norm of the difference over the norm, in float64."""
    truth = truth.detach().double().cpu()
    return float((found.detach().double().cpu() - truth).norm() / truth.norm())


def parity(args: argparse.Namespace, shape: Shape) -> Iterator[Row]:
    """Logits and loss on the device against float32 on the CPU, in three precisions."""
    for arch in args.archs:
        model = small_model(arch, shape)
        with torch.no_grad():
            truth = model(ids_for(shape, "cpu"), labels=ids_for(shape, "cpu"))
        for precision in ("fp32", "bf16 autocast", "bf16 weights"):
            yield guarded(
                precision,
                arch,
                lambda m=model, p=precision, a=arch, t=truth: _parity(m, a, p, t, args, shape),
            )


def moved(model: Any, device: str, precision: str) -> Any:
    """A copy on the device, its weights cast if the precision says so."""
    there = copy.deepcopy(model).to(device)
    return there.bfloat16() if precision == "bf16 weights" else there


@torch.no_grad()
def _parity(model: Any, arch: str, precision: str, truth: Any, args: argparse.Namespace, shape: Shape) -> Row:
    there = moved(model, args.device, precision)
    ids = ids_for(shape, args.device)
    with autocast(args.device, precision == "bf16 autocast"):
        out = there(ids, labels=ids)
    found = {"logits": gap(out.logits, truth.logits), "loss": abs(float(out.loss) - float(truth.loss))}
    note = " (the same arithmetic)" if precision == "fp32" and args.device == "cpu" else ""
    return compared(precision, arch, found, TOLERANCES[precision], note)


class AttentionKernels(TorchDispatchMode):
    """Notes which fused attention kernels run while it is entered; unfused attention leaves none."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "_scaled_dot_product_" in func.__name__:
            self.names.add(func.__name__.removeprefix("_scaled_dot_product_").split(".")[0])
        return func(*args, **(kwargs or {}))


def flash(args: argparse.Namespace, shape: Shape) -> Iterator[Row]:
    """Flash attention runs for every model in bfloat16, equals unfused attention, and what runs unasked is fused."""
    for arch in args.archs:
        yield guarded("flash", arch, lambda arch=arch: _flash(arch, args, shape))


@torch.no_grad()
def _flash(arch: str, args: argparse.Namespace, shape: Shape) -> Row:
    model, ids = small_model(arch, shape).to(args.device), ids_for(shape, args.device)
    with autocast(args.device):
        with AttentionKernels() as seen:
            default = model(ids).logits
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):  # raises where the kernel cannot serve
            fused = model(ids).logits
        with sdpa_kernel(SDPBackend.MATH):
            plain = model(ids).logits
    found = {"logits": max(gap(fused, default), gap(fused, plain))}
    ran = ", ".join(sorted(seen.names)) or "nothing fused"
    if "flash" not in ran and "cudnn" not in ran:
        found["logits"] = math.nan
    return compared("flash", arch, found, TOLERANCES["flash"], f"; by default {ran}")


def compiled(args: argparse.Namespace, shape: Shape) -> Iterator[Row]:
    """The trainer's loss and every gradient, compiled against eager, in float32."""
    for arch in args.archs:
        yield guarded("compile", arch, lambda arch=arch: _compiled(arch, args, shape))


def _compiled(arch: str, args: argparse.Namespace, shape: Shape) -> Row:
    objective, ids = Objective(small_model(arch, shape)).to(args.device), ids_for(shape, args.device)
    rotary = objective.net.model.rotary(torch.arange(shape.pos, device=args.device)[None])
    torch._dynamo.reset()
    began, found = time.perf_counter(), []
    for loss_of in (objective, torch.compile(objective, dynamic=False, backend=args.backend)):
        loss = loss_of(ids, rotary)
        found.append((float(loss.detach()), torch.autograd.grad(loss, list(objective.parameters()))))
    (loss, gradients), (other, others) = found
    worst = max(gap(mine, truth) for mine, truth in zip(others, gradients, strict=True))
    note = f"; {args.backend}, {time.perf_counter() - began:.0f} s"
    return compared(
        "compile", arch, {"gradients": worst, "loss": abs(loss - other)}, TOLERANCES["compile"], note
    )


# --- the shipped pair ---


def pair(args: argparse.Namespace, shape: Shape) -> Iterator[Row]:
    """`satlens gates`, `ablate` and `lens` of the shipped pair on the device and on the CPU (on a CPU: with rows two at
    a time and eight at a time)."""
    tokens = 8000 if args.quick else 20_000
    for verb in ("gates", "ablate", "lens"):
        yield guarded(f"satlens {verb}", "reference pair", lambda verb=verb: _pair(verb, tokens, args))


def _pair(verb: str, tokens: int, args: argparse.Namespace) -> Row:
    from analyses import ablate, gates, lens
    from satlens.reading import Reading
    from satlens.run import open_run

    module: Any = {"gates": gates, "ablate": ablate, "lens": lens}[verb]
    own = {"ablate": {"kinds": ("zero", "resample")}, "lens": {"baseline": "reference-transformer"}}.get(
        verb, {}
    )
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for device, rows in (("cpu", 8), (args.device, 2 if args.device == "cpu" else 8)):
            where = {"device": device, "batch_size": rows, "runs": Path(folder)}
            reading = Reading(tokens=tokens, resamples=100, **where)
            found.append(open_run(module.run(module.Config(reading=reading, **own))).tables)
        columns = {
            "gates": {"alpha": ("gate_heatmap", "mean"), "share shut": ("gate_heatmap", "zero_fraction")},
            "ablate": {"nats": ("ablation", "delta_nll")},
            "lens": {"nats": ("lens", "nll")},
        }[verb]
        gaps = {}
        for what, (name, column) in columns.items():
            here, there = (tables[name][column].to_numpy() for tables in found)
            gaps[what] = float(abs(here - there).max())
    return compared(f"satlens {verb}", "reference pair", gaps, TOLERANCES["pair"], f"; {tokens:,} tokens")
