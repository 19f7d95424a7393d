"""Puts together who tells people of runs: the notifier, its outbox, and what takes its letters."""

import asyncio
import os
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

from services.common.errors import ConfigError
from services.launcher.notify.delivery import Post
from services.launcher.notify.notifier import Notifier
from services.launcher.notify.outbox import Outbox, Target
from services.launcher.notify.sinks import Sink
from services.launcher.store.ledger import Store


def sink_of(target: Target) -> Sink:
    """What delivers to a target, with its secret out of this process's environment."""
    secret = os.environ.get(target.secret_env, "")
    # Their HTTP client takes a while to import, and most launchers tell nobody.
    if target.kind == "slack":
        from services.launcher.notify.adapters.slack import Slack

        return Slack(target, secret)
    if target.kind == "webhook":
        from services.launcher.notify.adapters.webhook import Webhook

        return Webhook(target, secret)
    raise ConfigError(f"the outbox has a letter for {target.kind!r}, which is nothing known here")


@asynccontextmanager
async def notifying(runs: Path) -> AsyncGenerator[Notifier]:
    """An observer of the runs in this folder. What it hears is sent meanwhile, and what is left in
    the end by the next launcher."""
    store = Store(runs / "launcher.sqlite")
    outbox = Outbox(runs / "launcher.sqlite")
    post = Post(outbox, sink_of)
    notifier = Notifier(runs, store, outbox, post)
    tasks = [asyncio.create_task(post.run()), asyncio.create_task(notifier.watch())]
    try:
        yield notifier
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await post.close()
        outbox.close()
        store.close()
