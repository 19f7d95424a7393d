"""Executor of verifiers, each in its own forked child, with Fleet's SDK already imported.

    python -m flotilla_environments.fleet_emulator.verifier_worker < jobs > results

One JSON object per line each way; see `Job`. The fork costs a few milliseconds, but no verifier can
leave anything behind for the next, and one over its limit is simply killed.
"""

import base64
import contextlib
import inspect
import io
import json
import os
import re
import resource
import signal
import string
import sys
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, TypedDict, cast

import cloudpickle
from fleet import AsyncVerifierFunction, Fleet
from fleet.client import SyncEnv
from fleet.instance import client as instance_client
from fleet.models import InstanceResponse
from fleet.verifiers import SyncVerifierFunction, verifier
from fleet.verifiers.code import TASK_FAILED_SCORE, TASK_SUCCESSFUL_SCORE
from fleet.verifiers.db import DatabaseSnapshot, IgnoreConfig, SnapshotDiff
from fleet.verifiers.local_executor import (
    contains_number,
    extract_numbers,
    normalized_contains,
    normalized_string_comparison,
)

MAX_STDOUT_CHARS = 2**20
MAX_MEMORY_BYTES = 2 * 2**30
_NAMES: dict[str, Any] = {
    "TASK_SUCCESSFUL_SCORE": TASK_SUCCESSFUL_SCORE,
    "TASK_FAILED_SCORE": TASK_FAILED_SCORE,
    "Environment": SyncEnv,
    "IgnoreConfig": IgnoreConfig,
    "DatabaseSnapshot": DatabaseSnapshot,
    "SnapshotDiff": SnapshotDiff,
    "verifier": verifier,
    "normalized_contains": normalized_contains,
    "normalized_string_comparison": normalized_string_comparison,
    "extract_numbers": extract_numbers,
    "contains_number": contains_number,
    "json": json,
    "re": re,
    "string": string,
}


class Job(TypedDict):
    """`arguments` is base64 of a pickled {"args": (None, *args, {"env": id}), "kwargs": {...}}.

    `databases` are the paths of seed and current; without them the SDK queries the instance itself.
    """

    code: str
    function: str
    arguments: str | None
    timeout: float
    instance: dict[str, Any]
    databases: dict[str, str] | None
    base_url: str


@dataclass
class Result:
    """`error` is {"type", "message", "traceback"}, as Fleet reports it, or None for a success."""

    success: bool
    result: Any = None
    error: dict[str, str] | None = None
    stdout: str = ""


def failed_result(kind: str, message: str, trace: str = "", stdout: str = "") -> Result:
    error = {"type": kind, "message": message, "traceback": trace}
    return Result(success=False, error=error, stdout=stdout)


def _make_environment(job: Job, client: Fleet) -> SyncEnv:
    if job["databases"] is None:
        return client.instance(job["instance"]["instance_id"])
    env = client.instance(job["databases"])
    described = InstanceResponse(**job["instance"])
    for name in InstanceResponse.model_fields:
        setattr(env, name, getattr(described, name))
    return env


def _load_function(job: Job) -> Callable[..., Any]:
    names = dict(_NAMES)
    exec(compile(job["code"], "<verifier>", "exec"), names)
    function = names.get(job["function"])
    if isinstance(function, SyncVerifierFunction | AsyncVerifierFunction):  # it was decorated
        function = function.func
    if inspect.iscoroutinefunction(function):
        raise TypeError(f"{job['function']} is async: Fleet executes only plain functions")
    if callable(function):
        return cast(Callable[..., Any], function)
    raise NameError(f"the verifier defines no function {job['function']!r}")


def _load_arguments(job: Job) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if job["arguments"] is None:
        return (), {}
    given = cloudpickle.loads(base64.b64decode(job["arguments"]))
    return tuple(given["args"])[1:-1], dict(given["kwargs"])


def _call_verifier(job: Job, client: Fleet) -> Result:
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            args, kwargs = _load_arguments(job)
            value = _load_function(job)(_make_environment(job, client), *args, **kwargs)
            value = _to_number(value)
        json.dumps(value)
    # Any error of a verifier, even SystemExit, is its own failure and is reported as such.
    except BaseException as error:  # noqa: BLE001
        kept = printed.getvalue()[:MAX_STDOUT_CHARS]
        return failed_result(type(error).__name__, str(error), traceback.format_exc(), kept)
    return Result(success=True, result=value, stdout=printed.getvalue()[:MAX_STDOUT_CHARS])


def _to_number(value: Any) -> Any:
    """Return what Fleet's protocol carries: the score, of one that was returned with checks. These
    are printed in Fleet's format."""
    if not isinstance(value, dict) or "score" not in value:
        return value
    returned = cast(dict[str, Any], value)
    for kind, name in (("ERROR", "failed"), ("SUCCESS", "passed")):
        if name in returned:
            print(f">>> {kind}_ACCUMULATOR >>>\n{returned[name]}\n<<< {kind}_ACCUMULATOR <<<")
    return returned["score"]


def _run_child(job: Job, client: Fleet, write: int) -> None:
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, job["timeout"])
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1):  # where jobs come from and results go to
        os.dup2(null, stream)
    answer = json.dumps(asdict(_call_verifier(job, client))).encode()
    with os.fdopen(write, "wb") as pipe:
        pipe.write(answer)


def execute_in_child(job: Job, client: Fleet) -> Result:
    """Execute in a forked child, and report its end if it could not report itself."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            _run_child(job, client, write)
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        answer = pipe.read()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status == -signal.SIGALRM:
        return failed_result("TimeoutError", f"the verifier ran for more than {job['timeout']:g} s")
    try:
        return Result(**json.loads(answer))
    except ValueError:
        return failed_result("ChildProcessError", f"the verifier ended its process ({status})")


def _make_client(base_url: str) -> Fleet:
    """Make a client before any fork, for it takes 25 ms; unused here, it has no connection."""
    key = os.environ.get("FLEET_API_KEY") or "emulator"
    client = Fleet(api_key=key, base_url=base_url, max_retries=0)
    # The SDK makes another HTTP client for every local instance, and never uses it.
    instance_client.default_httpx_client = lambda *_: client.client.httpx_client
    return client


def main() -> None:
    clients: dict[str, Fleet] = {}
    results = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # keeps other output from mixing with results
    for line in sys.stdin.buffer:
        job: Job = json.loads(line)
        base_url = job["base_url"]
        if base_url not in clients:
            clients[base_url] = _make_client(base_url)
        results.write(json.dumps(asdict(execute_in_child(job, clients[base_url]))).encode() + b"\n")
        results.flush()


if __name__ == "__main__":
    main()
