"""Runs every benchmark and writes one table: what, ours, the other, ratio, target, and whether it is met."""

import argparse
import importlib
import json
import os
import platform
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from common import BATCH, MALLOC, POS, SHAPE, Row, table

ROUNDS = {
    "startup": 10,
    "bridge_overhead": 7,
    "gates": 41,
    "lens": 7,
    "memory": 3,
    "ablation": 7,
    "dictionary": 11,
    "labelling": 1,
    "reference": 15,
    "dose_response": 2,
}
QUICK = {
    "startup": 3,
    "bridge_overhead": 3,
    "gates": 11,
    "lens": 2,
    "memory": 1,
    "ablation": 2,
    "dictionary": 3,
    "labelling": 1,
    "reference": 3,
    "dose_response": 1,
}


def main() -> None:
    """A benchmark is no test: the exit status is 0 whatever the numbers, but a target missed is said."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer rounds, rougher ratios")
    parser.add_argument("--only", nargs="+", choices=list(ROUNDS), default=list(ROUNDS), help="some of them")
    parser.add_argument("--out", type=Path, default=Path("runs"))
    args = parser.parse_args()
    rows: list[Row] = []
    failed: dict[str, str] = {}
    for name in args.only:
        rounds = (QUICK if args.quick else ROUNDS)[name]
        print(f"{name}: {rounds} rounds", file=sys.stderr, flush=True)
        try:
            rows += importlib.import_module(name).measure(rounds)
        except (Exception, SystemExit) as error:  # one broken benchmark must not hide the others
            failed[name] = f"{type(error).__name__}: {error}"
    report = markdown(rows, failed)
    print(report)
    print(write(args.out, report, rows, failed))


def settings() -> dict[str, Any]:
    """What the numbers depend on."""
    return {
        "torch": torch.__version__,
        "threads": 1,
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "python": platform.python_version(),
        "malloc": {name: os.environ.get(name, "default") for name in MALLOC},
        "shape": {**SHAPE, "batch": BATCH, "pos": POS},
    }


def markdown(rows: list[Row], failed: dict[str, str]) -> str:
    """The table, what was missed in words, and the settings."""
    missed = [row.what for row in rows if not row.met]
    lines = [table(rows), ""]
    lines += [f"not met: {', '.join(missed)}" if missed else "every target measured is met"]
    lines += [f"failed to run: {name} ({why})" for name, why in failed.items()]
    lines += ["", *(f"- {name}: {value}" for name, value in settings().items())]
    return "\n".join(lines) + "\n"


def write(out: Path, report: str, rows: list[Row], failed: dict[str, str]) -> Path:
    """A folder with both files, renamed into place when it is whole."""
    out.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix=".bench-", dir=out))
    record = {
        "settings": settings(),
        "rows": [asdict(row) | {"met": row.met} for row in rows],
        "failed": failed,
    }
    (made / "bench.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    (made / "bench.md").write_text(report, encoding="utf-8")
    made.chmod(0o755)
    final = out / time.strftime("bench-%Y%m%dT%H%M%S")
    made.rename(final)
    return final


if __name__ == "__main__":
    main()
