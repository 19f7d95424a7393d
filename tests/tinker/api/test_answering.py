"""What every call has in common: keys, bodies, and answers whatever happens."""

import random
import re
from collections.abc import AsyncGenerator

import httpx
import pytest
import zstandard

from flotilla_tinker.api.routes import PREFIX, ROUTES, ApiRoute
from flotilla_tinker.work.desk_errors import (
    Away,
    BadOrder,
    Conflict,
    DeskError,
    GoneError,
    NotFound,
    TooLarge,
    TooMuch,
)
from tests.support.fake_desk import make_desk_error
from tests.tinker.api.conftest import BODY_BYTES, ServedDesk
from tests.tinker.wire.examples import make_loss_body, make_sample_body

pytestmark = pytest.mark.asyncio(loop_scope="module")

GARBAGE = [
    b"",
    b"null",
    b"[]",
    b"{}",
    b'{"session_id": 1}',
    b'{"model_id": "\\ud800"}',
    b"\x00\xff\xfe",
    b"[" * 100_000,
    b'{"a":' * 2_000,
    b'{"request_id": "' + b"x" * 100_000 + b'"}',
    b'{"seq_id": 1e400}',
    b'{"seq_id": ' + b"9" * 5_000 + b"}",
    make_loss_body(),
    make_sample_body(),
]


@pytest.mark.parametrize("header", ["X-API-Key", "Authorization"])
async def test_a_key_comes_in_either_header(served: ServedDesk, header: str) -> None:
    key = "tml-bob-0123456789"
    headers = {"X-API-Key": "", header: f"Bearer {key}" if header == "Authorization" else key}
    answer = await served.http.get("/api/v1/training_runs", headers=headers)

    # Bob has no models.
    assert answer.json()["training_runs"] == []


@pytest.mark.parametrize("key", ["", "tml-", "tml-alice-012345678", "tml-alice-01234567890"])
async def test_a_call_without_a_known_key_is_refused(served: ServedDesk, key: str) -> None:
    for route in ROUTES:
        url = f"{PREFIX}{re.sub('{.*?}', 'x', route.path)}"
        answer = await served.http.request(route.method, url, headers={"X-API-Key": key})
        assert answer.status_code == (200 if route.is_open else 401)


@pytest.mark.parametrize(
    ("kind", "status"),
    [
        (BadOrder, 400),
        (NotFound, 404),
        (Conflict, 422),
        (GoneError, 410),
        (TooLarge, 413),
        (TooMuch, 429),
        (Away, 503),
    ],
)
async def test_a_refusal_of_the_desk_has_its_status(
    served: ServedDesk, kind: type[DeskError], status: int
) -> None:
    await served.get("/get_server_capabilities")
    served.desk.error = make_desk_error(kind)
    answer = await served.send("/asample", make_sample_body())

    assert (answer.status_code, answer.json()) == (status, {"detail": "no luck"})
    assert ("retry-after" in answer.headers) is (kind is TooMuch)


async def test_a_defect_is_logged_under_an_id_and_tried_again(
    served: ServedDesk, capsys: pytest.CaptureFixture[str]
) -> None:
    served.desk.error = RuntimeError("secret detail")
    answer = await served.post("/create_session", tags=[], user_metadata=None, sdk_version="")

    assert answer.status_code == 503
    assert "secret detail" not in answer.text
    assert re.search(r"its log has it as [0-9a-f]{12}", answer.json()["detail"])


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: f"{route.method} {route.path}")
async def test_no_garbage_is_ever_answered_by_a_server_error(
    served: ServedDesk, route: ApiRoute
) -> None:
    chance = random.Random(route.path)
    parts = ["x", "..", "%00", "%ff", "é", "a" * 2_000, "s1:train:0"]
    noise = [chance.randbytes(chance.randrange(300)) for _ in range(10)]
    for body in (*GARBAGE, *noise, *(_damage(body, chance) for body in GARBAGE[-2:] * 10)):
        path = re.sub("{.*?}", lambda _: chance.choice(parts), route.path)
        answer = await served.http.request(route.method, f"{PREFIX}{path}", content=body)
        assert answer.status_code < 500, (path, body[:80], answer.text)


def _damage(body: bytes, chance: random.Random) -> bytes:
    damaged = bytearray(body)
    for _ in range(chance.randrange(1, 8)):
        damaged[chance.randrange(len(damaged))] = chance.randrange(256)
    return bytes(damaged)


async def test_a_call_that_does_not_exist_is_refused_by_name(served: ServedDesk) -> None:
    unknown = await served.get("/nothing")
    method = await served.get("/asample")

    assert unknown.json() == {"detail": "this server has no call /api/v1/nothing"}
    assert (method.status_code, method.json()) == (
        405,
        {"detail": "/api/v1/asample does not take GET"},
    )


async def test_a_large_body_is_refused_before_it_is_read(served: ServedDesk) -> None:
    stated = await served.send("/asample", b"x" * (BODY_BYTES + 1))

    async def dribble() -> AsyncGenerator[bytes]:
        for _ in range(BODY_BYTES // 1024 + 1):
            yield b"x" * 1024

    unstated = await served.http.post("/api/v1/asample", content=dribble())
    for answer in (stated, unstated):
        assert answer.status_code == 413
        assert answer.json() == {
            "detail": "the body exceeds 1048576 bytes: send fewer data at a time"
        }


async def test_a_compressed_batch_is_read(served: ServedDesk) -> None:
    body = make_loss_body()
    packed = zstandard.ZstdCompressor().compress(body)
    answer = await _send_packed(served, packed)

    assert answer.status_code == 200
    assert served.desk.orders[0].body == body


async def _send_packed(served: ServedDesk, packed: bytes, encoding: str = "zstd") -> httpx.Response:
    headers = {"Content-Encoding": encoding}
    return await served.http.post("/api/v1/forward_backward", content=packed, headers=headers)


def _stream_packed(data: bytes) -> bytes:
    packer = zstandard.ZstdCompressor().compressobj()
    return packer.compress(data) + packer.flush()


@pytest.mark.parametrize(
    ("packed", "encoding", "status", "message"),
    [
        (b"no frame", "zstd", 400, "the body is not zstd"),
        (zstandard.ZstdCompressor().compress(b"a" * 9999)[:-3], "zstd", 400, "is not zstd"),
        (zstandard.ZstdCompressor().compress(b"a" * 9999) + b"x", "zstd", 400, "is not zstd"),
        (zstandard.ZstdCompressor().compress(bytes(2**26)), "zstd", 413, "exceeds 1048576 bytes"),
        (_stream_packed(b"abc"), "zstd", 400, "does not state the size"),
        (b"x", "br", 415, "'br' is not offered, only zstd"),
    ],
)
async def test_a_body_that_cannot_be_decompressed_is_refused(
    served: ServedDesk, packed: bytes, encoding: str, status: int, message: str
) -> None:
    answer = await _send_packed(served, packed, encoding)

    assert answer.status_code == status
    assert message in answer.json()["detail"]


async def test_what_is_not_offered_says_what_to_do(served: ServedDesk) -> None:
    export = await served.post("/save_weights_external", model_id="m", path="p", seq_id=1)
    losses = await served.post("/create_custom_loss", session_id="s1")

    assert "download the checkpoint's archive" in export.json()["detail"]
    assert "forward_backward_custom computes them in the client" in losses.json()["detail"]
