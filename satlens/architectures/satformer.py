"""SATFormer behind a bridge: V1, the gate before and after its nonlinearity, and mixed values are hooks."""

from typing import Any

from torch import Tensor
from transformer_lens.model_bridge.generalized_components.base import GeneralizedComponent
from transformer_lens.model_bridge.generalized_components.linear import LinearBridge

from satlens.architectures.value_residual import (
    ValueResidualAdapter,
    Values,
    mixing_layers,
    value_residual_names,
)

MODEL_TYPE = "SATFormer"
ARCHITECTURE = "SATFormerForCausalLM"


class Adapter(ValueResidualAdapter):
    """The mixing with its gate, one value per token and KV head."""

    def mix(self) -> Values:
        parts = {"alpha": LinearBridge(name="alpha_proj"), "gate": GeneralizedComponent("gate")}
        return Values("value_residual_mixing", submodules=parts)

    def preprocess_weights(self, state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
        """Fold the attention norm's weight into the gate projection too: it reads the same normalised input
        as the queries, keys and values, which is as far as the stock folding looks."""
        if self._fold_ln_requested:
            for key in [k for k in state_dict if k.endswith("attn.mix.alpha.weight")]:
                norm = state_dict[key.replace("attn.mix.alpha.weight", "ln1.weight")]
                state_dict[key] = state_dict[key] * norm[None].to(state_dict[key].dtype)
        return state_dict


def names(config: Any) -> dict[str, dict[int, str]]:
    """Role -> layer -> hook name."""
    return value_residual_names(config, gate_logit="alpha.hook_out", gate="gate.hook_out")


def gate_kind(config: Any) -> str | None:
    """The nonlinearity, if any layer mixes values."""
    return config.value_residual_gate if mixing_layers(config) else None
