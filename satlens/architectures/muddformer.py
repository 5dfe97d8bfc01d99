"""MUDDFormer behind a bridge: a block's four streams and the weights that make the next four are hooks.

``resid_pre`` is the residual stream r that a block adds to, beside ``query_stream``, ``key_stream`` and
``value_stream``; ``resid_post`` is the block's raw output, which all later mixes read; ``stream`` is r behind the
block.
"""

from typing import Any

from torch import Tensor
from transformer_lens.hook_points import HookPoint
from transformer_lens.model_bridge.generalized_components.base import GeneralizedComponent

from satlens.architectures.parts import Block, DecoderAdapter, Norm, decoder_names, forget, hook_names
from satlens.hf.muddformer import unit_rms

MODEL_TYPE = "muddformer"
ARCHITECTURE = "MUDDFormerForCausalLM"
NORMED = {"ln1_q": "q", "ln1_k": "k", "ln1_v": "v"}
"""Norm in front of the attention -> projection that reads it."""


class Aggregation(GeneralizedComponent):
    """The mixes behind a block. It takes and returns many tensors, so that only its weights are a hook."""

    def __init__(self, name: str) -> None:
        super().__init__(name, submodules={"weights": GeneralizedComponent("mixing")})
        forget(self, "hook_in")
        forget(self, "hook_out")

    def forward(self, outputs: tuple[Tensor, ...], latest: Tensor) -> tuple[Tensor, ...]:
        aggregation: Any = self.original_component
        streams: tuple[Tensor, ...] = aggregation(outputs, latest)
        return streams


class MUDDBlock(Block):
    """The block spelled out as ``Block`` is, with queries, keys, values and residual read from streams of their own."""

    def __init__(self, name: str, submodules: dict[str, Any]) -> None:
        super().__init__(name, submodules)
        self.hook_query_stream, self.hook_key_stream = HookPoint(), HookPoint()
        self.hook_value_stream, self.hook_stream = HookPoint(), HookPoint()

    def forward(  # type: ignore[override]
        self, q: Tensor, k: Tensor, v: Tensor, residual: Tensor, *outputs: Tensor, **kwargs: Any
    ) -> tuple[Tensor | None, ...]:
        self._check_stop_at_layer(residual)
        inner: Any = self.original_component
        residual = self.hook_in(residual)
        attn_out, weights, _ = self.attn(
            self.ln1_q(self.hook_query_stream(q)),
            keys_read=self.ln1_k(self.hook_key_stream(k)),
            values_read=self.ln1_v(self.hook_value_stream(v)),
            **kwargs,
        )
        h = self.hook_resid_mid(residual + attn_out)
        x = self.hook_out(h + self.mlp(self.ln2(h)))
        kept = unit_rms(x, inner.eps) if inner.normed else x
        *others, residual = self.da((*outputs, kept), x)
        return x, kept, weights, *others, self.hook_stream(residual)


class Adapter(DecoderAdapter):
    """Three norms in front of the attention, and the aggregation behind the block."""

    def block(self, parts: dict[str, Any]) -> Block:
        del parts["ln1"]
        norms = {name: Norm(name=f"attn_norm_{part}", config=self.cfg) for name, part in NORMED.items()}
        return MUDDBlock("model.layers", {**norms, **parts, "da": Aggregation("da")})

    def preprocess_weights(self, state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
        """Fold each of the three norms into the projection that reads it; the stock folding knows only one norm."""
        if self._fold_ln_requested:
            for norm, part in NORMED.items():
                for key in [k for k in state_dict if k.endswith(f"{norm}.weight")]:
                    weight = key.replace(f"{norm}.weight", f"attn.{part}.weight")
                    state_dict[weight] = state_dict[weight] * state_dict[key][None]
                    state_dict[key] = state_dict[key].new_ones(state_dict[key].shape)
        return state_dict


def names(config: Any) -> dict[str, dict[int, str]]:
    """Role -> layer -> hook name."""
    layers = range(config.num_hidden_layers)
    read = {} if config.attention_disabled else {"query_stream", "key_stream", "value_stream"}
    return {
        **decoder_names(config),
        "stream": hook_names("hook_stream", layers),
        "depth_weights": hook_names("da.weights.hook_out", layers),
        **{role: hook_names(f"hook_{role}", layers) for role in read},
    }


def gate_kind(config: Any) -> str | None:
    """A MUDDFormer has no gate on first-layer values."""
    return None
