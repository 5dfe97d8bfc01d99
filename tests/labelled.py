"""Label runs, dictionaries and gate sums made by hand, so that what they say is known."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from safetensors.torch import save_file

from sae.dictionary import Counts, Dictionary, open_dictionary
from sae.taxonomy import CATEGORIES
from satlens.accumulators import PairSums
from satlens.gate_sums import GateSums, Pairs
from satlens.run import start_run


def write_labels(
    runs: Path,
    model: dict[str, Any],
    tokens: dict[int, tuple[str | None, list[int]]],
    seed: int = 0,
    sae_digest: str = "d" * 64,
    judge: str = "rules",
) -> Path:
    """A run of satlens sae label; ``tokens``: latent -> (category or None for a rejected one, token ids)."""
    run = start_run(runs, "sae-label", {}, [], run_id=f"{model['name']}{seed}{judge}".replace("-", ""))
    rows, active = [], []
    for latent, (category, ids) in tokens.items():
        verdict = "accepted" if category else "rejected"
        row = {"latent": latent, "verdict": verdict, "category": category, "broad": CATEGORIES.get(category)}
        rows.append({**row, "density": 0.01, "n_active": 10, "n_types": len(ids), "mono_score": 0.5})
        if category:
            active += [(latent, token, 1.0 + token / 7) for token in ids]
    run.table("features", pd.DataFrame(rows))
    run.table("activations", pd.DataFrame(active, columns=["latent", "token_id", "act"]))
    summary = {"sae_digest": sae_digest, "sae_seed": seed, "judge": judge}
    return run.finish(summary, model={"name": model["name"], "digest": model["digest"]})


def random_dictionary(d_in: int, d_sae: int, k: int, n_ids: int, seed: int = 0) -> Dictionary:
    """Random weights, unit decoder rows, in memory."""
    rng = torch.Generator().manual_seed(seed)
    decoder = torch.randn(d_sae, d_in, generator=rng)
    decoder /= decoder.norm(dim=1, keepdim=True)
    counts = torch.ones(n_ids, dtype=torch.long)
    return Dictionary(
        path=Path("nowhere"),
        W_enc=decoder.T.contiguous(),
        b_enc=0.1 * torch.randn(d_sae, generator=rng),
        W_dec=decoder,
        b_dec=0.1 * torch.randn(d_in, generator=rng),
        k=k,
        facts={"site": "v1", "seed": seed},
        counts=Counts(train=counts, heldout=counts),
        digest="d" * 64,
    )


def write_dictionary(folder: Path, made: Dictionary, model: dict[str, Any], site: str = "v1") -> Dictionary:
    """The dictionary as a folder of a model, and as it opens from there."""
    folder.mkdir(parents=True)
    tensors = {name: getattr(made, name).contiguous() for name in ("W_enc", "b_enc", "W_dec", "b_dec")}
    save_file(tensors, folder / "sae_weights.safetensors")
    facts = {"site": site, "seed": 0, "model": {"name": model["name"], "digest": model["digest"]}}
    shape = {"architecture": "topk", "d_in": made.d_in, "d_sae": made.d_sae, "k": made.k}
    (folder / "cfg.json").write_text(json.dumps({**shape, "metadata": {"satlens": facts}}))
    return open_dictionary(folder)


class Positions:
    """Some positions of a made-up text: document, token, and alpha of every layer and head."""

    def __init__(self, n_docs=6, n_ids=20, n_layers=3, n_heads=2, n=300, seed=0, signed=False):
        rng = np.random.default_rng(seed)
        self.n_docs, self.n_ids = n_docs, n_ids
        self.doc = rng.integers(n_docs, size=n)
        self.token = np.minimum(rng.geometric(0.2, size=n), n_ids - 1)  # id 0 never occurs
        self.alpha = rng.gamma(1.0, 1.0, (n, n_layers, n_heads)) + 0.1 * self.token[:, None, None]
        self.alpha *= rng.random(self.alpha.shape) > 0.3
        if signed:
            self.alpha -= 1.5

    def sums(self) -> GateSums:
        """What satlens gates would have stored."""
        n_layers, n_heads = self.alpha.shape[1:]
        total = np.zeros((self.n_ids, n_layers, n_heads))
        np.add.at(total, self.token, self.alpha)
        pairs = PairSums(n_layers)
        pairs.add(
            torch.from_numpy(self.doc), torch.from_numpy(self.token), torch.from_numpy(self.alpha.sum(2))
        )
        stored = pairs.result()
        starts = np.searchsorted(stored["token"], np.arange(self.n_ids + 1))
        return GateSums(
            run=None,
            layers=tuple(range(1, n_layers + 1)),
            count=np.bincount(self.token, minlength=self.n_ids),
            sum=total,
            pairs=Pairs(**stored, starts=starts, n_docs=self.n_docs),
        )
