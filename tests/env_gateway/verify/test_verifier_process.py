"""Starts of verifiers' processes: ahead, in a sandbox or not at all, and never orphaned."""

import asyncio
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flotilla_env_gateway.ports import Rows, Verification
from flotilla_env_gateway.verify import sandbox, seccomp
from flotilla_env_gateway.verify.protocol import ProtocolError, parse_message
from flotilla_env_gateway.verify.sandbox import Sandbox
from flotilla_env_gateway.verify.verifier_pool import SpareProcesses, VerifierPool
from flotilla_env_gateway.verify.verifier_process import ProcessCommand, StartError, VerifierProcess
from tests.env_gateway.verify.sandboxed import needs_sandbox
from tests.support.repository import ROOT
from tests.support.started_process import start_beside
from tests.support.waiting import until

SOURCE = "import os\ndef verify(env):\n    print(os.listdir('/'))\n    return 1\n"


async def _query(db: str, sql: str, args: object) -> Rows:
    raise AssertionError("nothing is queried here")


async def _snapshot(db: str) -> bytes | None:
    return None


UNTRUSTED = Verification(SOURCE, "verify", _query, _snapshot, {})


def fake_bubblewrap(folder: Path, script: str) -> None:
    path = folder / "bwrap"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


async def test_without_bubblewrap_a_verifier_is_refused_and_both_fixes_are_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PATH", "")
    pool = VerifierPool(size=1, memory_bytes=2**28)
    execution = await pool.run_verifier(UNTRUSTED, timeout_s=5.0)
    await pool.close()
    assert execution.error is not None and not execution.retryable
    assert "apt-get install bubblewrap" in execution.error
    assert "env_gateway.verifiers.unsafe_local_verifiers = true" in execution.error


async def test_bubblewraps_message_on_a_kernel_that_forbids_it_is_passed_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fake_bubblewrap(tmp_path, "echo 'bwrap: No permissions to create new namespace' >&2; exit 1")
    monkeypatch.setenv("PATH", str(tmp_path))
    pool = VerifierPool(size=1, memory_bytes=2**28)
    execution = await pool.run_verifier(UNTRUSTED, timeout_s=5.0)
    await pool.close()
    assert "bwrap: No permissions to create new namespace" in (execution.error or "")


@pytest.mark.parametrize("installed", [True, False])
async def test_unsafe_verifiers_run_where_there_can_be_no_sandbox(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, installed: bool
) -> None:
    if installed:
        fake_bubblewrap(tmp_path, "exit 1")
    monkeypatch.setenv("PATH", str(tmp_path))
    pool = VerifierPool(size=1, memory_bytes=2**28, unsafe=True)
    execution = await pool.run_verifier(UNTRUSTED, timeout_s=5.0)
    await pool.close()
    assert execution.result == 1
    assert "etc" in execution.stdout


@needs_sandbox
async def test_where_there_can_be_a_sandbox_unsafe_verifiers_run_in_it_all_the_same() -> None:
    pool = VerifierPool(size=1, memory_bytes=2**28, unsafe=True)
    execution = await pool.run_verifier(UNTRUSTED, timeout_s=20.0)
    await pool.close()
    assert execution.result == 1
    assert "work" not in execution.stdout and "home" not in execution.stdout


@needs_sandbox
async def test_verifiers_that_run_at_once_have_a_process_each_and_leave_none() -> None:
    memory = 2**28 + (os.getpid() + 1) * 4096
    source = "import builtins\ndef verify(env):\n    builtins.n = getattr(builtins, 'n', 0) + 1\n"
    source += "    return builtins.n\n"
    pool = VerifierPool(size=4, memory_bytes=memory)
    verification = Verification(source, "verify", _query, _snapshot, {})
    executions = await asyncio.gather(
        *(pool.run_verifier(verification, timeout_s=20.0) for _ in range(24))
    )
    await pool.close()
    assert [execution.result for execution in executions] == [1] * 24
    assert not list(with_argument(str(memory)))


def test_settings_that_forbid_sandboxes_are_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def setting(name: str) -> str:
        return "0" if name == "user.max_user_namespaces" else ""

    monkeypatch.setattr(sandbox, "_read_setting", setting)
    assert "user.max_user_namespaces is 0" in sandbox.kernel_settings_hint()


def plain() -> ProcessCommand:
    return sandbox.plain_command(2**28)


async def test_processes_are_started_ahead_and_each_is_handed_out_once() -> None:
    started: list[VerifierProcess] = []

    async def start() -> VerifierProcess:
        started.append(await VerifierProcess.start_process(plain()))
        return started[-1]

    spares = SpareProcesses(start, 1)
    taken = [await spares.take_process() for _ in range(3)]
    assert len({id(worker) for worker in taken}) == 3
    for worker in taken:
        await worker.kill()
    await spares.close()
    assert len(started) == 4
    assert not any(worker.is_alive for worker in started)


async def test_a_process_that_died_while_it_waited_is_not_handed_out() -> None:
    started: list[VerifierProcess] = []

    async def start() -> VerifierProcess:
        started.append(await VerifierProcess.start_process(plain()))
        return started[-1]

    spares = SpareProcesses(start, 1)
    first = await spares.take_process()
    await until(lambda: len(started) == 2)
    await started[1].kill()
    second = await spares.take_process()
    assert second.is_alive
    for worker in (first, second):
        await worker.kill()
    await spares.close()


async def test_who_gives_up_waiting_leaves_the_process_to_the_next() -> None:
    gate = asyncio.Event()
    starts = 0

    async def start() -> VerifierProcess:
        nonlocal starts
        starts += 1
        await gate.wait()
        return await VerifierProcess.start_process(plain())

    spares = SpareProcesses(start, 0)
    waiting = asyncio.create_task(spares.take_process())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    gate.set()
    worker = await spares.take_process()
    assert starts == 1
    await worker.kill()


async def test_a_start_that_failed_ahead_is_tried_again_when_needed() -> None:
    failures = iter([False, True, False])

    async def start() -> VerifierProcess:
        if next(failures, False):
            raise StartError("no")
        return await VerifierProcess.start_process(plain())

    spares = SpareProcesses(start, 1)
    workers = [await spares.take_process(), await spares.take_process()]
    for worker in workers:
        await worker.kill()
    await spares.close()


async def test_a_program_that_is_no_worker_is_a_precise_error() -> None:
    with pytest.raises(StartError, match="cannot be started"):
        await VerifierProcess.start_process(ProcessCommand(("/nowhere/python",)))
    with pytest.raises(StartError, match="broken"):
        await VerifierProcess.start_process(ProcessCommand(("/bin/sh", "-c", "echo broken >&2")))
    with pytest.raises(StartError, match="something else than JSON"):
        await VerifierProcess.start_process(ProcessCommand(("/bin/echo", "hello")))


GATEWAY = """
import asyncio
from flotilla_env_gateway.ports import Verification
from flotilla_env_gateway.verify.verifier_pool import VerifierPool

async def snapshot(db):
    print("running", flush=True)
    await asyncio.sleep(600)

async def main():
    source = "def verify(env):\\n    env.db().tables()\\n"
    pool = VerifierPool(size=1, memory_bytes={memory})
    await pool.run_verifier(Verification(source, "verify", None, snapshot, {{}}), timeout_s=600)

asyncio.run(main())
"""


@needs_sandbox
async def test_no_sandbox_outlives_a_gateway_that_is_killed() -> None:
    memory = 2**28 + os.getpid() * 4096
    command = (sys.executable, "-c", GATEWAY.format(memory=memory))
    gateway, line = await start_beside(command, cwd=ROOT)
    assert line == "running\n"
    assert list(with_argument(str(memory)))
    gateway.send_signal(signal.SIGKILL)
    await gateway.wait()
    await until(lambda: not list(with_argument(str(memory))))


def with_argument(word: str) -> Iterator[int]:
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if word.encode() in (entry / "cmdline").read_bytes().split(b"\0"):
                yield int(entry.name)
        except OSError:
            continue


@given(st.binary() | st.text().map(str.encode))
def test_any_line_is_a_message_or_an_error(line: bytes) -> None:
    try:
        parse_message(line)
    except ProtocolError as error:
        assert str(error)


def test_on_a_machine_without_a_filter_there_is_no_sandbox(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("platform.machine", lambda: "pdp11")
    assert seccomp.build_program() is None
    with pytest.raises(StartError, match="no filter of system calls for pdp11"):
        Sandbox("bwrap", memory_bytes=2**28, cpu_s=1).make_command()
