"""Whose labels are these: checkpoints by digest, label runs sorted by model and seed, and what cannot be compared."""

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sae.labels import Labels, open_labels
from satlens import reference
from satlens.errors import UserError


def facts_of(model: str) -> dict[str, Any]:
    """Name and facts of a checkpoint; its weights are read for their digest, nothing is run."""
    from satlens.checkpoint import model_facts

    path = reference.resolve(model)
    return {"name": reference.title(model), **model_facts(path)}


def open_all(
    paths: Sequence[Path], facts: Mapping[str, Any], other: Mapping[str, Any] | None
) -> tuple[list[Labels], list[Labels]]:
    """The labels of the model and of the baseline, each by seed.

    Raises:
        UserError: labels of neither, none of the model, two of one seed, or by different judges.
    """
    mine: list[Labels] = []
    theirs: list[Labels] = []
    for path in paths:
        labels = open_labels(path)
        if other is not None and labels.model_digest == other["digest"]:
            theirs.append(labels)
        else:
            labels.require(model_digest=facts["digest"])
            mine.append(labels)
    for which, found in ((facts, mine), (other, theirs)):
        if which is not None and not found:
            raise UserError(f"no labels of {which['name']} among --labels: make them with satlens sae label")
    for group in (mine, theirs):
        group.sort(key=lambda labels: labels.seed)
        for first, second in itertools.pairwise(group):
            if first.seed == second.seed:
                raise UserError(
                    f"{first.run.path} and {second.run.path} both label a dictionary of seed {first.seed}: give one"
                )
    if len(judges := {labels.judge for labels in (*mine, *theirs)}) > 1:
        raise UserError(
            f"labels by different judges ({', '.join(sorted(judges))}) do not compare: give those of one"
        )
    for labels in mine:
        if not len(labels.features):
            raise UserError(f"{labels.run.path} accepted no feature, so there is nothing to average")
    return mine, theirs
