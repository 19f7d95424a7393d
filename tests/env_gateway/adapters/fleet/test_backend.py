"""Requests of the fleet backend to Fleet, and its grades: over HTTP against the emulator."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from flotilla_common.domain.attempts import Grade, NoGradeReason, ToolOutcome
from flotilla_common.rpc.errors import ConfigError
from flotilla_common.tasks.task_format import parse_task
from flotilla_env_gateway.adapters.fleet import backend as fleet
from flotilla_env_gateway.adapters.fleet.heartbeats import Heartbeats
from flotilla_env_gateway.adapters.supervised_server import SupervisedServer
from flotilla_env_gateway.config.backends import FLEET_URL, FleetConfig
from flotilla_env_gateway.config.gateway import EnvGatewayConfig
from flotilla_env_gateway.episodes.episode_session import Session
from flotilla_env_gateway.ports import BackendError, ProvisionRequest
from flotilla_environments.tasks import make_task
from tests.env_gateway.backends.bench import TIMEOUT_S, Bench
from tests.env_gateway.backends.fleet_harness import Emulator, fleet_bench
from tests.support.fake_gateway import open_spec, opened
from tests.support.grading_gateway import solve
from tests.support.waiting import until, until_seen

ANSWERING = """
def judged(env, final_answer=None, conversation=None):
    print(f"{final_answer}|{conversation}")
    return {"score": 0.5} if final_answer == "42" else 0
"""


@pytest.fixture(scope="module")
def hasty() -> Iterator[Emulator]:
    """An emulator where 30 s of a heartbeat's interval pass in half a second, which keeps MCP
    sessions and answers in event streams, and whose runners have no gate."""
    emulator = Emulator(guarded=False)
    emulator.start("--speed", "60", "--mcp-sessions")
    yield emulator
    emulator.stop()


async def open_task(bench: Bench, attempt: int = 0, **changes: Any) -> Session:
    task = {**bench.harness.task(0), **changes}
    return await opened(bench.gateway, open_spec(attempt, task=json.dumps(task)))


async def graded(emulator: Emulator, bench: Bench, *outcomes: str | None) -> Grade:
    """The grade of a solved episode whose verifier's executions end so, one after the other."""
    session = await bench.open()
    await bench.solve(session)
    kinds: Sequence[Any] = [outcome and {"kind": outcome} for outcome in outcomes]
    await emulator.faults(verifiers=kinds)
    return await bench.grade(session)


def test_fleet_itself_is_the_default_and_needs_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FLEET_API_KEY", raising=False)
    section = {"backend": "fleet", "backends": {"fleet": {}}}
    config = EnvGatewayConfig.model_validate(section).backends.fleet
    assert config is not None and config.url == FLEET_URL
    with pytest.raises(ConfigError, match=r"fleet\.api_key_env names FLEET_API_KEY.*export it"):
        fleet.build_fleet_backend(config, max_calls=1)


async def test_an_instance_is_requested_as_the_task_states(emulator: Emulator) -> None:
    async with fleet_bench(emulator, heartbeat_interval_s=90, region="us-east-1") as bench:
        made = make_task("booking", "train", 0)
        task = {
            "task_key": made["key"],
            "prompt": made["prompt"],
            "env_key": made["env_id"],
            "env_version": str(made["version"]).removeprefix("v"),
            "data_key": made["data_id"],
            "data_version": "1",
            "verifier_code": made["verifier_func"],
            "env_variables": json.dumps({"CURRENT_DATE": "2026-02-14", "SEATS": 3}),
        }
        session = await opened(bench.gateway, open_spec(task=json.dumps(task)))
        (body,) = await emulator.call("GET", "/v1/env/instances?status=running")
        assert (body["env_key"], body["version"]) == ("booking", "v1")
        assert (body["data_key"], body["data_version"]) == (made["data_id"], "v1")
        assert body["env_variables"] == {"CURRENT_DATE": "2026-02-14", "SEATS": 3}
        assert (body["run_id"], body["region"]) == (session.episode.episode_id, "us-east-1")
        assert body["heartbeat_interval"] == 90
        await solve(bench.gateway, session, made)
        assert (await bench.grade(session)).reward == 1.0


@pytest.mark.parametrize("verify", ["remote", "local"])
async def test_verifiers_run_at_fleet_or_in_the_gateway_with_the_same_grade(
    emulator: Emulator, verify: str
) -> None:
    async with fleet_bench(emulator, verify=verify) as bench:
        solved, idle = await bench.open(0), await bench.open(1)
        await bench.solve(solved)
        grades = [await bench.grade(session) for session in (solved, idle)]
        assert [grade.reward for grade in grades] == [1.0, 0.0]
        assert grades[0].checks_passed and grades[1].checks_failed
        executed = (await emulator.count())["requests"].get("execute_verifier", 0)
        assert executed == (2 if verify == "remote" else 0)


async def test_a_verifier_is_uploaded_once_for_all_attempts(emulator: Emulator) -> None:
    source = f"def verify(env):\n    return 1  # {os.urandom(4).hex()}\n"
    async with fleet_bench(emulator) as bench:
        for attempt in range(3):
            session = await open_task(bench, attempt, verifier_func=source)
            assert (await bench.grade(session)).reward == 1.0
        requests = (await emulator.count())["requests"]
        assert (requests["check_verifier"], requests["execute_verifier"]) == (1, 3)
    async with fleet_bench(emulator) as bench:
        session = await open_task(bench, verifier_func=source)
        gone = {"status": 404, "body": {"detail": "Bundle not found"}}
        await emulator.faults(faults=[{"on": ["execute_verifier"], "replies": [gone]}])
        grade = await bench.grade(session)
        assert (grade.reward, grade.attempts) == (1.0, 1)


async def test_a_verifier_gets_the_answer_and_the_conversation(emulator: Emulator) -> None:
    async with fleet_bench(emulator) as bench:
        session = await open_task(bench, verifier_func=ANSWERING)
        grade = await bench.gateway.grade_episode(session, "42", '{"role": "user"}', TIMEOUT_S)
        assert (grade.reward, grade.stdout) == (0.5, '42|{"role": "user"}\n')


async def test_executions_that_fail_are_repeated_until_one_is_a_grade(emulator: Emulator) -> None:
    async with fleet_bench(emulator) as bench:
        grade = await graded(emulator, bench, "failed", "judge_error", None)
        assert (grade.reward, grade.attempts) == (1.0, 3)


@pytest.mark.parametrize(
    ("outcomes", "reason"),
    [
        (["failed"] * 2, NoGradeReason.EXECUTION_FAILED),
        (["judge_error"] * 2, NoGradeReason.JUDGE_ERROR),
        (["no_result"], NoGradeReason.EXECUTION_FAILED),
    ],
)
async def test_what_is_no_grade_is_never_zero(
    emulator: Emulator, outcomes: list[str], reason: NoGradeReason
) -> None:
    section = {"verifiers": {"attempts": len(outcomes)}}
    async with fleet_bench(emulator, section=section) as bench:
        grade = await graded(emulator, bench, *outcomes)
        assert (grade.reward, grade.reason, grade.attempts) == (None, reason, len(outcomes))


async def test_a_verifier_that_never_ends_costs_its_time_and_gives_no_grade(
    emulator: Emulator,
) -> None:
    section = {"verifiers": {"attempts": 1, "timeout_s": 1.5}}
    async with fleet_bench(emulator, section=section) as bench:
        source = "def verify(env):\n    while True:\n        continue\n"
        grade = await bench.grade(await open_task(bench, verifier_func=source))
        assert (grade.reward, grade.reason) == (None, NoGradeReason.TIMEOUT), grade


async def test_a_zero_of_an_instance_that_ended_meanwhile_is_no_grade(emulator: Emulator) -> None:
    source = "import time\ndef verify(env):\n    time.sleep(0.5)\n    return 0\n"
    async with fleet_bench(emulator) as bench:
        session = await open_task(bench, verifier_func=source)
        grading = asyncio.create_task(bench.grade(session))
        await until_seen(emulator.count, lambda seen: seen["in_flight"]["verifiers"])
        assert session.instance is not None
        await emulator.kill(session.instance.instance_id)
        grade = await grading
        assert (grade.reward, grade.reason) == (None, NoGradeReason.INSTANCE_LOST), grade


async def test_a_proxy_that_fails_while_grading_is_retried(emulator: Emulator) -> None:
    async with fleet_bench(emulator) as bench:
        session = await bench.open()
        await bench.solve(session)
        replies = [{"status": 502}, {"status": 429, "retry_after": 0.1}]
        await emulator.faults(faults=[{"on": ["execute_verifier"], "replies": replies}])
        grade = await bench.grade(session)
        # The proxy may have passed the first one on; the second was refused, and is no attempt.
        assert (grade.reward, grade.attempts) == (1.0, 2)


async def test_a_runner_whose_gate_has_a_new_token_is_read_all_the_same(
    emulator: Emulator,
) -> None:
    async with fleet_bench(emulator, verify="local") as bench:
        session = await bench.open()
        await bench.solve(session)
        assert session.instance is not None
        await session.instance.query_database("seed", "SELECT 1", (), timeout_s=TIMEOUT_S)
        await asyncio.sleep(1.05)
        await emulator.faults(runner_token="of today")
        assert (await bench.grade(session)).reward == 1.0
        assert (await emulator.count())["requests"]["runner_token"] == 2


async def test_where_runners_have_no_gate_that_is_queried_once(hasty: Emulator) -> None:
    async with fleet_bench(hasty, verify="local", heartbeat_interval_s=3600) as bench:
        sessions = [await bench.open(attempt) for attempt in range(3)]
        await bench.solve(sessions[0])
        rewards = [(await bench.grade(session)).reward for session in sessions]
        assert rewards == [1.0, 0.0, 0.0]
        assert (await hasty.count())["requests"]["runner_token"] == 1


async def test_instances_live_by_heartbeats_and_end_when_the_gateway_is_gone(
    hasty: Emulator,
) -> None:
    async with fleet_bench(hasty, heartbeat_interval_s=30) as bench:
        backend = bench.backend
        assert isinstance(backend, fleet.FleetBackend)
        backend.connection.heartbeats = Heartbeats(ttl_s=0.5)
        sessions = [await bench.open(attempt) for attempt in range(3)]
        await asyncio.sleep(1.2)
        assert await bench.running() == 3
        await bench.solve(sessions[0])
        # The remains of a killed gateway.
        await backend.connection.heartbeats.close()
        await until_seen(bench.running, lambda count: count == 0, 5.0)
        stopped = (await hasty.count())["instances"]["stopped"]
        assert stopped["heartbeat"] == 3
        answer = await bench.call(sessions[0], bench.harness.read_call)
        assert answer.outcome is ToolOutcome.SESSION_LOST and "heartbeat" in str(answer.parts)


async def test_a_heartbeat_learns_that_an_instance_has_ended(emulator: Emulator) -> None:
    async with fleet_bench(emulator) as bench:
        instance = await bench.provision()
        assert isinstance(instance, fleet.FleetInstance)
        await instance.send_heartbeat(5.0)
        await emulator.kill(instance.instance_id)
        with pytest.raises(BackendError) as caught:
            await instance.send_heartbeat(5.0)
        assert caught.value.lost
        requested = (await emulator.count())["requests"]["get_instance"]
        with pytest.raises(BackendError) as caught:
            await instance.call_tool("find_bookings", {}, timeout_s=TIMEOUT_S)
        assert caught.value.lost
        assert (await emulator.count())["requests"]["get_instance"] == requested


async def test_a_worker_that_renews_hears_of_an_instance_that_ended_unheard(
    hasty: Emulator,
) -> None:
    async with fleet_bench(hasty, heartbeat_interval_s=30) as bench:
        backend = bench.backend
        assert isinstance(backend, fleet.FleetBackend)
        backend.connection.heartbeats = Heartbeats(ttl_s=0.5)
        session = await bench.open()
        held = [session.episode.episode_id]
        assert bench.gateway.renew_leases("rollout-0", held) == []
        await hasty.faults(faults=[{"on": ["heartbeat"], "rate": 1.0}])
        await until(lambda: backend.lateness.late == 1)
        await until(lambda: bench.gateway.renew_leases("rollout-0", held) == held)
        answer = await bench.call(session, bench.harness.read_call)
        assert answer.outcome is ToolOutcome.SESSION_LOST
        assert (await bench.grade(session)).reason is NoGradeReason.INSTANCE_LOST


async def test_servers_with_sessions_and_event_streams_serve_as_well(hasty: Emulator) -> None:
    async with fleet_bench(hasty, heartbeat_interval_s=3600) as bench:
        session = await open_task(bench)
        await bench.solve(session)
        assert (await bench.grade(session)).reward == 1.0


async def test_a_supervised_emulator_that_dies_loses_its_instances_and_is_replaced() -> None:
    command = (sys.executable, "-m", "flotilla_environments.fleet_emulator", "--port", "0")
    backend = fleet.build_fleet_backend(FleetConfig(command=command), max_calls=4)
    task = parse_task(json.dumps(make_task("booking", "train", 0)))
    try:
        address = backend.connection.address
        assert isinstance(address, SupervisedServer)
        first = await backend.provision_instance(
            ProvisionRequest("run.gw.1-1", task, 60.0), timeout_s=30.0
        )
        assert await first.list_tools(timeout_s=TIMEOUT_S)
        assert address.pid is not None
        os.killpg(address.pid, signal.SIGKILL)
        await until(lambda: address.generation == 1)
        with pytest.raises(BackendError) as caught:
            await first.list_tools(timeout_s=TIMEOUT_S)
        assert caught.value.lost
        await first.close(timeout_s=TIMEOUT_S)
        second = await backend.provision_instance(
            ProvisionRequest("run.gw.1-2", task, 60.0), timeout_s=30.0
        )
        assert await second.list_tools(timeout_s=TIMEOUT_S)
    finally:
        await backend.close()


async def test_an_episode_of_all_apps_over_fleet_earns_what_it_should(emulator: Emulator) -> None:
    async with fleet_bench(emulator) as bench:
        for index, env_key in enumerate(("tracker", "shop")):
            task = make_task(env_key, "train", index)
            session = await opened(bench.gateway, open_spec(index, task=json.dumps(task)))
            await solve(bench.gateway, session, task)
            assert (await bench.grade(session)).reward == 1.0
