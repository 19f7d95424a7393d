"""Content parts of the env_gateway, as the policy reads them: texts, and pictures if it sees."""

import asyncio
from collections.abc import Iterable
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from flotilla.env_gateway.v1 import episode_service_pb2 as pb
from flotilla_common.aio.bounded_bytes import BoundedBytes
from flotilla_common.images.picture import Picture
from flotilla_common.images.picture_files import MOST_BYTES, check_bytes
from flotilla_common.images.picture_process import PictureProcess
from flotilla_common.images.vision_family import VisionFamily

if TYPE_CHECKING:
    from flotilla.env_gateway.v1.episode_service_pb2_grpc import EpisodeServiceAsyncStub

FETCH_TIMEOUT_S = 10.0
# A longer answer of one tool would exceed any context.
MOST_TEXT_BYTES = 256 * 1024
# Bytes of pictures that are kept: attempts of a group begin with the same screen.
MOST_KEPT_BYTES = 64 * 2**20
# Processes that read pictures.
_READERS = 2


class ContentPartReader:
    """Reader of content parts. Without a `family` the policy reads descriptions of pictures."""

    def __init__(self, stub: "EpisodeServiceAsyncStub", family: VisionFamily | None = None) -> None:
        self._stub = stub
        self._family = family
        # Pictures, or refusals, by the gateway's hash.
        self._known: BoundedBytes[bytes, Picture | str] = BoundedBytes(MOST_KEPT_BYTES, _size_of)
        # Of pictures that are being read, by hash: concurrent attempts wait for the same one.
        self._locks: WeakValueDictionary[bytes, asyncio.Lock] = WeakValueDictionary()
        self._readers: asyncio.Queue[PictureProcess] = asyncio.Queue()
        for _ in range(_READERS):
            self._readers.put_nowait(PictureProcess())

    async def close(self) -> None:
        """End the processes that read pictures."""
        for _ in range(_READERS):
            reader = await self._readers.get()
            await asyncio.to_thread(reader.close)

    async def read_parts(
        self, episode_id: str, parts: Iterable[pb.ContentPart]
    ) -> list[str | Picture]:
        """Return the texts and pictures of parts.

        Raises grpc.aio.AioRpcError if a part cannot be fetched."""
        return [await self._read_part(episode_id, part) for part in parts]

    async def _read_part(self, episode_id: str, part: pb.ContentPart) -> str | Picture:
        """Return a part; of a text its start, and of other media that are not shown a
        description."""
        media = part.media
        if part.HasField("text"):
            return part.text
        if media.mime.startswith("text/"):
            return await self._read_text(episode_id, media)
        if self._family is None or not media.mime.startswith("image/"):
            return f"[{media.mime}, {media.size_bytes} bytes]"
        return await self._read_picture(episode_id, media, self._family)

    async def _read_text(self, episode_id: str, media: pb.Media) -> str:
        data = media.data or await self._fetch(episode_id, media.sha256, MOST_TEXT_BYTES)
        text = data[:MOST_TEXT_BYTES].decode("utf-8", "ignore")
        cut = f"\n[cut here: {media.size_bytes} bytes in all]"
        return text if media.size_bytes <= MOST_TEXT_BYTES else text + cut

    async def _read_picture(
        self, episode_id: str, media: pb.Media, family: VisionFamily
    ) -> Picture | str:
        """Return a picture, or the line that the policy reads in place of one that is refused."""
        lock = self._locks.setdefault(media.sha256, asyncio.Lock())
        async with lock:
            known = self._known.get(media.sha256)
            if known is None:
                known = await self._decode(episode_id, media, family)
                self._known.keep(media.sha256, known)
        return known

    async def _decode(
        self, episode_id: str, media: pb.Media, family: VisionFamily
    ) -> Picture | str:
        try:
            check_bytes(media.size_bytes)
            data = media.data or await self._fetch(episode_id, media.sha256, MOST_BYTES)
            picture = await self._read_file(data)
            family.grid(picture.width, picture.height)
        except ValueError as error:
            return f"[picture refused: {error}]"
        return picture

    async def _read_file(self, data: bytes) -> Picture:
        """Return the picture in a file. Raises PictureRefused."""
        reader = await self._readers.get()
        reading = asyncio.create_task(asyncio.to_thread(reader.read_picture, data))

        def put_back(ended: asyncio.Task[Picture]) -> None:
            self._readers.put_nowait(reader)
            # No caller may be left to retrieve its error.
            _ = ended.cancelled() or ended.exception()

        # Not at the end of this call, which may be cancelled before its thread ends.
        reading.add_done_callback(put_back)
        return await asyncio.shield(reading)

    async def _fetch(self, episode_id: str, sha256: bytes, most: int) -> bytes:
        """Fetch what was too large for an answer, or its first `most` bytes and a little more."""
        request = pb.FetchMediaRequest(episode_id=episode_id, sha256=sha256)
        call = self._stub.FetchMedia(request, timeout=FETCH_TIMEOUT_S)
        data = bytearray()
        try:
            async for message in call:
                data += message.chunk
                if len(data) >= most:
                    break
        finally:
            call.cancel()
        return bytes(data)


def _size_of(shown: Picture | str) -> int:
    return len(shown.data) if isinstance(shown, Picture) else len(shown)
