"""`flotilla join`: makes this machine a further machine of a run with a launcher elsewhere.

It ends when the run's service dismisses it. A run that ended otherwise may be resumed, so the
command waits for it again.

Both machines share the runs folder: the spec, the token and the certificates are read from it and
never appear on a command line."""

import asyncio
import time
from dataclasses import dataclass
from pathlib import Path

from flotilla_common.aio.concurrency import run_unless, running_tasks, wait_unless
from flotilla_common.process.python_command import python_command
from flotilla_common.process.stop_signals import StopSignals
from flotilla_common.rpc.errors import ConfigError
from flotilla_common.rpc.network_addresses import join_host_port
from flotilla_common.text.printable_text import print_visible
from flotilla_launcher.agent_protocol import key_of_node
from flotilla_launcher.backends.local.backend import LocalBackend
from flotilla_launcher.backends.ports import BackendError, LaunchSpec
from flotilla_launcher.cli.command_runner import BAD_SPEC, FAILED, OK, report_error
from flotilla_launcher.control.restarts import count_failure, describe_exit
from flotilla_launcher.run_spec import RunSpec, parse_spec
from flotilla_launcher.security.certificates import find_identities
from flotilla_launcher.security.service_variables import inherited_variables
from flotilla_launcher.state import EXIT_BAD_CONFIG, ExitStatus
from flotilla_launcher.store.run_files import SPEC_FILE, log_path

_LOOK_S = 0.5
_HINT_S = 300.0
# A machine that its service has dismissed ends within this time.
_DISMISSED_S = 5.0
# Ctrl-C and a scheduler signal a whole session: signals this close count as one.
_SAME_SIGNAL_S = 0.5


@dataclass(frozen=True, slots=True)
class JoinRequest:
    """Request to be machine `machine` of `service`, whose first machine is at `address`."""

    address: str
    service: str
    machine: int
    runs: Path


@dataclass(frozen=True, slots=True)
class JoinableRun:
    """Active run, as recorded by its launcher. Its `identity` folder is removed once all its
    processes are gone."""

    run_id: str
    spec: RunSpec
    identity: Path


def join_run(request: JoinRequest) -> int:
    """Serve as a machine of the run until its service dismisses it; return the exit code."""
    return asyncio.run(_join_until_over(request))


async def _join_until_over(request: JoinRequest) -> int:
    stop, now = asyncio.Event(), asyncio.Event()
    StopSignals(lambda _: stop.set(), lambda _: now.set(), same_s=_SAME_SIGNAL_S).handle_in_loop()
    while True:
        run = await run_unless(stop, _wait_for_run(request))
        if run is None:
            return OK
        print_visible(f"machine {request.machine} of {request.service} in run {run.run_id}")
        leave = asyncio.Event()
        async with running_tasks(_leave_in_time(run, stop, leave)):
            code = await _Membership(request, run, leave, now).keep_process()
        if code is not None:
            return code
        if not stop.is_set():
            print_visible(f"run {run.run_id} has ended elsewhere; waiting for it to be resumed")


async def _leave_in_time(run: JoinableRun, stop: asyncio.Event, leave: asyncio.Event) -> None:
    """Set `leave` when this machine is stopped, or the run has ended elsewhere."""
    await run_unless(stop, _wait_until_over(run))
    leave.set()


async def _wait_until_over(run: JoinableRun) -> None:
    """Return when the run has ended elsewhere and a dismissed process has had time to end."""
    while True:
        if not await asyncio.to_thread(run.identity.exists):
            await asyncio.sleep(_DISMISSED_S)
            return
        await asyncio.sleep(_LOOK_S)


async def _wait_for_run(request: JoinRequest) -> JoinableRun:
    hint_at = time.monotonic()
    while True:
        run = await asyncio.to_thread(find_joinable_run, request.runs, request.service)
        if run is not None:
            return run
        if time.monotonic() >= hint_at:
            print_visible(f"waiting for a run in {request.runs} that has further machines")
            hint_at += _HINT_S
        await asyncio.sleep(_LOOK_S)


def find_joinable_run(runs: Path, service: str) -> JoinableRun | None:
    """Return the latest started or resumed run with further machines of `service`."""
    for run_id, folder in find_identities(runs):
        try:
            spec = parse_spec((runs / run_id / SPEC_FILE).read_text())
        except (FileNotFoundError, ConfigError):
            # The run's launcher is about to write its spec.
            continue
        if spec.machines_of(service) > 1:
            return JoinableRun(run_id, spec, folder)
    return None


class _Membership:
    """Membership of this machine in a run: one process, restarted when it fails. It ends
    gracefully when `leave` is set, and at once when `now` is set."""

    def __init__(
        self, request: JoinRequest, run: JoinableRun, leave: asyncio.Event, now: asyncio.Event
    ) -> None:
        self._config = run.spec.config
        self._launch = _make_launch(request, run)
        self._processes = LocalBackend(_own_folder(request, run))
        self._leave = leave
        self._now = now

    async def keep_process(self) -> int | None:
        """Return the exit code once the process has ended for good; None if it left and may be
        needed again."""
        failures: tuple[float, ...] = ()
        while True:
            try:
                how, sent_away = await self._run_process()
            except BackendError as error:
                return report_error(str(error))
            if sent_away:
                return None
            if how.code == OK:
                return OK
            failures, delay_s = count_failure(failures, how, time.monotonic(), self._config)
            text = f"{self._launch.name} {describe_exit(how)}"
            if delay_s is None:
                report_error(f"{text}. Its last lines:\n{how.tail}")
                return BAD_SPEC if how.code == EXIT_BAD_CONFIG else FAILED
            print_visible(f"{text}; restarting it, see {self._launch.log}")
            await run_unless(self._leave, asyncio.sleep(delay_s))
            if self._leave.is_set():
                return None

    async def _run_process(self) -> tuple[ExitStatus, bool]:
        """Run the process to its end; return its exit, and True if `leave` was set before it."""
        unit = await self._processes.start_replica(self._launch)
        ended = asyncio.create_task(self._processes.wait_for_exit(unit))
        sent_away = not await wait_unless(self._leave, ended)
        if sent_away:
            await self._processes.drain_replica(unit)
            if not await wait_unless(self._now, ended, self._config.drain_s):
                await self._processes.kill_replica(unit)
        return await ended, sent_away


def _own_folder(request: JoinRequest, run: JoinableRun) -> Path:
    """Return this machine's own run folder; the shared one belongs to the first machine."""
    return request.runs.absolute() / f"{run.run_id}.nodes" / f"{request.service}-{request.machine}"


def _make_launch(request: JoinRequest, run: JoinableRun) -> LaunchSpec:
    run_dir = request.runs.absolute() / run.run_id
    key = key_of_node((request.service, 0), request.machine)
    command = (
        *python_command("-m", run.spec.further_module_of(request.service)),
        *("--config", str(run_dir / SPEC_FILE)),
        *("--run-id", run.run_id),
        *("--run-dir", str(_own_folder(request, run))),
        *("--replica", str(request.machine)),
        # Only the host matters: machines join its Ray and call no service there.
        *("--peer", f"{request.service}={join_host_port(request.address, 0)}"),
        *("--token-file", str(run.identity / "token")),
        *("--tls-dir", str(run.identity / request.service)),
    )
    return LaunchSpec(
        run_id=run.run_id,
        key=key,
        command=command,
        secrets={},
        log=log_path(run_dir, key),
        inherits=inherited_variables(run.spec, request.service),
    )
