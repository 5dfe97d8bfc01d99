"""What comes first in training: between which checkpoints each quantity goes half its way."""

from collections.abc import Collection, Mapping

import numpy as np
import pandas as pd

QUANTITIES = {
    "loss": "loss",
    "coupling": "development",
    "duty_median": "development",
    "share": "development",
    "induction": "induction",
    "loss_drop": "induction",
}
"""Quantities whose order in time is asked for, and the table each is in."""
COPYING = ("induction", "loss_drop")
"""Those of copying, which a model whose attention writes nothing cannot do."""
LEAST_CHANGE = {"loss_drop": 0.15}
"""A quantity that ends less than this from where it began (in its own unit) went nowhere: it has no half way.
0.15 nats is what the paper's script asks of copying."""
LEAST_OF_OTHERS = 0.05


def order_table(tables: Mapping[str, pd.DataFrame], layer: int, silent: Collection[str] = ()) -> pd.DataFrame:
    """For each run and quantity, the checkpoints between which it went half its way from step 0 to the end.

    ``status`` says why there are none: the quantity did not move, or is copying in a run whose attention writes nothing
    (``silent``), where patterns may drift but nothing can come of them.
    """
    rows = []
    for run in tables["development"]["run"].unique():
        for quantity, name in QUANTITIES.items():
            table = tables[name]
            table = table[table["run"] == run]
            if name == "development":
                table = table[table["layer"] == layer]
            table = table.sort_values("step")
            values = table[quantity].to_numpy(dtype=np.float64)
            least = LEAST_CHANGE.get(quantity, LEAST_OF_OTHERS)
            before, after = half_way(table["step"].to_numpy(), values, least)
            status = "moved" if before is not None else "did not move"
            if run in silent and quantity in COPYING:
                before, after, status = None, None, "attention off"
            rows.append((run, quantity, layer, before, after, values[0], values[-1], status))
    names = ["run", "quantity", "layer", "before", "after", "first", "last", "status"]
    return pd.DataFrame(rows, columns=names).astype({"before": "Int64", "after": "Int64"})


def half_way(
    steps: np.ndarray, values: np.ndarray, least: float = LEAST_OF_OTHERS
) -> tuple[int | None, int | None]:
    """The last step at which a quantity was not yet beyond half of its change for good, and the step after it.

    Nothing for one that changed by less than ``least`` or is not known everywhere.
    """
    change = values[-1] - values[0]
    if not abs(change) >= least or np.isnan(values).any():
        return None, None
    behind = np.flatnonzero((values - values[0]) / change < 0.5)
    return int(steps[behind[-1]]), int(steps[behind[-1] + 1])


def which_first(order: pd.DataFrame, run: str) -> str:
    """``coupling`` or ``induction``, where the half ways of the two lie between different checkpoints."""
    rows = order[order["run"] == run].set_index("quantity")
    coupling, induction = rows.loc["coupling"], rows.loc["induction"]
    for name, row in (("coupling", coupling), ("induction", induction)):
        if row["status"] != "moved":
            return f"no order: {name} {row['status']}"
    if coupling["after"] <= induction["before"]:
        return "coupling"
    return (
        "induction" if induction["after"] <= coupling["before"] else "no order: between the same checkpoints"
    )
