"""Presets: a scale of the paper joined with an architecture, so that six models differ in nothing but themselves."""

import tomllib
from pathlib import Path
from typing import Any

from satlens.errors import UserError

FOLDER = Path(__file__).parent / "presets"


def scales() -> tuple[str, ...]:
    """Names of the scales: a file in ``presets/scales`` is one."""
    return _names("scales")


def architectures() -> tuple[str, ...]:
    """Names of the architectures: a file in ``presets/architectures`` is one."""
    return _names("architectures")


def preset(scale: str, arch: str, gate: str | None = None) -> dict[str, Any]:
    """Fields of a recipe but its folders; ``gate`` is SATFormer's nonlinearity.

    What an architecture adds to the model section never overrides the scale's sizes.

    Raises:
        UserError: no such scale or architecture, or a gate for a model that has none.
    """
    found = _read("scales", scale)
    own = _read("architectures", arch)
    model = {**found.pop("model"), **own.pop("model", {})}
    if gate is not None:
        if own["arch"] != "SATFormer":
            raise UserError(f"{arch} has no gate to choose: leave --gate out, or take --arch satformer")
        model["value_residual_gate"] = gate
    return {**found, **own, "model": model}


def _read(kind: str, name: str) -> dict[str, Any]:
    if name not in _names(kind):
        raise UserError(f"no {kind[:-1]} {name!r} among the presets; there are: {', '.join(_names(kind))}")
    return tomllib.loads((FOLDER / kind / f"{name}.toml").read_text(encoding="utf-8"))


def _names(kind: str) -> tuple[str, ...]:
    return tuple(sorted(path.stem for path in (FOLDER / kind).glob("*.toml")))
