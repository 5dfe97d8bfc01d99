"""Everything about one model on one page: gates, ablations, logit lens and self-checks, in two passes, then the report.

One pass over calibration documents finds the constants of the ablations; one pass over the scored documents serves
gates, lens and every ablation together; a baseline, if any, is read once on the same tokens.

Examples:
    satlens suite
    satlens suite path/to/final --baseline path/to/twin/final --tokens 1000000 --out reports/mine
"""

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import tyro

from analyses import ablate, doctor, gates, lens
from satlens.log import say
from satlens.plots.export import export_runs
from satlens.reading import Reading, Subject, begin_run, measure, open_subject, require_same_text
from satlens.report import assemble

TWIN = {"reference-satformer": "reference-transformer"}


@dataclass(frozen=True, kw_only=True)
class Config:
    """Flags of `satlens suite`."""

    model: tyro.conf.Positional[str] = "reference-satformer"
    """A checkpoint folder, or reference-satformer."""
    baseline: str | None = None
    """A model to compare with on the same tokens; the reference SATFormer brings its twin."""
    scopes: tuple[ablate.Scope, ...] = ("layer", "upward", "downward")
    """Which ablations to run (see `satlens ablate --help`)."""
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
    small = dataclasses.replace(config.reading, tokens=2000)
    runs.append(doctor.run(doctor.Config(model=config.model, reading=small)))
    page = assemble(runs, config.out)
    export_runs(runs, config.out / "figures")
    say(f"the report is at {page}")
    return [*runs, page]


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
