"""DenseFormer behind a bridge: the averages between the blocks are parts of their own, their weights are hooks.

``resid_pre`` is what a block reads, the average Y of earlier outputs; ``resid_post`` is the block's raw output X, which
later averages also read; ``stream`` is the average behind the block (the same as ``resid_post`` where there is none).
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from transformer_lens.hook_points import HookPoint
from transformer_lens.model_bridge.generalized_components.base import GeneralizedComponent

from satlens.architectures.parts import DecoderAdapter, decoder_names, forget
from satlens.hf.denseformer import weighted

MODEL_TYPE = "denseformer"
ARCHITECTURE = "DenseFormerForCausalLM"


class Average(GeneralizedComponent):
    """One average, its weights spread over tokens (views: nothing is copied)."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.hook_weights = HookPoint()
        forget(self, "hook_in")

    def forward(self, outputs: Sequence[Tensor]) -> Tensor:
        average: Any = self.original_component
        weights = self.hook_weights(average.weight[0].expand(*outputs[-1].shape[:2], -1))
        out: Tensor = self.hook_out(weighted(weights[..., None].unbind(2), outputs))
        return out


class Averages(GeneralizedComponent):
    """All averages by the layer they stand behind. A container: nothing ever goes through it as a whole."""

    def __init__(self) -> None:
        super().__init__("model.dwa_modules")
        forget(self, "hook_in")
        forget(self, "hook_out")

    def set_original_component(self, original_component: nn.Module) -> None:
        """Put a bridge before each average. The library would look them up by number in a dictionary of words."""
        super().set_original_component(original_component)
        averages: Any = original_component
        for layer, module in list(averages.alphas.items()):
            average = Average(f"alphas.{layer}")
            average.set_original_component(module)
            self.add_module(layer, average)
            self.real_components[layer] = (average.name, average)
            averages.alphas[layer] = average


class Adapter(DecoderAdapter):
    """The shared decoder and the averages."""

    def __init__(self, cfg: Any) -> None:
        super().__init__(cfg)
        assert self.component_mapping is not None
        self.component_mapping["averages"] = Averages()


def names(config: Any) -> dict[str, dict[int, str]]:
    """Role -> layer -> hook name."""
    shared = decoder_names(config)
    averaged = [layer for layer in range(config.num_hidden_layers) if config.averages(layer)]
    behind = {layer: f"averages.{layer}.hook_out" for layer in averaged}
    return {
        **shared,
        "stream": {**shared["stream"], **behind},
        "average_weights": {layer: f"averages.{layer}.hook_weights" for layer in averaged},
    }


def gate_kind(config: Any) -> str | None:
    """A DenseFormer has no gate on first-layer values."""
    return None
