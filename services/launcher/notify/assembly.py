"""Assembly of the notifier, its outbox, and the delivery of its letters."""

from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from services.common.concurrency import running_tasks
from services.launcher.notify.delivery import DeliveryWorker
from services.launcher.notify.notifier import Notifier
from services.launcher.notify.outbox import DeliveryTarget, Outbox
from services.launcher.notify.sinks import Sink
from services.launcher.store.ledger import Ledger


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
