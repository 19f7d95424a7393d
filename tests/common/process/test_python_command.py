"""Starting other processes from one that speaks gRPC."""

import asyncio
import os
import signal
import sys
from contextlib import suppress

import grpc.aio

from flotilla_common.process.python_command import tied_command
from tests.support.repository import ROOT
from tests.support.started_process import start_beside
from tests.support.waiting import until


async def test_children_start_whole_beside_the_threads_of_grpc() -> None:
    server = grpc.aio.server()
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        calling = asyncio.create_task(_call_for_ever(channel))
        codes = [await _code(*tied_command(signal.SIGTERM, "true")) for _ in range(20)]
        calling.cancel()
    await server.stop(None)
    assert set(codes) == {0}


async def _call_for_ever(channel: grpc.aio.Channel) -> None:
    call = channel.unary_unary("/no/such")
    while True:
        with suppress(grpc.aio.AioRpcError):
            await call(b"", timeout=1)


async def _code(*command: str) -> int:
    return await (await asyncio.create_subprocess_exec(*command)).wait()


async def test_a_tied_child_hears_of_the_death_of_its_parent() -> None:
    child = "import os, signal, sys; print(os.getpid(), flush=True); signal.pause()"
    parent = (
        "import signal, subprocess, sys\n"
        "from flotilla_common.process.python_command import tied_command\n"
        f"subprocess.run(tied_command(signal.SIGTERM, sys.executable, '-c', {child!r}))"
    )
    process, pid = await start_beside((sys.executable, "-c", parent), cwd=ROOT)
    process.kill()
    await process.wait()
    await until(lambda: not _runs(int(pid)))


def _runs(pid: int) -> bool:
    with suppress(ProcessLookupError):
        os.kill(pid, 0)
        return True
    return False


async def test_python_is_the_interpreter_that_runs_us_with_its_packages() -> None:
    program = "import sys; print(sys.executable, sys.prefix)"
    process = await asyncio.create_subprocess_exec(
        *tied_command(signal.SIGKILL, "python", "-c", program),
        env={"PATH": os.defpath},
        stdout=asyncio.subprocess.PIPE,
    )
    output, _ = await process.communicate()
    assert output.decode().split() == [sys.executable, sys.prefix]


def test_nothing_of_ours_forks_with_code_between_fork_and_exec() -> None:
    ours = (ROOT / "services").rglob("*.py")
    programs = [path for path in ours if path.stem != "python_command"]
    assert [path for path in programs if "preexec_fn" in path.read_text()] == []
