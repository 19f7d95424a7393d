"""What there is before any task: the tools, the things that those which only read show, and the
probes by which states are told apart."""

import asyncio
import json
import random
import re
import sqlite3
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

from flotilla_common.rpc.deadlines import loop_time
from flotilla_reading.own_tools.arguments import Draw, UndrawableError
from flotilla_reading.own_tools.observations import Observation, Pattern, Probe, expect, observe
from flotilla_reading.own_tools.sql_statements import SqlTable
from flotilla_reading.own_tools.values import (
    PATH,
    ValuePool,
    is_harmless,
    kind_of,
    leaves_of,
    split_name,
)
from flotilla_reading.play.ports import EpisodePlayer, OfferedTool, OpenEpisode

# As endpoints and chat templates accept them.
_TOOL_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_MOST_PROBES = 6
# A call that takes longer waits for something else than state.
SLOW_S = 5.0
# Between two looks at the same state, so that a clock of seconds moves on.
APART_S = 1.2
_TRIES = 6
_MOST_FILES = 200
_MOST_BYTES = 2**20
_MOST_ROWS = 20


@dataclass(slots=True)
class Surroundings:
    """An environment as it is before a task. `baseline` is what the `probes` answer, with gaps
    where that names a date or a time of today; `left_alone` are tools with names that no model
    could be offered, `slow` those that take too long."""

    env: str
    tools: tuple[OfferedTool, ...]
    pool: ValuePool
    tables: Sequence[SqlTable] = ()
    probes: list[Probe] = field(default_factory=list[Probe])
    baseline: list[Pattern | None] = field(default_factory=list[Pattern | None])
    left_alone: tuple[str, ...] = ()
    slow: set[str] = field(default_factory=set[str])

    @property
    def readers(self) -> list[OfferedTool]:
        return [tool for tool in self.tools if tool.read_only and tool.name not in self.slow]

    @property
    def writers(self) -> list[OfferedTool]:
        return [tool for tool in self.tools if not tool.read_only]

    @property
    def prefix(self) -> str:
        """The first word of all tools' names, such as "git"; "" if they have none in common."""
        first = {(split_name(tool.name) or [""])[0] for tool in self.tools}
        return first.pop() if len(first) == 1 and len(self.tools) > 1 else ""


def opening_fields(env: str) -> dict[str, Any]:
    """Return a task of an environment that asks for nothing."""
    return {"key": f"{env}-untouched", "env_id": env, "prompt": "Look around."}


async def explore(player: EpisodePlayer, env: str, state: Path | None, seed: int) -> Surroundings:
    """Look at an untouched environment, twice: probes that answer alike are kept. `state` is the
    folder of which every episode gets a copy. Raises PlayError."""
    pool = ValuePool()
    tables = learn_from_files(state, pool) if state is not None else ()
    rng = random.Random(f"{seed}:explore")
    async with player.open_episode(opening_fields(env)) as episode:
        offered = episode.opening.tools
        tools = tuple(tool for tool in offered if _TOOL_NAME.fullmatch(tool.name))
        found = Surroundings(env, tools, pool, tables)
        found.left_alone = tuple(tool.name for tool in offered if tool not in tools)
        seen = await _find_probes(episode, found, rng)
    # What tells the time of its start must not be taken for state.
    await asyncio.sleep(APART_S)
    async with player.open_episode(opening_fields(env)) as episode:
        again = await read_state(episode, [probe for probe, _ in seen])
    for (probe, first), second in zip(seen, again, strict=True):
        agree, pattern = expect(first, second, datetime.now(UTC))
        if first == second and agree and len(found.probes) < _MOST_PROBES:
            found.probes.append(probe)
            found.baseline.append(pattern)
    return found


async def _find_probes(
    episode: OpenEpisode, found: Surroundings, rng: random.Random
) -> list[tuple[Probe, Observation]]:
    """Return probes that succeed, a few of each tool; what they answer is learned from."""
    seen: dict[str, tuple[Probe, Observation]] = {}
    shown: dict[frozenset[str], str] = {}
    for most in (1, 3):
        for tool in sorted(found.readers, key=_rank_reader):
            kept = 0
            for number in range(_TRIES if required_of(tool) else 1):
                draw = Draw(rng, found.pool, found.tables, reuse=1.0)
                try:
                    probe = _draw_general(tool, draw, whole=number == 0)
                except UndrawableError:
                    break
                # Of what was made up there is nothing to see.
                is_idle = tool.name in found.slow or draw.invented
                if is_idle or probe.identity in seen or kept == most:
                    continue
                observed = await _learn_from(episode, found, probe)
                if observed.lines is None:
                    continue
                # Two tools that show the same are one too many.
                lines = frozenset(observed.lines)
                if all(tool.name == of or not lines <= there for there, of in shown.items()):
                    shown.setdefault(lines, tool.name)
                    seen[probe.identity] = probe, observed
                    kept += 1
    return list(seen.values())


def _draw_general(tool: OfferedTool, draw: Draw, *, whole: bool) -> Probe:
    """Draw a probe; of the `whole` folder, where a path is asked for, since most changes show
    there. Raises UndrawableError."""
    arguments = draw_probe(tool, draw)
    if whole:
        paths = [name for name in required_of(tool) if kind_of(name) == PATH]
        arguments |= {name: "." for name in paths if isinstance(arguments[name], str)}
    return Probe(tool.name, arguments)


async def _learn_from(episode: OpenEpisode, found: Surroundings, probe: Probe) -> Observation:
    """Make a probe's call, and learn from the answer; without lines if it is none to use."""
    began = loop_time()
    result = await episode.call_tool(probe.tool, json.dumps(probe.arguments))
    if loop_time() - began > SLOW_S:
        found.slow.add(probe.tool)
        return Observation(None, usable=False)
    observed = observe(result.outcome, result.text)
    if observed.lines is not None:
        found.pool.add_answer(probe.arguments, result.text)
    return observed


def _rank_reader(tool: OfferedTool) -> tuple[bool, int]:
    return "deprecated" in tool.description.lower(), len(required_of(tool))


async def read_state(episode: OpenEpisode, probes: Sequence[Probe]) -> list[Observation]:
    """Return what the probes answer now. Raises PlayError."""
    seen: list[Observation] = []
    for probe in probes:
        result = await episode.call_tool(probe.tool, json.dumps(probe.arguments))
        seen.append(observe(result.outcome, result.text))
    return seen


def required_of(tool: OfferedTool) -> list[str]:
    required = tool.schema.get("required")
    return (
        [n for n in cast("list[Any]", required) if isinstance(n, str)]
        if isinstance(required, list)
        else []
    )


def draw_probe(tool: OfferedTool, draw: Draw) -> dict[str, Any]:
    """Draw only what a tool requires. Raises UndrawableError."""
    return draw.arguments(tool.name, tool.schema) if required_of(tool) else {}


def aim_probes(
    found: Surroundings, values: Mapping[str, Sequence[Any]], rng: random.Random, most: int
) -> list[Probe]:
    """Return probes of the things that calls were about: each reader with each value, by kind, in
    place of a parameter that takes such."""
    aimed: dict[str, Probe] = {}
    for tool in found.readers:
        properties = cast("dict[str, Any]", tool.schema.get("properties") or {})
        for name in required_of(tool):
            for value in values.get(kind_of(name), ()):
                draw = Draw(rng, found.pool, found.tables, reuse=1.0)
                try:
                    arguments = draw_probe(tool, draw)
                except UndrawableError:
                    break
                shape = properties.get(name)
                is_list = (
                    isinstance(shape, dict) and cast("dict[str, Any]", shape).get("type") == "array"
                )
                if isinstance(arguments.get(name), list if is_list else str):
                    arguments[name] = [value] if is_list else value
                    probe = Probe(tool.name, arguments)
                    aimed.setdefault(probe.identity, probe)
    return list(aimed.values())[:most]


def things_of(arguments: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Return the texts of a call's arguments by the kind of thing that they name."""
    things: dict[str, list[Any]] = {}
    for name, value in leaves_of(dict(arguments)):
        kind = kind_of(name)
        if isinstance(value, str) and value not in things.setdefault(kind, []):
            things[kind].append(value)
            if kind == PATH and "/" in value:
                things[kind].append(value.rpartition("/")[0])
    return things


def learn_from_files(state: Path, pool: ValuePool) -> Sequence[SqlTable]:
    """Learn the paths of the files that an episode begins with, what JSON among them says, and
    return the tables of databases among them."""
    tables: list[SqlTable] = []
    for path in sorted(state.rglob("*"))[:_MOST_FILES]:
        relative = path.relative_to(state)
        if any(part.startswith(".") for part in relative.parts) or path.is_symlink():
            continue
        if path.is_dir():
            pool.add_path(relative.as_posix(), is_folder=True)
            continue
        with path.open("rb") as file:
            head = file.read(_MOST_BYTES)
        if head.startswith(b"SQLite format 3\0"):
            tables += _read_tables(path)
            continue
        pool.add_path(relative.as_posix())
        lines = head.decode(errors="replace").splitlines()[:_MOST_FILES]
        pool.lines[relative.as_posix()] = [line for line in lines if is_harmless(line)]
        for line in lines:
            if line.lstrip().startswith(("{", "[")):
                pool.add_answer({}, line)
    for table in tables:
        pool.add("table_name", table.name)
    return tables


def _read_tables(path: Path) -> list[SqlTable]:
    tables: list[SqlTable] = []
    try:
        with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as database:
            names = database.execute(
                "SELECT name FROM sqlite_master WHERE type = 'table' ORDER BY name"
            )
            for (name,) in names.fetchall():
                quoted = '"' + str(name).replace('"', '""') + '"'
                columns = database.execute(f"PRAGMA table_info({quoted})").fetchall()
                rows = database.execute(f"SELECT * FROM {quoted} LIMIT {_MOST_ROWS}").fetchall()
                tables.append(
                    SqlTable(
                        str(name),
                        tuple(str(column[1]) for column in columns),
                        tuple(
                            "INT" in str(column[2]).upper() or "REAL" in str(column[2]).upper()
                            for column in columns
                        ),
                        tuple(tuple(row) for row in rows),
                    )
                )
    except sqlite3.Error:
        # It is no database that could be read, whatever its first bytes say.
        return []
    return tables
