"""vLLM's answers become scores only if they are whole, finite and about what was asked."""

import asyncio
import math
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from flotilla_common.rpc.errors import ConfigError
from flotilla_learner.ports import TeacherDownError, TeacherRefusedError
from tests.support.scripted_teacher_server import (
    KEY,
    NAME,
    ScriptedTeacherServer,
    asking,
    serving_teacher,
    write_tokenizer,
)

IDS = np.array([5, 9, 2, 2, 63, 0], np.int32)
PLACES = np.array([1, 2, 5])


@pytest.fixture
def own(tmp_path: Path) -> Path:
    return write_tokenizer(tmp_path / "policy")


@pytest.fixture
async def server(own: Path) -> AsyncGenerator[ScriptedTeacherServer]:
    async with serving_teacher(ScriptedTeacherServer(own)) as serving:
        yield serving


async def ask_once(server: ScriptedTeacherServer, own: Path, **config: Any) -> Any:
    async with asking(server, own, **config) as teacher:
        return await teacher.score_tokens(IDS, PLACES)


async def test_each_place_has_the_logprob_of_its_own_token(
    server: ScriptedTeacherServer, own: Path
) -> None:
    scores = await ask_once(server, own)
    expected = server.table[IDS[PLACES - 1], IDS[PLACES]].astype(np.float32)
    np.testing.assert_array_equal(scores.logprobs, expected)
    assert scores.top_ids.shape == scores.top_logprobs.shape == (len(PLACES), 0)
    (body,) = server.asked
    assert (body["prompt"], body["max_tokens"], body["temperature"]) == (IDS.tolist(), 1, 1.0)


async def test_the_likeliest_tokens_are_in_order_and_without_the_sampled_one_if_it_is_none(
    server: ScriptedTeacherServer, own: Path
) -> None:
    scores = await ask_once(server, own, top_k=4)
    rows = server.table[IDS[PLACES - 1]]
    expected = np.argsort(-rows, axis=1, kind="stable")[:, :4]
    np.testing.assert_array_equal(scores.top_ids, expected)
    found = np.take_along_axis(rows, expected, 1).astype(np.float32)
    np.testing.assert_array_equal(scores.top_logprobs, found)
    sampled = server.table[IDS[PLACES - 1], IDS[PLACES]].astype(np.float32)
    np.testing.assert_array_equal(scores.logprobs, sampled)


async def test_the_key_is_that_of_the_named_variable(
    server: ScriptedTeacherServer, own: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TEACHER_KEY", KEY)
    await ask_once(server, own, api_key="$TEACHER_KEY")
    assert server.keys == {f"Bearer {KEY}"}
    monkeypatch.delenv("TEACHER_KEY")
    with pytest.raises(ConfigError, match=r"\$TEACHER_KEY, which is not set"):
        await ask_once(server, own, api_key="$TEACHER_KEY")


def answer(status: int, text: str = "", **headers: str) -> Callable[[Any], Any]:
    async def fault(choice: dict[str, Any]) -> web.Response:
        return web.Response(status=status, text=text, headers=headers)

    return fault


def spoil(change: Callable[[dict[str, Any]], object]) -> Callable[[Any], Any]:
    async def fault(choice: dict[str, Any]) -> None:
        change(choice)

    return fault


def at_place(change: Callable[[dict[str, Any]], object]) -> Callable[[Any], Any]:
    """Change the logprobs at the second place."""
    return spoil(lambda choice: change(choice["prompt_logprobs"][2]))


def set_all(value: float) -> Callable[[Any], Any]:
    return at_place(lambda entries: [each.update(logprob=value) for each in entries.values()])


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (spoil(lambda c: c["prompt_token_ids"].reverse()), "other token ids"),
        (spoil(lambda c: c["prompt_logprobs"].pop()), "other token ids"),
        (spoil(lambda c: c.pop("prompt_logprobs")), "only vLLM returns"),
        (spoil(lambda c: c.pop("prompt_token_ids")), "only vLLM returns"),
        (spoil(lambda c: c.update(prompt_logprobs=None)), "only vLLM returns"),
        (spoil(lambda c: c["prompt_logprobs"].__setitem__(2, None)), "no logprob of token 2"),
        (at_place(lambda e: e.pop("2")), "no logprob of token 2"),
        (at_place(lambda e: e.update({"2": {"rank": 1}})), "no logprob of token 2"),
        (at_place(lambda e: e.update({"50": {"logprob": -3.0}})), "not the 0 likeliest"),
        (set_all(math.nan), "logprob nan"),
        (set_all(-math.inf), "logprob -inf"),
        (set_all(-9999.0), "logprob -9999"),
        (set_all(math.inf), "logprob inf"),
        (set_all(7.5), "--logprobs-mode"),
        (answer(400, "prompt_logprobs of 64 is greater than max allowed: 20"), "max allowed: 20"),
        (answer(401, "no such key"), "no such key"),
        (answer(404, "no such model"), "no such model"),
    ],
)
async def test_what_cannot_be_learned_from_is_refused_with_the_reason(
    server: ScriptedTeacherServer, own: Path, fault: Any, reason: str
) -> None:
    server.faults.append(fault)
    with pytest.raises(TeacherRefusedError, match=reason):
        await ask_once(server, own)


async def hang(choice: dict[str, Any]) -> None:
    await asyncio.sleep(60)


async def cut_off(choice: dict[str, Any]) -> web.Response:
    return web.Response(body=b'{"choices": [{"prompt_log', content_type="application/json")


@pytest.mark.parametrize(
    "fault", [answer(500, "out of memory"), answer(503), answer(429), hang, cut_off]
)
async def test_what_may_pass_is_said_to_be_so(
    server: ScriptedTeacherServer, own: Path, fault: Any
) -> None:
    server.faults.append(fault)
    with pytest.raises(TeacherDownError):
        await ask_once(server, own, timeout_s=0.5)
    assert len((await ask_once(server, own)).logprobs) == len(PLACES)


async def test_a_busy_server_says_when_to_come_back(
    server: ScriptedTeacherServer, own: Path
) -> None:
    server.faults.append(answer(429, "", **{"Retry-After": "17"}))
    with pytest.raises(TeacherDownError) as raised:
        await ask_once(server, own)
    assert raised.value.wait_s == 17.0


async def test_a_server_that_is_gone_is_down(own: Path) -> None:
    async with serving_teacher(ScriptedTeacherServer(own)) as server:
        pass
    with pytest.raises(TeacherDownError):
        await ask_once(server, own)


async def test_the_first_listed_model_with_the_policys_tokenizer_is_proved(
    server: ScriptedTeacherServer, own: Path
) -> None:
    async with asking(server, own, top_k=3) as teacher:
        await teacher.prove_tokenizer()
        await teacher.score_tokens(IDS, PLACES)
    assert {body["model"] for body in server.asked} == {NAME}
    assert {body["prompt_logprobs"] for body in server.asked} == {3}


async def prove(server: ScriptedTeacherServer, own: Path, **config: Any) -> None:
    async with asking(server, own, **config) as teacher:
        await teacher.prove_tokenizer()


async def test_another_tokenizer_file_is_refused(
    server: ScriptedTeacherServer, own: Path, tmp_path: Path
) -> None:
    other = write_tokenizer(tmp_path / "other", first=1)
    with pytest.raises(TeacherRefusedError, match="same family"):
        await prove(server, own, tokenizer=str(other))


async def test_a_server_that_reads_text_in_another_way_is_refused_whatever_its_file(
    server: ScriptedTeacherServer, own: Path, tmp_path: Path
) -> None:
    server.folder = write_tokenizer(tmp_path / "other", first=1)
    with pytest.raises(TeacherRefusedError, match="other ids of the text"):
        await prove(server, own, tokenizer=str(own))


async def test_a_served_folder_that_is_elsewhere_needs_the_key_that_names_its_tokenizer(
    server: ScriptedTeacherServer, own: Path, tmp_path: Path
) -> None:
    server.folder = tmp_path / "nowhere"
    with pytest.raises(TeacherRefusedError, match=r"learner\.teacher\.tokenizer"):
        await prove(server, own)


async def test_a_context_that_is_too_short_for_whole_sequences_is_refused(
    server: ScriptedTeacherServer, own: Path
) -> None:
    server.max_model_len = 8
    with pytest.raises(TeacherRefusedError, match="--max-model-len"):
        await prove(server, own)


async def test_a_model_that_is_not_served_is_refused_with_those_that_are(
    server: ScriptedTeacherServer, own: Path
) -> None:
    with pytest.raises(TeacherRefusedError, match=NAME):
        await prove(server, own, model="another")
