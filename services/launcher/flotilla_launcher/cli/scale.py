"""`flotilla scale`: sets the number of replicas of a run's services."""

from pathlib import Path

from flotilla.launcher.v1 import run_service_pb2 as pb
from flotilla_launcher.cli.command_runner import report_error, with_run_launcher
from flotilla_launcher.cli.launcher_client import LauncherConnection
from flotilla_launcher.cli.terminal import Terminal

_CALL_S = 30.0


def scale_services(run_id: str, counts: list[str], runs: Path) -> int:
    """Change the number of replicas of services."""
    parsed: list[tuple[str, int]] = []
    for each in counts:
        service, equals, count = each.partition("=")
        if not equals or not count.isdecimal():
            return report_error(f"{each!r}: write SERVICE=N, for example rollout=2")
        parsed.append((service, int(count)))

    async def scale_each(connection: LauncherConnection, found: str) -> None:
        for service, count in parsed:
            request = pb.ScaleServiceRequest(run_id=found, service=service, replicas=count)
            await connection.await_answer(connection.stub.ScaleService(request, timeout=_CALL_S))
            Terminal().print(f"{service}={count}")

    return with_run_launcher(run_id, runs, scale_each)
