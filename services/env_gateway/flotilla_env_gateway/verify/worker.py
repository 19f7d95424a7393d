"""A process that runs verifiers, one at a time, for the gateway.

It reads jobs from standard input and writes their results to standard output, JSON by
lines. While a verifier runs, its database queries take the same path; the process needs no
network and no files. The gateway kills it if a verifier takes too long. It imports
only the standard library and its neighbours: the same code runs inside a sandbox."""

import base64
import contextlib
import io
import itertools
import json
import os
import resource
import sqlite3
import sys
import traceback
from collections.abc import Callable, Coroutine, Mapping, Sequence
from types import CodeType, CoroutineType
from typing import Any, TextIO

from flotilla_env_gateway.verify.python_substitutes import sort_in_memory, wake_loops_by_pipes
from flotilla_env_gateway.verify.verifier_globals import (
    Environment,
    StatementError,
    ToolError,
    verifier_globals,
    without_fleet,
)

_STDOUT_CHARS = 2**18
_END_CHARS = _STDOUT_CHARS // 2
# As much as the gateway keeps for display.
_SHOWN_CHARS = 2**16
_RESULT_CHARS = 200
_INT_BITS = 1024
_ERROR_CHARS = 4000
_CHECKS_KEPT = 200
_CHECK_CHARS = 500
# More than the gateway takes, so that it says how many it takes.
_REWARDS_SENT = 100
_COMPILED_KEPT = 256
_DENIED = {sqlite3.SQLITE_ATTACH, sqlite3.SQLITE_DETACH}

SendRequest = Callable[[Mapping[str, Any]], Any]


class Bounded(io.StringIO):
    """Output buffer that keeps the beginning and the end, `_STDOUT_CHARS` together: a judge's
    message and the passed checks come last."""

    def __init__(self) -> None:
        super().__init__()
        self._last: list[str] = []
        self._last_chars = 0

    def write(self, s: str, /) -> int:
        room = max(0, _END_CHARS - self.tell())
        super().write(s[:room])
        if rest := s[room:]:
            self._last.append(rest)
            self._last_chars += len(rest)
        if self._last_chars > 2 * _END_CHARS:
            self._last = ["".join(self._last)[-_END_CHARS - 1 :]]
            self._last_chars = _END_CHARS + 1
        return len(s)

    def getvalue(self) -> str:
        last = "".join(self._last)
        if len(last) > _END_CHARS:
            last = f"\n...\n{last[-_END_CHARS:]}"
        return super().getvalue() + last


class GatewayGoneError(EOFError):
    """The gateway's end of the pipe is closed."""


class Databases:
    """The databases of one job: copies in memory if the gateway sends them, else queries to it."""

    def __init__(self, send_request: SendRequest) -> None:
        self._send_request = send_request
        self._copies: dict[str, sqlite3.Connection | None] = {}

    def run(
        self, db: str, sql: str, args: Sequence[Any]
    ) -> tuple[Sequence[str], Sequence[Sequence[Any]]]:
        if db not in self._copies:
            content = self._send_request({"snapshot": db})
            self._copies[db] = _open_copy(base64.b64decode(content)) if content else None
        copy = self._copies[db]
        if copy is None:
            answer = self._send_request({"query": sql, "db": db, "args": list(args)})
            if "error" in answer:
                raise StatementError(answer["error"])
            return answer["columns"], answer["rows"]
        cursor = copy.execute(sql, tuple(args))
        return [column[0] for column in cursor.description or ()], cursor.fetchall()

    def close(self) -> None:
        for copy in self._copies.values():
            if copy is not None:
                copy.close()


def _open_copy(content: bytes) -> sqlite3.Connection:
    database = sqlite3.connect(":memory:")
    database.deserialize(content)
    # A policy that may run SQL can store invalid text, and no grade must fail because of it.
    database.text_factory = lambda stored: stored.decode("utf-8", "surrogateescape")
    database.execute("PRAGMA query_only = 1")
    database.set_authorizer(
        lambda action, *_: sqlite3.SQLITE_DENY if action in _DENIED else sqlite3.SQLITE_OK
    )
    return database


class Worker:
    """Runs verifiers that arrive at `reader`. `describe` makes a text of what they raise, and
    `unwrap` plain values of the numbers of packages, where there are any."""

    def __init__(
        self,
        reader: TextIO,
        writer: TextIO,
        describe: Callable[[BaseException], str] | None = None,
        unwrap: Callable[[Any], Any] | None = None,
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._describe = describe or _describe_error
        self._unwrap = unwrap
        self._compiled: dict[str, CodeType] = {}

    def serve(self) -> None:
        """Run jobs until the gateway closes the pipe."""
        self._write({"ready": True})
        while line := self._reader.readline():
            self._write({"done": self._run_job(json.loads(line))})

    def _run_job(self, job: Mapping[str, Any]) -> dict[str, Any]:
        printed = Bounded()
        databases = Databases(self._request_gateway)
        try:
            with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
                names = verifier_globals()
                exec(self._compile_source(job["source"]), names)
                env = Environment(databases.run, self._call_tool)
                value = names[job["function"]](env, **job["arguments"])
                if isinstance(value, CoroutineType):
                    value = self._run_coroutine(value)
                if self._unwrap:
                    value = self._unwrap(value)
            return _done(value, printed)
        except GatewayGoneError:
            raise
        except BaseException as error:  # noqa: BLE001
            # A verifier may raise anything, SystemExit and KeyboardInterrupt included.
            message = self._describe(error)[:_ERROR_CHARS]
            return {"error": message, "stdout": printed.getvalue()}
        finally:
            databases.close()

    def _compile_source(self, source: str) -> CodeType:
        code = self._compiled.get(source)
        if code is None:
            if len(self._compiled) >= _COMPILED_KEPT:
                self._compiled.clear()
            code = compile(without_fleet(source), "<verifier>", "exec")
            if "asyncio" in source.lower():
                wake_loops_by_pipes()
            self._compiled[source] = code
        return code

    def _run_coroutine(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        import asyncio

        if self._unwrap is None:
            wake_loops_by_pipes()
        return asyncio.run(coroutine)

    def _call_tool(self, name: str, arguments: Mapping[str, Any]) -> str:
        answer = self._request_gateway({"call": name, "arguments": dict(arguments)})
        if "error" in answer:
            raise ToolError(answer["error"])
        return answer["text"]

    def _request_gateway(self, question: Mapping[str, Any]) -> Any:
        self._write(question)
        line = self._reader.readline()
        if not line:
            raise GatewayGoneError("the gateway has gone")
        return json.loads(line)

    def _write(self, message: Mapping[str, Any]) -> None:
        self._writer.write(json.dumps(message, default=repr) + "\n")
        self._writer.flush()


def _done(value: Any, printed: Bounded) -> dict[str, Any]:
    """Build the final message. Checks and the whole output would be too much for one message; with
    checks, the gateway reads nothing of the output."""
    result, stdout = _to_result(value), printed.getvalue()
    shown = stdout[:_SHOWN_CHARS] if type(result) is dict and "passed" in result else stdout
    return {"result": result, "stdout": shown}


def _to_result(value: Any) -> Any:
    """Convert a verifier's value to a plain value, or to a score with its checks and rewards."""
    if type(value) is not dict or "score" not in value:
        return _to_plain_value(value)
    more: dict[str, Any] = {}
    if {"passed", "failed"} <= value.keys():
        more = {name: _to_checks(value[name]) for name in ("passed", "failed")}
    if value.get("rewards") is not None:
        more["rewards"] = _to_rewards(value["rewards"])
    # Fleet accepts a score alone in this form, too.
    score = _to_plain_value(value["score"])
    return {"score": score, **more} if more else score


def _to_rewards(rewards: Any) -> dict[str, Any]:
    """Convert named rewards, which the gateway checks, to plain values. Raises TypeError."""
    if type(rewards) is not dict:
        raise TypeError('"rewards" are an object of numbers by name, beside "score"')
    some = itertools.islice(rewards.items(), _REWARDS_SENT)
    return {str(name)[:_RESULT_CHARS]: _to_plain_value(value) for name, value in some}


def _to_checks(checks: Any) -> list[str]:
    """Convert checks to bounded texts. Raises TypeError."""
    if not isinstance(checks, list | tuple):
        raise TypeError('"passed" and "failed" are lists of texts, beside "score"')
    return [str(check)[:_CHECK_CHARS] for check in checks[:_CHECKS_KEPT]]


def _to_plain_value(value: Any) -> bool | int | float | str | None:
    """Convert a value to one that JSON can hold. A number of a custom class becomes a plain
    one, without calling methods of that class."""
    kind = type(value)
    if kind is bool or value is None:
        return value
    if issubclass(kind, float):
        return float.__add__(value, 0.0)
    if issubclass(kind, int):
        bits = int.bit_length(value)
        return int.__add__(value, 0) if bits < _INT_BITS else f"an integer of {bits} bits"
    return (
        str.__str__(value)[:_RESULT_CHARS] if issubclass(kind, str) else repr(value)[:_RESULT_CHARS]
    )


def _describe_error(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    line = next((f.lineno for f in reversed(frames) if f.filename == "<verifier>"), None)
    where = f" (line {line} of the verifier)" if line else ""
    return f"{type(error).__name__}: {error}"[: _ERROR_CHARS - len(where)] + where


def _limit_resources(memory_bytes: int, cpu_s: int) -> None:
    """Limit the process's resources: no files and no other processes. With `cpu_s` 0, CPU time
    is unlimited."""
    limits = {
        resource.RLIMIT_AS: memory_bytes,
        resource.RLIMIT_FSIZE: 0,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_NPROC: 0,
        resource.RLIMIT_NOFILE: 64,
        resource.RLIMIT_MEMLOCK: 0,
        resource.RLIMIT_MSGQUEUE: 0,
        resource.RLIMIT_SIGPENDING: 64,
    }
    if cpu_s:
        limits[resource.RLIMIT_CPU] = cpu_s
    for kind, value in limits.items():
        resource.setrlimit(kind, (value, value))


def _take_pipes() -> tuple[TextIO, TextIO]:
    """Take the protocol's ends and move them away from where programs read and write by habit:
    there the input is at its end and output fails, so that nothing printed gets between the
    protocol's lines."""
    reader = os.fdopen(os.dup(0), "r", encoding="utf-8")
    writer = os.fdopen(os.dup(1), "w", encoding="utf-8")
    ended, writing = os.pipe()
    os.close(writing)
    os.dup2(ended, 0)
    reading, closed = os.pipe()
    os.close(reading)
    os.dup2(closed, 1)
    os.dup2(closed, 2)
    os.close(ended)
    os.close(closed)
    return reader, writer


def main() -> None:
    memory_bytes, cpu_s = (int(arg) for arg in sys.argv[2:4])
    if len(sys.argv) > 4:
        return _serve_packages(memory_bytes, json.loads(sys.argv[4]))
    _limit_resources(memory_bytes, cpu_s)
    reader, writer = _take_pipes()
    sort_in_memory()
    sys.stdin, sys.stdout, sys.stderr = io.StringIO(), Bounded(), Bounded()
    with contextlib.suppress(GatewayGoneError, BrokenPipeError):
        Worker(reader, writer).serve()


def _serve_packages(memory_bytes: int, modules: Sequence[tuple[str, str, str]]) -> None:
    """Import the modules, and run their functions. They may use threads, files and sockets; what
    they print outside of Python is dropped."""
    # Not in the sandbox: it starts sooner without what this imports.
    from flotilla_env_gateway.verify.package_module import (
        ModuleError,
        describe_error,
        import_checked,
        unwrap_numbers,
    )

    # Of the address space, shared libraries alone may take more.
    resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    reader = os.fdopen(os.dup(0), "r", encoding="utf-8")
    writer = os.fdopen(os.dup(1), "w", encoding="utf-8")
    nothing = os.fdopen(os.open(os.devnull, os.O_RDWR), "r+", encoding="utf-8")
    os.dup2(nothing.fileno(), 0)
    os.dup2(nothing.fileno(), 1)
    sys.stdin = sys.stdout = nothing
    try:
        import_checked(modules)
    except ModuleError as error:
        os.write(2, str(error).encode("utf-8", "replace"))
        raise SystemExit(1) from error
    os.dup2(nothing.fileno(), 2)
    with contextlib.suppress(GatewayGoneError, BrokenPipeError):
        Worker(reader, writer, describe_error, unwrap_numbers).serve()
