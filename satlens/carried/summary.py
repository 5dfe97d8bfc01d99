"""One row a layer: the numbers that the paper's tables hold, gathered from the tables of the static statistics."""

from collections.abc import Mapping

import pandas as pd

from satlens.carried.statics import Statics, weights

Tables = Mapping[str, pd.DataFrame]

RESTING = """
coupling coupling_low coupling_high resting resting_low resting_high bias coupling_size ratio slice negative dominance
dominance_low dominance_high dominance_resting dominance_resting_low dominance_resting_high duty duty_low duty_high
duty_median duty_median_low duty_median_high firing_05 n_gates n_tokens
""".split()
"""Columns of ``carried_resting``: medians over gates, shares of gates, duty and firing."""
OBJECT = "share share_low share_high stream_norm growth m_norm b_norm b_norm_low b_norm_high cos_b_m".split()
"""Columns of ``carried_object``."""
UNITS = {
    "coupling": "pre-activation",
    "resting": "pre-activation",
    "bias": "pre-activation",
    "ratio": "median |w.b| / median |beta|",
    "negative": "share of gates",
    "dominance": "share of gates",
    "duty": "share of far positions, mean gate",
    "duty_median": "share of far positions, median gate",
    "share": "share of the stream's norm",
    "parameter_share": "share of b along itself",
    "rho_resting": "Spearman, over gates",
}
"""Units of columns that are no plain lengths or cosines."""


def layer_tables(statics: Statics, n_resamples: int = 1000, seed: int = 0) -> dict[str, pd.DataFrame]:
    """The tables that ``layer_rows`` needs and no others: what a scan of many models computes."""
    from satlens.carried import mean, resting, sources

    fit, evaluate = weights(statics, n_resamples, seed)
    return {
        "carried_object": mean.object_table(statics, fit, evaluate),
        "carried_stability": mean.stability_table(statics, evaluate, seed),
        "carried_resting": resting.resting_table(statics, fit, evaluate),
        "carried_rank": resting.rank_table(statics, evaluate, seed),
        "carried_parameter_share": sources.parameter_share_table(statics, fit),
    }


def layer_rows(tables: Tables, n_layers: int) -> pd.DataFrame:
    """The static table: one row a measured layer, MLP gates only (SATFormer's own are in ``carried_value_gates``)."""
    resting = tables["carried_resting"]
    out = resting[resting["kind"] == "mlp"].set_index("layer")[RESTING]
    out = out.join(tables["carried_object"].set_index("layer")[OBJECT])
    halves = tables["carried_stability"]
    halves = halves[halves["comparison"] == "halves"].set_index("layer")
    ends = {"cosine": "stability", "cosine_low": "stability_low", "cosine_high": "stability_high"}
    out = out.join(halves[list(ends)].rename(columns=ends))
    out = out.join(ranks(tables["carried_rank"]))
    out = out.join(_parameters(tables["carried_parameter_share"]))
    out = out.reset_index()
    out.insert(1, "depth", out["layer"] / n_layers)
    return out


def ranks(rank: pd.DataFrame) -> pd.DataFrame:
    """What orders duty: the resting term, the coupling, the read norm, the bias, and a random direction.

    Of random directions it is the median of ``|rho|``, as in the paper's code: their signs are chance.
    """
    columns = {}
    for predictor, rows in rank.groupby("predictor", sort=False):
        name = f"rho_{str(predictor).replace(' ', '_')}"
        rho = rows["rho"].abs() if predictor == "random" else rows["rho"]
        columns[name] = rho.groupby(rows["layer"]).median()  # one row but for the random directions
        if predictor == "resting":
            columns[f"{name}_low"], columns[f"{name}_high"] = (
                rows.set_index("layer")[end] for end in ("rho_low", "rho_high")
            )
    return pd.DataFrame(columns)


def _parameters(table: pd.DataFrame) -> pd.DataFrame:
    """Share of b that is parameters alone, through the norm that the gate reads."""
    ends = {
        "share": "parameter_share",
        "share_low": "parameter_share_low",
        "share_high": "parameter_share_high",
    }
    return table.set_index("layer")[list(ends)].rename(columns=ends)
