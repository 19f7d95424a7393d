"""The gateway on fake environments: leases, limits, retries, closing."""

import asyncio
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from flotilla_common.domain.attempts import NoGradeReason, ToolOutcome
from flotilla_env_gateway.episodes.episode_book import (
    ANSWERS_KEPT,
    CallSeqError,
    EpisodeLostError,
    EpisodeState,
)
from flotilla_env_gateway.episodes.episode_session import Session
from flotilla_env_gateway.episodes.gateway import Gateway
from flotilla_env_gateway.ports import BackendError, CallResult, Execution
from tests.support.fake_environments import FakeGrader, ScriptedBackend
from tests.support.fake_gateway import open_spec, opened, running, states, task_json
from tests.support.waiting import until


async def call(gateway: Gateway, session: Session, seq: int, name: str = "add") -> Any:
    return (await gateway.call_tool(session, seq, name, "{}", 5.0))[0]


async def until_empty(backend: ScriptedBackend) -> None:
    await until(lambda: not backend.running)


def failure(kind: str = "http", *, delivered: bool | None, **more: Any) -> BackendError:
    return BackendError(kind, "for the test", delivered=delivered, **more)


async def test_an_episode_whose_worker_stops_renewing_is_closed() -> None:
    backend = ScriptedBackend()
    async with running(backend, lease_ttl_s=0.1) as gateway:
        kept, dropped = await opened(gateway), await opened(gateway, open_spec(1))
        for _ in range(10):
            assert gateway.renew_leases("rollout-0", [kept.episode.episode_id]) == []
            await asyncio.sleep(0.02)
        assert list(backend.running) == [f"instance-of-{kept.episode.episode_id}"]
        with pytest.raises(EpisodeLostError, match="not renewed"):
            gateway.get_session(dropped.episode.episode_id)


async def test_an_episode_ends_with_its_budget_however_often_it_is_renewed() -> None:
    backend = ScriptedBackend()
    async with running(backend, lease_ttl_s=0.1) as gateway:
        session = await opened(gateway, open_spec(budget_s=0.15))
        await until(lambda: gateway.renew_leases("rollout-0", [session.episode.episode_id]) != [])
        await until_empty(backend)


async def test_a_worker_cannot_renew_what_another_holds() -> None:
    async with running(ScriptedBackend()) as gateway:
        session = await opened(gateway)
        lost = gateway.renew_leases("rollout-1", [session.episode.episode_id])
        assert lost == [session.episode.episode_id]


async def test_a_repeated_open_joins_and_a_newer_try_replaces() -> None:
    backend = ScriptedBackend()
    async with running(backend) as gateway:
        first = await opened(gateway)
        assert await opened(gateway) is first
        second = await opened(gateway, open_spec(try_index=1))
        with pytest.raises(EpisodeLostError, match="replaced"):
            gateway.get_session(first.episode.episode_id)
        with pytest.raises(EpisodeLostError, match="replaced"):
            gateway.open_episode(open_spec())
        with pytest.raises(EpisodeLostError, match="try 1"):
            gateway.open_episode(open_spec(request_id="late"))
        await until(lambda: len(backend.running) == 1)
        assert list(backend.running) == [f"instance-of-{second.episode.episode_id}"]


async def test_giving_up_while_the_instance_is_created_deletes_it_all_the_same() -> None:
    backend = ScriptedBackend()
    backend.delays["provision"] = 0.05
    async with running(backend) as gateway:
        opening = asyncio.create_task(opened(gateway))
        await asyncio.sleep(0.01)
        opening.cancel()
        await asyncio.wait({opening})
        assert len(gateway.book) == 0
        await gateway.closer.wait_until_deleted(5.0)
        assert (gateway.opener.created, gateway.closer.closed) == (1, 1)
        assert backend.running == {}
        again = await opened(gateway)
        assert again.episode.state is EpisodeState.READY


async def test_a_repeat_that_arrives_while_the_call_runs_waits_for_the_same_answer() -> None:
    backend = ScriptedBackend()
    backend.delays["call"] = 0.02
    async with running(backend) as gateway:
        session = await opened(gateway)
        answers = await asyncio.gather(
            *(gateway.call_tool(session, 0, "add", "{}", 5.0) for _ in range(5))
        )
        assert [replayed for _, replayed in answers] == [False, True, True, True, True]
        assert backend.running[str(session.instance and session.instance.instance_id)].executed == {
            "add": 1
        }


async def test_a_call_continues_when_its_caller_leaves() -> None:
    backend = ScriptedBackend()
    backend.delays["call"] = 0.02
    async with running(backend) as gateway:
        session = await opened(gateway)
        caller = asyncio.create_task(call(gateway, session, 0))
        await asyncio.sleep(0.005)
        caller.cancel()
        await asyncio.wait({caller})
        answer, replayed = await gateway.call_tool(session, 0, "add", "{}", 5.0)
        assert (answer.outcome, replayed) == (ToolOutcome.OK, True)


async def test_only_the_newest_answers_are_kept() -> None:
    async with running(ScriptedBackend()) as gateway:
        session = await opened(gateway)
        for seq in range(ANSWERS_KEPT + 1):
            await call(gateway, session, seq)
        await call(gateway, session, 1)
        with pytest.raises(CallSeqError):
            await call(gateway, session, 0)
        assert len(session.answers) == ANSWERS_KEPT


@pytest.mark.parametrize(
    ("error", "name", "outcome", "executions"),
    [
        (failure(delivered=False), "add", ToolOutcome.OK, 2),
        (failure(delivered=None), "look", ToolOutcome.OK, 2),
        (failure(delivered=None), "add", ToolOutcome.OUTCOME_UNKNOWN, 1),
        (failure("throttled", delivered=False, retry_after_s=0.02), "add", ToolOutcome.OK, 2),
        (
            failure("throttled", delivered=False, retry_after_s=60.0),
            "add",
            ToolOutcome.SESSION_LOST,
            1,
        ),
        (failure(delivered=False, lost=True), "look", ToolOutcome.SESSION_LOST, 1),
        (failure(delivered=False, bad_arguments=True), "add", ToolOutcome.BAD_ARGUMENTS, 1),
        (failure("timeout", delivered=None), "add", ToolOutcome.OUTCOME_UNKNOWN, 1),
    ],
)
async def test_a_failed_call_is_sent_again_only_where_that_is_safe(
    error: BackendError, name: str, outcome: ToolOutcome, executions: int
) -> None:
    backend = ScriptedBackend()
    backend.fail_at("call", error)
    async with running(backend) as gateway:
        session = await opened(gateway)
        answer = await call(gateway, session, 0, name)
        assert (answer.outcome, backend.steps["call"]) == (outcome, executions)


async def test_a_call_that_hangs_ends_with_its_deadline() -> None:
    backend = ScriptedBackend()
    backend.delays["call"] = 60.0
    async with running(backend) as gateway:
        session = await opened(gateway)
        loop = asyncio.get_running_loop()
        started = loop.time()
        read = (await gateway.call_tool(session, 0, "look", "{}", 0.1))[0]
        wrote = (await gateway.call_tool(session, 1, "add", "{}", 0.1))[0]
        assert (read.outcome, wrote.outcome) == (ToolOutcome.DEADLINE, ToolOutcome.OUTCOME_UNKNOWN)
        assert loop.time() - started < 1.0


async def test_a_call_of_unknown_outcome_taints_the_grade() -> None:
    backend = ScriptedBackend()
    backend.fail_at("call", failure(delivered=None))
    async with running(backend) as gateway:
        session = await opened(gateway)
        await call(gateway, session, 0)
        grade = await gateway.grade_episode(session, None, None, 5.0)
        assert (grade.reward, grade.reason) == (None, NoGradeReason.TAINTED)


@pytest.mark.parametrize("arguments", ["[]", "{", "NaN", '{"a": 1, "a": 2}', "[" * 10_000])
async def test_arguments_that_are_no_object_never_reach_the_environment(arguments: str) -> None:
    backend = ScriptedBackend()
    async with running(backend) as gateway:
        session = await opened(gateway)
        answer, _ = await gateway.call_tool(session, 0, "add", arguments, 5.0)
        assert answer.outcome is ToolOutcome.BAD_ARGUMENTS
        answer, _ = await gateway.call_tool(session, 1, "../../add", "{}", 5.0)
        assert answer.outcome is ToolOutcome.BAD_TOOL
        assert backend.steps["call"] == 0


async def test_calls_stay_within_their_limits() -> None:
    backend = ScriptedBackend()
    backend.delays["call"] = 0.005
    environments = {"fake": {"max_calls": 3}}
    async with running(backend, environments=environments) as gateway:
        sessions = await asyncio.gather(*(opened(gateway, open_spec(i)) for i in range(12)))
        await asyncio.gather(*(call(gateway, session, 0) for session in sessions))
        assert backend.max_in_flight == 3


async def test_one_episode_makes_one_call_at_a_time() -> None:
    backend = ScriptedBackend()
    backend.delays["call"] = 0.005
    async with running(backend) as gateway:
        session = await opened(gateway)
        answers = await asyncio.gather(*(call(gateway, session, seq) for seq in range(5)))
        assert [answer.parts[0].text for answer in answers] == ["1", "2", "3", "4", "5"]
        assert backend.max_in_flight == 1


async def test_creation_and_warm_up_are_tried_again() -> None:
    backend = ScriptedBackend()
    backend.fail_at("provision", failure(delivered=None), failure("throttled", delivered=False))
    backend.fail_at("list_tools", failure(delivered=False))
    async with running(backend) as gateway:
        await opened(gateway)
        assert len(backend.running) == 1


async def test_an_environment_that_refuses_fails_the_open_and_frees_its_place() -> None:
    backend = ScriptedBackend()
    backend.fail_at("provision", failure(delivered=False, invalid=True))
    async with running(backend, limits={"max_episodes": 1}) as gateway:
        _, entered = await states(gateway, open_spec())
        assert entered[-1] is EpisodeState.FAILED
        await gateway.closer.wait_until_deleted(5.0)
        assert gateway.admission.held_places == 0
        await opened(gateway, open_spec(1))


async def test_closing_is_tried_until_the_instance_is_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("flotilla_env_gateway.episodes.instance_deletion._BASE_S", 0.001)
    backend = ScriptedBackend()
    backend.fail_at("close", *(failure(delivered=None) for _ in range(4)))
    async with running(backend) as gateway:
        session = await opened(gateway)
        gateway.close(session.episode.episode_id)
        assert gateway.admission.held_places == 1
        await gateway.closer.wait_until_deleted(5.0)
        assert (backend.running, gateway.admission.held_places) == ({}, 0)


async def test_what_cannot_be_closed_is_closed_by_the_next_start(tmp_path: Path) -> None:
    backend = ScriptedBackend()
    journal = tmp_path / "gateway.sqlite"
    async with running(backend, journal=journal, incarnation="one", close_timeout_s=0.05) as first:
        await opened(first)
        backend.fail_at("close", *(failure(delivered=None) for _ in range(9)))
    assert len(backend.running) == 1
    backend.failures.clear()
    async with running(backend, journal=journal, incarnation="two") as second:
        await until_empty(backend)
        await second.closer.wait_until_deleted(5.0)
        assert second.closer.reclaimed == 1
    async with running(backend, journal=journal, incarnation="three") as third:
        await asyncio.sleep(0.01)
        assert third.closer.pending == 0


@pytest.mark.parametrize(
    ("execution", "reason"),
    [
        (Execution(result=None), NoGradeReason.EXECUTION_FAILED),
        (Execution(result=float("nan")), NoGradeReason.EXECUTION_FAILED),
        (Execution(result=10**400), NoGradeReason.EXECUTION_FAILED),
        (Execution(result="1"), NoGradeReason.EXECUTION_FAILED),
        (Execution(error="KeyError"), NoGradeReason.EXECUTION_FAILED),
        (Execution(error="late", timed_out=True), NoGradeReason.TIMEOUT),
        (Execution(error="gone", instance_lost=True), NoGradeReason.INSTANCE_LOST),
    ],
)
async def test_a_verifier_that_gave_no_number_is_no_grade(
    execution: Execution, reason: NoGradeReason
) -> None:
    grader = FakeGrader()
    grader.executions.append(execution)
    async with running(ScriptedBackend(), grader) as gateway:
        grade = await gateway.grade_episode(await opened(gateway), None, None, 5.0)
        assert (grade.reward, grade.reason) == (None, reason)


async def test_a_judge_that_failed_is_retried() -> None:
    grader = FakeGrader()
    grader.executions.append(Execution(result=0, stdout="JUDGE ERROR: overloaded\n"))
    async with running(ScriptedBackend(), grader) as gateway:
        grade = await gateway.grade_episode(await opened(gateway), None, None, 5.0)
        assert (grade.reward, grade.attempts) == (1.0, 2)


async def test_a_judge_that_always_fails_is_no_grade() -> None:
    grader = FakeGrader()
    broken = Execution(result=0, stdout="JUDGE ERROR: overloaded\n")
    grader.executions.extend([broken] * 2)
    verifiers = {"attempts": 2, "unsafe_local_verifiers": True}
    async with running(ScriptedBackend(), grader, verifiers=verifiers) as gateway:
        grade = await gateway.grade_episode(await opened(gateway), None, None, 5.0)
        assert (grade.reason, grade.detail) == (NoGradeReason.JUDGE_ERROR, "overloaded")


async def test_a_grade_that_takes_too_long_is_no_grade() -> None:
    grader = FakeGrader()
    grader.delay_s = 60.0
    async with running(ScriptedBackend(), grader) as gateway:
        grade = await gateway.grade_episode(await opened(gateway), None, None, 0.05)
        assert grade.reason is NoGradeReason.TIMEOUT


async def test_a_task_without_a_verifier_has_no_grade() -> None:
    async with running(ScriptedBackend()) as gateway:
        session = await opened(gateway, open_spec(task=task_json(verifier_func=None)))
        grade = await gateway.grade_episode(session, None, None, 5.0)
        assert grade.reason is NoGradeReason.NO_VERIFIER


async def test_a_judged_environment_runs_no_verifier_and_reads_no_transcript() -> None:
    grader = FakeGrader()
    source = "def verify(env, conversation=None):\n    return 1\n"
    table = {"fake": {"grading": "judge"}}
    async with running(ScriptedBackend(), grader, environments=table) as gateway:
        session = await opened(gateway, open_spec(task=task_json(verifier_func=source)))
        assert session.env_key == "fake"
        assert await gateway.get_transcript_limit(session) == 0
        grade = await gateway.grade_episode(session, "42", None, 5.0)
        assert grade.to_be_judged
        assert (grade.reward, grade.reason) == (None, None)
        assert await gateway.grade_episode(session, "42", None, 5.0) is grade
        assert gateway.counts.no_grades["fake"] == 0
    assert grader.seen == []


async def test_a_lost_state_is_no_grade_in_a_judged_environment_too() -> None:
    backend = ScriptedBackend()
    table = {"fake": {"grading": "judge"}}
    async with running(backend, environments=table) as gateway:
        session = await opened(gateway)
        backend.running.clear()
        session.mark_lost("it is gone")
        grade = await gateway.grade_episode(session, None, None, 5.0)
        assert grade.reason is NoGradeReason.INSTANCE_LOST


async def test_the_verifier_is_given_only_its_own_parameters() -> None:
    grader = FakeGrader()
    source = "def anything(env, conversation=None):\n    return 1\n"
    async with running(ScriptedBackend(), grader) as gateway:
        session = await opened(gateway, open_spec(task=task_json(verifier_func=source)))
        await gateway.grade_episode(session, "42", "[]", 5.0)
    assert grader.seen[0].arguments == {"conversation": "[]"}
    assert grader.seen[0].function == "anything"


async def test_a_drain_waits_for_open_episodes_and_then_closes_them() -> None:
    backend = ScriptedBackend()
    async with running(backend) as gateway:
        first, second = await opened(gateway), await opened(gateway, open_spec(1))
        draining = asyncio.create_task(gateway.drain(0.1))
        await call(gateway, first, 0)
        gateway.close(first.episode.episode_id)
        await draining
        assert backend.running == {}
        with pytest.raises(EpisodeLostError, match="drain"):
            gateway.get_session(second.episode.episode_id)


@pytest.mark.parametrize("seed", range(15))
async def test_whatever_workers_do_nothing_leaks_and_no_call_runs_twice(seed: int) -> None:
    rng = random.Random(seed)
    backend = ScriptedBackend()
    seen: dict[tuple[int, int], int] = {}

    async def hook(name: str, arguments: Mapping[str, Any]) -> CallResult | None:
        key = (arguments["attempt"], arguments["seq"])
        seen[key] = seen.get(key, 0) + 1
        await asyncio.sleep(rng.random() * 0.002)
        return None

    backend.hook = hook
    backend.fail_at("provision", *(failure(delivered=None) for _ in range(rng.randrange(3))))
    backend.fail_at("list_tools", *(failure(delivered=False) for _ in range(rng.randrange(3))))

    async def episode(gateway: Gateway, attempt: int) -> None:
        session = await opened(gateway, open_spec(attempt, opening=4, group_id=f"g{attempt // 4}"))
        for seq in range(rng.randrange(4)):
            arguments = f'{{"attempt": {attempt}, "seq": {seq}}}'
            repeats = rng.randrange(1, 3)
            calls = [gateway.call_tool(session, seq, "add", arguments, 5.0) for _ in range(repeats)]
            await asyncio.gather(*calls)
        await gateway.grade_episode(session, None, None, 5.0)
        if rng.random() < 0.7:
            gateway.close(session.episode.episode_id)

    async with running(backend, limits={"max_episodes": 8}, lease_ttl_s=0.05) as gateway:
        workers = [asyncio.create_task(episode(gateway, attempt)) for attempt in range(16)]
        for worker in rng.sample(workers, 3):
            await asyncio.sleep(rng.random() * 0.003)
            worker.cancel()
        await asyncio.wait(workers, timeout=10.0)
        assert all(worker.done() for worker in workers)
        await gateway.drain(0.0)
        assert gateway.opener.created == gateway.closer.closed
        assert gateway.admission.waiting == 0
    assert backend.running == {}
    assert set(seen.values()) <= {1}
