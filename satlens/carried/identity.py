"""Is it the direction or the magnitude: the projection moved to other directions, and noise of the same energy."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from jaxtyping import Float
from torch import Tensor

from satlens.carried import directions, noise
from satlens.carried.edits import Change, Displacement, Where, dose, edit, replacement
from satlens.carried.outcomes import by_document, effects_table, versus
from satlens.carried.setting import Setting
from satlens.carried.tally import Tally
from satlens.errors import UserError
from satlens.log import say
from satlens.stream import gather

PERMUTATIONS = 3
"""Coordinate permutations of m^ tried as replacements."""
EPSILONS = (0.1, 0.33, 1.0)
"""Noise lengths as shares of the stream's; the paper calls 0.33 the reference's energy."""
NOISE_DRAWS = 3
"""Draws of the noise arms that draw; each arm's rows of a table are these."""


def replacements(setting: Setting) -> tuple[dict[str, pd.DataFrame], Tally]:
    """``x - (x.m^)m^ + (x.m^)c`` at every layer: how little of the function is left as c turns away from m^.

    ``c``: random directions, permutations of m^'s coordinates, the m^ of every other layer, the function-word
    direction, and m^ itself (which changes nothing); beside them removal, and all but the last also at the norm the
    stream had. Table ``replacement``: a row a change, with ``cosine`` of c and m^ (spec part B, replacement).
    """
    changes = [change for layer in setting.layers for change in _layer_replacements(setting, layer)]
    tally = setting.run("replacement", changes)
    return {"replacement": effects_table(tally, setting.reader, setting.weights)}, tally


def _layer_replacements(setting: Setting, layer: int) -> Iterator[Change]:
    m = setting.unit(layer)
    for norm_kept in (False, True):
        labels = {"replacement": "removed", "source": -1, "cosine": np.nan, "norm_kept": norm_kept}
        yield Change(edits={("resid", layer): edit(dose(m, 0.0), norm_kept)}, labels=labels)
    for kind, source, other in candidates(setting, layer):
        itself = kind == "m^ itself"
        for norm_kept in (False,) if itself else (False, True):
            yield Change(
                edits={("resid", layer): edit(replacement(m, other), norm_kept)},
                labels={
                    "replacement": kind,
                    "source": source,
                    "cosine": float(other.double() @ m.double()),
                    "norm_kept": norm_kept,
                },
                identity=itself,
            )


def candidates(setting: Setting, layer: int) -> Iterator[tuple[str, int, Float[Tensor, " d_model"]]]:
    """Kind, draw or layer it comes from, and unit vector of every replacement of a layer's m^."""
    m, reader = setting.unit(layer), setting.reader
    yield "m^ itself", layer, m
    for draw, other in enumerate(setting.randoms(layer)):
        yield "random", draw, other
    for draw in range(PERMUTATIONS):
        yield "permuted m^", draw, directions.permuted(m, setting.generator(10_000 + 100 * layer + draw))
    for source in range(reader.n_layers):
        if source != layer:
            yield "m^ of another layer", source, setting.unit(source)
    if reader.tokenizer is None:
        return
    try:
        ids = directions.function_words(reader.tokenizer, reader.d_vocab)
        rows = reader.model.get_output_embeddings().weight.detach()
        yield "function words", len(ids), directions.function_word_direction(rows, ids)
    except UserError as error:
        say(f"note: {error}")


def noises(setting: Setting, epsilons: Sequence[float] = EPSILONS) -> tuple[dict[str, pd.DataFrame], Tally]:
    """Noise of length ``epsilon |x|`` at every layer, along m^, along random directions, isotropic and shaped.

    Shaped noise has the stream's own spread in each coordinate. ``imbalance`` is what is left of the noise's mean,
    relative to m, at worst over documents; ``removal`` stands beside for its own energy, ``share`` (mean ``|x.m^|/|x|``
    of the evaluated documents). Tables: ``noise``, a row a change, and ``noise_versus``, how many times the KL of noise
    along random directions that along m^ is, and how many times that of isotropic noise removal is; arms named
    ``norm kept`` have the length that the stream had (spec part B, noise).
    """
    changes: list[Change] = []
    kept: list[list[float]] = []
    for layer in setting.layers:
        m, left = setting.unit(layer), list[float]()
        labels = {"arm": "removal", "epsilon": np.nan, "draw": 0}
        changes.append(
            Change(edits={("resid", layer): edit(_noting(dose(m, 0.0), left, None))}, labels=labels)
        )
        kept.append(left)
        for epsilon in epsilons:
            for arm, draw, how in _arms(setting, layer):
                left = []
                seed = setting.seed * 7919 + 101 * layer + draw
                by = _noting(noise.noise(how, epsilon, seed), left, setting.reference.mean[layer])
                labels = {"arm": arm, "epsilon": epsilon, "draw": draw}
                changes.append(Change(edits={("resid", layer): edit(by)}, labels=labels))
                kept.append(left)
                if draw == 0:
                    left = []
                    again = _noting(noise.noise(how, epsilon, seed), left, setting.reference.mean[layer])
                    labels = {**labels, "arm": f"{arm}, norm kept"}
                    changes.append(
                        Change(edits={("resid", layer): edit(again, keep_norm=True)}, labels=labels)
                    )
                    kept.append(left)
    tally = setting.run("noise", changes)
    table = effects_table(tally, setting.reader, setting.weights)
    removal = (table["arm"] == "removal").to_numpy()
    kept = gather(_Notes(kept)).by_change
    table["share"] = [
        float(np.mean(left)) if gone else np.nan for left, gone in zip(kept, removal, strict=True)
    ]
    table["imbalance"] = [np.nan if gone else max(left) for left, gone in zip(kept, removal, strict=True)]
    return {"noise": table, "noise_versus": _noise_versus(setting, table, tally)}, tally


def _noise_versus(setting: Setting, table: pd.DataFrame, tally: Tally) -> pd.DataFrame:
    """KL of noise along m^ (its first draw) against random directions, and of removal against isotropic noise."""
    measures = by_document(tally, setting.reader)
    rows = []
    for layer in setting.layers:
        at = table["layer"] == layer
        for epsilon in dict.fromkeys(table["epsilon"].dropna()):
            same = at & (table["epsilon"] == epsilon)
            for what, place_of, against in (
                ("noise along m^", same & (table["arm"] == "reference"), "random"),
                ("removal", at & (table["arm"] == "removal"), "isotropic"),
            ):
                which = np.flatnonzero(same & (table["arm"] == against))
                for name in ("kl_final", "kl_far"):
                    values = versus(*measures[name], int(np.flatnonzero(place_of)[0]), which, setting.weights)
                    rows.append({"layer": layer, "epsilon": epsilon, "what": what, "control": against,
                                 "measure": name, **values, "n_controls": len(which)})  # fmt: skip
    return pd.DataFrame(rows)


@dataclass(frozen=True)
class _Notes:
    """What each change's displacement noted, of all processes once they are merged."""

    by_change: list[list[float]]

    def merge(self, other: "_Notes") -> None:
        for mine, theirs in zip(self.by_change, other.by_change, strict=True):
            mine.extend(theirs)


def _arms(setting: Setting, layer: int) -> Iterator[tuple[noise.Arm, int, noise.Draw]]:
    m, randoms = setting.unit(layer), setting.randoms(layer)
    for draw in range(NOISE_DRAWS):
        yield "reference", draw, noise.along(m)
        yield "random", draw, noise.along(randoms[draw])
        yield "isotropic", draw, noise.isotropic()
        yield "shaped", draw, noise.shaped(setting.reference.deviation[layer])


def _noting(by: Displacement, left: list[float], mean: Tensor | None) -> Displacement:
    """The same displacement, noting a document's imbalance, or without a mean its length as a share of the stream."""

    def noted(x: Tensor, where: Where) -> Tensor:
        added = by(x, where)
        if mean is None:
            left.extend((added.norm(dim=-1) / x.norm(dim=-1))[where.far].tolist())
        else:
            left.extend(noise.imbalance(added, where, mean.to(x.device)).tolist())
        return added

    return noted
