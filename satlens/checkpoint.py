"""Open a checkpoint folder, say what is wrong with a bad one, and put the model behind a bridge."""

import hashlib
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer, GenerationConfig

from satlens.checkpoint_folder import read_config, read_facts, read_tensors, some, whose
from satlens.errors import UserError
from satlens.sites import Sites

log = logging.getLogger(__name__)

TIED = "lm_head.weight"
EMBEDDING = "model.embeddings.weight"
# How the reference code lays out its training text; our own checkpoints say so themselves in satlens.json.
OFFICIAL_LAYOUT: Mapping[str, Any] = {"kind": "stream", "bos": False, "eos": True}


def load_model(
    path: str | Path, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu"
) -> Any:
    """The model of a checkpoint folder, in eval mode, its weights cast to ``dtype``.

    Opens an official ``final/`` folder (safetensors, one file or an index of shards), an official ``latest/``
    folder (``pytorch_model.bin``, tensors only: nothing in it is executed, and ``training_state.pt`` is never
    touched), and our own checkpoints.

    Raises:
        UserError: anything that makes the checkpoint unusable, in one line that says what to do.
    """
    folder = _folder(path)
    config, notes = read_config(folder)
    for note in notes:
        log.info("%s: %s", folder.name, note)
    tensors = canonical(read_tensors(folder), tied=config.tie_word_embeddings)
    model = _empty_model(config)
    _check_tensors(tensors, model, tied=config.tie_word_embeddings)
    cast = {name: tensor.to(device=device, dtype=dtype) for name, tensor in tensors.items()}
    if config.tie_word_embeddings:
        cast[TIED] = cast[EMBEDDING]
    model.load_state_dict(cast, strict=True, assign=True)
    model.tie_weights()
    model.config.dtype = dtype
    if (folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    return model.eval()


def load_bridge(
    path_or_model: Any, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu"
) -> tuple[Any, Sites]:
    """A transformer-lens bridge and its sites, for a checkpoint folder or a model in memory.

    A model is wrapped in place and keeps its dtype and device. V1 is checked against its table on some ids.

    Raises:
        UserError: the checkpoint cannot work, or there is no bridge for its architecture.
        SatlensError: the bridge lacks a site, or the layer-0 values are not a function of the token id.
    """
    from satlens.architectures import wrap
    from satlens.v1 import check_v1_table

    is_path = isinstance(path_or_model, str | Path)
    model = load_model(path_or_model, dtype, device) if is_path else path_or_model
    bridge, sites = wrap(model)
    spread = torch.linspace(0, sites.d_vocab - 1, min(8, sites.d_vocab)).long()
    if sites.layers("value"):  # a disabled attention has values that nothing reads
        check_v1_table(bridge, sites, spread[None].to(next(model.parameters()).device))
    return bridge, sites


def load_tokenizer(path: str | Path) -> Any:
    """The tokenizer saved beside the weights.

    Raises:
        UserError: the folder has none (official ``latest/`` folders never do).
    """
    folder = Path(path)  # a tokenizer may lie alone: a data build has one, a model's config it has not
    files = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")
    if not any((folder / name).is_file() for name in files):
        raise UserError(f"no tokenizer in {folder} (looked for {', '.join(files)}): give the folder it is in")
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (ValueError, OSError, KeyError, ImportError) as error:
        raise UserError(f"the tokenizer in {folder} does not open: {_first_line(error)}") from error


def digest(path_or_model: Any) -> str:
    """sha256 over the names, dtypes, shapes and bytes of all weights, in the order of their names.

    A tied head counts once, so ``final/`` and ``latest/`` of the same weights agree. Give a model before
    it is wrapped: the bridge renames its state dict.

    Raises:
        UserError: the folder cannot be read, or the model is already behind a bridge.
    """
    if isinstance(path_or_model, str | Path):
        folder = _folder(path_or_model)
        return digest_of(canonical(read_tensors(folder), tied=read_config(folder)[0].tie_word_embeddings))
    tensors = path_or_model.state_dict()
    if any("_original_component" in name for name in tensors):
        raise UserError(
            "this model is behind a bridge, which renames weights: take the digest before wrapping"
        )
    return digest_of(canonical(tensors, tied=path_or_model.config.tie_word_embeddings))


def model_facts(path: str | Path) -> dict[str, Any]:
    """What a manifest says about a checkpoint: architecture, parameter count, digest, text layout, notes.

    Raises:
        UserError: the folder cannot be read.
    """
    folder = _folder(path)
    config, notes = read_config(folder)
    tensors = canonical(read_tensors(folder), tied=config.tie_word_embeddings)
    own = read_facts(folder)
    return {
        "architecture": config.model_type,
        "n_layers": config.num_hidden_layers,
        "d_model": config.hidden_size,
        "d_vocab": config.vocab_size,
        "n_parameters": sum(tensor.numel() for tensor in tensors.values()),
        "dtype": str(next(iter(tensors.values())).dtype).removeprefix("torch."),
        "digest": digest_of(tensors),
        "gate": getattr(config, "value_residual_gate", None),
        "layout": own.get("layout", dict(OFFICIAL_LAYOUT)),
        "checkpoint": own,
        "notes": notes,
    }


def canonical(tensors: Mapping[str, Tensor], *, tied: bool) -> dict[str, Tensor]:
    """Official names: ``torch.compile``'s prefix dropped, and a tied head only as the embedding.

    Raises:
        UserError: the head is tied by the config but differs from the embedding.
    """
    named = {name.removeprefix("_orig_mod."): tensor for name, tensor in tensors.items()}
    if tied and TIED in named and EMBEDDING in named:
        if not torch.equal(named[TIED], named[EMBEDDING]):
            raise UserError(
                f"{TIED} differs from {EMBEDDING} although tie_word_embeddings is true: "
                "set it to false in config.json if the head is meant to be its own"
            )
        del named[TIED]
    return named


def digest_of(tensors: Mapping[str, Tensor]) -> str:
    """sha256 over names, dtypes, shapes and bytes, in the order of the names."""
    total = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        total.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        total.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return total.hexdigest()


def _folder(path: str | Path) -> Path:
    folder = Path(path)
    if not folder.exists():
        raise UserError(f"no folder {folder}: give a checkpoint folder with config.json and weights")
    if not folder.is_dir():
        raise UserError(f"{folder} is a file: give the folder that holds config.json and the weights")
    if not (folder / "config.json").is_file():
        inside = [name for name in ("final", "latest") if (folder / name / "config.json").is_file()]
        hint = f"; it contains {' and '.join(inside)}: give {folder / inside[0]}" if inside else ""
        raise UserError(f"no config.json in {folder}{hint}")
    return folder


def _empty_model(config: Any) -> Any:
    """The model's structure without memory or initialisation."""
    from satlens.hf import MODELS

    with torch.device("meta"):
        return MODELS[config.model_type](config)


def _check_tensors(tensors: Mapping[str, Tensor], model: Any, *, tied: bool) -> None:
    expected = {
        name: tensor.shape for name, tensor in model.state_dict().items() if not (tied and name == TIED)
    }
    kind, (owner, marks) = model.config.model_type, whose(tensors)
    if owner != kind and (foreign := [name for name in marks if name not in expected]):
        raise UserError(
            f"weights that a {kind} does not have: {some(foreign)}: the folder seems to hold a {owner}; "
            f"is model_type {kind!r} in config.json right?"
        )
    if missing := sorted(expected.keys() - tensors.keys()):
        own = owner != kind and all(whose([name])[0] == kind for name in missing)
        other = f"; the folder seems to hold a {owner}, is model_type {kind!r} in config.json right?"
        reason = other if own else ": the checkpoint is incomplete or another model's"
        raise UserError(f"missing weights: {some(missing)}{reason}")
    if extra := sorted(tensors.keys() - expected.keys()):
        raise UserError(f"weights that this {kind} does not have: {some(extra)}: is config.json its own?")
    for name, shape in expected.items():
        if tensors[name].shape != shape:
            found = list(tensors[name].shape)
            raise UserError(
                f"{name} has shape {found}, config.json implies {list(shape)}: one of them is wrong"
            )
    for name, tensor in tensors.items():
        if model.config.attention_disabled and name.endswith("o_proj.weight") and bool(tensor.any()):
            raise UserError(
                f"config.json says attention_disabled, but {name} is not zero: attention would write after all; "
                "one of them belongs to another checkpoint"
            )
        if bad := int((~torch.isfinite(tensor)).sum()):
            count = f"{bad} of {tensor.numel()} values"
            raise UserError(f"{name}: {count} are NaN or infinite: training diverged, or the file is damaged")


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
