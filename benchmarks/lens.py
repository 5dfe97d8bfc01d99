"""What does the logit lens cost, in time and memory, against stacked logits of all layers?"""

from typing import Any

import torch
from common import Row, build, build_bridge, command, compare, compare_peaks, interleave, peak_of, text
from torch import Tensor

from satlens.accumulators import LensNll
from satlens.stream import Condition, nll_of, stream
from satlens.tokens import Batch


def ours(bridge: Any, sites: Any, batch: Batch) -> Tensor:
    """Mean NLL per layer, by ``satlens.stream``."""
    lens = LensNll(len(batch.row), sites, lambda residual, batch: nll_of(bridge, residual, batch))
    stream(bridge, sites, [batch], [Condition(name="clean", accumulators=(lens,))])
    return torch.stack([layer.nll.sum() / layer.count.sum() for layer in lens.layers])


@torch.no_grad()
def stacked(model: Any, batch: Batch) -> Tensor:
    """The usual way: every layer's residual stream, their logits ``[layer batch pos d_vocab]``, log-softmax."""
    found = model.model(batch.input_ids, output_hidden_states=True).hidden_states
    # the last entry has been through the final norm already
    hidden = torch.stack([*(model.model.norm(x) for x in found[1:-1]), found[-1]])
    log_probs = model.lm_head(hidden).log_softmax(-1)[:, :, :-1]
    wanted = batch.input_ids[:, 1:, None].expand(len(hidden), -1, -1, 1)
    return -log_probs.gather(-1, wanted).double().mean((1, 2, 3))


def peak_ours() -> float:
    """MiB of ``ours``."""
    bridge, sites = build_bridge()
    return peak_of(lambda: ours(bridge, sites, text()), lambda: ours(bridge, sites, text(2, 16)))


def peak_stacked() -> float:
    """MiB of ``stacked``."""
    model = build()
    return peak_of(lambda: stacked(model, text()), lambda: stacked(model, text(2, 16)))


def measure(rounds: int) -> list[Row]:
    """Time and memory; the two ways must agree first."""
    model, (bridge, sites), batch = build(), build_bridge(), text()
    torch.testing.assert_close(ours(bridge, sites, batch), stacked(model, batch), rtol=0, atol=1e-6)
    seconds = interleave(
        {"ours": lambda: ours(bridge, sites, batch), "stacked": lambda: stacked(model, batch)}, rounds
    )
    return [
        compare("logit lens time, stacked logits", seconds, "ours", "stacked", "<=", 1.0),
        compare_peaks("logit lens memory, stacked logits", __file__, "stacked", min(rounds, 3), 20),
    ]


if __name__ == "__main__":
    command(measure, rounds=7, peaks={"ours": peak_ours, "stacked": peak_stacked})
