"""What lies in a checkpoint folder, read and checked: config.json, weights, and satlens.json."""

import dataclasses
import difflib
import json
import pickle
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from satlens.errors import UserError

SAFE, INDEX, PICKLED = "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin"
FACTS = "satlens.json"

# Keys that official configs and older transformers releases write and that change nothing here.
_IDLE_KEYS = """
    transformers_version architectures dtype torch_dtype auto_map _name_or_path
    attn_implementation _attn_implementation _attn_implementation_autoset torchscript use_bfloat16
    tf_legacy_loss pruned_heads is_decoder add_cross_attention cross_attention_hidden_size tie_encoder_decoder
    output_attentions output_hidden_states return_dict chunk_size_feed_forward is_encoder_decoder id2label
    label2id problem_type finetuning_task task_specific_params tokenizer_class prefix sep_token_id
    decoder_start_token_id
"""
HARMLESS = frozenset(_IDLE_KEYS.split())
STRAY = "value_residual_lambda2_init"
"""ResFormer's, but official SATFormer configs carry it too."""
MARKS: dict[str, tuple[str, ...]] = {
    "SATFormer": ("value_residual_mixing.alpha_proj.",),
    "ResFormer": ("lambda_manager.", "value_residual_mixing.lambda2"),
    "denseformer": ("dwa_modules.",),
    "muddformer": (".da.", ".attn_norm_q.", ".attn_norm_k.", ".attn_norm_v."),
    "dhc": (".attn_hc.", ".mlp_hc."),
}
"""Parts of the names of weights that one architecture alone has; a folder without any holds a transformer's."""


def read_config(folder: Path) -> tuple[Any, list[str]]:
    """The checked config of a checkpoint, and notes about keys that have no effect.

    Raises:
        UserError: unknown architecture, keys nobody knows, or values that no model can be built from.
    """
    from satlens.hf import MODELS

    written = read_json(folder / "config.json")
    model_type = written.pop("model_type", None)
    if model_type not in MODELS:
        raise UserError(
            f"config.json in {folder} has model_type {model_type!r}, satlens opens {', '.join(MODELS)}"
        )
    config_class = MODELS[model_type].config_class
    fields = {field.name for field in dataclasses.fields(config_class)}
    if unknown := [key for key in written if key not in fields | HARMLESS | {STRAY}]:
        raise UserError(
            f"config.json in {folder} has keys that {model_type} does not know: "
            f"{', '.join(_suggest(key, fields) for key in unknown)}: {_remedy(folder, model_type)}"
        )
    kept = {key: value for key, value in written.items() if key in fields - HARMLESS}
    try:
        config = config_class(**kept)
    except Exception as error:  # the strict config wraps what it finds in classes of its own
        raise UserError(f"config.json in {folder}: {' '.join(str(error).split())}") from error
    idle = [key for key in written if key == STRAY and key not in fields]
    return config, [f"config key {key} has no effect in a {model_type}" for key in idle]


def whose(names: Iterable[str]) -> tuple[str, list[str]]:
    """``(model type, the names that say so)``: the architecture that weights of these names seem to be of."""
    kept = sorted(names)
    for model_type, marks in MARKS.items():
        if found := [name for name in kept if any(mark in name for mark in marks)]:
            return model_type, found
    return "transformer", []


def some(names: list[str]) -> str:
    """The first names, and how many more there are."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """All weights of a checkpoint by the names in its files, on the CPU, in the dtype they were saved in.

    Raises:
        UserError: no weights, a damaged or missing file, or a pickle that holds more than tensors.
    """
    if (folder / SAFE).is_file():
        return _read_safetensors(folder / SAFE)
    if (folder / INDEX).is_file():
        shards = sorted(set(read_json(folder / INDEX).get("weight_map", {}).values()))
        if lost := [name for name in shards if not (folder / name).is_file()]:
            raise UserError(f"{folder} lacks {', '.join(lost)}, which {INDEX} lists: copy the missing files")
        parts = [_read_safetensors(folder / shard) for shard in shards]
        return {name: tensor for part in parts for name, tensor in part.items()}
    if (folder / PICKLED).is_file():
        return _read_pickled(folder / PICKLED)
    raise UserError(f"no weights in {folder}: expected {SAFE}, {INDEX} or {PICKLED}")


def read_facts(folder: Path) -> dict[str, Any]:
    """What our own training wrote down beside the weights; empty for official checkpoints.

    Raises:
        UserError: satlens.json is not a JSON object.
    """
    return read_json(folder / FACTS) if (folder / FACTS).is_file() else {}


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object.

    Raises:
        UserError: missing, not JSON, or not an object.
    """
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise UserError(f"{file} cannot be read ({error}): copy it again") from error
    if not isinstance(content, dict):
        raise UserError(f"{file} must hold a JSON object, found {type(content).__name__}")
    return content


def _read_safetensors(file: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(file)
    except (SafetensorError, OSError) as error:
        raise UserError(f"{file} is damaged or incomplete ({error}): copy it again") from error


def _read_pickled(file: Path) -> dict[str, Tensor]:
    """Tensors only: ``weights_only`` refuses to run any code that a pickle may carry."""
    try:
        content = torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise UserError(
            f"{file} holds more than tensors; opening it would run its code, so it stays shut"
        ) from error
    except (RuntimeError, OSError, EOFError) as error:
        reason = " ".join(str(error).split())[:120]
        raise UserError(f"{file} is damaged or incomplete ({reason}): copy it again") from error
    if not isinstance(content, dict) or not all(isinstance(value, Tensor) for value in content.values()):
        raise UserError(f"{file} must hold a state dict of tensors, as the official latest/ folder does")
    return content


def _remedy(folder: Path, model_type: str) -> str:
    """What to do about keys that an architecture does not know: look at the weights for whose they are."""
    try:
        owner, names = whose(read_tensors(folder))
    except UserError:  # weights that cannot be read are the next complaint, not this one
        names = []
    if not names or owner == model_type:
        return "correct or remove them"
    return f"the weights here seem to be those of a {owner} ({some(names)}): is model_type right?"


def _suggest(key: str, fields: set[str]) -> str:
    near = difflib.get_close_matches(key, fields, n=1)
    return f"{key} (did you mean {near[0]}?)" if near else key
