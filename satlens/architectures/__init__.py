"""One file per model family: how its models get a transformer-lens bridge, and where its sites are."""

import copy
import importlib
import pkgutil
from functools import cache
from types import ModuleType
from typing import Any

from satlens.errors import UserError
from satlens.sites import Sites


@cache
def families() -> dict[str, ModuleType]:
    """Model type -> module. The folder is the registry: a file with a ``MODEL_TYPE`` is a family."""
    modules = (importlib.import_module(f"{__name__}.{info.name}") for info in pkgutil.iter_modules(__path__))
    return {module.MODEL_TYPE: module for module in modules if hasattr(module, "MODEL_TYPE")}


def wrap(model: Any) -> tuple[Any, Sites]:
    """Put a model behind a bridge, in place.

    ``model`` keeps working, but its state dict gets other names: save and hash it first.

    Raises:
        UserError: no adapter for this model type.
        SatlensError: the bridge lacks a hook that the sites name.
    """
    from transformer_lens.factories.architecture_adapter_factory import ArchitectureAdapterFactory
    from transformer_lens.model_bridge.sources import build_bridge_from_module

    config = model.config
    family = families().get(config.model_type)
    if family is None:
        raise UserError(f"no bridge for model type {config.model_type!r}; there are: {', '.join(families())}")
    ArchitectureAdapterFactory.register_adapter(family.ARCHITECTURE, family.Adapter)
    resolved = copy.deepcopy(config)
    resolved.intermediate_size = config.mlp_width  # null in official configs means "derived"
    bridge = build_bridge_from_module(model, family.ARCHITECTURE, hf_config=resolved, tokenizer=None)
    bridge.eval()
    sites = Sites(
        architecture=config.model_type,
        n_layers=config.num_hidden_layers,
        n_heads=config.num_heads,
        n_kv_heads=config.n_kv_heads,
        d_head=config.head_dim,
        d_model=config.hidden_size,
        d_mlp=config.mlp_width,
        d_vocab=config.vocab_size,
        n_ctx=config.max_position_embeddings,
        gate_kind=family.gate_kind(config),
        names=family.names(config),
    )
    sites.check(bridge.hook_dict)
    return bridge, sites
