"""A causal model as this package runs it: hooks by role and layer, restart at a layer, NLL and logits in chunks.

The model runs as transformers (or satlens) wrote it, with plain torch hooks on its own modules, so that every family
is measured alike and a pass without hooks is the model to the last bit. No attention mask is given: padding stands on
the right, and a causal model never reads to its right (checked at opening).
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from satlens.carried.documents import Rows
from satlens.carried.reads import ROLES, Edit, GateRead, Hook, Site, State, first_tensor, unfolded
from satlens.errors import SatlensError, UserError
from satlens.metrics import CHUNK_LOGITS, chunked_nll


@dataclass(frozen=True, kw_only=True)
class Reader:
    """An opened model: its gate reads, its sites, and the ways to run it. All passes are without gradients."""

    name: str
    facts: Mapping[str, Any]
    """For manifests: architecture, digest, parameters."""
    model: Any
    """The causal language model itself (transformers' ``PreTrainedModel``), in eval mode."""
    tokenizer: Any
    bos: int | None
    """Token that stands before every document, where the model's tokenizer puts one."""
    layers: tuple[nn.Module, ...]
    """The blocks."""
    parts: Mapping[str, tuple[nn.Module | None, ...]]
    """Modules of each block by transformer-lens's name for them, None where a block lacks one."""
    sites: Mapping[str, Mapping[int, Site]]
    """Role -> layer -> where its tensor is."""
    reads: tuple[GateRead, ...]
    """One MLP gate linear a layer, by layer."""
    value_reads: tuple[GateRead, ...]
    """SATFormer's own gate projections, for the layers that have one; empty for other models."""
    d_model: int
    d_vocab: int
    n_ctx: int
    """Longest input the model was made for."""
    carries_v1: bool
    """Whether later blocks read V1 beside the stream (our own families)."""
    extra_outputs: int | None
    """Values a block returns beside the stream; None when it returns the stream alone."""
    head: Callable[[Tensor], Tensor]
    """Final hidden states to logits, scaled and capped as the model does."""
    plain_head: Tensor | None
    """The unembedding, when the head is that matrix and nothing else."""

    @property
    def n_layers(self) -> int:
        """Blocks."""
        return len(self.layers)

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return next(self.model.parameters()).device

    @property
    def pad(self) -> int:
        """An id to fill rows with; any but the model's own padding id, whose embedding is special to some."""
        return 1 if getattr(self.model.config.get_text_config(), "pad_token_id", None) == 0 else 0

    def site(self, role: str, layer: int) -> Site:
        """Where a role's tensor is.

        Raises:
            UserError: no such role, or this model's layer does not have it.
        """
        if role not in ROLES:
            raise UserError(f"unknown role {role!r}; known: {', '.join(ROLES)}")
        if layer not in self.sites.get(role, {}):
            there = ", ".join(map(str, sorted(self.sites.get(role, {})))) or "none"
            raise UserError(f"{self.name}: layer {layer} has no {role}; layers that have it: {there}")
        return self.sites[role][layer]

    def read(self, layer: int, kind: str = "mlp") -> GateRead:
        """The gate read of a layer.

        Raises:
            UserError: the layer has none of this kind.
        """
        for read in self.reads if kind == "mlp" else self.value_reads:
            if read.layer == layer:
                return read
        raise UserError(f"{self.name}: layer {layer} has no {kind} gate (layers 0 to {self.n_layers - 1})")

    @torch.no_grad()
    def run(
        self, input_ids: Int[Tensor, "batch pos"], hooks: Sequence[Hook] = ()
    ) -> Float[Tensor, "batch pos d_model"]:
        """Final hidden states (after the final norm and whatever follows it before the head)."""
        with self._hooked(hooks, *input_ids.shape):
            return self._stack(input_ids)

    @torch.no_grad()
    def run_keeping(
        self, input_ids: Int[Tensor, "batch pos"], layers: Iterable[int], hooks: Sequence[Hook] = ()
    ) -> tuple[Float[Tensor, "batch pos d_model"], dict[int, State]]:
        """``run``, and the state before each of ``layers`` as the pass had it (edits of ``resid`` not included)."""
        states: dict[int, State] = {}
        with ExitStack() as stack:
            for layer in set(layers):
                stack.callback(self._keep(layer, input_ids, states).remove)
            stack.enter_context(self._hooked(hooks, *input_ids.shape))
            return self._stack(input_ids), states

    @torch.no_grad()
    def run_from(self, state: State, hooks: Sequence[Hook] = ()) -> Float[Tensor, "batch pos d_model"]:
        """Final hidden states when block ``state.layer`` gets ``state.residual``; blocks before it do not run.

        The model's own forward makes masks and positions; the blocks before are passed through. Bit-equal to
        ``run`` from an unchanged state.

        Raises:
            SatlensError: a hook below the first block that runs, which would never fire.
        """
        if early := [layer for _, layer, _ in hooks if layer < state.layer]:
            raise SatlensError(f"a hook at layer {min(early)} cannot fire in a pass from layer {state.layer}")
        with ExitStack() as stack:
            for layer in self.layers[: state.layer]:
                stack.enter_context(_bypassed(layer, self._output(state)))
            if state.layer == 0:
                stack.enter_context(_replaced_input(self.layers[0], state.residual))
            stack.enter_context(self._hooked(hooks, *state.input_ids.shape))
            return self._stack(state.input_ids)

    @torch.no_grad()
    def logits(self, hidden: Float[Tensor, "... d_model"]) -> Float[Tensor, "... d_vocab"]:
        """Float32 logits of final hidden states; chunk before calling, whole windows are large."""
        return self.head(hidden).float()

    @torch.no_grad()
    def nll(self, hidden: Float[Tensor, "batch pos d_model"], rows: Rows) -> Float[Tensor, " scored"]:
        """Float32 NLL in nats of the scored predictions, row-major, chunk by chunk."""
        chosen, targets = hidden[rows.scored], rows.targets()
        if self.plain_head is not None:
            return chunked_nll(chosen, self.plain_head, targets)
        step = max(1, CHUNK_LOGITS // self.d_vocab)
        parts = [
            -self.logits(chosen[at : at + step])
            .log_softmax(-1)
            .gather(1, targets[at : at + step, None])[:, 0]
            for at in range(0, len(chosen), step)
        ]
        return torch.cat(parts or [chosen.new_empty(0, dtype=torch.float32)])

    def _stack(self, input_ids: Tensor) -> Tensor:
        """The model without its head, on the whole input."""
        out = self.model.base_model(input_ids=input_ids, use_cache=False)
        hidden: Tensor = out.last_hidden_state
        return hidden

    def _output(self, state: State) -> Any:
        """What a block would have returned to bring about ``state``."""
        if self.carries_v1:
            return state.residual, state.v1, None
        if self.extra_outputs is None:
            return state.residual
        return (state.residual, *[None] * self.extra_outputs)

    def _keep(self, layer: int, input_ids: Tensor, states: dict[int, State]) -> Any:
        def keep(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            residual, _ = first_tensor(args, kwargs)
            v1 = args[1] if self.carries_v1 and len(args) > 1 else None
            states[layer] = State(layer=layer, input_ids=input_ids, residual=residual, v1=v1)

        return self.layers[layer].register_forward_pre_hook(keep, with_kwargs=True)

    @contextmanager
    def _hooked(self, hooks: Sequence[Hook], batch: int, pos: int) -> Iterator[None]:
        with ExitStack() as stack:
            for role, layer, edit in hooks:
                site = self.site(role, layer)
                stack.enter_context(hooked_site(site, edit, batch, pos, f"{role} of layer {layer}"))
            yield


@contextmanager
def hooked_site(site: Site, edit: Edit, batch: int, pos: int, where: str) -> Iterator[None]:
    """Hold an edit on one tensor of a pass over ``batch`` rows of ``pos`` positions; ``where`` is for errors.

    Raises:
        SatlensError: in the pass, when the tensor has another number of positions, or an edit changes its shape.
    """

    def new(tensor: Tensor) -> Tensor | None:
        try:
            whole = unfolded(tensor, batch, pos, where)
        except ValueError as error:
            raise SatlensError(f"{error}: this model's sites cannot be measured") from error
        part = whole if site.rows is None else whole[..., site.rows]
        out = edit(part)
        if out is None:
            return None
        if out.shape != part.shape:
            raise SatlensError(f"{where}: an edit turned shape {tuple(part.shape)} into {tuple(out.shape)}")
        if site.rows is not None:
            whole = whole.clone()
            whole[..., site.rows] = out
            out = whole
        return out.to(tensor.dtype).reshape(tensor.shape)

    if site.side == "out":
        handle = site.module.register_forward_hook(lambda _, __, output: _swap_output(output, new))
    else:
        handle = site.module.register_forward_pre_hook(
            lambda _, args, kwargs: _swap_input(args, kwargs, new), with_kwargs=True
        )
    try:
        yield
    finally:
        handle.remove()


def _swap_output(output: Any, new: Callable[[Tensor], Tensor | None]) -> Any:
    if isinstance(output, Tensor):
        return new(output)
    out = new(output[0])
    return None if out is None else (out, *output[1:])


def _swap_input(args: tuple[Any, ...], kwargs: dict[str, Any], new: Callable[[Tensor], Tensor | None]) -> Any:
    tensor, keyword = first_tensor(args, kwargs)
    out = new(tensor)
    if out is None:
        return None
    if keyword is None:
        return (out, *args[1:]), kwargs
    return args, {**kwargs, keyword: out}


@contextmanager
def _bypassed(layer: nn.Module, output: Any) -> Iterator[None]:
    """The block returns ``output`` without running."""
    layer.forward = lambda *args, **kwargs: output
    try:
        yield
    finally:
        del layer.forward


@contextmanager
def _replaced_input(layer: nn.Module, residual: Tensor) -> Iterator[None]:
    handle = layer.register_forward_pre_hook(
        lambda _, args, kwargs: _swap_input(args, kwargs, lambda _: residual), with_kwargs=True
    )
    try:
        yield
    finally:
        handle.remove()
