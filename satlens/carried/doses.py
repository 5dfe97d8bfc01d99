"""Dose-response: the stream's projection on m^ scaled from nothing to double, beside controls of the same length."""

from collections.abc import Iterator, Sequence
from typing import Literal

import pandas as pd
import torch

from satlens.carried.edits import Change, dose, edit, matched, published_unmatched
from satlens.carried.fit import fit
from satlens.carried.outcomes import against_controls, effects_table, layers_table
from satlens.carried.reach import co_removal
from satlens.carried.reader import Reader
from satlens.carried.setting import Setting, new_setting
from satlens.carried.tally import Tally
from satlens.errors import UserError

ALPHAS = (0.0, 0.5, 1.0, 1.5, 2.0)
"""The paper's grid; 1 changes nothing."""
Control = Literal["matched", "matched-signed", "published-unmatched"]
"""Kinds of control; norm-kept variants of the first two are made where the reference's is."""

Tables = dict[str, pd.DataFrame]


def dose_response(
    setting: Setting,
    alphas: Sequence[float] = ALPHAS,
    controls: Sequence[Control] = ("matched", "matched-signed"),
) -> tuple[Tables, Tally]:
    """Every dose at every layer, norm-kept doses, and ``setting.draws`` controls of each kind.

    Unsigned matched controls are run at every dose; signed, norm-kept and published ones at removal only, where they
    are told apart. Tables: ``dose`` (a row a change), ``dose_controls`` (against the control distribution) and
    ``dose_layers`` (duty and firing at later layers).
    """
    changes = [change for layer in setting.layers for change in layer_doses(setting, layer, alphas, controls)]
    tally = setting.run("dose-response", changes)
    table = effects_table(tally, setting.reader, setting.weights)
    keys = ("alpha", "norm_kept")
    return {
        "dose": table,
        "dose_controls": against_controls(table, tally, setting.reader, setting.weights, keys),
        "dose_layers": layers_table(tally, setting.reader, setting.weights),
    }, tally


def layer_doses(
    setting: Setting, layer: int, alphas: Sequence[float], controls: Sequence[Control]
) -> list[Change]:
    """The changes of one layer, reference first."""
    return [
        *reference_doses(setting, layer, alphas),
        *reference_doses(setting, layer, [a for a in alphas if a != 1], norm_kept=True),
        *_controls(setting, layer, alphas, controls),
    ]


def reference_doses(
    setting: Setting, layer: int, alphas: Sequence[float], norm_kept: bool = False
) -> list[Change]:
    """``x + (alpha - 1)(x . m^) m^`` at one layer, for each alpha."""
    m = setting.unit(layer)
    return [
        Change(
            edits={("resid", layer): edit(dose(m, alpha), norm_kept)},
            labels=_labels(alpha, "reference", norm_kept),
            identity=alpha == 1,
        )
        for alpha in alphas
    ]


def _controls(
    setting: Setting, layer: int, alphas: Sequence[float], controls: Sequence[Control]
) -> Iterator[Change]:
    m, randoms = setting.unit(layer), setting.randoms(layer)
    for draw, other in enumerate(randoms):
        for kind in controls:
            for alpha in alphas if kind == "matched" else (0.0,):
                if alpha != 1:
                    yield _control(layer, alpha, kind, draw, m, other, norm_kept=False)
        if "matched" in controls:
            yield _control(layer, 0.0, "matched", draw, m, other, norm_kept=True)


def _control(
    layer: int, alpha: float, kind: Control, draw: int, m: torch.Tensor, other: torch.Tensor, norm_kept: bool
) -> Change:
    unmatched = kind == "published-unmatched"
    by = (
        published_unmatched(other, alpha) if unmatched else matched(m, other, alpha, kind == "matched-signed")
    )
    return Change(edits={("resid", layer): edit(by, norm_kept)}, labels=_labels(alpha, kind, norm_kept, draw))


def _labels(alpha: float, direction: str, norm_kept: bool, draw: int = -1) -> dict[str, object]:
    return {"alpha": float(alpha), "direction": direction, "draw": draw, "norm_kept": norm_kept}


def twin_doses(
    setting: Setting, twin: Reader, fit_documents: object, alphas: Sequence[float] = ALPHAS
) -> Tables:
    """The same doses on a twin of the same shape, along the twin's own m^, with matched controls at removal.

    Tables: ``twin``, ``twin_controls``, and ``twin_co_removal``, removal at many layers (``reach.co_removal``).

    Raises:
        UserError: the twin has another shape.
    """
    require_same_shape(setting.reader, twin)
    reference = fit(twin, fit_documents, batch_size=setting.batch_size)  # type: ignore[arg-type]
    other = new_setting(
        twin,
        reference,
        setting.documents,
        setting.layers,
        n_resamples=len(setting.weights),
        draws=setting.draws,
        batch_size=setting.batch_size,
        seed=setting.seed,
        on_batch=setting.on_batch,
    )
    changes = [c for layer in other.layers for c in reference_doses(other, layer, alphas)]
    changes += [
        c
        for layer in other.layers
        for c in _controls(other, layer, (0.0,), ("matched",))
        if not c.labels["norm_kept"]
    ]
    tally = other.run(twin.name, changes)
    table = effects_table(tally, twin, other.weights)
    table.insert(0, "twin", twin.name)
    versus = against_controls(table, tally, twin, other.weights, ("alpha", "norm_kept"))
    versus.insert(0, "twin", twin.name)
    norms = reference.mean.norm(dim=1)[list(other.layers)]
    table["m_norm"] = table["layer"].map(dict(zip(other.layers, norms.tolist(), strict=True)))
    many = co_removal(other)[0]["co_removal"]
    many.insert(0, "twin", twin.name)
    return {"twin": table, "twin_controls": versus, "twin_co_removal": many}


def require_same_shape(reader: Reader, twin: Reader) -> None:
    """A twin is compared layer by layer and gate by gate, so it must have the same ones.

    Raises:
        UserError: it has others.
    """

    def shape(model: Reader) -> dict[str, object]:
        return {
            "layers": model.n_layers,
            "d_model": model.d_model,
            "vocabulary": model.d_vocab,
            "gates a layer": tuple(read.n_gates for read in model.reads),
        }

    mine, theirs = shape(reader), shape(twin)
    if wrong := [name for name in mine if mine[name] != theirs[name]]:
        name = wrong[0]
        raise UserError(
            f"{twin.name} is no twin of {reader.name}: {name} {_short(theirs[name])}, not {_short(mine[name])}; a twin "
            "is the same config with other weights"
        )


def _short(value: object) -> str:
    return str(value[0]) if isinstance(value, tuple) and len(set(value)) == 1 else str(value)
