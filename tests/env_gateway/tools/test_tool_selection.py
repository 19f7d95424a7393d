"""Tools offered to a policy, and the gateway's own tool for the final answer."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from flotilla_common.domain.attempts import ToolOutcome
from flotilla_common.tasks.task_format import Task, TaskError, parse_task
from flotilla_env_gateway.ports import Execution, Text, Tool
from flotilla_env_gateway.tools.tool_selection import (
    NothingToOfferError,
    select_named,
    select_of_modality,
)
from tests.support.fake_environments import FakeGrader, ScriptedBackend
from tests.support.fake_gateway import open_spec, opened, running, task_json

TOOLS = [Tool(name, "", '{"type": "object"}') for name in ("search", "computer", "book")]
PROMPT = "Find the price and call submit_final_answer with it."


def select_tools(tools: Sequence[Tool], task: Task) -> Mapping[str, Tool]:
    return select_named(select_of_modality(tools, task), task)


def names(**task: Any) -> list[str]:
    return list(select_tools(TOOLS, parse_task(task_json(**task))))


def test_tool_use_leaves_the_computer_out() -> None:
    assert names() == ["search", "book"]
    assert names(task_modality="tool_use") == ["search", "book"]


@pytest.mark.parametrize("modality", ["computer_use", "browser_use"])
def test_a_screen_modality_offers_the_computer_alone(modality: str) -> None:
    assert names(task_modality=modality, prompt=PROMPT) == ["computer"]


def test_joint_offers_everything() -> None:
    assert names(task_modality="joint") == ["search", "computer", "book"]


def test_a_screen_modality_without_a_computer_is_refused_with_what_to_check() -> None:
    task = parse_task(task_json(task_modality="computer_use"))
    with pytest.raises(NothingToOfferError, match="no tool 'computer' among its 1"):
        select_tools(TOOLS[:1], task)


def test_an_unknown_modality_is_refused() -> None:
    with pytest.raises(TaskError, match="task_modality 'smell' is none of tool_use"):
        parse_task(task_json(task_modality="smell"))


def test_the_final_answer_can_be_submitted_where_the_prompt_requests_it() -> None:
    assert names(prompt=PROMPT) == ["search", "book", "submit_final_answer"]


def test_an_environments_own_submit_tool_is_not_replaced() -> None:
    own = Tool("submit_final_answer", "ours", '{"type": "object"}')
    tools = select_tools([*TOOLS, own], parse_task(task_json(prompt=PROMPT)))
    assert tools["submit_final_answer"] is own


def test_a_task_may_leave_tools_out() -> None:
    assert names(offered_tools=["book"]) == ["book"]
    assert names(offered_tools=["computer", "search"], task_modality="joint") == [
        "search",
        "computer",
    ]
    assert names(offered_tools=["book"], prompt=PROMPT) == ["book", "submit_final_answer"]
    own = Tool("submit_final_answer", "ours", '{"type": "object"}')
    task = parse_task(task_json(prompt=PROMPT, offered_tools=["book"]))
    assert select_tools([*TOOLS, own], task)["submit_final_answer"] is own


@pytest.mark.parametrize("name", ["boko", "computer"])
def test_a_tool_that_cannot_be_offered_is_refused_with_those_that_can(name: str) -> None:
    with pytest.raises(NothingToOfferError, match=f"offered_tools: .* no {name!r}.*: search, book"):
        names(offered_tools=["search", name])


@pytest.mark.parametrize("value", [[], "book", [1], [""], {"book": True}])
def test_offered_tools_are_a_list_of_names(value: object) -> None:
    with pytest.raises(TaskError, match="offered_tools must be a list of names, at least one"):
        parse_task(task_json(offered_tools=value))


async def test_a_tool_that_was_left_out_is_neither_shown_nor_callable() -> None:
    backend = ScriptedBackend()
    async with running(backend) as gateway:
        whole = await opened(gateway, open_spec())
        left, *others = list(whole.tools)
        assert others
        task = task_json(offered_tools=others)
        session = await opened(gateway, open_spec(1, task=task))
        assert list(session.tools) == others
        answer, _ = await gateway.call_tool(session, 0, left, "{}", 5.0)
        assert answer.outcome is ToolOutcome.BAD_TOOL
        assert session.readable == whole.readable, "a verifier may still read by it"


async def test_a_submitted_answer_ends_the_episode_and_is_what_is_graded() -> None:
    backend, grader = ScriptedBackend(), FakeGrader()
    async with running(backend, grader) as gateway:
        session = await opened(gateway, open_spec(task=task_json(prompt=PROMPT)))
        answer, _ = await gateway.call_tool(
            session, 0, "submit_final_answer", '{"answer": "42 EUR"}', 5.0
        )
        assert (answer.outcome, answer.done) == (ToolOutcome.OK, True)
        assert backend.steps["call"] == 0
        await gateway.grade_episode(session, None, None, 5.0)
    assert grader.seen[0].arguments == {"final_answer": "42 EUR"}


async def test_the_answer_that_a_grade_names_counts_before_the_submitted_one() -> None:
    grader = FakeGrader()
    async with running(ScriptedBackend(), grader) as gateway:
        session = await opened(gateway, open_spec(task=task_json(prompt=PROMPT)))
        await gateway.call_tool(session, 0, "submit_final_answer", '{"answer": "42"}', 5.0)
        await gateway.grade_episode(session, "43", None, 5.0)
    assert grader.seen[0].arguments == {"final_answer": "43"}


async def test_a_malformed_answer_is_reported_to_the_policy() -> None:
    async with running(ScriptedBackend()) as gateway:
        session = await opened(gateway, open_spec(task=task_json(prompt=PROMPT)))
        answer, _ = await gateway.call_tool(
            session, 0, "submit_final_answer", '{"answer": 42}', 5.0
        )
    assert answer.outcome is ToolOutcome.BAD_ARGUMENTS
    assert "a string" in str(answer.parts[0])


async def test_what_an_environment_shows_at_the_start_is_kept_for_the_first_turn() -> None:
    backend = ScriptedBackend()
    backend.first_observation = (Text("a welcome page"),)
    async with running(backend) as gateway:
        session = await opened(gateway, open_spec())
    assert session.first_observation == (Text("a welcome page"),)


async def test_a_backends_own_grade_is_taken_before_any_verifier() -> None:
    backend, grader = ScriptedBackend(), FakeGrader()
    backend.own_grade = Execution(result=0.25)
    async with running(backend, grader) as gateway:
        session = await opened(gateway, open_spec(task=task_json(verifier_func="")))
        grade = await gateway.grade_episode(session, None, None, 5.0)
    assert (grade.reward, grader.seen) == (0.25, [])


async def test_a_backends_own_grade_that_fails_is_requested_again_and_never_zero() -> None:
    backend = ScriptedBackend()
    backend.own_grade = Execution(error="502 from the verifier service", retryable=True)
    async with running(backend, verifiers={"attempts": 2}) as gateway:
        session = await opened(gateway, open_spec())
        grade = await gateway.grade_episode(session, None, None, 5.0)
    assert (grade.reward, grade.attempts, backend.steps["grade"]) == (None, 2, 2)
    assert "502" in grade.detail
