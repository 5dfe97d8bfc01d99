"""Finished labels, opened for use: which latents were accepted, as what, and on which tokens they are active."""

from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from satlens.errors import UserError
from satlens.run import FinishedRun, open_run

VERB = "sae-label"
ACCEPTED, REJECTED, ERROR, SKIPPED = "accepted", "rejected", "error", "skipped"
"""Verdicts: an error is a latent on which the judge gave no usable answer, a skipped one was never asked about."""


@dataclass(frozen=True, kw_only=True)
class Labels:
    """One labelled dictionary of one model."""

    run: FinishedRun
    features: pd.DataFrame
    """Accepted latents, one a row: latent, category, broad, density, n_active, n_types, mono_score."""
    activations: pd.DataFrame
    """Every token each accepted latent is active on: latent, token_id, act."""
    model_digest: str
    sae_digest: str
    seed: int
    """Of the dictionary's training."""
    judge: str

    def require(self, model_digest: str | None = None, sae_digest: str | None = None) -> None:
        """Refuse labels that were made for another model or dictionary.

        Raises:
            UserError: a digest differs.
        """
        for what, mine, theirs in (
            ("model", self.model_digest, model_digest),
            ("dictionary", self.sae_digest, sae_digest),
        ):
            if theirs is not None and mine != theirs:
                raise UserError(
                    f"{self.run.path} labels another {what} (digest {mine[:12]}, not {theirs[:12]}): "
                    "label this one with satlens sae label"
                )


def open_labels(path: str | Path) -> Labels:
    """Open a run of `satlens sae label`.

    Raises:
        UserError: not finished, or a run of another verb.
    """
    run = open_run(path)
    if run.manifest.verb != VERB:
        raise UserError(f"{path} is a run of {run.manifest.verb}, not of satlens sae label")
    summary = run.manifest.summary
    features = run.tables["features"]
    return Labels(
        run=run,
        features=features[features["verdict"] == ACCEPTED].reset_index(drop=True),
        activations=run.tables["activations"],
        model_digest=run.manifest.model["digest"],
        sae_digest=summary["sae_digest"],
        seed=summary["sae_seed"],
        judge=summary["judge"],
    )
