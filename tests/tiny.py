"""A tiny checkpoint pair with a real tokenizer and a few documents, on disk as a user would have them."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

WORDS = "the gate opens when old values are read again by a later layer and closes when they are not".split()


def documents(n: int = 12) -> list[str]:
    """Short, unequal, deterministic texts with capitals, digits, code and another script."""
    texts = []
    for i in range(n):
        words = [WORDS[(i * 7 + j * (i + 3)) % len(WORDS)] for j in range(15 + 5 * (i % 5))]
        texts.append(f"Document {i}: " + " ".join(words) + f".\n\tx = {i}; ключ 你好")
    return texts


def write_texts(folder: Path, n: int = 12) -> Path:
    """The documents as JSONL."""
    path = folder / "texts.jsonl"
    rows = [json.dumps({"text": text, "source": f"doc{i}"}) for i, text in enumerate(documents(n))]
    path.write_text("\n".join(rows) + "\n", encoding="utf-8")
    return path


def write_pair(folder: Path) -> dict[str, Path]:
    """``{"SATFormer": folder, "transformer": folder}``: same tokenizer, loud gates, two KV heads of four."""
    from satlens.hf import MODELS
    from satlens.training.tokenizer import train_tokenizer

    tokenizer = train_tokenizer(documents(), 340, folder / "tokenizer")
    paths = {}
    for model_type in ("SATFormer", "transformer"):
        torch.manual_seed(3)
        config = MODELS[model_type].config_class(
            hidden_size=32,
            num_hidden_layers=4,
            num_heads=4,
            num_kv_heads=2,
            intermediate_size=48,
            vocab_size=len(tokenizer),
            max_position_embeddings=32,
            qk_norm=True,
            initializer_range=0.25,
            tie_word_embeddings=True,
        )
        model = MODELS[model_type](config)
        path = folder / model_type.lower()
        path.mkdir()
        config.architectures = [type(model).__name__]
        config.save_pretrained(path)
        tensors = {k: v.clone() for k, v in model.state_dict().items() if k != "lm_head.weight"}
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
        tokenizer.save_pretrained(path)
        paths[model_type] = path
    return paths


def plain_nll(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """NLL of every next token from full float64 log-softmax: the slow oracle."""
    with torch.no_grad():
        logits = model(ids).logits.double()
    return -logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
