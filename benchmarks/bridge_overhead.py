"""What does a bridge cost when nothing is hooked, and what does caching a few sites add?"""

from collections.abc import Callable

import torch
from common import Row, build, build_bridge, command, compare, interleave, text

from satlens.hf import MODELS


@torch.no_grad()
def measure(rounds: int) -> list[Row]:
    """One row for the bare bridge (target 1.05) and one for a cache of residual streams and gates."""
    ids, rows = text().input_ids, []
    for model_type in MODELS:
        plain, (bridge, sites) = build(model_type), build_bridge(model_type)
        cached = [sites.name(role, layer) for role in ("resid_post", "gate") for layer in sites.layers(role)]
        runs: dict[str, Callable[[], object]] = {
            "plain": lambda plain=plain: plain(ids).logits,
            "ours": lambda bridge=bridge: bridge(ids),
        }
        if not torch.equal(runs["plain"](), runs["ours"]()):
            raise SystemExit(f"{model_type}: the bridge's logits differ from the model's")
        bare = interleave(runs, rounds)
        rows.append(compare(f"{model_type} bridge, bare model", bare, "ours", "plain", "<=", 1.05))
        runs["ours"] = lambda bridge=bridge, cached=cached: bridge.run_with_cache(ids, names_filter=cached)
        what = f"{model_type} cache of {len(cached)} sites, bare model"
        rows.append(compare(what, interleave(runs, rounds), "ours", "plain", "<=", 1.15))
    return rows


if __name__ == "__main__":
    command(measure, rounds=11)
