"""Fleet's instance wire: the creation of instances, and the reading of their databases."""

import asyncio
import json
import reprlib
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar, cast
from urllib.parse import quote

from flotilla_common.aio.bounded_bytes import BoundedBytes
from flotilla_common.aio.bounded_dict import BoundedDict
from flotilla_common.tasks.task_format import Task
from flotilla_common.telemetry.log import get_logger
from flotilla_common.text.parsing import parse_json
from flotilla_env_gateway.adapters import database_dump as dump
from flotilla_env_gateway.adapters.http_client import DEFAULT_LIMITS
from flotilla_env_gateway.ports import BackendError, ProvisionRequest, QueryError, Rows, SqlValue

INSTANCES = "/v1/env/instances"
_LOG = get_logger(__name__)
_KEPT = 128
_SEED_BYTES_KEPT = 64 * 2**20
_MAX_QUERY_ROWS = 100_000
_VERSION_CHARS = 200

P = ParamSpec("P")
T = TypeVar("T")
QueryDatabase = Callable[[str, str], Awaitable[Rows]]


def instance_path(instance_id: str) -> str:
    return f"{INSTANCES}/{quote(instance_id, safe='')}"


def run_query(run_id: str) -> str:
    return f"run_id={quote(run_id, safe='')}"


def creation_body(request: ProvisionRequest) -> dict[str, Any]:
    """Build the body of POST /v1/env/instances; unknown fields are left out."""
    task = request.task
    data_key, data_version = _split_data_key(task)
    wanted = {
        "env_key": task.env_key,
        "env_version": _normalize_version(task.env_version),
        "data_key": data_key,
        "data_version": data_version,
        "env_variables": task.raw_variables,
        "ttl_seconds": int(request.ttl_s) + 1,
        "run_id": request.episode_id,
        "created_from": "sdk",
    }
    return {name: value for name, value in wanted.items() if value}


def read_address(body: Mapping[str, Any]) -> tuple[str, str]:
    """Read from an instance's description its id, and the URL below which it serves. Raises
    BackendError if they are not there: the instance may be."""
    urls = body.get("urls")
    root = cast("Mapping[str, Any]", urls).get("root") if isinstance(urls, Mapping) else None
    for name, value in (("instance_id", body.get("instance_id")), ("urls.root", root)):
        if not isinstance(value, str) or not value:
            message = f"an instance is described without {name}: {reprlib.repr(dict(body))}"
            raise BackendError("protocol", message, delivered=None, invalid=True)
    return body["instance_id"], body["urls"]["root"]


def find_duplicate_id(body: str) -> str | None:
    """Find in a 409's body the instance that an earlier attempt of the same request created."""
    try:
        return str(parse_json(body, DEFAULT_LIMITS)["detail"]["instance_id"])
    except (ValueError, KeyError, TypeError):
        return None


def query_url(runner_url: str, db: str) -> str:
    return f"{runner_url}/resources/sqlite/{quote(db, safe='')}/query"


def query_body(sql: str, args: "list[SqlValue]") -> dict[str, Any]:
    return {"query": sql, "args": args, "read_only": True}


def parse_rows(answer: Any) -> Rows:
    """Parse the rows that a query returned. Raises QueryError if the statement is at fault."""
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
    """Return True if the value is a list of rows. Raises QueryError for too many of them."""
    if isinstance(value, list) and len(cast("list[object]", value)) > _MAX_QUERY_ROWS:
        raise QueryError(f"more than {_MAX_QUERY_ROWS} rows: add a limit")
    return isinstance(value, list) and all(
        isinstance(row, list) for row in cast("list[object]", value)
    )


@dataclass(frozen=True, slots=True)
class InitialState:
    """Initial data of an instance; `seed` is equal for equal seed databases."""

    env: tuple[str, str]
    data_version: str
    seed: tuple[str, ...]


def parse_initial_state(body: Mapping[str, Any], task: Task) -> InitialState:
    env = (task.env_key, _read_text(body, "version") or task.env_version)
    data_version = _read_text(body, "data_version") or task.data_version
    variables = json.dumps(task.raw_variables, sort_keys=True)
    return InitialState(env, data_version, (*env, task.data_key, data_version, variables))


def _read_text(body: Mapping[str, Any], name: str) -> str:
    """Read a text field of an instance's description; "" if it is missing."""
    value = body.get(name)
    return value[:_VERSION_CHARS] if isinstance(value, str) else ""


class SnapshotCache:
    """Whole databases, rebuilt from the answer to one query. The seed is fetched once for all
    attempts at a task, the schema once for all instances of a version of an environment.

    Answers are decoded in at most two threads, off the event loop."""

    def __init__(self) -> None:
        self._schemas: BoundedDict[tuple[str, str], dump.Schema] = BoundedDict(_KEPT)
        self.seeds: BoundedBytes[tuple[str, ...], bytes] = BoundedBytes(
            _SEED_BYTES_KEPT, len, most_values=_KEPT
        )
        self._places = asyncio.Semaphore(2)

    async def get_snapshot(
        self, db: str, state: InitialState, query: QueryDatabase
    ) -> bytes | None:
        """Return a whole database; None if the verifier's own queries are cheaper. `query(db, sql)`
        queries the instance."""
        if db == "seed" and (seed := self.seeds.get(state.seed)) is not None:
            return seed
        try:
            content = await self._fetch_database(db, state.env, query)
        except (QueryError, dump.DumpRefusedError) as error:
            # The server refuses such statements, or its database is not a plain one; the verifier's
            # own statements may still pass.
            _LOG.debug("database_not_copied", env=state.env[0], why=str(error))
            return None
        if db == "seed" and content is not None and len(content) <= _SEED_BYTES_KEPT:
            self.seeds.keep(state.seed, content)
        return content

    async def _fetch_database(
        self, db: str, env: tuple[str, str], query: QueryDatabase
    ) -> bytes | None:
        """Fetch and rebuild a database. Raises QueryError and DumpRefusedError."""
        for _ in range(2):
            schema = self._schemas.get(env)
            if schema is None:
                rows = (await query(db, dump.SCHEMA_SQL)).rows
                schema = await self._run_in_thread(dump.parse_schema, rows)
            self._schemas[env] = schema
            dumped = await query(db, await self._run_in_thread(dump.build_dump_sql, schema))
            content = await self._run_in_thread(dump.rebuild_database, schema, dumped.rows)
            if content is not None:
                return content
            self._schemas.pop(env, None)
        return None

    async def _run_in_thread(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        async with self._places:
            return await asyncio.to_thread(work, *args, **kwargs)


def _normalize_version(version: str) -> str:
    """Prefix a version with Fleet's "v", which some task files leave out."""
    if version == "None":
        return ""
    return f"v{version}" if version[:1].isdigit() else version


def _split_data_key(task: Task) -> tuple[str, str]:
    """Return data key and version, which a task file may also hold as one "KEY:VERSION"."""
    key, version = task.data_key, task.data_version
    if ":" in key and not version:
        key, version = key.split(":", 1)
    return key, _normalize_version(version)
