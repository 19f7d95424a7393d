"""The contract of every backend, through the real gateway and with real servers and verifiers."""

import asyncio
import json
import sqlite3
from typing import Any

import pytest

from flotilla_common.domain.attempts import NoGradeReason, ToolOutcome
from flotilla_env_gateway.episodes.episode_book import EpisodeState
from flotilla_env_gateway.ports import BackendError, Orphan, QueryError, Text
from tests.env_gateway.backends.bench import TIMEOUT_S, Bench
from tests.env_gateway.backends.harness import Can
from tests.support.fake_gateway import open_spec, states
from tests.support.waiting import until

_TABLES = "SELECT name FROM sqlite_master WHERE type = 'table'"


async def test_the_solution_passes_and_nothing_else_does(bench: Bench) -> None:
    for task in range(3):
        session, idle = await bench.open(2 * task, task=task), await bench.open(2 * task + 1)
        await bench.solve(session, task)
        grade, untouched = await bench.grade(session), await bench.grade(idle)
        assert (grade.reward, grade.reason) == (1.0, None), grade
        assert untouched.reward == bench.harness.untouched_reward, untouched
        await bench.close(session, idle)


@pytest.mark.needs(Can.CHECKS)
async def test_a_grade_reports_which_checks_passed_and_which_failed(bench: Bench) -> None:
    solved, idle = await bench.open(0), await bench.open(1)
    await bench.solve(solved)
    passed, failed = await bench.grade(solved), await bench.grade(idle)
    assert passed.checks_passed and not passed.checks_failed
    assert failed.checks_failed
    await bench.close(solved, idle)


async def test_every_tool_has_a_schema_and_all_instances_have_the_same(bench: Bench) -> None:
    first, second = await bench.open(0), await bench.open(1)
    assert first.tools and first.tools == second.tools
    for tool in first.tools.values():
        assert json.loads(tool.input_schema_json)["type"] == "object"
    for name, _ in (*bench.harness.solution(0), bench.harness.read_call):
        assert name in first.tools
    await bench.close(first, second)


@pytest.mark.needs(Can.ANNOTATE)
async def test_tools_declare_whether_they_may_be_called_again(bench: Bench) -> None:
    session = await bench.open()
    assert session.tools[bench.harness.read_call[0]].is_repeatable
    assert not session.tools[bench.harness.write_call[0]].is_repeatable
    await bench.close(session)


@pytest.mark.needs(Can.REFUSE)
async def test_a_tool_that_refuses_is_an_answer_and_the_episode_continues(bench: Bench) -> None:
    session = await bench.open()
    answer = await bench.call(session, bench.harness.refused_call)
    assert (answer.outcome, answer.attempts) == (ToolOutcome.TOOL_ERROR, 1)
    assert isinstance(answer.parts[0], Text) and answer.parts[0].text
    await bench.solve(session)
    assert (await bench.grade(session)).reward == 1.0
    await bench.close(session)


async def test_arguments_that_do_not_fit_are_reported_to_the_policy(bench: Bench) -> None:
    session = await bench.open()
    answer = await bench.call(session, bench.harness.bad_call)
    assert answer.outcome in (ToolOutcome.TOOL_ERROR, ToolOutcome.BAD_ARGUMENTS)
    assert isinstance(answer.parts[0], Text) and answer.parts[0].text
    await bench.solve(session)
    assert (await bench.grade(session)).reward == 1.0
    await bench.close(session)


async def test_an_unknown_tool_reaches_nothing(bench: Bench) -> None:
    session = await bench.open()
    answer = await bench.call(session, ("no_such_tool", {}))
    assert answer.outcome is ToolOutcome.BAD_TOOL
    assert (await bench.grade(session)).reward == bench.harness.untouched_reward
    await bench.close(session)


async def test_an_unknown_tool_is_refused_by_the_environment_too(bench: Bench) -> None:
    instance = await bench.provision()
    await instance.list_tools(timeout_s=TIMEOUT_S)
    try:
        result = await instance.call_tool("no_such_tool", {}, timeout_s=TIMEOUT_S)
        assert result.is_error
    except BackendError as error:
        assert error.delivered is False and not error.lost
    await instance.close(timeout_s=TIMEOUT_S)


async def test_instances_of_one_task_share_no_state(bench: Bench) -> None:
    sessions = [await bench.open(attempt) for attempt in range(3)]
    await bench.solve(sessions[1])
    rewards = [(await bench.grade(session)).reward for session in sessions]
    idle = bench.harness.untouched_reward
    assert rewards == [idle, 1.0, idle]
    await bench.close(*sessions)


async def test_many_episodes_run_at_once(bench: Bench) -> None:
    async def episode(attempt: int) -> float | None:
        session = await bench.open(attempt, task=attempt % 3)
        await bench.solve(session, attempt % 3)
        grade = await bench.grade(session)
        await bench.close(session)
        return grade.reward

    rewards = await asyncio.gather(*(episode(attempt) for attempt in range(12)))
    assert rewards == [1.0] * 12


@pytest.mark.needs(Can.IDEMPOTENT)
async def test_creating_twice_with_one_request_makes_one_instance(bench: Bench) -> None:
    request = bench.request()
    first, again = await bench.provision(request), await bench.provision(request)
    assert first.instance_id == again.instance_id
    assert await bench.running() == 1
    await first.close(timeout_s=TIMEOUT_S)


async def test_closing_twice_is_closing(bench: Bench) -> None:
    instance = await bench.provision()
    await instance.close(timeout_s=TIMEOUT_S)
    await instance.close(timeout_s=TIMEOUT_S)
    assert await bench.running() == 0


@pytest.mark.needs(Can.RECLAIM)
async def test_an_orphan_is_found_by_its_tag_alone(bench: Bench) -> None:
    request = bench.request()
    await bench.provision(request)
    other = await bench.provision()
    for episode_id in (request.episode_id, request.episode_id, "run.gw.never-was"):
        await bench.backend.reclaim_orphan(Orphan(episode_id), timeout_s=TIMEOUT_S)
    assert await bench.running() == 1
    await other.list_tools(timeout_s=TIMEOUT_S)
    await other.close(timeout_s=TIMEOUT_S)


async def test_giving_up_while_it_opens_leaves_nothing(bench: Bench) -> None:
    for steps in range(6):
        opening = asyncio.create_task(bench.open(steps, group_id=f"given-up-{steps}"))
        for _ in range(4**steps):
            await asyncio.sleep(0)
        opening.cancel()
        await asyncio.wait({opening})
    await bench.gateway.drain(0.0)
    assert await bench.running() == 0


async def test_an_instance_that_ends_behind_our_back_is_lost_and_has_no_grade(
    bench: Bench,
) -> None:
    session, other = await bench.open(0), await bench.open(1)
    assert session.instance is not None
    await bench.harness.kill(bench.backend, session.instance.instance_id)
    answer = await bench.call(session, bench.harness.read_call)
    assert answer.outcome is ToolOutcome.SESSION_LOST, answer
    grade = await bench.grade(session)
    assert (grade.reward, grade.reason) == (None, NoGradeReason.INSTANCE_LOST), grade
    await bench.close(session, other)


async def test_a_lost_instance_without_calls_has_no_grade_either(bench: Bench) -> None:
    session = await bench.open()
    assert session.instance is not None
    await bench.harness.kill(bench.backend, session.instance.instance_id)
    grade = await bench.grade(session)
    assert (grade.reward, grade.reason) == (None, NoGradeReason.INSTANCE_LOST), grade
    await bench.close(session)


@pytest.mark.needs(Can.SHOW_END)
async def test_a_worker_that_renews_hears_which_of_its_instances_has_ended(bench: Bench) -> None:
    session, other = await bench.open(0), await bench.open(1)
    assert session.instance is not None
    ids = [one.episode.episode_id for one in (session, other)]
    assert bench.gateway.renew_leases("rollout-0", ids) == []
    await bench.harness.kill(bench.backend, session.instance.instance_id)
    await until(lambda: ids[0] in bench.gateway.renew_leases("rollout-0", ids))
    await bench.close(session, other)


@pytest.mark.needs(Can.DIE)
async def test_after_a_loss_new_episodes_open(bench: Bench) -> None:
    session = await bench.open(0)
    assert session.instance is not None
    await bench.harness.kill(bench.backend, session.instance.instance_id)
    again = await bench.open(0, try_index=1)
    await bench.solve(again)
    assert (await bench.grade(again)).reward == 1.0
    await bench.close(session, again)


async def test_a_server_that_answers_nothing_costs_a_call_its_time_and_no_more(
    bench: Bench,
) -> None:
    session = await bench.open()
    loop = asyncio.get_running_loop()
    with bench.harness.frozen(bench.backend):
        started = loop.time()
        answer = await bench.call(session, bench.harness.read_call, timeout_s=0.3)
        assert loop.time() - started < 0.3 + 0.25
        repeatable = session.tools[bench.harness.read_call[0]].is_repeatable
        assert answer.outcome is (
            ToolOutcome.DEADLINE if repeatable else ToolOutcome.OUTCOME_UNKNOWN
        )
    await bench.close(session)


async def test_a_write_that_was_not_answered_is_of_unknown_outcome_and_taints(
    bench: Bench,
) -> None:
    session = await bench.open()
    with bench.harness.frozen(bench.backend):
        answer = await bench.call(session, bench.harness.write_call, timeout_s=0.3)
    assert (answer.outcome, answer.attempts) == (ToolOutcome.OUTCOME_UNKNOWN, 1)
    grade = await bench.grade(session)
    assert (grade.reward, grade.reason) == (None, NoGradeReason.TAINTED)
    await bench.close(session)


@pytest.mark.needs(Can.DATABASE)
async def test_seed_and_current_are_equal_until_something_changes(bench: Bench) -> None:
    session = await bench.open()
    instance = session.instance
    assert instance is not None

    async def content(db: str) -> dict[str, list[list[Any]]]:
        names = (await instance.query_database(db, _TABLES, (), timeout_s=TIMEOUT_S)).rows
        tables: dict[str, list[list[Any]]] = {}
        for (name,) in names:
            rows = await instance.query_database(
                db, f"SELECT * FROM {name}", (), timeout_s=TIMEOUT_S
            )
            tables[str(name)] = [list(row) for row in rows.rows]
        return tables

    seed = await content("seed")
    assert seed and seed == await content("current")
    await bench.solve(session)
    assert seed != await content("current")
    assert seed == await content("seed")
    await bench.close(session)


@pytest.mark.needs(Can.DATABASE)
async def test_a_snapshot_equals_what_queries_show(bench: Bench) -> None:
    session = await bench.open()
    await bench.solve(session)
    assert session.instance is not None
    snapshot = await session.instance.snapshot_database("current", timeout_s=TIMEOUT_S)
    if snapshot is not None:
        copy = sqlite3.connect(":memory:")
        copy.deserialize(snapshot)
        names = await session.instance.query_database("current", _TABLES, (), timeout_s=TIMEOUT_S)
        for (name,) in names.rows:
            sql = f"SELECT * FROM {name}"
            requests = await session.instance.query_database(
                "current", sql, (), timeout_s=TIMEOUT_S
            )
            assert [list(row) for row in copy.execute(sql)] == [list(row) for row in requests.rows]
        copy.close()
    await bench.close(session)


@pytest.mark.needs(Can.DATABASE)
@pytest.mark.parametrize(
    ("db", "sql"),
    [("current", "SELEC"), ("current", "DROP TABLE bookings"), ("elsewhere", "SELECT 1")],
)
async def test_a_query_that_cannot_run_is_the_verifiers_fault(
    bench: Bench, db: str, sql: str
) -> None:
    session = await bench.open()
    assert session.instance is not None
    with pytest.raises(QueryError):
        await session.instance.query_database(db, sql, (), timeout_s=TIMEOUT_S)
    await bench.solve(session)
    await bench.close(session)


@pytest.mark.needs(Can.REFUSE_DATA)
async def test_data_that_does_not_exist_fails_the_open_at_once(bench: Bench) -> None:
    task = json.dumps({**bench.harness.task(0), "data_id": "nowhere"})
    session, entered = await states(bench.gateway, open_spec(task=task))
    assert entered[-1] is EpisodeState.FAILED
    assert "nowhere" in (session.failure or "")


async def test_what_it_shows_at_the_start_is_ready_with_the_tools(bench: Bench) -> None:
    session = await bench.open()
    assert session.instance is not None
    parts = await session.instance.get_first_observation(timeout_s=TIMEOUT_S)
    assert all(part == again for part, again in zip(parts, session.first_observation, strict=True))
    await bench.close(session)
