"""Everything about one model on one page: gates, ablations, logit lens, V1 dictionaries, carried direction, checks.

One pass over calibration documents finds the constants of the ablations; one pass over the scored documents serves
gates, lens and every ablation together; a baseline, if any, is read once on the same tokens. Then dictionaries of V1
are trained, for the baseline too, labelled by the rules judge, which is calibrated beside, and followed into the gates
and heads. Last, the carried direction that gates rest on. Started again, finished dictionaries are kept.

Examples:
    satlens suite
    satlens suite path/to/final --baseline path/to/twin/final --tokens 1000000 --out reports/mine
"""

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import tyro

from analyses import ablate, categories, doctor, flow, gates, lens, reference
from sae import calibrate_command, label_command, train_command
from sae.labels import open_labels
from satlens.errors import UserError
from satlens.log import say
from satlens.plots.export import export_runs
from satlens.reading import (
    Reading,
    Subject,
    begin_run,
    measure,
    open_subject,
    process_place,
    require_same_text,
)
from satlens.report import assemble

TWIN = {"reference-satformer": "reference-transformer"}
COUNTED = 150_000
"""Least tokens that dictionaries are weighted by, where the text has them: counting costs nothing."""
WITHHELD = 0.1
"""Share of token types that the control never sees; only the model's own dictionaries have one."""
CHECKED = 10_000
"""Tokens on which the flow's scores are checked against ablations, each of which is a pass of its own."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """Flags of `satlens suite`."""

    model: tyro.conf.Positional[str] = "reference-satformer"
    """A checkpoint folder, or reference-satformer."""
    baseline: str | None = None
    """A model to compare with on the same tokens; the reference SATFormer brings its twin."""
    scopes: tuple[ablate.Scope, ...] = ("layer", "upward", "downward")
    """Which ablations to run (see `satlens ablate --help`)."""
    sae_tokens: int = 3_000_000
    """Tokens that each V1 dictionary draws; 0 leaves out dictionaries, labels, categories and flow."""
    sae_batch: int = 4096
    """Tokens drawn for one step of a dictionary."""
    sae_lr: float = 8e-3
    """Learning rate of the dictionaries: above the paper's, since they draw a thirtieth of its tokens."""
    seeds: tuple[int, ...] = (0, 1)
    """Training seeds of the dictionaries."""
    out: Path = Path("reports/demo")
    """Folder for the page."""
    reading: Annotated[Reading, tyro.conf.arg(name="")] = field(default_factory=Reading)
    """Text and machine settings."""


def run(config: Config) -> list[Path] | None:
    """Measure, write the runs, assemble the page; returns runs and page (None in helper processes)."""
    baseline_name = config.baseline or TWIN.get(config.model)
    subject = open_subject(config.model, config.reading)
    baseline = None if baseline_name is None else open_subject(baseline_name, config.reading)
    if baseline is not None:
        require_same_text(subject, baseline)
    calibration, scored = ablate.split(subject, config.reading)
    gated = subject.sites.gate_kind is not None
    ablation = ablate.Config(model=config.model, scopes=config.scopes, reading=config.reading)
    known = ablate.calibrate(subject, calibration, config.reading) if gated else None
    planned = ablate.plan(ablation, subject, scored, known) if gated else []
    settings: dict[str, Any] = {
        "gates": gates.Config(model=config.model, reading=config.reading),
        "ablate": ablation,
        "lens": lens.Config(model=config.model, baseline=baseline_name, reading=config.reading),
    }
    verbs = ("gates", "ablate", "lens") if gated else ("lens",)
    begun = {verb: begin_run(verb, settings[verb], config.reading) for verb in verbs}
    kept = _measure(subject, scored, [p.condition for p in planned], gated, config.reading)
    subjects, lenses = [subject], [kept["lens"]]
    if baseline is not None:
        subjects.append(baseline)
        lenses.append(_measure(baseline, scored, [], False, config.reading)["lens"])
    out = {verb: run for verb, run in begun.items() if run is not None}
    if not out:
        return None
    runs = []
    if gated:
        runs.append(gates.finish(out["gates"], subject, scored, kept["gates"], config.reading))
        clean = (calibration, scored), kept["nll"], planned, known
        runs.append(ablate.finish(out["ablate"], subject, *clean, config.reading))
    runs.append(lens.finish(out["lens"], subjects, scored, lenses, config.reading))
    if config.sae_tokens and process_place()[1] > 1:
        say(
            "note: dictionaries are trained by one process: run satlens sae train, label, categories, flow apart"
        )
    elif config.sae_tokens:
        # a static gate has no kinds of tokens to prefer
        asked = gated and subject.sites.gate_kind != "static"
        runs += describe_v1(config, baseline_name, runs[0] if asked else None)
    if process_place()[1] == 1:
        runs += rest(config)
    small = dataclasses.replace(config.reading, tokens=2000)
    runs.append(doctor.run(doctor.Config(model=config.model, reading=small)))
    page = assemble(runs, config.out)
    export_runs(runs, config.out / "figures")
    say(f"the report is at {page}")
    return [*runs, page]


def describe_v1(config: Config, baseline: str | None, gates_run: Path | None) -> list[Path]:
    """Dictionaries of the model and its baseline, the rules' labels of them, and where gate and heads let them in.

    Labels are those of the embedded rules, which need no model: what they cannot decide is not labelled.
    """
    reading, root = config.reading, config.reading.runs
    counted = dataclasses.replace(reading, tokens=reading.tokens and max(reading.tokens, COUNTED))
    runs: list[Path] = []
    labels: dict[str, list[Path]] = {}
    folders: dict[str, list[Path]] = {}
    for name in (config.model, *([baseline] if baseline else [])):
        runs_of_name = train_command.run(
            train_command.Config(
                model=name,
                sae_tokens=config.sae_tokens,
                sae_batch=config.sae_batch,
                lr=config.sae_lr,
                seeds=config.seeds,
                out=root / "dictionaries" / f"suite-{Path(name).name}",
                reading=counted,
                withhold_types=WITHHELD if name == config.model else 0.0,
            )
        )
        measured, *folders[name] = runs_of_name
        labels[name] = [
            label_command.run(
                label_command.Config(sae=folder, model=name, runs=root, resamples=reading.resamples)
            )
            for folder in folders[name]
        ]
        runs += [measured, *labels[name]]
    runs.append(
        calibrate_command.run(
            calibrate_command.Config(model=config.model, runs=root, resamples=reading.resamples)
        )
    )
    if gates_run is None:
        return runs
    some = {
        name: [path for path in paths if len(open_labels(path).features)] for name, paths in labels.items()
    }
    if some[config.model]:
        every = tuple(path for paths in some.values() for path in paths)
        runs.append(
            categories.run(
                categories.Config(
                    model=config.model,
                    labels=every,
                    gates=gates_run,
                    baseline=baseline if baseline and some[baseline] else None,
                    runs=root,
                    seed=reading.seed,
                    resamples=reading.resamples,
                )
            )
        )
    else:
        say("note: no latent was accepted as a feature, so there is no gating by category to show")
    first = flow.Config(
        model=config.model,
        sae=folders[config.model][0],
        labels=labels[config.model][0],
        gates=gates_run,
        check_tokens=CHECKED,
        reading=reading,
    )
    traced = flow.run(first)
    return runs if traced is None else [*runs, traced]


def rest(config: Config) -> list[Path]:
    """On what the model's gates rest; nothing where no document is long enough to say."""
    try:
        made = reference.run(reference.Config(model=config.model, reading=config.reading))
    except UserError as error:
        say(f"note: the carried direction is left out: {error}")
        return []
    return [] if made is None else [made]


def _measure(
    subject: Subject, corpus: Any, edited: list[Any], gated: bool, reading: Reading
) -> dict[str, Any]:
    """One pass for the clean statistics and every edited condition; the accumulators by name."""
    from satlens.accumulators import NllByDocument
    from satlens.stream import Condition

    kept = {"nll": NllByDocument(corpus.n_documents), "lens": lens.accumulator(subject, corpus)}
    if gated:
        kept["gates"] = gates.accumulator(subject, corpus)
    clean = Condition(name="clean", accumulators=tuple(kept.values()))
    measure(subject, corpus, [clean, *edited], reading, subject.name)
    return dict(zip(kept, clean.accumulators, strict=True))
