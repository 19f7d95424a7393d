"""Verdicts: a reward, a partial reward, or no grade and why, by what a verifier
returned."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from flotilla_common.domain.attempts import Grade, NoGradeReason
from flotilla_env_gateway.config.gateway import VerifiersConfig
from flotilla_env_gateway.episodes.gateway import Gateway
from flotilla_env_gateway.grading.verdict import compute_partial_reward, judge_execution
from flotilla_env_gateway.ports import BackendError, CheckReport, Execution
from flotilla_env_gateway.verify.verifier_pool import VerifierPool
from flotilla_env_gateway.verify.verifier_source import VerifierError, find_verifier
from tests.support.fake_environments import FakeGrader, ScriptedBackend
from tests.support.fake_gateway import open_spec, opened, running, task_json

# Over several apps, of which the least counts.
SEVERAL_APPS = """
def verify_calendar(current):
    return current.table("counter").first()["value"] >= 1

def verify_mail(current):
    return current.table("counter").first()["value"] >= 3

def verify_drive(seed, current):
    seed.diff(current, IgnoreConfig(tables={"counter"})).expect_only_v2([])
    return True

def verify(env, final_answer: str | None = None):
    env.instance.load()
    seed, current = env.db("seed"), env.db("current")
    scores = {
        "calendar": verify_calendar(current),
        "google mail": verify_mail(current),
        "drive": verify_drive(seed, current),
    }
    return {
        "score": min(TASK_SUCCESSFUL_SCORE if ok else TASK_FAILED_SCORE for ok in scores.values()),
        "passed": [f"App {app}" for app, ok in scores.items() if ok],
        "failed": [f"App {app}" for app, ok in scores.items() if not ok],
    }
"""
ONE_APP = """
def validate_task(env: Environment, *, final_answer: str | None = None) -> int:
    error_accumulator, success_accumulator = [], []
    value = env.db("current").table("counter").first()["value"]
    for wanted in (0, 1, 2, 3):
        if value >= wanted:
            success_accumulator.append(f"[C] at least {wanted}")
        else:
            error_accumulator.append(f"[X] {value} is not at least {wanted}")
    if not normalized_contains("three", final_answer or ""):
        error_accumulator.append("[X] the answer is wrong")
    score = TASK_FAILED_SCORE if error_accumulator else TASK_SUCCESSFUL_SCORE
    return {"score": score, "passed": success_accumulator, "failed": error_accumulator}
"""
# In the style of Fleet's verifiers of one app.
PRINTING = ONE_APP.replace(
    "    return {",
    """    print(f">>> ERROR_ACCUMULATOR >>>\\n{error_accumulator}\\n<<< ERROR_ACCUMULATOR <<<")
    print(f">>> SUCCESS_ACCUMULATOR >>>\\n{success_accumulator}\\n<<< SUCCESS_ACCUMULATOR <<<")
    return score
    return {""",
)


async def graded(source: str, adds: int, answer: str | None = None, **verifiers: Any) -> Grade:
    """Grade an attempt with this many calls of `add`, in a process of its own."""
    pool = VerifierPool(size=1, memory_bytes=2**28, unsafe=True)
    async with running(ScriptedBackend(), verifiers=verifiers, grader=pool) as gateway:
        grade = await attempt(gateway, source, adds, answer)
    await pool.close()
    return grade


async def attempt(gateway: Gateway, source: str, adds: int, answer: str | None = None) -> Grade:
    session = await opened(gateway, open_spec(adds, task=task_json(verifier_func=source)))
    if adds:
        await gateway.call_tool(session, 0, "add", f'{{"by": {adds}}}', 5.0)
    return await gateway.grade_episode(session, answer, None, 30.0)


@pytest.mark.parametrize(
    ("partial", "adds", "expected"),
    [
        ("off", 1, (0.0, None)),
        ("returned", 0, (0.0, 1 / 3)),
        ("returned", 1, (0.0, 2 / 3)),
        ("earned", 0, (0.0, 0.0)),
        ("earned", 1, (0.0, 1 / 2)),
        ("earned", 3, (1.0, 1.0)),
    ],
)
async def test_apps_that_pass_untouched_earn_nothing(
    partial: str, adds: int, expected: tuple[float, float | None]
) -> None:
    grade = await graded(SEVERAL_APPS, adds, partial=partial)
    assert (grade.reward, grade.partial_reward) == expected, grade
    assert "App drive" in grade.checks_passed


@pytest.mark.parametrize(
    ("verifiers", "adds", "expected"),
    [
        ({"partial": "returned"}, 2, (0.0, 3 / 5)),
        ({"partial": "earned"}, 2, (0.0, 2 / 4)),
        ({"partial": "earned", "partial_is_reward": True}, 2, (2 / 4, 2 / 4)),
        ({"partial": "earned", "partial_is_reward": True}, 0, (0.0, 0.0)),
    ],
)
async def test_checks_that_pass_untouched_earn_nothing(
    verifiers: dict[str, Any], adds: int, expected: tuple[float, float | None]
) -> None:
    grade = await graded(ONE_APP, adds, **verifiers)
    assert (grade.reward, grade.partial_reward) == expected, grade


async def test_a_pass_stays_a_pass_and_the_answer_reaches_a_keyword_only_parameter() -> None:
    grade = await graded(ONE_APP, 3, "Three.", partial="earned", partial_is_reward=True)
    assert (grade.reward, grade.partial_reward) == (1.0, 1.0)


async def test_the_untouched_state_is_graded_once_for_all_attempts_at_a_task() -> None:
    grader = FakeGrader()
    found = Execution(result=0, report=CheckReport(("a", "c"), ("b",)))
    grader.executions.extend([found, Execution(result=0, report=CheckReport(("a",), ("b", "c")))])
    grader.executions.append(found)
    async with running(ScriptedBackend(), grader, verifiers={"partial": "earned"}) as gateway:
        grades = [await attempt(gateway, SEVERAL_APPS, adds) for adds in range(2)]
    assert [grade.partial_reward for grade in grades] == [0.5, 0.5]
    assert len(grader.seen) == 3
    assert grader.seen[1].arguments == {"final_answer": ""}


async def test_a_share_that_cannot_be_measured_is_not_known_and_the_grade_stands() -> None:
    grader = FakeGrader()
    found = Execution(result=0, report=CheckReport(("a",), ("b",)))
    broken = Execution(error="KeyError: 0")
    grader.executions.extend([found, broken, found, broken])
    settings = {"partial": "earned", "partial_is_reward": True}
    async with running(ScriptedBackend(), grader, verifiers=settings) as gateway:
        for adds in range(2):
            grade = await attempt(gateway, SEVERAL_APPS, adds)
            assert (grade.reward, grade.partial_reward) == (0.0, None)
    assert len(grader.seen) == 4, "a failure is not remembered"


async def test_a_backends_own_grade_gets_its_share_from_the_tasks_verifier() -> None:
    backend, grader = ScriptedBackend(), FakeGrader()
    backend.own_grade = Execution(result=0, report=CheckReport(("a", "c"), ("b",)))
    grader.executions.append(Execution(result=0, report=CheckReport(("a",), ("b", "c"))))
    async with running(backend, grader, verifiers={"partial": "earned"}) as gateway:
        grade = await attempt(gateway, SEVERAL_APPS, 0)
    assert (grade.reward, grade.partial_reward) == (0.0, 0.5)


@pytest.mark.parametrize("adds", [0, 3])
async def test_printed_checks_cannot_be_the_reward_and_the_reason_names_the_fix(adds: int) -> None:
    grade = await graded(PRINTING, adds, "three", partial_is_reward=True)
    assert (grade.reward, grade.reason) == (None, NoGradeReason.EXECUTION_FAILED)
    assert "the verifier only prints its checks" in grade.detail
    assert 'return {"score": ..., "passed": [...], "failed": [...]}' in grade.detail


async def test_printed_checks_are_shown_beside_the_returned_value() -> None:
    grade = await graded(PRINTING, 1, "three")
    assert (grade.reward, grade.partial_reward) == (0.0, None)
    assert grade.checks_passed == ("[C] at least 0", "[C] at least 1")
    assert len(grade.checks_failed) == 2


NAMING = """
def verify(env, final_answer=None):
    value = env.db("current").table("counter").first()["value"]
    rewards = {"value": value / 4, "brief": len(final_answer or "") < 5, "judge": None}
    print("JUDGE ERROR: down" if final_answer == "judge" else "App c: 1")
    return {"score": float(value >= 3), "rewards": rewards}
"""


async def test_named_rewards_arrive_with_the_grade_and_none_is_unknown_not_0() -> None:
    grade = await graded(NAMING, 1, "many words")
    assert (grade.reward, grade.named_rewards) == (0.0, {"value": 0.25, "brief": 0.0})
    assert grade.checks_passed == ("App c",), "without returned checks the printed ones are shown"


async def test_without_a_grade_there_are_no_named_rewards_either() -> None:
    grade = await graded(NAMING, 1, "judge", attempts=1)
    assert (grade.reward, grade.reason) == (None, NoGradeReason.JUDGE_ERROR)
    assert grade.named_rewards == {}


@pytest.mark.parametrize(
    ("rewards", "problem"),
    [
        ([1.0], '"rewards" are an object of numbers by name'),
        ({"a": "1"}, "'a' is '1'; expected a number from -1e+06 to 1e+06, or None"),
        ({"a": float("nan")}, "'a' is nan"),
        ({"a": -1e7}, "'a' is -10000000.0"),
        ({"": 1}, "'' is no name of 1 to 64 of A-Z a-z 0-9 _ . -"),
        ({"a/b": 1}, "'a/b' is no name"),
        ({"a\n": 1}, "is no name"),
        ({"n" * 65: 1}, "is no name"),
        ({f"n{number}": 1 for number in range(33)}, "are at most 32; got 33"),
    ],
    ids=str,
)
def test_named_rewards_that_are_none_are_the_verifiers_fault(rewards: Any, problem: str) -> None:
    grade = judge_execution(Execution(result=1, rewards=rewards), attempts=1)
    assert (grade.reward, grade.reason) == (None, NoGradeReason.EXECUTION_FAILED)
    assert problem in grade.detail and grade.verifier_fault
    assert grade.named_rewards == {}


@pytest.mark.parametrize("returned", ["{'a': 'x' * 10**6}", "[1]", "{n: 1 for n in range(10**5)}"])
async def test_absurd_named_rewards_give_no_grade_and_harm_nothing(returned: str) -> None:
    source = f"def verify(env):\n    return {{'score': 1, 'rewards': {returned}}}\n"
    grade = await graded(source, 0)
    assert (grade.reward, grade.reason) == (None, NoGradeReason.EXECUTION_FAILED)
    assert '"rewards"' in grade.detail


@pytest.mark.parametrize("as_reward", [False, True])
def test_a_share_of_printed_checks_is_refused_with_the_reason(as_reward: bool) -> None:
    with pytest.raises(
        ValidationError, match=r"printed checks earn nothing.* let verifiers return"
    ):
        VerifiersConfig.model_validate({"partial": "printed", "partial_is_reward": as_reward})


@pytest.mark.parametrize(
    ("result", "share"), [(0, None), (0.25, 0.25), (1, 1.0), (-1, None)], ids=str
)
def test_checks_allow_no_more_than_what_was_returned(result: float, share: float | None) -> None:
    """A zero means that something failed, even if every check has passed."""
    execution = Execution(result=result, report=CheckReport(("a", "b"), ()))
    assert judge_execution(execution, attempts=1).partial_reward == share


def test_a_partial_reward_that_is_off_cannot_be_the_reward() -> None:
    with pytest.raises(ValidationError, match="partial_is_reward needs"):
        VerifiersConfig(partial="off", partial_is_reward=True)


@pytest.mark.parametrize(
    ("execution", "reason"),
    [
        (Execution(error="boom"), NoGradeReason.EXECUTION_FAILED),
        (Execution(result=None), NoGradeReason.EXECUTION_FAILED),
        (Execution(result="1"), NoGradeReason.EXECUTION_FAILED),
        (Execution(result=float("nan")), NoGradeReason.EXECUTION_FAILED),
        (Execution(result=10**400), NoGradeReason.EXECUTION_FAILED),
        (Execution(result=0, stdout="x\nJUDGE ERROR: down"), NoGradeReason.JUDGE_ERROR),
        (Execution(result=1, stdout="JUDGE ERROR: down"), None),
        (Execution(result=0, stdout="no JUDGE ERROR: here"), None),
        (Execution(error="late", timed_out=True), NoGradeReason.TIMEOUT),
        (Execution(error="gone", instance_lost=True), NoGradeReason.INSTANCE_LOST),
        (Execution(result=True), None),
        (Execution(result=0), None),
        (Execution(result=0.25), None),
    ],
)
def test_what_is_not_known_is_no_grade(execution: Execution, reason: NoGradeReason | None) -> None:
    grade = judge_execution(execution, attempts=1)
    assert grade.reason is reason
    assert grade.is_known == (reason is None)


async def test_each_way_to_have_no_grade_is_distinguished() -> None:
    backend = ScriptedBackend()
    async with running(backend) as gateway:
        lost = await opened(gateway, open_spec(0))
        lost.episode.lost = True
        tainted = await opened(gateway, open_spec(1))
        tainted.episode.tainted = True
        without = await opened(gateway, open_spec(2, task=task_json(verifier_func=None)))
        broken = await opened(gateway, open_spec(3, task=task_json(verifier_func="def verify(:")))
        sessions = (lost, tainted, without, broken)
        grades = [await gateway.grade_episode(session, None, None, 5.0) for session in sessions]
    assert [grade.reason for grade in grades] == [
        NoGradeReason.INSTANCE_LOST,
        NoGradeReason.TAINTED,
        NoGradeReason.NO_VERIFIER,
        NoGradeReason.EXECUTION_FAILED,
    ]


async def test_a_backend_that_loses_the_instance_while_grading_is_distinguished() -> None:
    backend = ScriptedBackend()
    async with running(backend) as gateway:
        session = await opened(gateway)
        backend.fail_at("grade", BackendError("gone", "404", delivered=True, lost=True))
        grade = await gateway.grade_episode(session, None, None, 5.0)
    assert grade.reason is NoGradeReason.INSTANCE_LOST


@pytest.mark.parametrize(
    ("source", "name", "takes"),
    [
        ("def verify(env):\n    ...", "verify", (False, False)),
        ("def main(env, final_answer=None):\n    ...", "main", (True, False)),
        ("def check(env, *, conversation):\n    ...", "check", (False, True)),
        ("def check(env, **rest):\n    ...", "check", (True, True)),
        ("def helper(x):\n    ...\ndef v(env, final_answer):\n    ...", "v", (True, False)),
        ("def a(env):\n    ...\n@verifier(key='b')\ndef b(e):\n    ...", "b", (False, False)),
        ("class A:\n    def verify(self): ...\ndef f(environment): ...", "f", (False, False)),
        ("def outer(env):\n    def final_answer(): ...\n    ...", "outer", (False, False)),
    ],
)
def test_the_verifier_is_found_by_its_shape(
    source: str, name: str, takes: tuple[bool, bool]
) -> None:
    function = find_verifier(source)
    assert function.name == name
    assert (function.takes_final_answer, function.takes_conversation) == takes


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            "import json\n\ndef verify(env:\n    return 1",
            r"compile: '\(' .* closed, in line 3: def ver",
        ),
        ("def verify(:", r"compile: invalid syntax, in line 1: def verify\(:$"),
        ("x = 1", "defines no function"),
        ("async def verify(env):\n    ...", "async"),
        ("def verify(env):\n    return '\0'", "does not compile"),
        ("(" * 1000, "does not compile"),
    ],
)
def test_a_source_without_a_verifier_is_a_precise_error(source: str, message: str) -> None:
    with pytest.raises(VerifierError, match=message):
        find_verifier(source)


@given(st.sets(st.text()), st.sets(st.text()), st.sets(st.text()))
def test_a_share_is_between_none_and_all(
    passed: set[str], failed: set[str], free: set[str]
) -> None:
    share = compute_partial_reward(passed, failed, free=free)
    assert (share is None) == (not (passed | failed) - free)
    assert share is None or 0 <= share <= 1
