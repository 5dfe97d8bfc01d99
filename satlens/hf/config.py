"""What a checkpoint's config.json says: the official fields, their defaults, and the checks that stop a bad one."""

from typing import Any, ClassVar

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig

GATES = ("relu", "sigmoid", "tanh", "identity", "softmax", "softmax_sigmoid")
MLPS = {"swiglu": ("swish", "silu"), "gelu": ("gelu",)}
"""Kind of MLP -> names of its nonlinearity. ``swiglu`` is gated, ``gelu`` the plain two-layer kind."""


def _swiglu_width(hidden_size: int, hidden_ratio: int | None) -> int:
    """Two thirds of ``hidden_ratio * hidden_size``, rounded up to a multiple of 256 (official rule)."""
    floor = int(hidden_size * (hidden_ratio or 4) * 2 / 3)
    return 256 * ((floor + 255) // 256)


@strict
class SharedConfig(PreTrainedConfig):
    """Fields that all six architectures share, under the names the official checkpoints use.

    ``mlp``, ``mlp_bias`` and ``attention_disabled`` are ours, for development studies; their defaults are the
    official model.
    """

    attribute_map: ClassVar[dict[str, str]] = {"num_attention_heads": "num_heads"}
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["past_key_values"]

    hidden_size: int = 2048
    num_hidden_layers: int = 24
    num_heads: int = 32
    num_kv_heads: int | None = None
    qkv_bias: bool = False
    qk_norm: bool = False
    window_size: int | None = None
    rope_theta: int | float = 10000.0
    max_position_embeddings: int = 2048
    hidden_ratio: int | None = 4
    intermediate_size: int | None = None
    hidden_act: str = "swish"
    initializer_range: float = 0.02
    elementwise_affine: bool | None = True
    norm_eps: float = 1e-6
    use_cache: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = 1
    eos_token_id: int | list[int] | None = 2
    tie_word_embeddings: bool = False
    fuse_norm: bool = True
    fuse_swiglu: bool = True
    fuse_cross_entropy: bool = True
    fuse_linear_cross_entropy: bool = False
    use_l2warp: bool = False
    vocab_size: int = 32000
    mlp: str = "swiglu"
    mlp_bias: bool = False
    attention_disabled: bool = False

    def __post_init__(self, **kwargs: Any) -> None:
        if self.hidden_size % self.num_heads:
            raise ValueError(
                f"{self.num_heads} heads do not divide hidden_size {self.hidden_size}: "
                "no such model can run (the official satformer/xl preset has this defect)"
            )
        if self.num_heads % self.n_kv_heads:
            raise ValueError(f"num_kv_heads {self.n_kv_heads} does not divide num_heads {self.num_heads}")
        if self.mlp not in MLPS:
            raise ValueError(f"unknown mlp {self.mlp!r}; known: {', '.join(MLPS)}")
        if self.mlp == "gelu" and self.hidden_act == "swish":
            self.hidden_act = "gelu"  # the official default is SwiGLU's; other libraries read this field
        if self.hidden_act not in MLPS[self.mlp]:
            only = MLPS[self.mlp][0]
            raise ValueError(
                f"hidden_act is {self.hidden_act!r}; only {only!r} is defined for a {self.mlp} MLP"
            )
        if self.fuse_cross_entropy and self.fuse_linear_cross_entropy:
            raise ValueError("fuse_cross_entropy and fuse_linear_cross_entropy cannot both be true")
        super().__post_init__(**kwargs)

    @property
    def n_kv_heads(self) -> int:
        """KV heads, resolved: ``num_kv_heads`` is null for plain multi-head attention."""
        return self.num_kv_heads or self.num_heads

    @property
    def num_key_value_heads(self) -> int:
        """The name that transformers and transformer-lens read."""
        return self.n_kv_heads

    @property
    def head_dim(self) -> int:
        """Width of one head."""
        return self.hidden_size // self.num_heads

    @property
    def mlp_width(self) -> int:
        """Width of the MLP, resolved: ``intermediate_size`` may be null."""
        if self.intermediate_size:
            return self.intermediate_size
        if self.mlp == "gelu":  # two matrices instead of three, so no two thirds
            return (self.hidden_ratio or 4) * self.hidden_size
        return _swiglu_width(self.hidden_size, self.hidden_ratio)

    def mlp_width_of(self, layer: int) -> int:
        """Width of one layer's MLP: the same in all, except in MUDDFormer."""
        return self.mlp_width


@strict
class TransformerConfig(SharedConfig):
    """The plain pre-norm decoder."""

    model_type = "transformer"


@strict
class SATFormerConfig(SharedConfig):
    """The decoder whose later layers re-read the first layer's values through a learned gate."""

    model_type = "SATFormer"

    use_value_residual: bool = True
    value_residual_gate: str = "relu"
    value_residual_proj_bias: bool = False
    value_residual_last_k: int | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        if self.value_residual_gate not in GATES:
            raise ValueError(f"unknown gate {self.value_residual_gate!r}; known: {', '.join(GATES)}")
        super().__post_init__(**kwargs)

    def mixes(self, layer: int) -> bool:
        """Whether ``layer`` adds gated first-layer values to its own (layer 0 never does)."""
        last_k = self.value_residual_last_k
        recent = last_k is None or layer >= self.num_hidden_layers - last_k
        return self.use_value_residual and layer != 0 and recent


@strict
class ResFormerConfig(SharedConfig):
    """The decoder whose later layers add the first layer's values with one learned scalar a layer."""

    model_type = "ResFormer"

    use_value_residual: bool = True
    value_residual_lambda2_init: float = 0.5
    value_residual_last_k: int | None = None

    def mixes(self, layer: int) -> bool:
        """Whether ``layer`` adds first-layer values (the rule is SATFormer's)."""
        last_k = self.value_residual_last_k
        recent = last_k is None or layer >= self.num_hidden_layers - last_k
        return self.use_value_residual and layer != 0 and recent


@strict
class DenseFormerConfig(SharedConfig):
    """The decoder whose blocks read a learned average of all earlier block outputs."""

    model_type = "denseformer"

    dwa_dilation: int = 1
    dwa_period: int = 1

    def __post_init__(self, **kwargs: Any) -> None:
        for name in ("dwa_dilation", "dwa_period"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it counts blocks, so at least 1")
        super().__post_init__(**kwargs)

    def averages(self, layer: int) -> bool:
        """Whether an average stands behind ``layer``."""
        return (layer + 1) % self.dwa_period == 0


@strict
class MUDDFormerConfig(SharedConfig):
    """The decoder whose queries, keys, values and residual each read a token-dependent mix of earlier outputs."""

    model_type = "muddformer"

    num_ways: int = 4
    param_realloc: bool = True
    use_pre_post_da_norm: bool = True

    def __post_init__(self, **kwargs: Any) -> None:
        if self.num_ways != 4 and self.num_hidden_layers > 1:
            raise ValueError(
                f"num_ways is {self.num_ways}; a block reads four streams (queries, keys, values, residual)"
            )
        super().__post_init__(**kwargs)

    @property
    def mlp_width(self) -> int:
        """Width before it is handed out by depth; a null one goes to the **nearest** multiple of 256 here."""
        floor = int(self.hidden_size * (self.hidden_ratio or 4) * 2 / 3)
        return self.intermediate_size or _nearest_256(floor)

    def mlp_width_of(self, layer: int) -> int:
        """Deeper layers are wider under ``param_realloc``: half the width first, one and a half times last."""
        n_layers = self.num_hidden_layers
        if not self.param_realloc or n_layers == 1:
            return self.mlp_width
        share = (0.5 * (n_layers - 1 - layer) + 1.5 * layer) / (n_layers - 1)
        return _nearest_256(round(share * self.mlp_width))


@strict
class HyperConnectionsConfig(SharedConfig):
    """The decoder with several residual streams, which each sub-layer reads and writes by learned weights."""

    model_type = "dhc"

    expansion_rate: int = 4
    use_dynamic_hc: bool = True
    use_tanh: bool = True
    hc_norm_type: str = "rms"

    def __post_init__(self, **kwargs: Any) -> None:
        if self.expansion_rate < 1:
            raise ValueError(f"expansion_rate is {self.expansion_rate}; it counts streams, so at least 1")
        super().__post_init__(**kwargs)


def _nearest_256(width: int) -> int:
    """The nearest multiple of 256, ties down, at least 256 (MUDDFormer's rule)."""
    return max(256, 256 * ((width + 127) // 256))
