"""An endpoint may refuse, fail, or answer anything: the caller gets a turn of the model or a
reason."""

import asyncio
import json
import socket
import struct
import time
from collections.abc import Mapping, Sequence
from http.server import BaseHTTPRequestHandler
from typing import Any

import pytest

from flotilla_common.rpc.free_ports import free_port
from flotilla_common.text.parsing import TextLimits
from flotilla_launcher.cli.adapters import chat_endpoint
from flotilla_launcher.cli.adapters.chat_endpoint import EndpointError, ModelTurn, open_endpoint
from tests.support.http_answers import Answer, serve_answers
from tests.support.scripted_model import MODEL, Say, as_answer, call, completion, serve_model

KEY = "sk-0123456789abcdef"
HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_endpoint, "_FIRST_PAUSE_S", 0.01)


async def answered(url: str, tools: Sequence[Mapping[str, Any]] = (), **options: Any) -> ModelTurn:
    async with open_endpoint(url, model=MODEL, **options) as endpoint:
        return await endpoint.answer_messages(HELLO, tools)


def always(answer: Answer) -> Say:
    return lambda _messages: answer


async def test_the_first_model_is_chosen_and_a_key_is_sent_only_if_there_is_one() -> None:
    with serve_model(lambda _: {"content": "hi"}) as (url, asked):
        async with open_endpoint(f"{url}/", temperature=0.5) as endpoint:
            turn = await endpoint.answer_messages(HELLO, ())
        await answered(url, key=KEY)
    assert (endpoint.model, turn.text, turn.message) == (
        MODEL,
        "hi",
        {"role": "assistant", "content": "hi"},
    )
    first, second = asked.bodies
    assert first == {"model": MODEL, "messages": HELLO, "temperature": 0.5}
    assert second == {"model": MODEL, "messages": HELLO}
    sent = [headers.get("authorization") for headers in asked.headers]
    assert sent == [None, None, f"Bearer {KEY}"]


async def test_what_passes_is_asked_again_and_what_does_not_is_not() -> None:
    failures = [as_answer({}, 429, retry_after="0"), as_answer({}, 503), as_answer({}, 500)]
    with serve_model(lambda _: failures.pop(0) if failures else {"content": "hi"}) as (url, _):
        assert (await answered(url)).text == "hi"
    for status, tries in ((503, 5), (429, 5), (401, 1), (404, 1), (302, 1)):
        with serve_model(always(as_answer({"error": "no"}, status))) as (url, asked):
            with pytest.raises(EndpointError, match=f"/chat/completions answered {status}: "):
                await answered(url)
            assert len(asked.bodies) == tries


async def test_a_wait_that_is_too_long_is_not_begun() -> None:
    began = time.monotonic()
    serving = serve_model(always(as_answer({}, 429, retry_after="3600")))
    with serving as (url, asked), pytest.raises(EndpointError, match=r"try 1: .*answered 429"):
        await answered(url)
    assert (len(asked.bodies), time.monotonic() - began < 20) == (1, True)


async def test_a_connection_that_is_refused_is_a_reason() -> None:
    with pytest.raises(EndpointError, match=r"try 5: http://127\.0\.0\.1:.*connection"):
        await answered(f"http://127.0.0.1:{free_port()}/v1")


async def test_a_connection_that_is_reset_is_named() -> None:
    async def reset(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        connection = writer.get_extra_info("socket")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.close()

    async with await asyncio.start_server(reset, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(EndpointError, match=r"try 5: .*/chat/completions: ReadError"):
            await answered(f"http://127.0.0.1:{port}/v1")


async def test_an_echoed_key_is_hidden_and_one_that_no_header_can_have_is_refused() -> None:
    serving = serve_model(always(as_answer({"error": f"wrong key {KEY}"}, 401)))
    with serving as (url, _), pytest.raises(EndpointError) as refused:
        await answered(url, key=KEY)
    assert (KEY in str(refused.value), "***" in str(refused.value)) == (False, True)
    with pytest.raises(EndpointError) as refused:
        await answered(url, key=f"{KEY}é")
    assert KEY not in str(refused.value)


async def test_calls_are_read_as_they_were_written_and_tools_are_offered() -> None:
    arguments = {"a": 1}
    calls = [call("look", "not json"), {**call("fly", ""), "extra": None}]
    calls.append({"id": "x", "function": {"name": "give", "arguments": arguments}})
    tools = [{"type": "function", "function": {"name": "look"}}]
    with serve_model(lambda _: {"tool_calls": calls}) as (url, asked):
        turn = await answered(url, tools)
    assert asked.bodies[0]["tools"] == tools
    read = [(each.name, each.arguments) for each in turn.calls]
    assert read == [("look", "not json"), ("fly", "{}"), ("give", '{"a": 1}')]
    assert turn.message == {"role": "assistant", "tool_calls": calls}


async def test_half_a_character_is_replaced_because_it_cannot_be_sent_on() -> None:
    calls = [call("a\ud800", '{"x": "\ud800"}')]
    with serve_model(lambda _: {"content": "b\udfff", "tool_calls": calls}) as (url, _):
        turn = await answered(url)
        async with open_endpoint(url, model=MODEL) as endpoint:
            await endpoint.answer_messages([*HELLO, turn.message], ())
    assert (turn.text, turn.calls[0].name, turn.calls[0].arguments) == ("b?", "a?", '{"x": "?"}')


async def test_a_turn_that_was_cut_says_so() -> None:
    with serve_model(always(as_answer(completion({"content": "x"}, "length")))) as (url, _):
        assert (await answered(url)).cut


@pytest.mark.parametrize(
    "body",
    [
        *(
            b"",
            b"[1]",
            b"{}",
            b'{"choices": []}',
            b'{"choices": [{"message": null}]}',
            b"[" * 2**19,
        ),
        b'{"choices": [{"message": {"content": 5}}]}',
        b'{"choices": [{"message": {"tool_calls": [{"function": {}}]}}]}',
    ],
    ids=lambda body: repr(body)[:40],
)
async def test_an_answer_that_is_no_completion_is_a_reason(body: bytes) -> None:
    def answer(_request: BaseHTTPRequestHandler) -> Answer:
        return 200, {}, body

    with (
        serve_answers(answer) as address,
        pytest.raises(EndpointError, match=r"is no (JSON object|chat completion): "),
    ):
        await answered(f"{address}/v1")


async def test_what_could_not_be_sent_on_or_counted_is_left_out() -> None:
    used = {"prompt_tokens": 10**30, "completion_tokens": 1}
    said = completion({"content": "hi", "score": float("nan"), "mood": [1e999]}) | {"usage": used}

    def answer(_request: BaseHTTPRequestHandler) -> Answer:
        return 200, {}, json.dumps(said).encode()

    with serve_answers(answer) as address:
        turn = await answered(f"{address}/v1")
    assert (turn.message, turn.usage) == (
        {"role": "assistant", "content": "hi", "mood": [None]},
        None,
    )


async def test_an_endpoint_that_lists_no_model_is_named() -> None:
    def answer(_request: BaseHTTPRequestHandler) -> Answer:
        return as_answer({"data": []})

    with serve_answers(answer) as address, pytest.raises(EndpointError, match="lists no model"):
        async with open_endpoint(f"{address}/v1"):
            pass


@pytest.mark.parametrize(
    "url", ["http://", "ftp://host/v1", "host/v1", "http://[::1", "http:///v1"]
)
async def test_an_address_that_is_none_is_refused_at_once(url: str) -> None:
    began = time.monotonic()
    with pytest.raises(EndpointError) as refused:
        await answered(url)
    assert str(refused.value).startswith(url)
    assert "try" not in str(refused.value)
    assert time.monotonic() - began < 5


async def test_an_answer_that_is_too_long_is_paid_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_endpoint, "_ANSWERS", TextLimits(bytes=2**16, values=2**10))
    with serve_model(lambda _: {"content": "x" * 2**17}) as (url, asked):
        with pytest.raises(EndpointError, match="more than 65536 bytes"):
            await answered(url)
        assert len(asked.bodies) == 1


async def test_an_error_that_comes_as_a_good_answer_is_the_reason() -> None:
    def answer(_request: BaseHTTPRequestHandler) -> Answer:
        return as_answer({"error": {"message": "the model is \u001b[31moverloaded"}})

    with (
        serve_answers(answer) as address,
        pytest.raises(EndpointError, match=r"no chat completion: it says: .*overloaded") as raised,
    ):
        await answered(f"{address}/v1")
    assert "\x1b" not in str(raised.value)
