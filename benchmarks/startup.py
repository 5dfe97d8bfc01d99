"""How long does `satlens --help` keep a person waiting, and does it leave torch alone?"""

import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

from common import Row, command

PROBE = """
import sys
from satlens.cli import main
main(["--help"])
print(sum(name == "torch" or name.startswith("torch.") for name in sys.modules))
"""


def children_cpu() -> float:
    """CPU seconds of all finished child processes."""
    used = os.times()
    return used.children_user + used.children_system


def measure(rounds: int) -> list[Row]:
    """Wall seconds of the command (waiting is what counts), and torch's modules loaded by it."""
    program = Path(sys.executable).with_name("satlens")
    seconds, spent_before = [], children_cpu()
    for _ in range(rounds):
        start = time.perf_counter()
        subprocess.run([program, "--help"], check=True, capture_output=True)
        seconds.append(time.perf_counter() - start)
    spent = children_cpu() - spent_before
    probe = subprocess.run([sys.executable, "-c", PROBE], check=True, capture_output=True, text=True)
    modules = int(probe.stdout.splitlines()[-1])
    median = statistics.median(seconds)
    return [
        Row(
            what="satlens --help, wall seconds",
            ours=f"{median * 1e3:.0f} ms wall, {spent / rounds * 1e3:.0f} ms CPU",
            other="",
            ratio=median,
            spread=(min(seconds), max(seconds)),
            rounds=rounds,
            sense="<=",
            target=0.5,
            unit="s",
        ),
        Row(
            what="satlens --help, torch modules loaded",
            ours=str(modules),
            other="",
            ratio=modules,
            rounds=1,
            sense="<=",
            target=0,
            unit="",
        ),
    ]


if __name__ == "__main__":
    command(measure, rounds=10)
