"""RPCs of RegistryService that watchers on other machines call."""

from pathlib import Path

from grpc import StatusCode

from flotilla.launcher.v1 import registry_service_pb2 as registry_pb
from flotilla_common.rpc.rpc import to_duration
from flotilla_launcher import state
from flotilla_launcher.agent_protocol import UnitPhase, UnitReport, is_side_log, key_of_node
from flotilla_launcher.api.agent_codec import COMMANDS, PHASES
from flotilla_launcher.control.launcher import Launcher, refusal_error
from flotilla_launcher.control.supervisor import Supervisor
from flotilla_launcher.store.log_spool import MAX_CHUNK_BYTES, LogGapError, LogSpool
from flotilla_launcher.store.run_files import log_path

# Spools kept open, the latest ones; the index of a log is stored beside it.
_MOST_SPOOLS = 1024


def handle_report(
    supervisor: Supervisor, request: registry_pb.ReportUnitRequest
) -> registry_pb.ReportUnitResponse:
    """Record a watcher's report; the reply renews its lease. Raises ReplacedError."""
    key = (request.service, request.replica)
    # A phase that only a newer agent knows is RUNNING.
    phase = PHASES.find_member(request.phase) or UnitPhase.RUNNING
    ended = phase in (UnitPhase.WAITING, UnitPhase.EXITED)
    how = state.ExitStatus(request.exit_code, request.tail) if ended else None
    command = supervisor.record_report(
        key,
        request.incarnation,
        UnitReport(phase, how, request.hostname, request.restarts),
        request.node,
    )
    return registry_pb.ReportUnitResponse(
        command=COMMANDS.encode(command),
        lease=to_duration(supervisor.config.sky.unit_lease_s),
        begun=supervisor.has_trained(),
    )


class PushedLogs:
    """Logs that watchers push to this launcher."""

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher
        self._open: dict[Path, LogSpool] = {}

    def push_logs(self, request: registry_pb.PushLogsRequest) -> registry_pb.PushLogsResponse:
        """Append a chunk, without the bytes already received. A run's last lines arrive after
        its end."""
        if len(request.chunk) > MAX_CHUNK_BYTES:
            message = f"the chunk has {len(request.chunk)} bytes; send at most {MAX_CHUNK_BYTES}"
            raise refusal_error(StatusCode.INVALID_ARGUMENT, "BAD_LOG", message)
        if request.position < 0:
            message = f"position {request.position} is negative; an incarnation begins at 0"
            raise refusal_error(StatusCode.INVALID_ARGUMENT, "BAD_LOG", message)
        spool = self._open_spool(request)
        try:
            position = spool.append_chunk(request.incarnation, request.position, request.chunk)
        except LogGapError as error:
            facts = {"position": str(error.position)}
            raise refusal_error(
                StatusCode.FAILED_PRECONDITION, "LOG_GAP", str(error), facts
            ) from error
        return registry_pb.PushLogsResponse(position=position)

    def _open_spool(self, request: registry_pb.PushLogsRequest) -> LogSpool:
        run_dir, service = self._launcher.folder / request.run_id, request.service
        path = log_path(run_dir, key_of_node((service, request.replica), request.node))
        if request.beside:
            path = path.with_name(f"{_checked_log_name(request)}.log")
        spool = self._open.get(path)
        if spool is None:
            stored = self._launcher.get_run(request.run_id)
            if service not in stored.run.wanted:
                message = f"run {request.run_id} has no service {service!r}"
                raise refusal_error(StatusCode.INVALID_ARGUMENT, "BAD_LOG", message)
            if len(self._open) >= _MOST_SPOOLS:
                del self._open[next(iter(self._open))]
            spool = self._open[path] = LogSpool(path)
        return spool


def _checked_log_name(request: registry_pb.PushLogsRequest) -> str:
    """Return the name of the log file. Refuse a path out of the folder, and the own log of a
    replica or machine."""
    key, name = (request.service, request.replica), request.beside
    if not is_side_log(key, request.node, name):
        service, number = key_of_node(key, request.node)
        prefix = f"{service}-{number}" if request.node else service
        message = f"beside {name!r} is no side log: use {prefix}-NAME, NAME of a-z, 0-9 and -"
        raise refusal_error(StatusCode.INVALID_ARGUMENT, "BAD_LOG", message)
    return name
