"""A trained Top-K dictionary: its folder (SAELens format and what satlens adds), its codes, its digest."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from satlens.checkpoint import digest_of
from satlens.errors import UserError

CONFIG, WEIGHTS, COUNTS, SPARSITY = (
    "cfg.json",
    "sae_weights.safetensors",
    "counts.safetensors",
    "sparsity.safetensors",
)
V1 = "v1"
"""The site of a dictionary that reads the whole V1 vector, all KV heads joined."""


@dataclass(frozen=True, kw_only=True)
class Counts:
    """How often each token id was read, in the text that a V1 dictionary was trained and held out on."""

    train: Int[Tensor, " d_vocab"]
    """Of the documents that training drew from."""
    heldout: Int[Tensor, " d_vocab"]
    """Of the documents that it never saw."""

    @property
    def total(self) -> Int[Tensor, " d_vocab"]:
        """Of all documents: what density and activation counts refer to."""
        return self.train + self.heldout


@dataclass(frozen=True, kw_only=True)
class Codes:
    """The at most k active latents of each vector; a place whose activation is 0 is not active."""

    latent: Int[Tensor, "token k"]
    act: Float[Tensor, "token k"]


@dataclass(frozen=True, kw_only=True)
class Dictionary:
    """A Top-K SAE as it is used: unit decoder rows, so that an activation is a length."""

    path: Path
    W_enc: Float[Tensor, "d_in d_sae"]
    b_enc: Float[Tensor, " d_sae"]
    W_dec: Float[Tensor, "d_sae d_in"]
    b_dec: Float[Tensor, " d_in"]
    k: int
    facts: dict[str, Any]
    """`site`, `model` (name, digest, architecture, n_kv_heads, d_head), `seed`, `tokens`, `data`, recipe."""
    counts: Counts | None
    """None for a dictionary of another site than V1, which has no table."""
    digest: str
    """Of the four tensors: two dictionaries are the same exactly when theirs agree."""

    @property
    def d_in(self) -> int:
        """Width of the vectors it reads; for V1 this is n_kv_heads * d_head."""
        return self.W_enc.shape[0]

    @property
    def d_sae(self) -> int:
        """Latents."""
        return self.W_enc.shape[1]

    @property
    def is_v1(self) -> bool:
        """Whether it reads the V1 table."""
        return bool(self.facts["site"] == V1)

    def require_model(self, facts: dict[str, Any]) -> None:
        """Refuse a model whose vectors this dictionary was not trained on (``facts`` as in `model_facts`).

        Raises:
            UserError: another digest.
        """
        mine = self.facts["model"]
        if facts["digest"] != mine["digest"]:
            raise UserError(
                f"{self.path} was trained on {mine['name']} (digest {mine['digest'][:12]}), not on "
                f"{facts.get('name', 'this model')} ({facts['digest'][:12]}): give the model it belongs to"
            )


def open_dictionary(path: str | Path, device: str = "cpu") -> Dictionary:
    """Open a folder that `satlens sae train` made.

    Raises:
        UserError: no such folder, no Top-K dictionary of satlens in it, or damaged files.
    """
    folder = Path(path)
    file = folder / CONFIG
    if not file.is_file():
        inside = sorted(p.parent for p in folder.glob(f"*/{CONFIG}")) if folder.is_dir() else []
        made = "; make one with satlens sae train"
        hint = f"; give one of {', '.join(map(str, inside[:3]))}" if inside else ""
        raise UserError(f"no {CONFIG} in {folder}, so no dictionary{hint or made}")
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
        tensors = load_file(folder / WEIGHTS, device=device)
        counts = load_file(folder / COUNTS) if (folder / COUNTS).exists() else None
    except (ValueError, OSError, SafetensorError) as error:
        raise UserError(f"{folder} does not open ({error}): it is damaged, train it again") from error
    facts = config.get("metadata", {}).get("satlens")
    if config.get("architecture") != "topk" or facts is None:
        raise UserError(
            f"{folder} holds a {config.get('architecture', 'nameless')} SAE that satlens did not train, so the "
            "model and the text it belongs to are not known: make one with satlens sae train"
        )
    d_in, d_sae = config["d_in"], config["d_sae"]
    shapes = {"W_enc": (d_in, d_sae), "b_enc": (d_sae,), "W_dec": (d_sae, d_in), "b_dec": (d_in,)}
    for name, shape in shapes.items():
        if name not in tensors or tuple(tensors[name].shape) != shape:
            raise UserError(f"{folder}: {name} is missing or not of shape {shape}: train it again")
        if not bool(torch.isfinite(tensors[name]).all()):
            raise UserError(f"{folder}: {name} has values that are not numbers: train it again")
    return Dictionary(
        path=folder,
        **{name: tensors[name].float() for name in shapes},
        k=config["k"],
        facts=facts,
        counts=None if counts is None else Counts(train=counts["train"], heldout=counts["heldout"]),
        digest=digest_of({name: tensors[name] for name in shapes}),
    )


@torch.no_grad()
def encode(dictionary: Dictionary, x: Float[Tensor, "token d_in"], chunk: int = 2048) -> Codes:
    """The k largest pre-activations of each vector, negative ones set to 0 (sae-lens's TopK).

    Raises:
        UserError: vectors of another width.
    """
    latents, acts = [], []
    for part in _chunks(dictionary, x, chunk):
        pre = (part - dictionary.b_dec) @ dictionary.W_enc + dictionary.b_enc
        values, indices = pre.topk(dictionary.k, dim=-1)
        latents.append(indices)
        acts.append(values.relu())
    return Codes(latent=torch.cat(latents), act=torch.cat(acts))


@torch.no_grad()
def decode(dictionary: Dictionary, codes: Codes) -> Float[Tensor, "token d_in"]:
    """The vectors that codes stand for: a weighted sum of decoder rows, and the bias."""
    summed = torch.nn.functional.embedding_bag(
        codes.latent, dictionary.W_dec, per_sample_weights=codes.act, mode="sum"
    )
    return summed + dictionary.b_dec


def _chunks(dictionary: Dictionary, x: Tensor, chunk: int) -> Iterator[Tensor]:
    if x.shape[-1] != dictionary.d_in:
        raise UserError(
            f"{dictionary.path} reads vectors of {dictionary.d_in} values, these have {x.shape[-1]}: "
            "it was trained on another model or site"
        )
    for start in range(0, max(len(x), 1), chunk):
        yield x[start : start + chunk].to(dictionary.W_enc)
