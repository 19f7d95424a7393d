"""`flotilla submit`, `cancel` and `reap`: commands for machines that are not part of a run,
such as those of continuous integration."""

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
from services.launcher.cli.follow import FollowedRun
from services.launcher.cli.interrupts import InterruptedByUserError, Interrupts
from services.launcher.cli.launcher_client import (
    LauncherConnection,
    LauncherError,
    connect_to_launcher,
    describe_failure,
    start_run,
)
from services.launcher.cli.progress_view import PlainView, RunConsole
from services.launcher.cli.run_view import STATE_NAMES
from services.launcher.cli.watch import print_detach_hints, watch_until_left

OK, FAILED, BAD_SPEC, INTERRUPTED = 0, 1, 2, 130
NEWEST = "newest"
_REAP_S = 300.0
_CALL_S = 30.0


@dataclass(frozen=True, slots=True)
class SubmitRequest:
    """A run to submit. The same `request_id` names the same run, however often it is submitted.
    With `detach` the run is not followed."""

    spec: Path
    overrides: Sequence[str]
    request_id: str
    resume: str = ""
    summary: Path | None = None
    detach: bool = False


def submit_run(wish: SubmitRequest, runs: Path) -> int:
    """Start a run and follow it to its end. Ctrl-C only stops following it."""

    async def start_and_follow(connection: LauncherConnection, interrupts: Interrupts) -> int:
        spec = load_spec(wish.spec, wish.overrides)
        if wish.resume == NEWEST:
            name = parse_shared(spec, where=str(wish.spec)).name
            raise ConfigError(
                await interrupts.unless_interrupted(_explain_newest_refusal(connection, name))
            )
        request = pb.StartRunRequest(
            request_id=wish.request_id,
            spec_json=canonical_json(spec),
            mode=pb.RUN_MODE_TRAIN,
            resume_run_id=wish.resume,
        )
        stopping = connection.cancel_command(wish.request_id)
        try:
            run_id = await interrupts.unless_interrupted(start_run(connection, request))
        except InterruptedByUserError:
            known = "interrupted before the run was known to have begun"
            _print_text(f"{known}: {stopping} makes sure of it that it does not go on")
            return INTERRUPTED
        _print_text(f"Run {run_id}")
        if wish.detach or not await _watch_until_left(connection, run_id, interrupts):
            print_detach_hints(RunConsole(), run_id, runs, stopping)
            return OK if wish.detach else INTERRUPTED
        return await _print_conclusion(connection, run_id, wish.summary)

    return _with_launcher(runs, start_and_follow)


async def _explain_newest_refusal(connection: LauncherConnection, name: str) -> str:
    """Explain why `newest` is refused, and what to write instead."""
    listed = await connection.await_answer(
        connection.stub.ListRuns(pb.ListRunsRequest(), timeout=_CALL_S)
    )
    newest = next((run.run_id for run in listed.runs if run.name == name), "")
    if not newest:
        return f"--resume newest: there is no run of spec {name!r} at this launcher"
    return (
        "--resume newest: a request that is repeated names the same run, and the newest may be"
        f" another one by then; write --resume {newest}, which is the newest of spec {name!r} now"
    )


async def _watch_until_left(
    connection: LauncherConnection, run_id: str, interrupts: Interrupts
) -> bool:
    """Print events until the run has ended (True) or the user leaves (False)."""
    return await watch_until_left(
        connection, FollowedRun(0, run_id), PlainView(RunConsole()), interrupts
    )


def cancel_request(request_id: str, runs: Path, grace_s: float) -> int:
    """Stop the run that a request began, and prevent the request from beginning one later."""

    async def cancel_and_report(connection: LauncherConnection, interrupts: Interrupts) -> int:
        done = await _cancel_unless_interrupted(
            interrupts.unless_interrupted, connection, request_id, grace_s
        )
        return OK if done else INTERRUPTED if interrupts.first.is_set() else FAILED

    return _with_launcher(runs, cancel_and_report)


def reap_orphans(runs: Path, *, dry_run: bool) -> int:
    """Terminate orphaned resources that belong to no run, or list what would be terminated."""

    async def reap_and_report(connection: LauncherConnection, interrupts: Interrupts) -> int:
        request = pb.ReapRequest(dry_run=dry_run)
        try:
            found = await interrupts.unless_interrupted(_send_reap(connection, request))
        except InterruptedByUserError:
            _print_text("Stopping. A launcher that goes on may still end what it has found.")
            return INTERRUPTED
        _print_orphans(found, runs, dry_run=dry_run)
        return FAILED if found.suspected_run_ids or found.unreachable else OK

    return _with_launcher(runs, reap_and_report, start=not dry_run)


def _print_orphans(found: pb.ReapResponse, runs: Path, *, dry_run: bool) -> None:
    for text in found.reaped:
        _print_text(f"{'would end' if dry_run else 'ended'} {text}")
    for run_id in found.suspected_run_ids:
        look = hints.format_command("status", run_id, runs=runs)
        _print_text(f"run {run_id} may have left something: {look} says what")
    for text in found.unreachable:
        _print_text(f"cannot be asked: {text}")
    if not (found.reaped or found.suspected_run_ids):
        _print_text("nothing runs of no run")


def _with_launcher(
    runs: Path,
    work: Callable[[LauncherConnection, Interrupts], Awaitable[int]],
    *,
    start: bool = True,
) -> int:
    async def main() -> int:
        interrupts = Interrupts()
        with interrupts.catch_signals():
            async with connect_to_launcher(runs, interrupts, start=start) as connection:
                return await work(connection, interrupts)

    try:
        return asyncio.run(main())
    except ConfigError as error:
        return _report_error(str(error), BAD_SPEC)
    except LauncherError as error:
        return _report_error(str(error), FAILED)
    except InterruptedByUserError:
        return INTERRUPTED
    except grpc.aio.AioRpcError as error:
        known = rpc.service_error(error)
        bad_spec = known is not None and known.reason == "BAD_SPEC"
        return _report_error(describe_failure(error), BAD_SPEC if bad_spec else FAILED)


async def _send_reap(connection: LauncherConnection, request: pb.ReapRequest) -> pb.ReapResponse:
    return await connection.await_answer(connection.stub.Reap(request, timeout=_REAP_S))


async def _cancel_unless_interrupted(
    unless: Callable[[Coroutine[Any, Any, None]], Awaitable[None]],
    connection: LauncherConnection,
    request_id: str,
    grace_s: float,
) -> bool:
    """Cancel a request. If its end could not be confirmed, say that the run may go on."""
    try:
        await unless(_send_cancel(connection, request_id, grace_s))
    except (InterruptedByUserError, grpc.aio.AioRpcError) as error:
        if isinstance(error, grpc.aio.AioRpcError):
            _print_text(f"error: {describe_failure(error)}")
        _print_text(f"the run may go on: {connection.cancel_command(request_id)}")
        return False
    return True


async def _send_cancel(connection: LauncherConnection, request_id: str, grace_s: float) -> None:
    request = pb.StopRunRequest(request_id=request_id, grace=rpc.to_duration(grace_s))
    answer = await connection.await_answer(
        connection.stub.StopRun(request, timeout=grace_s + 600.0)
    )
    if not answer.run_id:
        _print_text(f"no run was begun by {request_id}, and none will be")
        return
    wanted = pb.GetRunRequest(run_id=answer.run_id)
    found = await connection.await_answer(connection.stub.GetRun(wanted, timeout=_CALL_S))
    _print_text(
        f"run {answer.run_id} {STATE_NAMES[answer.state]}, machines: {_format_cleanup(found.run)}"
    )


async def _print_conclusion(
    connection: LauncherConnection, run_id: str, summary: Path | None
) -> int:
    wanted = pb.GetRunRequest(run_id=run_id)
    run = (await connection.await_answer(connection.stub.GetRun(wanted, timeout=_CALL_S))).run
    rows = _summary_rows(run)
    for label, value in rows:
        _print_text(f"{label}: {value}")
    if summary is not None:
        lines = ["| | |", "|---|---|", *(f"| {label} | {value} |" for label, value in rows)]
        with summary.open("a", encoding="utf-8") as file:
            file.write("\n".join([*lines, ""]) + "\n")
    if run.error:
        _print_text(run.error)
    return OK if run.state == pb.RUN_STATE_COMPLETED else FAILED


def _summary_rows(run: pb.Run) -> list[tuple[str, str]]:
    outcome = pb.Outcome.Name(run.outcome).removeprefix("OUTCOME_").lower()
    rows = [
        ("Run", run.run_id),
        ("State", STATE_NAMES[run.state]),
        ("Outcome", outcome),
        ("Machines", _format_cleanup(run)),
        ("Spent", f"${run.cost.accrued:,.2f}"),
        ("Restarts", str(sum(replica.restarts for replica in run.replicas))),
    ]
    if "eval/all/pass_at_1" in run.metrics:
        rows.append(("Held-out pass@1", f"{run.metrics['eval/all/pass_at_1']:.1%}"))
    return rows


def _format_cleanup(run: pb.Run) -> str:
    return pb.Cleanup.Name(run.cleanup).removeprefix("CLEANUP_").lower().replace("_", " ")


def _print_text(text: str) -> None:
    RunConsole().print(text, markup=False, highlight=False, soft_wrap=True)


def _report_error(message: str, code: int) -> int:
    _print_text(f"error: {message}")
    return code
