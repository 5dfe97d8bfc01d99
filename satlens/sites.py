"""Where each quantity lives in a model: role and layer to hook name and axes, so no analysis spells one."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from satlens.errors import SatlensError, UserError

_STREAM, _HEAD, _KV = "batch pos d_model", "batch pos head d_head", "batch pos kv_head d_head"

# Role -> axes. An architecture offers a role at the layers where it has it; what a residual role is where there are
# several streams or averages is said in the architecture's file.
AXES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        role: tuple(axes.split())
        for role, axes in {
            "resid_pre": _STREAM,  # what the block reads
            "resid_mid": _STREAM,  # between attention and MLP
            "resid_post": _STREAM,  # what the block returns
            "stream": _STREAM,  # what the final norm would read if the model ended behind this layer
            "streams": "batch pos stream d_model",  # HyperConnections: before the block
            "query_stream": _STREAM,  # MUDDFormer: what queries, keys and values are made of
            "key_stream": _STREAM,
            "value_stream": _STREAM,
            "attn_out": _STREAM,
            "mlp_out": _STREAM,
            "mlp_gate_pre": "batch pos d_mlp",
            "mlp_post": "batch pos d_mlp",
            "q": _HEAD,
            "k": _KV,
            "value": _KV,
            "first_value": _KV,
            "mixed_value": _KV,
            "gate_logit": "batch pos kv_head",
            "gate": "batch pos kv_head",  # coefficient of V1: SATFormer's alpha, ResFormer's lambda_1
            "own_scale": "batch pos kv_head",  # ResFormer's lambda_2, the coefficient of the layer's own values
            "average_weights": "batch pos output",  # DenseFormer: behind the block; the latest output last
            "depth_weights": "batch pos way output",  # MUDDFormer: behind the block; q, k, v, r (last block: r)
            # HyperConnections: what the sub-layer reads (column 0) and what streams become; where its output goes
            "attn_connection_alpha": "batch pos stream column",
            "attn_connection_beta": "batch pos stream",
            "mlp_connection_alpha": "batch pos stream column",
            "mlp_connection_beta": "batch pos stream",
            "pattern": "batch head pos key",
            "z": _HEAD,
        }.items()
    }
)
OF_FIRST_VALUES = ("gate", "gate_logit", "mixed_value", "first_value")
COEFFICIENTS = ("average_weights", "depth_weights", *(role for role in AXES if "connection" in role))
"""Roles of learned weights between layers that are not gates on first-layer values."""


@dataclass(frozen=True, kw_only=True)
class Sites:
    """The hook names of one model, and the sizes that an analysis needs beside them."""

    architecture: str
    """Model type as config.json spells it."""
    n_layers: int
    """Blocks."""
    n_heads: int
    """Query heads."""
    n_kv_heads: int
    """Key and value heads; a gate has one value per token and KV head."""
    d_head: int
    """Width of one head."""
    d_model: int
    """Width of the residual stream."""
    d_mlp: int
    """Width of the MLP (MUDDFormer: before it is handed out by depth)."""
    d_vocab: int
    """Token ids."""
    n_ctx: int
    """Longest input seen in training (rotary positions go further, the model was not trained there)."""
    gate_kind: str | None
    """Nonlinearity of the gate on first-layer values, ``static`` for a learned constant; None without gates."""
    names: Mapping[str, Mapping[int, str]]
    """Role -> layer -> hook name, only for the layers that have the role."""

    def name(self, role: str, layer: int) -> str:
        """Hook name of ``role`` in ``layer`` (negative layers count from the end).

        Raises:
            UserError: no such role, no such layer, or this layer does not have it.
        """
        index = layer + self.n_layers if layer < 0 else layer
        if not 0 <= index < self.n_layers:
            raise UserError(f"no layer {layer}: this {self.architecture} has layers 0 to {self.n_layers - 1}")
        layers = self._role(role)
        if index not in layers:
            raise UserError(f"{self._why_absent(role, index)}; layers with {role}: {_listed(layers)}")
        return layers[index]

    def axes(self, role: str) -> tuple[str, ...]:
        """Axis names of the tensor at ``role``, outermost first.

        Raises:
            UserError: no such role.
        """
        self._role(role)
        return AXES[role]

    def layers(self, role: str) -> tuple[int, ...]:
        """Layers that have ``role``, ascending; empty when this architecture never has it.

        Raises:
            UserError: no such role.
        """
        return tuple(sorted(self._role(role)))

    def roles(self) -> tuple[str, ...]:
        """Roles that at least one layer has."""
        return tuple(role for role in AXES if self.names.get(role))

    def why_no_gate(self, name: str) -> str:
        """What to say of the model ``name`` to somebody who asked for its gates, in one line."""
        own = [role for role in COEFFICIENTS if self.names.get(role)]
        words = f"; its own coefficients are the sites {', '.join(own)}" if own else ""
        return f"{name} is a {self.architecture}: it has no gate on first-layer values{words}"

    def check(self, hook_names: Iterable[str]) -> None:
        """Require every name to exist in a bridge: a misspelt hook would silently never fire.

        Raises:
            SatlensError: names that the bridge does not have.
        """
        known = set(hook_names)
        missing = [name for layers in self.names.values() for name in layers.values() if name not in known]
        if missing:
            raise SatlensError(f"the bridge has no hook {', '.join(missing[:3])} ({len(missing)} missing)")

    def _role(self, role: str) -> Mapping[int, str]:
        if role not in AXES:
            raise UserError(f"unknown site {role!r}; known: {', '.join(AXES)}")
        return self.names.get(role, {})

    def _why_absent(self, role: str, layer: int) -> str:
        if self.gate_kind is None and role in OF_FIRST_VALUES:
            return f"this {self.architecture} does not mix first-layer values, so it has no {role}"
        if not self.names.get(role):
            return f"this {self.architecture} has no {role}"
        if role not in OF_FIRST_VALUES:
            return f"layer {layer} has no {role}"
        if layer == 0:
            return f"layer 0 produces V1 and has no {role}"
        return f"layer {layer} does not mix first-layer values and has no {role}"


def _listed(layers: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(layers))) or "none"
