"""A ladder of texts from prose to one repeated token: is the reference the text's, or that of tokens alone?"""

from collections.abc import Callable, Mapping

import numpy as np
import pandas as pd

from satlens.bootstrap import Floats, ratio_interval
from satlens.carried.documents import DocumentSet
from satlens.carried.fit import fit
from satlens.carried.outcomes import part_or_nan
from satlens.carried.setting import GATES, Setting, stream_probe
from satlens.carried.tally import CLEAN, Tally

DECILES = 10
"""Groups of token types of like frequency that the frequency-matched text draws from."""

Texts = Callable[[DocumentSet, np.random.Generator], tuple[np.ndarray, ...]]


def shuffled(documents: DocumentSet, generator: np.random.Generator) -> tuple[np.ndarray, ...]:
    """Each document's own tokens in random order (its first stays first: it may be BOS)."""
    return tuple(np.concatenate([ids[:1], generator.permutation(ids[1:])]) for ids in documents.ids)


def frequency_matched(documents: DocumentSet, generator: np.random.Generator) -> tuple[np.ndarray, ...]:
    """Each token replaced by one of like frequency: types in order of count, cut where a tenth of the text is full."""
    types, counts = np.unique(np.concatenate(documents.ids), return_counts=True)
    order = np.argsort(-counts, kind="stable")
    before = counts[order].cumsum() - counts[order]
    group = np.empty(len(types), dtype=np.int64)
    group[order] = np.minimum(DECILES * before // counts.sum(), DECILES - 1)
    members = [types[group == place] for place in range(DECILES)]
    out = []
    for ids in documents.ids:
        groups = group[np.searchsorted(types, ids)]
        drawn = np.array([generator.choice(members[place]) for place in groups])
        out.append(np.concatenate([ids[:1], drawn[1:]]))
    return tuple(out)


def uniform(documents: DocumentSet, generator: np.random.Generator) -> tuple[np.ndarray, ...]:
    """Tokens drawn evenly from the types that the text has."""
    types = np.unique(np.concatenate(documents.ids))
    return tuple(np.concatenate([ids[:1], generator.choice(types, len(ids) - 1)]) for ids in documents.ids)


def repeated(documents: DocumentSet, generator: np.random.Generator) -> tuple[np.ndarray, ...]:
    """One token all along, another in each document, drawn as often as the text has it."""
    everything = np.concatenate(documents.ids)
    return tuple(np.full(len(ids), generator.choice(everything)) for ids in documents.ids)


LADDER: Mapping[str, Texts | None] = {
    "prose": None,
    "shuffled": shuffled,
    "frequency-matched": frequency_matched,
    "uniform": uniform,
    "repeated token": repeated,
}
"""Rung -> how its documents are made; the first is the evaluated text itself."""


def text_ladder(setting: Setting) -> dict[str, pd.DataFrame]:
    """Duty, firing and the stream's share along the prose's m^, layer by layer, on each rung.

    Table ``ladder``: a row a rung and layer; ``cosine`` is that of the rung's own mean with the fitted m
    (spec part B, repeated token). All rungs have the documents' lengths, so the same positions count. Of
    SATFormer, ``open`` and ``alpha`` are those of its own gate.
    """
    reader = setting.reader
    probe = stream_probe(reader, setting.reference)
    rows = []
    for place, (rung, make) in enumerate(LADDER.items()):
        generator = np.random.default_rng([setting.seed, place])
        ids = setting.documents.ids if make is None else make(setting.documents, generator)
        if reader.bos is not None:  # every text begins as the model expects
            ids = tuple(
                np.concatenate([old[:1], new[1:]])
                for old, new in zip(setting.documents.ids, ids, strict=True)
            )
        documents = DocumentSet(ids=ids, names=setting.documents.names, kinds=(rung,) * len(ids))
        mean = fit(reader, documents, batch_size=setting.batch_size).mean
        tally = setting.run(f"text ladder: {rung}", [], {"stream": probe}, documents)
        counts = tally.counts["far"].numpy()
        gates, stream = (tally.probes[name][CLEAN].numpy() for name in ("gates", "stream"))
        for layer in range(reader.n_layers):
            row = {"text": rung, "layer": layer}
            width = reader.reads[layer].n_gates
            measures = {name: gates[:, layer, at] / width for at, name in enumerate(GATES)}
            measures |= _own_gate(tally, layer)
            for name, sums in {**measures, "share": stream[:, layer, 0]}.items():
                interval = ratio_interval(sums, counts, setting.weights)
                for end, part in zip(("", "_low", "_high"), interval, strict=True):
                    row[f"{name}{end}"] = float(part_or_nan(part, ()))
            one, other = mean[layer], setting.reference.mean[layer]
            row["cosine"] = float(one @ other / (one.norm() * other.norm()))
            rows.append({**row, "n_tokens": int(counts.sum()), "n_documents": len(ids)})
    return {"ladder": pd.DataFrame(rows)}


def _own_gate(tally: Tally, layer: int) -> dict[str, Floats]:
    """Sums by document of open gates and of alpha, means over heads; nothing where the layer has no gate of its own."""
    own = tally.probes.get("own")
    if own is None or bool(own[CLEAN, :, layer].isnan().any()):
        return {}
    both = own[CLEAN, :, layer].unflatten(-1, (2, -1)).mean(-1).numpy()
    return {"open": both[:, 0], "alpha": both[:, 1]}
