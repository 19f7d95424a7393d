"""The ground that verifiers try to break out of: where they run, what they are after, and what
shows that one got through."""

import asyncio
import importlib
import inspect
import json
import os
import random
import select
import shutil
import socket
import sqlite3
import tempfile
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from flotilla_env_gateway.ports import Execution, Rows, Verification
from flotilla_env_gateway.verify.verifier_pool import VerifierPool
from tests.support.repository import ROOT
from tests.support.waiting import until

Program = Callable[..., Any]
# Also distinguishes the processes of this test run from all others.
MEMORY = 2**28 + 4096 * random.randrange(2**15)
CANARY = f"canary-{uuid.uuid4().hex}"
VARIABLE = "FLOTILLA_CANARY"
LONG_S, SHORT_S = 40.0, 0.5
_AT_ONCE = 4
_NEXT = """
import builtins
def verify(env):
    assert not hasattr(builtins, "left_behind")
    return env.db().table("t").first()["a"]
"""
_ONE = """

def verify(env, final_answer):
    import builtins, json
    builtins.left_behind = True
    at = json.loads(final_answer)
    if {own_result}:
        return {name}(at)
    try:
        return 1 if {name}(at) else 0
    except Exception as error:
        print(repr(error))
        return 0
"""
_ALL = """

def verify(env, final_answer):
    at = json.loads(final_answer)
    through = []
    for name in {names}:
        try:
            if globals()[name](at):
                through.append(name)
        except BaseException as error:
            print(name, repr(error))
        # Descriptors left open would count against the next.
        gc.collect()
    print("got through:", *through)
    return len(through)

import gc, json
"""


def programs(module: ModuleType) -> list[Program]:
    """Every function of a module that takes only `at`."""
    found = [
        function
        for _, function in inspect.getmembers(module, inspect.isfunction)
        if list(inspect.signature(function).parameters) == ["at"]
    ]
    assert found
    return found


@dataclass
class Ground:
    """The things that the programs are after. `heard` shows whether one got through."""

    facts: dict[str, Any]
    pool: VerifierPool
    heard: Callable[[], bool]

    async def run(
        self, program: Program, *, timeout_s: float = LONG_S, own_result: bool = False
    ) -> Execution:
        """Run one program in a process of its own."""
        wrapper = _ONE.format(name=program.__name__, own_result=own_result)
        return await self._run(importlib.import_module(program.__module__), wrapper, timeout_s)

    async def run_together(self, module: ModuleType) -> Execution:
        """Run the programs of a module one after another in one process; the result is how many
        got through."""
        names = [program.__name__ for program in programs(module)]
        return await self._run(module, _ALL.format(names=names), LONG_S)

    async def unlike(
        self,
        tried: Sequence[Program],
        run: Callable[[Program], Awaitable[Execution]],
        as_it_should: Callable[[Execution], bool],
        *,
        followed: bool = False,
    ) -> dict[str, Execution]:
        """Run programs side by side, and return what did not end as it should by their names. With
        `followed`, a grade comes after each, which must be right."""
        places = asyncio.Semaphore(_AT_ONCE)

        async def one(program: Program) -> Execution:
            async with places:
                execution = await run(program)
                self._assert_nothing_revealed(execution)
                if followed:
                    await self.assert_usable()
                return execution

        executions = await asyncio.gather(*(one(program) for program in tried))
        names = [program.__name__ for program in tried]
        pairs = zip(names, executions, strict=True)
        return {name: execution for name, execution in pairs if not as_it_should(execution)}

    async def assert_unharmed(self, *executions: Execution) -> None:
        """Check that nothing has left a sandbox, none remains, and the next grade is right."""
        for execution in executions:
            self._assert_nothing_revealed(execution)
        assert not self.heard()
        assert os.listdir(self.facts["folder"]) == []
        await self.assert_usable()
        # Those that wait for the next verifiers, one of which is being started.
        await until(lambda: len(alive()) <= _AT_ONCE + 1)

    async def assert_usable(self) -> None:
        following = await self._execute(_NEXT, LONG_S, {})
        assert (following.result, following.error) == (7, None)

    def _assert_nothing_revealed(self, execution: Execution) -> None:
        output = f"{execution.result} {execution.stdout} {execution.error}"
        assert CANARY not in output
        assert "root:" not in output

    async def _run(self, module: ModuleType, wrapper: str, timeout_s: float) -> Execution:
        arguments: dict[str, str | None] = {"final_answer": json.dumps(self.facts)}
        return await self._execute(inspect.getsource(module) + wrapper, timeout_s, arguments)

    async def _execute(
        self, source: str, timeout_s: float, arguments: dict[str, str | None]
    ) -> Execution:
        verification = Verification(source, "verify", _query, _snapshot, arguments)
        return await self.pool.run_verifier(verification, timeout_s=timeout_s)


async def _query(db: str, sql: str, args: Any) -> Rows:
    raise AssertionError("a database that has a copy was queried")


async def _snapshot(db: str) -> bytes | None:
    database = sqlite3.connect(":memory:")
    database.executescript("CREATE TABLE t (a); INSERT INTO t VALUES (7);")
    try:
        return database.serialize()
    finally:
        database.close()


def alive() -> list[int]:
    """Processes of this test run inside a sandbox, recognised by their memory limit."""
    found: list[int] = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            words = (entry / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if str(MEMORY).encode() in words and words[0].rpartition(b"/")[2].startswith(b"python"):
            found.append(int(entry.name))
    return found


@contextmanager
def prepared() -> Generator[dict[str, Any]]:
    """Files to read and places to write that any user of this machine can use."""
    folder = Path(tempfile.mkdtemp(prefix="flotilla-escape-"))
    folder.chmod(0o755)
    target = folder / "target"
    target.mkdir(mode=0o777)
    target.chmod(0o777)
    (folder / "secret").write_text(CANARY)
    database = sqlite3.connect(folder / "database")
    database.executescript(f"CREATE TABLE secrets (a); INSERT INTO secrets VALUES ('{CANARY}');")
    database.close()
    try:
        yield {
            "folder": str(target),
            "mark": f"mark-{uuid.uuid4().hex}",
            "secret": str(folder / "secret"),
            "database": str(folder / "database"),
            "repository": str(ROOT),
            "gateway": os.getpid(),
            "variable": VARIABLE,
            # Not the canary itself: what is passed in may well be printed.
            "canary": VARIABLE,
            "unix": str(folder / "socket"),
            "abstract": f"flotilla-{uuid.uuid4().hex}",
        }
    finally:
        shutil.rmtree(folder)


@contextmanager
def listening(facts: dict[str, Any]) -> Generator[list[socket.socket]]:
    """Listens wherever a program may call, and adds the ports to `facts`."""
    with ExitStack() as stack:
        places = {
            "tcp": (socket.AF_INET, socket.SOCK_STREAM, ("127.0.0.1", 0)),
            "udp": (socket.AF_INET, socket.SOCK_DGRAM, ("127.0.0.1", 0)),
            "unix": (socket.AF_UNIX, socket.SOCK_STREAM, facts["unix"]),
            "abstract": (socket.AF_UNIX, socket.SOCK_STREAM, "\0" + facts["abstract"]),
        }
        sockets: list[socket.socket] = []
        for name, (family, kind, address) in places.items():
            one = stack.enter_context(socket.socket(family, kind))
            one.bind(address)
            if kind == socket.SOCK_STREAM:
                one.listen()
            if family == socket.AF_INET:
                facts[name] = one.getsockname()[1]
            sockets.append(one)
        yield sockets


@asynccontextmanager
async def opened() -> AsyncGenerator[Ground]:
    with ExitStack() as stack:
        stack.enter_context(pytest.MonkeyPatch.context()).setenv(VARIABLE, CANARY)
        facts = stack.enter_context(prepared())
        sockets = stack.enter_context(listening(facts))
        pool = VerifierPool(size=_AT_ONCE, memory_bytes=MEMORY, cpu_s=5.0)
        yield Ground(facts, pool, lambda: bool(select.select(sockets, [], [], 0)[0]))
        await pool.close()
    assert not alive(), "a process outlived its verifier"
