"""The parts of an opened model: its gate linears, where each role's tensor is, its activation and its head."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from satlens.carried.reads import GateRead, Site
from satlens.errors import UserError


def mlp_read(model: Any, found: Mapping[str, Any], layer: int, name: str) -> GateRead:
    """The gate linear of a layer's MLP, from what the adapter named (``found``).

    Raises:
        UserError: the layer has no dense MLP with a gate linear.
    """
    gate, up, out = (found[part][layer] for part in ("mlp.gate", "mlp.in", "mlp.out"))
    linear, gated, rows = (gate, True, None) if gate is not None and up is not None else (up, False, None)
    joint = getattr(getattr(found["blocks"][layer], "mlp", None), "gate_up_proj", None)
    if linear is None and isinstance(joint, nn.Linear):
        linear, gated, rows = joint, True, slice(0, joint.out_features // 2)
    if linear is None or out is None or getattr(linear, "weight", None) is None or linear.weight.dim() != 2:
        raise UserError(
            f"{name}: layer {layer} has no MLP gate linear ({type(found['blocks'][layer]).__name__}): its experts or "
            "its mixer are not a dense MLP, and there is nothing to measure"
        )
    activation, activate = _activation(model)
    return GateRead(
        layer=layer, kind="mlp", name=_name_of(model, linear), linear=linear, rows=rows,
        activation=activation, activate=activate, gated=gated,
    )  # fmt: skip


def value_reads(model: Any, blocks: list[Any]) -> tuple[GateRead, ...]:
    """SATFormer's own gates: a projection to one logit a KV head, in the layers that mix.

    None where attention is disabled: no gate reaches the stream then.
    """
    reads = []
    for layer, block in enumerate(blocks):
        mixing = getattr(block.attn, "value_residual_mixing", None)
        # ResFormer mixes by a number of its own, which reads nothing
        if mixing is None or not hasattr(mixing, "alpha_proj") or model.config.attention_disabled:
            continue
        reads.append(
            GateRead(
                layer=layer,
                kind="value",
                name=_name_of(model, mixing.alpha_proj),
                linear=mixing.alpha_proj,
                activation=mixing.gate.kind,
                activate=mixing.gate,
                gated=False,
            )
        )
    return tuple(reads)


def sites_of(
    found: Mapping[str, Any], reads: tuple[GateRead, ...], own_gates: tuple[GateRead, ...]
) -> dict[str, dict[int, Site]]:
    """Role -> layer -> site. A write is taken after the norm that some families put behind it."""
    sites: dict[str, dict[int, Site]] = {
        role: {} for role in ("resid", "attn_out", "read", "pre", "post", "mlp_out")
    }
    for read in reads:
        at = read.layer
        sites["resid"][at] = Site(module=found["blocks"][at], side="in")
        sites["read"][at] = Site(module=read.linear, side="in")
        sites["pre"][at] = Site(module=read.linear, side="out", rows=read.rows)
        sites["post"][at] = Site(module=found["mlp.out"][at], side="in")
        after_attention, after_mlp = norms_after(found, at)
        sites["mlp_out"][at] = Site(module=after_mlp or found["mlp.out"][at], side="out")
        if (attention := after_attention or found["attn.o"][at]) is not None:
            sites["attn_out"][at] = Site(module=attention, side="out")
    sites["resid"][len(reads)] = Site(module=found["blocks"][-1], side="out")
    if own_gates:
        gates = {
            read.layer: found["blocks"][read.layer].attn.value_residual_mixing.gate for read in own_gates
        }
        sites["value_read"] = {read.layer: Site(module=read.linear, side="in") for read in own_gates}
        sites["value_pre"] = {read.layer: Site(module=read.linear, side="out") for read in own_gates}
        sites["value_gate"] = {at: Site(module=gate, side="out") for at, gate in gates.items()}
    return sites


def norms_after(found: Mapping[str, Any], layer: int) -> tuple[nn.Module | None, nn.Module | None]:
    """The norms between attention's and the MLP's output and the stream, where a block has them.

    OLMo-2's blocks have no others, and its adapter calls them ln1 and ln2; ``input_layernorm`` tells Llama's from them.
    """
    block, own = found["blocks"][layer], (found["ln1_post"][layer], found["ln2_post"][layer])
    names = ("post_attention_layernorm", "post_feedforward_layernorm")
    if (
        own == (None, None)
        and not hasattr(block, "input_layernorm")
        and all(hasattr(block, n) for n in names)
    ):
        return getattr(block, names[0]), getattr(block, names[1])
    return own


def head_of(model: Any) -> tuple[Callable[[Tensor], Tensor], Tensor | None]:
    """The head with the scale or cap that some families put on logits, and its matrix where there is nothing else."""
    linear, config = model.get_output_embeddings(), model.config.get_text_config()
    cap, scale = getattr(config, "final_logit_softcapping", None), getattr(config, "logit_scale", None)
    divide = getattr(config, "logits_scaling", None)
    plain = cap is None and scale is None and divide is None and linear.bias is None
    return partial(_logits, linear, cap, scale, divide), linear.weight.detach() if plain else None


def _logits(
    linear: Any, cap: float | None, scale: float | None, divide: float | None, hidden: Tensor
) -> Tensor:
    logits: Tensor = linear(hidden)
    if scale is not None:
        logits = logits * scale
    if divide is not None:
        logits = logits / divide
    return logits if cap is None else cap * torch.tanh(logits / cap)


def extra_outputs(model: Any, block: nn.Module) -> int | None:
    """How many values a block returns beside the stream, seen on one token pair."""
    seen: list[Any] = []
    handle = block.register_forward_hook(lambda _, __, output: seen.append(output))
    try:
        with torch.no_grad():
            model.base_model(
                input_ids=torch.tensor([[1, 2]], device=next(model.parameters()).device), use_cache=False
            )
    finally:
        handle.remove()
    return None if isinstance(seen[0], Tensor) else len(seen[0]) - 1


def _activation(model: Any) -> tuple[str, Callable[[Tensor], Tensor]]:
    """The MLP's function as the config spells it (``proofs.prove`` compares it with what the model computes)."""
    from transformers.activations import ACT2FN

    config = model.config.get_text_config()
    for key in ("hidden_activation", "hidden_act", "activation_function", "activation"):
        if (name := getattr(config, key, None)) is not None:
            return str(name), ACT2FN["silu" if name == "swish" else name]
    name = "gelu_pytorch_tanh" if config.model_type == "bloom" else "gelu"  # BLOOM's config leaves it unsaid
    return name, ACT2FN[name]


def _name_of(model: Any, module: nn.Module) -> str:
    return next(name for name, other in model.named_modules() if other is module)
