"""Fleet's instance wire: what an instance is made from, and how its databases are read."""

import json
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast
from urllib.parse import quote

from services.common.parsing import parse_json
from services.env_gateway.adapters import database_dump as dump
from services.env_gateway.adapters.http_client import ANSWERS
from services.env_gateway.ports import BackendError, Provision, QueryError, Rows, SqlValue
from services.env_gateway.tasks import Task

INSTANCES = "/v1/env/instances"
_SEEDS_KEPT = 128

Ask = Callable[[str, str], Awaitable[Rows]]


def instance_path(instance_id: str) -> str:
    return f"{INSTANCES}/{quote(instance_id, safe='')}"


def run_query(run_id: str) -> str:
    return f"run_id={quote(run_id, safe='')}"


def creation(request: Provision) -> dict[str, Any]:
    """The body of POST /v1/env/instances; what is not known is left out."""
    task = request.task
    data_key, data_version = _data(task)
    wanted = {
        "env_key": task.env_key,
        "env_version": _version(task.env_version),
        "data_key": data_key,
        "data_version": data_version,
        "env_variables": task.raw_variables,
        "ttl_seconds": int(request.ttl_s) + 1,
        "run_id": request.episode_id,
        "created_from": "sdk",
    }
    return {name: value for name, value in wanted.items() if value}


def duplicate_of(body: str) -> str | None:
    """The instance that an earlier attempt of the same request has created, from a 409's body."""
    try:
        return str(parse_json(body, ANSWERS)["detail"]["instance_id"])
    except (ValueError, KeyError, TypeError):
        return None


def query_url(runner_url: str, db: str) -> str:
    return f"{runner_url}/resources/sqlite/{quote(db, safe='')}/query"


def query_body(sql: str, args: "list[SqlValue]") -> dict[str, Any]:
    return {"query": sql, "args": args, "read_only": True}


def rows_of(answer: Any) -> Rows:
    """Raises QueryError when the statement is at fault."""
    if not isinstance(answer, dict):
        raise BackendError("protocol", "a query was answered by no object", delivered=None)
    fields = cast("dict[str, Any]", answer)
    if not fields.get("success"):
        raise QueryError(str(fields.get("error") or fields.get("message")))
    columns, rows = fields.get("columns") or [], fields.get("rows") or []
    if not isinstance(columns, list) or not _are_rows(rows):
        raise BackendError("protocol", "a query was answered by no rows", delivered=None)
    return Rows(tuple(cast("list[str]", columns)), rows)


def _are_rows(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(row, list) for row in cast("list[object]", value)
    )


@dataclass(frozen=True, slots=True)
class State:
    """Which data an instance started from; `seed` is equal for equal seed databases."""

    env: tuple[str, str]
    data_version: str
    seed: tuple[str, ...]


def state_of(body: Mapping[str, Any], task: Task) -> State:
    env = (task.env_key, body.get("version") or task.env_version)
    data_version = body.get("data_version") or task.data_version
    variables = json.dumps(task.raw_variables, sort_keys=True)
    return State(env, data_version, (*env, task.data_key, data_version, variables))


class Snapshots:
    """Whole databases, rebuilt from what one query shows. The seed is the same for all attempts at
    a task, and fetched once; a schema for all instances of an environment's version."""

    def __init__(self) -> None:
        self._schemas: dict[tuple[str, str], dump.Schema] = {}
        self._seeds: OrderedDict[tuple[str, ...], bytes] = OrderedDict()

    async def get(self, db: str, state: State, ask: Ask) -> bytes | None:
        """`ask(db, sql)` queries the instance. None where queries of its own serve better."""
        if db == "seed" and (seed := self._seeds.get(state.seed)) is not None:
            self._seeds.move_to_end(state.seed)
            return seed
        try:
            content = await self._fetch(db, state.env, ask)
        except QueryError:
            # The server refuses such statements; the verifier's own may still pass.
            content = None
        if db == "seed" and content is not None:
            self._seeds[state.seed] = content
            if len(self._seeds) > _SEEDS_KEPT:
                self._seeds.popitem(last=False)
        return content

    async def _fetch(self, db: str, env: tuple[str, str], ask: Ask) -> bytes | None:
        for _ in range(2):
            schema = self._schemas.get(env)
            if schema is None:
                schema = dump.parse_schema((await ask(db, dump.SCHEMA_SQL)).rows)
            if schema is None:
                return None
            self._schemas[env] = schema
            dumped = await ask(db, dump.dump_sql(schema))
            if dump.matches(schema, dumped.rows):
                return dump.rebuild(schema, dumped.rows)
            del self._schemas[env]
        return None


def _version(version: str) -> str:
    """Fleet's versions start with "v", which task files leave out at times."""
    if version == "None":
        return ""
    return f"v{version}" if version[:1].isdigit() else version


def _data(task: Task) -> tuple[str, str]:
    """Data key and version, which a task file may also hold as one "KEY:VERSION"."""
    key, version = task.data_key, task.data_version
    if ":" in key and not version:
        key, version = key.split(":", 1)
    return key, _version(version)
