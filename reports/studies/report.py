"""Measure the trained studies and write what they say into README.md and reports/studies/README.md.

Example: python reports/studies/report.py --models runs/studies --runs runs/studies/measured
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from analyses import access, compare
from satlens.efficiency import train_command
from satlens.efficiency.command import Config as Bench
from satlens.reading import Reading
from satlens.report import assemble
from satlens.run import FinishedRun, open_run

ROOT = Path(__file__).parents[2]
BEGIN, END = "<!-- measured: reports/studies/report.py -->", "<!-- /measured -->"
ARCHITECTURES = ("transformer", "satformer", "resformer", "denseformer", "muddformer", "hyperconnections")
STUDIES = {
    "architectures": ARCHITECTURES,
    "gates": (
        "satformer",
        *(f"satformer-{g}" for g in ("sigmoid", "tanh", "identity", "softmax", "softmax_sigmoid")),
    ),
    "depth": ("satformer", "satformer-thin", "resformer", "resformer-thin"),
}
"""Study -> groups of models; each has two seeds, the first is what the others are compared with."""


def main() -> None:
    """Time training steps, compare each study's models on the held-out text, and write blocks and page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", type=Path, default=Path("runs/studies"))
    parser.add_argument("--runs", type=Path, default=Path("runs/studies/measured"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--reuse", action="store_true", help="write from the newest runs there, measure nothing"
    )
    given = parser.parse_args()
    if not given.reuse:
        measure(given.models, given.runs, given.rounds)
    found = newest(given.runs)
    assemble(
        [run.path for run in found.values()],
        ROOT / "reports" / "studies",
        static=True,
        title="satlens: the studies",
    )
    readme = ROOT / "README.md"
    before, rest = readme.read_text(encoding="utf-8").split(BEGIN)
    text = f"{before}{BEGIN}\n\n{block(found)}\n{END}{rest.split(END, 1)[1]}"
    readme.write_text(text, encoding="utf-8")


def measure(models: Path, runs: Path, rounds: int) -> None:
    """One bench, one comparison a study, one look at how much V1 arrives."""
    bench = train_command.run(Bench(preset="study", rounds=rounds, runs=runs))
    reading = Reading(tokens=0, runs=runs)
    for study, groups in STUDIES.items():
        folders = [str(path) for group in groups for path in sorted(models.glob(f"{group}-4?/final"))]
        timed = bench if study == "architectures" else None
        compare.run(compare.Config(models=tuple(folders), bench=timed, reading=reading))
    pair = tuple(str(models / f"{name}-42" / "final") for name in ("satformer", "resformer"))
    access.run(access.Config(models=pair, reading=reading))


def newest(folder: Path) -> dict[str, FinishedRun]:
    """The newest finished run of every kind; comparisons by the study they are of."""
    found: dict[str, FinishedRun] = {}
    for path in sorted(folder.glob("*-2*")):
        if not (path / "manifest.json").exists():
            continue
        run = open_run(path)
        verb = run.manifest.verb
        if verb != "compare":
            found[verb] = run
            continue
        groups = set(run.tables["groups"]["group"])
        found |= {study: run for study, names in STUDIES.items() if groups <= set(names)}
    return {kind: found[kind] for kind in ("bench-train", *STUDIES, "access") if kind in found}


def block(found: dict[str, FinishedRun]) -> str:
    """The README's words, from the runs' tables."""
    models = found["architectures"].tables["models"]
    info = found["architectures"].manifest.summary
    first = models.iloc[0]
    seeds = ", ".join(str(seed) for seed in sorted(set(models["seed"])))
    lines = [
        f"Models of {models['parameters'].min():,} to {models['parameters'].max():,} parameters, "
        f"{first['tokens_seen']:,} training tokens, seeds {seeds}; {info['n_tokens']:,} scored predictions in "
        f"{info['n_documents']} held-out documents. NLL minus the first group's, nats per token: mean over seeds [95 % "
        "interval over documents], then the seeds' own.",
        "",
        "| study | model | NLL | minus the first | seeds' own NLL |",
        "|---|---|---|---|---|",
    ]
    for study in STUDIES:
        for row in found[study].tables["groups"].to_dict("records"):
            lines.append(
                f"| {study} | {row['group']} | {_cell(row, 'nll')} | {_cell(row, 'delta_nll')} | "
                f"{row['nll_seed_low']:.3f} to {row['nll_seed_high']:.3f} |"
            )
    lines += ["", *costs(found["bench-train"]), "", *unequal([found[study] for study in STUDIES])]
    return "\n".join(lines) + "\n"


def costs(bench: FinishedRun) -> list[str]:
    """Step time, and what is kept for the backward pass, against the Transformer."""
    info = bench.manifest.summary
    rows = bench.tables["efficiency"].query("status == 'measured'")
    parts = [
        f"{row['model']} {row['time_ratio']:.2f} ({row['time_low']:.2f} to {row['time_high']:.2f}), kept for the "
        f"backward pass {row['saved_ratio']:.3f}"
        for row in rows.to_dict("records")[1:]
    ]
    return [
        f"- A training step against the Transformer's ({info['device']}, {info['precision']}, {info['batch']} tokens, "
        f"{info['clock']} time, range over {info['rounds']} rounds): " + "; ".join(parts) + "."
    ]


def unequal(runs: Sequence[FinishedRun]) -> list[str]:
    """What was not made alike."""
    flags = {name: words for run in runs for name, words in run.manifest.summary["unequal"].items()}
    if not flags:
        return [
            "- All models of a study saw the same data in the same order, with the same recipe and seeds."
        ]
    return [
        "- Not made alike: " + "; ".join(f"{name} ({words})" for name, words in sorted(flags.items())) + "."
    ]


def _cell(row: "dict[str, float]", name: str) -> str:
    low, high = row[f"{name}_low"], row[f"{name}_high"]
    return f"{row[name]:.3f}" + ("" if pd.isna(low) else f" [{low:.3f}, {high:.3f}]")


if __name__ == "__main__":
    main()
