"""Tiny models of all six architectures whose learned coefficients are far from their start, where they would hide."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tests.conftest import tiny_model
from tests.tiny import documents

COEFFICIENTS = ("lambda", "dwa_modules", "static_", "dynamic_", "da.w2", "da_norms")
"""Parts of the names of weights that start as zeros and ones, so that the model starts as a Transformer."""
VARIANTS: dict[str, dict[str, Any]] = {
    "transformer": {"model_type": "transformer"},
    "transformer_mha": {"model_type": "transformer", "num_kv_heads": None, "qk_norm": False},
    "relu": {"qkv_bias": True},
    "tanh_last2": {"value_residual_gate": "tanh", "value_residual_last_k": 2, "tie_word_embeddings": False},
    "softmax": {"value_residual_gate": "softmax", "value_residual_proj_bias": True, "window_size": 4},
    "identity_mha": {"value_residual_gate": "identity", "num_kv_heads": None, "qk_norm": False},
    "resformer": {"model_type": "ResFormer", "qkv_bias": True},
    "resformer_last2": {"model_type": "ResFormer", "value_residual_last_k": 2, "num_kv_heads": None},
    "denseformer": {"model_type": "denseformer"},
    "denseformer_sparse": {"model_type": "denseformer", "dwa_dilation": 2, "dwa_period": 3, "window_size": 4},
    "muddformer": {"model_type": "muddformer"},
    "muddformer_plain": {"model_type": "muddformer", "use_pre_post_da_norm": False, "param_realloc": False},
    "dhc": {"model_type": "dhc"},
    "dhc_static": {"model_type": "dhc", "use_dynamic_hc": False, "expansion_rate": 2, "num_kv_heads": None},
    "dhc_layer_norm": {"model_type": "dhc", "hc_norm_type": "layer", "use_tanh": False, "expansion_rate": 3},
}
"""Every architecture with its options, gates and head layouts among them."""


def tiny(model_type: str = "SATFormer", **changes: Any) -> Any:
    """``tiny_model`` with every coefficient moved by noise; the same arguments give the same weights."""
    model = tiny_model(model_type, **changes)
    rng = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if any(part in name for part in COEFFICIENTS):
                weight.add_(0.3 * torch.randn(weight.shape, generator=rng))
    return model


def write_all(folder: Path) -> dict[str, Path]:
    """A checkpoint folder of each architecture, with one tokenizer."""
    from satlens.hf import MODELS
    from satlens.training.tokenizer import train_tokenizer

    tokenizer = train_tokenizer(documents(), 340, folder / "tokenizer")
    paths = {}
    for model_type in MODELS:
        model = tiny(model_type, vocab_size=len(tokenizer), max_position_embeddings=32, pad_token_id=None)
        path = paths[model_type] = folder / f"tiny-{model_type.lower()}"
        path.mkdir()
        model.config.architectures = [type(model).__name__]
        model.config.save_pretrained(path)
        tensors = {k: v.clone() for k, v in model.state_dict().items() if k != "lm_head.weight"}
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
        tokenizer.save_pretrained(path)
    return paths
