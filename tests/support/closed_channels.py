"""First calls of methods on channels that were used and closed; prints the number refused."""

import asyncio
from contextlib import suppress
from typing import Any

import grpc
import grpc.aio

from flotilla.learner.v1 import group_service_pb2 as pb
from flotilla.learner.v1 import group_service_pb2_grpc
from flotilla_common.rpc import rpc

TIMES = 5


async def main() -> None:
    refused = 0
    for _ in range(TIMES):
        channel = rpc.channel("127.0.0.1:1", token="a-token-of-tests")
        stub: Any = group_service_pb2_grpc.GroupServiceStub(channel)
        with suppress(grpc.aio.AioRpcError):
            await stub.RenewLeases(pb.RenewLeasesRequest(), timeout=0.1)
        await channel.close()
        # gRPC frees it beside the loop.
        await asyncio.sleep(0.2)
        try:
            await stub.ReleaseLeases(pb.ReleaseLeasesRequest(), timeout=0.1)
        except grpc.aio.UsageError:
            refused += 1
    print(refused)


if __name__ == "__main__":
    asyncio.run(main())
