"""Servers that a launcher queries may answer without end, or with anything: they are queried
again later or ignored, and the launcher continues."""

import asyncio
import gzip
import tracemalloc
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from flotilla_common.adapters.bounded_http import (
    AnswerError,
    ask,
    json_of,
    object_of,
    retry_after,
)
from flotilla_common.text.parsing import TextLimits
from flotilla_launcher.agent.adapters.spot_notice import MetadataNotices
from flotilla_launcher.backends.ports import BackendUnreachable
from flotilla_launcher.backends.sky.cloud_audit import LambdaCloud
from flotilla_launcher.notify.adapters.slack import SlackSink
from flotilla_launcher.notify.adapters.webhook import WebhookSink
from flotilla_launcher.notify.messages import Message, MessageKind
from flotilla_launcher.notify.outbox import DeliveryTarget, Letter, LetterState
from flotilla_launcher.notify.sinks import DeliveryDelayedError, DeliveryRefusedError

OK = b"HTTP/1.1 200 OK\r\n"
ENDLESS = b"x" * 2**16


@asynccontextmanager
async def serving(start: bytes, *, endless: bytes = b"", pause_s: float = 0) -> AsyncGenerator[str]:
    """A server that answers every request with this; with `endless` it sends until cut off."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(start)
            while endless:
                writer.write(endless)
                await writer.drain()
                await asyncio.sleep(pause_s)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


def whole(body: bytes, headers: bytes = b"") -> bytes:
    return OK + headers + b"Content-Length: %d\r\n\r\n" % len(body) + body


async def test_an_answer_without_an_end_is_left_at_its_limit() -> None:
    async with serving(OK + b"\r\n", endless=ENDLESS) as url, httpx.AsyncClient() as http:
        tracemalloc.start()
        try:
            with pytest.raises(AnswerError, match="the response has more than 1048576 bytes"):
                await ask(http, "GET", url)
            assert tracemalloc.get_traced_memory()[1] < 8 * 2**20
        finally:
            tracemalloc.stop()


async def test_an_answer_that_comes_byte_by_byte_has_no_more_time_than_another() -> None:
    slow = serving(OK + b"\r\n", endless=b"x", pause_s=0.01)
    async with slow as url, httpx.AsyncClient(timeout=5.0) as http:
        with pytest.raises(httpx.ReadTimeout, match=r"no complete response within 0\.2 s"):
            await ask(http, "GET", url, whole_s=0.2)


async def test_what_a_few_bytes_unfold_to_is_not_read() -> None:
    body = gzip.compress(b"0" * 2**26)
    bomb = serving(whole(body, b"Content-Encoding: gzip\r\n"))
    async with bomb as url, httpx.AsyncClient() as http:
        with pytest.raises(AnswerError, match="compressed"):
            await ask(http, "GET", url)


async def test_an_answer_is_returned_whole() -> None:
    server = serving(whole(b'{"a": [1, "b"]}', b"X-Y: z\r\n"))
    async with server as url, httpx.AsyncClient(base_url=url) as http:
        answer = await ask(http, "GET", "/path", params={"q": "1"})
    assert await object_of(answer) == {"a": [1, "b"]}
    assert (answer.status_code, answer.headers["x-y"], answer.url.path) == (200, "z", "/path")


@pytest.mark.parametrize(
    "body", [b"[" * 2**19, b"[" + b"[]," * 2**17 + b"1]", b"\xff", b"", b"1 2"]
)
async def test_json_that_is_none_or_too_much_is_no_answer(body: bytes) -> None:
    answer = httpx.Response(200, content=body)
    for read in (json_of, object_of):
        with pytest.raises(ValueError):
            await read(answer)
    with pytest.raises(ValueError, match="a JSON list instead of an object"):
        await object_of(httpx.Response(200, content=b"[1]"), TextLimits(bytes=9, values=9))


@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        *(("7", 7.0), ("0.5", 0.5), ("", 5.0), ("soon", 5.0), ("nan", 5.0), ("-1", 5.0)),
        *(("9" * 400, 3600.0), ("inf", 3600.0), ("1e9", 3600.0)),
    ],
)
def test_no_wait_is_longer_than_an_hour(header: str, seconds: float) -> None:
    assert retry_after(httpx.Response(429, headers={"retry-after": header})) == seconds


LETTER = Letter(
    run_id="run",
    event="1",
    target=DeliveryTarget("slack", "TOKEN", channel="c"),
    message=Message(MessageKind.STARTED, "t"),
    created=0.0,
    state=LetterState.WAITING,
    attempts=0,
    due=0.0,
)
ODD = [
    *(b"[" * 2**19, b"[1]", b'{"ok": true}', b'{"ok": true, "channel": [], "ts": 1}', b"\xff", b""),
    b'{"ok": true, "messages": [1, null, {"metadata": 1}, {"metadata": {"event_payload": []}}]}',
    b'{"ok": true, "messages": {"a": 1}}',
    b'{"time": "0001-01-01T00:00:00"}',
    b'{"time": 1}',
    b'{"data": [1]}',
    b'{"data": {}}',
    b'{"data": [{"id": 1, "status": []}]}',
    "é\r\n".encode(),
]


@pytest.mark.parametrize("body", [*ODD, None], ids=lambda body: repr(body)[:24])
async def test_whatever_a_server_answers_is_a_refusal_or_no_notice(
    body: bytes | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    key = tmp_path / "lambda_keys"
    key.write_text("api_key = k")
    start = OK + b"\r\n" if body is None else whole(body)
    async with serving(start, endless=ENDLESS if body is None else b"") as url:
        monkeypatch.setenv("FLOTILLA_LAMBDA_URL", url)
        target = DeliveryTarget("slack", "TOKEN", address=url, channel="c")
        slack, webhook = SlackSink(target, "xoxb-token"), WebhookSink(target, url)
        notices, cloud = MetadataNotices(url), LambdaCloud()
        monkeypatch.setattr(cloud, "_keys", key)
        for work in (
            slack.send_letter(LETTER),
            slack.find_thread(LETTER),
            webhook.send_letter(LETTER),
        ):
            try:
                assert isinstance(await work, str | None)
            except (DeliveryDelayedError, DeliveryRefusedError) as error:
                assert str(error)
        assert await notices.poll_notice() in (None, 0.0)
        try:
            assert await cloud.list_machines() == []
        except BackendUnreachable as error:
            assert "itself does not answer" in str(error)
        for each in (slack, webhook, notices):
            await each.close()


@pytest.mark.parametrize("charset", ["base64", "rot13", "idna", "undefined", "none"])
async def test_the_text_of_an_answer_is_read_whatever_the_server_calls_its_characters(
    charset: str,
) -> None:
    header = f"Content-Type: text/plain; charset={charset}\r\n".encode()
    server = serving(whole("né \ud800".encode(errors="surrogatepass"), header))
    async with server as url, httpx.AsyncClient() as http:
        answer = await ask(http, "GET", url)
    assert answer.text.startswith("né \ufffd")
