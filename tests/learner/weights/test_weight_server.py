from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import pytest_asyncio

from flotilla.learner.v1 import policy_pb2, weight_service_pb2
from flotilla.learner.v1 import weight_service_pb2_grpc as pb_grpc
from flotilla_common.domain.policy import PolicyId
from flotilla_common.process.line_channel import ChildLostError
from flotilla_common.rpc import rpc
from flotilla_learner.types import Publication
from flotilla_learner.weights.publication_child import PublicationChild
from flotilla_learner.weights.weight_server import WeightServerConfig

TOKEN = "a-token-of-this-test"
SIZE = 3 * 2**20 + 17


def publish(folder: Path, version: int) -> tuple[Publication, PolicyId, bytes]:
    data = np.random.default_rng(version).integers(0, 256, SIZE, dtype=np.uint8).tobytes()
    path = folder / f"slot{version % 3}"
    path.write_bytes(data)
    digest = bytes([version]) * 32
    nothing = np.zeros(0, np.int32)
    publication = Publication(version, digest, (), SIZE, path, nothing, nothing.astype(np.float32))
    return publication, PolicyId(2, version, digest), data


@pytest_asyncio.fixture
async def weights(tmp_path: Path) -> AsyncIterator[tuple[PublicationChild, str]]:
    server = PublicationChild("flotilla_learner.weights.weight_server", tmp_path / "weights.log")
    yield server, await server.start_process(WeightServerConfig("run", TOKEN))
    await server.close()
    await server.close()


def stream_of(
    channel: grpc.aio.Channel, request: weight_service_pb2.FetchWeightsRequest
) -> AsyncIterator[weight_service_pb2.FetchWeightsResponse]:
    stub: Any = pb_grpc.WeightServiceStub(channel)
    return stub.FetchWeights(request)


async def fetch(address: str, policy: PolicyId, offset: int = 0, token: str = TOKEN) -> bytes:
    """All that is streamed; checks that the chunks are small and in order."""
    request = weight_service_pb2.FetchWeightsRequest(
        policy=policy_pb2.PolicyId(
            run_epoch=policy.run_epoch, version=policy.version, fingerprint=policy.fingerprint
        ),
        offset_bytes=offset,
    )
    received = bytearray()
    async with rpc.channel(address, token=token) as channel:
        async for response in stream_of(channel, request):
            assert response.offset_bytes == offset + len(received)
            assert len(response.chunk) <= 2**20
            received += response.chunk
    return bytes(received)


async def refusal(address: str, policy: PolicyId, offset: int = 0) -> tuple[str, str]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await fetch(address, policy, offset)
    error = rpc.service_error(caught.value)
    assert error is not None
    return error.code.name, error.reason


async def test_serves_the_newest_two_publications_byte_for_byte(
    weights: tuple[PublicationChild, str], tmp_path: Path
) -> None:
    server, address = weights
    published = [publish(tmp_path, version) for version in range(3)]
    for publication, policy, _ in published:
        await server.serve_publication(publication, policy)
    for _, policy, data in published[1:]:
        assert await fetch(address, policy) == data
    _, newest, data = published[2]
    assert await fetch(address, newest, offset=SIZE - 5) == data[-5:]
    assert await fetch(address, newest, offset=SIZE) == b""
    superseded = ("FAILED_PRECONDITION", "VERSION_SUPERSEDED")
    assert await refusal(address, published[0][1]) == superseded
    assert await refusal(address, PolicyId(2, 2, b"other" * 8)) == superseded
    assert await refusal(address, newest, SIZE + 1) == ("OUT_OF_RANGE", "BAD_OFFSET")
    assert await refusal(address, newest, -1) == ("OUT_OF_RANGE", "BAD_OFFSET")


async def test_a_fetch_that_is_overtaken_ends_instead_of_mixing_versions(
    weights: tuple[PublicationChild, str], tmp_path: Path
) -> None:
    server, address = weights
    publication, policy, _ = publish(tmp_path, 0)
    # Sparse and long, so that the stream cannot be buffered whole.
    with publication.path.open("r+b") as file:
        file.truncate(2**29)
    await server.serve_publication(replace(publication, total_bytes=2**29), policy)
    request = weight_service_pb2.FetchWeightsRequest(
        policy=policy_pb2.PolicyId(run_epoch=2, version=0, fingerprint=policy.fingerprint)
    )
    async with rpc.channel(address, token=TOKEN) as channel:
        responses = aiter(stream_of(channel, request))
        await anext(responses)
        for version in (1, 2):
            await server.serve_publication(*publish(tmp_path, version)[:2])
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in responses:
                continue
    error = rpc.service_error(caught.value)
    assert error is not None
    assert error.reason == "VERSION_SUPERSEDED"


async def test_without_the_token_nothing_is_served(
    weights: tuple[PublicationChild, str], tmp_path: Path
) -> None:
    server, address = weights
    publication, policy, _ = publish(tmp_path, 0)
    await server.serve_publication(publication, policy)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await fetch(address, policy, token="the-token-of-another-run")
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_a_server_that_died_is_an_error(
    weights: tuple[PublicationChild, str], tmp_path: Path
) -> None:
    server, _ = weights
    child = server._child  # pyright: ignore[reportPrivateUsage]
    assert child is not None
    child.kill()
    await child.wait_until_lost()
    with pytest.raises(ChildLostError, match="the weight server was killed by signal 9"):
        await server.serve_publication(*publish(tmp_path, 0)[:2])
