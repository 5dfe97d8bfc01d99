"""Where the carried direction comes from: mean writes, how constant they are, and what is parameters alone."""

from collections.abc import Mapping

import numpy as np
import pandas as pd
from torch import Tensor

from satlens.bootstrap import Floats, Weights, percentile_interval, statistic_interval
from satlens.carried.ledger import Entry
from satlens.carried.mean import columns, cosine
from satlens.carried.norms import Norm
from satlens.carried.resting import read_mean
from satlens.carried.statics import Statics

WRITES = {"attention": "attn_out", "mlp": "mlp_out"}


def writes_table(statics: Statics, evaluate: Weights) -> pd.DataFrame:
    """Per layer and write: norm of the mean write, cosine to the deepest m^, and share of that m's component.

    ``share`` is ``mean write . m^_D / |m_D|`` for the deepest layer D (so writes of D itself have none), and
    ``constant_share`` the part of it that is a parameter: output biases and ``W_O b_V``. With the embeddings the shares
    add up to 1 in a pre-norm block (spec part B, writes).
    """
    sums = statics.evaluate
    rows = [_write_row(statics, evaluate, -1, "embedding", sums["resid"][:, 0], statics.origin)]
    for layer in range(statics.n_layers):
        for write, role in WRITES.items():
            if role in sums:
                constant = _constant(statics.entries[layer], write)
                rows.append(_write_row(statics, evaluate, layer, write, sums[role][:, layer], constant))
    return pd.DataFrame(rows)


def _write_row(
    statics: Statics, evaluate: Weights, layer: int, write: str, written: Floats, constant: Floats | None
) -> dict[str, object]:
    deep, sums = statics.n_layers - 1, statics.evaluate
    both = np.stack([written, sums["resid"][:, deep]], axis=1)
    count = sums["count"]
    share = statistic_interval(both, count, evaluate, _share_of)
    m_deep = _mean(sums, "resid", deep)
    below = layer < deep and not _unknown_sums(statics, deep)
    part = np.nan if constant is None else float(constant @ m_deep / (m_deep @ m_deep))
    return {
        "layer": layer,
        "write": write,
        **columns("norm", statistic_interval(written, count, evaluate, lambda w: np.linalg.norm(w, axis=-1))),
        **columns("cosine", statistic_interval(both, count, evaluate, _cosine_of)),
        **{key: value if below else np.nan for key, value in columns("share", share).items()},
        "constant_share": part if below else np.nan,
        "n_tokens": int(count.sum()),
    }


def sources_table(statics: Statics) -> pd.DataFrame:
    """What share of each layer's m every write before it supplies: ``mean write . m^_L / |m_L|`` (spec part B, writes:
    "layer-0 block 28 % of L8"). Without intervals."""
    sums, rows = statics.evaluate, []
    for target in range(statics.n_layers):
        if _unknown_sums(statics, target):
            break
        m = _mean(sums, "resid", target)
        unit = m / (m @ m)
        rows.append((target, -1, "embedding", float(_mean(sums, "resid", 0) @ unit)))
        for layer in range(target):
            rows += [
                (target, layer, write, float(_mean(sums, role, layer) @ unit))
                for write, role in WRITES.items()
                if role in sums
            ]
    return pd.DataFrame(rows, columns=["target", "layer", "write", "share"])


def _unknown_sums(statics: Statics, target: int) -> bool:
    """Whether a block below does something to its writes before it adds them, so that they are no shares of m."""
    return any(entry.block == "other" and not entry.adds for entry in statics.entries[:target])


def constant_share_table(statics: Statics, evaluate: Weights) -> pd.DataFrame:
    """``(mean over even documents . mean over odd) / mean square`` of each write, along m^ and orthogonal to it.

    1 for a write that is the same everywhere, 0 for one whose mean is chance (spec part B, constant share). m^ is that
    of the layer that writes, from the fit documents.
    """
    sums, directions = statics.evaluate, statics.directions()
    rows: list[dict[str, object]] = []
    even = np.arange(len(sums["count"])) % 2 == 0
    for layer in range(statics.n_layers):
        for write, role in WRITES.items():
            if role not in sums or not (even.any() and (~even).any()):
                continue
            data = {name: sums[f"{role}_{name}"][:, layer] for name in ("along", "whole")}
            found = _constant_share(
                sums[role][:, layer], data, sums["count"], even, directions[layer], evaluate
            )
            for channel, (estimate, low, high) in found.items():
                rows.append(
                    {
                        "layer": layer,
                        "write": write,
                        "channel": channel,
                        "constant_share": estimate,
                        "low": low,
                        "high": high,
                        "n_tokens": int(sums["count"].sum()),
                    }
                )
    names = ["layer", "write", "channel", "constant_share", "low", "high", "n_tokens"]
    return pd.DataFrame(rows, columns=names)


def _constant_share(
    written: Floats,
    squares: Mapping[str, Floats],
    count: Floats,
    even: np.ndarray,
    m: Floats,
    weights: Weights,
) -> dict[str, tuple[float, float, float]]:
    """``along`` and ``orthogonal``, each with the ends of its interval."""

    def of(drawn: Floats) -> Floats:
        """``[n doc]`` counts of documents to ``[n 2]``."""
        halves = [drawn * even, drawn * ~even]
        means = [(half @ written) / np.maximum(half @ count, 1e-30)[:, None] for half in halves]
        total = drawn @ count
        along, whole = ((drawn @ squares[name]) / total for name in ("along", "whole"))
        product_along = (means[0] @ m) * (means[1] @ m)
        product = np.einsum("nd,nd->n", *means)
        both = np.stack([product_along, product - product_along], axis=1)
        scale = np.stack([along, whole - along], axis=1)
        filled = np.stack([half @ count for half in halves]).min(0) > 0
        present = filled[:, None] & (scale > 0)
        return np.divide(both, scale, out=np.full_like(both, np.nan), where=present)

    estimate = of(np.ones((1, len(count))))[0]
    low, high = percentile_interval(of(weights.astype(np.float64)))
    return {name: (estimate[i], low[i], high[i]) for i, name in enumerate(("along", "orthogonal"))}


def parameter_share_table(statics: Statics, fit: Weights) -> pd.DataFrame:
    """Share of ``b_L`` that is parameters alone: ``b_param . b / |b|^2`` (spec part B, parameter share).

    ``b_param`` is what the constants on the path become through the norm that the gate really reads, at its measured
    mean ``1 / sigma``: output biases and ``W_O b_V`` of earlier blocks, the layer's own attention where the block is
    sequential, and the norm's bias, which alone is ``norm_bias_share``. Means over positions (of position embeddings,
    say) are not counted. In post-norm blocks the scales of successive norms are taken as uncorrelated. Null, with the
    reason, where a norm is unknown or stands between a write and the stream.
    """
    constants = _path_constants(statics, fit)
    rows: list[dict[str, object]] = []
    for read in statics.reads:
        entry, b = statics.entries[read.layer], read_mean(statics, read)
        reason = _why_unknown(statics.entries, entry)
        row: dict[str, object] = {"layer": read.layer, "norm": entry.norm.name if entry.norm else None}
        if reason or entry.norm is None:
            rows.append({**row, "share": np.nan, "share_low": np.nan, "share_high": np.nan, "reason": reason})
            continue
        point, samples = constants[read.layer]
        b_samples = _resampled_means(statics.fit["read"][:, read.layer], statics.fit["count"], fit)
        low = high = np.nan
        if b_samples is not None and samples is not None:
            shares = np.einsum("nd,nd->n", samples, b_samples) / np.square(b_samples).sum(1)
            low, high = percentile_interval(shares)
        bias = _array(entry.norm.bias)
        rows.append(
            {
                **row,
                "share": float(point @ b / (b @ b)),
                "share_low": low,
                "share_high": high,
                "norm_bias_share": float(bias @ b / (b @ b)),
                "cos_norm_bias": cosine(bias, b),
                "reason": None,
            }
        )
    names = [
        "layer",
        "norm",
        "share",
        "share_low",
        "share_high",
        "norm_bias_share",
        "cos_norm_bias",
        "reason",
    ]
    return pd.DataFrame(rows, columns=names)


def _path_constants(statics: Statics, fit: Weights) -> dict[int, tuple[Floats, Floats | None]]:
    """Per layer, the constant part of what the gate reads: on all fit documents, and in each resample."""
    count = statics.fit["count"]
    drawn = [np.ones((1, len(count)))]
    if np.count_nonzero(count) > 1:
        drawn.append(fit.astype(np.float64))
    out: dict[int, list[Floats]] = {}
    for weights in drawn:
        stream = np.broadcast_to(statics.origin, (len(weights), len(statics.origin)))
        for entry in statics.entries:
            if _why_unknown(statics.entries, entry) or entry.norm is None:
                break
            own = stream + _array(entry.attention_constant)
            at_norm = stream if entry.block == "parallel" else own
            read = _through(entry.norm, at_norm, _scale(statics, weights, "gate", entry.layer))
            out.setdefault(entry.layer, []).append(read)
            if entry.exit_norm is not None:
                after = read + _array(entry.mlp_bias)
                stream = _through(entry.exit_norm, after, _scale(statics, weights, "exit", entry.layer))
            else:
                stream = own + _array(entry.mlp_bias)
    return {layer: (found[0][0], found[1] if len(found) > 1 else None) for layer, found in out.items()}


def ledger_table(statics: Statics) -> pd.DataFrame:
    """One row a layer: block style, the norm that feeds the gate, and the lengths of the constants on the path, which
    is what the parameter share (spec part B) rests on."""
    rows = []
    for entry, read in zip(statics.entries, statics.reads, strict=True):
        norm = entry.norm
        value = None if entry.value_constant is None else float(entry.value_constant.norm())
        rows.append(
            {
                "layer": entry.layer,
                "block": entry.block,
                "gate": read.name,
                "activation": read.activation,
                "gated": read.gated,
                "gate_bias": read.bias is not None,
                "norm": None if norm is None else norm.name,
                "norm_kind": None if norm is None else ("LayerNorm" if norm.centred else "RMSNorm"),
                "norm_bias": 0.0 if norm is None else float(norm.bias.norm()),
                "exit_norm": None if entry.exit_norm is None else entry.exit_norm.name,
                "attention_bias": float(entry.attention_bias.norm()),
                "value_constant": np.nan if value is None else value,
                "mlp_bias": float(entry.mlp_bias.norm()),
            }
        )
    return pd.DataFrame(rows)


def _why_unknown(entries: tuple[Entry, ...], entry: Entry) -> str | None:
    """Why the constants on the path to a layer's gate cannot be followed, if they cannot."""
    for before in entries[: entry.layer + 1]:
        if before.norm is None:
            return f"no known norm feeds the gate of layer {before.layer}"
        if before.block == "other":
            return f"the block of layer {before.layer} neither adds its writes nor norms their sum"
        writes = [before.attention_constant, before.mlp_bias]
        if before.renormed and any(bool(write.any()) for write in writes):
            return f"a norm stands between the writes of layer {before.layer} and the stream"
        if before.value_constant is None:
            return f"attention of layer {before.layer} does not write the mean of its values"
    return None


def _through(norm: Norm, constant: Floats, scale: Floats) -> Floats:
    moved = constant - constant.mean(-1, keepdims=True) if norm.centred else constant
    out: Floats = _array(norm.gain) * moved * scale[:, None] + _array(norm.bias)
    return out


def _scale(statics: Statics, weights: Floats, kind: str, layer: int) -> Floats:
    """Mean ``1 / sigma`` of a norm in each resample."""
    out: Floats = (weights @ statics.fit[f"scale_{kind}"][:, layer]) / (weights @ statics.fit["count"])
    return out


def _resampled_means(sums: Floats, count: Floats, weights: Weights) -> Floats | None:
    if np.count_nonzero(count) < 2:
        return None
    drawn = weights.astype(np.float64)
    out: Floats = (drawn @ sums) / (drawn @ count)[:, None]
    return out


def _constant(entry: Entry, write: str) -> Floats | None:
    if entry.renormed:
        return None
    return _array(entry.attention_constant if write == "attention" else entry.mlp_bias)


def _array(tensor: Tensor) -> Floats:
    out: Floats = tensor.double().cpu().numpy()
    return out


def _mean(sums: Mapping[str, np.ndarray], role: str, layer: int) -> Floats:
    out: Floats = sums[role][:, layer].sum(0) / sums["count"].sum()
    return out


def _share_of(means: Floats) -> Floats:
    """``[n 2 d_model]``, a write and a mean: the write's part of that mean's length."""
    return np.einsum("nd,nd->n", means[:, 0], means[:, 1]) / np.square(means[:, 1]).sum(-1)


def _cosine_of(means: Floats) -> Floats:
    lengths = np.linalg.norm(means, axis=-1).prod(-1)
    inner = np.einsum("nd,nd->n", means[:, 0], means[:, 1])
    return np.divide(inner, lengths, out=np.full_like(inner, np.nan), where=lengths > 0)
