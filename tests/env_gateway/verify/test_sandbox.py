"""Verifiers that try to break out: each leaves no trace, and the next one runs as if it had not
been."""

from collections.abc import AsyncGenerator
from functools import partial
from types import ModuleType

import pytest
import pytest_asyncio

from flotilla_env_gateway.grading.verdict import judge_execution
from flotilla_env_gateway.ports import Execution
from tests.env_gateway.escapes import (
    exhausting,
    files,
    forgery,
    internals,
    kernel,
    needs,
    network,
    never_ending,
    results,
    side_channels,
    signals,
    talking,
)
from tests.env_gateway.escapes.ground import LONG_S, SHORT_S, Ground, opened, programs
from tests.env_gateway.verify.sandboxed import needs_sandbox

pytestmark = [pytest.mark.asyncio(loop_scope="module"), needs_sandbox]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def ground() -> AsyncGenerator[Ground]:
    async with opened() as ground:
        yield ground


def no_grade(execution: Execution) -> bool:
    return not judge_execution(execution, attempts=1).is_known


@pytest.mark.parametrize("module", [files, network, kernel, signals, side_channels])
async def test_a_verifier_reaches_nothing_but_its_databases(
    ground: Ground, module: ModuleType
) -> None:
    execution = await ground.run_together(module)
    assert (execution.result, execution.error) == (0, None), execution
    await ground.assert_unharmed(execution)


async def test_a_verifier_has_what_python_needs(ground: Ground) -> None:
    execution = await ground.run_together(needs)
    assert execution.result == len(programs(needs)), execution


async def test_a_verifier_of_every_other_kind_is_contained(ground: Ground) -> None:
    """One of each kind, as each takes seconds."""
    short = partial(ground.run, timeout_s=SHORT_S)
    assert (await ground.run(exhausting.many_small_objects)).result == 0
    assert (await short(never_ending.swallow_the_request_to_end)).timed_out
    assert (await ground.run(internals.compiled_for_all)).result == 0
    assert no_grade(await short(talking.many_lines))
    assert no_grade(await ground.run(results.claimed_float, own_result=True))
    await ground.assert_unharmed()


async def test_a_verifier_uses_up_no_more_than_its_own_process(ground: Ground) -> None:
    def came_back(execution: Execution) -> bool:
        return execution.result in (None, 0) and not execution.timed_out

    unlike = await ground.unlike(programs(exhausting), ground.run, came_back)
    assert not unlike, unlike
    await ground.assert_unharmed()


async def test_a_verifier_that_never_ends_is_ended(ground: Ground) -> None:
    run = partial(ground.run, timeout_s=SHORT_S)
    unlike = await ground.unlike(programs(never_ending), run, lambda e: e.timed_out)
    assert not unlike, unlike
    await ground.assert_unharmed()


async def test_a_verifier_that_takes_its_worker_to_pieces_spoils_no_grade_but_its_own(
    ground: Ground,
) -> None:
    run = partial(ground.run, timeout_s=2.0)
    await ground.unlike(programs(internals), run, lambda e: True, followed=True)
    await ground.assert_unharmed()


async def test_a_verifier_that_speaks_to_the_gateway_gets_no_grade(ground: Ground) -> None:
    async def run(program: object) -> Execution:
        endless = program is talking.questions_without_reading_answers
        assert callable(program)
        return await ground.run(program, timeout_s=SHORT_S if endless else LONG_S)

    unlike = await ground.unlike(programs(talking), run, no_grade, followed=True)
    assert not unlike, unlike
    await ground.assert_unharmed()


async def test_what_is_no_number_is_no_grade(ground: Ground) -> None:
    run = partial(ground.run, own_result=True)
    unlike = await ground.unlike(programs(results), run, no_grade)
    assert not unlike, unlike
    await ground.assert_unharmed()


async def test_a_forged_result_counts_once_and_as_much_as_a_returned_one(ground: Ground) -> None:
    execution = await ground.run(forgery.result_twice)
    assert (execution.result, execution.error) == (1, None)
    await ground.assert_unharmed(execution)
