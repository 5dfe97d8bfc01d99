"""What do gate statistics cost on top of a pass that measures nothing?"""

from typing import Any

import torch
from common import Row, build_bridge, command, compare, interleave, text

from satlens.accumulators import GateStatistics
from satlens.stream import Condition, stream
from satlens.tokens import Batch


class Nothing:
    """An accumulator that reads nothing, so that the pass is the model's blocks and no more."""

    reads: tuple[str, ...] = ()

    def update(self, batch: Batch, role: str, layer: int, tensor: torch.Tensor) -> None:
        """Never called."""

    def merge(self, other: "Nothing") -> None:
        """Nothing to add."""


def measure(rounds: int) -> list[Row]:
    """CPU time with the statistics over CPU time without; making the empty tables is not part of a pass."""
    (bridge, sites), batch = build_bridge(), text()
    statistics = GateStatistics(len(batch.row), sites)

    def one_pass(accumulator: Any) -> None:
        stream(bridge, sites, [batch], [Condition(name="clean", accumulators=(accumulator,))])

    seconds = interleave({"ours": lambda: one_pass(statistics), "bare": lambda: one_pass(Nothing())}, rounds)
    return [compare("gate statistics, bare pass", seconds, "ours", "bare", "<=", 1.03)]


if __name__ == "__main__":
    command(measure, rounds=41)
