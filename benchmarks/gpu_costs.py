"""What a step of the six models costs on one device: seconds, tokens a second and peak memory at 130M and 760M."""

import argparse
import itertools
import time
from collections.abc import Iterator
from typing import Any

from gpu_checks import Row

from satlens.efficiency.alternate import run_child, table
from satlens.efficiency.child import Job
from satlens.errors import SatlensError

COSTS = {"small": (4, 2048), "large": (2, 2048)}
"""Scale -> rows and tokens in a row: 130M and 760M parameters, small enough that no GPU of 80 GB needs accumulation."""


def cost(args: argparse.Namespace, ends: float) -> Iterator[Row]:
    """Seconds and memory of a step, each in a process of its own, until the time is up."""
    cuda = args.device != "cpu"
    scales = {"study": (2, 32)} if args.quick else COSTS
    for what, scale in itertools.product(("train", "forward"), scales):
        found: dict[str, list[dict[str, Any]]] = {}
        broken: dict[str, str] = {}
        jobs: dict[str, Job] = {}
        for arch in args.archs:
            rows, pos = scales[scale]
            jobs[arch] = Job(
                what=what,
                scale=scale,
                arch=arch,
                batch_size=rows,
                seq_length=pos,
                steps=2 if args.quick else 5,
                warmup=1 if args.quick else 3,
                d_vocab=128 if args.quick else 32_000,
                device=args.device,
                precision="bf16" if cuda else "fp32",
                compile=False,
                threads=1,
            )
            if time.monotonic() < ends:
                try:
                    found[arch] = [run_child(arch, jobs[arch])]
                except SatlensError as error:  # it broke, and not for lack of memory
                    broken[arch] = str(error)
        name = f"{what}, {scale}, {rows} x {pos}"
        for line in table(found, jobs, "seconds").to_dict("records") if found else []:
            yield _cost_row(name, line)
        for arch in args.archs:
            if arch in broken:
                yield Row(check=name, model=arch, found=broken[arch], allowed="", verdict="**fails**")
            elif arch not in found:
                yield Row(check=name, model=arch, found="the time was up", allowed="", verdict="skipped")


def _cost_row(name: str, line: dict[str, Any]) -> Row:
    if line["status"] == "failed":
        return Row(check=name, model=line["model"], found=line["reason"], allowed="", verdict="skipped")
    ratio = f" ({line['time_ratio']:.2f} x the first model)" if line.get("time_ratio", 0) > 0 else ""
    words = f"{line['seconds'] * 1e3:.1f} ms{ratio}, {line['tokens_per_second']:,.0f} tokens/s"
    words += f", {line['peak_mib']:,.0f} MiB, {line['parameters'] / 1e6:.1f}M parameters"
    return Row(check=name, model=line["model"], found=words, allowed="", verdict="measured")
