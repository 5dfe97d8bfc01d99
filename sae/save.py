"""A trained dictionary becomes a folder: SAELens format, decoder rows of length 1, and what satlens adds to it."""

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxtyping import Float
from safetensors.torch import save
from torch import Tensor

from sae.dictionary import CONFIG, COUNTS, SPARSITY, WEIGHTS, Counts, Dictionary, open_dictionary
from satlens.checkpoint import digest_of
from satlens.errors import SatlensError, UserError

SMALLEST_DENSITY = 1e-10
"""Added before the logarithm (sae-lens's trainer), so that a latent that never fires has one."""
LOG = "log.jsonl"
NAMES = ("model.name", "data.text")


def dictionary_of(
    tensors: Mapping[str, Tensor], k: int, facts: dict[str, Any], counts: Counts | None, path: Path
) -> Dictionary:
    """Folded tensors as the dictionary that ``path`` will hold."""
    held = {name: tensor.detach().float().cpu().contiguous() for name, tensor in tensors.items()}
    return Dictionary(path=path, **held, k=k, facts=facts, counts=counts, digest=digest_of(held))


def is_finished(folder: Path, facts: dict[str, Any]) -> bool:
    """Whether ``folder`` holds the dictionary that these facts describe.

    Raises:
        UserError: it holds another one (the differences are listed), or a damaged one.
    """
    if not folder.exists():
        return False
    mine, wanted = (identity(json.loads(json.dumps(f))) for f in (open_dictionary(folder).facts, facts))
    differences = [
        f"{name}: is {mine.get(name)}, asked for {wanted.get(name)}"
        for name in sorted({*mine, *wanted})
        if mine.get(name) != wanted.get(name)
    ]
    if differences:
        raise UserError(
            f"{folder} holds another dictionary ({'; '.join(differences)}): give another --out, or delete it"
        )
    return True


def identity(facts: dict[str, Any]) -> dict[str, Any]:
    """The facts that make two dictionaries the same: all but names, since digests say what model and text are."""
    return {name: value for name, value in flat(facts).items() if name not in NAMES}


def flat(facts: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested facts as one level of dotted names, long lists as length and digest: what can be compared and shown."""
    out: dict[str, Any] = {}
    for name, value in facts.items():
        if isinstance(value, dict):
            out |= flat(value, f"{prefix}{name}.")
        elif isinstance(value, list) and len(value) > 8:
            digest = hashlib.sha256(json.dumps(value).encode()).hexdigest()[:12]
            out[prefix + name] = f"{len(value)} values, {digest}"
        else:
            out[prefix + name] = value
    return out


def save_dictionary(
    dictionary: Dictionary, density: Float[Tensor, " d_sae"], log: Path | None = None
) -> Path:
    """Write ``dictionary.path`` as a whole or not at all, with a copy of the training's ``log``.

    ``density`` is the share of positions at which each latent is active.

    Raises:
        SatlensError: the disk is full or fails.
    """
    folder = dictionary.path
    part = folder.with_name(folder.name + ".part")
    try:
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        _write(dictionary, density, part)
        if log is not None and log.exists():
            shutil.copyfile(log, part / LOG)
        for path in [*part.iterdir(), part]:
            _sync(path)
        part.replace(folder)
    except OSError as error:
        shutil.rmtree(part, ignore_errors=True)
        raise SatlensError(
            f"{folder} could not be written ({error}): make room and start the same command again, it goes on from its "
            "last state"
        ) from error
    return folder


def _write(dictionary: Dictionary, density: Tensor, part: Path) -> None:
    tensors = {name: getattr(dictionary, name) for name in ("W_enc", "b_enc", "W_dec", "b_dec")}
    files = {WEIGHTS: tensors, SPARSITY: {"sparsity": (density + SMALLEST_DENSITY).log10().float()}}
    if dictionary.counts is not None:
        files[COUNTS] = {name: count.clone() for name, count in vars(dictionary.counts).items()}
    for name, held in files.items():
        (part / name).write_bytes(save(held))
    text = json.dumps(sae_lens_config(dictionary), indent=1, allow_nan=False, ensure_ascii=False)
    (part / CONFIG).write_text(text + "\n", encoding="utf-8")


def sae_lens_config(dictionary: Dictionary) -> dict[str, Any]:
    """``cfg.json``: sae-lens's own config of a Top-K SAE, our facts under ``metadata.satlens``."""
    from sae_lens.saes.sae import SAEMetadata
    from sae_lens.saes.topk_sae import TopKSAEConfig

    facts = dictionary.facts
    config = TopKSAEConfig(
        d_in=dictionary.d_in,
        d_sae=dictionary.d_sae,
        k=dictionary.k,
        rescale_acts_by_decoder_norm=True,
        metadata=SAEMetadata(
            model_name=facts["model"]["name"],
            hook_name=facts["site"],
            training_tokens=facts["tokens"],
            satlens=facts,
        ),
    )
    return dict(config.to_dict())


def _sync(path: Path) -> None:
    """Push a file or folder to disk before the rename that makes it the truth."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
