"""Checks in environments that fail, grade an episode only once, or do not tell what tools do."""

import json
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from flotilla_common.tasks.task_checks import Outcome, TaskCheck
from flotilla_common.tasks.task_format import parse_task
from flotilla_reading.data.check.task_check import check_task, count_episodes
from flotilla_reading.data.check.verdicts import judge_task
from flotilla_reading.play.ports import CallResult, Grade, OfferedTool, Opening, PlayError
from flotilla_reading.play.solutions import Solution, SolutionCall

TASK = {
    "key": "t",
    "prompt": "Sell 3 lamps.",
    "env_id": "shop",
    "verifier_func": "def verify(env, final_answer=None):\n    return env.sold == 3\n",
}
SOLUTION = Solution("t", (SolutionCall("look", {}), SolutionCall("sell", {"count": 3})), "done")
JudgeState = Callable[[list[SolutionCall], str | None], Grade]


def sold_three(calls: list[SolutionCall], _answer: str | None) -> Grade:
    return Grade(1.0 if SolutionCall("sell", {"count": 3}) in calls else 0.0)


def nothing(_calls: list[SolutionCall]) -> str:
    return "[]"


@dataclass
class ScriptedShop:
    """An `EpisodePlayer` of a shop that keeps count of its episodes. A grade is `judge`'s, and an
    answer to a call, after all calls up to it, is `tell`'s."""

    judge: JudgeState = sold_three
    tell: Callable[[list[SolutionCall]], str] = nothing
    regrades: bool = True
    read_only: bool = True
    idempotent: bool = False
    refusal: PlayError | None = None
    opened: int = 0
    open_now: list[int] = field(default_factory=list[int])

    @asynccontextmanager
    async def open_episode(self, task: Mapping[str, Any]) -> AsyncGenerator["ScriptedSale"]:
        if self.refusal or "teleport" in task.get("offered_tools", ()):
            raise self.refusal or PlayError("shop has no 'teleport'", task_fault=True)
        self.opened += 1
        self.open_now.append(self.opened)
        assert len(self.open_now) == 1, "two episodes could wait for each other"
        try:
            yield ScriptedSale(self)
        finally:
            self.open_now.pop()


class ScriptedSale:
    """An `OpenEpisode` of the shop."""

    def __init__(self, shop: ScriptedShop) -> None:
        tools = (
            OfferedTool("look", "", {}, shop.read_only, shop.idempotent),
            OfferedTool("sell", "", {}, read_only=False),
        )
        self.opening = Opening(TASK["prompt"], TASK["prompt"], "", tools, shop.regrades)
        self._shop = shop
        self._calls: list[SolutionCall] = []
        self._grades = 0

    async def call_tool(self, name: str, arguments: str) -> CallResult:
        self._calls.append(SolutionCall(name, json.loads(arguments)))
        return CallResult("ok", self._shop.tell(self._calls), done=False)

    async def grade(
        self, answer: str | None, messages: Sequence[Mapping[str, Any]], *, again: bool = False
    ) -> Grade:
        assert messages[0] == {"role": "user", "content": TASK["prompt"]}
        assert again is (self._grades > 0)
        assert not again or self._shop.regrades
        self._grades += 1
        return self._shop.judge(self._calls, answer)


async def outcomes(
    shop: ScriptedShop, solution: Solution | None = SOLUTION, **fields: Any
) -> dict[str, Outcome]:
    """The outcomes of the checks, and the verdict."""
    task = {**TASK, **fields}
    checks = await check_task(shop, parse_task(json.dumps(task)), task, solution)
    found = {name: result.outcome for name, result in checks.items()}
    return {**found, "verdict": judge_task(checks)}


@pytest.mark.parametrize("regrades", [True, False])
async def test_a_valid_task_is_valid_however_often_an_episode_is_graded(*, regrades: bool) -> None:
    shop = ScriptedShop(regrades=regrades)
    assert set((await outcomes(shop)).values()) == {Outcome.VALID}
    most = count_episodes(parse_task(json.dumps(TASK)), SOLUTION, regrades=regrades)
    assert (shop.opened > 6) is not regrades
    assert shop.opened <= most


@pytest.mark.parametrize(
    ("timed_out", "outcome"), [(False, Outcome.ERROR), (True, Outcome.TIMEOUT)]
)
async def test_an_environment_that_does_not_open_is_no_fault_of_the_task(
    outcome: Outcome, *, timed_out: bool
) -> None:
    shop = ScriptedShop(refusal=PlayError("no place", timed_out=timed_out))
    assert set((await outcomes(shop)).values()) == {outcome}


@pytest.mark.parametrize(
    ("grade", "outcome"),
    [
        (Grade(None, "execution_failed", "KeyError: 'x'", verifier_fault=True), Outcome.INVALID),
        (Grade(None, "no_verifier", "the task has no verifier"), Outcome.INVALID),
        (Grade(None, "execution_failed", "the server refused"), Outcome.ERROR),
        (Grade(None, "instance_lost", "gone"), Outcome.ERROR),
        (Grade(None, "judge_error", "overloaded"), Outcome.ERROR),
        (Grade(None, "timeout", "the verifier did not end"), Outcome.TIMEOUT),
    ],
)
async def test_a_missing_grade_is_the_tasks_fault_only_if_its_verifier_is_at_fault(
    grade: Grade, outcome: Outcome
) -> None:
    found = await outcomes(ScriptedShop(lambda _calls, _answer: grade))
    assert found["verdict"] is outcome
    assert (found["gold"], found["noop"]) == (outcome, outcome)


async def test_a_verifier_may_need_an_answer_if_an_empty_one_is_graded() -> None:
    def judge(calls: list[SolutionCall], answer: str | None) -> Grade:
        if answer is None:
            return Grade(None, "execution_failed", "AttributeError", verifier_fault=True)
        return sold_three(calls, answer)

    assert set((await outcomes(ScriptedShop(judge))).values()) == {Outcome.VALID}


async def test_an_untouched_world_may_pass_where_the_task_says_so() -> None:
    shop = ScriptedShop(lambda _calls, _answer: Grade(1.0))
    found = await outcomes(shop, passes_untouched=True)
    assert (found["noop"], found["exploit"]) == (Outcome.VALID, Outcome.UNCHECKED)
    assert found["verdict"] is Outcome.VALID
    assert (await outcomes(shop))["noop"] is Outcome.INVALID


async def test_what_the_environment_refuses_is_the_tasks_fault_until_the_next_check() -> None:
    found = await outcomes(ScriptedShop(), offered_tools=["look", "teleport"])
    assert (found["reachable"], found["verdict"]) == (Outcome.INVALID, Outcome.INVALID)
    assert found["noop"] is Outcome.UNCHECKED
    refusal = PlayError("no such data", task_fault=True)
    checks = await check_task(
        ScriptedShop(refusal=refusal), parse_task(json.dumps(TASK)), TASK, SOLUTION
    )
    assert not TaskCheck("t", "shop", "", "", 1, judge_task(checks), checks, 0.1).is_final


async def test_the_solutions_answer_may_pass_by_itself_only_where_nothing_is_changed() -> None:
    def judge(_calls: list[SolutionCall], answer: str | None) -> Grade:
        return Grade(1.0 if answer == "done" else 0.0)

    assert (await outcomes(ScriptedShop(judge)))["exploit"] is Outcome.INVALID
    question = Solution("t", (SolutionCall("look", {}),), "done")
    assert (await outcomes(ScriptedShop(judge), question))["exploit"] is Outcome.VALID
    untold = ScriptedShop(judge, read_only=False)
    assert (await outcomes(untold))["exploit"] is Outcome.VALID


async def test_a_call_with_other_values_must_not_pass_unless_the_task_passes_without_it() -> None:
    def any_sale(calls: list[SolutionCall], _answer: str | None) -> Grade:
        return Grade(float(any(call.name == "sell" for call in calls)))

    assert (await outcomes(ScriptedShop(any_sale)))["exploit"] is Outcome.INVALID
    twice = Solution("t", (*SOLUTION.calls, SolutionCall("sell", {"count": 3})), "done")
    assert (await outcomes(ScriptedShop(any_sale), twice))["exploit"] is Outcome.VALID


def shown_sales(calls: list[SolutionCall]) -> str:
    sold = [each.arguments["count"] for each in calls if each.name == "sell"]
    return json.dumps(sold) if calls[-1].name == "look" else "{}"


def numbered(calls: list[SolutionCall]) -> str:
    return json.dumps({"sale_id": len(calls)}) if calls[-1].name == "sell" else "{}"


@pytest.mark.parametrize(
    ("shop", "outcome"),
    [
        (ScriptedShop(), Outcome.VALID),
        (ScriptedShop(idempotent=True), Outcome.INVALID),
        (ScriptedShop(tell=shown_sales), Outcome.INVALID),
        (ScriptedShop(tell=numbered), Outcome.INVALID),
    ],
)
async def test_a_demanded_step_that_does_something_must_not_be_left_out(
    shop: ScriptedShop, outcome: Outcome
) -> None:
    calls = (*SOLUTION.calls, SolutionCall("sell", {"count": 5}))
    both = Solution("t", calls, "done")
    found = await outcomes(shop, both, prompt="Sell 3 lamps and 5 desks.")
    assert found["exploit"] is outcome
    shop.judge = lambda calls, _: Grade(
        float({each.arguments.get("count") for each in calls} >= {3, 5})
    )
    found = await outcomes(shop, both, prompt="Sell 3 lamps and 5 desks.")
    assert found["verdict"] is Outcome.VALID


async def test_the_variables_of_a_task_must_not_give_its_answer_away() -> None:
    def judge(_calls: list[SolutionCall], answer: str | None) -> Grade:
        return Grade(1.0 if answer == "42" else 0.0)

    question = Solution("t", (SolutionCall("look", {}),), "42")
    for name, outcome in (("ANSWER", Outcome.INVALID), ("LOGGED_IN_USER", Outcome.VALID)):
        found = await outcomes(ScriptedShop(judge), question, env_variables={name: "42"})
        assert found["leak"] is outcome


async def test_without_a_solution_a_verifiers_own_word_may_be_the_answer() -> None:
    source = "def verify(env, final_answer=None):\n    return final_answer == 'blue'\n"

    def judge(_calls: list[SolutionCall], answer: str | None) -> Grade:
        return Grade(1.0 if answer == "blue" else 0.0)

    found = await outcomes(ScriptedShop(judge), None, verifier_func=source)
    assert (found["gold"], found["exploit"]) == (Outcome.UNCHECKED, Outcome.VALID)
