"""Rebuild the reference pair from nothing: text, tokenizer, both models, package data. Started again, it resumes.

Example: python reports/reference/rebuild.py --work runs/reference
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path

from satlens.reference import FOLDER

HERE = Path(__file__).parent
PRESETS = HERE.parents[1] / "satlens" / "training" / "presets"
PAIR = ("satformer", "transformer")


def steps(work: Path) -> list[list[list[str]]]:
    """Commands in order; the inner lists of one step run side by side."""
    python, satlens = [sys.executable], [sys.executable, "-m", "satlens.cli"]
    todo: list[list[list[str]]] = []
    if not (work / "corpus" / "sources.json").exists():
        todo.append([[*python, str(HERE / "corpus.py"), "--out", str(work / "corpus")]])
    if not (work / "data" / "data.json").exists():
        # the shipped tokenizer, so that the same ids come out: its rarest letters were drawn by lot when it was made
        shipped = FOLDER / "satformer"
        has_one = (shipped / "tokenizer.json").exists()
        tokenizer = ["--tokenizer", str(shipped)] if has_one else ["--vocab-size", "8192"]
        places = ["--sources", str(work / "corpus" / "text"), "--out", str(work / "data")]
        todo.append([[*satlens, "data", "build", *places, *tokenizer, "--val-fraction", "0.04"]])
    training = []
    for name in PAIR:
        if not (work / name / "final" / "satlens.json").exists():
            recipe = str(PRESETS / f"reference-{name}.toml")
            places = ["--data", str(work / "data"), "--out", str(work / name), "--threads", "1"]
            training.append([*satlens, "train", recipe, *places])
    return [*todo, training, [[*python, str(HERE / "package.py"), "--work", str(work)]]]


def main() -> None:
    """Run what is left to do."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", type=Path, default=Path("runs/reference"))
    work = parser.parse_args().work
    work.mkdir(parents=True, exist_ok=True)
    # one thread each: two processes side by side use two cores better than two threads of one
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    for side_by_side in steps(work):
        running = [subprocess.Popen(command, env=environment) for command in side_by_side]
        if any(process.wait() for process in running):
            sys.exit("a step failed (see above); start again to resume")


if __name__ == "__main__":
    main()
