"""Where each quantity lives in a model: role and layer to hook name and axes, so no analysis spells one."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from satlens.errors import SatlensError, UserError

_HEAD, _KV = "batch pos head d_head", "batch pos kv_head d_head"

# Role -> axes. An architecture offers a role at the layers where it has it.
AXES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        role: tuple(axes.split())
        for role, axes in {
            "resid_pre": "batch pos d_model",
            "resid_mid": "batch pos d_model",
            "resid_post": "batch pos d_model",
            "attn_out": "batch pos d_model",
            "mlp_out": "batch pos d_model",
            "mlp_gate_pre": "batch pos d_mlp",
            "mlp_post": "batch pos d_mlp",
            "q": _HEAD,
            "k": _KV,
            "value": _KV,
            "first_value": _KV,
            "mixed_value": _KV,
            "gate_logit": "batch pos kv_head",
            "gate": "batch pos kv_head",
            "pattern": "batch head pos key",
            "z": _HEAD,
        }.items()
    }
)


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
    """Width of the MLP."""
    d_vocab: int
    """Token ids."""
    n_ctx: int
    """Longest input seen in training (rotary positions go further, the model was not trained there)."""
    gate_kind: str | None
    """Nonlinearity of the gate; None for a model without gates."""
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
        if role not in ("gate", "gate_logit", "mixed_value", "first_value"):
            return f"layer {layer} has no {role}"
        if self.gate_kind is None:
            return f"this {self.architecture} does not mix first-layer values, so it has no {role}"
        if layer == 0:
            return f"layer 0 produces V1 and has no {role}"
        return f"layer {layer} does not mix first-layer values and has no {role}"


def _listed(layers: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(layers))) or "none"
