"""A service as small as one can be, started as a process by the tests of the entry point."""

import asyncio
import atexit
import os
import threading
import time

from flotilla_common.process.run_membership import ReplicaStatus
from flotilla_common.process.service_main import Runtime, run_service_process
from flotilla_common.rpc import rpc
from flotilla_common.spec.config import ConfigModel
from flotilla_common.wire.registry import load_registry


class SampleConfig(ConfigModel):
    mode: str = "serve"
    count: int = 1


async def run(runtime: Runtime[SampleConfig]) -> None:
    if runtime.config.mode == "fail":
        raise ValueError(f"broken {runtime.token}")
    if runtime.config.mode == "crash":
        (runtime.run_dir / "journal").touch()
        (runtime.run_dir / "environment").write_text(repr(dict(os.environ)))
        os.chdir(runtime.run_dir)
        os.abort()
    if runtime.config.mode == "away":
        raise ConnectionError("the peer is away")
    if runtime.config.mode == "clings":
        # Like some libraries: a thread that never ends, and an exit handler that waits.
        threading.Thread(target=time.sleep, args=(3600,)).start()
        atexit.register(time.sleep, 3600)
    if runtime.config.mode == "loads":
        with runtime.loading():
            runtime.log.info("loading")
            try:
                await asyncio.sleep(3600)
            finally:
                runtime.log.info("cleaned up")
    if runtime.config.mode == "imports":
        with runtime.loading():
            runtime.log.info("loading")
            time.sleep(3600)  # noqa: ASYNC251 (it blocks the loop, as imports do)
    async with runtime.serving(rpc.server(token=runtime.token)) as serving:
        serving.set_serving(True)
        runtime.report_status(
            lambda: ReplicaStatus("serving", serving=True, step=runtime.config.count)
        )
        await runtime.announce(serving.address)
        runtime.log.info("ready", address=serving.address, model=runtime.shared.policy.model)
        await runtime.drain.wait()
        if runtime.config.mode == "stubborn":
            await asyncio.sleep(3600)
    runtime.log.info("drained")


if __name__ == "__main__":
    run_service_process(
        "rollout", SampleConfig, lambda: run, doc="A sample.", registry=load_registry
    )
