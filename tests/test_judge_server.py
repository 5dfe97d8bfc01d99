"""A judge behind HTTP gives the right answer or says why it has none, whatever the server does."""

import email.utils
import json
import math
import sys
import time

import pytest

from sae.cache import cached
from sae.judges import CATEGORY, JudgeSettings, make_judge, server
from sae.judges.rules import Rules
from satlens.errors import SatlensError, UserError
from tests.fake_judge import DROP, HANG, PROBE, FakeJudge, as_json, completion, question, refusal, tokens_in

pytest.importorskip("openai")
PURE, MIXED = ["ing", "ed", "ness", "ly"], ["ing", " Paris", "12", "{"]


OPEN = []


@pytest.fixture(autouse=True)
def short_waits_and_no_judge_left_open(monkeypatch):
    monkeypatch.setattr(server, "FIRST_WAIT", 0.01)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    yield
    while OPEN:
        OPEN.pop().close()


def judge_at(fake, **changes):
    changes = {"timeout": 5.0, "concurrency": 8, "cache": None, **changes}
    OPEN.append(make_judge(JudgeSettings(judge="server", base_url=fake.url, **changes)))
    return OPEN[-1]


def ask(fake, questions, on_answer=None, **changes):
    return judge_at(fake, **changes).ask(questions, on_answer)


def one(fake, **changes):
    (answer,) = ask(fake, [question(PURE)], **changes)
    return answer


def test_answers_are_in_the_order_of_the_questions_whatever_the_order_of_the_replies():
    questions = [question(["ing"] * i + [" the"] * (20 - i)) for i in range(20)]
    questions += [question(PURE, CATEGORY), question(["1", "22"], CATEGORY)]
    told = []
    with FakeJudge(delay=lambda n: 0.002 * ((n * 7) % 11)) as fake:
        answers = ask(fake, questions, told.append)
    expected = Rules().ask(questions)
    assert [a.category for a in answers] == [a.category for a in expected]
    assert [a.score for a in answers[:20]] == [round(a.score) for a in expected[:20]]
    assert [a.index for a in answers] == list(range(22))
    assert sorted(told, key=lambda a: a.index) == answers and told != answers
    assert {(a.prompt_tokens, a.completion_tokens) for a in answers} == {(100, 5)}


def test_the_expected_score_is_the_mean_digit_under_their_probabilities():
    with FakeJudge() as fake:
        pure, mixed = ask(fake, [question(PURE), question(MIXED)], read="expected")
        body = fake.requests[0]
    assert body["max_tokens"] == 1 and body["top_logprobs"] == 20
    assert body["structured_outputs"] == {"choice": list("0123456789")}
    assert pure.score == pytest.approx((0.5 * 9 + 0.5 / 9 * 36) * 10 / 9)
    assert mixed.score == pytest.approx((0.5 * 2 + 0.5 / 9 * 43) * 10 / 9)
    assert math.isclose(sum(json.loads(pure.raw).values()), 1, abs_tol=1e-4)


def test_so_many_questions_are_under_way_at_once_and_no_more():
    with FakeJudge(delay=lambda n: 0.05) as fake:
        ask(fake, [question(PURE)] * 12, concurrency=3)
    assert fake.most_at_once == 3


def test_all_questions_of_a_kind_share_what_stands_before_their_tokens():
    with FakeJudge() as fake:
        ask(fake, [question(PURE), question(MIXED)], concurrency=1)
        (*shared, pure), (*also, mixed) = (body["messages"] for body in fake.requests)
    assert shared == also and len(shared) > 4
    assert pure["content"] == '⟦tokens⟧\n["ing", "ed", "ness", "ly"]\n⟦end⟧' != mixed["content"]


@pytest.mark.parametrize("as_date", [False, True])
def test_a_server_that_asks_for_silence_gets_it_from_everybody(as_date):
    def act(n, body):
        # dates have whole seconds: two ahead is at least one
        after = email.utils.formatdate(time.time() + 2, usegmt=True) if as_date else "0.4"
        return refusal(429, {"Retry-After": after}) if n == 0 else None

    with FakeJudge(act=act) as fake:
        first = ask(fake, [question(PURE)] * 3, concurrency=1)
    assert [a.score for a in first] == [10, 10, 10] and len(fake.requests) == 4
    assert fake.times[1] - fake.times[0] >= (1 if as_date else 0.4)


def test_a_silence_longer_than_a_minute_is_an_error_at_once():
    with FakeJudge(act=lambda n, body: refusal(503, {"Retry-After": "3600"})) as fake:
        answer = one(fake)
    assert len(fake.requests) == 1 and answer.score is None
    assert "HTTP 503" in answer.error and "3600" in answer.error


@pytest.mark.parametrize("status", [408, 429, 500, 502, 503, 529])
def test_a_passing_failure_is_tried_again(status):
    with FakeJudge(act=lambda n, body: refusal(status) if n < 2 else None) as fake:
        answer = one(fake)
    assert answer.score == 10 and len(fake.requests) == 3 and answer.error is None


def test_a_lasting_failure_is_an_error_after_a_bounded_number_of_attempts():
    with FakeJudge(act=lambda n, body: refusal(500, said="out of memory")) as fake:
        answer = one(fake)
    assert len(fake.requests) == server.ATTEMPTS
    assert answer.error == "HTTP 500: no" or "out of memory" in answer.error
    assert answer.score is None and answer.category is None


def test_a_bad_request_is_not_repeated():
    with FakeJudge(act=lambda n, body: refusal(400, said="prompt too long")) as fake:
        answer = one(fake)
    assert len(fake.requests) == 1 and "prompt too long" in answer.error


@pytest.mark.parametrize("mishap", [HANG, DROP])
def test_a_reply_that_does_not_come_is_asked_for_again(mishap):
    with FakeJudge(act=lambda n, body: mishap if n == 0 else None) as fake:
        answer = one(fake, timeout=0.3)
    assert answer.score == 10 and len(fake.requests) == 2


BAD_REPLIES = [
    "",
    "10",
    "Sure! 10",
    '{"score": 11}',
    '{"score": true}',
    '{"score": 7.0}',
    '{"score": "7"}',
    '{"score": 7, "why": 1}',
    '{"score": null}',
    '{"other": 7}',
    '{"score": 7',
    '{"score": NaN}',
    "[7]",
]


@pytest.mark.parametrize("reply", BAD_REPLIES)
def test_a_reply_outside_the_schema_is_an_error_and_is_kept(reply):
    with FakeJudge(act=lambda n, body: completion(body, reply)) as fake:
        answer = one(fake)
    assert answer.score is None and answer.error.startswith("the reply is not")
    assert answer.raw == reply and len(fake.requests) == server.ATTEMPTS
    assert answer.prompt_tokens == 100 * server.ATTEMPTS  # what failed was paid too


def test_an_unknown_category_is_an_error():
    with FakeJudge(act=lambda n, body: completion(body, '{"category": "Vibes"}')) as fake:
        (answer,) = ask(fake, [question(PURE, CATEGORY)])
    assert answer.category is None and answer.error and answer.raw == '{"category": "Vibes"}'


def test_a_bad_reply_may_be_followed_by_a_good_one():
    with FakeJudge(act=lambda n, body: completion(body, "?") if n == 0 else None) as fake:
        answer = one(fake)
    assert answer.score == 10 and answer.completion_tokens == 10


def test_a_reply_that_was_cut_gets_more_room_and_is_never_read():
    cut = lambda n, body: completion(body, '{"score": 1', finish="length")  # noqa: E731
    with FakeJudge(act=cut) as fake:
        answer = one(fake)
        room = [body["max_tokens"] for body in fake.requests]
    assert "cut" in answer.error and answer.raw == '{"score": 1'
    assert room == [16, 32, 64, 128, 256]
    # even where what was cut happens to be whole
    with FakeJudge(act=lambda n, body: completion(body, '{"score": 1}', finish="length")) as fake:
        assert one(fake).score is None


@pytest.mark.parametrize(
    "response",
    [
        (200, {"Content-Type": "text/html"}, b"<html>hello</html>"),
        (200, {"Content-Type": "application/json"}, b'{"choices": ['),
        (200, {"Content-Type": "application/json"}, b"null"),
        as_json(200, {"choices": []}),
        as_json(200, {"choices": [{"message": None}]}),
        as_json(200, {"error": "overloaded"}),
    ],
)
def test_what_is_no_completion_is_an_error(response):
    with FakeJudge(act=lambda n, body: response) as fake:
        answer = one(fake)
    assert answer.score is None and answer.error.startswith("the reply") and len(fake.requests) > 1


def test_a_completion_without_usage_is_an_answer_of_unknown_cost():
    with FakeJudge(act=lambda n, body: completion(body, '{"score": 3}', usage=None)) as fake:
        answer = one(fake)
    assert answer.score == 3 and answer.prompt_tokens == 0


def test_probabilities_that_are_not_about_digits_are_an_error():
    with FakeJudge(act=lambda n, body: completion(body, "Hello")) as fake:
        answer = one(fake, read="expected")
    assert answer.score is None and "probability" in answer.error


@pytest.mark.parametrize("read", ["answer", "expected"])
def test_a_judge_in_order_passes_its_check_and_then_knows_its_model(read):
    with FakeJudge(models=("small",)) as fake:
        judge = judge_at(fake, read=read)
        judge.check()
    assert judge.facts["model"] == "small" and judge.facts["root"] == "small-root"
    assert judge.facts["read"] == read and len(judge.facts["prompts"]) == 64
    json.dumps(judge.facts, allow_nan=False)


@pytest.mark.parametrize("read", ["answer", "expected"])
def test_a_server_that_ignores_what_a_reply_may_be_is_caught_before_any_work(read):
    with FakeJudge(obeys=False) as fake, pytest.raises(UserError, match=r"was told how to reply and did not"):
        judge_at(fake, read=read).check()
    assert fake.requests == []


def test_a_context_too_short_for_a_question_is_found_before_any_work():
    act = lambda n, body: refusal(400, said="max context")  # noqa: E731
    with FakeJudge(act=act) as fake, pytest.raises(UserError, match="max-model-len"):
        judge_at(fake).check()


def test_no_server_fails_before_any_work_with_the_command_that_starts_one():
    with FakeJudge() as fake:
        port = fake.url.split(":")[2].split("/")[0]
    start = time.monotonic()
    with pytest.raises(UserError) as error:
        judge_at(fake, judge_model="Qwen/Q").check()
    assert f"vllm serve Qwen/Q --port {port} --structured-outputs-config" in str(error.value)
    assert "\n" not in str(error.value) and time.monotonic() - start < 2


@pytest.mark.parametrize("status", [401, 403])
def test_a_refused_key_stops_the_job_and_is_never_shown(status, monkeypatch, tmp_path):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    with FakeJudge(act=lambda n, body: refusal(status) if n > 2 else None) as fake:
        judge = cached(judge_at(fake, concurrency=1), tmp_path / "answers.jsonl")
        with pytest.raises(UserError, match="OPENAI_API_KEY") as error:
            judge.ask([question(PURE), question(MIXED), question(["a"])])
    assert fake.keys == {"Bearer sk-secret"} and len(fake.requests) == 4
    everything = str(error.value) + json.dumps(judge.facts) + (tmp_path / "answers.jsonl").read_text()
    assert "secret" not in everything


def test_a_server_that_dies_half_way_ends_the_job_and_repeating_asks_only_the_rest(tmp_path):
    questions = [question([f"w{i}", "ing"]) for i in range(40)]
    path = tmp_path / "answers.jsonl"
    check = 2  # questions of usual length that the check asks
    with FakeJudge(act=lambda n, body: None if n < check + 12 else DROP) as fake:
        judge = cached(judge_at(fake, concurrency=4), path)
        with pytest.raises(SatlensError, match=r"no longer answers.*--cache"):
            judge.ask(questions)
    assert not isinstance(SatlensError("x"), UserError)
    kept = len(path.read_text().splitlines())
    assert 1 <= kept <= 12
    with FakeJudge() as fake:
        judge = cached(judge_at(fake), path)
        answers = judge.ask(questions)
    assert len(fake.requests) == check + 40 - kept and sum(a.cached for a in answers) == kept
    assert [a.score for a in answers] == [5.0] * 40


def test_a_few_lost_questions_are_errors_and_the_job_goes_on():
    def act(n, body):
        return DROP if tokens_in(body)[0].text == "lost" else None

    with FakeJudge(act=act) as fake:
        answers = ask(fake, [question(["lost"])] + [question(PURE)] * 20)
    assert answers[0].error.startswith("no reply") and [a.score for a in answers[1:]] == [10] * 20


def test_an_interrupted_job_does_not_wait_for_what_is_under_way():
    def stop(answer):
        raise KeyboardInterrupt

    start = time.monotonic()
    with FakeJudge(act=lambda n, body: HANG if n else None) as fake, pytest.raises(KeyboardInterrupt):
        ask(fake, [question(PURE)] * 20, stop, timeout=8)
    assert time.monotonic() - start < 4


def test_the_model_is_named_when_more_than_one_is_served():
    with FakeJudge(models=("a", "b")) as fake:
        with pytest.raises(UserError, match="--judge-model, one of a, b"):
            judge_at(fake).check()
        with pytest.raises(UserError, match="does not serve c"):
            judge_at(fake, judge_model="c").check()
        judge_at(fake, judge_model="b").check()


def test_another_kind_of_server_is_told_apart(monkeypatch):
    with FakeJudge() as fake, pytest.raises(UserError, match="ends in /v1"):
        monkeypatch.setattr("tests.fake_judge._Handler.do_GET", lambda self: self._send((200, {}, b"<html>")))
        judge_at(fake).check()


def test_nothing_goes_anywhere_else(monkeypatch):
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "OPENAI_BASE_URL"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    with FakeJudge() as elsewhere:
        moved = (307, {"Location": f"{elsewhere.url}/chat/completions"}, b"")
        with FakeJudge(act=lambda n, body: moved if n == 0 else None) as fake:
            first, second = ask(fake, [question(PURE), question(PURE)], concurrency=1)
    assert elsewhere.requests == [] and first.error and second.score == 10


def test_without_the_client_library_the_way_to_get_it_is_told(monkeypatch):
    monkeypatch.setitem(sys.modules, "openai", None)
    with FakeJudge() as fake, pytest.raises(UserError, match=r"pip install 'satlens\[judge\]'"):
        judge_at(fake).check()


def test_a_question_too_long_to_send_is_an_error():
    with FakeJudge() as fake:
        (answer,) = ask(fake, [question(["x" * 30_000])])
    assert "characters" in answer.error and fake.requests == []


def test_the_probe_is_one_nobody_answers_with_a_number():
    assert [message["content"] for message in server.OFF_TOPIC] == [PROBE]
