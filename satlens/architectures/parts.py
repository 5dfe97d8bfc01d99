"""The bridge pieces all architectures share: a hook fires once, costs nothing unused, and keeps the maths."""

from typing import Any

from torch import Tensor, nn
from transformer_lens.conversion_utils.conversion_steps.rearrange_tensor_conversion import (
    RearrangeTensorConversion,
)
from transformer_lens.conversion_utils.param_processing_conversion import ParamProcessingConversion
from transformer_lens.hook_points import HookPoint
from transformer_lens.model_bridge.architecture_adapter import ArchitectureAdapter
from transformer_lens.model_bridge.generalized_components.attention import AttentionBridge
from transformer_lens.model_bridge.generalized_components.base import GeneralizedComponent
from transformer_lens.model_bridge.generalized_components.block import BlockBridge
from transformer_lens.model_bridge.generalized_components.embedding import EmbeddingBridge
from transformer_lens.model_bridge.generalized_components.gated_mlp import GatedMLPBridge
from transformer_lens.model_bridge.generalized_components.linear import LinearBridge
from transformer_lens.model_bridge.generalized_components.mlp import MLPBridge
from transformer_lens.model_bridge.generalized_components.rms_normalization import RMSNormalizationBridge
from transformer_lens.model_bridge.generalized_components.unembedding import UnembeddingBridge

from satlens.hf.config import MLPS, SharedConfig

# Hook points that AttentionBridge declares for its own attention; a delegating bridge would never fire them.
_SILENT = ("hook_attn_scores", "hook_hidden_states", "hook_result", "hook_rot_q", "hook_rot_k")


def forget(component: Any, hook: str) -> None:
    """Take a hook point away: a name that never fires turns an intervention into a silent no-op."""
    if hook in component._hook_registry:
        delattr(component, hook)
        del component._hook_registry[hook]


class Norm(RMSNormalizationBridge):
    """RMSNorm that computes its scale and normalised input a second time only for hooks that ask for them."""

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        if self.hook_scale.has_hooks() or self.hook_normalized.has_hooks():
            return super().forward(hidden_states, **kwargs)
        norm: Any = self.original_component
        out: Tensor = self.hook_out(norm(self.hook_in(hidden_states)))
        return out


class Unembed(UnembeddingBridge):
    """The head without the zero bias that the stock bridge adds: it changes the model and its checkpoints."""

    def set_original_component(self, original_component: nn.Module) -> None:
        GeneralizedComponent.set_original_component(self, original_component)


class Attention(AttentionBridge):
    """The model's own attention with hooks on its parts; attention weights are laid open only when hooked."""

    supports_split_qkv_fork = False

    def __init__(self, name: str, config: Any, submodules: dict[str, Any]) -> None:
        super().__init__(
            name, config, submodules, maintain_native_attention=True, requires_position_embeddings=True
        )
        for hook in _SILENT:
            forget(self, hook)
        # inputs and outputs already are [batch pos d_model]; the stock conversion keeps a table of tensor ids
        self.hook_in.hook_conversion = self.hook_out.hook_conversion = None

    def set_original_component(self, original_component: nn.Module) -> None:
        super().set_original_component(original_component)
        original_component.pattern = self.hook_pattern  # a HookPoint is an identity module

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> tuple[Tensor, Tensor | None, Tensor | None]:
        if self.hook_pattern.has_hooks():
            kwargs["output_attentions"] = True
        attention: Any = self.original_component
        out, weights, v1 = attention(self.hook_in(hidden_states), **kwargs)
        return self.hook_out(out), weights, v1


class Block(BlockBridge):
    """One pre-norm block, spelled out rather than delegated: an edit of the residual stream between attention
    and MLP must reach the stream itself, not only the MLP's input."""

    hook_aliases = {  # noqa: RUF012 - the library reads a class attribute
        "hook_resid_pre": "hook_in",
        "hook_resid_post": "hook_out",
        "hook_attn_out": "attn.hook_out",
        "hook_mlp_out": "mlp.hook_out",
    }

    def __init__(self, name: str, submodules: dict[str, Any]) -> None:
        super().__init__(name, submodules=submodules)
        self.hook_resid_mid = HookPoint()
        forget(self, "hook_mlp_in")

    def _maybe_wire_capture_hooks(self) -> None:
        """Nothing to capture: the forks these hooks serve are not offered."""

    def forward(
        self,
        hidden_states: Tensor,
        v1: Tensor | None = None,
        coefficient: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        self._check_stop_at_layer(hidden_states)
        x = self.hook_in(hidden_states)
        attn_out, weights, v1 = self.attn(self.ln1(x), v1=v1, coefficient=coefficient, **kwargs)
        x = self.hook_resid_mid(x + attn_out)
        return self.hook_out(x + self.mlp(self.ln2(x))), v1, weights


class DecoderAdapter(ArchitectureAdapter):
    """Component names and weight layouts of the family; an architecture adds its own parts or its own block."""

    supports_hf_output_attentions = False  # hooks on the pattern ask for it; nothing else should leave SDPA
    supports_kv_cache = False  # cached generation runs on the plain model

    def __init__(self, cfg: Any) -> None:
        super().__init__(cfg)
        cfg.normalization_type, cfg.positional_embedding_type = "RMS", "rotary"
        cfg.final_rms = cfg.uses_rms_norm = True
        cfg.attn_only = False
        cfg.gated_mlp = cfg.act_fn in MLPS["swiglu"]
        n_kv = getattr(cfg, "n_key_value_heads", None) or cfg.n_heads
        heads = {"q": cfg.n_heads, "k": n_kv, "v": n_kv}
        self.weight_processing_conversions = {
            **{
                f"blocks.{{i}}.attn.{part}.weight": _layout("(n h) m -> n m h", n)
                for part, n in heads.items()
            },
            "blocks.{i}.attn.o.weight": _layout("m (n h) -> n h m", cfg.n_heads),
            **self.extra_conversions(),
        }
        self.component_mapping = {
            "embed": EmbeddingBridge(name="model.embeddings"),
            "blocks": self.block(
                {
                    "ln1": Norm(name="attn_norm", config=cfg),
                    "attn": Attention("attn", cfg, self.attention_parts()),
                    "ln2": Norm(name="mlp_norm", config=cfg),
                    "mlp": _mlp(cfg),
                }
            ),
            "ln_final": Norm(name="model.norm", config=cfg),
            "unembed": Unembed(name="lm_head", config=cfg),
        }

    def block(self, parts: dict[str, Any]) -> Block:
        """The template of all blocks, made of the shared parts."""
        return Block("model.layers", parts)

    def extra_conversions(self) -> dict[str, Any]:
        """Weight layouts beyond the shared ones, by parameter name."""
        return {}

    def attention_parts(self) -> dict[str, Any]:
        """Bridges of the attention's submodules, by the names the hooks will have."""
        return {
            "q": LinearBridge(name="q_proj"),
            "k": LinearBridge(name="k_proj"),
            "v": LinearBridge(name="v_proj"),
            "o": LinearBridge(name="o_proj"),
            "q_norm": Norm(name="q_norm", config=self.cfg, optional=True),
            "k_norm": Norm(name="k_norm", config=self.cfg, optional=True),
        }


def _mlp(cfg: Any) -> MLPBridge:
    """SwiGLU or the plain MLP: which of the two linears is hooked as the gate follows from it."""
    parts: dict[str, GeneralizedComponent] = {
        "in": LinearBridge(name="up_proj"),
        "out": LinearBridge(name="down_proj"),
    }
    if not cfg.gated_mlp:
        return MLPBridge(name="mlp", config=cfg, submodules=parts)
    return GatedMLPBridge(
        name="mlp", config=cfg, submodules={"gate": LinearBridge(name="gate_proj"), **parts}
    )


def _layout(pattern: str, n: int) -> Any:
    return ParamProcessingConversion(tensor_conversion=RearrangeTensorConversion(pattern, n=n))


def decoder_names(config: SharedConfig) -> dict[str, dict[int, str]]:
    """Role -> layer -> hook name, for the roles that every layer of every decoder here has.

    A disabled attention has no roles inside: what is edited there never reaches the stream.
    """
    places = {
        "resid_pre": "hook_in",
        "resid_mid": "hook_resid_mid",
        "resid_post": "hook_out",
        "stream": "hook_out",
        "attn_out": "attn.hook_out",
        "mlp_out": "mlp.hook_out",
        "mlp_gate_pre": "mlp.in.hook_out" if config.mlp == "gelu" else "mlp.gate.hook_out",
        "mlp_post": "mlp.out.hook_in",
    }
    inside = {
        "q": "attn.q.hook_out",
        "k": "attn.k.hook_out",
        "value": "attn.v.hook_out",
        "pattern": "attn.hook_pattern",
        "z": "attn.o.hook_in",
    }
    offered = places if config.attention_disabled else {**places, **inside}
    return {role: hook_names(place, range(config.num_hidden_layers)) for role, place in offered.items()}


def hook_names(place: str, layers: Any) -> dict[int, str]:
    """Layer -> full hook name of ``place`` inside the block."""
    return {layer: f"blocks.{layer}.{place}" for layer in layers}
