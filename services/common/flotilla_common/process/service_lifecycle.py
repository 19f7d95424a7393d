"""The shutdown of a service process, from the first signal or command to its end.

How long a drain may take is `launcher.drain_s` of the run spec, which the launcher enforces
(`services/launcher/flotilla_launcher/control/reconcile.py`)."""

import asyncio
import faulthandler
import os
import signal
import threading
from collections.abc import Awaitable, Callable, Generator, Mapping
from contextlib import contextmanager, suppress

import grpc.aio

from flotilla_common.aio.concurrency import cancel_tasks
from flotilla_common.process.run_membership import (
    Membership,
    RegistryContract,
    ReplicaIdentity,
    ReplicaStatus,
)
from flotilla_common.process.stop_signals import StopSignals
from flotilla_common.telemetry.log import get_logger

# How long a stop may take before the process is killed.
_STOP_GRACE_S = 5.0
# Ctrl-C reaches a process group and a parent that forwards it: signals so close count once.
_SAME_SIGNAL_S = 0.5
_log = get_logger(__name__)


class Lifecycle:
    """Setter of `drain`: on SIGTERM, SIGINT, the launcher's command or its silence.

    A second signal ends the process at once."""

    def __init__(
        self,
        drain: asyncio.Event,
        identity: ReplicaIdentity,
        contract: RegistryContract | None,
        registry_channel: grpc.aio.Channel | None,
    ) -> None:
        # The replica's status, called at each heartbeat.
        self.status: Callable[[], ReplicaStatus] = ReplicaStatus
        # The address of this process's Prometheus metrics, if any.
        self.metrics_address = ""
        # The newest metrics from the launcher.
        self.launcher_metrics: Mapping[str, float] = {}
        self._drain = drain
        self._identity = identity
        self._contract = contract
        self._registry_channel = registry_channel
        self._loop = asyncio.get_running_loop()
        self._service: asyncio.Future[None] | None = None
        self._member: Membership | None = None
        self._membership: asyncio.Task[None] | None = None
        self._stopped = False
        self._loading = False
        self._signals = StopSignals(
            self._drain_by_signal, lambda number: os._exit(128 + number), same_s=_SAME_SIGNAL_S
        )

    def install_signals(self) -> None:
        """Install signal handlers, not the loop's own: those wait for a loop that may be
        blocked."""
        self._signals.handle_at_once()
        # Writes the stacks of all threads to stderr, to show what the process is doing.
        faulthandler.register(signal.SIGUSR1, all_threads=True)

    async def run(self, service: Awaitable[None]) -> None:
        """Run the service to its end, or until it is stopped."""
        self._service = asyncio.ensure_future(service)
        try:
            await self._service
        except asyncio.CancelledError:
            if not self._stopped:
                raise
        finally:
            await self._leave()

    def announce(self, address: str) -> None:
        """Register `address` and start the heartbeats; a no-op without a registry."""
        if self._contract is None or self._registry_channel is None or self._membership:
            return
        self._member = membership = Membership(
            self._identity,
            self._contract,
            self._registry_channel,
            status=lambda: self.status(),
            drain=self.drain,
            stop=self.stop,
            on_metrics=self._keep_launcher_metrics,
            metrics_address=self.metrics_address,
        )
        self._membership = asyncio.create_task(membership.run(address), name="membership")
        self._membership.add_done_callback(self._membership_ended)

    def hurry_heartbeat(self) -> None:
        """Send the next heartbeat now. May be called from any thread."""
        if self._member is not None:
            with suppress(RuntimeError):  # the loop has closed: the process is ending anyway
                self._loop.call_soon_threadsafe(self._member.hurry_heartbeat)

    def _keep_launcher_metrics(self, metrics: Mapping[str, float]) -> None:
        self.launcher_metrics = metrics

    async def _leave(self) -> None:
        if self._membership is None or self._member is None:
            return
        await cancel_tasks([self._membership])
        if not self._stopped:
            await self._member.send_last_heartbeat()

    @contextmanager
    def loading(self) -> Generator[None]:
        """Mark a block with no work in hand that a drain could save.

        A drain then stops the process instead, whatever it is waiting for."""
        self._loading = True
        if self._drain.is_set():
            self.stop("drained before it started work")
        try:
            yield
        finally:
            self._loading = False

    def drain(self, reason: str) -> None:
        """Finish what is running and take nothing new."""
        if not self._drain.is_set():
            _log.info("draining", reason=reason)
            self._drain.set()
            if self._loading:
                self.stop("it has not started to serve")

    def stop(self, reason: str) -> None:
        """Stop now: cancel the service, and allow it a few seconds to clean up."""
        _log.info("stopping", reason=reason)
        self._stopped = True
        self._drain.set()
        if self._service is not None:
            self._service.cancel()
        _end_in_a_while()

    def _drain_by_signal(self, number: int) -> None:
        if self._loading:
            # The loop alone does not suffice: imports of vendors' packages block it.
            _end_in_a_while()
        with suppress(RuntimeError):  # the loop has closed: the process is ending anyway
            self._loop.call_soon_threadsafe(self.drain, signal.Signals(number).name)

    def _membership_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception() is not None:
            _log.error("membership failed", exc_info=task.exception())
            self.drain("membership failed")


def _end_in_a_while() -> None:
    """Exit the process if it has not ended when the grace period is over."""
    timer = threading.Timer(_STOP_GRACE_S, os._exit, args=(0,))
    timer.daemon = True
    timer.start()
