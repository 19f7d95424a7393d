"""Transcripts of long attempts, from the rollout's loop through a gateway to the verifier's
process: their length never costs a grade."""

import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from flotilla.env_gateway.v1 import episode_service_pb2_grpc
from flotilla_common.domain.attempts import AttemptKey
from flotilla_common.domain.trajectory import Trajectory
from flotilla_common.domain.transcripts import encode_transcript
from flotilla_common.rpc import rpc
from flotilla_env_gateway.api.episode_service import EpisodeService
from flotilla_env_gateway.ports import CallResult, Text
from flotilla_env_gateway.verify.verifier_pool import VerifierPool
from flotilla_rollout.adapters.env_gateway import GatewayEnvironment
from flotilla_rollout.episodes.episode import Attempt
from flotilla_rollout.types import OpenRequest, Sampling
from tests.contract.test_episode_service import TOKEN
from tests.support.fake_environments import ScriptedBackend
from tests.support.fake_gateway import running, task_json
from tests.support.rollout import runner

LOOK = '<tool_call>{"name": "look", "arguments": {}}</tool_call>'
# As long as a page of a site, and three times as long in JSON.
ANSWER = '"é' * 76_000
READING = """
def verify(env, conversation=None):
    results = [m for m in json.loads(conversation) if m["role"] == "tool"]
    marks = [m for m in results if "omitted_bytes" in m]
    whole = [m for m in results if len(m["content"]) == 152_000]
    counts = [str(len(results)), str(len(marks) + len(whole)), str(marks != [])]
    return {"score": 1, "passed": counts, "failed": []}
"""


@asynccontextmanager
async def environment(**changes: Any) -> AsyncGenerator[GatewayEnvironment]:
    """A gateway whose tools answer at length, with verifiers in processes of their own."""
    backend = ScriptedBackend()

    async def answer(name: str, arguments: Any) -> CallResult:
        return CallResult((Text(ANSWER),))

    backend.hook = answer
    pool = VerifierPool(size=1, memory_bytes=2**29, unsafe=True)
    server = rpc.server(token=TOKEN)
    async with running(backend, pool, **changes) as gateway:
        service = EpisodeService(gateway, lambda: None)
        episode_service_pb2_grpc.add_EpisodeServiceServicer_to_server(service, server)
        async with (
            rpc.serving(server, "127.0.0.1:0", grace_s=0.1) as at,
            rpc.channel(at.address, token=TOKEN) as channel,
        ):
            yield GatewayEnvironment(channel, run_id="r", worker_id="w", renew_interval_s=9.0)
    await pool.close()


async def play(turns: int, verifier: str, **changes: Any) -> Trajectory:
    """Play an attempt with one call per turn."""
    attempt = Attempt(
        AttemptKey("g", 0, 0), task_json(verifier_func=verifier), Sampling(1.0, 7), 1, 300.0
    )
    limits: dict[str, Any] = {
        "max_turns": turns,
        "observation_tokens": 8,
        "max_model_len": 20_000,
        "max_input_length": 18_000,
        "attempt_timeout_s": 300.0,
        "call_timeout_s": 30.0,
        "grade_timeout_s": 60.0,
    }
    async with environment(**changes) as opened:
        trajectory = await runner(opened, [LOOK], **limits).run_attempt(attempt)
        await opened.wait_until_closed()
    assert trajectory.counts.tool_calls == turns, trajectory.detail
    return trajectory


async def test_sixty_turns_with_answers_of_228_kb_are_graded() -> None:
    request = OpenRequest(AttemptKey("g", 0, 0), task_json(verifier_func=READING), 1, 300.0)
    messages = [{"role": "user", "content": "Find it."}]
    async with environment() as opened:
        async with opened.open_episode(request) as episode:
            for _ in range(60):
                result = await episode.call_tool("look", "{}", 30.0)
                messages.append({"role": "assistant", "content": LOOK})
                messages += [{"role": "tool", "content": text} for text in result.parts]
            assert sum(len(json.dumps(message)) for message in messages) > 2 * 16 * 2**20
            transcript = encode_transcript(messages, episode.info.transcript_bytes)
            grade = await episode.request_grade(None, transcript, 60.0)
        await opened.wait_until_closed()
    assert (grade.reward, grade.detail) == (1.0, "")
    assert grade.checks_passed == ("60", "60", "True")


@pytest.mark.parametrize(("limits", "cut"), [({}, "False"), ({"transcript_bytes": 1024}, "True")])
async def test_the_loop_sends_as_much_as_the_limit_allows(limits: dict[str, int], cut: str) -> None:
    """The result of the last call belongs to no turn."""
    trajectory = await play(4, READING, limits=limits)
    assert (trajectory.reward, trajectory.checks_passed) == (1.0, ("3", "3", cut))
