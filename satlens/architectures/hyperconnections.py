"""HyperConnections behind a bridge: the streams, their sum, and the weights that read and write them are hooks.

``resid_pre``, ``resid_mid`` and ``resid_post`` are the SUM over the streams before the block, between attention and
MLP, and behind the block: what the final norm would read there. An edit of a sum is spread evenly over the streams.
``streams`` are the streams before the block themselves.
"""

from typing import Any

from torch import Tensor
from transformer_lens.hook_points import HookPoint
from transformer_lens.model_bridge.generalized_components.base import GeneralizedComponent

from satlens.architectures.parts import Block, DecoderAdapter, decoder_names, hook_names
from satlens.hf.hyperconnections import written

MODEL_TYPE = "dhc"
ARCHITECTURE = "HyperConnectionsForCausalLM"


def through_sum(hook: HookPoint, streams: Tensor) -> Tensor:
    """Show ``hook`` the sum over the streams ``[batch pos stream d_model]`` and spread its change evenly over them.

    The sum is made only for a hook that asks for it; a hook that changes nothing leaves every bit as it is.
    """
    if not hook.has_hooks():
        return streams
    total = streams.sum(dim=2)
    change = hook(total.clone()) - total  # a hook may edit in place, hence the copy
    return streams + (change / streams.shape[2])[:, :, None]


class HyperBlock(Block):
    """Attention and MLP between reading and writing the streams."""

    hook_out_is_single_residual_stream = False
    hook_aliases = {  # noqa: RUF012 - the library reads a class attribute
        "hook_attn_out": "attn.hook_out",
        "hook_mlp_out": "mlp.hook_out",
    }

    def __init__(self, name: str, submodules: dict[str, Any]) -> None:
        super().__init__(name, submodules)
        self.hook_resid_pre, self.hook_resid_post = HookPoint(), HookPoint()

    def forward(  # type: ignore[override]
        self, streams: Tensor, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        self._check_stop_at_layer(streams)
        streams = through_sum(self.hook_resid_pre, self.hook_in(streams))
        read, carried, beta = self.attn_hc(streams)
        attn_out, weights, _ = self.attn(self.ln1(read), **kwargs)
        streams = through_sum(self.hook_resid_mid, written(carried, beta, attn_out))
        read, carried, beta = self.mlp_hc(streams)
        streams = written(carried, beta, self.mlp(self.ln2(read)))
        return self.hook_out(through_sum(self.hook_resid_post, streams)), weights


class Adapter(DecoderAdapter):
    """The shared parts and a hyper-connection around each of the two sub-layers."""

    def block(self, parts: dict[str, Any]) -> Block:
        return HyperBlock(
            "model.layers", {**parts, **{name: _connection(name) for name in ("attn_hc", "mlp_hc")}}
        )


def _connection(name: str) -> GeneralizedComponent:
    weights = {part: GeneralizedComponent(part) for part in ("alpha", "beta")}
    return GeneralizedComponent(name, submodules=dict(weights))


def names(config: Any) -> dict[str, dict[int, str]]:
    """Role -> layer -> hook name."""
    layers = range(config.num_hidden_layers)
    places = {"streams": "hook_in", "resid_pre": "hook_resid_pre", "resid_post": "hook_resid_post"}
    for part in ("attn", "mlp"):
        for weight in ("alpha", "beta"):
            places[f"{part}_connection_{weight}"] = f"{part}_hc.{weight}.hook_out"
    if config.attention_disabled:
        del places["attn_connection_beta"]  # it weighs an output that is zero
    own = {role: hook_names(place, layers) for role, place in places.items()}
    return {**decoder_names(config), **own, "stream": own["resid_post"]}


def gate_kind(config: Any) -> str | None:
    """HyperConnections have no gate on first-layer values."""
    return None
