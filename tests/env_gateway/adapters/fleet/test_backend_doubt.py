"""Fleet's zeros that may be no grade, and deletions that Fleet refuses."""

import time
from collections.abc import Iterator
from typing import Any

import pytest

from flotilla_common.domain.attempts import NoGradeReason
from flotilla_env_gateway.adapters.fleet.backend import FleetBackend
from tests.env_gateway.backends.fleet_harness import Emulator, fleet_bench


@pytest.fixture(scope="module")
def hasty() -> Iterator[Emulator]:
    emulator = Emulator(guarded=False)
    emulator.start("--speed", "60")
    yield emulator
    emulator.stop()


def unhealthy(*operations: str, **more: Any) -> dict[str, Any]:
    return {"on": operations, "rate": 1.0, "reply": {"status": 502}, **more}


async def test_a_zero_is_no_grade_while_it_is_unknown_whether_the_instance_ran(
    emulator: Emulator,
) -> None:
    async with fleet_bench(emulator, section={"verifiers": {"timeout_s": 3.0}}) as bench:
        session = await bench.open()
        await emulator.faults(faults=[unhealthy("get_instance")])
        grade = await bench.grade(session)
        assert (grade.reward, grade.reason) == (None, NoGradeReason.EXECUTION_FAILED), grade
        await emulator.faults()
        assert (await bench.grade(session)).reward == 0.0


async def test_a_pass_needs_no_such_word(emulator: Emulator) -> None:
    async with fleet_bench(emulator) as bench:
        session = await bench.open()
        await bench.solve(session)
        await emulator.faults(faults=[unhealthy("get_instance")])
        assert (await bench.grade(session)).reward == 1.0


async def test_an_instance_that_takes_longer_to_start_than_its_interval_is_not_stopped(
    hasty: Emulator,
) -> None:
    async with fleet_bench(hasty, heartbeat_interval_s=30) as bench:
        # By the emulator's clock, which passes 30 s in half a second.
        await hasty.faults(create_delay=1.0)
        session = await bench.open()
        assert session.instance is not None
        assert "heartbeat" not in (await hasty.count())["instances"]["stopped"]


async def test_an_instance_whose_time_is_over_gives_no_grade(emulator: Emulator) -> None:
    async with fleet_bench(emulator) as bench:
        session = await bench.open()
        await bench.solve(session)
        assert session.instance is not None
        await emulator.kill(session.instance.instance_id)
        grade = await bench.grade(session)
        assert (grade.reward, grade.reason) == (None, NoGradeReason.INSTANCE_LOST), grade


async def test_a_wrong_key_does_not_hold_up_a_drain(
    emulator: Emulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with fleet_bench(emulator) as bench:
        await bench.open()
        backend = bench.backend
        assert isinstance(backend, FleetBackend)
        monkeypatch.setattr(backend.connection.api, "headers", {"authorization": "Bearer wrong"})
        started = time.monotonic()
        await bench.gateway.drain(0.0)
        assert time.monotonic() - started < 15.0
        monkeypatch.undo()
        # What is left in the journal is for the next start; here, for the next test.
        (left,) = (await emulator.count())["instances"]["live"]
        await emulator.kill(left)
