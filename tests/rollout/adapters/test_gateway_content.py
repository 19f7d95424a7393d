"""Pictures of a gateway, over a real connection: shown to policies that see, else described; what
cannot be shown is said, and nothing holds the event loop."""

import asyncio
import hashlib
import io
import re
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from PIL import Image

from flotilla.env_gateway.v1 import episode_service_pb2 as env_pb
from flotilla.env_gateway.v1 import episode_service_pb2_grpc as env_grpc
from flotilla_common.domain.attempts import AttemptKey, ToolOutcome
from flotilla_common.images.made_pictures import plain_picture
from flotilla_common.images.picture import Picture
from flotilla_common.images.vision_family import VisionFamily
from flotilla_common.rpc import rpc
from flotilla_rollout.adapters import gateway_content
from flotilla_rollout.adapters.env_gateway import GatewayEnvironment
from flotilla_rollout.ports import EnvironmentLost
from flotilla_rollout.types import OpenRequest, ToolResult
from tests.common.images.odd_pictures import KEPT, ODD, RED, odd_file
from tests.support.fake_peers import TOKEN, FakeGateway, refuse, served
from tests.support.vision_family import make_family
from tests.support.waiting import until

# Larger media are not in an answer.
_MOST_INLINE = 64 * 1024
# What the event loop may be late.
_MOST_LATE_S = 0.05
FAMILY = make_family()


class MediaGateway(FakeGateway):
    """Answers every call with `files`, and counts what is fetched."""

    def __init__(self, *files: tuple[str, bytes], **fields: Any) -> None:
        super().__init__(
            lambda _: env_pb.CallToolResponse(outcome=env_pb.TOOL_OUTCOME_OK, parts=self.parts),
            **fields,
        )
        self.parts = [self.make_part(mime, data) for mime, data in files]
        self.files = {hashlib.sha256(data).digest(): data for _, data in files}
        self.fetched = Counter[bytes]()
        self.missing = 0
        self.let_go = asyncio.Event()
        self.let_go.set()

    def make_part(self, mime: str, data: bytes) -> env_pb.ContentPart:
        sha256, inline = hashlib.sha256(data).digest(), data if len(data) <= _MOST_INLINE else b""
        media = env_pb.Media(mime=mime, sha256=sha256, size_bytes=len(data), data=inline)
        return env_pb.ContentPart(media=media)

    async def FetchMedia(
        self, request: Any, context: Any
    ) -> AsyncGenerator[env_pb.FetchMediaResponse]:
        self.fetched[request.sha256] += 1
        await self.let_go.wait()
        if self.missing:
            self.missing -= 1
            raise refuse(grpc.StatusCode.NOT_FOUND, "MEDIA_LOST")
        data = self.files[request.sha256]
        for start in range(0, len(data), 2**20):
            yield env_pb.FetchMediaResponse(chunk=data[start : start + 2**20])


@asynccontextmanager
async def played(
    gateway: MediaGateway, family: VisionFamily | None = FAMILY
) -> AsyncGenerator[GatewayEnvironment]:
    def add(server: Any) -> None:
        env_grpc.add_EpisodeServiceServicer_to_server(gateway, server)

    async with served(add) as address, rpc.channel(address, token=TOKEN) as channel:
        environment = GatewayEnvironment(
            channel, run_id="r", worker_id="w", renew_interval_s=9.0, family=family
        )
        try:
            yield environment
        finally:
            await environment.wait_until_closed()


async def look(environment: GatewayEnvironment, attempt: int = 0) -> ToolResult:
    request = OpenRequest(AttemptKey("g", attempt, 0), "{}", 1, 60.0)
    async with environment.open_episode(request) as episode:
        return await episode.call_tool("look", "{}", 30.0)


def file(name: str) -> tuple[str, bytes]:
    return ODD[name].mime, odd_file(name)


async def measure_lateness(late: list[float]) -> None:
    """Measure by how much the event loop is late, like the gateway does."""
    loop = asyncio.get_running_loop()
    while True:
        due = loop.time() + 0.01
        await asyncio.sleep(0.01)
        late.append(loop.time() - due)


async def look_measured(*files: tuple[str, bytes]) -> tuple[ToolResult, float]:
    """Return what the policy is shown, and by how much the loop was late at most."""
    async with played(MediaGateway(*files)) as environment:
        late = list[float]()
        measuring = asyncio.create_task(measure_lateness(late))
        result = await look(environment)
        measuring.cancel()
    return result, max(late)


async def test_odd_pictures_are_shown_or_their_refusal_is_read_while_the_loop_goes_on() -> None:
    files = [file(name) for name in ODD]
    result, late = await look_measured(*files)
    if late >= _MOST_LATE_S:
        # Other processes may have kept this one waiting.
        result, late = await look_measured(*files)
    assert late < _MOST_LATE_S
    assert result.outcome is ToolOutcome.OK
    for (name, odd), shown in zip(ODD.items(), result.parts, strict=True):
        if odd.is_read:
            assert isinstance(shown, Picture), name
            assert (shown.width, shown.height) == odd.size
            assert (shown.data == odd_file(name)) == (odd.becomes == KEPT)
            FAMILY.grid(shown.width, shown.height)
        else:
            assert isinstance(shown, str), name
            assert re.match(rf"\[picture refused: .*{odd.becomes}.*\]$", shown), shown


async def test_a_decoder_that_lets_no_other_thread_run_holds_nothing() -> None:
    """In this process it would hold the event loop for a tenth of a second and more."""
    written = io.BytesIO()
    Image.new("RGBA", (7680, 4320), (*RED, 100)).save(written, "PNG", compress_level=1)
    result, late = await look_measured(("image/png", written.getvalue()))
    assert late < _MOST_LATE_S
    [shown] = result.parts
    assert isinstance(shown, Picture), shown
    assert (shown.width, shown.height) == (7680, 4320)


async def test_a_picture_that_the_family_cannot_scale_is_refused() -> None:
    long = MediaGateway(("image/png", plain_picture(8192, 8).data))
    async with played(long) as environment:
        assert (await look(environment)).parts == (
            "[picture refused: 8192x8 pixels: one side may be at most 200 times the other]",
        )


async def test_a_policy_that_sees_nothing_reads_descriptions() -> None:
    gateway = MediaGateway(file("a plain PNG"), ("application/zip", b"PK"))
    async with played(gateway, None) as environment:
        size = len(odd_file("a plain PNG"))
        assert (await look(environment)).parts == (
            f"[image/png, {size} bytes]",
            "[application/zip, 2 bytes]",
        )


async def test_the_first_observation_is_split_into_texts_and_pictures() -> None:
    gateway = MediaGateway(file("a plain PNG"))
    gateway.shown = [env_pb.ContentPart(text="A screen."), *gateway.parts]
    async with (
        played(gateway) as environment,
        environment.open_episode(OpenRequest(AttemptKey("g", 0, 0), "{}", 1, 60.0)) as episode,
    ):
        facts = episode.info.facts
        assert (facts.shown, [each.width for each in facts.pictures]) == (("A screen.",), [40])


async def test_attempts_that_are_shown_the_same_picture_fetch_it_once() -> None:
    gateway = MediaGateway(file("10 MB"))
    gateway.let_go.clear()
    async with played(gateway) as environment:
        looks = [asyncio.create_task(look(environment, attempt)) for attempt in range(4)]
        await until(lambda: len(gateway.calls) == 4)
        await asyncio.sleep(0.1)
        gateway.let_go.set()
        shown = [(await each).parts[0] for each in looks]
    assert list(gateway.fetched.values()) == [1]
    assert all(each is shown[0] for each in shown)


async def test_the_end_of_one_attempt_leaves_the_picture_to_the_others() -> None:
    gateway = MediaGateway(file("10 MB"))
    gateway.let_go.clear()
    async with played(gateway) as environment:
        looks = [asyncio.create_task(look(environment, attempt)) for attempt in range(2)]
        await until(lambda: len(gateway.calls) == 2 and bool(gateway.fetched))
        looks[0].cancel()
        await asyncio.wait(looks[:1])
        gateway.let_go.set()
        assert isinstance((await looks[1]).parts[0], Picture)


async def test_an_attempt_whose_picture_is_lost_is_lost_alone() -> None:
    gateway = MediaGateway(file("10 MB"))
    gateway.missing = 1
    async with played(gateway) as environment:
        with pytest.raises(EnvironmentLost, match="MEDIA_LOST"):
            await look(environment)
        assert isinstance((await look(environment)).parts[0], Picture)


async def test_kept_pictures_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway_content, "MOST_KEPT_BYTES", 11 * 2**20)
    big, other = file("10 MB"), ("image/png", odd_file("a screen of 8k") + b" " * 2**21)
    gateway = MediaGateway(big, other)
    async with played(gateway) as environment:
        for _ in range(2):
            shown = (await look(environment)).parts
            assert all(isinstance(each, Picture) for each in shown)
    assert set(gateway.fetched.values()) == {2}, "one drives out the other"
