"""The fleet backend when Fleet throttles, fails and forgets: over HTTP against the emulator."""

import asyncio
import time
from typing import Any

import pytest

from flotilla_common.domain.attempts import NoGradeReason, ToolOutcome
from flotilla_env_gateway.adapters.fleet import tools as fleet_tools
from flotilla_env_gateway.episodes.episode_book import EpisodeState
from flotilla_env_gateway.ports import BackendError
from tests.env_gateway.backends.bench import TIMEOUT_S, Bench
from tests.env_gateway.backends.fleet_harness import Emulator, fleet_bench
from tests.support.fake_gateway import open_spec, states, task_json

TOO_MANY = {"detail": "Too many in-flight instance creations for this team"}
PLACEMENT = {"detail": {"error": "seed_placement_failed", "message": "no host", "retryable": True}}


def reply(status: int, body: Any = "", **more: Any) -> dict[str, Any]:
    return {"status": status, "body": body, **more}


def fault(on: str, *replies: dict[str, Any] | None, **more: Any) -> dict[str, Any]:
    return {"on": [on], "replies": replies, **more}


async def failing_open(bench: Bench, **task: Any) -> str:
    text = task_json(**{**bench.harness.task(0), **task})
    session, entered = await states(bench.gateway, open_spec(task=text))
    assert entered[-1] is EpisodeState.FAILED
    return session.failure or ""


async def test_a_creation_outlasts_what_fleet_calls_temporary(emulator: Emulator) -> None:
    async with fleet_bench(emulator) as bench:
        replies = [
            reply(429, TOO_MANY, retry_after=0.2),
            reply(400, PLACEMENT),
            reply(502, "<html>502 Bad Gateway</html>"),
            reply(500, {"detail": f"creating failed: {PLACEMENT}".replace("'", '"')}),
        ]
        await emulator.faults(faults=[fault("create", *replies)])
        started = time.monotonic()
        session = await bench.open()
        assert time.monotonic() - started > 0.2
        assert (await emulator.count())["requests"]["create"] == 5
        assert await emulator.created() == 1
        await bench.solve(session)
        assert (await bench.grade(session)).reward == 1.0


async def test_a_creation_whose_answer_is_lost_makes_no_second_instance(
    emulator: Emulator,
) -> None:
    async with fleet_bench(emulator) as bench:
        await emulator.faults(faults=[fault("create", reply(502, applied=True))])
        await bench.open()
        assert await emulator.created() == 1


async def test_an_instance_that_is_still_pending_is_waited_for_and_adopted(
    emulator: Emulator,
) -> None:
    async with fleet_bench(emulator) as bench:
        await emulator.faults(create_delay=0.6)
        request = bench.request()
        with pytest.raises(BackendError) as caught:
            await bench.backend.provision_instance(request, timeout_s=0.2)
        assert not (caught.value.invalid or caught.value.lost)
        instance = await bench.provision(request)
        assert await instance.list_tools(timeout_s=TIMEOUT_S)
        assert await emulator.created() == 1
        await instance.close(timeout_s=TIMEOUT_S)


async def test_an_instance_that_ended_while_it_was_created_is_replaced(
    emulator: Emulator,
) -> None:
    async with fleet_bench(emulator) as bench:
        await emulator.faults(faults=[fault("create", reply(504, applied=True))])
        request = bench.request()
        with pytest.raises(BackendError):
            await bench.provision(request)
        (created,) = (await emulator.count())["instances"]["live"]
        await emulator.kill(created)
        with pytest.raises(BackendError, match=f"could not start instance {created}"):
            await bench.provision(request)
        instance = await bench.provision(request)
        assert instance.instance_id != created
        await instance.close(timeout_s=TIMEOUT_S)


async def test_a_full_account_is_waited_for_until_a_place_is_free(emulator: Emulator) -> None:
    async with fleet_bench(emulator) as bench:
        await emulator.faults(instance_limit=1)
        first = await bench.open(0)
        second = asyncio.create_task(bench.open(1))
        done, _ = await asyncio.wait({second}, timeout=0.5)
        assert not done
        await bench.close(first)
        await bench.solve(await second)


async def test_episodes_too_short_to_be_created_leave_creations_as_they_were(
    emulator: Emulator,
) -> None:
    async with fleet_bench(emulator) as bench:
        await bench.open()
        creations = bench.gateway.opener.creations["fleet"]
        before = creations.limit
        await emulator.faults(create_delay=2.0)
        task = task_json(**bench.harness.task(0))
        specs = [open_spec(index, task=task, budget_s=0.3) for index in range(1, 9)]
        await asyncio.gather(*(states(bench.gateway, spec) for spec in specs))
        assert creations.limit == before
        await emulator.faults()


@pytest.mark.parametrize(
    "task", [{"env_id": "nowhere"}, {"version": "v9"}, {"data_id": "no-such-data"}]
)
async def test_what_fleet_does_not_have_fails_the_open_at_once(
    emulator: Emulator, task: dict[str, str]
) -> None:
    async with fleet_bench(emulator) as bench:
        assert next(iter(task.values())) in await failing_open(bench, **task)
        assert (await emulator.count())["requests"]["create"] == 1


async def test_a_wrong_key_fails_the_open_at_once_and_names_the_setting(
    emulator: Emulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLOTILLA_TEST_WRONG_KEY", "wrong")
    key, section = "FLOTILLA_TEST_WRONG_KEY", {"close_timeout_s": 0.2}
    async with fleet_bench(emulator, section=section, api_key_env=key) as bench:
        assert "env_gateway.backends.fleet.api_key_env" in await failing_open(bench)
        # What may have been created cannot be deleted with this key either.
        assert bench.gateway.closer.pending == 1


async def test_a_read_is_repeated_when_the_proxy_fails(emulator: Emulator) -> None:
    async with fleet_bench(emulator) as bench:
        session = await bench.open()
        await emulator.faults(faults=[fault("call_tool", reply(502), reply(503), reply(504))])
        answer = await bench.call(session, bench.harness.read_call)
        assert (answer.outcome, answer.attempts) == (ToolOutcome.OK, 4)


@pytest.mark.parametrize("applied", [True, False])
async def test_a_write_is_never_sent_twice_when_the_proxy_fails(
    emulator: Emulator, applied: bool
) -> None:
    async with fleet_bench(emulator) as bench:
        session = await bench.open()
        await emulator.faults(faults=[fault("call_tool", reply(502, applied=applied))])
        answer = await bench.call(session, bench.harness.write_call)
        assert (answer.outcome, answer.attempts) == (ToolOutcome.OUTCOME_UNKNOWN, 1)
        executed = (await emulator.count())["tools"]
        assert executed.get(bench.harness.write_call[0], 0) == int(applied)
        assert (await bench.grade(session)).reason is NoGradeReason.TAINTED


async def test_a_throttled_write_is_sent_again_since_it_was_not_executed(
    emulator: Emulator,
) -> None:
    async with fleet_bench(emulator) as bench:
        session = await bench.open()
        throttled = reply(429, {"detail": "Rate limit exceeded"}, retry_after=0.1)
        await emulator.faults(faults=[fault("call_tool", throttled, throttled)])
        answer = await bench.call(session, bench.harness.write_call)
        assert answer.attempts == 3
        assert answer.outcome in (ToolOutcome.OK, ToolOutcome.TOOL_ERROR)
        assert (await emulator.count())["tools"][bench.harness.write_call[0]] == 1


async def test_an_instance_that_dies_during_a_call_is_lost_at_once(emulator: Emulator) -> None:
    async with fleet_bench(emulator) as bench:
        session = await bench.open()
        await emulator.faults(faults=[fault("call_tool", reply(502, kill=True))])
        started = time.monotonic()
        answer = await bench.call(session, bench.harness.write_call)
        assert (answer.outcome, answer.attempts) == (ToolOutcome.SESSION_LOST, 1)
        assert time.monotonic() - started < 5.0
        assert (await bench.grade(session)).reason is NoGradeReason.INSTANCE_LOST


async def test_an_address_that_answers_404_for_a_running_instance_is_no_loss(
    emulator: Emulator,
) -> None:
    async with fleet_bench(emulator) as bench:
        session = await bench.open()
        await emulator.faults(faults=[fault("mcp", *[reply(404)] * 3)])
        answer = await bench.call(session, bench.harness.read_call)
        assert answer.outcome is ToolOutcome.OK, answer
        assert (await bench.grade(session)).reward == 0.0


@pytest.mark.parametrize("served", ["mcp", "api/v1/mcp"])
async def test_an_image_with_one_of_the_addresses_works_and_is_remembered(
    emulator: Emulator, served: str
) -> None:
    absent = {"mcp": "api/v1/mcp", "api/v1/mcp": "mcp"}[served]
    async with fleet_bench(emulator) as bench:
        gone = fault("mcp", endpoint=absent, rate=1.0, reply=reply(404))
        await emulator.faults(faults=[gone])
        await bench.solve(await bench.open(0))
        probed = (await emulator.count())["injected"]
        await bench.solve(await bench.open(1))
        assert (await emulator.count())["injected"] == probed, "the absent address was probed again"


async def test_an_address_that_only_fails_is_not_waited_for_for_ever(
    emulator: Emulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet_tools, "_GRACE_S", 0.3)
    async with fleet_bench(emulator) as bench:
        down = fault("mcp", endpoint="mcp", rate=1.0, reply=reply(502))
        await emulator.faults(faults=[down])
        started = time.monotonic()
        session = await bench.open(0)
        assert time.monotonic() - started >= 0.3
        await bench.solve(session)
        await emulator.faults()
        await bench.solve(await bench.open(1))
        listed = (await emulator.count())["requests"]["list_tools"]
        await bench.open(2)
        again = (await emulator.count())["requests"]["list_tools"]
        assert again == listed + 1, "the address that serves nothing else was asked again"


async def test_tools_are_not_taken_from_one_address_while_the_other_still_warms_up(
    emulator: Emulator,
) -> None:
    async with fleet_bench(emulator) as bench:
        everything = (await bench.open(0)).tools
    async with fleet_bench(emulator) as bench:
        late = fault("mcp", *[reply(503)] * 2, endpoint="mcp")
        await emulator.faults(faults=[late])
        assert (await bench.open(0)).tools == everything


async def test_a_warm_up_is_polled_and_costs_little_more_than_it_takes(
    emulator: Emulator,
) -> None:
    async with fleet_bench(emulator) as bench:
        started = time.monotonic()
        await bench.open(0)
        assert time.monotonic() - started < 4.0, "a fixed pause before the first question"
        await emulator.faults(mcp_warmup=0.6)
        started = time.monotonic()
        await bench.open(1)
        assert 0.5 < time.monotonic() - started < 5.0


async def test_many_episodes_through_a_bad_proxy_are_never_graded_wrongly_and_leak_nothing(
    emulator: Emulator,
) -> None:
    async def episode(bench: Bench, attempt: int) -> float | None:
        session = await bench.open(attempt, task=attempt % 3)
        for call in bench.harness.solution(attempt % 3):
            answer = await bench.call(session, call)
            if answer.outcome is not ToolOutcome.OK:
                assert answer.outcome in (ToolOutcome.OUTCOME_UNKNOWN, ToolOutcome.SESSION_LOST)
                return None
        return (await bench.grade(session)).reward

    section = {"limits": {"max_creating": 8}, "retry": {"budget_cap": 200}}
    async with fleet_bench(emulator, section=section) as bench:
        lost = {"on": ["any"], "rate": 0.05, "reply": reply(502, applied=True)}
        refused = {"on": ["any"], "rate": 0.05, "reply": reply(429, retry_after=0.05)}
        await emulator.faults(faults=[lost, refused], seed=7)
        rewards = await asyncio.gather(*(episode(bench, attempt) for attempt in range(24)))
        assert set(rewards) <= {1.0, None} and rewards.count(1.0) >= 12
        assert await emulator.created() == 24
