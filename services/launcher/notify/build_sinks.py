"""Assembly of the notifier, its outbox, and the delivery of its letters."""

import os
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

from services.common.concurrency import running_tasks
from services.common.errors import ConfigError
from services.launcher.notify.delivery import DeliveryWorker
from services.launcher.notify.notifier import Notifier
from services.launcher.notify.outbox import DeliveryTarget, Outbox
from services.launcher.notify.sinks import Sink
from services.launcher.store.ledger import Ledger


def make_sink(target: DeliveryTarget) -> Sink:
    """Make the sink that delivers to a target, with its secret from this process's environment."""
    secret = os.environ.get(target.secret_env, "")
    # Their HTTP client takes a while to import, and most launchers tell nobody.
    if target.kind == "slack":
        from services.launcher.notify.adapters.slack import SlackSink

        return SlackSink(target, secret)
    if target.kind == "webhook":
        from services.launcher.notify.adapters.webhook import WebhookSink

        return WebhookSink(target, secret)
    raise ConfigError(f"the outbox has a letter for {target.kind!r}, which is nothing known here")


@asynccontextmanager
async def open_notifier(runs: Path) -> AsyncGenerator[Notifier]:
    """Open an observer of the runs in this folder. Its messages are sent meanwhile; those left
    in the end are for the next launcher."""
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
