"""Client of the launcher's RegistryService for a watcher. Implements
`agent.ports.LauncherLink`."""

from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio

from flotilla.launcher.v1 import registry_service_pb2 as registry_pb
from flotilla.launcher.v1 import registry_service_pb2_grpc
from flotilla_common.rpc.rpc import service_error, to_seconds
from flotilla_launcher.agent.ports import LauncherAnswer, LauncherAwayError, ReplicaReplacedError
from flotilla_launcher.agent_protocol import ReplicaCommand, UnitReport
from flotilla_launcher.api.agent_codec import COMMANDS, PHASES
from flotilla_launcher.state import ReplicaKey

# The contract's limit on the last lines of a log.
_TAIL_CHARACTERS = 4_000
_PUSH_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class AgentIdentity:
    """Identity that a watcher reports under: its own `incarnation`, and the number of its machine
    among the replica's."""

    run_id: str
    key: ReplicaKey
    incarnation: str
    node: int = 0


class GrpcLauncherLink:
    """Launcher link over gRPC; speaks for one watcher."""

    def __init__(self, channel: grpc.aio.Channel, sender: AgentIdentity) -> None:
        self._stub: Any = registry_service_pb2_grpc.RegistryServiceStub(channel)
        self._sender = sender

    async def report_unit(self, report: UnitReport, timeout_s: float) -> LauncherAnswer:
        """Report the unit. See `ports.LauncherLink`."""
        how = report.exit
        request = registry_pb.ReportUnitRequest(
            **self._identity_fields(self._sender.incarnation),
            phase=PHASES.encode(report.phase),
            exit_code=(how.code or 0) if how else 0,
            tail=how.tail[-_TAIL_CHARACTERS:] if how else "",
            hostname=report.hostname,
            restarts=report.restarts,
        )
        try:
            response = await self._stub.ReportUnit(request, timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            raise _translate_error(error) from error
        # A command that only a newer launcher knows is NONE.
        command = COMMANDS.find_member(response.command) or ReplicaCommand.NONE
        return LauncherAnswer(command, to_seconds(response.lease), response.begun)

    async def push_log(
        self, incarnation: str, position: int, chunk: bytes, beside: str = ""
    ) -> int:
        """Push a piece of a log. See `ports.LauncherLink`."""
        request = registry_pb.PushLogsRequest(
            **self._identity_fields(incarnation), position=position, chunk=chunk, beside=beside
        )
        try:
            response = await self._stub.PushLogs(request, timeout=_PUSH_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            reason = service_error(error)
            if reason is not None and reason.reason == "LOG_GAP":
                return int(reason.metadata["position"])
            raise _translate_error(error) from error
        return int(response.position)

    def _identity_fields(self, incarnation: str) -> dict[str, Any]:
        service, replica = self._sender.key
        return {
            "run_id": self._sender.run_id,
            "service": service,
            "replica": replica,
            "node": self._sender.node,
            "incarnation": incarnation,
        }


def _translate_error(error: grpc.aio.AioRpcError) -> Exception:
    reason = service_error(error)
    if reason is not None and reason.reason == "REPLACED":
        return ReplicaReplacedError(reason.message)
    return LauncherAwayError(f"{error.code().name}: {error.details()}")
