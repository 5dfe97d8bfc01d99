"""Does all of it hold on a GPU: six models against the CPU, fused attention, compiled steps, the shipped pair, costs?

Every check also runs with ``--device cpu --quick`` (tiny shapes, ``aot_eager`` for a compiler), so that it cannot rot.
"""

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from satlens.efficiency.command import ARCHITECTURES

if TYPE_CHECKING:
    from gpu_checks import Row

CHECKS = ("parity", "flash", "compile", "pair", "cost")


def report(rows: list["Row"], args: argparse.Namespace, seconds: float) -> str:
    """What was found, with what it depends on."""
    cuda = args.device != "cpu"
    device = torch.cuda.get_device_name(args.device) if cuda else "CPU"
    failed = sum(row.verdict == "**fails**" for row in rows)
    told = f"{failed} of {len(rows)} lines fail" if failed else "every check that ran holds"
    lines = [
        "# Checks and costs on one device",
        "",
        f"{device}, torch {torch.__version__}, CUDA {torch.version.cuda or 'none'}, {time.strftime('%Y-%m-%d')}, "
        f"{seconds:.0f} s: {told}. Made by `benchmarks/gpu.sh`"
        + (f" with `--device {args.device}`" if not cuda else "")
        + (" and `--quick`" if args.quick else "")
        + ".",
        "",
    ]
    if not cuda:
        lines += [
            "Only a GPU has: CUDA kernels, their memory, bfloat16 tensor cores. They were not seen here.",
            "",
        ]
    lines += ["| check | model | found | allowed | verdict |", "|---|---|---|---|---|"]
    lines += [f"| {r.check} | {r.model} | {r.found} | {r.allowed} | {r.verdict} |" for r in rows]
    return "\n".join(lines) + "\n"


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The flags."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--quick", action="store_true", help="tiny shapes, compiled by aot_eager")
    parser.add_argument("--checks", nargs="+", choices=CHECKS, default=CHECKS)
    parser.add_argument("--archs", nargs="+", choices=ARCHITECTURES, default=ARCHITECTURES)
    parser.add_argument("--backend", help="of torch.compile; inductor unless --quick")
    parser.add_argument("--minutes", type=float, default=7.0, help="no timing starts later than this")
    parser.add_argument("--out", type=Path, help="reports/gpu.md on a GPU, nothing on a CPU")
    args = parser.parse_args(argv)
    args.backend = args.backend or ("aot_eager" if args.quick else "inductor")
    if args.out is None and args.device != "cpu":
        args.out = Path(__file__).parents[1] / "reports" / "gpu.md"
    return args


def main(argv: list[str] | None = None) -> int:
    """Run the checks asked for; 1 if one fails, 2 without the device."""
    args, began = parse(argv), time.monotonic()
    if args.device != "cpu" and not torch.cuda.is_available():
        print(
            f"gpu: device {args.device} is not there, this torch sees no GPU: take --device cpu --quick",
            file=sys.stderr,
        )
        return 2
    from gpu_checks import (
        FULL,
        QUICK,
        compiled,
        flash,
        pair,
        parity,
    )  # slow to import, so not before that line
    from gpu_costs import cost

    torch.set_float32_matmul_precision("highest")  # TF32 would be told as a difference
    shape = QUICK if args.quick else FULL
    makers: dict[str, Callable[[], Iterator[Row]]] = {
        "parity": lambda: parity(args, shape),
        "flash": lambda: flash(args, shape),
        "compile": lambda: compiled(args, shape),
        "pair": lambda: pair(args, shape),
        "cost": lambda: cost(args, began + 60 * args.minutes),
    }
    rows = []
    for check in CHECKS:
        if check in args.checks:
            print(f"gpu: {check}", file=sys.stderr, flush=True)
            rows += list(makers[check]())
    text = report(rows, args, time.monotonic() - began)
    print(text)
    if args.out is not None:
        args.out.write_text(text, encoding="utf-8")
    return int(any(row.verdict == "**fails**" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
