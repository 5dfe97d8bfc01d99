"""Tiny models, one thread, and tensor shapes checked against their annotations, for all tests."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from jaxtyping import install_import_hook

# Before anything imports these: every call then checks shapes and dtypes. Not satlens.hf.config, whose
# dataclasses accept any keyword and would lose that.
for _name in ("hf.layers", "hf.decoder", "hf.satformer", "architectures", "v1"):
    install_import_hook(f"satlens.{_name}", "beartype.beartype")
for _name in ("gating", "intake", "removal"):
    install_import_hook(f"analyses.latents.{_name}", "beartype.beartype")
for _name in ("features", "variance", "baselines", "replacement", "quality"):
    install_import_hook(f"sae.{_name}", "beartype.beartype")
torch.set_num_threads(1)


def tiny_model(model_type: str = "SATFormer", **changes: Any) -> Any:
    """A small random model with every structural feature on: GQA, q/k norms, weights far from their start."""
    from satlens.hf import MODELS

    shape = {
        "hidden_size": 24,
        "num_hidden_layers": 4,
        "num_heads": 4,
        "num_kv_heads": 2,
        "intermediate_size": 40,
        "vocab_size": 53,
        "max_position_embeddings": 64,
        "qk_norm": True,
        "initializer_range": 0.2,
        "tie_word_embeddings": True,
        "pad_token_id": 0,
    }
    torch.manual_seed(changes.pop("seed", 0))
    model = MODELS[model_type](MODELS[model_type].config_class(**{**shape, **changes})).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name or name.endswith("bias"):  # initialised to 1 and 0, which would hide them
                weight.add_(0.3 * torch.randn_like(weight))
    return model


@pytest.fixture
def make_model() -> Callable[..., Any]:
    """``make_model(model_type, **config changes)``."""
    return tiny_model


@pytest.fixture
def ids() -> torch.Tensor:
    """Two rows of eleven random token ids, none of them padding."""
    return torch.randint(1, 53, (2, 11), generator=torch.Generator().manual_seed(1))
