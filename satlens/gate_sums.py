"""The sums that `satlens gates` stored, opened for whatever follows from them without the model."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from satlens.accumulators import N_BLOCKS
from satlens.errors import UserError
from satlens.run import FinishedRun, open_run

VERB, PAIRS = "gates", "by_document_token"


@dataclass(frozen=True, kw_only=True)
class Pairs:
    """Alpha summed over heads, for each token id in each document where it occurs; token after token."""

    doc: Int[np.ndarray, " pair"]
    token: Int[np.ndarray, " pair"]
    count: Int[np.ndarray, " pair"]
    sum: Float[np.ndarray, "pair layer"]
    starts: Int[np.ndarray, " boundary"]
    """Where the pairs of each token id begin, and last the end of all."""
    n_docs: int
    """Documents, or blocks of documents when the text has more than N_BLOCKS."""


@dataclass(frozen=True, kw_only=True)
class GateSums:
    """What a gates run knows of each token id."""

    run: FinishedRun
    layers: tuple[int, ...]
    """The gated layers, which the axis ``layer`` counts."""
    count: Int[np.ndarray, " d_vocab"]
    """Positions that hold the token."""
    sum: Float[np.ndarray, "d_vocab layer kv_head"]
    """Alpha summed over these positions."""
    pairs: Pairs

    @property
    def kind(self) -> str:
        """The gate's nonlinearity."""
        return str(self.run.manifest.summary["gate"])

    @property
    def n_heads(self) -> int:
        """KV heads."""
        return int(self.sum.shape[2])


def open_gates(given: Path | None, runs: Path, model: dict[str, Any], command: str) -> GateSums:
    """The gates run ``given``, or the newest below ``runs`` that measured ``model`` (facts with name and digest).

    Raises:
        UserError: none, one of another model, or one made before these sums were stored; ``command`` is named.
    """
    if given is None:
        fitting = [run for run in _gates_runs(runs) if _why_not(run, model) is None]
        if not fitting:
            raise UserError(
                f"no run of satlens gates for {model['name']} below {runs}: make one with {command}"
            )
        return _opened(max(fitting, key=lambda run: (run.manifest.finished, run.manifest.run)))
    run = open_run(given)
    if reason := _why_not(run, model):
        raise UserError(f"{given} {reason}: make one with {command}")
    return _opened(run)


def _gates_runs(runs: Path) -> list[FinishedRun]:
    """Finished ones that can be read; a damaged or older one in the folder is nobody's mistake here."""
    found = []
    for manifest in sorted(runs.glob(f"**/{VERB}-*/manifest.json")):
        try:
            found.append(open_run(manifest.parent))
        except UserError:
            continue
    return found


def _why_not(run: FinishedRun, model: dict[str, Any]) -> str | None:
    """What keeps a run from being used for this model; None when nothing does."""
    manifest = run.manifest
    if manifest.verb != VERB:
        return f"is a run of {manifest.verb}, not of satlens gates"
    if (digest := manifest.model.get("digest", "")) != model["digest"]:
        return f"measured another model (digest {digest[:12]}, not {model['digest'][:12]} of {model['name']})"
    if PAIRS not in run.tensors:
        return "has no sums by document and token, which earlier versions did not store"
    return None


def _opened(run: FinishedRun) -> GateSums:
    pairs, by_token = run.tensors[PAIRS], run.tensors["by_token"]
    return GateSums(
        run=run,
        layers=tuple(int(layer) for layer in sorted(run.tables["gate_profile"]["layer"])),
        count=by_token["token_count"].astype(np.int64),
        sum=by_token["token_sum"],
        pairs=Pairs(
            **pairs,
            starts=np.searchsorted(pairs["token"], np.arange(len(by_token["token_count"]) + 1)),
            n_docs=min(int(run.manifest.data["n_documents"]), N_BLOCKS),
        ),
    )
