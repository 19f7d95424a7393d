"""Failures that no adapter foresaw: no caller waits for ever, nothing leaks, nothing is called
twice."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from flotilla_common.domain.attempts import Grade, NoGradeReason, ToolOutcome
from flotilla_env_gateway.adapters.fleet import wire as fleet_wire
from flotilla_env_gateway.adapters.supervised_server import SupervisedServer
from flotilla_env_gateway.api import codec
from flotilla_env_gateway.episodes.episode_book import EpisodeState
from flotilla_env_gateway.episodes.instance_journal import InstanceJournal
from flotilla_env_gateway.ports import BackendError, Tool
from tests.support.fake_environments import ScriptedBackend
from tests.support.fake_gateway import open_spec, opened, running, states
from tests.support.waiting import until


@pytest.mark.parametrize("step", ["provision", "list_tools"])
async def test_an_open_that_goes_wrong_in_any_way_is_reported_and_cleaned_up(step: str) -> None:
    backend = ScriptedBackend()
    backend.fail_at(step, KeyError("urls"))
    async with running(backend, limits={"max_episodes": 1}) as gateway:
        session, entered = await asyncio.wait_for(states(gateway, open_spec()), 5.0)
        assert entered[-1] is EpisodeState.FAILED
        assert "urls" in (session.failure or "")
        await gateway.closer.wait_until_deleted(5.0)
        assert (backend.running, gateway.admission.held_places) == ({}, 0)


async def test_a_call_that_goes_wrong_in_any_way_is_of_unknown_outcome_and_taints() -> None:
    backend = ScriptedBackend()
    backend.fail_at("call", ZeroDivisionError("a fault of the environment"))
    async with running(backend) as gateway:
        session = await opened(gateway)
        answer, _ = await gateway.call_tool(session, 0, "add", "{}", 5.0)
        assert answer.outcome is ToolOutcome.OUTCOME_UNKNOWN
        assert backend.steps["call"] == 1
        grade = await gateway.grade_episode(session, None, None, 5.0)
        assert grade.reason is NoGradeReason.TAINTED


async def test_a_close_that_goes_wrong_in_any_way_is_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("flotilla_env_gateway.episodes.instance_deletion._BASE_S", 0.001)
    backend = ScriptedBackend()
    backend.fail_at("close", KeyError("status"), OSError("no more files"))
    async with running(backend) as gateway:
        session = await opened(gateway)
        gateway.close(session.episode.episode_id)
        await gateway.closer.wait_until_deleted(5.0)
        assert (backend.running, gateway.admission.held_places) == ({}, 0)


async def test_what_is_opened_before_the_orphans_are_closed_is_no_orphan(tmp_path: Path) -> None:
    backend = ScriptedBackend()
    journal = tmp_path / "gateway.sqlite"
    left = InstanceJournal(journal)
    left.record_creating("gone-1", backend="embedded")
    left.close()
    async with running(backend, journal=journal) as gateway:
        # `run` has not had its turn yet: the instance below is on record before it reclaims.
        gateway.closer.reclaim_orphans({})
        session = await opened(gateway)
        await asyncio.sleep(0.01)
        assert (await gateway.call_tool(session, 0, "look", "{}", 5.0))[0].outcome is ToolOutcome.OK
        assert len(backend.running) == 1


async def test_attempts_of_one_lease_open_together_whatever_their_tries() -> None:
    async with running(ScriptedBackend(), limits={"max_episodes": 2}) as gateway:
        specs = [
            open_spec(0, opening=2, try_index=0),
            open_spec(1, opening=2, try_index=1),
        ]
        await asyncio.wait_for(asyncio.gather(*(opened(gateway, spec) for spec in specs)), 5.0)
        assert gateway.admission.held_places == 2


async def test_tools_that_fit_into_no_message_are_refused_in_words(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    many = tuple(Tool(f"tool{n}", "x" * 5000, "{}") for n in range(200))
    monkeypatch.setattr("tests.support.fake_environments.TOOLS", many)
    async with running(ScriptedBackend()) as gateway:
        session, entered = await states(gateway, open_spec())
        assert entered[-1] is EpisodeState.FAILED
        assert "fewer" in (session.failure or "")


def test_any_output_of_a_verifier_can_be_sent() -> None:
    wild = "\ud800" + "\U0001f600" * 499
    grade = Grade(
        reason=NoGradeReason.EXECUTION_FAILED,
        detail=wild,
        checks_passed=(wild,) * 200,
        checks_failed=(wild,) * 200,
    )
    assert codec.encode_grade(grade).ByteSize() < 2**20


async def test_a_supervised_server_does_not_get_the_token_of_the_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("FLOTILLA_TOKEN", "a-token-of-the-run-0123")
    seen = tmp_path / "environment"
    process = SupervisedServer(["sh", "-c", f"env > {seen}"], start_timeout_s=5.0)
    try:
        await until(lambda: seen.exists() and "PATH=" in seen.read_text())
    finally:
        await process.close()
    assert "a-token-of-the-run" not in seen.read_text()


async def test_a_grade_that_goes_wrong_in_any_way_is_no_grade_and_can_be_requested_again() -> None:
    backend = ScriptedBackend()
    backend.fail_at("grade", KeyError("reward"))
    async with running(backend) as gateway:
        session = await opened(gateway)
        grade = await gateway.grade_episode(session, None, None, 5.0)
        assert (grade.reward, grade.reason) == (None, NoGradeReason.EXECUTION_FAILED)
        assert "reward" in grade.detail
        assert (await gateway.grade_episode(session, None, None, 5.0)).reward == 1.0


@pytest.mark.parametrize("answer", [{"rows": 5.0}, {"columns": True}, {"rows": [1]}])
def test_rows_that_are_none_are_the_servers_fault(answer: dict[str, Any]) -> None:
    with pytest.raises(BackendError, match="query"):
        fleet_wire.parse_rows({"success": True, **answer})
