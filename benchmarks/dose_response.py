"""How much faster is a dose-response that restarts from the edited layer than a full forward for every setting?"""

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from common import POS, SHAPE, Row, build, command, compare, interleave
from torch import Tensor

from satlens.carried import directions
from satlens.carried.documents import DocumentSet
from satlens.carried.edits import Change, Edit, Where, dose, edit, matched
from satlens.carried.effects import count_above, thresholds
from satlens.carried.opening import read_model
from satlens.carried.restart import measure as shared_pass
from satlens.carried.tally import Probe

LAYERS = tuple(range(SHAPE["num_hidden_layers"]))
ALPHAS = (0.0, 0.5, 1.0, 1.5, 2.0)
CONTROLS = 8
ROWS = 2
"""Documents: both sides pay by the row, and more of them change the time a round takes but not the ratio."""


def settings(d_model: int) -> dict[tuple[int, float, int], Edit]:
    """(layer, alpha, control) -> edit; control 0 is the reference, which alone is also run at alpha = 1."""
    rng = torch.Generator().manual_seed(0)
    made: dict[tuple[int, float, int], Edit] = {}
    for layer in LAYERS:
        m = directions.unit(torch.randn(d_model, generator=rng))
        others = directions.random_units(m, CONTROLS, rng)
        for alpha in ALPHAS:
            made[layer, alpha, 0] = edit(dose(m, alpha))
            if alpha != 1:
                made |= {
                    (layer, alpha, 1 + k): edit(matched(m, other, alpha)) for k, other in enumerate(others)
                }
    return made


def documents() -> DocumentSet:
    """Rows of random ids."""
    ids = np.random.default_rng(0).integers(1, SHAPE["vocab_size"], (ROWS, POS))
    return DocumentSet(ids=tuple(ids), names=("random",) * ROWS, kinds=("random",) * ROWS)


def ours(reader: Any, docs: DocumentSet, made: dict[tuple[int, float, int], Edit]) -> dict[Any, Tensor]:
    """Final KL, mean KL, NLL and firing at the edited layer of each document, by ``satlens.carried.restart``."""
    levels = thresholds(reader.reads[0])
    gates = Probe(
        role="pre",
        columns=("duty", "fires", "fires_hard"),
        sums=lambda z, rows, layer: count_above(z, rows.far, levels),
    )
    changes = [Change(edits={("resid", layer): step}) for (layer, _, _), step in made.items()]
    tally = shared_pass(reader, docs, changes, {"gates": gates}, batch_size=ROWS)
    return {
        key: torch.stack(
            [
                tally.outputs["kl_final"][1 + i],
                tally.outputs["kl_far"][1 + i] / tally.counts["far"],
                tally.outputs["nll_scored"][1 + i] / tally.counts["scored"],
                tally.probes["gates"][1 + i, :, key[0], 1],
            ]
        )
        for i, key in enumerate(made)
    }


@torch.no_grad()
def plain_loop(model: Any, docs: DocumentSet, made: dict[tuple[int, float, int], Edit]) -> dict[Any, Tensor]:
    """The same by one forward a setting: a hook edits, a hook counts, log-softmax of all logits."""
    (rows,) = docs.batches(ROWS)
    ids, where = rows.input_ids, Where(far=rows.far, doc=rows.doc)
    start = int(rows.far[0].int().argmax())
    clean = model(ids).logits[:, start:].log_softmax(-1)
    found = {}
    for key, step in made.items():
        counted: list[Tensor] = []
        block = model.model.layers[key[0]]
        handles = [
            block.register_forward_pre_hook(lambda m, args, step=step: (step(args[0], where), *args[1:])),
            block.mlp.gate_proj.register_forward_hook(
                lambda m, args, z, counted=counted: counted.append((F.silu(z[:, start:]) > 0.5).sum((1, 2)))
            ),
        ]
        changed = model(ids).logits[:, start:].log_softmax(-1)
        for handle in handles:
            handle.remove()
        kl = (clean.exp() * (clean - changed)).sum(-1).double()
        nll = -changed[:, :-1].gather(-1, ids[:, start + 1 :, None]).double().mean((1, 2))
        found[key] = torch.stack([kl[:, -1], kl.mean(1), nll, counted[0].double()])
    return {key: value[:, rows.doc.argsort()] for key, value in found.items()}


def measure(rounds: int) -> list[Row]:
    """Speed, and the largest difference of any document's final or mean KL."""
    model = build()
    reader, docs, made = read_model(build(), None), documents(), settings(SHAPE["hidden_size"])
    got, truth = ours(reader, docs, made), plain_loop(model, docs, made)
    error = max(float((got[key] - truth[key])[:2].abs().max()) for key in made)
    counts = max(float((got[key] - truth[key])[3].abs().max()) for key in made)
    assert counts <= 3, f"firing differs by {counts} pairs"  # a threshold at the last bit
    seconds = interleave(
        {"ours": lambda: ours(reader, docs, made), "loop": lambda: plain_loop(model, docs, made)}, rounds
    )
    what = f"{len(made)} doses and controls at {len(LAYERS)} layers, plain forwards"
    largest = max(float(value[1].max()) for value in truth.values())
    return [
        compare(what, seconds, "loop", "ours", ">=", 1.6),
        Row(
            what=f"largest error of {len(made)} settings' KL, a document",
            ours=f"{error:.1e} nats",
            other=f"largest KL {largest:.2g}",
            ratio=error,
            rounds=1,
            sense="<=",
            target=1e-6,
            unit="nats",
        ),
    ]


if __name__ == "__main__":
    command(measure, rounds=3)
