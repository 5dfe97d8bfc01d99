"""SATFormer behind a bridge: V1, the gate before and after its nonlinearity, and mixed values are hooks."""

from typing import Any

from torch import Tensor
from transformer_lens.conversion_utils.conversion_steps.base_tensor_conversion import BaseTensorConversion
from transformer_lens.conversion_utils.param_processing_conversion import ParamProcessingConversion
from transformer_lens.model_bridge.generalized_components.base import GeneralizedComponent
from transformer_lens.model_bridge.generalized_components.linear import LinearBridge

from satlens.architectures.parts import DecoderAdapter, decoder_names, hook_names
from satlens.errors import UserError

MODEL_TYPE = "SATFormer"
ARCHITECTURE = "SATFormerForCausalLM"


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
    V1's bias reaches it with weight alpha, which differs from token to token.
    """

    def handle_conversion(self, input_value: Tensor, *context: Any) -> Tensor:
        self.nonzero = bool(input_value.any())
        return input_value

    def revert(self, input_value: Tensor, *context: Any) -> Tensor:
        if self.nonzero and not bool(input_value.any()):
            raise UserError(
                "fold_value_biases is not valid for a SATFormer with qkv_bias, since V1's bias is scaled by "
                "the gate: open the model again and pass fold_value_biases=False"
            )
        return input_value


class Values(GeneralizedComponent):
    """A part whose first input and whose output are values, ``[batch pos kv_head d_head]``."""

    def __init__(self, name: str, submodules: dict[str, Any] | None = None) -> None:
        super().__init__(name, submodules=submodules, conversion_rule=_HeadsApart(), optional=True)


class Adapter(DecoderAdapter):
    """The shared decoder, the place where V1 is written or read, and the mixing with its gate."""

    def extra_conversions(self) -> dict[str, Any]:
        return {"blocks.{i}.attn.v.bias": ParamProcessingConversion(tensor_conversion=_ValueBias())}

    def attention_parts(self) -> dict[str, Any]:
        return {
            **super().attention_parts(),
            "first_value": Values("first_value"),
            "mix": Values(
                "value_residual_mixing",
                submodules={"alpha": LinearBridge(name="alpha_proj"), "gate": GeneralizedComponent("gate")},
            ),
        }

    def preprocess_weights(self, state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
        """Fold the attention norm's weight into the gate projection too: it reads the same normalised input
        as the queries, keys and values, which is as far as the stock folding looks."""
        if self._fold_ln_requested:
            for key in [k for k in state_dict if k.endswith("attn.mix.alpha.weight")]:
                norm = state_dict[key.replace("attn.mix.alpha.weight", "ln1.weight")]
                state_dict[key] = state_dict[key] * norm[None].to(state_dict[key].dtype)
        return state_dict


def names(config: Any) -> dict[str, dict[int, str]]:
    """Role -> layer -> hook name. V1 is written in layer 0 and read in each mixing layer: one edge each."""
    mixing = _mixing(config)
    writing = [0] if mixing else []  # V1 that nobody reads is not a site: editing it does nothing
    return {
        **decoder_names(config),
        "first_value": hook_names("attn.first_value.hook_out", writing + mixing),
        "mixed_value": hook_names("attn.mix.hook_out", mixing),
        "gate_logit": hook_names("attn.mix.alpha.hook_out", mixing),
        "gate": hook_names("attn.mix.gate.hook_out", mixing),
    }


def gate_kind(config: Any) -> str | None:
    """The nonlinearity, if any layer mixes values."""
    return config.value_residual_gate if _mixing(config) else None


def _mixing(config: Any) -> list[int]:
    """Layers whose gate can change anything: none where attention writes nothing."""
    if config.attention_disabled:
        return []
    return [layer for layer in range(config.num_hidden_layers) if config.mixes(layer)]
