"""DenseFormer: behind a block, the next one reads a learned average of all block outputs so far (DWA)."""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from satlens.hf.config import DenseFormerConfig
from satlens.hf.decoder import DecoderForCausalLM, DecoderModel


def weighted(weights: Sequence[Tensor], outputs: Sequence[Tensor]) -> Float[Tensor, "batch pos d_model"]:
    """``sum_m weights[m] outputs[m]``; a weight is a scalar or has an axis of 1 for d_model."""
    # one product at a time: a stack of all outputs would be copied and kept for every block
    total = weights[0] * outputs[0]
    for weight, output in zip(weights[1:], outputs[1:], strict=True):
        total = total + weight * output
    return total.to(outputs[-1].dtype)


class Average(nn.Module):
    """``sum_m weight[m] X_m`` over the block outputs it is given, the latest last; starts as the latest alone."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(1, n))

    def start_values(self) -> dict[str, Tensor]:
        """All weight on the latest block, so that the model starts as a Transformer."""
        weight = torch.zeros_like(self.weight)
        weight[:, -1] = 1
        return {"weight": weight}

    def forward(self, outputs: tuple[Tensor, ...]) -> Float[Tensor, "batch pos d_model"]:
        return weighted([self.weight[0, place] for place in range(len(outputs))], outputs)


class Averages(nn.Module):
    """The averages by the block they stand behind; blocks without one are left out."""

    def __init__(self, config: DenseFormerConfig) -> None:
        super().__init__()
        k = config.dwa_dilation
        places = [layer for layer in range(config.num_hidden_layers) if config.averages(layer)]
        self.alphas = nn.ModuleDict({str(layer): Average((layer + 1 + k) // k) for layer in places})


class DenseFormerModel(DecoderModel):
    """The stack without a head. Its memory is the embedding and the raw block outputs, never their averages."""

    config_class = DenseFormerConfig

    def add_parts(self, config: DenseFormerConfig) -> None:
        self.dwa_modules = Averages(config)

    def begin(self, embedded: Tensor) -> tuple[Tensor, Any]:
        return embedded, (embedded,)

    def advance(
        self, layer: int, block: Any, x: Tensor, memory: Any, **shared: Any
    ) -> tuple[Tensor, Any, Tensor | None]:
        x, _, weights = block(x, None, **shared)
        memory = (*memory, x)
        if self.config.averages(layer):
            k = self.config.dwa_dilation
            x = self.dwa_modules.alphas[str(layer)](memory[(layer + 1) % k :: k])
        return x, memory, weights


class DenseFormerForCausalLM(DecoderForCausalLM):
    """The stack with its head."""

    config_class = DenseFormerConfig
    stack = DenseFormerModel
