"""Why the paper finds no carried reference in OPT: the published indexing and ours, on OPT models with one planted.

OPT's block flattens batch and position before its MLP, so the paper's `inp[0][0, 16:]` takes features 16, 17, ... of
the first token where it means positions 16, 17, ... of the document; its sums then spread one number over all
coordinates. Here, random OPT models of both norm placements get gates that rest on the carried direction, and both
ways of reading them are applied to the same documents.

Example: python reports/reference_direction/opt_defect.py
"""

from typing import Any

import numpy as np
import pandas as pd
import torch
from transformers import OPTConfig, OPTForCausalLM

from satlens.carried.documents import SKIP, DocumentSet, split
from satlens.carried.opening import read_model
from satlens.carried.resting import average_ranks, spearman
from satlens.carried.statics import measure
from satlens.carried.summary import layer_rows, layer_tables

WIDTH, GATES, LAYERS, VOCAB, LAYER = 64, 256, 4, 200, 2
HELD = 1.5
"""How far below 0 the planted coupling holds the median gate, in standard deviations of its pre-activation."""
PLACEMENTS = {"pre-norm, as opt-1.3b": True, "post-norm, as opt-350m": False}


def planted(norm_before: bool, documents: DocumentSet, seed: int = 0) -> Any:
    """A random OPT whose gates of every layer couple negatively to the mean of what they read."""
    torch.manual_seed(seed)
    config = OPTConfig(
        hidden_size=WIDTH, word_embed_proj_dim=WIDTH, num_hidden_layers=LAYERS, num_attention_heads=4, ffn_dim=GATES,
        vocab_size=VOCAB, max_position_embeddings=256, do_layer_norm_before=norm_before, init_std=0.1,
        pad_token_id=None,
    )  # fmt: skip
    model = OPTForCausalLM(config).eval()
    with torch.no_grad():
        model.model.decoder.embed_tokens.weight.add_(0.2 * torch.randn(WIDTH))  # what every token shares
        for layer in model.model.decoder.layers:
            layer.fc1.bias.normal_(0, 0.02)
            seen: list[torch.Tensor] = []
            handle = layer.fc1.register_forward_pre_hook(lambda _, args, seen=seen: seen.append(args[0]))
            for ids in documents.ids:
                model(torch.from_numpy(ids)[None])
            handle.remove()
            read = torch.cat([x[SKIP:] for x in seen])  # flattened: rows are positions
            mean = read.mean(0)
            spread = (read @ layer.fc1.weight.T).std(0)
            wanted = -HELD * spread * (0.5 + torch.rand(GATES))
            coupling = layer.fc1.weight @ mean
            layer.fc1.weight.add_(torch.outer((wanted - coupling) / (mean @ mean), mean))
    return model


def published(model: Any, documents: DocumentSet, layer: int) -> dict[str, float]:
    """What the paper's script computes: its hooks and sums, line by line."""
    linear = model.model.decoder.layers[layer].fc1
    reads: list[torch.Tensor] = []
    gates: list[torch.Tensor] = []
    handles = [
        linear.register_forward_pre_hook(lambda _, inp: reads.append(inp[0][0, SKIP:].float())),
        linear.register_forward_hook(lambda _, __, out: gates.append(out[0, SKIP:].float())),
    ]
    with torch.no_grad():
        for ids in documents.ids:
            model(torch.from_numpy(ids)[None])
    for handle in handles:
        handle.remove()
    total, fired, n = torch.zeros(WIDTH), None, 0
    for read, gate in zip(reads, gates, strict=True):
        total += read.sum(0)  # one number, spread over all coordinates
        fired = (gate > 0).float().sum(0) + (0 if fired is None else fired)
        n += read.shape[0]
    weight, bias = linear.weight.detach(), linear.bias.detach()
    coupling = weight @ (total / n)
    duty = np.broadcast_to((fired / n).numpy(), (GATES,)).astype(np.float64)
    ranks = average_ranks((coupling + bias).double().numpy()[None])
    rho = spearman(ranks, duty[None])[0, 0]
    return {
        "resting": float((coupling + bias).median()),
        "dominance": float((coupling.abs() > bias.abs()).float().mean()),
        "duty": float(np.median(duty)),
        "rho": 0.0 if np.isnan(rho) else float(rho),  # the paper's code answers 0 for a constant
    }


def ours(model: Any, documents: DocumentSet, layer: int) -> dict[str, float]:
    """What `satlens reference` computes."""
    reader = read_model(model, None, name="opt")
    statics = measure(reader, split(documents, same=True), layers=[layer])
    row = layer_rows(layer_tables(statics, 100), reader.n_layers).iloc[0]
    names = {"resting": "resting", "dominance": "dominance", "duty": "duty_median", "rho": "rho_resting"}
    return {name: float(row[column]) for name, column in names.items()}


def demonstration(layer: int = LAYER) -> pd.DataFrame:
    """``placement read resting dominance duty rho``: both ways of reading each planted model."""
    generator = np.random.default_rng(0)
    ids = tuple(generator.integers(0, VOCAB, size=generator.integers(90, 200)) for _ in range(12))
    documents = DocumentSet(ids=ids, names=("random",) * len(ids), kinds=("random",) * len(ids))
    rows = []
    for placement, before in PLACEMENTS.items():
        model = planted(before, documents)
        for name, read in (("published", published), ("ours", ours)):
            rows.append({"placement": placement, "read": name, **read(model, documents, layer)})
    return pd.DataFrame(rows)


if __name__ == "__main__":
    print(demonstration().round(4).to_string(index=False))
