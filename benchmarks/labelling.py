"""How many tokens must a judge compute to label a dictionary, with the rules first and the shared text in front?

The judge is an HTTP server in this process that answers by the rules, so that equal questions have equal answers and
the labels must agree; it counts prompt tokens as a server with a prefix cache computes them: blocks of 16 tokens that
it has met at the same place, after the same tokens, are not computed again. Token sets are neighbourhoods in the
shipped model's V1 table, which is what latents of a dictionary look like, the fifth with the highest MonoScore as in
the funnel; the tokens are counted by that model's tokenizer.
"""

import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pandas as pd
import torch
from common import Row, command

from sae.funnel import STAGES
from sae.judges import CATEGORY, PURITY, JudgeSettings, Question, Token, make_judge
from sae.judges.rules import Rules
from sae.label import SET_COLUMNS, judge_latents
from sae.pieces import escape, token_of
from sae.table import v1_rows
from satlens import reference
from satlens.checkpoint import load_bridge, load_tokenizer

LATENTS, SET_SIZE, MIN_SCORE = 300, 10, 7.0
BLOCK = 16
"""Tokens in a block of vllm's prefix cache."""


class CountingServer(ThreadingHTTPServer):
    """Answers by the rules and counts the prompt tokens that it would have to compute."""

    daemon_threads = True

    def __init__(self, tokenizer: Any, tokens_first: bool) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.tokenizer, self.tokens_first = tokenizer, tokens_first
        self.computed = self.sent = self.questions = 0
        self.blocks: set[tuple[int, ...]] = set()
        self.lock = threading.Lock()
        self.thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.01})
        self.thread.start()

    def stop(self) -> None:
        """Stop listening."""
        self.shutdown()
        self.server_close()
        self.thread.join()

    def count(self, chat: list[dict[str, str]]) -> int:
        """Prompt tokens of a chat, entered into the sums."""
        turns = [chat[-1], *chat[:-1]] if self.tokens_first else chat
        text = "".join(f"{turn['role']}\n{turn['content']}\n" for turn in turns)
        with self.lock:
            ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
            known = 0
            # the last token is always computed, since its output is the reply
            for end in range(BLOCK, len(ids), BLOCK):
                block = tuple(ids[:end])
                known = end if block in self.blocks else known
                self.blocks.add(block)
            self.computed += len(ids) - known
            self.sent += len(ids)
            self.questions += 1
        return len(ids)


class Handler(BaseHTTPRequestHandler):
    """The three requests that a judge gets."""

    server: CountingServer
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        """The list of models."""
        self.reply({"object": "list", "data": [{"id": "rules", "object": "model"}]})

    def do_POST(self) -> None:
        """A chat completion."""
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        count = self.server.count(body["messages"])
        message = {"role": "assistant", "content": by_the_rules(body)}
        usage = {"prompt_tokens": count, "completion_tokens": 1, "total_tokens": count + 1}
        choice = {"index": 0, "finish_reason": "stop", "message": message}
        self.reply({"object": "chat.completion", "model": "rules", "choices": [choice], "usage": usage})

    def reply(self, answer: dict[str, Any]) -> None:
        """Send JSON."""
        data = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        """Quiet."""


def by_the_rules(body: dict[str, Any]) -> str:
    """What the rules judge says to the tokens in the last turn."""
    found = re.search(r"⟦tokens⟧\n(.*)\n⟦end⟧", body["messages"][-1]["content"])
    shown = json.loads(found[1]) if found else []
    tokens = tuple(Token(id=i, piece=escape(text), text=escape(text)) for i, text in enumerate(shown))
    if body["response_format"]["json_schema"]["name"] == "score":
        (answer,) = Rules().ask([Question(kind=PURITY, tokens=tokens)])
        return json.dumps({"score": round(answer.score or 0)})
    (answer,) = Rules().ask([Question(kind=CATEGORY, tokens=tokens)])
    return json.dumps({"category": answer.category or "Semantic Root Fragments"})


def neighbourhoods(tokenizer: Any) -> pd.DataFrame:
    """Two sets of tokens for each of some random tokens: its nearest in V1, dealt alternately as the funnel does."""
    bridge, _ = load_bridge(reference.resolve("reference-satformer"))
    table, embedding = v1_rows(bridge), bridge.original_model.get_input_embeddings().weight.detach()
    unit, meaning = (torch.nn.functional.normalize(x - x.mean(0), dim=1) for x in (table, embedding))
    drawn = torch.randperm(len(table), generator=torch.Generator().manual_seed(0))[: 5 * LATENTS]
    near = (unit[drawn] @ unit.T).topk(2 * SET_SIZE)
    # the mean cosine over pairs from the length of the sum of unit vectors; the order is what matters
    mono = meaning[near.indices].sum(1).norm(dim=1)
    kept = mono.argsort(descending=True)[:LATENTS]
    rows = []
    for latent, (ids, acts) in enumerate(
        zip(near.indices[kept].tolist(), near.values[kept].tolist(), strict=True)
    ):
        for place, (token, act) in enumerate(zip(ids, acts, strict=True)):
            shown = token_of(tokenizer, token)
            rows.append((latent, "ab"[place % 2], place // 2, token, shown.piece, shown.text, act))
    return pd.DataFrame(rows, columns=list(SET_COLUMNS)).astype(SET_COLUMNS)


def label(
    sets: pd.DataFrame, tokenizer: Any, prefilter: bool, tokens_first: bool
) -> tuple[CountingServer, Any]:
    """The server after one labelling, and the labels."""
    server = CountingServer(tokenizer, tokens_first)
    settings = JudgeSettings(
        judge="server", base_url=f"http://127.0.0.1:{server.server_port}/v1", cache=None, concurrency=8
    )
    judge = make_judge(settings)
    columns = dict.fromkeys(("stage", "verdict", "reason"))
    table = pd.DataFrame({"latent": range(LATENTS), **columns}).astype(dict.fromkeys(columns, "object"))
    try:
        judge.check()
        labels, _ = judge_latents(table, sets, judge, MIN_SCORE, prefilter)
    finally:
        judge.close()
        server.stop()
    assert set(labels["stage"]) <= set(STAGES)
    return server, labels[["latent", "verdict", "category"]]


def measure(rounds: int) -> list[Row]:
    """Counted, so one round is exact; ``rounds`` is what other benchmarks are given.

    Raises:
        AssertionError: the labels of the two ways differ.
    """
    tokenizer = load_tokenizer(reference.resolve("reference-satformer"))
    sets = neighbourhoods(tokenizer)
    plain, expected = label(sets, tokenizer, prefilter=False, tokens_first=True)
    shared, same = label(sets, tokenizer, prefilter=False, tokens_first=False)
    ours, labels = label(sets, tokenizer, prefilter=True, tokens_first=False)
    pd.testing.assert_frame_equal(labels, expected)
    pd.testing.assert_frame_equal(same, expected)
    assert (expected["verdict"] == "accepted").sum() >= 20, (
        "labels of which next to none is accepted show nothing"
    )
    return [
        row("tokens computed to label, tokens first and no rules", ours, plain, 10),
        row("the same, shared text first but no rules", ours, shared, 1.1),
    ]


def row(what: str, ours: CountingServer, other: CountingServer, target: float) -> Row:
    """Tokens computed the other way over ours."""
    return Row(
        what=what,
        ours=f"{ours.computed:,} tokens, {ours.questions} questions",
        other=f"{other.computed:,} tokens, {other.questions} questions",
        ratio=other.computed / ours.computed,
        rounds=1,
        sense=">=",
        target=target,
    )


if __name__ == "__main__":
    command(measure, rounds=1)
