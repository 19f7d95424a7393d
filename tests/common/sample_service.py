"""A service as small as one can be, started as a process by the tests of the entry point."""

import asyncio
import os

from services.common import rpc
from services.common.config import Model
from services.common.main import Runtime, entry
from tests.common.registry import contract


class SampleConfig(Model):
    mode: str = "serve"
    count: int = 1


async def run(runtime: Runtime[SampleConfig]) -> None:
    if runtime.config.mode == "fail":
        raise ValueError(f"broken {os.environ['FLOTILLA_TOKEN']}")
    if runtime.config.mode == "away":
        raise ConnectionError("the peer is away")
    async with runtime.serving(rpc.server(token=runtime.token)) as serving:
        serving.set_serving(True)
        runtime.set_status(phase="serving", serving=True, step=runtime.config.count)
        await runtime.announce(serving.address)
        runtime.log.info("ready", address=serving.address, model=runtime.shared.policy.model)
        await runtime.drain.wait()
        if runtime.config.mode == "stubborn":
            await asyncio.sleep(3600)
    runtime.log.info("drained")


if __name__ == "__main__":
    entry("rollout", SampleConfig, lambda: run, doc="A sample.", registry=contract)
