"""Task lists, local copies, retrieval prompts, scores, and gates by span: what needs no harness."""

import json
import math
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch

from analyses.figures import eval as drawn
from analyses.figures import retrieval as drawn_retrieval
from satlens.bootstrap import document_weights
from satlens.checkpoint import load_model, load_tokenizer
from satlens.cli import main
from satlens.errors import UserError
from satlens.evaluation import cloze, data, scores, spans, tasks
from satlens.evaluation.cloze import Item
from satlens.evaluation.span_tables import difference
from satlens.run import open_run, verify
from tests.tiny import plain_nll, write_pair

WHOLE = "the gate opens when old values are and closes".split()
"""Words of one token each: the loops below tell spans apart by whole words."""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A tiny pair (context 32), and a local copy of SQuAD with ten short items."""
    folder = tmp_path_factory.mktemp("evaluation")
    rng = np.random.default_rng(0)
    documents = []
    for _ in range(10):
        words = list(rng.choice(WHOLE, 6))
        context = " ".join(words)
        documents.append({"text": f"{context}\nwhich?", "context": context, "value": words[2]})
    write(folder / "copies" / "squad.jsonl", documents)
    return SimpleNamespace(folder=folder, copies=folder / "copies", documents=documents, **write_pair(folder))


def write(path, documents):
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(d) + "\n" for d in documents), encoding="utf-8")
    return path


# tasks and their data


def test_the_sets_are_the_papers():
    assert [t.name for t in tasks.named(("zero-shot",))] == (
        "wikitext lambada piqa hellaswag winogrande arc-easy arc-challenge siqa boolq".split()
    )
    assert [t.name for t in tasks.named(("retrieval",))] == "triviaqa swde squad nq fda drop".split()
    assert tasks.named(("drop", "retrieval"))[0].name == "drop"
    assert len(tasks.named(("drop", "retrieval"))) == 6


def test_an_unknown_task_names_its_neighbour():
    with pytest.raises(UserError, match="no task 'hellswag'; did you mean hellaswag"):
        tasks.named(("hellswag",))


def test_jsonl_and_parquet_copies_are_the_same(tmp_path):
    documents = [{"text": "a b", "extra": 1}, {"text": "c d", "extra": 2}]
    write(tmp_path / "lambada.jsonl", documents)
    (tmp_path / "other").mkdir()
    pd.DataFrame(documents).to_parquet(tmp_path / "other" / "lambada.parquet")
    found = [
        data.local_documents(tasks.TASKS["lambada"], folder)[0] for folder in (tmp_path, tmp_path / "other")
    ]
    assert found[0] == found[1] == documents


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "holds no documents"),
        ("{", r"lambada.jsonl:1: not JSON"),
        ("[1]", r"lambada.jsonl:1: expected one JSON object a line, found list"),
        ('{"text": "a"}\n{"txt": "b"}', r"document 2: lacks text; lambada needs text"),
    ],
)
def test_a_bad_copy_is_named_with_its_line(tmp_path, content, words):
    (tmp_path / "lambada.jsonl").write_text(content)
    with pytest.raises(UserError, match=words):
        data.local_documents(tasks.TASKS["lambada"], tmp_path)


def test_a_missing_copy_is_unavailable_and_a_missing_folder_a_mistake(tmp_path):
    with pytest.raises(data.Unavailable, match=r"no piqa.jsonl or piqa.parquet"):
        data.local_documents(tasks.TASKS["piqa"], tmp_path)
    with pytest.raises(UserError, match="no folder") as error:
        data.local_documents(tasks.TASKS["piqa"], tmp_path / "no")
    assert not isinstance(error.value, data.Unavailable)


def test_a_hub_that_cannot_be_reached_names_the_set_and_is_asked_no_more(monkeypatch):
    import datasets
    import huggingface_hub.constants

    def fail(*_, **__):
        raise ConnectionError("no route")

    for place in (datasets.config, huggingface_hub.constants):
        monkeypatch.setattr(place, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets, "load_dataset", fail)
    with pytest.raises(
        data.Unavailable, match=r"hazyresearch/based_drop cannot be fetched or read \(no route\)"
    ):
        data.hub_documents(tasks.TASKS["drop"])
    assert datasets.config.HF_HUB_OFFLINE and huggingface_hub.constants.HF_HUB_OFFLINE


# prompts


def test_prompts_of_both_kinds_of_data_set():
    question = {
        "context": "[PAR] It rains in Rome. The city is",
        "question": "The city is",
        "answers": ["Rome"],
    }
    prompt = {"text": " Name: Ann\nAge: 30\nName:", "value": " Ann "}
    first, second = cloze.items_of([question, prompt])
    assert first.prompt == "It rains in Rome. The city is" and first.cue == ". The city is"
    assert (second.context, second.cue, second.answers) == ("Name: Ann\nAge: 30", "\nName:", ("Ann",))


def test_answers_of_one_character_are_left_out_as_in_the_protocol():
    items = cloze.items_of([{"text": "a 2", "value": "2"}, {"text": "b 23", "value": "23"}])
    assert [item.number for item in items] == [1]
    with pytest.raises(UserError, match="2 characters"):
        cloze.items_of([{"text": "a", "value": "2"}])


@pytest.mark.parametrize("at", [0, 30, 99])
def test_a_long_context_is_cut_around_its_answer(place, at):
    tokenizer = load_tokenizer(place.SATFormer)
    words = ["the"] * 100
    words[at] = "values"
    item = Item(context=" ".join(words), cue=" which?", answers=("Values",))
    fitted = cloze.fit(item, tokenizer, 32, after=4)
    size = len(tokenizer(fitted.prompt, add_special_tokens=False)["input_ids"])
    assert "values" in fitted.context and fitted.cue == item.cue
    assert size + 4 <= 32 and fitted.context in item.context
    before = fitted.context.split().index("values")
    assert before == min(at, (32 - 4 - len(tokenizer(item.cue, add_special_tokens=False)["input_ids"])) // 2)


def test_what_fits_is_not_touched_and_what_never_fits_is_a_mistake(place):
    tokenizer = load_tokenizer(place.SATFormer)
    item = Item(context="the gate", cue=" opens", answers=("gate",))
    assert cloze.fit(item, tokenizer, 32, after=4) is item
    with pytest.raises(UserError, match=r"document 1: its cue .* do not fit a context of 5"):
        cloze.fit(item, tokenizer, 5, after=4)


def test_contains_ignores_case_and_reads_no_pattern():
    assert cloze.contains("It is ROME, I think", ["rome"]) == 1
    assert cloze.contains("aab", ["a.b"]) == 0
    assert cloze.contains("x", ["y", "X"]) == 1


# scores


def test_standard_error_of_an_accuracy_is_binomial_and_its_interval_wilsons():
    right = np.array([1.0] * 30 + [0.0] * 70)
    table = pd.DataFrame({"task": "t", "doc": range(100), "metric": "acc", "value": right, "weight": 1.0})
    row = scores.summarise(table, {"acc": 0.3}, 0.25, 200, 0).iloc[0]
    assert row["stderr"] == pytest.approx(math.sqrt(0.3 * 0.7 / 99))
    # solutions of |p - share| = z sqrt(p (1 - p) / n): Wilson's definition
    for end in (row["low"], row["high"]):
        assert abs(end - 0.3) == pytest.approx(1.959964 * math.sqrt(end * (1 - end) / 100))
    assert row["chance"] == 0.25


def test_a_task_nobody_solved_still_has_an_interval():
    table = pd.DataFrame({"task": "t", "doc": range(20), "metric": "contains", "value": 0.0, "weight": 1.0})
    row = scores.summarise(table, {"contains": 0.0}, None, 200, 0).iloc[0]
    assert row["low"] == 0 and row["high"] == pytest.approx(1.959964**2 / (20 + 1.959964**2))


def test_perplexities_weigh_documents_by_their_words():
    table = pd.DataFrame(
        {"task": "t", "doc": [0, 1], "metric": "word_perplexity", "value": [-6.0, -2.0], "weight": [2.0, 2.0]}
    )
    assert scores.summarise(table, {"word_perplexity": math.exp(2)}, None, 200, 0).iloc[0][
        "value"
    ] == pytest.approx(math.exp(2))
    bits = table.assign(metric="bits_per_byte")
    assert scores.summarise(bits, {"bits_per_byte": 2 / math.log(2)}, None, 200, 0).iloc[0][
        "high"
    ] > 2 / math.log(2)


# figures


def score_rows(*rows):
    columns = ["task", "metric", "value", "low", "high", "chance", "n_documents"]
    return pd.DataFrame(rows, columns=columns).astype({"n_documents": "Int64"})


def test_scores_are_drawn_beside_guessing_and_rows_without_a_score_are_not():
    table = score_rows(
        ("piqa", "acc", 0.5, 0.4, 0.6, 0.5, 90),
        ("piqa", "acc_norm", 0.55, 0.45, 0.65, 0.5, 90),
        ("squad", "contains", 0.1, 0.0, 0.2, None, 80),
        ("wikitext", "word_perplexity", 40.0, 30.0, 50.0, None, 60),
        ("boolq", None, None, None, None, None, None),
    )
    fig = drawn.accuracy({"scores": table}, {"model": "M", "limit": 90})
    found = {trace.name: list(trace.x) for trace in fig.data}
    assert found == {
        "accuracy": [0.5],
        "accuracy, likelihood per byte": [0.55],
        "answer generated": [0.1],
        "guessing": [0.5],
    }
    assert list(fig.layout.yaxis.ticktext) == ["piqa", "squad"]
    assert "170 documents · first 90 of each task only" in fig.layout.title.subtitle.text
    (points,) = drawn.perplexity({"scores": table}, {"model": "M"}).data
    assert list(points.x) == [40.0] and list(points.error_x.array) == [10.0]


# spans and the verb


def test_spans_of_an_item_are_where_its_words_stand(place):
    tokenizer = load_tokenizer(place.SATFormer)
    item = Item(context="the gate opens the gateway", cue="\nwhich?", answers=("gate",))
    rows = spans.rows_of([item], tokenizer, 40)
    words = {name: "" for name in spans.SPANS}
    for token, span in zip(rows.ids[0], rows.span[0], strict=True):
        words[spans.SPANS[span]] += tokenizer.convert_ids_to_tokens(int(token))
    assert words["answer"] == "▁gate" and words["mention"] == "▁gate"
    assert words["context"] == "▁the▁opens▁the▁gateway" and "which" in words["rest"]


def test_items_without_their_answer_in_the_context_are_left_out(place):
    tokenizer = load_tokenizer(place.SATFormer)
    items = [
        Item(context="the gate", cue=" is", answers=(a,), number=n) for n, a in enumerate(("gate", "later"))
    ]
    rows = spans.rows_of(items, tokenizer, 32)
    assert (rows.numbers, rows.n_left_out) == ((0,), 1)
    with pytest.raises(UserError, match="none of 1 items has its answer"):
        spans.rows_of(items[1:], tokenizer, 32)


def test_bos_belongs_to_no_span(place):
    tokenizer = load_tokenizer(place.SATFormer)
    rows = spans.rows_of([Item(context="the gate", cue=" is", answers=("gate",))], tokenizer, 32, bos=1)
    (batch,) = rows.batches(2)
    assert rows.ids[0, 0] == 1 and rows.span[0, 0] == spans.OUTSIDE
    assert not batch.text[0, 0] and batch.scored[0, 0] and not batch.scored[0, -1]


def retrieve(place, capsys, *more):
    argv = ["retrieval", str(place.SATFormer), "--offline-dir", str(place.copies), "--resamples", "200"]
    code = main([*argv, "--runs", str(place.folder / "runs"), *more])
    out = capsys.readouterr()
    assert code == 0, out.err
    return open_run(out.out.strip())


def slowly(place, edit=None):
    """Summed alpha ``[scored item, span, layer]``, NLL and counts ``[scored item, span]`` by a loop over positions."""
    tokenizer, model = load_tokenizer(place.SATFormer), load_model(place.SATFormer)
    alphas = {}
    for n, layer in enumerate(model.model.layers):
        if n:
            gate = layer.attn.value_residual_mixing.gate

            def hook(module, inputs, out, n=n):
                alphas[n - 1] = out[0].double()
                return out if edit is None else edit(n, out)

            gate.register_forward_hook(hook)
    gates, nll = np.zeros((10, 4, 3)), np.zeros((10, 4))
    n_read, n_predicted = np.zeros((10, 4)), np.zeros((10, 4))
    for i, document in enumerate(place.documents):
        text, answer = document["text"], " " + document["value"]
        coded = tokenizer(text + answer, add_special_tokens=False, return_offsets_mapping=True)
        losses = plain_nll(model, torch.tensor([coded["input_ids"]]))[0]
        for t, (start, end) in enumerate(coded["offset_mapping"]):
            word = document["context"][start:end].strip() if end <= len(document["context"]) else ""
            span = 0 if end > len(text) else 3 if not word else 1 if word == document["value"] else 2
            gates[i, span] += [float(alphas[n][t].mean()) for n in range(3)]
            n_read[i, span] += 1
            if t:
                nll[i, span] += float(losses[t - 1])
                n_predicted[i, span] += 1
    return gates, nll, n_read, n_predicted


def test_retrieval_equals_a_plain_loop_over_items_and_positions(place, capsys):
    run = retrieve(place, capsys)
    assert verify(run) == [] and set(run.figures) == {"gates", "effects"}
    gates, nll, n_read, n_predicted = slowly(place)
    scored = [i for i in range(10) if i % 5 != 4]
    table = run.tables["nll_by_item"].pivot(index="document", columns="span", values=["clean", "n_tokens"])
    np.testing.assert_allclose(table["clean"][list(spans.SPANS)], nll[scored], atol=2e-5)
    np.testing.assert_array_equal(table["n_tokens"][list(spans.SPANS)], n_predicted[scored])
    stored = run.tensors["gates_by_item"]
    np.testing.assert_allclose(stored["sum"].mean(-1), gates[scored], atol=1e-5)
    np.testing.assert_array_equal(stored["count"], n_read[scored])
    means = gates[scored].sum(0) / n_read[scored].sum(0)[:, None]
    for row in run.tables["gates"].itertuples():
        assert row.mean == pytest.approx(means[spans.SPANS.index(row.span), row.layer - 1], abs=1e-6)
        assert row.low <= row.mean <= row.high


def test_effects_are_those_of_zero_and_calibrated_gates(place, capsys):
    run = retrieve(place, capsys)
    gates, clean, n_read, counts = slowly(place)
    scored, calibrating = [i for i in range(10) if i % 5 != 4], [4, 9]
    constant = gates[calibrating].sum((0, 1)) / n_read[calibrating].sum()
    edits = {
        "all zero": lambda n, out: torch.zeros_like(out),
        "all mean": lambda n, out: torch.full_like(out, constant[n - 1]),
        "mean 2": lambda n, out: torch.full_like(out, constant[1]) if n == 2 else out,
    }
    found = run.tables["effects"].set_index(["condition", "span"])["delta_nll"]
    assert (found["clean"] == 0).all()
    assert run.tables["effects"]["condition"].nunique() == 6
    deltas = {}
    for name, edit in edits.items():
        nll = slowly(place, edit)[1]
        for place_, span in enumerate(spans.SPANS):
            delta = (nll - clean)[scored, place_].sum() / counts[scored, place_].sum()
            deltas[name, span] = delta
            assert found[name, span] == pytest.approx(delta, abs=1e-5)
    contrasts = run.tables["effect_contrasts"].set_index(["condition", "contrast"])["delta_nll"]
    for name in edits:
        expected = deltas[name, "answer"] - deltas[name, "context"]
        assert contrasts[name, "answer - context"] == pytest.approx(expected, abs=2e-5)
        lost = found[name, "answer"] - found[name, "answer without context"]
        assert contrasts[name, "answer - answer without context"] == pytest.approx(lost, abs=1e-9)


def test_the_answer_without_context_is_the_cue_and_the_answer_alone(place, capsys):
    run = retrieve(place, capsys)
    tokenizer, model = load_tokenizer(place.SATFormer), load_model(place.SATFormer)
    table = run.tables["nll_by_item"]
    for row in table[table["span"] == "answer without context"].itertuples():
        value = place.documents[row.document]["value"]
        ids = tokenizer(f"which? {value}", add_special_tokens=False)["input_ids"]
        losses = plain_nll(model, torch.tensor([ids]))[0]
        assert row.clean == pytest.approx(float(losses[-row.n_tokens :].sum()), abs=1e-5)


def test_the_figures_of_a_run_show_its_tables(place, capsys):
    run = retrieve(place, capsys)
    info = run.manifest.summary
    gates, effects = (drawn_retrieval.FIGURES[name](run.tables, info) for name in ("gates", "effects"))
    curve = next(trace for trace in gates.data if trace.name == "answer" and trace.xaxis == "x")
    table = run.tables["gates"]
    assert list(curve.y) == table.loc[table["span"] == "answer", "mean"].tolist()
    table = run.tables["effects"]
    lost = table[(table["span"] == "answer") & (table["condition"] != "clean")]["delta_nll"].tolist()
    assert list(next(trace for trace in effects.data if trace.name == "answer").y) == lost
    assert list(effects.layout.xaxis.ticktext)[:3] == ["all<br>zero", "all<br>mean", "layer 1<br>mean"]
    assert all(
        "items" in fig.layout.title.subtitle.text and len(fig.layout.meta["caption"]) > 60
        for fig in (gates, effects)
    )


def test_batch_size_changes_no_retrieval_number(place, capsys):
    first, second = (retrieve(place, capsys, "--batch-size", size) for size in ("1", "8"))
    for name in ("gates", "effects", "effect_contrasts"):
        pd.testing.assert_frame_equal(first.tables[name], second.tables[name], atol=1e-5)


def test_a_difference_of_means_is_paired_on_items():
    rng = np.random.default_rng(1)
    hard, counts = rng.normal(0, 10, 50), np.ones(50)
    estimate, low, high = difference(hard + 1, hard, counts, counts, document_weights(50, 300))
    assert (estimate, low, high) == pytest.approx((1, 1, 1))


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("retrieval", "transformer", "--offline-dir", "copies"), "has no gates to measure"),
        (("retrieval", "satformer", "--offline-dir", "copies", "--task", "nq"), "no nq.jsonl or nq.parquet"),
        (("retrieval", "satformer", "--offline-dir", "missing"), "no folder"),
        (("retrieval", "satformer", "--offline-dir", "copies", "--items", "-1"), "0 means all"),
        (("retrieval", "satformer", "--offline-dir", "copies", "--window", "1"), "use at least 2"),
        (("eval", "satformer", "--offline-dir", "copies", "--window", "1"), "use at least 2"),
        (("eval", "satformer", "--offline-dir", "copies", "--limit", "0"), "use at least 1"),
        (("retrieval", "satformer", "--offline-dir", "long"), "longer than the model's context"),
        (("retrieval", "satformer", "--offline-dir", "bad"), "document 1: lacks value; squad needs"),
    ],
)
def test_a_users_mistake_is_one_line_and_exit_code_2(place, capsys, tmp_path, argv, words):
    write(place.folder / "long" / "squad.jsonl", [{"text": "the gate\n" + "opens " * 60, "value": "gate"}])
    write(place.folder / "bad" / "squad.jsonl", [{"text": "the gate"}])
    model, folder = place.folder / argv[1], place.folder / argv[3]
    code = main([argv[0], str(model), argv[2], str(folder), *argv[4:], "--runs", str(tmp_path)])
    out = capsys.readouterr()
    assert (code, out.out) == (2, "") and words in out.err
    assert out.err.strip().count("\n") == 0 and not list(tmp_path.iterdir())


def test_eval_without_the_harness_says_how_to_get_it(place, capsys, monkeypatch, tmp_path):
    import importlib.util

    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name == "lm_eval" else real(name, *a)
    )
    code = main(["eval", str(place.SATFormer), "--tasks", "piqa", "--runs", str(tmp_path)])
    out = capsys.readouterr()
    assert code == 2 and "pip install 'satlens[eval]'" in out.err and out.err.count("\n") == 1
    assert not list(tmp_path.iterdir())
