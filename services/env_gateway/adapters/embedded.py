"""The environments of this repository, in the gateway's own process."""

import json
import sqlite3
from collections.abc import Mapping, Sequence
from typing import Any

from environments import api
from services.env_gateway.ports import (
    BackendError,
    CallResult,
    Execution,
    Orphan,
    Part,
    Provision,
    QueryError,
    Rows,
    SqlValue,
    Submission,
    Text,
    Tool,
)


class EmbeddedInstance:
    """Calls run on the event loop: each is a few SQLite statements in memory, well under 1 ms."""

    env_version = "v1"

    def __init__(self, instance_id: str, data_version: str, instance: api.Instance) -> None:
        self.instance_id = instance_id
        self.data_version = data_version
        self._instance = instance

    async def list_tools(self, *, timeout_s: float) -> Sequence[Tool]:
        return [
            Tool(
                spec.name,
                spec.description,
                json.dumps(spec.parameters),
                read_only=spec.read_only,
                idempotent=spec.idempotent,
            )
            for spec in self._instance.tools()
        ]

    async def call(
        self, name: str, arguments: Mapping[str, Any], *, timeout_s: float
    ) -> CallResult:
        try:
            value = self._instance.call(name, dict(arguments))
        except api.ToolError as error:
            return CallResult((Text(str(error)),), is_error=True)
        return CallResult((Text(json.dumps(value)),))

    async def query(self, db: str, sql: str, args: Sequence[SqlValue], *, timeout_s: float) -> Rows:
        try:
            rows = self._instance.query(_database(db), sql, args)
        except sqlite3.Error as error:
            raise QueryError(str(error)) from error
        return Rows(tuple(rows.columns), rows.rows)

    async def snapshot(self, db: str, *, timeout_s: float) -> bytes | None:
        return self._instance.snapshot(_database(db))

    async def observe(self, *, timeout_s: float) -> Sequence[Part]:
        return ()

    async def grade(self, submission: Submission, *, timeout_s: float) -> Execution | None:
        return None

    async def close(self, *, timeout_s: float) -> None:
        self._instance.close()


class EmbeddedBackend:
    """Instances end with the process, so that a restart finds none to reclaim."""

    def serves(self, env_key: str) -> bool:
        return env_key in api.ENV_KEYS

    async def provision(self, request: Provision, *, timeout_s: float) -> EmbeddedInstance:
        task = request.task
        data_version = task.data_version or "v1"
        try:
            instance = api.open_instance(task.env_key, task.data_key, data_version)
        except ValueError as error:
            raise BackendError("bad_task", str(error), delivered=False, invalid=True) from error
        return EmbeddedInstance(f"embedded-{request.episode_id}", data_version, instance)

    async def reclaim(self, orphan: Orphan, *, timeout_s: float) -> None:
        """An instance of a process that has ended has ended too."""

    async def close(self) -> None:
        """Instances hold nothing but memory."""


def _database(name: str) -> api.DatabaseName:
    if name == "seed":
        return "seed"
    if name == "current":
        return "current"
    raise QueryError(f"no database {name!r}: use 'seed' or 'current'")
