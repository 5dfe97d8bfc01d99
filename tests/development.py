"""Training runs and models as a user would have them on disk, without training anything."""

import json
from pathlib import Path
from typing import Any

import torch
from tiny import documents
from transformers import AutoTokenizer

from satlens.hf import MODELS
from satlens.training.save import save_model

SHAPE = {
    "hidden_size": 24,
    "num_hidden_layers": 3,
    "num_heads": 4,
    "intermediate_size": 20,
    "max_position_embeddings": 96,
    "initializer_range": 0.2,
    "tie_word_embeddings": True,
    "qk_norm": True,
}
RECIPE = {"batch_size": 3, "seq_length": 50, "accumulation": 2, "seed": 7}


def write_tokenizer(folder: Path) -> Path:
    """A small trained tokenizer."""
    from satlens.training.tokenizer import train_tokenizer

    train_tokenizer(documents(), 340, folder / "tokenizer")
    return folder / "tokenizer"


def write_texts(folder: Path, n: int = 6) -> Path:
    """Documents of more than 64 tokens, and a short one that no measurement counts."""
    texts = ["too short", *[" ".join(documents(n + 3)[i : i + 4]) for i in range(n)]]
    path = folder / "long.jsonl"
    path.write_text("\n".join(json.dumps({"text": text}) for text in texts) + "\n", encoding="utf-8")
    return path


def write_model(folder: Path, seed: int, d_vocab: int, tokenizer: Path | None = None, **changes: Any) -> None:
    """A random model of ours in the layout of a snapshot, loud enough that no two are alike."""
    torch.manual_seed(seed)
    config = MODELS["transformer"].config_class(**{**SHAPE, "vocab_size": d_vocab, **changes})
    model = MODELS["transformer"](config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("bias") or "norm" in name:
                weight.add_(0.3 * torch.randn_like(weight))
    weights = {name: tensor for name, tensor in model.state_dict().items()}
    save_model(model, weights, folder, tokenizer)


def write_run(folder: Path, tokenizer: Path, steps: tuple[int, ...] = (0, 2, 9), **changes: Any) -> Path:
    """A finished run of ours: snapshots without tokenizers, and a final folder with facts."""
    d_vocab = len(AutoTokenizer.from_pretrained(tokenizer))
    for step in steps:
        write_model(folder / "snapshots" / f"step-{step:08d}", step + 1, d_vocab, **changes)
    write_model(folder / "final", steps[-1] + 1, d_vocab, tokenizer, **changes)
    facts = {"recipe": {**RECIPE, "model": changes}, "processes": 2}
    (folder / "final" / "satlens.json").write_text(json.dumps(facts))
    return folder
