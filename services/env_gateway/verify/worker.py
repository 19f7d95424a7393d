"""A process that runs verifiers, one at a time, for the gateway.

It reads jobs from standard input and writes what comes of them to standard output, JSON by lines.
While a verifier runs, its questions to the databases go the same way; the process needs no network
and no files. It is killed from outside when a verifier takes too long.
"""

import base64
import contextlib
import io
import json
import resource
import sqlite3
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from types import CodeType
from typing import Any, TextIO

from services.env_gateway.verify.dialect import (
    Environment,
    StatementError,
    verifier_globals,
    without_fleet,
)

_STDOUT_CHARS = 2**20
_ERROR_CHARS = 4000
_COMPILED_KEPT = 256
_DENIED = {sqlite3.SQLITE_ATTACH, sqlite3.SQLITE_DETACH}

Ask = Callable[[Mapping[str, Any]], Any]


class Bounded(io.StringIO):
    """Keeps the first `_STDOUT_CHARS` characters and counts the rest as printed."""

    def write(self, s: str, /) -> int:
        super().write(s[: max(0, _STDOUT_CHARS - self.tell())])
        return len(s)


class Databases:
    """The databases of one job: copies in memory where the gateway sends them, else questions."""

    def __init__(self, ask: Ask) -> None:
        self._ask = ask
        self._copies: dict[str, sqlite3.Connection | None] = {}

    def run(
        self, db: str, sql: str, args: Sequence[Any]
    ) -> tuple[Sequence[str], Sequence[Sequence[Any]]]:
        if db not in self._copies:
            content = self._ask({"snapshot": db})
            self._copies[db] = _open(base64.b64decode(content)) if content else None
        copy = self._copies[db]
        if copy is None:
            answer = self._ask({"query": sql, "db": db, "args": list(args)})
            if "error" in answer:
                raise StatementError(answer["error"])
            return answer["columns"], answer["rows"]
        try:
            cursor = copy.execute(sql, tuple(args))
        except (sqlite3.Error, sqlite3.Warning) as error:
            raise StatementError(str(error)) from error
        return [column[0] for column in cursor.description or ()], cursor.fetchall()

    def close(self) -> None:
        for copy in self._copies.values():
            if copy is not None:
                copy.close()


def _open(content: bytes) -> sqlite3.Connection:
    database = sqlite3.connect(":memory:")
    database.deserialize(content)
    database.execute("PRAGMA query_only = 1")
    database.set_authorizer(
        lambda action, *_: sqlite3.SQLITE_DENY if action in _DENIED else sqlite3.SQLITE_OK
    )
    return database


class Worker:
    def __init__(self, reader: TextIO, writer: TextIO) -> None:
        self._reader = reader
        self._writer = writer
        self._compiled: dict[str, CodeType] = {}

    def serve(self) -> None:
        """Run jobs until the gateway closes the pipe."""
        while line := self._reader.readline():
            self._write({"done": self._run(json.loads(line))})

    def _run(self, job: Mapping[str, Any]) -> dict[str, Any]:
        printed = Bounded()
        databases = Databases(self._ask)
        try:
            with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
                names = verifier_globals()
                exec(self._code(job["source"]), names)
                value = names[job["function"]](Environment(databases.run), **job["arguments"])
            return {"result": _plain(value), "stdout": printed.getvalue()}
        except EOFError:
            raise
        except BaseException as error:  # noqa: BLE001
            # A verifier may raise anything, SystemExit and KeyboardInterrupt included.
            return {"error": _told(error), "stdout": printed.getvalue()}
        finally:
            databases.close()

    def _code(self, source: str) -> CodeType:
        code = self._compiled.get(source)
        if code is None:
            if len(self._compiled) >= _COMPILED_KEPT:
                self._compiled.clear()
            code = compile(without_fleet(source), "<verifier>", "exec")
            self._compiled[source] = code
        return code

    def _ask(self, question: Mapping[str, Any]) -> Any:
        self._write(question)
        line = self._reader.readline()
        if not line:
            raise EOFError("the gateway has gone")
        return json.loads(line)

    def _write(self, message: Mapping[str, Any]) -> None:
        self._writer.write(json.dumps(message, default=repr) + "\n")
        self._writer.flush()


def _plain(value: Any) -> Any:
    return value if isinstance(value, bool | int | float | str | None) else repr(value)[:200]


def _told(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    line = next((f.lineno for f in reversed(frames) if f.filename == "<verifier>"), None)
    where = f" (line {line} of the verifier)" if line else ""
    return f"{type(error).__name__}: {error}"[:_ERROR_CHARS] + where


def _limit(memory_bytes: int) -> None:
    for kind, value in (
        (resource.RLIMIT_AS, memory_bytes),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NOFILE, 64),
    ):
        resource.setrlimit(kind, (value, value))


def main() -> None:
    _limit(int(sys.argv[1]))
    # What a verifier prints must never get between the lines of the protocol.
    reader, writer = sys.stdin, sys.stdout
    sys.stdin, sys.stdout = io.StringIO(), Bounded()
    with contextlib.suppress(EOFError, BrokenPipeError):
        Worker(reader, writer).serve()


if __name__ == "__main__":
    main()
