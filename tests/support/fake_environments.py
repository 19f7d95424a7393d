"""Environments and verifiers for tests: scripted, in memory, and able to fail on demand."""

import asyncio
import sqlite3
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from flotilla_env_gateway.grading.world_search import SEARCH
from flotilla_env_gateway.ports import (
    Backend,
    BackendError,
    CallResult,
    Execution,
    Instance,
    Orphan,
    Part,
    ProvisionRequest,
    Rows,
    SqlValue,
    Submission,
    Text,
    Tool,
    Verification,
)

TOOLS = (
    Tool("look", "Reads the counter.", '{"type": "object"}', read_only=True),
    Tool("add", "Adds to the counter.", '{"type": "object"}'),
)

Hook = Callable[[str, Mapping[str, Any]], Awaitable[CallResult | None]]


class FakeInstance(Instance):
    """A counter in SQLite with two tools: `look` is read-only, `add` is not."""

    env_version = "v1"
    data_version = "v1"

    def __init__(self, backend: "ScriptedBackend", instance_id: str) -> None:
        self.instance_id = instance_id
        self.executed: Counter[str] = Counter()
        # Called to announce other tools.
        self.announce: Callable[[], None] = lambda: None
        self._backend = backend
        self._dbs = {name: sqlite3.connect(":memory:") for name in ("seed", "current")}
        for db in self._dbs.values():
            db.executescript("CREATE TABLE counter (id INTEGER PRIMARY KEY, value INT);")
            db.execute("INSERT INTO counter VALUES (1, 0)")

    async def list_tools(self, *, timeout_s: float) -> Sequence[Tool]:
        await self._backend.enter_step("list_tools")
        return self._backend.tools

    def watch_tools(self, changed: Callable[[], None]) -> None:
        self.announce = changed

    async def get_first_observation(self, *, timeout_s: float) -> Sequence[Part]:
        await self._backend.enter_step("observe")
        return self._backend.first_observation

    async def grade_submission(
        self, submission: Submission, *, timeout_s: float
    ) -> Execution | None:
        await self._backend.enter_step("grade")
        return self._backend.own_grade

    async def call_tool(
        self, name: str, arguments: Mapping[str, Any], *, timeout_s: float
    ) -> CallResult:
        self._backend.in_flight += 1
        self._backend.max_in_flight = max(self._backend.max_in_flight, self._backend.in_flight)
        try:
            async with asyncio.timeout(timeout_s):
                await self._backend.enter_step("call")
                self.executed[name] += 1
                if self._backend.hook and (result := await self._backend.hook(name, arguments)):
                    return result
        except TimeoutError:
            raise BackendError("timeout", f"{timeout_s:.1f} s", delivered=None) from None
        finally:
            self._backend.in_flight -= 1
        if name == "add":
            by = arguments.get("by", 1)
            self._dbs["current"].execute("UPDATE counter SET value = value + ?", (by,))
        value = self._dbs["current"].execute("SELECT value FROM counter").fetchone()[0]
        return CallResult((Text(str(value)),))

    @property
    def world(self) -> sqlite3.Connection:
        return self._dbs["current"]

    async def query_database(
        self, db: str, sql: str, args: Sequence[SqlValue], *, timeout_s: float
    ) -> Rows:
        cursor = self._dbs[db].execute(sql, tuple(args))
        return Rows(tuple(c[0] for c in cursor.description), cursor.fetchall())

    async def snapshot_database(self, db: str, *, timeout_s: float) -> bytes | None:
        return self._dbs[db].serialize() if self._backend.snapshots else None

    async def is_alive(self, *, timeout_s: float) -> bool:
        await self._backend.enter_step("alive")
        return self.instance_id in self._backend.running

    async def close(self, *, timeout_s: float) -> None:
        await self._backend.enter_step("close")
        self._backend.running.pop(self.instance_id, None)


class ScriptedBackend(Backend):
    """A backend whose steps can be made to fail or to wait. The steps provision, list_tools, call,
    alive and close sleep `delays[step]`, then raise `failures[step]` in turn; `hook` may answer a
    call instead of the tool."""

    def __init__(self) -> None:
        self.running: dict[str, FakeInstance] = {}
        self.failures: dict[str, deque[Exception]] = {}
        self.delays: dict[str, float] = {}
        self.steps: Counter[str] = Counter()
        self.hook: Hook | None = None
        self.tools: Sequence[Tool] = TOOLS
        self.snapshots = True
        self.first_observation: Sequence[Part] = ()
        self.own_grade: Execution | None = None
        self.in_flight = 0
        self.max_in_flight = 0

    def serves_environment(self, env_key: str) -> bool:
        return env_key.startswith("fake")

    def fail_at(self, step: str, *errors: Exception) -> None:
        self.failures.setdefault(step, deque()).extend(errors)

    async def enter_step(self, name: str) -> None:
        self.steps[name] += 1
        await asyncio.sleep(self.delays.get(name, 0))
        if self.failures.get(name):
            raise self.failures[name].popleft()

    async def provision_instance(
        self, request: ProvisionRequest, *, timeout_s: float
    ) -> FakeInstance:
        await self.enter_step("provision")
        instance = FakeInstance(self, f"instance-of-{request.episode_id}")
        return self.running.setdefault(instance.instance_id, instance)

    async def reclaim_orphan(self, orphan: Orphan, *, timeout_s: float) -> None:
        await self.enter_step("close")
        self.running.pop(orphan.instance_id or f"instance-of-{orphan.episode_id}", None)

    async def close(self) -> None:
        self.running.clear()


class FakeGrader:
    """A grader that returns `executions` in turn, then executions with reward 1. Its searches of
    the world return `found`."""

    def __init__(self) -> None:
        self.executions: deque[Execution] = deque()
        self.seen: list[Verification] = []
        self.searches: list[Verification] = []
        self.found = 0
        self.delay_s = 0.0

    async def run_verifier(self, verification: Verification, *, timeout_s: float) -> Execution:
        if verification.function == SEARCH:
            self.searches.append(verification)
            return Execution(result=self.found)
        self.seen.append(verification)
        await asyncio.sleep(self.delay_s)
        return self.executions.popleft() if self.executions else Execution(result=1)
