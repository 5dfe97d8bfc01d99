"""Open any causal model that transformer-lens knows, find its gate linears, and prove that every site is live.

transformer-lens's adapter of the family says which module is which; the model itself runs as transformers wrote it.
What the adapter says is not believed: see ``proofs.prove``.
"""

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from satlens import reference
from satlens.carried.reader import Reader
from satlens.carried.sites import extra_outputs, head_of, mlp_read, sites_of, value_reads
from satlens.errors import UserError
from satlens.reading import Reading

PARTS = ("attn", "attn.o", "ln1_post", "mlp.gate", "mlp.in", "mlp.out", "ln2_post")
"""What is asked of an adapter, in transformer-lens's names; a family lacks those it does not have."""


def open_reader(model: str, reading: Reading, tokenizer_folder: Path | None = None) -> Reader:
    """Open a model by shipped name or folder: one of our own families, or any local HuggingFace folder.

    ``tokenizer_folder`` is for models that lie without one (checkpoints of a training run). No code in the folder is
    run, and nothing is fetched.

    Raises:
        UserError: the folder, its architecture, its tokenizer or the device cannot be used, or a site is dead.
    """
    from satlens.carried.proofs import prove
    from satlens.checkpoint import load_tokenizer

    path = reference.resolve(model)
    try:
        loaded, facts, bos = _load(path, getattr(torch, reading.dtype), reading.device)
    except (AssertionError, RuntimeError) as error:
        if reading.device != "cpu" and ("CUDA" in str(error) or "device" in str(error)):
            raise UserError(f"cannot use device {reading.device}: {_first_line(error)}") from error
        raise
    tokenizer = load_tokenizer(tokenizer_folder or path)
    if bos is None and "layout" not in facts:
        bos = _leading_token(tokenizer)
    name = reference.title(model)
    facts = {"name": name, **facts, "precision": reading.dtype}
    reader = read_model(loaded, tokenizer, name=name, facts=facts, bos=bos)
    prove(reader)
    return reader


SUMMING = ("transformer", "SATFormer", "ResFormer")
"""Our own models with one residual stream that every block adds to."""


def read_model(
    model: Any,
    tokenizer: Any,
    *,
    name: str = "model",
    facts: Mapping[str, Any] | None = None,
    bos: int | None = None,
) -> Reader:
    """A reader of a causal language model in memory (``proofs.prove`` checks it; ``open_reader`` always does).

    Raises:
        UserError: transformer-lens has no adapter for it, or it has no MLP gate linear.
    """
    model.eval()
    own = _is_own(model)
    if own and model.config.model_type not in SUMMING:
        raise UserError(
            f"{name} is a {model.config.model_type}: its blocks read averages or several streams, not one stream that "
            f"is the sum of all writes, so no direction is carried in this sense (our own models that do: "
            f"{', '.join(SUMMING)})"
        )
    found = _components(model)
    n_layers = len(found["blocks"])
    reads = tuple(mlp_read(model, found, layer, name) for layer in range(n_layers))
    own_gates = value_reads(model, found["blocks"]) if own else ()
    head, plain = head_of(model)
    config = model.config.get_text_config()
    return Reader(
        name=name,
        facts={"architecture": config.model_type, "digest": None, "n_layers": n_layers, **(facts or {})},
        model=model,
        tokenizer=tokenizer,
        bos=bos,
        layers=tuple(found["blocks"]),
        parts={part: tuple(found[part]) for part in PARTS},
        sites=sites_of(found, reads, own_gates),
        reads=reads,
        value_reads=own_gates,
        d_model=reads[0].weight.shape[1],
        d_vocab=model.get_output_embeddings().weight.shape[0],
        n_ctx=int(getattr(config, "max_position_embeddings", None) or 2048),
        carries_v1=own,
        extra_outputs=None if own else extra_outputs(model, found["blocks"][0]),
        head=head,
        plain_head=plain,
    )


def twin(reader: Reader, seed: int) -> Reader:
    """The same config initialised anew (spec part B: random-init twin), in the reader's dtype and device."""
    from satlens.carried.proofs import prove

    own = reader.model
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        fresh = type(own)(own.config).to(device=reader.device, dtype=next(own.parameters()).dtype)
    facts = {**reader.facts, "digest": None, "twin_seed": seed}
    other = read_model(
        fresh, reader.tokenizer, name=f"{reader.name} twin {seed}", facts=facts, bos=reader.bos
    )
    prove(other)
    return other


def _load(path: Path, dtype: torch.dtype, device: str) -> tuple[Any, dict[str, Any], int | None]:
    """The model, its facts, and the token before documents where the checkpoint itself says so."""
    from satlens.checkpoint import digest_of, load_model, model_facts
    from satlens.checkpoint_folder import read_facts, read_json
    from satlens.hf import MODELS

    if not (path / "config.json").is_file():
        raise UserError(
            f"no config.json in {path}: give a model's folder, or one of {', '.join(reference.MODELS)}"
        )
    note = {"weights": read_facts(path).get("weights")}
    config = read_json(path / "config.json")
    if config.get("model_type") in MODELS:
        facts = model_facts(path)
        model = load_model(path, dtype, device)
        return model, {**facts, **note}, model.config.bos_token_id if facts["layout"]["bos"] else None
    _refuse_code(path, config)
    model = _load_other(path, dtype)
    facts = {
        "architecture": model.config.model_type,
        "n_parameters": sum(parameter.numel() for parameter in model.parameters()),
        "digest": digest_of(dict(model.state_dict())),
        **note,
        "notes": [],
    }
    return model.to(device), facts, None


def _refuse_code(path: Path, config: Mapping[str, Any]) -> None:
    """Nothing in a folder is run: neither its Python files nor pickles.

    Raises:
        UserError: the model needs either.
    """
    from transformers import CONFIG_MAPPING

    if config.get("auto_map") and config.get("model_type") not in CONFIG_MAPPING:
        raise UserError(
            f"{path} needs its own code to be run (auto_map in config.json), which is never done here: open it "
            "yourself in Python and give the model to satlens.carried.opening.read_model"
        )
    pickles = sorted(file.name for file in path.glob("*.bin"))
    if pickles and not any(path.glob("*.safetensors")):
        raise UserError(
            f"{path} has its weights as pickles alone ({pickles[0]}), and a pickle can run code when it is opened: "
            "save the model as safetensors (its save_pretrained does)"
        )


def _load_other(path: Path, dtype: torch.dtype) -> Any:
    """A model of transformers, with every weight from the folder.

    Raises:
        UserError: it does not open, or weights are missing (transformers would draw them at random).
    """
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM

    try:
        opened: Any = AutoModelForCausalLM.from_pretrained(
            path, dtype=dtype, local_files_only=True, trust_remote_code=False, use_safetensors=True,
            output_loading_info=True,
        )  # fmt: skip
    except (OSError, ValueError, KeyError, ImportError, RuntimeError, SafetensorError) as error:
        raise UserError(f"{path} does not open as a causal language model: {_first_line(error)}") from error
    model, loading = opened
    if missing := sorted(loading["missing_keys"]):
        raise UserError(
            f"{path} lacks {len(missing)} weights of its config's {type(model).__name__}, the first {missing[0]}: "
            "is it a checkpoint of another model?"
        )
    return model


def _components(model: Any) -> dict[str, Any]:
    """Block modules, and per layer the modules that transformer-lens's adapter names, as far as they exist."""
    adapter = _adapter(model)
    blocks = list(adapter.get_component(model, "blocks"))
    found: dict[str, Any] = {"blocks": blocks}
    for part in PARTS:
        found[part] = [_component(adapter, model, f"blocks.{layer}.{part}") for layer in range(len(blocks))]
    return found


def _adapter(model: Any) -> Any:
    from transformer_lens.factories.architecture_adapter_factory import ArchitectureAdapterFactory
    from transformer_lens.model_bridge.sources import build_bridge_config_from_hf

    from satlens.architectures import families

    architecture = type(model).__name__
    config = copy.deepcopy(model.config)
    if (family := families().get(config.model_type)) is not None and _is_own(model):
        ArchitectureAdapterFactory.register_adapter(family.ARCHITECTURE, family.Adapter)
        config.intermediate_size = config.mlp_width  # null in official configs means "derived"
    try:
        bridge_config = build_bridge_config_from_hf(
            config, architecture, architecture, next(model.parameters()).dtype
        )
        return ArchitectureAdapterFactory.select_architecture_adapter(bridge_config)
    except (ValueError, KeyError) as error:
        raise UserError(
            f"transformer-lens has no adapter for {architecture} ({_first_line(error)}), so its parts are unknown"
        ) from error


def _component(adapter: Any, model: Any, path: str) -> nn.Module | None:
    try:
        module = adapter.get_component(model, path)
    except (ValueError, AttributeError, KeyError, IndexError, TypeError):
        return None
    return module if isinstance(module, nn.Module) else None


def _is_own(model: Any) -> bool:
    from satlens.hf import DecoderForCausalLM

    return isinstance(model, DecoderForCausalLM)


def _leading_token(tokenizer: Any) -> int | None:
    """The token that the tokenizer puts before a text by default, if any."""
    ids = tokenizer("a")["input_ids"]
    return ids[0] if ids and ids[0] == tokenizer.bos_token_id else None


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
