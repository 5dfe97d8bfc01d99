"""From the harness's records to rows: a value a document, and each metric with its standard error and interval.

A metric is a function of a mean, total of values over total of weights: the mean itself (accuracy), the exponential
of minus it (perplexity), or minus it in bits. So one bootstrap over documents serves all, and stored documents are
enough to make it again. Shares of documents get Wilson's interval.
"""

import hashlib
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd

from satlens.errors import SatlensError

Shape = Callable[[Any], Any]
SHAPES: dict[str, Shape] = {
    **dict.fromkeys(("perplexity", "word_perplexity", "byte_perplexity"), lambda mean: np.exp(-mean)),
    "bits_per_byte": lambda mean: -mean / math.log(2),
}


def by_document(task: str, records: list[dict[str, Any]]) -> pd.DataFrame:
    """One row a document and metric: its value, and the weight it has in the mean (1, or its words or bytes)."""
    rows = []
    for record in records:
        for metric in record["metrics"]:
            value = record[metric]
            value, weight = value if isinstance(value, tuple | list) else (value, 1)
            rows.append((task, int(record["doc_id"]), metric, float(value), float(weight)))
    return pd.DataFrame(rows, columns=["task", "doc", "metric", "value", "weight"])


def digest(records: list[dict[str, Any]]) -> str:
    """sha256 over the documents and prompts that were answered: two runs asked the same exactly when theirs agree."""
    words = (f"{record['doc_id']} {record['doc_hash']} {record['prompt_hash']}\n" for record in records)
    return hashlib.sha256("".join(words).encode()).hexdigest()


def chance(records: list[dict[str, Any]]) -> float | None:
    """Accuracy of guessing among each document's choices; None where there are none."""
    choices = [len(record["arguments"]) for record in records]
    return float(np.mean([1 / n for n in choices])) if min(choices) > 1 else None


def summarise(
    documents: pd.DataFrame, reported: dict[str, float], guess: float | None, resamples: int, seed: int
) -> pd.DataFrame:
    """One row a metric: value, standard error, interval, number of documents, and what guessing would give.

    Raises:
        SatlensError: the documents do not give the number that the harness reports.
    """
    from satlens.bootstrap import document_weights

    rows = []
    for metric, table in documents.groupby("metric", sort=False):
        values, weights = table["value"].to_numpy(), table["weight"].to_numpy()
        drawn = document_weights(len(table), resamples, seed)
        value, stderr, low, high = _measured(str(metric), values, weights, drawn)
        if not math.isclose(value, reported[str(metric)], rel_tol=1e-9, abs_tol=1e-12):
            raise SatlensError(
                f"{metric} is {value} from the documents' scores, but lm-evaluation-harness reports "
                f"{reported[str(metric)]}: its metric is another function than this version knows"
            )
        rows.append(
            {
                "metric": metric,
                "value": value,
                "stderr": stderr,
                "low": low,
                "high": high,
                "chance": guess if str(metric).startswith("acc") else None,
                "n_documents": len(table),
            }
        )
    return pd.DataFrame(rows)


def _measured(
    metric: str, values: np.ndarray, weights: np.ndarray, drawn: np.ndarray
) -> tuple[float, float | None, float | None, float | None]:
    """Value, standard error and interval. A plain mean has the harness's own standard error (for an accuracy the
    binomial one, with n - 1); other metrics that of their resamples. A share gets Wilson's interval, which has a
    width where no document, or every one, was answered rightly; a bootstrap of equal values has none."""
    from satlens.bootstrap import percentile_interval, resampled_statistic

    shape = SHAPES.get(metric, lambda mean: mean)
    value, samples = resampled_statistic(values, weights, drawn, shape)
    if samples is None:
        return float(value), None, None, None
    plain = metric not in SHAPES and bool((weights == 1).all())
    stderr = values.std(ddof=1) / math.sqrt(len(values)) if plain else samples.std(ddof=1)
    share = plain and bool(np.isin(values, (0, 1)).all())
    ends = wilson(float(value), len(values)) if share else percentile_interval(samples)
    return float(value), float(stderr), *ends


def wilson(share: float, n: int, z: float = 1.959964) -> tuple[float, float]:
    """Wilson's 95 % interval of a share of ``n`` independent documents (1927)."""
    centre = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    # at the ends they are 0 and 1 exactly, up to rounding
    return (0.0 if share == 0 else max(0.0, centre - half)), (1.0 if share == 1 else min(1.0, centre + half))
