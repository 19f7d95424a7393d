"""`flotilla submit`, `cancel` and `reap`: for machines that ask a launcher and are no part of a
run, as those of continuous integration are."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc.aio

from flotilla.launcher.v1 import run_service_pb2 as pb
from services.common import rpc
from services.common.config import canonical_json, load_spec
from services.common.errors import ConfigError
from services.common.spec import parse_shared
from services.launcher.cli import hints
from services.launcher.cli.follow import Followed
from services.launcher.cli.interrupts import InterruptedByUserError, Interrupts
from services.launcher.cli.launcher_client import (
    Connection,
    LauncherError,
    connected,
    start_run,
    told,
)
from services.launcher.cli.progress_view import PlainView, RunConsole
from services.launcher.cli.run_view import STATE_NAMES
from services.launcher.cli.watch import leave, stayed

OK, FAILED, BAD_SPEC, INTERRUPTED = 0, 1, 2, 130
NEWEST = "newest"
_REAP_S = 300.0
_CALL_S = 30.0


@dataclass(frozen=True, slots=True)
class Wish:
    """What to submit. The same `request_id` names the same run, however often it is submitted.
    `detach`: and do not follow it."""

    spec: Path
    overrides: Sequence[str]
    request_id: str
    resume: str = ""
    summary: Path | None = None
    detach: bool = False


def submit(wish: Wish, runs: Path) -> int:
    """Start a run and follow it to its end. Ctrl-C only stops following it."""

    async def work(connection: Connection, interrupts: Interrupts) -> int:
        spec = load_spec(wish.spec, wish.overrides)
        if wish.resume == NEWEST:
            name = parse_shared(spec, where=str(wish.spec)).name
            raise ConfigError(await interrupts.unless(_not_by_newest(connection, name)))
        request = pb.StartRunRequest(
            request_id=wish.request_id,
            spec_json=canonical_json(spec),
            mode=pb.RUN_MODE_TRAIN,
            resume_run_id=wish.resume,
        )
        stopping = connection.cancelling(wish.request_id)
        try:
            run_id = await interrupts.unless(start_run(connection, request))
        except InterruptedByUserError:
            known = "interrupted before the run was known to have begun"
            _say(f"{known}: {stopping} makes sure of it that it does not go on")
            return INTERRUPTED
        _say(f"Run {run_id}")
        if wish.detach or not await _stayed(connection, run_id, interrupts):
            leave(RunConsole(), run_id, runs, stopping)
            return OK if wish.detach else INTERRUPTED
        return await _conclude(connection, run_id, wish.summary)

    return _with_launcher(runs, work)


async def _not_by_newest(connection: Connection, name: str) -> str:
    """Why `newest` is refused, and what to write in its place."""
    listed = await connection.ask(connection.stub.ListRuns(pb.ListRunsRequest(), timeout=_CALL_S))
    newest = next((run.run_id for run in listed.runs if run.name == name), "")
    if not newest:
        return f"--resume newest: there is no run of spec {name!r} at this launcher"
    return (
        "--resume newest: a request that is repeated names the same run, and the newest may be"
        f" another one by then; write --resume {newest}, which is the newest of spec {name!r} now"
    )


async def _stayed(connection: Connection, run_id: str, interrupts: Interrupts) -> bool:
    """Print what happens until the run has ended, or the user leaves: then it is false."""
    return await stayed(connection, Followed(0, run_id), PlainView(RunConsole()), interrupts)


def cancel(request_id: str, runs: Path, grace_s: float) -> int:
    """Stop the run that a request began, and see to it that the request begins none later."""

    async def work(connection: Connection, interrupts: Interrupts) -> int:
        done = await _cancel_unless(interrupts.unless, connection, request_id, grace_s)
        return OK if done else INTERRUPTED if interrupts.first.is_set() else FAILED

    return _with_launcher(runs, work)


def reap(runs: Path, *, dry_run: bool) -> int:
    """End what runs of no run, or say what that would be."""

    async def work(connection: Connection, interrupts: Interrupts) -> int:
        request = pb.ReapRequest(dry_run=dry_run)
        try:
            found = await interrupts.unless(_reap(connection, request))
        except InterruptedByUserError:
            _say("Stopping. A launcher that goes on may still end what it has found.")
            return INTERRUPTED
        for text in found.reaped:
            _say(f"{'would end' if dry_run else 'ended'} {text}")
        for run_id in found.suspected_run_ids:
            look = hints.command("status", run_id, runs=runs)
            _say(f"run {run_id} may have left something: {look} says what")
        for text in found.unreachable:
            _say(f"cannot be asked: {text}")
        if not (found.reaped or found.suspected_run_ids):
            _say("nothing runs of no run")
        return FAILED if found.suspected_run_ids or found.unreachable else OK

    return _with_launcher(runs, work, start=not dry_run)


def _with_launcher(
    runs: Path, work: Callable[[Connection, Interrupts], Awaitable[int]], *, start: bool = True
) -> int:
    async def main() -> int:
        interrupts = Interrupts()
        with interrupts.caught():
            async with connected(runs, interrupts, start=start) as connection:
                return await work(connection, interrupts)

    try:
        return asyncio.run(main())
    except ConfigError as error:
        return _fail(str(error), BAD_SPEC)
    except LauncherError as error:
        return _fail(str(error), FAILED)
    except InterruptedByUserError:
        return INTERRUPTED
    except grpc.aio.AioRpcError as error:
        known = rpc.service_error(error)
        bad_spec = known is not None and known.reason == "BAD_SPEC"
        return _fail(told(error), BAD_SPEC if bad_spec else FAILED)


async def _reap(connection: Connection, request: pb.ReapRequest) -> pb.ReapResponse:
    return await connection.ask(connection.stub.Reap(request, timeout=_REAP_S))


async def _cancel_unless(
    unless: Callable[[Coroutine[Any, Any, None]], Awaitable[None]],
    connection: Connection,
    request_id: str,
    grace_s: float,
) -> bool:
    """Cancel a request; what is not known to have ended is said to go on perhaps."""
    try:
        await unless(_cancel(connection, request_id, grace_s))
    except (InterruptedByUserError, grpc.aio.AioRpcError) as error:
        if isinstance(error, grpc.aio.AioRpcError):
            _say(f"error: {told(error)}")
        _say(f"the run may go on: {connection.cancelling(request_id)}")
        return False
    return True


async def _cancel(connection: Connection, request_id: str, grace_s: float) -> None:
    request = pb.StopRunRequest(request_id=request_id, grace=rpc.duration(grace_s))
    answer = await connection.ask(connection.stub.StopRun(request, timeout=grace_s + 600.0))
    if not answer.run_id:
        _say(f"no run was begun by {request_id}, and none will be")
        return
    wanted = pb.GetRunRequest(run_id=answer.run_id)
    found = await connection.ask(connection.stub.GetRun(wanted, timeout=_CALL_S))
    _say(f"run {answer.run_id} {STATE_NAMES[answer.state]}, machines: {_cleanup(found.run)}")


async def _conclude(connection: Connection, run_id: str, summary: Path | None) -> int:
    wanted = pb.GetRunRequest(run_id=run_id)
    run = (await connection.ask(connection.stub.GetRun(wanted, timeout=_CALL_S))).run
    rows = _rows(run)
    for label, value in rows:
        _say(f"{label}: {value}")
    if summary is not None:
        lines = ["| | |", "|---|---|", *(f"| {label} | {value} |" for label, value in rows)]
        with summary.open("a", encoding="utf-8") as file:
            file.write("\n".join([*lines, ""]) + "\n")
    if run.error:
        _say(run.error)
    return OK if run.state == pb.RUN_STATE_COMPLETED else FAILED


def _rows(run: pb.Run) -> list[tuple[str, str]]:
    outcome = pb.Outcome.Name(run.outcome).removeprefix("OUTCOME_").lower()
    rows = [
        ("Run", run.run_id),
        ("State", STATE_NAMES[run.state]),
        ("Outcome", outcome),
        ("Machines", _cleanup(run)),
        ("Spent", f"${run.cost.accrued:,.2f}"),
        ("Restarts", str(sum(replica.restarts for replica in run.replicas))),
    ]
    if "eval/all/pass_at_1" in run.metrics:
        rows.append(("Held-out pass@1", f"{run.metrics['eval/all/pass_at_1']:.1%}"))
    return rows


def _cleanup(run: pb.Run) -> str:
    return pb.Cleanup.Name(run.cleanup).removeprefix("CLEANUP_").lower().replace("_", " ")


def _say(text: str) -> None:
    RunConsole().print(text, markup=False, highlight=False, soft_wrap=True)


def _fail(message: str, code: int) -> int:
    _say(f"error: {message}")
    return code
