"""What the hooks of one pass leave: sums over far positions, by row, of streams, writes, reads and gates.

Positions are summed in float32 within blocks of 16 and in float64 across them, by matrix products, which cost next to
nothing; comparing pre-activations with three thresholds is the dearest part.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from satlens.carried.documents import BLOCK, SKIP, Rows
from satlens.carried.norms import Norm
from satlens.carried.reader import Reader
from satlens.carried.reads import Edit, GateRead, Hook
from satlens.errors import SatlensError, UserError

FIRING = (0.5, 1.0)
"""Post-activations above these fire (spec part B)."""
STRIDE = 4
"""Covariances are taken at every fourth position: what they are used for needs no more."""
ALONG = ("share", "size", "inner", "norm")
"""Of the stream x against m^: (x.m^)/|x|, its absolute value, x.m^, and |x|."""
WRITES = ("attn_out", "mlp_out")
"""Roles that are added to the stream."""
WRITTEN = ("along", "whole")
"""Of a write w against m^: (w.m^)^2 and |w|^2."""
CACHED = 1 << 17
"""Pre-activations compared at once on a CPU (float32: 512 KiB)."""

Key = tuple[str, int]
"""Kind of gate or of norm, and layer."""


class BatchSums:
    """The sums of one batch. A hook does what needs its tensor and no more; ``close`` does the rest for all layers at
    once, since many small steps would cost as much as the large ones."""

    def __init__(
        self,
        reader: Reader,
        rows: Rows,
        data: dict[str, Tensor],
        roles: Sequence[str],
        means: Float[Tensor, "layer d_model"] | None,
    ) -> None:
        """``data``: the sums of the whole pass, which ``close`` adds to. ``means``: m of each layer, once known."""
        self.reader, self.rows, self.data = reader, rows, data
        self.means = self.directions = None
        if means is not None:
            self.means = means.float()
            self.directions = (means / torch.linalg.vector_norm(means, dim=-1, keepdim=True)).float()
        self.far = rows.far.float()
        layers, width, (n, pos) = reader.n_layers, reader.d_model, rows.input_ids.shape
        self.totals = {
            role: torch.zeros(n, layers + (role == "resid"), width, dtype=torch.float64, device=reader.device)
            for role in roles
        }
        along = [] if means is None else [role for role in roles if role in ("resid", *WRITES)]
        self.inner = {role: torch.zeros(layers, n, pos, device=reader.device) for role in along}
        self.length = {role: torch.zeros_like(values) for role, values in self.inner.items()}
        self.scales: dict[str, Tensor] = {}
        self.pre: dict[Key, Tensor] = {}
        strided = torch.zeros_like(rows.far)
        strided[:, ::STRIDE] = rows.far[:, ::STRIDE]
        self.strided = strided.flatten().nonzero()[:, 0]
        self.buffers: dict[torch.Size, Tensor] = {}

    def hooks(self, reads: Mapping[Key, GateRead], thresholds: Mapping[Key, tuple[float, ...]]) -> list[Hook]:
        """For a pass: one a role and layer, and one a gate linear."""
        out = [
            (role, layer, self._adder(role, layer))
            for role in self.totals
            for layer in self.reader.sites[role]
        ]
        return out + [
            (read.roles[1], read.layer, self._counter(key, thresholds[key])) for key, read in reads.items()
        ]

    def scale(self, kind: str, layer: int, norm: Norm) -> Edit:
        """A hook on what a norm gets: its ``1 / sigma``, summed over far positions."""
        name = f"scale_{kind}"

        def add(tensor: Tensor) -> None:
            values = self.scales.setdefault(name, self.far.new_zeros(self.reader.n_layers, *self.far.shape))
            values[layer] = norm.inverse_sigma(tensor)

        return add

    def finite(self) -> bool:
        """Whether every sum is: an infinity or NaN anywhere stays in its sum."""
        checked = [*(total.sum() for total in self.totals.values()), *(z.sum() for z in self.pre.values())]
        return bool(torch.isfinite(torch.stack(checked)).all())

    def close(self) -> None:
        """Add the batch to the sums of the pass."""
        data, doc = self.data, self.rows.doc
        data["count"][doc] += self.rows.far.sum(1).double()
        for role, total in self.totals.items():
            data[role][doc] += total
        for name, values in self.scales.items():
            self._add(name, values)
        if self.directions is None:
            return
        data["covariance_count"] += len(self.strided)
        for key, total in self.pre.items():
            data[f"pre_{at(key)}"] += total
        inner, length = self.inner["resid"], self.length["resid"]
        share = inner / length.clamp_min(1e-30)
        for name, values in zip(ALONG, (share, share.abs(), inner, length), strict=True):
            self._add(name, values)
        for role in (role for role in WRITES if role in self.inner):
            for part, values in zip(WRITTEN, (self.inner[role], self.length[role]), strict=True):
                self._add(f"{role}_{part}", values.square())

    def _add(self, name: str, values: Float[Tensor, "layer batch pos"]) -> None:
        self.data[name][self.rows.doc] += (values * self.far).double().sum(-1).T

    def _adder(self, role: str, layer: int) -> Edit:
        projected = role in self.inner and layer < self.reader.n_layers

        def add(tensor: Tensor) -> None:
            x = tensor.float()
            self.totals[role][:, layer] = far_sums(x, self.far)
            if role == "resid" and self.means is not None:
                self._add_stream(x, layer, self.means)
            if projected and self.directions is not None:
                self.inner[role][layer] = x @ self.directions[layer]
                self.length[role][layer] = torch.linalg.vector_norm(x, dim=-1)

        return add

    def _add_stream(self, x: Tensor, layer: int, means: Tensor) -> None:
        """What the geometry compares m^ with."""
        data, doc = self.data, self.rows.doc
        data["first"][layer] += x[:, 0].double().sum(0)
        data["sink"][layer] += x[:, :SKIP].double().sum((0, 1))
        kept = (doc < len(data["samples"])).nonzero()[:, 0]
        if len(kept):
            data["samples"][doc[kept], layer] = x[kept, (SKIP + self.rows.last[kept]) // 2].double()
        if layer == self.reader.n_layers:
            data["final_square"] += far_sums(x.square(), self.far).sum(0)
        elif f"covariance_{layer}" in data:
            # deviations from a mean known before: the squares of a long mean would drown them in float32
            part = x.reshape(-1, x.shape[-1]).index_select(0, self.strided) - means[layer]
            data[f"covariance_{layer}"] += part.T @ part
            data[f"deviation_{layer}"] += part.double().sum(0)

    def _counter(self, key: Key, thresholds: Sequence[float]) -> Edit:
        """Duty by gate, firing over gates, and the sum of pre-activations, without making the activation again."""

        def add(tensor: Tensor) -> None:
            z = tensor.float()
            self.pre[key] = far_sums(z, self.far).sum(0)
            above = z.new_empty(len(thresholds), len(z), 1, z.shape[-1])
            # on a CPU a few rows at a time, so that what is compared is still in its cache
            step = max(1, CACHED // z[0].numel()) if z.device.type == "cpu" else len(z)
            for start in range(0, len(z), step):
                part, far = z[start : start + step], self.far[start : start + step, None]
                buffer = self.buffers.setdefault(part.shape, torch.empty_like(part))
                for level, threshold in enumerate(thresholds):
                    torch.gt(part, threshold, out=buffer)
                    torch.bmm(far, buffer, out=above[level, start : start + step])  # counts: exact in float32
            doc, fired = self.rows.doc, above[1:, :, 0].sum(-1, dtype=torch.float64).T
            self.data[f"duty_{at(key)}"][doc] += above[0, :, 0].to(torch.int16)
            self.data[f"fired_{at(key)}"][doc, : fired.shape[1]] += fired

        return add


def far_sums(
    x: Float[Tensor, "batch pos width"], far: Float[Tensor, "batch pos"]
) -> Float[Tensor, "batch width"]:
    """Sum over the positions where ``far`` is 1, by row: float32 within blocks of 16, float64 across them."""
    batch, pos, width = x.shape
    blocks = torch.bmm(far.reshape(-1, 1, BLOCK), x.reshape(-1, BLOCK, width))
    return blocks.view(batch, pos // BLOCK, width).double().sum(1)


def inverse(activate: Callable[[Tensor], Tensor], level: float) -> float:
    """The pre-activation whose post-activation is ``level > 0``: every activation here grows from 0 to above it.

    Infinite for one that never gets there (a sigmoid gate above 1).
    """

    def above(z: float) -> bool:
        return float(activate(torch.full((1, 1, 1), z, dtype=torch.float64))) > level

    low, high = 0.0, 64.0
    if not above(high):
        return float("inf")
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if above(middle) else (middle, high)
    return high


@torch.no_grad()
def raise_overflow(reader: Reader, rows: Rows) -> None:
    """Say where numbers stopped being finite first: run the batch again, counting.

    Raises:
        UserError: always in float16, whose range is the user's choice.
        SatlensError: always in other precisions.
    """
    counts: list[tuple[int, str, int]] = []

    def counter(role: str, layer: int) -> Callable[[Tensor], None]:
        def count(tensor: Tensor) -> None:
            if bad := int((~torch.isfinite(tensor[rows.real])).sum()):
                counts.append((layer, role, bad))

        return count

    reader.run(rows.input_ids, [(r, at, counter(r, at)) for r, sites in reader.sites.items() for at in sites])
    dtype = str(next(reader.model.parameters()).dtype).removeprefix("torch.")
    if not counts:
        raise SatlensError(f"{reader.name}: sums overflowed, though no value of the batch is infinite")
    layer, role, bad = counts[0]
    total = sum(count for _, _, count in counts)
    words = (
        f"{reader.name}: {bad} values of {role} in layer {layer} are not finite in {dtype} ({total} at all sites of "
        "the batch), so no mean exists"
    )
    if dtype == "float16":
        raise UserError(f"{words}: run it in float32 or bfloat16")
    raise SatlensError(f"{words}: its weights are damaged, or made for another precision")


def at(key: Key) -> str:
    """The key as it stands in names of sums."""
    return f"{key[0]}_{key[1]}"
