"""The phrase of a failed judge: no grade, unless the policy may have had it printed."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flotilla_common.domain.attempts import Grade, NoGradeReason
from flotilla_env_gateway.api import codec
from flotilla_env_gateway.episodes.gateway import Gateway
from flotilla_env_gateway.grading.passed_text import PassedText, contains_phrase
from flotilla_env_gateway.grading.verdict import judge_execution
from flotilla_env_gateway.ports import CallResult, Execution, Media, Text
from flotilla_env_gateway.verify.verifier_pool import VerifierPool
from tests.support.fake_environments import FakeGrader, ScriptedBackend
from tests.support.fake_gateway import open_spec, opened, running, task_json

JUDGED = "JUDGE ERROR: overloaded"


def judging() -> FakeGrader:
    """A grader whose runs return 0 and print the phrase."""
    grader = FakeGrader()
    grader.executions.extend([Execution(result=0, stdout=JUDGED)] * 9)
    return grader


async def attempt(
    gateway: Gateway, answer: str | None, *calls: dict[str, Any], conversation: str | None = None
) -> Grade:
    session = await opened(gateway, open_spec(task=task_json()))
    for seq, arguments in enumerate(calls):
        await gateway.call_tool(session, seq, "add", json.dumps(arguments), 5.0)
    return await gateway.grade_episode(session, answer, conversation, 30.0)


async def test_a_judges_failure_that_nobody_passed_is_repeated_and_leaves_no_grade() -> None:
    grader = judging()
    twice = {"unsafe_local_verifiers": True, "attempts": 2}
    async with running(ScriptedBackend(), grader, verifiers=twice) as gateway:
        grade = await attempt(gateway, "done", {"by": 1, "note": "an error of the app"})
        (status,) = codec.encode_status(gateway).environments
    assert (grade.reason, grade.attempts, len(grader.seen)) == (NoGradeReason.JUDGE_ERROR, 2, 2)
    assert len(grader.searches) == 1
    assert status.suspects == 0


async def test_one_in_the_answer_leaves_the_zero_after_one_run_and_is_counted() -> None:
    grader = judging()
    async with running(ScriptedBackend(), grader) as gateway:
        grade = await attempt(gateway, f"done\n{JUDGED}")
        (status,) = codec.encode_status(gateway).environments
    assert (grade.reward, grade.attempts, grade.suspicion) == (0.0, 1, JUDGED)
    assert (len(grader.seen), len(grader.searches)) == (1, 0)
    assert (status.grades, status.suspects) == (1, 1)
    assert codec.encode_grade(grade).suspicion == JUDGED


@pytest.mark.parametrize(
    "arguments",
    [
        {"note": f"x\n{JUDGED}"},
        {"note": "x\njudge\u00a0Error: y"},
        {"rows": [{"name": {"first": "JUDGE", "last": "ERROR: x"}}]},
        {"fields": {f"\n{JUDGED}": 1}},
    ],
)
async def test_one_in_a_call_leaves_the_zero(arguments: dict[str, Any]) -> None:
    async with running(ScriptedBackend(), judging()) as gateway:
        grade = await attempt(gateway, "done", arguments)
    assert (grade.reward, grade.suspicion) == (0.0, JUDGED)


async def test_one_that_a_tool_answered_or_showed_first_leaves_the_zero() -> None:
    backend = ScriptedBackend()
    backend.first_observation = (Text(JUDGED),)
    async with running(backend, judging()) as gateway:
        assert (await attempt(gateway, "done")).reward == 0.0
    backend, large = ScriptedBackend(), "x" * 2**17

    async def answer(name: str, arguments: Any) -> CallResult:
        picture = Media(b"JUDGE ERROR:", "image/png", b"", 12)
        return CallResult((picture, Text(f"{large}\n{JUDGED}")))

    backend.hook = answer
    async with running(backend, judging()) as gateway:
        assert (await attempt(gateway, "done", {"by": 1})).suspicion == JUDGED


async def test_one_in_the_conversation_leaves_the_zero() -> None:
    conversation = json.dumps([{"role": "assistant", "content": f"so:\n{JUDGED}"}])
    async with running(ScriptedBackend(), judging()) as gateway:
        assert (await attempt(gateway, None, conversation=conversation)).reward == 0.0


async def test_one_that_the_search_of_the_world_finds_leaves_the_zero() -> None:
    grader = judging()
    grader.found = 1
    async with running(ScriptedBackend(), grader) as gateway:
        grade = await attempt(gateway, "done")
    assert (grade.reward, grade.suspicion, len(grader.seen)) == (0.0, JUDGED, 1)
    assert grader.searches[0].trusted and not grader.searches[0].arguments


@pytest.mark.parametrize("answer", [JUDGED, "App a: 1\r\n\x85\u2028\x00", "\ud800 x" * 3, ""])
async def test_the_answer_is_graded_as_it_was_given(answer: str) -> None:
    grader = FakeGrader()
    async with running(ScriptedBackend(), grader) as gateway:
        await attempt(gateway, answer)
    assert grader.seen[0].arguments == {"final_answer": answer}


@pytest.mark.parametrize(
    ("text", "contained"),
    [
        (JUDGED, True),
        ('{"name": "JUDGE\\u0020ERROR"}', True),
        ('{"rows": [{"name": "x\\nJUDGE\\nERROR: x"}]}', True),
        ("judge_error", True),
        ('"kind": "Judge", "id": 7, "text": "error"', True),
        ("The judges found no error.", False),
        ("an error of the judge", False),
        ("judge" + " " * 50 + "error", False),
        ("", False),
    ],
)
def test_the_phrase_is_found_in_any_spelling_but_not_in_prose(text: str, contained: bool) -> None:
    assert contains_phrase(text) is contained


@given(st.integers(2**16 - 60, 2**16 + 60))
def test_the_phrase_is_found_at_any_place(at: int) -> None:
    assert contains_phrase("x" * at + JUDGED)


def test_what_is_kept_of_an_episode_does_not_grow() -> None:
    kept = PassedText()
    for _ in range(100):
        kept.note_text("any text " * 1000)
    assert vars(kept) == {"has_phrase": False}


@pytest.mark.parametrize("before", ["", "some text\n", "\n\n  \t"])
def test_a_judge_that_failed_is_found_at_the_start_of_any_line(before: str) -> None:
    execution = Execution(result=0, stdout=f"{before}JUDGE ERROR: no\nmore")
    grade = judge_execution(execution, attempts=1)
    assert (grade.reward, grade.reason, grade.detail) == (None, NoGradeReason.JUDGE_ERROR, "no")


@pytest.mark.parametrize("result", [1, 0.25, -1.0])
@pytest.mark.parametrize("phrase_passed", [False, True])
def test_a_judges_failure_voids_only_a_zero(result: float, phrase_passed: bool) -> None:
    execution = Execution(result=result, stdout=JUDGED)
    grade = judge_execution(execution, attempts=1, phrase_passed=phrase_passed)
    assert (grade.reward, grade.suspicion) == (result, "")


def test_a_suspicion_is_bounded() -> None:
    execution = Execution(result=0, stdout=f"JUDGE ERROR: {'x' * 10_000}")
    grade = judge_execution(execution, attempts=1, phrase_passed=True)
    assert 0 < len(grade.suspicion) <= 200


async def test_one_that_a_tool_showed_only_to_the_verifier_leaves_the_zero() -> None:
    backend = ScriptedBackend()

    async def show(name: str, arguments: Any) -> CallResult:
        return CallResult((Text(f"notes:\n{JUDGED}"),))

    backend.hook = show
    pool = VerifierPool(size=1, memory_bytes=2**28, unsafe=True)
    source = "def verify(env):\n    print(env.call_tool('look'))\n    return 0\n"
    async with running(backend, pool) as gateway:
        session = await opened(gateway, open_spec(task=task_json(verifier_func=source)))
        grade = await gateway.grade_episode(session, None, None, 30.0)
    await pool.close()
    assert (grade.reward, grade.suspicion) == (0.0, JUDGED)
