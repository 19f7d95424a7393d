"""Fleet's zeros that may be no grade, and deletions that Fleet refuses."""

from collections.abc import Iterator
from typing import Any

import pytest

from services.env_gateway.grading import Reason
from tests.env_gateway.backends.fleet_harness import Emulator, fleet_bench


@pytest.fixture(scope="module")
def emulator() -> Iterator[Emulator]:
    emulator = Emulator()
    emulator.start()
    yield emulator
    emulator.stop()


def unhealthy(*operations: str, **more: Any) -> dict[str, Any]:
    return {"on": operations, "rate": 1.0, "reply": {"status": 502}, **more}


async def test_a_zero_is_no_grade_while_nobody_can_say_that_the_instance_ran(
    emulator: Emulator,
) -> None:
    async with fleet_bench(emulator, section={"verifiers": {"timeout_s": 3.0}}) as bench:
        session = await bench.open()
        await emulator.faults(faults=[unhealthy("get_instance")])
        grade = await bench.grade(session)
        assert (grade.reward, grade.reason) == (None, Reason.EXECUTION_FAILED), grade
        await emulator.faults()
        assert (await bench.grade(session)).reward == 0.0


async def test_a_pass_needs_no_such_word(emulator: Emulator) -> None:
    async with fleet_bench(emulator) as bench:
        session = await bench.open()
        await bench.solve(session)
        await emulator.faults(faults=[unhealthy("get_instance")])
        assert (await bench.grade(session)).reward == 1.0
