"""Runs that share a gateway: none waits behind all requests of another."""

import asyncio
from typing import Any

import pytest

from flotilla_common.domain.attempts import ToolOutcome
from flotilla_env_gateway.episodes.episode_session import Session
from flotilla_env_gateway.episodes.gateway import Gateway
from flotilla_env_gateway.ports import Verification
from flotilla_env_gateway.verify.verifier_pool import VerifierPool
from tests.support.fake_environments import ScriptedBackend
from tests.support.fake_gateway import open_spec, opened, running
from tests.support.waiting import until

MANY = 200


async def sessions_of(gateway: Gateway, run_id: str, count: int) -> list[Session]:
    specs = [open_spec(i, run_id=run_id, request_id=f"{run_id}-{i}") for i in range(count)]
    return list(await asyncio.gather(*(opened(gateway, spec) for spec in specs)))


async def call(gateway: Gateway, session: Session) -> None:
    seq = session.episode.next_seq
    answer, _ = await gateway.call_tool(session, seq, "look", "{}", 60.0)
    assert answer.outcome is ToolOutcome.OK


def done(tasks: list[asyncio.Task[Any]]) -> int:
    return sum(task.done() for task in tasks)


async def finish(tasks: list[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)


@pytest.mark.parametrize(
    "limits", [{"start_calls": 8, "max_calls": 8}, {"start_calls": MANY, "max_calls": 8}]
)
async def test_a_call_waits_for_one_call_of_another_run_and_not_for_all(
    limits: dict[str, int],
) -> None:
    backend = ScriptedBackend()
    async with running(backend, limits=limits) as gateway:
        busy = await sessions_of(gateway, "busy", MANY)
        (other,) = await sessions_of(gateway, "other", 1)
        backend.delays["call"] = 0.02
        calls = [asyncio.create_task(call(gateway, session)) for session in busy]
        # One place stays free for others.
        await until(lambda: backend.in_flight == 7)
        await call(gateway, other)
        assert done(calls) <= 24
        await finish(calls)


async def test_a_creation_waits_for_one_of_another_run_and_not_for_all() -> None:
    backend = ScriptedBackend()
    limits = {"start_creating": 4, "max_creating": 4}
    async with running(backend, limits=limits) as gateway:
        backend.delays["provision"] = 0.02
        busy = asyncio.create_task(sessions_of(gateway, "busy", MANY))
        await until(lambda: backend.steps["provision"] == 4)
        await sessions_of(gateway, "other", 1)
        assert backend.steps["provision"] <= 16
        await finish([busy])


async def test_a_grade_waits_for_one_of_another_run_and_not_for_all() -> None:
    """The queue is that for the few verifier processes."""
    pool = VerifierPool(size=1, memory_bytes=2**29)
    await pool.start_workers()

    async def none(*_: Any) -> Any:
        raise AssertionError("the verifier looks at nothing")

    async def graded(run_id: str) -> None:
        source = "def verify(env):\n    return 1\n"
        verification = Verification(source, "verify", none, none, {}, trusted=True, run_id=run_id)
        assert (await pool.run_verifier(verification, timeout_s=10.0)).result == 1

    busy = [asyncio.create_task(graded("busy")) for _ in range(50)]
    await asyncio.sleep(0)
    await graded("other")
    assert done(busy) <= 3
    await asyncio.gather(*busy)
    await pool.close()


async def test_a_batch_of_which_one_member_has_come_holds_no_places() -> None:
    async with running(ScriptedBackend(), limits={"batch_wait_s": 0.2}) as gateway:
        first = asyncio.create_task(opened(gateway, open_spec(0, run_id="one", opening=256)))
        await until(lambda: gateway.admission.waiting == 1)
        assert gateway.admission.held_places == 0
        await opened(gateway, open_spec(1, run_id="other", request_id="other"))
        assert not first.done()
        # The others never come, and it continues without them.
        await first


async def test_runs_get_places_by_their_weights() -> None:
    backend = ScriptedBackend()
    limits = {"start_calls": 8, "max_calls": 8, "run_weights": {"train-*": 3.0}}
    async with running(backend, limits=limits) as gateway:
        train = await sessions_of(gateway, "train-1", 60)
        other = await sessions_of(gateway, "other", 60)
        backend.delays["call"] = 0.01
        theirs = [asyncio.create_task(call(gateway, session)) for session in other]
        ours = [asyncio.create_task(call(gateway, session)) for session in train]
        await until(lambda: done(ours) >= 40)
        assert 10 <= done(theirs) <= 24
        await finish([*ours, *theirs])
