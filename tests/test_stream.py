"""One pass, many conditions: each equals the slow way of doing it alone."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from satlens.accumulators import GateSample, GateStatistics, LensNll, NllByDocument
from satlens.checkpoint import load_bridge
from satlens.errors import SatlensError
from satlens.hf import MODELS
from satlens.interventions import INTERVENTIONS, Calibration, Edit, zero
from satlens.stream import Condition, hooked, nll_of, stream
from satlens.tokens import Layout, batches, corpus_from_documents
from tests.conftest import tiny_model
from tests.tiny import plain_nll

EOS = 2


@pytest.fixture(scope="module")
def world():
    """A tiny SATFormer behind a bridge, its untouched double, and five unequal documents."""
    model, double = tiny_model(), tiny_model()
    bridge, sites = load_bridge(model)
    rng = torch.Generator().manual_seed(5)
    docs = [torch.randint(3, 53, (n,), generator=rng).tolist() for n in (9, 14, 3, 21, 1)]
    corpus = corpus_from_documents(docs)
    shape = (sites.n_layers, sites.n_kv_heads)
    mean = torch.rand(shape, generator=rng, dtype=torch.float64)
    known = Calibration(mean=mean, sample=torch.rand(*shape, 7, generator=rng))
    return SimpleNamespace(bridge=bridge, sites=sites, double=double, corpus=corpus, known=known, docs=docs)


def rows(world, batch_size=3, window=12, **options):
    return batches(world.corpus, Layout(**options), window, batch_size, eos=EOS)


def nll_condition(world, name="clean", edits=()):
    return Condition(name=name, edits=edits, accumulators=(NllByDocument(world.corpus.n_documents),))


def by_document_slowly(world, run):
    """Sum of float64 NLL per document from ``run(ids) -> logits``, one row at a time, no batching or chunks."""
    total = torch.zeros(world.corpus.n_documents, dtype=torch.float64)
    for batch in rows(world, batch_size=1):
        ids = batch.input_ids
        nll = -run(ids).double().log_softmax(-1)[:, :-1].gather(-1, ids[:, 1:, None]).squeeze(-1)
        for t in range(ids.shape[1] - 1):
            if batch.scored[0, t]:
                total[batch.doc[0, t + 1]] += nll[0, t]
    return total


def test_clean_nll_equals_full_logits_of_the_untouched_model(world):
    clean = nll_condition(world)
    stream(world.bridge, world.sites, rows(world), [clean])
    with torch.no_grad():
        expected = by_document_slowly(world, lambda ids: world.double(ids).logits)
    torch.testing.assert_close(clean.accumulators[0].nll, expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize("kind", INTERVENTIONS)
@pytest.mark.parametrize("layer", [1, 3])
def test_each_ablation_equals_a_plain_loop_over_hooks(world, kind, layer):
    edit = INTERVENTIONS[kind](layer, None, world.known, 0)
    conditions = [nll_condition(world), nll_condition(world, kind, (edit,))]
    stream(world.bridge, world.sites, rows(world), conditions)
    name = world.sites.name("gate", layer)
    total = torch.zeros(world.corpus.n_documents, dtype=torch.float64)
    for batch in rows(world, batch_size=1):

        def replace(alpha, hook=None, batch=batch):
            return edit.apply(alpha, batch)

        with torch.no_grad():
            logits = world.bridge.run_with_hooks(batch.input_ids, fwd_hooks=[(name, replace)]).double()
        nll = -logits.log_softmax(-1)[:, :-1].gather(-1, batch.input_ids[:, 1:, None]).squeeze(-1)
        for t in range(batch.input_ids.shape[1] - 1):
            if batch.scored[0, t]:
                total[batch.doc[0, t + 1]] += nll[0, t]
    torch.testing.assert_close(conditions[1].accumulators[0].nll, total, rtol=0, atol=2e-5)


def test_zero_at_every_layer_equals_the_same_weights_as_a_transformer(world):
    edits = tuple(zero(n, None, world.known, 0) for n in world.sites.layers("gate"))
    shut = nll_condition(world, "shut", edits)
    stream(world.bridge, world.sites, rows(world), [nll_condition(world), shut])
    config = {k: v for k, v in world.double.config.to_dict().items() if "value_residual" not in k}
    twin = MODELS["transformer"](
        MODELS["transformer"].config_class(**{**config, "model_type": "transformer"})
    ).eval()
    twin.load_state_dict({k: v for k, v in world.double.state_dict().items() if "value_residual" not in k})
    with torch.no_grad():
        expected = by_document_slowly(world, lambda ids: twin(ids).logits)
    torch.testing.assert_close(shut.accumulators[0].nll, expected, rtol=0, atol=2e-5)


def test_a_gate_that_is_always_zero_has_a_delta_of_exactly_zero():
    model = tiny_model()
    with torch.no_grad():
        model.model.layers[2].attn.value_residual_mixing.alpha_proj.weight.zero_()
    bridge, sites = load_bridge(model)
    corpus = corpus_from_documents([list(range(3, 30))])
    known = Calibration(mean=torch.zeros(4, 2), sample=torch.zeros(4, 2, 3))
    made = [
        Condition(
            name=str(n),
            edits=() if n is None else (zero(n, None, known, 0),),
            accumulators=(NllByDocument(1),),
        )
        for n in (None, 2, 3)
    ]
    stream(bridge, sites, batches(corpus, Layout(eos=False), 16, 2), made)
    clean, shut, other = (float(c.accumulators[0].nll) for c in made)
    assert shut == clean
    assert other != clean


def test_an_edit_leaves_everything_before_its_layer_untouched(world):
    seen = {}

    def keep(name):
        return lambda tensor, hook=None: seen.setdefault(name, []).append(tensor.clone()) and None

    ids = torch.tensor([world.docs[3]])
    names = [world.sites.name("resid_pre", n) for n in range(4)]
    shut = (world.sites.name("gate", 2), lambda tensor, hook=None: torch.zeros_like(tensor))
    with torch.no_grad(), hooked(world.bridge, [(n, keep(n)) for n in names]):
        world.bridge(ids)
        with hooked(world.bridge, [shut]):
            world.bridge(ids)
    same = [torch.equal(*seen[name]) for name in names]
    assert same == [True, True, True, False]


def test_answers_do_not_depend_on_batch_size_or_company(world):
    edit = INTERVENTIONS["resample"](1, None, world.known, 3)
    results = []
    for size, extra in ((1, ()), (4, ()), (2, (zero(3, None, world.known, 0),))):
        made = [nll_condition(world), nll_condition(world, "a", (edit,))]
        if extra:
            made.insert(1, nll_condition(world, "b", extra))
        stream(world.bridge, world.sites, rows(world, batch_size=size), made)
        results.append(made[-1].accumulators[0].nll)
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=2e-5)
    torch.testing.assert_close(results[0], results[2], rtol=0, atol=2e-5)


def test_merged_shares_equal_one_process(world):
    def run(rank, n):
        kept = (NllByDocument(5), GateStatistics(5, world.sites))
        rows_here = batches(world.corpus, Layout(), 12, 2, eos=EOS, rank=rank, world=n)
        stream(world.bridge, world.sites, rows_here, [Condition(name="clean", accumulators=kept)])
        return kept

    whole, parts = run(0, 1), [run(r, 3) for r in range(3)]
    for mine, *others in zip(*parts, strict=True):
        for other in others:
            mine.merge(other)
    torch.testing.assert_close(parts[0][0].nll, whole[0].nll, rtol=0, atol=2e-5)
    for name in ("token_sum", "doc_sum", "doc_closed", "histogram", "token_count"):
        torch.testing.assert_close(getattr(parts[0][1], name), getattr(whole[1], name), rtol=0, atol=1e-5)


def test_gate_statistics_equal_a_plain_loop(world):
    stats = GateStatistics(5, world.sites)
    stream(world.bridge, world.sites, rows(world), [Condition(name="clean", accumulators=(stats,))])
    gated = world.sites.layers("gate")
    doc_sum, shut = torch.zeros(5, 3, 2, dtype=torch.float64), torch.zeros(53, 3, 2, dtype=torch.float64)
    for batch in rows(world, batch_size=1):
        alphas = {}
        hooks = [
            layer.attn.value_residual_mixing.gate.register_forward_hook(
                lambda m, i, out, n=n, alphas=alphas: alphas.__setitem__(n, out.detach())
            )
            for n, layer in enumerate(world.double.model.layers)
            if n in gated
        ]
        with torch.no_grad():
            world.double(batch.input_ids)
        for hook in hooks:
            hook.remove()
        for t in range(batch.input_ids.shape[1]):
            if batch.input_ids[0, t] != EOS:
                for at, n in enumerate(gated):
                    doc_sum[batch.doc[0, t], at] += alphas[n][0, t].double()
                    shut[batch.input_ids[0, t], at] += (alphas[n][0, t] == 0).double()
    torch.testing.assert_close(stats.doc_sum, doc_sum, rtol=0, atol=2e-5)
    assert torch.equal(stats.token_closed, shut)
    assert int(stats.doc_count.sum()) == sum(map(len, world.docs))
    in_bins = stats.histogram.sum(-1) + stats.exact_zero
    assert torch.equal(in_bins, torch.full_like(in_bins, float(stats.doc_count.sum())))


def test_lens_equals_the_final_norm_and_head_on_each_hidden_state(world):
    lens = LensNll(5, world.sites, lambda residual, batch: nll_of(world.bridge, residual, batch))
    nll = NllByDocument(5)
    stream(world.bridge, world.sites, rows(world), [Condition(name="clean", accumulators=(lens, nll))])
    double = world.double
    for layer in range(3):
        with torch.no_grad():
            expected = by_document_slowly(
                world,
                lambda ids, n=layer + 1: double.lm_head(
                    double.model.norm(double(ids, output_hidden_states=True).hidden_states[n])
                ),
            )
        torch.testing.assert_close(lens.layers[layer].nll, expected, rtol=0, atol=2e-5)
    assert torch.equal(lens.layers[3].nll, nll.nll)


def test_a_reader_in_an_edited_condition_sees_clean_layers_below_the_edit(world):
    def gates(edits):
        stats = GateStatistics(5, world.sites)
        made = [nll_condition(world), Condition(name="x", edits=edits, accumulators=(stats,))]
        stream(world.bridge, world.sites, rows(world), made)
        return stats.doc_sum

    clean, edited = gates(()), gates((zero(2, None, world.known, 0),))
    assert torch.equal(clean[:, 0], edited[:, 0])
    assert not edited[:, 1].any()
    assert not torch.equal(clean[:, 2], edited[:, 2])


def test_an_edit_that_never_fires_fails_the_run(world):
    dead = Edit(role="gate", layer=2, apply=lambda alpha, batch: torch.zeros_like(alpha))
    condition = nll_condition(world, "dead", (dead,))
    module = world.bridge.blocks[2].attn.original_component
    kept = module.mix_values
    module.mix_values = lambda v, h, v1, coefficient: (v, v1)  # a model that no longer runs its gate
    try:
        with pytest.raises(SatlensError, match="dead: the edit of gate in layer 2 fired 0 times"):
            stream(world.bridge, world.sites, rows(world), [nll_condition(world), condition])
    finally:
        module.mix_values = kept


def test_an_edit_that_moves_no_prediction_fails_the_run():
    model = tiny_model()
    with torch.no_grad():
        for layer in model.model.layers[3:]:
            layer.attn.o_proj.weight.zero_()  # nothing attention does in the last layer can be seen
    bridge, sites = load_bridge(model)
    corpus = corpus_from_documents([list(range(3, 20))])
    known = Calibration(mean=torch.zeros(4, 2), sample=torch.zeros(4, 2, 3))
    made = [
        Condition(name=n, edits=e, accumulators=(NllByDocument(1),))
        for n, e in (("clean", ()), ("lost", (zero(3, None, known, 0),)))
    ]
    with pytest.raises(SatlensError, match="lost: the edit changed its tensor, but no prediction moved"):
        stream(bridge, sites, batches(corpus, Layout(eos=False), 32, 1), made)


def test_a_misspelt_hook_is_an_error_and_hooks_are_taken_away_after_one(world):
    with pytest.raises(SatlensError, match="no hook point"), hooked(world.bridge, [("blocks.0.nope", print)]):
        pass
    with (
        pytest.raises(ZeroDivisionError),
        hooked(world.bridge, [(world.sites.name("gate", 1), lambda t, hook: 1 / 0)]),
    ):
        world.bridge(torch.tensor([[3, 4]]))
    assert not [name for name, point in world.bridge.hook_dict.items() if point.fwd_hooks]


def test_the_pass_ends_early_when_told_to(world):
    seen = []
    condition = nll_condition(world)
    stream(
        world.bridge,
        world.sites,
        rows(world, 1),
        [condition],
        lambda batch: seen.append(batch) or len(seen) < 2,
    )
    assert len(seen) == 2
    assert 0 < condition.accumulators[0].count.sum() < sum(map(len, world.docs)) - 5


def test_an_nll_that_is_not_a_number_is_named(world):
    shut = (world.sites.name("resid_post", 3), lambda tensor, hook=None: tensor * float("nan"))
    with hooked(world.bridge, [shut]), pytest.raises(SatlensError, match="not a number in row"):
        stream(world.bridge, world.sites, rows(world), [nll_condition(world)])


def test_padding_content_changes_nothing_to_the_bit(world):
    from dataclasses import replace

    def run(noise):
        clean = nll_condition(world)
        made = (
            replace(b, input_ids=torch.where(b.real, b.input_ids, noise))
            for b in rows(world, 4, kind="document")
        )
        stream(world.bridge, world.sites, made, [clean])
        return clean.accumulators[0].nll

    assert torch.equal(run(torch.tensor(0)), run(torch.tensor(17)))


def test_plain_nll_helper_agrees_with_the_models_own_loss(world):
    ids = torch.tensor([world.docs[1]])
    with torch.no_grad():
        loss = world.double(ids, labels=ids).loss
    torch.testing.assert_close(plain_nll(world.double, ids).mean().float(), loss)


@pytest.mark.parametrize(("draws", "least", "most"), [(10_000, 48, 48), (12, 4, 24)])
def test_the_gate_sample_is_about_as_large_as_asked_and_real(world, draws, least, most):
    sample = GateSample(world.sites, sum(map(len, world.docs)), draws, 0)
    stream(world.bridge, world.sites, rows(world), [Condition(name="clean", accumulators=(sample,))])
    values = sample.result(4)
    assert least <= values.shape[-1] <= most
    assert not values[0].any() and values[1:].any()


@pytest.mark.parametrize("kind", ["relu", "identity"])
def test_the_histogram_equals_a_search_among_its_edges(kind):
    model = tiny_model(value_residual_gate=kind)
    bridge, sites = load_bridge(model)
    corpus = corpus_from_documents([list(range(3, 40))])
    stats, sample = GateStatistics(1, sites), GateSample(sites, 37, 10_000, 0)
    kept = (stats, sample)
    made = batches(corpus, Layout(eos=False), 16, 2)
    stream(bridge, sites, made, [Condition(name="clean", accumulators=kept)])
    alpha = sample.result(4)[1:]  # every position, layer by layer
    edges = stats.edges
    for layer in range(3):
        for head in range(2):
            values = alpha[layer, head]
            values = values[values != 0].clamp(edges[0], edges[-1] * 0.999)
            expected = torch.histogram(values, edges).hist
            assert torch.equal(stats.histogram[layer, head].float(), expected)


@pytest.mark.parametrize("fails", [False, True])
def test_a_pass_leaves_the_models_own_linear_maps_behind(world, fails):
    def on_batch(batch):
        return 1 / 0 if fails else False

    with pytest.raises(ZeroDivisionError) if fails else nullcontext():
        stream(world.bridge, world.sites, rows(world), [nll_condition(world)], on_batch)
    replaced = [m for m in world.bridge.original_model.modules() if "forward" in vars(m)]
    assert not [m for m in replaced if isinstance(m, torch.nn.Linear)]
