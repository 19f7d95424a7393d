"""Answers of real endpoints, good and bad: what is a verdict's matter, what is a wait, what ends a
run."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from aiohttp import web

from flotilla_common.rpc.errors import ConfigError
from flotilla_common.rpc.free_ports import free_address
from flotilla_common.spec.config import parse_config
from flotilla_learner.config.judge import JudgeConfig
from flotilla_learner.judge.adapters.chat_judge import ChatJudge
from flotilla_learner.ports import (
    JudgeAnswer,
    JudgeDownError,
    JudgeRefusedError,
    UnusableAnswerError,
)
from tests.support.scripted_judge import ScriptedJudge, completion, judge_config, serving_judge

MESSAGES = [{"role": "user", "content": '<attempt label="A1">\n{"content": "w1"}</attempt>'}] * 2


async def ask(make: Callable[[], web.Response] | None, **changes: Any) -> JudgeAnswer:
    """Ask an endpoint whose answers are made so, or that stalls."""

    async def fault(_body: dict[str, Any], _number: int) -> web.Response:
        if make is None:
            await asyncio.sleep(30)
        assert make is not None
        return make()

    async with serving_judge(ScriptedJudge(fault)) as server:
        table = judge_config(server, **changes)
        judge = ChatJudge(parse_config(JudgeConfig, table, where="test"))
        try:
            return await judge.ask(MESSAGES, 7)
        finally:
            await judge.close()


async def test_an_answer_is_its_text_and_what_it_cost() -> None:
    answer = await ask(lambda: web.json_response(completion('{"scores": {}}')))
    assert answer == JudgeAnswer('{"scores": {}}', 500, 20)


@pytest.mark.parametrize("usage", [None, {}, {"prompt_tokens": -1}, {"prompt_tokens": "9"}, [1]])
async def test_an_endpoint_need_not_count_tokens(usage: Any) -> None:
    answer = await ask(lambda: web.json_response(completion("x") | {"usage": usage}))
    assert (answer.prompt_tokens, answer.completion_tokens) == (0, 0)


@pytest.mark.parametrize("status", [429, 500, 502, 503, 529])
async def test_an_endpoint_that_is_busy_or_broken_is_asked_later(status: int) -> None:
    with pytest.raises(JudgeDownError, match=str(status)) as error:
        await ask(lambda: web.Response(status=status, headers={"retry-after": "3"}))
    assert error.value.wait_s == 3


async def test_an_endpoint_that_is_not_there_is_asked_later() -> None:
    table = {"url": f"http://{free_address()}/v1", "model": "m", "max_calls": 1}
    judge = ChatJudge(parse_config(JudgeConfig, table, where="test"))
    with pytest.raises(JudgeDownError):
        await judge.ask(MESSAGES, 7)
    await judge.close()


@pytest.mark.parametrize("status", [401, 403, 404])
async def test_an_endpoint_that_refuses_whoever_asks_ends_the_run(status: int) -> None:
    with pytest.raises(JudgeRefusedError, match=r"url, model or api_key"):
        await ask(lambda: web.Response(status=status))


@pytest.mark.parametrize("status", [400, 413, 422])
async def test_a_question_that_is_refused_is_not_asked_again(status: int) -> None:
    with pytest.raises(UnusableAnswerError) as error:
        await ask(lambda: web.Response(status=status, text="maximum context length"))
    assert error.value.final


@pytest.mark.parametrize(
    "make",
    [
        lambda: web.Response(text="<html>"),
        lambda: web.json_response([]),
        lambda: web.json_response({"choices": []}),
        lambda: web.json_response({"choices": [{"message": {"content": None}}]}),
        lambda: web.json_response({"choices": [{"message": {"content": ["x"]}}]}),
        lambda: web.Response(text="[" * 10_000, content_type="application/json"),
        lambda: web.Response(body=b" " * (2**22 + 1)),
        lambda: web.json_response(completion("x" * 10, finish_reason="length")),
    ],
    ids=["html", "list", "no choice", "no text", "parts", "deep", "huge", "cut"],
)
async def test_what_is_no_completion_is_an_answer_that_cannot_be_used(
    make: Callable[[], web.Response],
) -> None:
    with pytest.raises(UnusableAnswerError) as error:
        await ask(make)
    assert not error.value.final


async def test_an_answer_that_takes_too_long_cannot_be_used() -> None:
    with pytest.raises(UnusableAnswerError, match=r"no answer within 0\.2 s"):
        await ask(None, timeout_s=0.2)


async def test_the_key_is_sent_and_never_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "judge-secret-0123")
    with pytest.raises(JudgeRefusedError) as error:
        await ask(
            lambda: web.Response(status=401, text="judge-secret-0123 is not valid"),
            api_key="$JUDGE_KEY",
        )
    assert "judge-secret-0123" not in str(error.value)


def test_a_key_that_is_not_set_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    table = {"url": "http://h/v1", "model": "m", "max_calls": 1, "api_key": "$JUDGE_KEY"}
    with pytest.raises(ConfigError, match=r"learner\.judge\.api_key is \$JUDGE_KEY"):
        ChatJudge(parse_config(JudgeConfig, table, where="test"))
