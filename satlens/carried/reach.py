"""How far a removal reaches: later positions, later layers, and many layers at once."""

from collections.abc import Callable, Sequence

import numpy as np
import pandas as pd
import torch
from jaxtyping import Int
from torch import Tensor

from satlens.bootstrap import Floats, median_interval, ratio_interval
from satlens.carried.documents import SKIP, Rows
from satlens.carried.edits import Change, Edit, Where, dose, edit, inside, matched
from satlens.carried.outcomes import against_controls, effects_table, part_or_nan, versus
from satlens.carried.setting import Setting, stream_probe
from satlens.carried.tally import CLEAN, Tally
from satlens.errors import UserError
from satlens.log import say

WINDOW = (64, 72)
"""Positions that the window experiment edits (the paper's 64-71)."""
READ = 32
"""Positions after the window at which it is read."""
GREEDY = 16
"""Tokens of the greedy continuations that are compared."""

NORM_KEPT = "reference, norm kept"
"""Removal that leaves the stream its length, so that only its direction has changed."""
ENDS = ("", "_low", "_high")
"""What the columns of an estimate and its interval end in."""

Tables = dict[str, pd.DataFrame]


def windows(setting: Setting) -> tuple[Tables, Tally]:
    """Removal in positions 64-71 alone, read at the next 32 positions and in greedy continuations after those.

    Tables: ``window`` (``kl_after`` with intervals, against ``setting.draws`` matched controls in ``window_controls``)
    and ``window_greedy`` (``step`` at which the greedy continuation of removal, or of a control, first leaves the clean
    one, ``GREEDY + 1`` where none does, its median; ``differs``, the share of documents whose continuation does).
    Documents that end before a read position count with those they have (spec part B, window).

    Raises:
        UserError: no document reaches beyond the window.
    """
    longer = [place for place, ids in enumerate(setting.documents.ids) if len(ids) > WINDOW[1]]
    if not longer:
        raise UserError(
            f"no evaluated document is longer than {WINDOW[1]} tokens: nothing comes after the window"
        )
    changes = [change for layer in setting.layers for change in _window_changes(setting, layer)]
    tally = setting.run("window", changes, regions=_after)
    table = effects_table(tally, setting.reader, setting.weights)
    sums, counts = tally.outputs["kl_after"][1:].numpy().T, tally.counts["after"].numpy()
    after = ratio_interval(sums, counts, setting.weights)
    for end, part in zip(ENDS, after, strict=True):
        table[f"kl_after{end}"] = part_or_nan(part, sums.shape[1:])
    return {
        "window": table,
        "window_controls": _after_controls(setting, table, sums, counts),
        "window_greedy": greedy_table(setting, changes),
    }, tally


def _window_changes(setting: Setting, layer: int) -> list[Change]:
    m = setting.unit(layer)
    made = [
        Change(
            edits={("resid", layer): edit(dose(m, 0.0), keep, WINDOW)},
            labels={"direction": NORM_KEPT if keep else "reference", "draw": -1},
        )
        for keep in (False, True)
    ]
    made += [
        Change(
            edits={("resid", layer): edit(matched(m, other, 0.0), window=WINDOW)},
            labels={"direction": "matched", "draw": draw},
        )
        for draw, other in enumerate(setting.randoms(layer))
    ]
    return made


def _after(rows: Rows) -> dict[str, Tensor]:
    return {"after": inside(rows.far, (WINDOW[1], WINDOW[1] + READ))}


def _after_controls(setting: Setting, table: pd.DataFrame, sums: Floats, counts: Floats) -> pd.DataFrame:
    """Each layer's removal against its matched controls."""
    rows = []
    for layer in setting.layers:
        own, direction = (table["layer"] == layer).to_numpy(), table["direction"].to_numpy()
        place = int(np.flatnonzero(own & (direction == "reference"))[0])
        which = np.flatnonzero(own & (direction == "matched"))
        values = versus(sums, counts, place, which, setting.weights)
        rows.append({"layer": layer, "measure": "kl_after", **values, "n_controls": len(which)})
    return pd.DataFrame(rows)


def greedy_table(setting: Setting, changes: Sequence[Change]) -> pd.DataFrame:
    """First step at which each removal's greedy continuation differs, one control a layer beside it."""
    length = WINDOW[1] + READ
    places = [place for place, ids in enumerate(setting.documents.ids) if len(ids) >= length]
    measures = [f"{name}{end}" for name in ("step", "differs") for end in ENDS]
    columns = ["layer", "direction", *measures, "n_documents"]
    if not places:
        say(f"note: no document has the {length} tokens that greedy continuations start from")
        return pd.DataFrame(columns=columns)
    documents = [setting.documents.ids[place][:length] for place in places]
    prompts = torch.from_numpy(np.stack(documents)).to(setting.reader.device)
    weights = setting.weights[:, places]
    rows = []
    clean = greedy(setting, prompts, None)
    for change in changes:
        if change.labels["draw"] not in (-1, 0) or change.labels["direction"] == NORM_KEPT:
            continue
        steps = first_difference(clean, greedy(setting, prompts, change)).numpy().astype(float)
        differs = ratio_interval((steps <= GREEDY).astype(float), np.ones(len(steps)), weights)
        parts = [float(part_or_nan(part, ())) for part in (*median_interval(steps, weights), *differs)]
        rows.append([change.start, change.labels["direction"], *parts, len(documents)])
    return pd.DataFrame(rows, columns=columns)


@torch.no_grad()
def greedy(
    setting: Setting, prompts: Int[Tensor, "doc pos"], change: Change | None, steps: int = GREEDY
) -> Int[Tensor, "doc step"]:
    """The most probable continuation, the change made anew in every pass (its positions lie within the prompt)."""
    out = []
    for start in range(0, len(prompts), setting.batch_size):
        ids = prompts[start : start + setting.batch_size]
        for _ in range(steps):
            far = torch.zeros_like(ids, dtype=torch.bool)
            far[:, SKIP:] = True
            where = Where(far=far, doc=torch.arange(start, start + len(ids)))
            hooks = [] if change is None else [
                (role, layer, _hook(step, where)) for (role, layer), step in change.edits.items()
            ]  # fmt: skip
            hidden = setting.reader.run(ids, hooks)[:, -1]
            ids = torch.cat([ids, setting.reader.logits(hidden).argmax(-1)[:, None]], dim=1)
        out.append(ids[:, prompts.shape[1] :])
    return torch.cat(out).cpu()


def _hook(step: Edit, where: Where) -> Callable[[Tensor], Tensor]:
    return lambda x: step(x, where)


def first_difference(one: Int[Tensor, "doc step"], other: Int[Tensor, "doc step"]) -> Int[Tensor, " doc"]:
    """Step, counted from 1, at which two continuations first differ; one more than there are where none does."""
    apart = one != other
    return torch.where(apart.any(1), apart.int().argmax(1) + 1, one.shape[1] + 1)


def recovery(setting: Setting) -> tuple[Tables, Tally]:
    """Removal at one layer: does the stream find back to m^ downstream (spec part B, recovery).

    Table ``recovery``: a row an edited layer and layer, with the mean cosine of the stream and the layer's own m^,
    clean and changed, their difference (``dip``), both with intervals, and the same of one matched control.
    """
    probe = stream_probe(setting.reader, setting.reference)
    changes = []
    for layer in setting.layers:
        m = setting.unit(layer)
        for direction, by in (
            ("reference", dose(m, 0.0)),
            (NORM_KEPT, dose(m, 0.0)),
            ("matched", matched(m, setting.randoms(layer)[0], 0.0)),
        ):
            step = edit(by, direction == NORM_KEPT)
            changes.append(Change(edits={("resid", layer): step}, labels={"direction": direction, "draw": 0}))
    tally = setting.run("recovery", changes, {"stream": probe})
    cosine, counts = tally.probes["stream"][..., 0].numpy(), tally.counts["far"].numpy()
    rows = []
    for line, change in enumerate(changes, start=1):
        after, moved = (
            [part_or_nan(part, cosine.shape[2:]) for part in ratio_interval(values, counts, setting.weights)]
            for values in (cosine[line], cosine[line] - cosine[CLEAN])
        )
        for layer in range(change.start, cosine.shape[-1]):
            rows.append(
                {
                    "edited_layer": change.start,
                    **change.labels,
                    "layer": layer,
                    "cosine_clean": cosine[CLEAN, :, layer].sum() / counts.sum(),
                    **{f"cosine{end}": float(part[layer]) for end, part in zip(ENDS, after, strict=True)},
                    **{f"dip{end}": float(part[layer]) for end, part in zip(ENDS, moved, strict=True)},
                    "n_tokens": int(counts.sum()),
                }
            )
    return {"recovery": pd.DataFrame(rows)}, tally


def layer_sets(n_layers: int) -> dict[str, tuple[int, ...]]:
    """Sets of layers to remove at: the paper's (every 4th of 32 from 6, and from 14), and every layer from the same.

    Depths are scaled from Phi-2's 32 layers; sets that coincide in a small model are kept once.
    """
    early, late = int(0.1875 * n_layers), int(0.4375 * n_layers)
    stride = max(1, round(n_layers / 8))
    sets = {
        f"every {_ordinal(stride)} from {early}": tuple(range(early, n_layers, stride)),
        f"every {_ordinal(stride)} from {late}": tuple(range(late, n_layers, stride)),
        f"every layer from {early}": tuple(range(early, n_layers)),
        f"every layer from {late}": tuple(range(late, n_layers)),
    }
    if stride == 1:
        sets = {name: layers for name, layers in sets.items() if name.startswith("every layer")}
    return sets


def _ordinal(n: int) -> str:
    return {1: "layer", 2: "2nd", 3: "3rd"}.get(n, f"{n}th")


def co_removal(setting: Setting) -> tuple[Tables, Tally]:
    """Removal at several layers at once, each along its own m^, beside matched controls along each layer's own draws.

    Tables: ``co_removal`` (a row a change, labelled by ``layer_set``; firing is that of the first edited layer) and
    ``co_removal_controls``.
    """
    sets = layer_sets(setting.reader.n_layers)
    changes = []
    for name, layers in sets.items():
        units = {layer: setting.unit(layer) for layer in layers}
        randoms = {layer: setting.randoms(layer) for layer in layers}
        labels = {"layer_set": name, "n_layers": len(layers)}
        for direction in ("reference", NORM_KEPT):
            removed: dict[tuple[str, int], Edit] = {
                ("resid", n): edit(dose(m, 0.0), direction == NORM_KEPT) for n, m in units.items()
            }
            changes.append(Change(edits=removed, labels={**labels, "direction": direction, "draw": -1}))
        for draw in range(setting.draws):
            moved: dict[tuple[str, int], Edit] = {
                ("resid", n): edit(matched(m, randoms[n][draw], 0.0)) for n, m in units.items()
            }
            changes.append(Change(edits=moved, labels={**labels, "direction": "matched", "draw": draw}))
    tally = setting.run("co-removal", changes)
    table = effects_table(tally, setting.reader, setting.weights)
    controls = against_controls(table, tally, setting.reader, setting.weights, ("layer_set",))
    return {"co_removal": table, "co_removal_controls": controls}, tally
