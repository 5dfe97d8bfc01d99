"""What a bridge costs: CPU time of interleaved rounds, as ratios to the bare model."""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from satlens.checkpoint import load_bridge
from satlens.hf import MODELS

SIZES = {
    "hidden_size": 256,
    "num_hidden_layers": 8,
    "num_heads": 8,
    "intermediate_size": 768,
    "vocab_size": 8192,
}


def build(model_type: str) -> Any:
    """An untrained model of the size of the shipped pair."""
    torch.manual_seed(0)
    config = MODELS[model_type].config_class(**SIZES, max_position_embeddings=512, qk_norm=True)
    return MODELS[model_type](config).eval()


def measure(runs: dict[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    """CPU seconds of every run, taken in turn so that a slow moment of the machine hits all of them alike."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for index in range(rounds + 1):
        for name, run in runs.items():
            start = time.process_time()
            run()
            if index:  # the first round warms up
                seconds[name].append(time.process_time() - start)
    return seconds


@torch.no_grad()
def main() -> None:
    """Print one line per way of running, per architecture."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--pos", type=int, default=256)
    args = parser.parse_args()
    torch.set_num_threads(1)
    ids = torch.randint(
        0, SIZES["vocab_size"], (args.batch, args.pos), generator=torch.Generator().manual_seed(0)
    )
    for model_type in MODELS:
        plain, (bridge, sites) = build(model_type), load_bridge(build(model_type))
        resid = [sites.name("resid_post", layer) for layer in range(sites.n_layers)]
        gates = [sites.name("gate", layer) for layer in sites.layers("gate")]
        runs: dict[str, Callable[[], Any]] = {
            "plain": lambda plain=plain: plain(ids).logits,
            "bridge": lambda bridge=bridge: bridge(ids),
            f"cache {len(resid + gates)} sites": lambda b=bridge, n=resid + gates: b.run_with_cache(
                ids, names_filter=n
            ),
        }
        if not torch.equal(runs["plain"](), runs["bridge"]()):
            raise SystemExit(f"{model_type}: the bridge's logits differ from the model's")
        seconds = measure(runs, args.rounds)
        for name, taken in seconds.items():
            ratios = [t / p for t, p in zip(taken, seconds["plain"], strict=True)]
            print(
                f"{model_type:12} {name:16} {statistics.median(taken) * 1e3:8.1f} ms CPU  "
                f"x{statistics.median(ratios):.3f} (min x{min(ratios):.3f}, max x{max(ratios):.3f})"
            )


if __name__ == "__main__":
    main()
