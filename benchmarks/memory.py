"""How much memory does a pass for gate statistics and NLL take, against caching everything?"""

from typing import Any

from common import Row, build_bridge, command, compare_peaks, peak_of, text

from satlens.accumulators import GateStatistics, NllByDocument
from satlens.stream import Condition, stream
from satlens.tokens import Batch


def targeted(bridge: Any, sites: Any, batch: Batch, kept: tuple[Any, ...]) -> None:
    """One pass that keeps sums."""
    stream(bridge, sites, [batch], [Condition(name="clean", accumulators=kept)])


def peak_ours() -> float:
    """MiB of the pass; its tables of results are made beforehand, as before a pass over a whole text."""
    (bridge, sites), batch = build_bridge(), text()
    kept = (GateStatistics(len(batch.row), sites), NllByDocument(len(batch.row)))
    return peak_of(
        lambda: targeted(bridge, sites, batch, kept), lambda: targeted(bridge, sites, text(2, 16), kept)
    )


def peak_cache() -> float:
    """MiB of ``run_with_cache`` with its own defaults."""
    (bridge, _), batch = build_bridge(), text()
    return peak_of(
        lambda: bridge.run_with_cache(batch.input_ids), lambda: bridge.run_with_cache(text(2, 16).input_ids)
    )


def measure(rounds: int) -> list[Row]:
    """Memory only: the times differ by the head alone."""
    return [compare_peaks("gates and NLL memory, run_with_cache", __file__, "cache", rounds, 8)]


if __name__ == "__main__":
    command(measure, rounds=3, peaks={"ours": peak_ours, "cache": peak_cache})
