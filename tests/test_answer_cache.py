"""No answer is paid for twice, whatever happens to the job or the file."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sae.cache import cached, key_of
from sae.judges import CATEGORY, PURITY, Answer, Question
from satlens.errors import UserError
from tests.fake_judge import question, token

ROOT = Path(__file__).parents[1]


class Counting:
    """A judge that notes what reaches it; what begins with "fail" is an error."""

    def __init__(self):
        self.facts, self.asked = {"judge": "counting", "model": "a"}, []

    def check(self):
        self.checked = True

    def ask(self, questions, on_answer=None):
        answers = []
        for index, asked in enumerate(questions):
            self.asked.append(asked)
            failed = asked.tokens[0].text.startswith("fail")
            value = {"error": "no"} if failed else {"score": float(len(asked.tokens)), "prompt_tokens": 7}
            answers.append(Answer(index=index, **value))
            if on_answer:
                on_answer(answers[-1])
        return answers

    def close(self):
        pass


def test_errors_are_not_kept_and_are_asked_again(tmp_path):
    judge = Counting()
    kept = cached(judge, tmp_path / "answers.jsonl")
    for _ in range(2):
        bad, good = kept.ask([question(["fail"]), question(["a", "b"])])
        assert bad.error == "no" and not bad.cached and good.score == 2
    assert [asked.tokens[0].text for asked in judge.asked] == ["fail", "a", "fail"]


def test_a_key_holds_all_an_answer_depends_on():
    base = question(["a", "b"])
    other = [
        key_of({"judge": "x", "model": "b"}, base),
        key_of({"judge": "x", "model": "a"}, question(["b", "a"])),
        key_of({"judge": "x", "model": "a"}, question(["a", "b"], CATEGORY)),
        key_of({"judge": "x", "model": "a"}, question(["a", "b", ""])),
        key_of({"judge": "x", "model": "a"}, question(["ab"])),
        key_of({"judge": "x", "model": "a"}, Question(kind=PURITY, tokens=(token("a", "▁a"), token("b")))),
    ]
    same = key_of({"model": "a", "judge": "x"}, question(["a", "b"]))
    assert key_of({"judge": "x", "model": "a"}, base) == same and len({same, *other}) == 7


@pytest.mark.parametrize("torn", [b'{"key": "abc", "sco', b"\xff\xfe", b'{"key": "' + b"x" * 10_000])
def test_a_last_line_that_was_half_written_is_cut_and_written_again(tmp_path, torn):
    path = tmp_path / "answers.jsonl"
    judge = Counting()
    cached(judge, path).ask([question(["a"]), question(["b"])])
    whole = path.read_bytes()
    path.write_bytes(whole + torn)
    cached(judge, path).ask([question(["a"]), question(["b"]), question(["c"])])
    assert len(judge.asked) == 3 and path.read_bytes().startswith(whole)
    assert all(json.loads(line) for line in path.read_text().splitlines())


def test_lines_that_are_no_answers_are_pointed_out_and_asked_again(tmp_path, capsys):
    path = tmp_path / "answers.jsonl"
    cached(Counting(), path).ask([question(["a"]), question(["b"]), question(["c"])])
    lines = path.read_text().splitlines()
    entry = json.loads(lines[1])
    strange = [{**entry, "score": value} for value in (11, True, "7", -1)] + [
        {**entry, "category": "A"},
        {},
        [],
    ]
    path.write_text("\n".join([lines[0], *map(json.dumps, strange), "what?"]) + "\n")
    judge = Counting()
    cached(judge, path).ask([question(["a"]), question(["b"]), question(["c"])])
    assert [asked.tokens[0].text for asked in judge.asked] == ["b", "c"]
    assert "8 lines of answers.jsonl are no answers" in capsys.readouterr().err


def test_two_jobs_may_share_a_file(tmp_path):
    path = tmp_path / "answers.jsonl"
    first, second = Counting(), Counting()
    one, two = cached(first, path), cached(second, path)
    one.ask([question(["a"])])
    two.ask([question(["a"]), question(["b"])])
    one.ask([question(["b"]), question(["a"])])
    assert len(first.asked) == len(second.asked) == 1


def test_a_cache_that_cannot_be_written_is_the_users_mistake(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="another --cache"):
        cached(Counting(), tmp_path / "file" / "answers.jsonl").check()


KILLED = """
import sys, time
sys.path[:0] = [{root!r}]
from pathlib import Path
from sae.cache import cached
from tests.fake_judge import question
from tests.test_answer_cache import Counting
class Slow(Counting):
    def ask(self, questions, on_answer=None):
        def slowly(answer):
            on_answer(answer)
            time.sleep(0.02)
        return super().ask(questions, slowly)
cached(Slow(), Path({path!r})).ask([question([f"w{{i}}"]) for i in range(1000)])
"""


def test_a_job_killed_half_way_asks_nothing_twice(tmp_path):
    path = tmp_path / "answers.jsonl"
    job = subprocess.Popen(
        [sys.executable, "-c", KILLED.format(root=str(ROOT), path=str(path))],
        cwd=ROOT,
        start_new_session=True,
    )
    deadline = time.monotonic() + 60
    while not (path.exists() and path.read_bytes().count(b"\n") >= 5) and time.monotonic() < deadline:
        time.sleep(0.01)
    os.killpg(job.pid, signal.SIGKILL)
    job.wait()
    done = path.read_bytes().count(b"\n")
    assert 5 <= done < 1000
    judge = Counting()
    answers = cached(judge, path).ask([question([f"w{i}"]) for i in range(1000)])
    assert len(judge.asked) == 1000 - done and sum(answer.cached for answer in answers) == done
    assert judge.asked[0].tokens[0].text == f"w{done}"
