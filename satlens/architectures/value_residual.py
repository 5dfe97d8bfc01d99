"""What the two architectures that re-read first-layer values share behind a bridge: the seams of V1 and a bias rule."""

from typing import Any

from torch import Tensor
from transformer_lens.conversion_utils.conversion_steps.base_tensor_conversion import BaseTensorConversion
from transformer_lens.conversion_utils.param_processing_conversion import ParamProcessingConversion
from transformer_lens.model_bridge.generalized_components.base import GeneralizedComponent

from satlens.architectures.parts import DecoderAdapter, decoder_names, hook_names
from satlens.errors import UserError


class _HeadsApart(BaseTensorConversion):
    """No conversion: marks the tensor as ``[batch pos head d_head]``, so ``pos_slice`` finds its axis."""

    splits_attention_heads = True

    def handle_conversion(self, input_value: Any, *context: Any) -> Any:
        return input_value

    def revert(self, input_value: Any, *context: Any) -> Any:
        return input_value


class _ValueBias(BaseTensorConversion):
    """Value biases, which must stay where they are.

    Folding a value bias into the output bias is right only if every value reaches the output with weight one.
    V1's bias reaches it with another weight (SATFormer's differs from token to token).
    """

    def handle_conversion(self, input_value: Tensor, *context: Any) -> Tensor:
        self.nonzero = bool(input_value.any())
        return input_value

    def revert(self, input_value: Tensor, *context: Any) -> Tensor:
        if self.nonzero and not bool(input_value.any()):
            raise UserError(
                "fold_value_biases is not valid for a model with qkv_bias that mixes first-layer values, since V1's "
                "bias is scaled: open the model again and pass fold_value_biases=False"
            )
        return input_value


class Values(GeneralizedComponent):
    """A part whose first input and whose output are values, ``[batch pos kv_head d_head]``."""

    def __init__(self, name: str, submodules: dict[str, Any] | None = None) -> None:
        super().__init__(name, submodules=submodules, conversion_rule=_HeadsApart(), optional=True)


class ValueResidualAdapter(DecoderAdapter):
    """The shared decoder, the place where V1 is written or read, and the mixing, which each family brings."""

    def extra_conversions(self) -> dict[str, Any]:
        return {"blocks.{i}.attn.v.bias": ParamProcessingConversion(tensor_conversion=_ValueBias())}

    def attention_parts(self) -> dict[str, Any]:
        return {**super().attention_parts(), "first_value": Values("first_value"), "mix": self.mix()}

    def mix(self) -> Values:
        """The bridge of ``value_residual_mixing``."""
        raise NotImplementedError


def value_residual_names(config: Any, **own: str) -> dict[str, dict[int, str]]:
    """The shared roles, those of V1, and those in ``own`` (role to place inside the mixing).

    V1 is written in layer 0 and read in each mixing layer: one edge each.
    """
    mixing = mixing_layers(config)
    writing = [0] if mixing else []  # V1 that nobody reads is not a site: editing it does nothing
    return {
        **decoder_names(config),
        "first_value": hook_names("attn.first_value.hook_out", writing + mixing),
        "mixed_value": hook_names("attn.mix.hook_out", mixing),
        **{role: hook_names(f"attn.mix.{place}", mixing) for role, place in own.items()},
    }


def mixing_layers(config: Any) -> list[int]:
    """Layers whose mixing can change anything: none where attention writes nothing."""
    if config.attention_disabled:
        return []
    return [layer for layer in range(config.num_hidden_layers) if config.mixes(layer)]
