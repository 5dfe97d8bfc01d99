"""Tiny models of every block style whose stream, reads and gates are set by construction, and what must be measured.

A token's embedding is ``a u + s v_j`` or ``a u - s v_j``: one common direction and one of a few orthogonal ones.
Attention and MLP write constants (output biases, value biases) and next to nothing else, so the stream at every layer
is known for every token. ``_expected`` has it from the block's formula in numpy, apart from the code under test.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from satlens.carried.documents import SKIP, DocumentSet

D, LAYERS, HEADS, MLP = 16, 3, 2, 24
N_AXES = 4
VOCAB = 2 * N_AXES
COMMON, SPREAD = 3.0, 2.0
FAINT = 1e-5
"""Scale of what attention and MLP write beyond their constants: enough to keep sites alive, too little to be seen."""


@dataclass(frozen=True)
class Style:
    """How a family's blocks are made, and what its parts are called."""

    make: Callable[[], Any]
    layers: str
    embed: str
    attention_norm: str
    mlp_norm: str
    """The norm that feeds the gate; its own name even when it is the attention's."""
    o: str
    gate: str
    out: str
    block: str = "sequential"
    centred: bool = True
    value: Callable[[Any], torch.Tensor | None] = lambda block: None
    """The part of the parameters that is the value bias."""
    value_weight: str = ""
    up: str | None = None
    positions: str | None = None
    exit_norm: str | None = None
    gain_offset: float = 0.0
    """Gemma stores gains minus 1."""
    embed_scale: float = 1.0
    transposed: bool = False


def _config(name: str, **fields: Any) -> Callable[[], Any]:
    def make() -> Any:
        import transformers

        shape = {
            "hidden_size": D, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "intermediate_size": MLP,
            "max_position_embeddings": 64, "vocab_size": VOCAB, "pad_token_id": None, "bos_token_id": None,
            "eos_token_id": None, "tie_word_embeddings": False,
        }  # fmt: skip
        config = getattr(transformers, f"{name}Config")(**{**shape, **fields})
        return transformers.AutoModelForCausalLM.from_config(config)

    return make


def _ours(model_type: str) -> Callable[[], Any]:
    def make() -> Any:
        from satlens.hf import MODELS

        kind = MODELS[model_type]
        return kind(
            kind.config_class(
                hidden_size=D, num_hidden_layers=LAYERS, num_heads=HEADS, intermediate_size=MLP, vocab_size=VOCAB,
                max_position_embeddings=64, qkv_bias=True, pad_token_id=None,
            )
        )  # fmt: skip

    return make


_LLAMA: dict[str, Any] = {
    "layers": "model.layers", "embed": "model.embed_tokens", "attention_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm", "o": "self_attn.o_proj", "gate": "mlp.gate_proj", "up": "mlp.up_proj",
    "out": "mlp.down_proj", "centred": False, "value_weight": "self_attn.v_proj",
}  # fmt: skip
_OPT: dict[str, Any] = {
    "layers": "model.decoder.layers", "embed": "model.decoder.embed_tokens", "o": "self_attn.out_proj", "gate": "fc1",
    "out": "fc2", "value": lambda block: block.self_attn.v_proj.bias, "value_weight": "self_attn.v_proj",
    "positions": "model.decoder.embed_positions",
}  # fmt: skip
_NEOX: dict[str, Any] = {
    "layers": "gpt_neox.layers", "embed": "gpt_neox.embed_in", "attention_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm", "o": "attention.dense", "gate": "mlp.dense_h_to_4h",
    "out": "mlp.dense_4h_to_h", "value_weight": "attention.query_key_value",
    # a head's query, key and value stand together
    "value": lambda block: block.attention.query_key_value.bias.view(HEADS, 3, D // HEADS)[:, 2],
}  # fmt: skip
_OURS: dict[str, Any] = {
    "layers": "model.layers", "embed": "model.embeddings", "attention_norm": "attn_norm", "mlp_norm": "mlp_norm",
    "o": "attn.o_proj", "gate": "mlp.gate_proj", "up": "mlp.up_proj", "out": "mlp.down_proj", "centred": False,
    "value": lambda block: block.attn.v_proj.bias, "value_weight": "attn.v_proj",
}  # fmt: skip

STYLES = {
    "gpt2": Style(
        make=_config("GPT2", n_embd=D, n_layer=LAYERS, n_head=HEADS, n_inner=MLP, n_positions=64),
        layers="transformer.h", embed="transformer.wte", positions="transformer.wpe", attention_norm="ln_1",
        mlp_norm="ln_2", o="attn.c_proj", gate="mlp.c_fc", out="mlp.c_proj", transposed=True,
        value=lambda block: block.attn.c_attn.bias[2 * D :], value_weight="attn.c_attn",
    ),
    "neox-parallel": Style(make=_config("GPTNeoX", use_parallel_residual=True), block="parallel", **_NEOX),
    "neox-sequential": Style(make=_config("GPTNeoX", use_parallel_residual=False), **_NEOX),
    "opt-pre": Style(
        make=_config("OPT", ffn_dim=MLP, word_embed_proj_dim=D, do_layer_norm_before=True),
        attention_norm="self_attn_layer_norm", mlp_norm="final_layer_norm", **_OPT,
    ),
    "opt-post": Style(
        make=_config("OPT", ffn_dim=MLP, word_embed_proj_dim=D, do_layer_norm_before=False), block="post-norm",
        attention_norm="self_attn_layer_norm", mlp_norm="self_attn_layer_norm", exit_norm="final_layer_norm", **_OPT,
    ),
    "phi": Style(
        make=_config("Phi"), layers="model.layers", embed="model.embed_tokens", attention_norm="input_layernorm",
        mlp_norm="input_layernorm", o="self_attn.dense", gate="mlp.fc1", out="mlp.fc2", block="parallel",
        value=lambda block: block.self_attn.v_proj.bias, value_weight="self_attn.v_proj",
    ),
    "qwen2": Style(
        make=_config("Qwen2", num_key_value_heads=1), **_LLAMA, value=lambda block: block.self_attn.v_proj.bias
    ),
    "llama": Style(make=_config("Llama", num_key_value_heads=1), **_LLAMA),
    "gemma": Style(
        make=_config("Gemma", num_key_value_heads=1, head_dim=8), **_LLAMA, gain_offset=1.0, embed_scale=D**0.5
    ),
    "transformer": Style(make=_ours("transformer"), **_OURS),
    "satformer": Style(make=_ours("SATFormer"), **_OURS),
}  # fmt: skip


@dataclass(frozen=True)
class Planted:
    """A planted model and what must be measured on ``documents``."""

    model: Any
    style: Style
    documents: DocumentSet
    counts: np.ndarray
    """Far positions of each token id."""
    stream: np.ndarray
    """``[layer + 1, token, d]``: the stream before each block, and after the last."""
    read: np.ndarray
    """``[layer, token, d]``: what the gate reads."""
    constant: np.ndarray
    """``[layer, d]``: the part of the read that is the same whatever the embeddings are."""
    scale: np.ndarray
    """``[layer, token]``: 1 / sigma of the norm that feeds the gate."""
    writes: dict[str, np.ndarray]
    """``attention`` and ``mlp`` ``[layer, d]``: the constants that each block writes."""
    coupling: np.ndarray
    """``[layer, gate]``: ``w.b``."""
    bias: np.ndarray
    duty: np.ndarray
    """``[layer, gate]``."""

    def mean(self, by_token: np.ndarray) -> np.ndarray:
        """Mean over far positions of ``[... token d]``."""
        return np.einsum("...td,t->...d", by_token, self.counts / self.counts.sum())


def plant(name: str, seed: int = 0) -> Planted:
    """The model of a style with everything set, in float32."""
    style, rng = STYLES[name], np.random.default_rng(seed)
    torch.manual_seed(seed)
    model = style.make().eval()
    documents = _documents(rng)
    counts = np.bincount(np.concatenate([ids[SKIP:] for ids in documents.ids]), minlength=VOCAB).astype(float)
    axes = _axes(rng)
    tokens = COMMON * axes[0] + SPREAD * np.concatenate([axes[1 : 1 + N_AXES], -axes[1 : 1 + N_AXES]])
    blocks = [_Block(style, _at(model, f"{style.layers}.{i}"), rng, axes) for i in range(LAYERS)]
    stream, read, constant, scale = _expected(style, blocks, tokens)
    mean = np.einsum("ltd,t->ld", read, counts / counts.sum())
    coupling, bias, duty = _plant_gates(style, blocks, read, mean, counts, rng)
    with torch.no_grad():
        _at(model, style.embed).weight.copy_(torch.from_numpy(tokens / style.embed_scale))
        if style.positions:
            _at(model, style.positions).weight.zero_()
    writes = {
        "attention": np.stack([block.attention for block in blocks]),
        "mlp": np.stack([block.mlp for block in blocks]),
    }
    return Planted(
        model, style, documents, counts, stream, read, constant, scale, writes, coupling, bias, duty
    )


class _Block:
    """One block with its constants drawn and written into the model."""

    def __init__(self, style: Style, block: Any, rng: np.random.Generator, axes: np.ndarray) -> None:
        self.style, self.block = style, block
        self.free = axes[
            [0, *range(1 + N_AXES, len(axes))]
        ]  # directions no token differs in: norms stay equal
        plain = style.block == "post-norm"  # its norms feed the stream, and their gains would turn the axes
        self.gains, self.biases = {}, {}
        with torch.no_grad():
            for norm in dict.fromkeys((style.attention_norm, style.mlp_norm, style.exit_norm)):
                if norm is not None:
                    self._norm(norm, rng, plain)
            self.attention = self._attention(rng)
            self.mlp = self._bias(style.out, rng)
            for part in (style.o, style.value_weight, style.out):
                self._faint(part, rng)

    def _norm(self, name: str, rng: np.random.Generator, plain: bool) -> None:
        module, offset = _at(self.block, name), self.style.gain_offset
        self.gains[name] = np.ones(D) if plain else rng.uniform(0.5, 1.5, D)
        module.weight.copy_(torch.from_numpy(self.gains[name] - offset))
        self.biases[name] = np.zeros(D)
        if getattr(module, "bias", None) is not None:
            self.biases[name] = self._free(rng) if plain else rng.normal(size=D)
            module.bias.copy_(torch.from_numpy(self.biases[name]))

    def _free(self, rng: np.random.Generator) -> np.ndarray:
        return rng.normal(size=len(self.free)) @ self.free

    def _bias(self, name: str, rng: np.random.Generator) -> np.ndarray:
        module = _at(self.block, name)
        if getattr(module, "bias", None) is None:
            return np.zeros(D)
        drawn = self._free(rng)
        module.bias.copy_(torch.from_numpy(drawn))
        return drawn

    def _attention(self, rng: np.random.Generator) -> np.ndarray:
        """Output bias, and ``W_O b_V`` with ``W_O`` such that it stays among the free directions."""
        written = self._bias(self.style.o, rng)
        value = self.style.value(self.block)
        if value is None:
            return written
        planted = self._free(rng)
        value.copy_(torch.from_numpy(rng.normal(size=tuple(value.shape))))
        heads = value.detach().double().reshape(-1, D // HEADS)
        heads = heads.repeat_interleave(HEADS // len(heads), dim=0).flatten().numpy()
        o = _at(self.block, self.style.o)
        matrix = np.outer(planted, heads) / (heads @ heads)
        o.weight.copy_(torch.from_numpy(matrix.T if self.style.transposed else matrix))
        return written + planted

    def _faint(self, name: str, rng: np.random.Generator) -> None:
        """Weights that keep a site alive. An out-projection that carries ``W_O b_V`` stays as it is."""
        module = _at(self.block, name)
        if name == self.style.o and self.style.value(self.block) is not None:
            return
        module.weight.copy_(torch.from_numpy(FAINT * rng.normal(size=tuple(module.weight.shape))))


def _expected(
    style: Style, blocks: list[_Block], tokens: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """The stream, the reads, the constant part of each and 1 / sigma, from the block's formula."""
    stream, read, constant, scale = [tokens], [], [], []
    alone = np.zeros(
        (len(tokens), D)
    )  # what remains of the stream at this token's scales when it embeds as nothing
    for block in blocks:
        x, fixed = stream[-1], alone
        norm = (block.gains[style.mlp_norm], block.biases[style.mlp_norm])
        at = x if style.block == "parallel" else x + block.attention
        fixed_at = fixed if style.block == "parallel" else fixed + block.attention
        sigma = _sigma(style, at)
        read.append(_normed(style, at, sigma, norm))
        constant.append(_normed(style, fixed_at, sigma, norm))
        scale.append(1 / sigma)
        if style.exit_norm:
            exit_norm = (block.gains[style.exit_norm], block.biases[style.exit_norm])
            x, fixed = read[-1] + block.mlp, constant[-1] + block.mlp
            outer = _sigma(style, x)
            stream.append(_normed(style, x, outer, exit_norm))
            alone = _normed(style, fixed, outer, exit_norm)
        else:
            stream.append(x + block.attention + block.mlp)
            alone = fixed + block.attention + block.mlp
    return np.stack(stream), np.stack(read), np.stack(constant), np.stack(scale)


def _sigma(style: Style, x: np.ndarray) -> np.ndarray:
    moved = x - x.mean(-1, keepdims=True) if style.centred else x
    return np.sqrt(np.square(moved).mean(-1) + 1e-6)


def _normed(
    style: Style, x: np.ndarray, sigma: np.ndarray, norm: tuple[np.ndarray, np.ndarray]
) -> np.ndarray:
    moved = x - x.mean(-1, keepdims=True) if style.centred else x
    return norm[0] * moved / sigma[:, None] + norm[1]


def _plant_gates(
    style: Style,
    blocks: list[_Block],
    read: np.ndarray,
    mean: np.ndarray,
    counts: np.ndarray,
    rng: np.random.Generator,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rows ``w = c b / |b|^2 + rho x_k``, ``x_k`` the part of one token's read orthogonal to b: coupling c exactly."""
    coupling, bias, duty = (np.zeros((LAYERS, MLP)) for _ in range(3))
    for layer, block in enumerate(blocks):
        b, gate = mean[layer], _at(block.block, style.gate)
        coupling[layer] = rng.uniform(-3, 0.5, MLP)
        own = read[layer][rng.integers(0, len(counts), MLP)]
        own -= np.outer(own @ b, b) / (b @ b)
        rows = np.outer(coupling[layer], b) / (b @ b) + rng.uniform(0, 2, MLP)[:, None] * own
        has_bias = getattr(gate, "bias", None) is not None
        bias[layer] = rng.uniform(-0.5, 0.5, MLP) if has_bias else 0.0
        z = read[layer] @ rows.T + bias[layer]
        assert np.abs(z).min() > 1e-4, "a planted pre-activation lies on the threshold: choose another seed"
        duty[layer] = (z > 0).T @ (counts / counts.sum())
        with torch.no_grad():
            gate.weight.copy_(torch.from_numpy(rows.T if style.transposed else rows))
            if has_bias:
                gate.bias.copy_(torch.from_numpy(bias[layer]))
    return coupling, bias, duty


def _axes(rng: np.random.Generator) -> np.ndarray:
    """An orthonormal basis whose token axes have zero coordinate mean, so that LayerNorm leaves them apart."""
    ones = np.ones((1, D)) / D**0.5
    rest = rng.normal(size=(D - 1, D))
    basis = np.linalg.qr(np.concatenate([ones, rest]).T)[0].T
    return np.concatenate([basis[1:], basis[:1]])


def _documents(rng: np.random.Generator, n: int = 7) -> DocumentSet:
    """Unequal documents of 64 tokens at most the context; token frequencies are unequal too."""
    share = np.arange(1, VOCAB + 1) / np.arange(1, VOCAB + 1).sum()
    ids = tuple(rng.choice(VOCAB, size=40 + 3 * i, p=share) for i in range(n))
    return DocumentSet(ids=ids, names=tuple(f"doc{i}" for i in range(n)), kinds=("a", "b") * 3 + ("a",))


def _at(root: Any, path: str) -> Any:
    for name in path.split("."):
        root = root[int(name)] if name.isdigit() else getattr(root, name)
    return root
