"""The pre-norm decoder as a HuggingFace model: block, stack, head and loss, shared by the architectures."""

from typing import Any, ClassVar, cast

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import DynamicCache, GenerationMixin, PreTrainedModel
from transformers.initialization import copy_
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast

from satlens.hf.config import SharedConfig
from satlens.hf.layers import Attention, FrozenZero, RMSNorm, Rotary, attention_mask, new_mlp

_OUTPUT_FIELDS = CausalLMOutputWithPast.__dataclass_fields__
CACHE_FIELD = "cache" if "cache" in _OUTPUT_FIELDS else "past_key_values"  # renamed within transformers 5


class Block(GradientCheckpointingLayer):
    """``x + attn(norm x)``, then ``x + mlp(norm x)``; V1 travels beside the residual stream."""

    def __init__(self, config: SharedConfig, layer_idx: int, attention: type[Attention]) -> None:
        super().__init__()
        self.attn_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.attn = attention(config, layer_idx)
        self.mlp_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mlp = new_mlp(config, layer_idx)

    def forward(
        self,
        hidden_states: Float[Tensor, "batch pos d_model"],
        v1: Float[Tensor, "batch pos kv_head d_head"] | None = None,
        coefficient: Float[Tensor, ""] | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """``(hidden_states, v1, attention weights or None)``. V1 and its coefficient are positional so that reentrant
        gradient checkpointing sees them as inputs."""
        normed = self.attn_norm(hidden_states)
        attn_out, weights, v1 = self.attn(normed, v1=v1, coefficient=coefficient, **kwargs)
        hidden_states = hidden_states + attn_out
        return hidden_states + self.mlp(self.mlp_norm(hidden_states)), v1, weights


class DecoderPreTrained(PreTrainedModel):
    """Weight initialisation and loading rules of the family: N(0, initializer_range), zero biases, unit norms.

    A disabled attention's output projection is drawn and then zeroed, so that all other weights of a seed are
    those of the model whose attention works.
    """

    config_class: type[SharedConfig]
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _supports_sdpa = True

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """One rule for all; a linear map may bring its own ``start_std``, a module its own ``start_values``."""
        if isinstance(module, RMSNorm):
            nn.init.constant_(module.weight, module.start)
        elif isinstance(module, nn.Linear | nn.Embedding):
            std = cast(float, getattr(module, "start_std", self.config.initializer_range))
            nn.init.normal_(module.weight, mean=0.0, std=std)
            if getattr(module, "bias", None) is not None:
                nn.init.zeros_(cast(Tensor, module.bias))
            if isinstance(module, FrozenZero):
                nn.init.zeros_(module.weight)
        elif hasattr(module, "start_values"):
            for name, value in cast(Any, module).start_values().items():
                copy_(getattr(module, name), value)


class DecoderModel(DecoderPreTrained):
    """Embedding, blocks, final norm."""

    attention: ClassVar[type[Attention]] = Attention
    block: ClassVar[type[nn.Module]] = Block

    def __init__(self, config: SharedConfig) -> None:
        super().__init__(config)
        self.embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.rotary = Rotary(config.head_dim, config.rope_theta)
        self.layers = nn.ModuleList(
            self.block(config, i, self.attention) for i in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.add_parts(config)
        self.gradient_checkpointing = False
        # what is kept whole on one device, or sharded one by one
        self._no_split_modules = [self.block.__name__]
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.embeddings

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.embeddings = cast(nn.Embedding, value)

    def add_parts(self, config: Any) -> None:
        """Modules that stand beside or between the blocks."""

    def begin(self, embedded: Float[Tensor, "batch pos d_model"]) -> tuple[Tensor, Any]:
        """What block 0 reads, and what later blocks will need beside it (nothing yet)."""
        return embedded, None

    def advance(
        self, layer: int, block: Any, x: Tensor, memory: Any, **shared: Any
    ) -> tuple[Tensor, Any, Tensor | None]:
        """What the block after ``layer`` reads, the memory then, and the attention weights if they were asked for.

        ``block`` is the layer's, or what stands for it (a bridge runs its own): here the memory is V1.
        """
        x, memory, weights = block(x, memory, **shared)
        return x, memory, weights

    def reported(self, x: Tensor, memory: Any) -> Float[Tensor, "batch pos d_model"]:
        """What ``output_hidden_states`` says of the stream before a block."""
        return x

    def end(self, x: Tensor, memory: Any) -> Float[Tensor, "batch pos d_model"]:
        """What the final norm reads after the last block."""
        return x

    def forward(
        self,
        input_ids: Int[Tensor, "batch pos"] | None = None,
        attention_mask: Int[Tensor, "batch key"] | None = None,
        inputs_embeds: Float[Tensor, "batch pos d_model"] | None = None,
        position_ids: Int[Tensor, "batch pos"] | None = None,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        cache: Any = None,
        past_key_values: Any = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        **_: Any,
    ) -> BaseModelOutputWithPast:
        """Hidden states after the final norm.

        ``hidden_states`` (on request) has the input of every block, then the final norm's output.
        ``position_embeddings`` are rotary tables made beforehand (a training loop makes them once).
        ``cache`` and ``past_key_values`` are two names of the same thing, for the transformers 5 line.

        Raises:
            ValueError: both or neither of ``input_ids`` and ``inputs_embeds``.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give exactly one of input_ids and inputs_embeds")
        x = self.embeddings(input_ids) if inputs_embeds is None else inputs_embeds
        cache = cache if cache is not None else past_key_values
        if cache is None and use_cache and not self.training:
            cache = DynamicCache()
        n_past = cache.get_seq_length() if cache is not None else 0
        shared = {
            "attention_mask": mask_for(cast(SharedConfig, self.config), attention_mask, x, n_past),
            "position_embeddings": position_embeddings
            or self.rotary(positions_for(position_ids, attention_mask, x, n_past)),
            "cache": cache,
            "output_attentions": bool(output_attentions),
        }
        inputs: list[Tensor] = []
        patterns: list[Any] = []
        x, memory = self.begin(x)
        for layer, block in enumerate(self.layers):
            if output_hidden_states:
                inputs.append(self.reported(x, memory))
            x, memory, weights = self.advance(layer, block, x, memory, **shared)
            patterns.append(weights)
        x = self.norm(self.end(x, memory))
        out = BaseModelOutputWithPast(
            last_hidden_state=x,
            hidden_states=(*inputs, x) if output_hidden_states else None,
            attentions=tuple(patterns) if output_attentions else None,
        )
        return _with_cache(out, cache)


def mask_for(config: SharedConfig, padding: Tensor | None, x: Tensor, n_past: int) -> Tensor | None:
    if padding is not None and padding.dim() != 2:
        raise ValueError(f"attention_mask must be [batch, key] of 0 and 1, got shape {tuple(padding.shape)}")
    return attention_mask(padding, x.shape[1], n_past, config.window_size, x.device)


def positions_for(given: Tensor | None, padding: Tensor | None, x: Tensor, n_past: int) -> Tensor:
    """Positions count real tokens, so a left-padded row is rotated exactly like the unpadded one."""
    if given is not None:
        return given
    if padding is not None:
        return (padding.long().cumsum(-1) - 1).clamp(min=0)[:, -x.shape[1] :]
    return torch.arange(n_past, n_past + x.shape[1], device=x.device)[None]


def _with_cache(out: Any, cache: Any) -> Any:
    """Set the cache field under the name this transformers release gives it."""
    if cache is not None:
        out[CACHE_FIELD] = cache
    return out


class DecoderForCausalLM(DecoderPreTrained, GenerationMixin):
    """The decoder with its language-model head."""

    _tied_weights_keys = {"lm_head.weight": "model.embeddings.weight"}  # noqa: RUF012 - as above
    stack: ClassVar[type[DecoderModel]] = DecoderModel

    def __init__(self, config: SharedConfig) -> None:
        super().__init__(config)
        self.model = self.stack(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def set_output_embeddings(self, value: nn.Module) -> None:
        self.lm_head = value

    def forward(
        self,
        input_ids: Int[Tensor, "batch pos"] | None = None,
        labels: Int[Tensor, "batch pos"] | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Logits (of the last ``logits_to_keep`` positions, 0 = all) and, with ``labels``, the mean cross-entropy.

        Labels are the unshifted ids: position t is scored against ``labels[t + 1]``; -100 is not scored.

        Raises:
            ValueError: ``labels`` together with ``logits_to_keep``, which would score the wrong positions.
        """
        if labels is not None and not (isinstance(logits_to_keep, int) and logits_to_keep == 0):
            raise ValueError("labels score every position: leave logits_to_keep at 0")
        out = self.model(input_ids, **kwargs)
        keep = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(out.last_hidden_state[:, keep])
        loss = None
        if labels is not None:
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten())
        result = CausalLMOutputWithPast(
            loss=loss, logits=logits, hidden_states=out.hidden_states, attentions=out.attentions
        )
        return _with_cache(result, out.get(CACHE_FIELD))
