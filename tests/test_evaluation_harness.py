"""Scores through lm-evaluation-harness equal scores by hand, and the model reads what it was trained to read."""

import json
import math
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch

pytest.importorskip("lm_eval")

from satlens.checkpoint import load_model, load_tokenizer
from satlens.cli import main
from satlens.errors import UserError
from satlens.evaluation import cloze, harness
from satlens.evaluation.data import Unavailable
from satlens.evaluation.tasks import SETS, TASKS
from satlens.run import open_run, verify
from tests.tiny import WORDS, write_pair

STREAM = {"kind": "stream", "bos": False, "eos": True}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A tiny pair (context 32) and copies of a choice task, a last-word task, a text task and a cloze task."""
    folder = tmp_path_factory.mktemp("harness")
    rng = np.random.default_rng(0)

    def words(n):
        return " ".join(rng.choice(WORDS, n))

    copies = {
        "piqa": [
            {"goal": words(3), "sol1": words(2), "sol2": words(5), "label": int(rng.integers(2))}
            for _ in range(12)
        ],
        "lambada": [{"text": words(9)} for _ in range(8)],
        "wikitext": [{"page": words(int(n))} for n in (5, 40, 12)],
        "squad": [
            {"text": f"{words(4)}\nof", "value": str(rng.choice(["the", "gate", "values", "re"]))}
            for _ in range(8)
        ],
    }
    (folder / "copies").mkdir()
    for name, documents in copies.items():
        lines = "".join(json.dumps(document) + "\n" for document in documents)
        (folder / "copies" / f"{name}.jsonl").write_text(lines)
    pair = write_pair(folder)
    model, tokenizer = load_model(pair["SATFormer"]), load_tokenizer(pair["SATFormer"])
    return SimpleNamespace(
        folder=folder, copies=folder / "copies", data=copies, model=model, tokenizer=tokenizer, **pair
    )


def evaluate(place, capsys, *more, model="SATFormer", tasks=("piqa", "lambada", "wikitext")):
    argv = ["eval", str(getattr(place, model)), "--tasks", *tasks, "--offline-dir", str(place.copies)]
    code = main([*argv, "--resamples", "200", "--runs", str(place.folder / "runs"), *more])
    out = capsys.readouterr()
    assert code == 0, out.err
    return open_run(out.out.strip())


def log_likelihood(place, ids, n_last):
    """Summed log-probability of the last tokens, in float64 from full logits, one row alone; and are they greedy."""
    with torch.no_grad():
        logp = place.model(torch.tensor([ids[:-1]])).logits[0].double().log_softmax(-1)[-n_last:]
    wanted = torch.tensor(ids[-n_last:])
    return float(logp.gather(1, wanted[:, None]).sum()), bool((logp.argmax(1) == wanted).all())


def encode(place, text):
    return place.tokenizer(text, add_special_tokens=False)["input_ids"]


def scored(run, task, metric):
    table = run.tables["documents"]
    return table[(table["task"] == task) & (table["metric"] == metric)].sort_values("doc")["value"].tolist()


def test_a_choice_is_the_largest_summed_log_likelihood(place, capsys):
    run = evaluate(place, capsys)
    assert verify(run) == [] and set(run.figures) == {"accuracy", "perplexity"}
    right, right_per_byte = [], []
    for document in place.data["piqa"]:
        prompt, sums, means = f"Question: {document['goal']}\nAnswer:", [], []
        for choice in (document["sol1"], document["sol2"]):
            ids = encode(place, f"{prompt} {choice}")[-33:]
            sums.append(
                log_likelihood(
                    place, ids, len(encode(place, f"{prompt} {choice}")) - len(encode(place, prompt))
                )[0]
            )
            means.append(sums[-1] / len(choice.encode()))
        right.append(float(np.argmax(sums) == document["label"]))
        right_per_byte.append(float(np.argmax(means) == document["label"]))
    assert scored(run, "piqa", "acc") == right and 0 < sum(right) < len(right)
    assert scored(run, "piqa", "acc_norm") == right_per_byte
    row = run.tables["scores"].set_index(["task", "metric"]).loc[("piqa", "acc")]
    share = np.mean(right)
    assert row["value"] == share and row["chance"] == 0.5 and row["n_documents"] == 12
    assert row["stderr"] == pytest.approx(math.sqrt(share * (1 - share) / 11))


def test_our_standard_error_is_the_harnesss_own(place):
    from lm_eval.api.metrics import mean_stderr

    from satlens.evaluation.scores import summarise

    values = [1.0, 0.0, 0.0, 1.0, 1.0]
    table = pd.DataFrame({"metric": "acc", "value": values, "weight": 1.0})
    assert summarise(table, {"acc": 0.6}, None, 200, 0).iloc[0]["stderr"] == pytest.approx(
        mean_stderr(values)
    )


def test_a_last_word_is_scored_alone_and_right_when_greedy(place, capsys):
    run = evaluate(place, capsys)
    sums, greedy = [], []
    for document in place.data["lambada"]:
        context = document["text"].rsplit(" ", 1)[0]
        ids = encode(place, document["text"])
        value, top = log_likelihood(place, ids[-33:], len(ids) - len(encode(place, context)))
        sums.append(value)
        greedy.append(float(top))
    assert scored(run, "lambada", "perplexity") == pytest.approx(sums, abs=1e-4)
    assert scored(run, "lambada", "acc") == greedy
    table = run.tables["scores"].set_index(["task", "metric"])["value"]
    assert table["lambada", "perplexity"] == pytest.approx(math.exp(-np.mean(sums)), rel=1e-4)


def test_a_text_begins_after_eos_and_is_read_in_windows_of_the_context(place, capsys):
    run = evaluate(place, capsys)
    eos, sums = place.tokenizer.eos_token_id, []
    for document in place.data["wikitext"]:
        ids = [eos, *encode(place, document["page"])]
        total = log_likelihood(place, ids[:33], min(32, len(ids) - 1))[0]
        for start in range(33, len(ids), 32):  # the harness fills the last windows with what stood before
            stop = min(start + 32, len(ids))
            total += log_likelihood(place, ids[stop - 33 : stop], stop - start)[0]
        sums.append(total)
    assert max(len(encode(place, d["page"])) for d in place.data["wikitext"]) > 33
    assert scored(run, "wikitext", "word_perplexity") == pytest.approx(sums, abs=1e-3)
    words = sum(len(d["page"].split()) for d in place.data["wikitext"])
    value = run.tables["scores"].set_index(["task", "metric"]).loc[("wikitext", "word_perplexity"), "value"]
    assert value == pytest.approx(math.exp(-sum(sums) / words), rel=1e-4)


def complete(place, prompt, n):
    """Greedy completion of a prompt without a cache, to the end of its first line."""
    ids = encode(place, prompt)
    start = len(ids)
    for _ in range(n):
        with torch.no_grad():
            ids.append(int(place.model(torch.tensor([ids])).logits[0, -1].argmax()))
        text = place.tokenizer.decode(ids[start:], skip_special_tokens=True)
        if ids[-1] == place.tokenizer.eos_token_id or "\n" in text:
            break
    return place.tokenizer.decode(ids[start:], skip_special_tokens=True).split("\n")[0]


def test_a_cloze_is_a_greedy_completion_that_contains_the_answer(place, capsys):
    run = evaluate(place, capsys, "--window", "96", tasks=("squad",))
    expected = [
        float(cloze.contains(complete(place, document["text"], cloze.GENERATED), [document["value"]]))
        for document in place.data["squad"]
    ]
    assert scored(run, "squad", "contains") == expected and 0 < sum(expected) < len(expected)


def test_the_cloze_protocol_asks_and_scores_as_the_harness_does_for_swde(place, monkeypatch):
    from datasets import Dataset, DatasetDict
    from lm_eval.tasks.swde import task as official

    documents = [{"text": " Ann is 30.\nAge: ", "value": " 30 "}, {"text": "Bo is 41.\nAge:", "value": "41"}]
    data = DatasetDict({"validation": Dataset.from_list(documents)})
    monkeypatch.setattr(official.SWDE, "download", lambda self, *_: setattr(self, "dataset", data))
    theirs = official.SWDE()
    ours = harness.build(TASKS["swde"], documents, place.tokenizer, 2048)
    for task in (theirs, ours):
        task.set_config("num_fewshot", 0)
        task.build_all_requests(rank=0, world_size=1)
    pairs = list(zip(theirs.instances, ours.instances, strict=True))
    for their, our in pairs:
        assert their.args[0] == our.args[0]
        for key in ("until", "max_gen_toks"):
            assert their.args[1][key] == our.args[1][key]
        for text in ("it is 30, so", "It is 41", "none"):
            assert theirs.process_results(their.doc, [text]) == ours.process_results(our.doc, [text])


def test_batch_size_changes_no_score(place, capsys):
    first, second = (
        evaluate(place, capsys, "--window", "96", "--batch-size", size, tasks=tuple(place.data))
        for size in ("1", "5")
    )
    pd.testing.assert_frame_equal(first.tables["documents"], second.tables["documents"], atol=1e-4)
    exact = first.tables["documents"]["metric"].isin(["acc", "acc_norm", "contains"])
    assert exact.any()
    pd.testing.assert_frame_equal(
        first.tables["documents"][exact], second.tables["documents"][exact], check_exact=True
    )


def test_nothing_stands_before_a_text_even_if_its_tokenizer_would_add_bos(place):
    from tokenizers.processors import TemplateProcessing

    eager = load_tokenizer(place.SATFormer)
    eager.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    assert eager("the gate")["input_ids"][0] == 1
    plain = harness.backend(place.model, eager, STREAM, 32, 1)
    assert plain.tok_encode("the gate") == encode(place, "the gate")
    assert plain.tok_batch_encode(["the gate"])[0][0].tolist() == encode(place, "the gate")
    assert plain.prefix_token_id == eager.eos_token_id
    with_bos = harness.backend(place.model, eager, {**STREAM, "bos": True}, 32, 1)
    assert with_bos.tok_encode("the gate") == [1, *encode(place, "the gate")]
    assert with_bos.prefix_token_id == 1
    with pytest.raises(UserError, match="trained with BOS"):
        harness.backend(place.model, place.tokenizer, {**STREAM, "bos": True}, 32, 1)


def test_a_text_that_begins_with_bos_by_layout_has_it_once(place, monkeypatch):
    from lm_eval.api.instance import Instance
    from tokenizers.processors import TemplateProcessing

    eager = load_tokenizer(place.SATFormer)
    eager.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    lm = harness.backend(place.model, eager, {**STREAM, "bos": True}, 32, 1)
    seen = []
    call = lm._model_call
    monkeypatch.setattr(
        lm, "_model_call", lambda ids, **more: seen.append(ids[0].tolist()) or call(ids, **more)
    )
    request = Instance(request_type="loglikelihood_rolling", doc={}, arguments=("the gate opens",), idx=0)
    lm.loglikelihood_rolling([request])
    assert seen == [[1, *encode(place, "the gate opens")][:-1]]


def test_what_is_too_long_loses_its_beginning_and_is_counted(place, monkeypatch):
    lm = harness.backend(place.model, place.tokenizer, STREAM, 32, 1)
    context, answer = " ".join(WORDS * 4), " gate"
    ids = encode(place, context + answer)
    n_last = len(ids) - len(encode(place, context))
    seen = []
    call = lm._model_call
    monkeypatch.setattr(
        lm, "_model_call", lambda given, **more: seen.append(given[0].tolist()) or call(given, **more)
    )
    from lm_eval.api.instance import Instance

    ((value, _),) = lm.loglikelihood(
        [Instance(request_type="loglikelihood", doc={}, arguments=(context, answer), idx=0)]
    )
    assert len(ids) > 33 and seen == [ids[-33:-1]]
    assert value == pytest.approx(log_likelihood(place, ids[-33:], n_last)[0], abs=1e-4)
    tokens, mask = lm.tok_batch_encode([context, "the"], left_truncate_len=20)
    assert tokens[0].tolist() == encode(place, context)[-20:] and mask[1].sum() == len(encode(place, "the"))
    assert lm.n_cut == 2


@pytest.mark.parametrize("name", SETS["zero-shot"])
def test_every_definition_of_the_zero_shot_set_reads_a_local_copy(place, name):
    documents = {
        "wikitext": {"page": "the gate"},
        "lambada": {"text": "the gate opens"},
        "piqa": {"goal": "a", "sol1": "b", "sol2": "c", "label": 1},
        "hellaswag": {
            "activity_label": "a",
            "ctx_a": "b",
            "ctx_b": "c",
            "endings": ["d", "e", "f", "g"],
            "label": "2",
        },
        "winogrande": {"sentence": "a _ b", "option1": "c", "option2": "d", "answer": "1"},
        "siqa": {
            "context": "a",
            "question": "b",
            "answerA": "c",
            "answerB": "d",
            "answerC": "e",
            "label": "3",
        },
        "boolq": {"passage": "a", "question": "b", "label": 0},
    }
    arc = {"question": "a", "choices": {"text": ["b", "c"], "label": ["A", "B"]}, "answerKey": "B"}
    document = documents.get(name, arc)
    assert set(TASKS[name].fields[0]) == set(document)
    built = harness.build(TASKS[name], [document], place.tokenizer, 32)
    built.build_all_requests(limit=None, rank=0, world_size=1)
    assert len(built.instances) == {"hellaswag": 4, "siqa": 3, "wikitext": 1, "lambada": 1}.get(name, 2)
    assert built.config.num_fewshot == 0


def test_a_set_that_is_not_there_is_a_row_and_the_others_run(place, capsys):
    run = evaluate(place, capsys, "--limit", "3", tasks=("piqa", "boolq"))
    rows = run.tables["scores"].set_index("task")
    assert (
        rows.loc["boolq", "status"] == "no data"
        and "no boolq.jsonl or boolq.parquet" in rows.loc["boolq", "reason"]
    )
    assert str(place.folder) not in rows.loc["boolq", "reason"]
    assert set(rows.loc["piqa", "n_documents"]) == {3} and set(rows.loc["piqa", "n_available"]) == {12}
    assert run.manifest.summary["left_out"] == ["boolq"]


def test_a_hub_that_cannot_be_reached_is_said_of_the_set(place, monkeypatch):
    import datasets

    def fail(*_, **__):
        raise FileNotFoundError("nothing there")

    monkeypatch.setattr(datasets, "load_dataset", fail)
    with pytest.raises(Unavailable, match=r"data set baber/piqa cannot be fetched or read \(nothing there\)"):
        harness.build(TASKS["piqa"], None, place.tokenizer, 32)


@pytest.mark.parametrize(
    ("tasks", "content", "words"),
    [
        (("pika",), None, "no task 'pika'; did you mean piqa?"),
        (("boolq",), None, "no task could be measured; boolq: no boolq.jsonl"),
        (("boolq",), {"passage": "a", "question": "b"}, "boolq.jsonl, document 1: lacks label"),
        (
            ("winogrande",),
            {"sentence": "no gap", "option1": "c", "option2": "d", "answer": "1"},
            "does not fit the task",
        ),
        (("lambada",), {"text": "a " + "values" * 40}, "is longer than the model's context of 32"),
        (("squad",), {"text": "a b", "value": "bb"}, "do not fit a context of 32"),
    ],
)
def test_a_users_mistake_is_one_line_and_exit_code_2(place, capsys, tmp_path, tasks, content, words):
    (tmp_path / "copies").mkdir()
    if content:
        (tmp_path / "copies" / f"{tasks[0]}.jsonl").write_text(json.dumps(content) + "\n")
    runs = tmp_path / "runs"
    argv = ["eval", str(place.SATFormer), "--tasks", *tasks, "--offline-dir", str(tmp_path / "copies")]
    code = main([*argv, "--runs", str(runs)])
    out = capsys.readouterr()
    assert (code, out.out) == (2, "") and words in out.err and not runs.exists()
    words_of_ours = [line for line in out.err.splitlines() if "it/s" not in line and line.strip()]
    assert len(words_of_ours) == 1 and words_of_ours[0].startswith("satlens:")
