"""The launcher as a watcher reaches it: RegistryService. Implements `unit.ports.Launcher`."""

from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio

from flotilla.launcher.v1 import registry_service_pb2 as registry_pb
from flotilla.launcher.v1 import registry_service_pb2_grpc
from services.common.rpc import seconds, service_error
from services.launcher.agent.ports import Answer, LauncherAwayError, ReplacedError
from services.launcher.api.codec import COMMANDS
from services.launcher.control.supervisor import Command
from services.launcher.ports import UnitPhase, UnitReport
from services.launcher.state import Key

# The contract's limit on the last lines of a log.
_TAIL_CHARACTERS = 4_000
_PUSH_TIMEOUT_S = 10.0
_PHASES = {
    UnitPhase.SETUP: registry_pb.UNIT_PHASE_SETUP,
    UnitPhase.RUNNING: registry_pb.UNIT_PHASE_RUNNING,
    UnitPhase.PREEMPTED: registry_pb.UNIT_PHASE_PREEMPTED,
    UnitPhase.EXITED: registry_pb.UNIT_PHASE_EXITED,
}


@dataclass(frozen=True, slots=True)
class Sender:
    """Whose words these are; `incarnation` is the watcher's, `node` says which of the replica's
    machines it is on."""

    run_id: str
    key: Key
    incarnation: str
    node: int = 0


class UnitRegistry:
    """Speaks for one watcher."""

    def __init__(self, channel: grpc.aio.Channel, sender: Sender) -> None:
        self._stub: Any = registry_service_pb2_grpc.RegistryServiceStub(channel)
        self._sender = sender

    async def report(self, report: UnitReport, timeout_s: float) -> Answer:
        """See `ports.Launcher`."""
        how = report.exit
        request = registry_pb.ReportUnitRequest(
            **self._who(self._sender.incarnation),
            phase=_PHASES[report.phase],
            exit_code=(how.code or 0) if how else 0,
            tail=how.tail[-_TAIL_CHARACTERS:] if how else "",
            hostname=report.hostname,
            restarts=report.restarts,
        )
        try:
            response = await self._stub.ReportUnit(request, timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            raise _translated(error) from error
        commands = {wire: command for command, wire in COMMANDS.items()}
        command = commands.get(response.command, Command.NONE)
        return Answer(command, seconds(response.lease), response.begun)

    async def push(self, incarnation: str, position: int, chunk: bytes, beside: str = "") -> int:
        """See `ports.Launcher`."""
        request = registry_pb.PushLogsRequest(
            **self._who(incarnation), position=position, chunk=chunk, beside=beside
        )
        try:
            response = await self._stub.PushLogs(request, timeout=_PUSH_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            reason = service_error(error)
            if reason is not None and reason.reason == "LOG_GAP":
                return int(reason.metadata["position"])
            raise _translated(error) from error
        return int(response.position)

    def _who(self, incarnation: str) -> dict[str, Any]:
        service, replica = self._sender.key
        return {
            "run_id": self._sender.run_id,
            "service": service,
            "replica": replica,
            "node": self._sender.node,
            "incarnation": incarnation,
        }


def _translated(error: grpc.aio.AioRpcError) -> Exception:
    reason = service_error(error)
    if reason is not None and reason.reason == "REPLACED":
        return ReplacedError(reason.message)
    return LauncherAwayError(f"{error.code().name}: {error.details()}")
