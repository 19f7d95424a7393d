"""Unknown outcomes: reported as unknown, for every class of tool, and never graded."""

import io
import json

import pytest
from PIL import Image

from flotilla_common.domain.attempts import NoGradeReason, ToolOutcome
from flotilla_env_gateway.adapters import image_scaling
from flotilla_env_gateway.episodes.episode_session import Session
from flotilla_env_gateway.episodes.gateway import Gateway
from flotilla_env_gateway.ports import BackendError, CallAnswer, CallResult, Text, Tool
from flotilla_env_gateway.tools import computer_tool
from flotilla_env_gateway.tools.computer_tool import make_media
from tests.support.fake_environments import TOOLS, ScriptedBackend
from tests.support.fake_gateway import open_spec, opened, running, task_json

SET = Tool("set", "Sets the counter.", '{"type": "object"}', idempotent=True)


def backend_with(*errors: BackendError) -> ScriptedBackend:
    backend = ScriptedBackend()
    backend.tools = (*TOOLS, SET)
    backend.fail_at("call", *errors)
    return backend


def failure(kind: str = "http", *, delivered: bool | None, **more: bool) -> BackendError:
    return BackendError(kind, "a failure", delivered=delivered, **more)


async def call(gateway: Gateway, session: Session, name: str, timeout_s: float = 5.0) -> CallAnswer:
    return (await gateway.call_tool(session, session.episode.next_seq, name, "{}", timeout_s))[0]


async def test_an_idempotent_write_is_sent_again() -> None:
    backend = backend_with(failure(delivered=None), failure(delivered=False))
    async with running(backend) as gateway:
        session = await opened(gateway)
        answer = await call(gateway, session, "set")
        assert (answer.outcome, answer.attempts) == (ToolOutcome.OK, 3)
        assert (await gateway.grade_episode(session, None, None, 5.0)).is_known


@pytest.mark.parametrize(
    "errors",
    [
        [failure(delivered=None)] * 9,
        # The last one was not executed, the first may have been.
        [failure(delivered=None), *[failure(delivered=False)] * 9],
        [failure(delivered=None), failure("throttled", delivered=False)] * 9,
    ],
)
async def test_an_idempotent_write_that_never_succeeds_taints(errors: list[BackendError]) -> None:
    backend = backend_with(*errors)
    retry = {"base_s": 0.001, "cap_s": 0.01, "budget_cap": 3, "budget_ratio": 0.0}
    async with running(backend, retry=retry) as gateway:
        session = await opened(gateway)
        answer = await call(gateway, session, "set")
        assert answer.outcome is ToolOutcome.OUTCOME_UNKNOWN
        grade = await gateway.grade_episode(session, None, None, 5.0)
        assert (grade.reward, grade.reason) == (None, NoGradeReason.TAINTED)


async def test_an_idempotent_write_that_hangs_taints() -> None:
    backend = backend_with()
    backend.delays["call"] = 60.0
    async with running(backend) as gateway:
        session = await opened(gateway)
        assert (await call(gateway, session, "set", 0.1)).outcome is ToolOutcome.OUTCOME_UNKNOWN
        assert session.episode.tainted


async def test_a_retry_that_would_be_cut_off_is_not_begun() -> None:
    backend = backend_with(*[failure("throttled", delivered=False)] * 9)
    backend.delays["call"] = 0.3
    retry = {"base_s": 0.001, "cap_s": 0.01}
    async with running(backend, retry=retry) as gateway:
        session = await opened(gateway)
        answer = await call(gateway, session, "set", 0.5)
        assert (answer.outcome, answer.attempts) == (ToolOutcome.SESSION_LOST, 1)
        assert not session.episode.tainted


async def test_a_read_that_never_succeeds_is_the_environments_fault() -> None:
    backend = backend_with(*[failure(delivered=None)] * 9)
    retry = {"base_s": 0.001, "cap_s": 0.01, "budget_cap": 3, "budget_ratio": 0.0}
    async with running(backend, retry=retry) as gateway:
        session = await opened(gateway)
        assert (await call(gateway, session, "look")).outcome is ToolOutcome.SESSION_LOST
        grade = await gateway.grade_episode(session, None, None, 5.0)
        assert (grade.reward, grade.reason) == (None, NoGradeReason.INSTANCE_LOST)


async def test_an_environment_that_fails_leaves_the_retries_of_others() -> None:
    backend = backend_with(*[failure(delivered=None)] * 4, failure(delivered=False))
    retry = {"base_s": 0.001, "cap_s": 0.01, "budget_cap": 3, "budget_ratio": 0.0}
    async with running(backend, retry=retry) as gateway:
        failing = await opened(gateway)
        assert (await call(gateway, failing, "look")).attempts == 4
        other = await opened(gateway, open_spec(1, task=task_json(env_id="fake-2")))
        assert (await call(gateway, other, "look")).attempts == 2


@pytest.mark.parametrize(
    "kind", ["connect", "http", "auth", "throttled", "unavailable", "starting"]
)
async def test_what_does_not_reach_the_environment_in_time_is_never_the_policys_fault(
    kind: str,
) -> None:
    backend = backend_with(*[failure(kind, delivered=False, invalid=kind == "auth")] * 99)
    retry = {"base_s": 0.001, "cap_s": 0.01, "budget_cap": 3, "budget_ratio": 0.0}
    async with running(backend, retry=retry) as gateway:
        session = await opened(gateway)
        assert (await call(gateway, session, "set", 0.2)).outcome is ToolOutcome.SESSION_LOST
        assert (await call(gateway, session, "look")).outcome is ToolOutcome.SESSION_LOST
        grade = await gateway.grade_episode(session, None, None, 5.0)
        assert (grade.reward, grade.reason) == (None, NoGradeReason.INSTANCE_LOST)


async def test_arguments_that_are_too_large_to_be_sent_are_the_policys_fault() -> None:
    backend = backend_with(failure("too_large", delivered=False, invalid=True))
    async with running(backend) as gateway:
        session = await opened(gateway)
        assert (await call(gateway, session, "set")).outcome is ToolOutcome.NOT_EXECUTED
        assert (await gateway.grade_episode(session, None, None, 5.0)).reward == 1.0


@pytest.mark.parametrize(
    "text",
    [
        json.dumps({"base64_image": 5}),
        json.dumps({"base64_image": ["x"]}),
        '{"base64_image": ' + "[" * 100_000,
    ],
)
async def test_an_answer_that_is_no_picture_is_shown_all_the_same(text: str) -> None:
    async def answering(name: str, arguments: object) -> CallResult:
        return CallResult((Text(text),))

    backend = ScriptedBackend()
    backend.tools = (*TOOLS, Tool("computer", "A screen of 800x600.", '{"type": "object"}'))
    backend.hook = answering
    async with running(backend) as gateway:
        spec = open_spec(task=task_json(task_modality="joint"))
        session = await opened(gateway, spec)
        answer = await call(gateway, session, "add")
        assert answer.outcome is ToolOutcome.OK and answer.parts


def broken_png() -> bytes:
    """Return a picture's header followed by unrelated bytes."""
    written = io.BytesIO()
    Image.effect_noise((400, 400), 50).save(written, "PNG")
    start, end = written.getvalue().rsplit(b"IDAT", 1)
    return start + b"M\x00-!" + end


async def test_a_picture_whose_end_is_broken_is_unreadable() -> None:
    with pytest.raises(computer_tool.UnreadableImageError):
        await image_scaling.scale_image(make_media(broken_png(), "image/png"), 64)
