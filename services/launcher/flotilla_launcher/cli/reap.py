"""`flotilla reap`: terminates orphaned resources, or lists them."""

from pathlib import Path

from flotilla.launcher.v1 import run_service_pb2 as pb
from flotilla_launcher.cli import command_hints
from flotilla_launcher.cli.command_runner import (
    FAILED,
    INTERRUPTED,
    OK,
    print_text,
    with_launcher,
)
from flotilla_launcher.cli.interrupts import InterruptedByUserError, Interrupts
from flotilla_launcher.cli.launcher_client import LauncherConnection

_REAP_S = 300.0


def reap_orphans(runs: Path, *, dry_run: bool) -> int:
    """Terminate orphaned resources that belong to no run, or list what would be terminated."""

    async def reap_and_report(connection: LauncherConnection, interrupts: Interrupts) -> int:
        call = connection.stub.Reap(pb.ReapRequest(dry_run=dry_run), timeout=_REAP_S)
        try:
            found = await interrupts.unless_interrupted(connection.await_answer(call))
        except InterruptedByUserError:
            print_text(
                "Interrupted. A launcher that keeps running may still end the orphans it found."
            )
            return INTERRUPTED
        _print_orphans(found, runs, dry_run=dry_run)
        return FAILED if found.suspected_run_ids or found.unreachable else OK

    return with_launcher(runs, reap_and_report, start=not dry_run)


def _print_orphans(found: pb.ReapResponse, runs: Path, *, dry_run: bool) -> None:
    for text in found.reaped:
        print_text(f"{'would end' if dry_run else 'ended'} {text}")
    for run_id in found.suspected_run_ids:
        look = command_hints.format_command("status", run_id, runs=runs)
        print_text(f"run {run_id} may have left something behind: {look} shows it")
    for text in found.unreachable:
        print_text(f"unreachable: {text}")
    if not (found.reaped or found.suspected_run_ids):
        print_text("no orphaned resources")
