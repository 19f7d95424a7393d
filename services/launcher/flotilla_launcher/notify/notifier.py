"""Notifier: observes runs and puts messages for people into the outbox."""

import asyncio
import json
import sqlite3
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from flotilla_common.aio.concurrency import running_tasks
from flotilla_common.rpc.errors import ConfigError
from flotilla_common.telemetry.log import get_logger
from flotilla_launcher.config.launcher import parse_launcher
from flotilla_launcher.config.notify import NotifyConfig
from flotilla_launcher.notify import run_facts
from flotilla_launcher.notify.delivery import DeliveryWorker
from flotilla_launcher.notify.message_selection import EVENT_KINDS, select_messages
from flotilla_launcher.notify.outbox import DeliveryTarget, Outbox
from flotilla_launcher.notify.sinks import Sink
from flotilla_launcher.store.ledger import Ledger, RunEvent, StoredRun

_LOOK_S = 5.0
_log = get_logger(__name__)


def targets_of(config: NotifyConfig) -> list[DeliveryTarget]:
    """Return the targets that a run notifies."""
    found: list[DeliveryTarget] = []
    slack = config.slack
    if slack.channel and not config.disable_slack:
        found.append(DeliveryTarget("slack", slack.token_env, slack.api_url, slack.channel))
    if config.webhook_env:
        found.append(DeliveryTarget("webhook", config.webhook_env))
    return found


class Notifier:
    """Observer that turns events of runs into messages. Implements `RunObserver`: a repeated
    event gets no second message.

    The first evaluation comes from the learner's metrics, which arrive with its heartbeats."""

    def __init__(self, runs: Path, store: Ledger, outbox: Outbox, post: DeliveryWorker) -> None:
        self._runs = runs
        self._store = store
        self._outbox = outbox
        self._post = post

    async def __call__(self, stored: StoredRun, event: RunEvent) -> None:
        spec: dict[str, Any] = json.loads(stored.spec_json)
        try:
            config = parse_launcher(spec)
        except ConfigError:
            # Another version of the launcher may have started the run.
            return
        if event.kind not in EVENT_KINDS:
            return
        self._note_evaluation(stored)
        found = select_messages(stored, spec, config, event, self._runs, self._outbox)
        for key, message in found.items():
            targets = targets_of(config.notify)
            self._outbox.put_message(stored.run.run_id, key, message, targets, time.time())
            self._post.wake_up()

    async def watch_metrics(self) -> None:
        """Check the metrics of active runs periodically, until cancelled."""
        while True:
            try:
                self.note_first_evaluations()
            except sqlite3.Error as error:
                # A full disk must not stop the delivery of what is in the outbox.
                _log.warning("the ledger cannot be read", error=str(error))
            await asyncio.sleep(_LOOK_S)

    def note_first_evaluations(self) -> None:
        """Record the first evaluation of each active run."""
        for stored in self._store.list_unended():
            self._note_evaluation(stored)

    def _note_evaluation(self, stored: StoredRun) -> None:
        run_id, metrics = stored.run.run_id, stored.metrics
        if run_facts.FIRST_LAST in metrics:
            self._outbox.note_evaluation(run_id, metrics[run_facts.FIRST_LAST])


@asynccontextmanager
async def open_notifier(
    runs: Path, make_sink: Callable[[DeliveryTarget], Sink]
) -> AsyncGenerator[Notifier]:
    """Open an observer of the runs in this folder and send its messages. The next launcher sends
    those that are left at the end."""
    store = Ledger(runs / "launcher.sqlite")
    outbox = Outbox(runs / "launcher.sqlite")
    post = DeliveryWorker(outbox, make_sink)
    notifier = Notifier(runs, store, outbox, post)
    try:
        async with running_tasks(post.run_delivery(), notifier.watch_metrics()):
            yield notifier
    finally:
        await post.close()
        outbox.close()
        store.close()
