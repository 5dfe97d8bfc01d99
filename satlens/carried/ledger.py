"""Which norm feeds each gate, how its block is laid out, and which constants lie on the path: measured, not believed.

Everything is found by running the model on a few tokens and comparing tensors, so that an entry says what the model
does: a norm is the module whose output *is* what the gate reads, and a constant is what attention writes when it
reads nothing. Families differ exactly here (GPT-NeoX feeds its MLP from another norm than its attention even in a
parallel block, OPT-350m norms after adding, value biases reach the stream through the out-projection).
"""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from satlens.carried.norms import Norm, apart, as_formula, close
from satlens.carried.reader import Reader
from satlens.carried.reads import GateRead, first_tensor, unfolded

N_PROBE = 12
"""Tokens of a probe."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One layer's line of the ledger."""

    layer: int
    block: str
    """``sequential``: the gate reads norm(stream + attention). ``parallel``: norm(stream). ``post-norm``:
    sequential, and the stream itself is normed after each addition. ``other``: none of these. Where attention
    writes nothing the first two are the same, and are called sequential."""
    norm: Norm | None
    """The norm that feeds the gate; None when no module's output is what the gate reads."""
    exit_norm: Norm | None
    """The norm that the stream passes after the MLP's write (post-norm blocks only)."""
    attention_bias: Float[Tensor, " d_model"]
    """Bias of the attention's out-projection."""
    value_constant: Float[Tensor, " d_model"] | None
    """``W_O b_V``: what value biases write at every position, since attention rows sum to 1. None when they do not."""
    mlp_bias: Float[Tensor, " d_model"]
    """Bias of the MLP's out-projection."""
    renormed: bool
    """Whether a norm stands between these writes and the stream, so that their constants reach it changed."""

    adds: bool
    """Whether the stream after the block is the stream before it and both writes (Granite scales them first)."""

    @property
    def attention_constant(self) -> Float[Tensor, " d_model"]:
        """All that attention writes whatever it reads."""
        return (
            self.attention_bias if self.value_constant is None else self.attention_bias + self.value_constant
        )


@torch.no_grad()
def ledger(reader: Reader) -> tuple[Entry, ...]:
    """The entry of every layer."""
    seen = _probe(reader)
    values = _value_constants(reader)
    return tuple(_entry(reader, layer, seen, values[layer]) for layer in range(reader.n_layers))


@torch.no_grad()
def stream_constant(reader: Reader) -> Float[Tensor, " d_model"]:
    """Constant part of the stream before block 0: the bias of a norm on the embeddings (BLOOM), else zeros."""
    ids, roles = probe_ids(reader), dict[tuple[str, int], Tensor]()
    ran: list[_Ran] = []
    within = {id(module) for block in reader.layers for module in block.modules()}
    with ExitStack() as stack:
        for name, module in reader.model.base_model.named_modules():
            if id(module) not in within and not any(module.children()):
                watch = _watcher(ran, name, *ids.shape)
                stack.callback(module.register_forward_hook(watch, with_kwargs=True).remove)
        reader.run(ids, [("resid", 0, _keeper(roles, ("resid", 0)))])
    start = roles["resid", 0]
    for module in ran:
        if torch.equal(module.output, start):
            norm = as_formula(module.name, module.module, module.given)
            return torch.zeros_like(start[0, 0]).float() if norm is None else norm.bias
    return torch.zeros_like(start[0, 0]).float()


@torch.no_grad()
def value_ledger(reader: Reader) -> dict[int, Norm | None]:
    """For SATFormer's own gates: the norm that feeds each (the attention norm of its layer)."""
    seen = _probe(reader)
    return {read.layer: _feeding_norm(reader, read, seen)[0] for read in reader.value_reads}


def probe_ids(reader: Reader, rows: int = 1, pos: int = N_PROBE) -> Tensor:
    """A few different token ids, the same in every row."""
    spread = torch.linspace(2, reader.d_vocab - 1, pos).long()
    return spread.expand(rows, pos).contiguous().to(reader.device)


@dataclass(frozen=True)
class _Seen:
    """What one pass over the probe showed."""

    roles: dict[tuple[str, int], Tensor]
    """Copies: some models go on writing into a tensor."""
    originals: dict[tuple[str, int], Tensor]
    """The tensors themselves, held so that no other takes their memory: they are told apart by it."""
    modules: list[list["_Ran"]]
    """Per layer, in the order they ran."""


@dataclass(frozen=True)
class _Ran:
    """A module of a block in the probe: copies of its input and output, and the output itself."""

    name: str
    module: nn.Module
    given: Tensor
    output: Tensor
    original: Tensor


def _probe(reader: Reader) -> _Seen:
    ids = probe_ids(reader)
    roles: dict[tuple[str, int], Tensor] = {}
    originals: dict[tuple[str, int], Tensor] = {}
    modules: list[list[_Ran]] = [[] for _ in reader.layers]
    hooks = [
        (role, layer, _keeper(roles, (role, layer), originals))
        for role, layers in reader.sites.items()
        for layer in layers
    ]
    with ExitStack() as stack:
        for layer, block in enumerate(reader.layers):
            for name, module in block.named_modules():
                if name and not any(module.children()):
                    watch = _watcher(modules[layer], name, ids.shape[0], ids.shape[1])
                    stack.callback(module.register_forward_hook(watch, with_kwargs=True).remove)
        reader.run(ids, hooks)
    return _Seen(roles, originals, modules)


def _keeper(
    store: dict[tuple[str, int], Tensor],
    key: tuple[str, int],
    originals: dict[tuple[str, int], Tensor] | None = None,
) -> Callable[[Tensor], None]:
    def keep(tensor: Tensor) -> None:
        store[key] = tensor.detach().clone()
        if originals is not None:
            originals[key] = tensor

    return keep


def _watcher(store: list[_Ran], name: str, batch: int, pos: int) -> Callable[..., None]:
    def watch(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        try:
            given, _ = first_tensor(args, kwargs)
            before, after = (
                unfolded(tensor, batch, pos, name).detach().clone() for tensor in (given, output)
            )
        except (ValueError, AttributeError):  # no map from positions to positions: a table, a cache, a mask
            return
        store.append(_Ran(name, module, before, after, original=output))

    return watch


def _entry(reader: Reader, layer: int, seen: _Seen, value_constant: Tensor | None) -> Entry:
    read = reader.read(layer)
    norm, norm_input = _feeding_norm(reader, read, seen)
    stream, after = seen.roles["resid", layer], seen.roles["resid", layer + 1]
    write = seen.roles["mlp_out", layer]
    attention = seen.roles.get(("attn_out", layer), torch.zeros_like(stream))
    block, exit_norm = "other", None
    if norm_input is not None and apart(norm_input, stream) < apart(norm_input, stream + attention):
        if close(norm_input, stream) and close(after, stream + attention + write):
            block = "parallel"
    elif norm_input is not None and close(norm_input, stream + attention):
        if close(after, norm_input + write):
            block = "sequential"
        else:
            exit_norm = _norm_between(seen.modules[layer], seen.roles["read", layer] + write, after)
            block = "other" if exit_norm is None else "post-norm"
    out, mlp_out = reader.parts["attn.o"][layer], reader.parts["mlp.out"][layer]
    return Entry(
        layer=layer,
        block=block,
        norm=norm,
        exit_norm=exit_norm,
        attention_bias=_bias(out, stream),
        value_constant=value_constant,
        mlp_bias=_bias(mlp_out, stream),
        renormed=any(
            layer in reader.sites[role] and reader.sites[role][layer].module is not reader.parts[part][layer]
            for role, part in (("attn_out", "attn.o"), ("mlp_out", "mlp.out"))
        ),
        adds=close(after, stream + attention + write),
    )


def _feeding_norm(reader: Reader, read: GateRead, seen: _Seen) -> tuple[Norm | None, Tensor | None]:
    """The module whose output the gate reads, and that module's input.

    Its output and the read are one piece of memory. Values alone could not tell two norms of an untrained model apart;
    they decide only where something stands between (a cast), and then the first module with these values is meant.
    """
    key = (read.roles[0], read.layer)
    wanted, place = seen.roles[key], seen.originals[key].data_ptr()
    equal = [ran for ran in seen.modules[read.layer] if torch.equal(ran.output, wanted)]
    for ran in [*(ran for ran in equal if ran.original.data_ptr() == place), *equal]:
        if ran.given.shape == wanted.shape:
            return as_formula(ran.name, ran.module, ran.given), ran.given
    return None, None


def _norm_between(modules: list[_Ran], before: Tensor, after: Tensor) -> Norm | None:
    for ran in modules:
        if torch.equal(ran.output, after) and close(ran.given, before):
            return as_formula(ran.name, ran.module, ran.given)
    return None


def _value_constants(reader: Reader) -> list[Tensor | None]:
    """``W_O b_V`` of each layer: what attention writes beyond its out-projection's bias when it reads zeros.

    Reading zeros, every value is its bias, and a mean of equal values is that value whatever the weights are.
    """
    ids, roles = probe_ids(reader), dict[tuple[str, int], Tensor]()
    plain = {layer: part for layer, part in enumerate(reader.parts["attn.o"]) if part is not None}
    with ExitStack() as stack:
        for layer in plain:
            attention = reader.parts["attn"][layer]
            if attention is None:
                continue
            stack.callback(attention.register_forward_pre_hook(_zeroed, with_kwargs=True).remove)
            if (first := getattr(attention, "first_value", None)) is not None:  # V1 is read beside the stream
                stack.callback(first.register_forward_hook(lambda _, __, out: torch.zeros_like(out)).remove)
        for layer, part in plain.items():
            keep = _keeper(roles, ("attn_out", layer))
            stack.callback(part.register_forward_hook(lambda _, __, out, keep=keep: keep(out)).remove)
        reader.run(ids)
    out: list[Tensor | None] = []
    for layer in range(reader.n_layers):
        written = roles.get(("attn_out", layer))
        if written is None or reader.parts["attn"][layer] is None:
            out.append(None)
            continue
        rows = written.reshape(-1, written.shape[-1]).float()
        out.append(
            rows.mean(0) - _bias(plain[layer], rows) if close(rows, rows[:1].expand_as(rows)) else None
        )
    return out


def _zeroed(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor, keyword = first_tensor(args, kwargs)
    nothing = torch.zeros_like(tensor)
    return ((nothing, *args[1:]), kwargs) if keyword is None else (args, {**kwargs, keyword: nothing})


def _bias(linear: nn.Module | None, like: Tensor) -> Tensor:
    own = getattr(linear, "bias", None)
    return torch.zeros(like.shape[-1], device=like.device) if own is None else own.detach().float()
