"""The environments as a library: open an instance, call its tools, read its databases.

An instance has two SQLite databases, as Fleet's have: `seed`, the state that the task starts from,
and `current`, the state that tools change. Both follow from the data id alone.
"""

import sqlite3
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from flotilla_environments.app import DataApp
from flotilla_environments.database import Rows, build_seed, open_database, run_query
from flotilla_environments.fleet_booking.app import FLEET_BOOKING
from flotilla_environments.gsm8k.data_ids import SINGLE_TURN_KEYS
from flotilla_environments.task_generator import ALL_APPS, APPS, Scenario, draw_scenario
from flotilla_environments.toolkit import Picture, Tool, ToolError, ToolSpec

__all__ = [
    "ALL_KEYS",
    "DATABASES",
    "DATA_APPS",
    "ENV_KEYS",
    "DatabaseName",
    "Instance",
    "Picture",
    "Rows",
    "ToolError",
    "ToolSpec",
    "open_instance",
    "tools_of",
]

DatabaseName = Literal["seed", "current"]
DATABASES: tuple[DatabaseName, ...] = ("seed", "current")
DATA_APPS: dict[str, DataApp] = {app.key: app for app in (FLEET_BOOKING,)}
# The environments whose tasks are generated and need tools but no pictures, and all of them.
ENV_KEYS: tuple[str, ...] = tuple(APPS)
ALL_KEYS: tuple[str, ...] = (*ALL_APPS, *SINGLE_TURN_KEYS, *DATA_APPS)


class Instance:
    """One app with its own state. Not thread-safe: one call at a time, from any thread."""

    def __init__(self, of: Scenario, tools: Mapping[str, Tool], seed: bytes) -> None:
        self.scenario = of
        self.env_key = of.env_key
        self.data_id = of.data_id
        self._tools = tools
        self._seed = seed
        self._databases: dict[str, sqlite3.Connection] = {}

    def tools(self) -> list[ToolSpec]:
        return [tool.spec for tool in self._tools.values()]

    def call(self, name: str, arguments: Mapping[str, Any]) -> Any:
        """Run a tool on `current` and return its JSON-able value, or its `Picture`.

        All or nothing. Raises `ToolError` for an unknown tool, wrong arguments or a refusal.
        """
        tool = self._tools.get(name)
        if tool is None:
            raise ToolError(f"unknown tool: {name}")
        db = self._get_database("current")
        with db:
            return tool.call(db, arguments)

    def query(
        self, db: DatabaseName, sql: str, args: Sequence[Any] = (), *, read_only: bool = True
    ) -> Rows:
        """Run one SQL statement. `seed` is always read-only. Raises `sqlite3.Error`."""
        return run_query(self._get_database(db), sql, args, read_only=read_only or db == "seed")

    def snapshot(self, db: DatabaseName) -> bytes:
        """The database as the bytes of a SQLite file."""
        return self._seed if db == "seed" else self._get_database(db).serialize()

    def reset(self) -> None:
        """Make `current` equal to `seed` again."""
        self.close()

    def close(self) -> None:
        """Free the databases; an instance used afterwards starts from its seed again."""
        for database in self._databases.values():
            database.close()
        self._databases.clear()

    def _get_database(self, name: str) -> sqlite3.Connection:
        if name not in DATABASES:
            raise ValueError(f"no database {name!r}: use 'seed' or 'current'")
        database = self._databases.get(name)
        if database is None:
            database = self._databases[name] = open_database(self._seed)
        return database


def tools_of(env_key: str) -> Mapping[str, Tool]:
    """The tools of an environment by name; none for one without."""
    app = ALL_APPS.get(env_key) or DATA_APPS.get(env_key)
    return app.tools if app else {}


def open_instance(env_key: str, data_id: str, data_version: str = "v1") -> Instance:
    """Open a fresh instance. Raises `ValueError` for an unknown environment, data id or version."""
    if env_key not in ALL_KEYS:
        raise ValueError(f"Environment '{env_key}' not found: use one of {', '.join(ALL_KEYS)}")
    if env_key in DATA_APPS:
        data_app = DATA_APPS[env_key]
        of = data_app.make_scenario(data_id, data_version)
        return Instance(of, data_app.tools, data_app.seed(data_id))
    of = draw_scenario(env_key, data_id, data_version)
    schema = ALL_APPS[env_key].schema if env_key in ALL_APPS else ""
    return Instance(of, tools_of(env_key), build_seed(schema, of))
