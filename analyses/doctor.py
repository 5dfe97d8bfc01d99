"""Can the numbers of this model be trusted: every site is live, edits undo, batches and padding do not matter.

Each check says what was found and what was allowed; one failed check makes the command fail (exit code 1), after the
run has been written.

Examples:
    satlens doctor reference-satformer
    satlens doctor path/to/final --device cuda
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
import tyro

from satlens.errors import SatlensError
from satlens.reading import Reading, Subject, data_facts, open_subject, open_text
from satlens.run import start_run

# nats or logits; kernels sum in another order for another number of rows
ROUNDING = {"float32": 1e-4, "float16": 0.1, "bfloat16": 0.5}


@dataclass(frozen=True, kw_only=True)
class Config:
    """Flags of `satlens doctor`."""

    model: tyro.conf.Positional[str] = "reference-satformer"
    """A checkpoint folder, or one of reference-satformer and reference-transformer."""
    reading: Annotated[Reading, tyro.conf.arg(name="")] = field(default_factory=lambda: Reading(tokens=2000))
    """Text and machine settings."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One check: what was looked at, what was found, and the most that was allowed."""

    check: str
    found: float
    allowed: float
    detail: str

    @property
    def passed(self) -> bool:
        """Not a number never passes."""
        return self.found <= self.allowed


def run(config: Config) -> Path:
    """Examine one model; returns the run directory.

    Raises:
        SatlensError: a check failed (its finding is in the run).
    """
    subject = open_subject(config.model, config.reading)
    corpus = open_text(subject, config.reading)
    out = start_run(config.reading.runs, "doctor", config, sys.argv[1:])
    findings = [finding for check in CHECKS for finding in check(subject, corpus)]
    table = pd.DataFrame([{**vars(f), "passed": f.passed} for f in findings])
    out.table("checks", table)
    failed = [f for f in findings if not f.passed]
    summary = {"model": subject.name, "n_checks": len(findings), "n_failed": len(failed)}
    path = out.finish(summary, model=subject.facts, data=data_facts(subject, corpus, config.reading))
    if failed:
        words = "; ".join(f"{f.check}: {f.found:.3g}, allowed {f.allowed:.3g}" for f in failed[:3])
        raise SatlensError(f"{len(failed)} of {len(findings)} checks failed ({words}); see {path}")
    return path


def live_sites(subject: Subject, corpus: Any) -> list[Finding]:
    """Editing each site moves the logits, and taking the edit away restores them to the bit."""
    import torch

    from satlens.stream import hooked

    ids = _ids(subject, corpus)
    before = _logits(subject, ids)
    rng = torch.Generator().manual_seed(0)
    dead, dirty, n_sites = [], [], 0
    for role in subject.sites.roles():
        for layer in subject.sites.layers(role):
            n_sites += 1
            name = subject.sites.name(role, layer)

            def nudge(tensor: Any, hook: Any = None) -> Any:
                # unequal over every axis: a constant shift can vanish in a norm or softmax
                noise = torch.rand(tensor.shape, generator=rng).to(tensor)
                return tensor + (0.5 + noise) * tensor.detach().abs().amax().clamp(min=1.0)

            with hooked(subject.bridge, [(name, nudge)]):
                moved = not torch.equal(_logits(subject, ids), before)
            dead += [] if moved else [f"{role}.{layer}"]
            dirty += [] if torch.equal(_logits(subject, ids), before) else [f"{role}.{layer}"]
    return [
        Finding(
            check="every site moves the logits", found=len(dead), allowed=0, detail=_names(dead, n_sites)
        ),
        Finding(check="logits return to the bit", found=len(dirty), allowed=0, detail=_names(dirty, n_sites)),
    ]


def v1_is_a_table(subject: Subject, corpus: Any) -> list[Finding]:
    """Layer-0 values on real text equal the table lookup of their ids."""
    from satlens.v1 import check_v1_table

    detail = "RMSNorm(E) W_v of each id against the values layer 0 computes in context"
    try:
        check_v1_table(subject.bridge, subject.sites, _ids(subject, corpus))
    except SatlensError as error:
        return [Finding(check="V1 is a table of the token id", found=1, allowed=0, detail=str(error))]
    return [Finding(check="V1 is a table of the token id", found=0, allowed=0, detail=detail)]


def identity_is_exact(subject: Subject, corpus: Any) -> list[Finding]:
    """Every intervention applied to no head leaves every NLL as it is, to the bit."""
    import torch

    from satlens.accumulators import NllByDocument
    from satlens.interventions import INTERVENTIONS, Calibration
    from satlens.stream import Condition, stream

    sites = subject.sites
    if sites.gate_kind is None:
        return []
    shape = (sites.n_layers, sites.n_kv_heads)
    known = Calibration(mean=torch.ones(shape), sample=torch.ones(*shape, 4))
    conditions = [Condition(name="clean", accumulators=(NllByDocument(corpus.n_documents),))]
    for name, make in INTERVENTIONS.items():
        edits = tuple(make(layer, (), known, 0) for layer in sites.layers("gate"))
        accumulators = (NllByDocument(corpus.n_documents),)
        conditions.append(Condition(name=name, edits=edits, accumulators=accumulators))
    stream(subject.bridge, sites, subject.batches(corpus, 4), conditions)
    clean = conditions[0].accumulators[0].nll
    return [
        Finding(
            check=f"{c.name} of no head is a no-op",
            found=float((c.accumulators[0].nll - clean).abs().max()),
            allowed=0,
            detail="largest difference of a document's NLL, nats",
        )
        for c in conditions[1:]
    ]


def batches_do_not_matter(subject: Subject, corpus: Any) -> list[Finding]:
    """NLL by document is the same one row at a time and many, and whatever ids stand in the padding."""
    import dataclasses

    import torch

    from satlens.tokens import Batch

    few, many = (_nll_by_document(subject, corpus, subject.batches(corpus, n)) for n in (1, 16))

    def scrambled() -> Any:
        rng = torch.Generator().manual_seed(1)
        for batch in subject.batches(corpus, 16):
            noise = torch.randint(subject.sites.d_vocab, batch.input_ids.shape, generator=rng)
            ids = torch.where(batch.real, batch.input_ids, noise)
            yield Batch(
                **{**{f.name: getattr(batch, f.name) for f in dataclasses.fields(batch)}, "input_ids": ids}
            )

    other = _nll_by_document(subject, corpus, scrambled())
    detail = "largest difference of a document's NLL, nats"
    return [
        Finding(
            check="batch size does not matter",
            found=_gap(few, many),
            allowed=_rounding(subject),
            detail=detail,
        ),
        Finding(check="padding content does not matter", found=_gap(many, other), allowed=0, detail=detail),
    ]


def lens_ends_at_the_model(subject: Subject, corpus: Any) -> list[Finding]:
    """The lens of the last layer, and the chunked NLL, against the model's own logits and cross-entropy."""
    import torch
    import torch.nn.functional as F

    from satlens.architectures.steps import begin, end, step
    from satlens.stream import nll_of

    batch = next(iter(subject.batches(corpus, 2))).to(next(subject.bridge.original_model.parameters()).device)
    with torch.no_grad():
        state = begin(subject.bridge, batch.input_ids, batch.padding)
        for layer in range(subject.sites.n_layers):
            state = step(subject.bridge, layer, state)
        lens = nll_of(subject.bridge, end(subject.bridge, state), batch)
        logits = subject.bridge.original_model(batch.input_ids, attention_mask=batch.padding).logits
        plain = F.cross_entropy(logits[batch.scored].double(), batch.targets(), reduction="none")
    gap = float((lens.double() - plain).abs().max())
    detail = "largest difference of one prediction's NLL from the model's own logits in float64, nats"
    return [
        Finding(
            check="the last layer's lens is the model", found=gap, allowed=_rounding(subject), detail=detail
        )
    ]


def shut_gates_make_a_transformer(subject: Subject, corpus: Any) -> list[Finding]:
    """With every gate at zero the model equals its own weights run as a plain Transformer."""
    import torch

    from satlens.checkpoint import load_model
    from satlens.hf import MODELS
    from satlens.stream import hooked

    sites = subject.sites
    if sites.architecture != "SATFormer" or sites.gate_kind is None:
        return []
    original = load_model(subject.path)  # the bridge has renamed the weights of the model in memory
    plain_class = MODELS["transformer"]
    shared = {
        k: v
        for k, v in original.config.to_dict().items()
        if not k.startswith(("value_residual", "use_value"))
    }
    twin = plain_class(plain_class.config_class(**{**shared, "model_type": "transformer"})).eval()
    twin.load_state_dict({k: v for k, v in original.state_dict().items() if "value_residual" not in k})
    ids = _ids(subject, corpus)
    twin.to(ids.device)
    shut = [
        (sites.name("gate", n), lambda tensor, hook=None: torch.zeros_like(tensor))
        for n in sites.layers("gate")
    ]
    with torch.no_grad(), hooked(subject.bridge, shut):
        gap = float((_logits(subject, ids).float() - twin(ids).logits).abs().max())
    detail = "largest logit difference"
    return [
        Finding(
            check="zero gates equal a plain Transformer", found=gap, allowed=_rounding(subject), detail=detail
        )
    ]


def nothing_is_left_behind(subject: Subject, corpus: Any) -> list[Finding]:
    """After all of the above no hook hangs on the model."""
    left = [name for name, point in subject.bridge.hook_dict.items() if point.fwd_hooks]
    return [Finding(check="no hook is left behind", found=len(left), allowed=0, detail=", ".join(left[:3]))]


CHECKS: tuple[Callable[[Subject, Any], list[Finding]], ...] = (
    live_sites,
    v1_is_a_table,
    identity_is_exact,
    batches_do_not_matter,
    lens_ends_at_the_model,
    shut_gates_make_a_transformer,
    nothing_is_left_behind,
)


def _ids(subject: Subject, corpus: Any) -> Any:
    """One short row of real text."""
    import torch

    device = next(subject.bridge.original_model.parameters()).device
    ids = corpus.document(int(corpus.lengths.argmax()))[:32]
    return torch.as_tensor(ids)[None].to(device)


def _logits(subject: Subject, ids: Any) -> Any:
    import torch

    with torch.no_grad():
        return subject.bridge(ids)


def _nll_by_document(subject: Subject, corpus: Any, batches: Any) -> Any:
    from satlens.accumulators import NllByDocument
    from satlens.stream import Condition, stream

    clean = Condition(name="clean", accumulators=(NllByDocument(corpus.n_documents),))
    stream(subject.bridge, subject.sites, batches, [clean])
    return clean.accumulators[0].nll


def _rounding(subject: Subject) -> float:
    return ROUNDING[subject.facts["precision"]]


def _gap(a: Any, b: Any) -> float:
    return float((a - b).abs().max())


def _names(bad: list[str], n: int) -> str:
    return f"{n} sites" + (f": {', '.join(bad[:5])}" if bad else "")
