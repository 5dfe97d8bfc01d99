"""What happens when the carried direction is changed: doses, replacements, noise, windows, many layers, and the gate.

Edits the residual stream at a layer's input, from the 17th token of a document on, along m^: the direction of the mean
stream there, fitted on documents that are not evaluated. Beside every edit stand its controls: as long a displacement
along random directions orthogonal to m^, and the same at the norm the stream had. Measures KL to the clean model, NLL,
entropy, and the share of MLP gates on duty (above 0) and firing (above 0.5), each with its interval (spec part B).
Each experiment's tables are written as it ends; one that fails is named and costs no other.

Experiments: dose (the projection on m^ times alpha), prediction (the same from one clean pass, beside the measured),
replacement (the projection moved to other directions), recovery (does the stream find back), co-removal (many layers at
once), gate (SATFormer's own gate, beside closing it), noise (the same energy, no direction), window (positions 64-71,
read later), ladder (prose to a repeated token), twin (the doses where nothing was trained).

Examples:
    satlens reference-causal reference-transformer
    satlens reference-causal path/to/phi-2 --layers 6 10 14 --experiments dose replacement twin --device cuda
    satlens reference-causal reference-satformer --experiments gate prediction --tokens 20000
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import pandas as pd
import tyro

from satlens import reference as shipped
from satlens.errors import SatlensError, UserError
from satlens.log import progress, say
from satlens.reading import Reading, begin_run, process_place
from satlens.run import Run, measured

VERB = "reference-causal"
Experiment = Literal[
    "dose", "prediction", "replacement", "recovery", "co-removal", "gate", "noise", "window", "ladder", "twin"
]
Control = Literal["matched", "matched-signed", "published-unmatched"]


@dataclass(frozen=True, kw_only=True)
class Config:
    """Flags of `satlens reference-causal`."""

    model: tyro.conf.Positional[str] = "reference-transformer"
    """A model folder, or a shipped name."""
    experiments: tuple[Experiment, ...] = (
        "dose",
        "prediction",
        "replacement",
        "recovery",
        "co-removal",
        "gate",
    )
    """What to do (above); gate is left out where a model has none of its own."""
    layers: tuple[int, ...] = ()
    """Layers whose input is edited; left out, those at .20, .35, .50 and .65 of the depth."""
    alphas: tuple[float, ...] = (0.0, 0.5, 1.0, 1.5, 2.0)
    """Doses: 0 removes the reference, 1 changes nothing."""
    controls: tuple[Control, ...] = ("matched", "matched-signed")
    """Kinds of control; published-unmatched moves far less and only explains published numbers."""
    draws: int = 8
    """Random directions of each control distribution."""
    twins: int = 2
    """Random-init twins of the model for the twin experiment, each with its own m^."""
    twin_models: tuple[str, ...] = ()
    """Folders of further twins (same shape, other weights)."""
    same_docs: bool = False
    """Fit m^ on the documents that are evaluated, as the paper does."""
    reading: Annotated[Reading, tyro.conf.arg(name="")] = field(default_factory=Reading)
    """Text and machine settings."""

    def __post_init__(self) -> None:
        if not self.experiments:
            raise UserError("nothing to do: name at least one of --experiments")
        if self.draws < 8:
            raise UserError(f"--draws {self.draws} make no control distribution: use at least 8")
        if not self.alphas:
            raise UserError("give at least one of --alphas")
        if "twin" in self.experiments and self.twins < 1 and not self.twin_models:
            raise UserError("the twin experiment needs --twins of at least 1, or --twin-models")


@dataclass(frozen=True, kw_only=True)
class Bench:
    """What every experiment is given."""

    config: Config
    setting: Any
    sets: Any


def run(config: Config) -> Path | None:
    """Run the experiments on one model; returns the run directory (None in helper processes).

    Raises:
        SatlensError: an experiment failed; the others' results are in the run that the message names.
    """
    from satlens.carried.documents import documents
    from satlens.carried.opening import open_reader
    from satlens.carried.setting import chosen_layers
    from satlens.reading import start_processes

    start_processes()
    reader = open_reader(config.model, config.reading)
    names = runnable(config, reader)
    layers = chosen_layers(reader, config.layers)
    sets = documents(reader, config.reading, same=config.same_docs)
    out = begin_run(VERB, config, config.reading)
    tables: dict[str, pd.DataFrame] = {}
    failed: dict[str, SatlensError] = {}
    with progress(disable=process_place()[0] != 0) as bar:
        setting = prepare(config, reader, layers, sets, bar)
        bench = Bench(config=config, setting=setting, sets=sets)
        for name in names:
            try:
                made, tally = EXPERIMENTS[name](bench)
            except SatlensError as error:
                failed[name] = error
                continue
            tables |= made
            if out is not None:
                write(out, name, made, tally)
    if out is None:
        return None
    path = finish(out, bench, tables, failed)
    if failed:
        mistakes = all(isinstance(error, UserError) for error in failed.values())
        words = "; ".join(f"{name}: {error}" for name, error in failed.items())
        raise (UserError if mistakes else SatlensError)(f"{words} (what the others found is in {path})")
    return path


def runnable(config: Config, reader: Any) -> list[str]:
    """The experiments in the order of ``EXPERIMENTS``, without the gate experiment where there is no gate.

    Raises:
        UserError: nothing is left.
    """
    names = [name for name in EXPERIMENTS if name in config.experiments]
    if "gate" in names and not reader.value_reads:
        if len(names) == 1:
            raise UserError(f"{reader.name} has no gate on first-layer values: name other --experiments")
        say(f"note: {reader.name} has no gate on first-layer values, so the gate experiment is left out")
        names.remove("gate")
    return names


def prepare(config: Config, reader: Any, layers: tuple[int, ...], sets: Any, bar: Any) -> Any:
    """Fit m^ on the fit documents and gather what experiments share."""
    from satlens.carried.fit import fit
    from satlens.carried.setting import new_setting

    tasks: dict[str, Any] = {}

    def told(words: str, rows: Any) -> None:
        if words not in tasks:
            tasks[words] = bar.add_task(words, total=None)
        bar.update(tasks[words], advance=len(rows.doc))

    gates = layers if "prediction" in config.experiments else ()
    reading = config.reading
    fitted = fit(
        reader, sets.fit, batch_size=reading.batch_size, gates=gates, on_batch=partial(told, "fitting m^")
    )
    return new_setting(
        reader,
        fitted,
        sets.evaluate,
        layers,
        n_resamples=reading.resamples,
        draws=config.draws,
        batch_size=reading.batch_size,
        seed=reading.seed,
        on_batch=told,
    )


def dose(bench: Bench) -> Any:
    """Doses and their controls."""
    from satlens.carried.doses import dose_response

    return dose_response(bench.setting, bench.config.alphas, bench.config.controls)


def prediction(bench: Bench) -> Any:
    """Doses predicted from one clean pass, and measured."""
    from satlens.carried.forecast import forecast

    return forecast(bench.setting, bench.sets.fit, bench.config.alphas)


def replacement(bench: Bench) -> Any:
    """The projection moved to other directions."""
    from satlens.carried.identity import replacements

    return replacements(bench.setting)


def recovery(bench: Bench) -> Any:
    """The stream's way back to m^."""
    from satlens.carried.reach import recovery as measure

    return measure(bench.setting)


def co_removal(bench: Bench) -> Any:
    """Removal at many layers at once."""
    from satlens.carried.reach import co_removal as measure

    return measure(bench.setting)


def gate(bench: Bench) -> Any:
    """SATFormer's own gate."""
    from satlens.carried.own_gate import own_gates

    return own_gates(bench.setting)


def noise(bench: Bench) -> Any:
    """Noise of the reference's energy."""
    from satlens.carried.identity import noises

    return noises(bench.setting)


def window(bench: Bench) -> Any:
    """Removal at a few positions, read later."""
    from satlens.carried.reach import windows

    return windows(bench.setting)


def ladder(bench: Bench) -> Any:
    """From prose to a repeated token."""
    from satlens.carried.texts import text_ladder

    return text_ladder(bench.setting), None


def twin(bench: Bench) -> Any:
    """The same doses where nothing was learned."""
    from satlens.carried.doses import twin_doses
    from satlens.carried.opening import open_reader
    from satlens.carried.opening import twin as make

    config, reader = bench.config, bench.setting.reader
    makers = [partial(make, reader, config.reading.seed + 1 + number) for number in range(config.twins)]
    makers += [partial(open_reader, model, config.reading) for model in config.twin_models]
    parts = [twin_doses(bench.setting, maker(), bench.sets.fit, config.alphas) for maker in makers]
    return {name: pd.concat([part[name] for part in parts], ignore_index=True) for name in parts[0]}, None


# an experiment answers with its tables and, where there are some, the sums by document behind them
EXPERIMENTS: Mapping[str, Callable[[Bench], Any]] = {
    "dose": dose,
    "prediction": prediction,
    "replacement": replacement,
    "recovery": recovery,
    "co-removal": co_removal,
    "gate": gate,
    "noise": noise,
    "window": window,
    "ladder": ladder,
    "twin": twin,
}


def write(out: Run, name: str, tables: Mapping[str, pd.DataFrame], tally: Any) -> None:
    """Put an experiment's tables and sums by document into the run, as soon as it has ended."""
    from satlens.carried.outcomes import MEASURES, arrays

    for table, rows in tables.items():
        units = {column: unit for column, unit in MEASURES.items() if column in rows}
        out.table(table, rows, units)
    if tally is not None:
        out.tensor(f"{name}_by_document", dict(arrays(tally)))
    out.log("experiment", name=name, tables=list(tables))


def finish(
    out: Run, bench: Bench, tables: dict[str, pd.DataFrame], failed: Mapping[str, SatlensError]
) -> Path:
    """Write figures and make the run whole."""
    from analyses.figures.reference_causal import FIGURES, NEEDS

    setting, sets = bench.setting, bench.sets
    documents = sets.evaluate
    out.table(
        "documents",
        pd.DataFrame(
            {"doc": range(documents.n_documents), "source": documents.names, "n_tokens": documents.far_counts}
        ),
    )
    info = {
        "model": setting.reader.name,
        "n_layers": setting.reader.n_layers,
        "layers": list(setting.layers),
        "draws": setting.draws,
        "n_tokens": int(documents.far_counts.sum()),
        "n_documents": documents.n_documents,
        "n_fit_tokens": setting.reference.n_tokens,
        "n_fit_documents": sets.fit.n_documents,
        "same_documents": sets.same,
    }
    for name, figure in FIGURES.items():
        if NEEDS[name] <= set(tables):
            out.figure(name, figure(tables, info))
    text = (bench.config.reading.text or shipped.TEXT).name
    data = {
        "text": text,
        "digest": documents.digest(),
        "fit_digest": sets.fit.digest(),
        "n_documents": documents.n_documents,
        "n_tokens": info["n_tokens"],
        "first_ids": documents.ids[0][:16].tolist(),
    }
    reasons = {name: str(error) for name, error in failed.items()}
    summary = {**info, "failed": reasons, **headline(tables)}
    return out.finish(summary, model=dict(setting.reader.facts), data=data)


def headline(tables: Mapping[str, pd.DataFrame]) -> dict[str, Any]:
    """Removal at each layer: what it releases, what it costs, and how many times a control's cost that is."""
    out: dict[str, Any] = {}
    if "dose" in tables:
        table = tables["dose"]
        removed = table[(table["direction"] == "reference") & (table["alpha"] == 0) & ~table["norm_kept"]]
        for row in removed.to_dict("records"):
            at = f"layer_{row['layer']}_removal"
            for name, unit in (
                ("release", "share of gates and positions"),
                ("kl_far", "nats"),
                ("delta_nll", "nats"),
            ):
                out[f"{at}_{name}"] = _measured(row, name, unit)
        versus = tables["dose_controls"]
        if len(versus):
            plain = (versus["alpha"] == 0) & ~versus["norm_kept"] & (versus["control"] == "matched")
            for row in versus[plain & (versus["measure"] == "kl_far")].to_dict("records"):
                out[f"layer_{row['layer']}_removal_kl_far_over_controls"] = _measured(row, "ratio", "times")
    if "prediction_summary" in tables:
        from satlens.carried.forecast import failures_in_words

        out |= failures_in_words(tables["prediction_summary"])
    return out


def _measured(row: Mapping[Any, Any], name: str, unit: str) -> dict[str, Any]:
    ends = (row[name], row[f"{name}_low"], row[f"{name}_high"])
    return measured(*(None if pd.isna(end) else end for end in ends), unit)
