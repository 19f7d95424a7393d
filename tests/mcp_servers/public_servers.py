"""Public MCP servers over stdio, as `make test-mcp` has installed them."""

import json
import sqlite3
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.mcp_servers import public_tasks as tasks
from tests.support.repository import ROOT

INSTALLED = ROOT / "build/mcp-servers"
NODE = INSTALLED / "node_modules/.bin/node"
_EPISODE = "{episode_dir}"


@dataclass(frozen=True, slots=True)
class PublicServer:
    """`fill` writes what an episode's folder holds at first; `read_only_tools` are those that the
    server does not annotate."""

    command: Sequence[str]
    tasks: Sequence[tasks.PublicTask]
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    fill: Callable[[Path], None] | None = None
    read_only_tools: Sequence[str] = ()


def npm_command(package: str, *arguments: str) -> tuple[str, ...]:
    script = INSTALLED / "node_modules/@modelcontextprotocol" / package / "dist/index.js"
    return (str(NODE), str(script), *arguments)


def _pypi_command(sdk: int, name: str, *arguments: str) -> tuple[str, ...]:
    """Return a command of the environment with version `sdk` of the SDK."""
    return (str(INSTALLED / f"mcp{sdk}/bin" / name), *arguments)


def _fill_files(folder: Path) -> None:
    for name, text in (("inbox/ann.txt", "call me"), ("done/ben.txt", "thanks")):
        file = folder / name
        file.parent.mkdir()
        file.write_text(text)


def _fill_graph(folder: Path) -> None:
    lines = (
        json.dumps({"type": "entity", "name": name, "entityType": "person", "observations": []})
        for name in ("Cem", "Dana")
    )
    (folder / "memory.jsonl").write_text("\n".join(lines))


def _fill_repository(folder: Path) -> None:
    for words in (
        ("init", "-q", "-b", "main"),
        ("config", "user.name", "Ann"),
        ("config", "user.email", "ann@example.com"),
        ("commit", "-q", "--allow-empty", "-m", "Begin"),
    ):
        subprocess.run(("git", *words), cwd=folder, check=True)
    (folder / "note.txt").write_text("no milk\n")


def _fill_shop(folder: Path) -> None:
    database = sqlite3.connect(folder / "shop.db")
    with database:
        database.execute("CREATE TABLE items (name TEXT, price INTEGER)")
        database.execute("INSERT INTO items VALUES ('carrot', 2)")
    database.close()


SERVERS: Mapping[str, PublicServer] = {
    "everything": PublicServer(npm_command("server-everything", "stdio"), tasks.EVERYTHING),
    "filesystem": PublicServer(
        npm_command("server-filesystem", _EPISODE), tasks.FILESYSTEM, fill=_fill_files
    ),
    "memory": PublicServer(
        npm_command("server-memory"),
        tasks.MEMORY,
        env={"MEMORY_FILE_PATH": f"{_EPISODE}/memory.jsonl"},
        fill=_fill_graph,
    ),
    "sequential-thinking": PublicServer(
        npm_command("server-sequential-thinking"), tasks.SEQUENTIAL_THINKING
    ),
    "time": PublicServer(_pypi_command(2, "mcp-server-time"), tasks.TIME),
    "git": PublicServer(
        _pypi_command(2, "mcp-server-git", "--repository", _EPISODE),
        tasks.GIT,
        fill=_fill_repository,
    ),
    "sqlite": PublicServer(
        _pypi_command(1, "mcp-server-sqlite", "--db-path", f"{_EPISODE}/shop.db"),
        tasks.SQLITE,
        fill=_fill_shop,
        read_only_tools=("read_query", "list_tables", "describe_table"),
    ),
    "calculator": PublicServer(
        _pypi_command(1, "mcp-server-calculator"),
        tasks.CALCULATOR,
        read_only_tools=("calculate",),
    ),
}
