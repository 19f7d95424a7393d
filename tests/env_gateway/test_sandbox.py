"""Verifiers that try to break out: each leaves no trace, and the next one runs as if it had not
been."""

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
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import pytest_asyncio

from services.env_gateway.grading import judge
from services.env_gateway.ports import Execution, Rows, Verification
from services.env_gateway.verify.pool import VerifierPool
from tests.env_gateway.escapes import acting, exhausting, forgery, reading, results, talking
from tests.env_gateway.sandboxed import needs_sandbox

pytestmark = [pytest.mark.asyncio(loop_scope="module"), needs_sandbox]
# Also tells the processes of this test run from all others.
MEMORY = 2**28 + 4096 * random.randrange(2**15)
CANARY = f"canary-{uuid.uuid4().hex}"
VARIABLE = "FLOTILLA_CANARY"
# Programs that end only with their process get so long.
_LONG_S, _SHORT_S = 20.0, 0.5
_ENDLESS = {
    exhausting.fork_bomb_that_never_gives_up,
    exhausting.spin,
    exhausting.sleep,
    exhausting.swallow_everything,
    exhausting.ignore_signals,
    exhausting.print_for_ever,
    exhausting.huge_number,
    exhausting.regular_expression,
    exhausting.endless_iterator,
    exhausting.timers,
    talking.questions_without_reading_answers,
}
_NEXT = """
import builtins
def verify(env):
    assert not hasattr(builtins, "left_behind")
    return env.db().table("t").first()["a"]
"""
_WRAPPED = """

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


def programs(module: ModuleType) -> list[Any]:
    """Every function of a module that takes only `at`."""
    found = [
        pytest.param(function, id=f"{module.__name__.rpartition('.')[2]}-{name}")
        for name, function in inspect.getmembers(module, inspect.isfunction)
        if list(inspect.signature(function).parameters) == ["at"]
    ]
    assert found
    return found


@dataclass
class Ground:
    """What the programs are after. `heard` tells whether one got through."""

    facts: dict[str, Any]
    pool: VerifierPool
    heard: Callable[[], bool]

    async def run(self, program: Callable[..., Any], *, own_result: bool = False) -> Execution:
        module = importlib.import_module(program.__module__)
        wrapper = _WRAPPED.format(name=program.__name__, own_result=own_result)
        timeout_s = _SHORT_S if program in _ENDLESS else _LONG_S
        arguments: dict[str, str | None] = {"final_answer": json.dumps(self.facts)}
        return await self._execute(inspect.getsource(module) + wrapper, timeout_s, arguments)

    async def assert_unharmed(self, execution: Execution) -> None:
        told = f"{execution.result} {execution.stdout} {execution.error}"
        assert CANARY not in told
        assert "root:" not in told
        assert not self.heard()
        assert os.listdir(self.facts["folder"]) == []
        # One that waits for the next verifier, and one that is being started.
        assert len(alive()) <= 2

    async def assert_usable(self) -> None:
        following = await self._execute(_NEXT, _LONG_S, {})
        assert (following.result, following.error) == (7, None)

    async def _execute(
        self, source: str, timeout_s: float, arguments: dict[str, str | None]
    ) -> Execution:
        verification = Verification(source, "verify", _query, _snapshot, arguments)
        return await self.pool.execute(verification, timeout_s=timeout_s)


async def _query(db: str, sql: str, args: Any) -> Rows:
    raise AssertionError("a database of which there is a copy was asked")


async def _snapshot(db: str) -> bytes | None:
    database = sqlite3.connect(":memory:")
    database.executescript("CREATE TABLE t (a); INSERT INTO t VALUES (7);")
    try:
        return database.serialize()
    finally:
        database.close()


def alive() -> list[int]:
    """Processes of this test run inside a sandbox, told by their limit of memory."""
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
    """Things to read and places to write that any user of this machine could."""
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
            "repository": str(Path(__file__).parents[2]),
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


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def ground() -> AsyncGenerator[Ground]:
    with ExitStack() as stack:
        stack.enter_context(pytest.MonkeyPatch.context()).setenv(VARIABLE, CANARY)
        facts = stack.enter_context(prepared())
        sockets = stack.enter_context(listening(facts))
        pool = VerifierPool(size=1, memory_bytes=MEMORY, cpu_s=5.0)
        yield Ground(facts, pool, lambda: bool(select.select(sockets, [], [], 0)[0]))
        await pool.close()
    assert not alive(), "a process outlived its verifier"


@pytest.mark.parametrize("program", [*programs(reading), *programs(acting)])
async def test_a_verifier_reaches_nothing_but_its_databases(ground: Ground, program: Any) -> None:
    execution = await ground.run(program)
    assert execution.result in (None, 0), execution
    await ground.assert_unharmed(execution)


@pytest.mark.parametrize("program", programs(exhausting))
async def test_a_verifier_uses_up_no_more_than_its_own_process(
    ground: Ground, program: Any
) -> None:
    execution = await ground.run(program)
    assert execution.result in (None, 0), execution
    assert execution.timed_out == (program in _ENDLESS), execution
    await ground.assert_unharmed(execution)
    await ground.assert_usable()


@pytest.mark.parametrize("program", programs(talking))
async def test_a_verifier_that_speaks_to_the_gateway_gets_no_grade(
    ground: Ground, program: Any
) -> None:
    execution = await ground.run(program)
    assert not judge(execution, attempts=1).known, execution
    await ground.assert_unharmed(execution)
    await ground.assert_usable()


@pytest.mark.parametrize("program", programs(results))
async def test_what_is_no_number_is_no_grade(ground: Ground, program: Any) -> None:
    execution = await ground.run(program, own_result=True)
    assert not judge(execution, attempts=1).known, execution
    await ground.assert_unharmed(execution)


async def test_a_forged_result_counts_once_and_as_much_as_a_returned_one(ground: Ground) -> None:
    execution = await ground.run(forgery.result_twice)
    assert (execution.result, execution.error) == (1, None)
    await ground.assert_unharmed(execution)
    await ground.assert_usable()
