"""What is a V1 dictionary worth: variance explained in and out of sample, perplexity kept, what simpler means reach."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

from sae.baselines import EXACT, Budget, Reconstruction, baselines
from sae.dictionary import Counts, Dictionary, decode, encode, open_dictionary
from sae.features import latent_features
from sae.pieces import token_of
from sae.quality import (
    ALL,
    AT_MOST,
    PART,
    SAE,
    Fitted,
    Text,
    density_table,
    heldout_sums,
    memories_table,
    over_seeds,
    per_type_table,
    quality_table,
    type_quantiles,
)
from sae.replacement import ZERO, Losses, measure_losses, readers, replacement_table, scale_tables
from sae.table import token_counts, v1_rows
from sae.variance import Sums
from satlens.bootstrap import document_weights
from satlens.errors import UserError
from satlens.log import say
from satlens.reading import Reading, Subject, begin_run, data_facts, process_place
from satlens.run import Run, measured
from satlens.tokens import Corpus, split_calibration

VERB = "sae"
EVERY = 5
"""Every fifth document is held out, as `sae.table.split_counts` has it."""
SEPARATORS_KEPT = "separators kept"
"""The first dictionary once more, except that EOS and BOS, which no dictionary is fitted on, keep their own V1."""
UNITS = {
    "nll": "nats per token",
    "delta_nll": "nats per token",
    "delta_ppl": "perplexity",
    "density": "share of positions",
    "l0": "active latents",
    "n_active": "positions",
}


def evaluate_dictionaries(
    subject: Subject,
    corpus: Corpus,
    folders: Sequence[Path],
    types_folder: Path | None,
    reading: Reading,
    config: Any,
) -> Path:
    """Measure dictionaries of one model, one folder a seed, and write a run.

    ``types_folder`` is a dictionary that never saw some token types, which shows how much of the others' success is
    memory. ``corpus`` is the text that all of them were trained and held out on.

    Raises:
        UserError: dictionaries of another model, site, text or size, two of one seed, a control that withheld nothing
            or one among the dictionaries, or a launch of several processes.
    """
    if process_place()[1] > 1:
        raise UserError("dictionaries are measured in one process: start without torchrun")
    opened = [_open(folder, subject, reading) for folder in folders]
    control = None if types_folder is None else _open(types_folder, subject, reading)
    if control is not None and not control.facts.get("withheld"):
        raise UserError(f"{types_folder} withheld no token types, so it is no control: train one that does")
    if bad := [d.path for d in opened if d.facts.get("withheld")]:
        raise UserError(f"{bad[0]} never saw some token types: it can only be the control")
    if len({d.facts["seed"] for d in opened}) < len(opened):
        raise UserError("two dictionaries have the same seed: name each once")
    text = _text(opened if control is None else [*opened, control], subject, corpus, reading)
    out = begin_run(VERB, config, reading)
    assert out is not None
    fitted = [f for d in opened for f in _fits(d, text, d is opened[0])]
    fitted += [] if control is None else _fits(control, text, True)
    heldout, _ = split_calibration(corpus, EVERY)
    losses = _losses(subject, heldout, fitted, text, reading)
    sums = [heldout_sums(f, text) for f in fitted]
    tables = _tables(fitted, sums, losses, text, subject)
    tables["heldout_by_document"] = by_document(fitted, sums, losses, heldout, text)
    return _finish(out, subject, corpus, fitted, text, tables, reading)


def _open(folder: Path, subject: Subject, reading: Reading) -> Dictionary:
    # float64, which sums need, does not exist on mps
    dictionary = open_dictionary(folder, "cpu" if reading.device == "mps" else reading.device)
    dictionary.require_model(subject.facts)
    if not dictionary.is_v1 or dictionary.counts is None:
        raise UserError(f"{folder} reads {dictionary.facts['site']}: only dictionaries of V1 have a table")
    return dictionary


def _text(opened: Sequence[Dictionary], subject: Subject, corpus: Corpus, reading: Reading) -> Text:
    """The table and the text, once it is sure that they are what the dictionaries were trained on."""
    heldout, train = split_calibration(corpus, EVERY)
    d_vocab = subject.sites.d_vocab
    counts = Counts(train=token_counts(train, d_vocab), heldout=token_counts(heldout, d_vocab))
    sizes = {(d.d_sae, d.k) for d in opened}
    if len(sizes) > 1:
        raise UserError(f"dictionaries of different sizes (d_sae, k): {sorted(sizes)}: evaluate them apart")
    for dictionary in opened:
        assert dictionary.counts is not None
        withheld = torch.tensor(dictionary.facts.get("withheld") or [], dtype=torch.long)
        mine, theirs = counts.train.clone(), dictionary.counts.train.clone()
        mine[withheld], theirs[withheld] = 0, 0
        if not (torch.equal(mine, theirs) and torch.equal(counts.heldout, dictionary.counts.heldout)):
            raise UserError(
                f"{dictionary.path} was trained on other text: give the --text and --tokens that it was trained with"
            )
    return Text(
        rows=v1_rows(subject.bridge).to(opened[0].W_dec.device),
        counts=counts,
        heldout=[heldout.document(i) for i in range(heldout.n_documents)],
        weights=document_weights(heldout.n_documents, reading.resamples, reading.seed),
    )


def _fits(dictionary: Dictionary, text: Text, unseeded: bool) -> list[Fitted]:
    """A dictionary, and the baselines fitted on what it saw; ``unseeded`` also those that no seed decides."""
    withheld = torch.tensor(dictionary.facts.get("withheld") or [], dtype=torch.long)
    fit, seed = (PART if len(withheld) else ALL), int(dictionary.facts["seed"])
    codes = encode(dictionary, text.rows)
    features = latent_features(dictionary, text.rows, text.counts.total, codes)
    made = Reconstruction(
        method=SAE,
        budget=f"{dictionary.d_sae:,} latents, at most {dictionary.k} of them active for a vector",
        made=decode(dictionary, codes),
        l0=features.l0,
        n_stored=sum(
            t.numel() for t in (dictionary.W_enc, dictionary.b_enc, dictionary.W_dec, dictionary.b_dec)
        ),
    )
    own = Fitted(
        fit=fit,
        seed=seed,
        made=made,
        withheld=withheld,
        dictionary=dictionary,
        codes=codes,
        features=features,
    )
    budget = Budget(d_sae=dictionary.d_sae, k=dictionary.k)
    others = [
        Fitted(fit=fit, seed=seed if other.seeded else None, made=other, withheld=withheld)
        for other in baselines(text.rows, own.trained(text), budget, seed, unseeded)
    ]
    return [own, *others]


def _losses(
    subject: Subject, heldout: Corpus, fitted: Sequence[Fitted], text: Text, reading: Reading
) -> Losses | None:
    """The pass over the held-out documents; None for a model whose later layers do not read V1."""
    if not readers(subject.sites):
        say(f"note: no layer of {subject.name} reads V1, so perplexity under replacement means nothing here")
        return None
    tables = scale_tables(text.rows, text.counts.train)
    once = {None, fitted[0].seed}  # a pass over the text each: every dictionary, but one k-means
    tables |= {
        f.name: f.made.made for f in fitted if f.fit == ALL and (f.dictionary is not None or f.seed in once)
    }
    first = fitted[0].made.made.clone()
    special = [i for i in (subject.tokenizer.eos_token_id, subject.tokenizer.bos_token_id) if i is not None]
    first[special] = text.rows[special]
    tables[f"{fitted[0].name} {SEPARATORS_KEPT}"] = first
    return measure_losses(subject, heldout, tables, reading)


def _tables(
    fitted: Sequence[Fitted],
    sums: Sequence[Sums],
    losses: Losses | None,
    text: Text,
    subject: Subject,
) -> dict[str, pd.DataFrame]:
    own = [f for f in fitted if f.dictionary is not None]
    seen = text.seen.nonzero().squeeze(1).tolist()
    quality = quality_table(fitted, text, sums)
    tables = {}
    if losses is not None:
        replaced = replacement_table(losses, text.weights)
        tables["replacement"] = replaced
        columns = ["nll", "perplexity", "delta_nll", "loss_recovered"]
        mine = replaced.set_index("condition")[columns].reindex([f.name for f in fitted])
        quality = pd.concat([quality, mine.reset_index(drop=True)], axis=1)
    per_type = per_type_table(own, text, [token_of(subject.tokenizer, i).piece for i in seen])
    return {
        "dictionaries": quality,
        "over_seeds": over_seeds(quality),
        **tables,
        "type_quantiles": type_quantiles(per_type),
        "memories": memories_table(own, text),
        "per_type": per_type,
        "density": density_table(own),
    }


def by_document(
    fitted: Sequence[Fitted], sums: Sequence[Sums], losses: Losses | None, heldout: Corpus, text: Text
) -> pd.DataFrame:
    """All sums of each held-out document, so that every interval can be drawn again without model or dictionary."""
    columns: dict[str, Any] = {"doc": range(heldout.n_documents), "source": heldout.names}
    columns |= {"n_tokens": heldout.lengths, "total": sums[0].total}
    columns |= {f"residual {f.name}": s.residual for f, s in zip(fitted, sums, strict=True)}
    if losses is not None:
        columns |= {"n_scored": losses.count.astype(np.int64), "nll clean": losses.clean}
        columns |= {f"nll {name}": nll for name, nll in losses.replaced.items()}
    return pd.DataFrame(columns)


def _finish(
    out: Run,
    subject: Subject,
    corpus: Corpus,
    fitted: Sequence[Fitted],
    text: Text,
    tables: dict[str, pd.DataFrame],
    reading: Reading,
) -> Path:
    from sae.figures.dictionary import FIGURES, NEEDS

    for name, table in tables.items():
        out.table(name, table, {column: unit for column, unit in UNITS.items() if column in table})
    first = fitted[0].dictionary
    assert first is not None
    info = {
        "model": subject.name,
        "d_in": first.d_in,
        "d_sae": first.d_sae,
        "k": first.k,
        "n_seeds": sum(f.dictionary is not None and f.fit == ALL for f in fitted),
        "n_types": int(text.seen.sum()),
        "n_train_tokens": int(text.counts.train.sum()),
        "n_tokens": int(text.counts.heldout.sum()),
        "n_documents": len(text.heldout),
    }
    for name, figure in FIGURES.items():
        if NEEDS[name] in tables:
            out.figure(name, figure(tables, info))
    inputs = [
        {"run": f.dictionary.path.name, "verb": "sae train", "digest": f.dictionary.digest}
        for f in fitted
        if f.dictionary is not None
    ]
    summary = {**info, **headline(tables)}
    return out.finish(summary, inputs=inputs, model=subject.facts, data=data_facts(subject, corpus, reading))


def headline(tables: dict[str, pd.DataFrame]) -> dict[str, Any]:
    """The numbers a reader wants first: in sample, held out, on withheld types, against baselines, in perplexity."""
    rows = [row for row in _records(tables["dictionaries"]) if row["method"] != EXACT]
    out: dict[str, Any] = {}
    for row in rows:
        if row["fit"] == ALL:
            name = row["method"] if pd.isna(row["seed"]) else f"{row['method']}_seed_{row['seed']}"
            out[f"fve_heldout_{name}"] = _measured(row, "fve_heldout", "fve_heldout", "share of variance")
        else:
            out[f"fve_withheld_types_{row['method']}"] = measured(row["fve_types_withheld"], None, None)
    out |= {name: rows[0][name] for name in ("fve_train", "fve_types", "l0", "dead", "never")}
    for row in _records(tables["memories"])[: len(AT_MOST)]:
        words = f"latents_on_at_most_{row['at_most']}_types"
        out |= {words: row["n_latents"], f"fve_held_by_{words}": row["fve_held"]}
    if "replacement" in tables:
        losses = [row for row in _records(tables["replacement"]) if row["condition"].startswith((SAE, ZERO))]
        for row in losses:
            name = f"delta_nll_{row['condition'].replace(' ', '_')}"
            out[name] = _measured(row, "delta_nll", "delta_nll", "nats per token")
        first = next(row for row in losses if row["condition"] != ZERO)
        out["loss_recovered"] = _measured(first, "loss_recovered", "recovered", "share of what zeroing costs")
    return out


def _records(table: pd.DataFrame) -> list[dict[str, Any]]:
    return [{str(name): value for name, value in row.items()} for row in table.to_dict("records")]


def _measured(row: dict[str, Any], name: str, prefix: str, unit: str) -> dict[str, Any]:
    return measured(row[name], row[f"{prefix}_low"], row[f"{prefix}_high"], unit)
