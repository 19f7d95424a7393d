"""An instance that joins those of several MCP servers."""

import asyncio
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from flotilla_common.aio.concurrency import raise_failure
from flotilla_env_gateway.adapters.mcp.backend import FleetWireInstance
from flotilla_env_gateway.ports import (
    BackendError,
    CallResult,
    Instance,
    ProvisionRequest,
    QueryError,
    Rows,
    SqlValue,
    Tool,
)


def join_instances(request: ProvisionRequest, parts: Mapping[str, Instance]) -> Instance:
    """Return the only instance, or one that joins them. `parts` are by the name of their server."""
    if len(parts) == 1:
        return next(iter(parts.values()))
    return JoinedInstance(request, parts)


class JoinedInstance(Instance):
    """The tools of several servers. One whose name others have too is offered as SERVER_tool."""

    def __init__(self, request: ProvisionRequest, parts: Mapping[str, Instance]) -> None:
        self.instance_id = f"joined-{request.episode_id}"
        self.env_version = request.task.env_version
        self._parts = parts
        self._databases = [part for part in parts.values() if isinstance(part, FleetWireInstance)]
        self.data_version = self._databases[0].data_version if len(self._databases) == 1 else ""
        # Offered tools: the name of their server, and their own. A tool keeps its first name.
        self._tools: dict[str, tuple[str, str]] = {}

    async def list_tools(self, *, timeout_s: float) -> Sequence[Tool]:
        async def list_one(server: str, part: Instance) -> Sequence[Tool]:
            with naming_server(server):
                if tools := await part.list_tools(timeout_s=timeout_s):
                    return tools
                # The others' tools are not all that the task needs.
                raise BackendError("no_tools", "it lists no tools yet", delivered=False)

        lists = await asyncio.gather(*(list_one(*each) for each in self._parts.items()))
        kept = {place: offered for offered, place in self._tools.items()}
        tools: list[Tool] = []
        for offered, server, tool in _name_tools(dict(zip(self._parts, lists, strict=True))):
            place = server, tool.name
            name = kept.get(place, offered)
            self._tools.setdefault(name, place)
            tools.append(replace(tool, name=name))
        return tools

    def watch_tools(self, changed: Callable[[], None]) -> None:
        for part in self._parts.values():
            part.watch_tools(changed)

    async def call_tool(
        self, name: str, arguments: Mapping[str, Any], *, timeout_s: float
    ) -> CallResult:
        server, own_name = self._tools[name]
        with naming_server(server):
            return await self._parts[server].call_tool(own_name, arguments, timeout_s=timeout_s)

    async def query_database(
        self, db: str, sql: str, args: Sequence[SqlValue], *, timeout_s: float
    ) -> Rows:
        return await self._get_database().query_database(db, sql, args, timeout_s=timeout_s)

    async def snapshot_database(self, db: str, *, timeout_s: float) -> bytes | None:
        return await self._get_database().snapshot_database(db, timeout_s=timeout_s)

    def _get_database(self) -> Instance:
        if len(self._databases) != 1:
            count = "several" if self._databases else "none"
            raise QueryError(f"{count} of the servers {', '.join(self._parts)} shows a database")
        return self._databases[0]

    async def is_alive(self, *, timeout_s: float) -> bool:
        async def check_one(server: str, part: Instance) -> bool:
            with naming_server(server):
                return await part.is_alive(timeout_s=timeout_s)

        return all(await asyncio.gather(*(check_one(*each) for each in self._parts.items())))

    @property
    def end_reason(self) -> str | None:
        for server, part in self._parts.items():
            if reason := part.end_reason:
                return f"server {server}: {reason}"
        return None

    async def close(self, *, timeout_s: float) -> None:
        closes = [
            asyncio.create_task(part.close(timeout_s=timeout_s)) for part in self._parts.values()
        ]
        await asyncio.wait(closes)
        raise_failure(closes)


@contextmanager
def naming_server(server: str) -> Generator[None]:
    """Name the server in a failure."""
    try:
        yield
    except BackendError as error:
        error.args = (f"server {server}: {error}",)
        raise


def _name_tools(lists: Mapping[str, Sequence[Tool]]) -> Iterator[tuple[str, str, Tool]]:
    """Yield the name under which each tool is offered, its server, and the tool."""
    counts = Counter(tool.name for tools in lists.values() for tool in tools)
    # Names that are not made here stay as they are.
    taken = {name for name, count in counts.items() if count == 1}
    for server, tools in lists.items():
        for tool in tools:
            offered = tool.name
            if counts[tool.name] > 1:
                offered = f"{server}_{offered}"
                while offered in taken:
                    offered = f"{server}_{offered}"
                taken.add(offered)
            yield offered, server, tool
