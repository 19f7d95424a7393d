"""An endpoint that judges by a rule that is known, whatever the order in which attempts are shown,
and misbehaves on order."""

import json
import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from flotilla.learner.v1 import group_service_pb2 as pb
from flotilla_learner.config.judge import JudgeConfig
from flotilla_learner.judge.adapters.chat_judge import ChatJudge
from flotilla_learner.judge.group_judge import GroupJudge, open_group_judge
from tests.support.http_server import serving_app
from tests.support.learner import FakeWorker, Submission

MODEL = "judge-70b"
PROMPT_TOKENS, COMPLETION_TOKENS = 500, 20
_ATTEMPT = re.compile(r'<attempt label="(\w+)">\n(.*?)</attempt>', re.DOTALL)

# Gets a question and its number, from 1; returns what is answered in place of the scores, or None.
Fault = Callable[[dict[str, Any], int], Awaitable[web.Response | None]]


def write_words(ids: Sequence[int]) -> str:
    """Token ids as words, as the tests' policies speak."""
    return " ".join(f"w{number}" for number in ids)


def score_of(text: str) -> float:
    """The score of an attempt whose first turn is this text."""
    return sum(int(number) for number in re.findall(r"w(\d+)", text)) % 11 / 10


def attempts_of(body: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """The conversations that a question shows, by label."""
    shown = _ATTEMPT.findall(body["messages"][1]["content"])
    return {label: [json.loads(line) for line in text.splitlines()] for label, text in shown}


def completion(text: str, *, finish_reason: str = "stop") -> dict[str, Any]:
    usage = {"prompt_tokens": PROMPT_TOKENS, "completion_tokens": COMPLETION_TOKENS}
    choice = {"message": {"role": "assistant", "content": text}, "finish_reason": finish_reason}
    return {"choices": [choice], "usage": usage}


@dataclass
class ScriptedJudge:
    """Keeps what it is asked in `asked`."""

    fault: Fault | None = None
    asked: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    url: str = ""

    async def answer(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.asked.append(body)
        if self.fault and (answer := await self.fault(body, len(self.asked))) is not None:
            return answer
        first = {label: said[0]["content"] for label, said in attempts_of(body).items()}
        scores = {label: score_of(text) for label, text in first.items()}
        return web.json_response(completion(json.dumps({"scores": scores})))


@asynccontextmanager
async def serving_judge(judge: ScriptedJudge) -> AsyncGenerator[ScriptedJudge]:
    app = web.Application(client_max_size=2**26)
    app.router.add_post("/v1/chat/completions", judge.answer)
    async with serving_app(app) as address:
        judge.url = f"{address}/v1"
        yield judge


def judge_config(judge: ScriptedJudge, **changes: Any) -> dict[str, Any]:
    """The table of a spec."""
    return {"url": judge.url, "model": MODEL, "max_calls": 1000, **changes}


@asynccontextmanager
async def asking(config: JudgeConfig) -> AsyncGenerator[GroupJudge]:
    judge = open_group_judge(ChatJudge(config), config, write_words)
    try:
        yield judge
    finally:
        await judge.close()


class JudgedWorker(FakeWorker):
    """Plays attempts that are to be judged, in the environments of `judged`, or in all."""

    judged: frozenset[str] = frozenset()

    def show(self, lease: pb.Lease, attempt: pb.LeasedAttempt, made: Submission) -> Submission:
        if not self.judged or json.loads(lease.task_json)["env_id"] in self.judged:
            made.header.to_be_judged.SetInParent()
        return made
