"""Replay of what was recorded, in one process: errors, losses and changed tools included."""

import asyncio
import sys
from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from flotilla_common.domain.attempts import Grade, NoGradeReason, ToolOutcome
from flotilla_env_gateway.episodes.episode_book import EpisodeState
from flotilla_env_gateway.episodes.gateway import Gateway
from flotilla_env_gateway.ports import BackendError, CallAnswer, CallResult, Media, Text, Tool
from tests.env_gateway.adapters.mcp.test_servers import server
from tests.env_gateway.adapters.replay.record_bench import (
    call,
    recording,
    recording_servers,
    replaying,
)
from tests.support.fake_environments import TOOLS, ScriptedBackend
from tests.support.fake_gateway import open_spec, opened, states, task_json
from tests.support.waiting import until

CHANGING = "tests.env_gateway.adapters.mcp.changing_server"


async def play(
    gateway: Gateway, attempt: int, *calls: tuple[str, Mapping[str, Any]], answer: str = ""
) -> tuple[list[CallAnswer], Grade]:
    session = await opened(gateway, open_spec(attempt))
    answers = [await call(gateway, session, name, **arguments) for name, arguments in calls]
    grade = await gateway.grade_episode(session, answer, None, 10.0)
    gateway.close(session.episode.episode_id)
    return answers, grade


def told(played: tuple[list[CallAnswer], Grade]) -> tuple[list[Any], Grade]:
    answers, grade = played
    return [(a.outcome, a.parts, a.reward, a.done) for a in answers], grade


ADD, LOOK = ("add", {"by": 2}), ("look", {})


async def test_answers_of_all_kinds_are_the_same_and_no_environment_is_asked(
    tmp_path: Path,
) -> None:
    data = b"p" * 10_000
    picture = Media(data, "image/png", sha256(data).digest(), len(data), 100, 50)
    kinds: dict[str, CallResult | None] = {
        "1": CallResult((Text("x" * 200_000), picture), reward=0.5),
        "2": CallResult((Text("no such thing"),), is_error=True),
        "3": CallResult((Text("over"),), done=True),
    }

    async def hook(name: str, arguments: Mapping[str, Any]) -> CallResult | None:
        return kinds.get(str(arguments.get("kind")))

    calls = [ADD, *(("add", {"kind": kind}) for kind in "123"), ("unknown", {}), LOOK]
    backend = ScriptedBackend()
    backend.hook = hook
    backend.first_observation = (Text("welcome"), picture)
    backend.fail_at("call", BackendError("connect", "refused", delivered=False))
    async with recording(tmp_path, backend) as gateway:
        first = await play(gateway, 0, *calls)
        session = await opened(gateway, open_spec(1))
        shown = session.first_observation
    assert first[1].reward == 1.0
    async with replaying(tmp_path) as gateway:
        assert told(await play(gateway, 0, *calls)) == told(first)
        session = await opened(gateway, open_spec(1))
        assert [type(part) for part in session.first_observation] == [type(part) for part in shown]
        assert session.first_observation[0] == Text("welcome")


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (BackendError("closed", "x", delivered=False, lost=True), NoGradeReason.INSTANCE_LOST),
        (BackendError("closed", "x", delivered=None), NoGradeReason.TAINTED),
    ],
)
async def test_a_loss_is_replayed_as_a_loss(
    error: BackendError, reason: NoGradeReason, tmp_path: Path
) -> None:
    backend = ScriptedBackend()
    backend.fail_at("call", error)
    async with recording(tmp_path, backend) as gateway:
        first = await play(gateway, 0, ADD, LOOK)
    assert first[1].reason is reason
    async with replaying(tmp_path) as gateway:
        assert told(await play(gateway, 0, ADD, LOOK)) == told(first)


async def test_an_instance_that_was_known_to_have_ended_is_lost_at_the_next_renewal(
    tmp_path: Path,
) -> None:
    async with recording_servers(tmp_path, servers=[server("a", "x", "die")]) as gateway:
        session = await opened(gateway)
        assert (await call(gateway, session, "x")).outcome is ToolOutcome.OK
        died = await call(gateway, session, "die")
        assert died.outcome in (ToolOutcome.SESSION_LOST, ToolOutcome.OUTCOME_UNKNOWN)
        grade = await gateway.grade_episode(session, "", None, 20.0)
        assert grade.reason in (NoGradeReason.INSTANCE_LOST, NoGradeReason.TAINTED)
        idle = await opened(gateway, open_spec(1))
        assert idle.instance is not None
        await call(gateway, idle, "x")
        # Behind the gateway's back.
        await idle.instance.close(timeout_s=10.0)
        await until(lambda: bool(idle.instance and idle.instance.end_reason))
        assert gateway.renew_leases("rollout-0", [idle.episode.episode_id])
    async with replaying(tmp_path) as gateway:
        session = await opened(gateway)
        assert (await call(gateway, session, "x")).outcome is ToolOutcome.OK
        again = await call(gateway, session, "die")
        assert (again.outcome, again.parts) == (died.outcome, died.parts)
        assert await gateway.grade_episode(session, "", None, 20.0) == grade
        idle = await opened(gateway, open_spec(1))
        assert not gateway.renew_leases("rollout-0", [idle.episode.episode_id])
        await call(gateway, idle, "x")
        assert gateway.renew_leases("rollout-0", [idle.episode.episode_id])


def miss(played: tuple[list[CallAnswer], Grade]) -> str:
    answers, grade = played
    assert (grade.reward, grade.reason) == (None, NoGradeReason.REPLAY_MISS)
    assert all(answer.outcome is not ToolOutcome.TOOL_ERROR for answer in answers)
    return grade.detail


async def test_what_was_not_recorded_is_a_miss_and_no_grade(tmp_path: Path) -> None:
    async with recording(tmp_path, ScriptedBackend()) as gateway:
        await play(gateway, 0, ADD, LOOK, answer="3")
    async with replaying(tmp_path) as gateway:
        changed = await play(gateway, 0, ("add", {"by": 3}), LOOK, answer="3")
        assert [answer.outcome for answer in changed[0]] == [ToolOutcome.REPLAY_MISS] * 2
        assert 'has no call ["add",{"by":3}]' in miss(changed)
        assert 'the call ["look",{}] is next' in miss(await play(gateway, 1, ADD, answer="3"))
        assert 'the grade {"answer":"3"' in miss(
            await play(gateway, 2, ADD, LOOK, LOOK, answer="3")
        )
        assert "has no grade" in miss(await play(gateway, 3, ADD, LOOK, answer="4"))
        assert "has no call" in miss(await play(gateway, 4, LOOK, ADD, answer="3"))
        verifier = "def verify(env):\n    return 0\n"
        other = await opened(gateway, open_spec(5, task=task_json(verifier_func=verifier)))
        for name, arguments in (ADD, LOOK):
            await call(gateway, other, name, **arguments)
        assert (await gateway.grade_episode(other, "3", None, 5.0)).reward is None
        session, entered = await states(gateway, open_spec(9, task=task_json(key="another")))
        assert entered[-1] is EpisodeState.FAILED
        assert session.no_grade is NoGradeReason.REPLAY_MISS
        assert (
            session.failure
        ) == "replay_miss: the recorded run opened no episode of task 'another'"


async def test_an_opening_that_failed_fails_again(tmp_path: Path) -> None:
    backend = ScriptedBackend()
    refusal = BackendError("bad_task", "no such data", delivered=False, invalid=True)
    backend.fail_at("provision", refusal)
    async with recording(tmp_path, backend) as gateway:
        first, _ = await states(gateway, open_spec())
    async with replaying(tmp_path) as gateway:
        again, entered = await states(gateway, open_spec())
    assert entered[-1] is EpisodeState.FAILED
    assert again.failure == first.failure == "bad_task: no such data"
    assert again.no_grade is None


async def test_each_attempt_of_a_group_meets_its_own_recording(tmp_path: Path) -> None:
    given = iter(["red", "blue", "green"])

    async def hook(name: str, arguments: Mapping[str, Any]) -> CallResult:
        return CallResult((Text(next(given)),))

    backend = ScriptedBackend()
    backend.hook = hook
    async with recording(tmp_path, backend) as gateway:
        first = [await play(gateway, n, LOOK) for n in range(3)]
    async with replaying(tmp_path) as gateway:
        for n in (2, 0, 1):
            assert told(await play(gateway, n, LOOK)) == told(first[n])
        assert told(await play(gateway, 7, LOOK)) == told(first[0]), "the first, for others"


async def test_calls_that_a_turn_makes_together_match_in_any_order(tmp_path: Path) -> None:
    backend = ScriptedBackend()
    backend.tools = (*TOOLS, Tool("peek", "Reads.", "{}", read_only=True, parallel=True))
    counted = iter(range(100))

    async def hook(name: str, arguments: Mapping[str, Any]) -> CallResult | None:
        return CallResult((Text(str(next(counted))),)) if name == "peek" else None

    backend.hook = hook
    asked = [(0, "peek", "{}"), (1, "peek", '{"at": 1}'), (2, "peek", "{}")]

    async def ask(gateway: Gateway, order: Sequence[int], n: int = 0) -> list[tuple[Any, ...]]:
        session = await opened(gateway, open_spec(0, try_index=n))
        sent = [asyncio.create_task(gateway.call_tool(session, *asked[n], 5.0)) for n in order]
        await asyncio.wait(sent)
        answers = {n: task.result()[0].parts for n, task in zip(order, sent, strict=True)}
        answer, _ = await gateway.call_tool(session, 3, "add", "{}", 5.0)
        grade = await gateway.grade_episode(session, "", None, 5.0)
        return [*(answers[n] for n in range(3)), answer.parts, (grade.reward,)]

    async with recording(tmp_path, backend) as gateway:
        first = await ask(gateway, [0, 1, 2])
    assert len({parts[0].text for parts in first[:3]}) == 3
    async with replaying(tmp_path) as gateway:
        for n, order in enumerate([[0, 1, 2], [2, 1, 0], [1, 2, 0]]):
            assert await ask(gateway, order, n) == first


async def test_tools_that_changed_are_told_again_and_vanish_again(tmp_path: Path) -> None:
    command = [sys.executable, "-m", CHANGING, "shop", "stdio", "look", "buy"]
    shop = {"name": "shop", "transport": "stdio", "command": command, "shared_state": True}
    deploy = {"tools": ["look", "sell"], "announced": True}
    store = server("store", "stock")
    named = {"fake": {"servers": ["shop", "store"]}}

    async def ask(gateway: Gateway) -> tuple[list[Any], list[Any]]:
        with capture_logs() as events:
            session = await opened(gateway)
            offered = {*session.tools}
            await call(gateway, session, "deploy", **deploy)
            await until(lambda: bool(session.vanished))
            made = [await call(gateway, session, name) for name in ("buy", "stock", "look")]
            grade = await gateway.grade_episode(session, "", None, 20.0)
        changed = [e for e in events if e["event"] == "tools_changed_in_episode"]
        assert offered == {"deploy", "look", "buy", "stock"}
        kept = [{k: e[k] for k in ("env", "added", "removed", "changed")} for e in changed]
        return kept, [*((a.outcome, a.parts) for a in made), grade]

    section = {"servers": [shop, store], "environments": named}
    async with recording_servers(tmp_path, **section) as gateway:
        first = await ask(gateway)
    removed = (ToolOutcome.TOOL_ERROR, (Text("the environment has removed its tool 'buy'"),))
    assert first[0] == [{"env": "fake", "added": ["sell"], "removed": ["buy"], "changed": []}]
    assert first[1][0] == removed
    async with replaying(tmp_path) as gateway:
        assert await ask(gateway) == first
