"""Sees what happens to runs, and puts what people should know of it into the outbox."""

import asyncio
import json
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path

from pydantic import ValidationError

from services.common.log import get_logger
from services.launcher.config.launcher import LauncherConfig
from services.launcher.config.notify import NotifyConfig
from services.launcher.notify import messages, run_facts
from services.launcher.notify.delivery import Post
from services.launcher.notify.messages import Message
from services.launcher.notify.outbox import Outbox, Target
from services.launcher.progress import Alarm
from services.launcher.state import RunState
from services.launcher.store.ledger import Event, Store, StoredRun

# The learner's last word, which the launcher's own says better.
_RUN_FAILED = "run_failed"
_LOOK_S = 5.0
_log = get_logger(__name__)


def targets_of(config: NotifyConfig) -> list[Target]:
    """Whom a run tells."""
    found: list[Target] = []
    slack = config.slack
    if slack.channel and not config.disable_slack:
        found.append(Target("slack", slack.token_env, slack.api_url, slack.channel))
    if config.webhook_env:
        found.append(Target("webhook", config.webhook_env))
    return found


class Notifier:
    """Implements `Observer`: `__call__` may be told of an event again, and keeps one message.

    The first evaluation it sees in the learner's newest metrics, which come with the heartbeats of
    a learner anywhere.
    """

    def __init__(
        self,
        runs: Path,
        store: Store,
        outbox: Outbox,
        post: Post,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._runs = runs
        self._store = store
        self._outbox = outbox
        self._post = post
        self._clock = clock

    async def __call__(self, stored: StoredRun, event: Event) -> None:
        config = _config(stored)
        if config is None or event.kind not in ("state", "cost", "alarm"):
            return
        self._look_at(stored)
        for key, message in self._said(stored, config, event).items():
            self._put(stored.run.run_id, key, message, config)

    async def watch(self) -> None:
        """Look at the metrics of active runs now and then, until cancelled."""
        while True:
            try:
                self.look()
            except sqlite3.Error as error:
                # A disk that is full must not end whoever sends what is there already.
                _log.warning("the ledger cannot be read", error=str(error))
            await asyncio.sleep(_LOOK_S)

    def look(self) -> None:
        """Note first evaluations."""
        for stored in self._store.newest():
            config = None if stored.run.state.ended else _config(stored)
            if config is not None:
                self._look_at(stored)

    def _said(self, stored: StoredRun, config: LauncherConfig, event: Event) -> dict[str, Message]:
        if event.kind == "alarm":
            return _of_alarm(stored, event)
        run_id, key = stored.run.run_id, f"state/{event.number}"
        state = RunState(event.body["state"]) if event.kind == "state" else None
        known = run_facts.facts_of(
            stored,
            config,
            self._runs,
            before=self._outbox.first_evaluation(run_id),
            now=self._clock(),
            with_log=state is RunState.FAILED,
        )
        # A run that is resumed is warned of its limits again.
        limit = f"limit/{stored.begun:.0f}"
        told = {f"{limit}/{name}": said for name, said in messages.of_spending(known).items()}
        if state is not None:
            resumed = self._outbox.begun_before(run_id, key)
            said = messages.of_state(state, known, resumed=resumed)
            told |= {f"{key}/{number}": message for number, message in enumerate(said)}
        return told

    def _look_at(self, stored: StoredRun) -> None:
        run_id, metrics = stored.run.run_id, stored.metrics
        if run_facts.FIRST_LAST in metrics:
            self._outbox.note_evaluation(run_id, metrics[run_facts.FIRST_LAST])

    def _put(self, run_id: str, event: str, message: Message, config: LauncherConfig) -> None:
        self._outbox.put(run_id, event, message, targets_of(config.notify), self._clock())
        self._post.wake()


def _of_alarm(stored: StoredRun, event: Event) -> dict[str, Message]:
    body = dict(event.body)
    if body.pop("change") == "cleared" or body["rule"] == _RUN_FAILED:
        return {}
    message = messages.of_alarm(stored.run.run_id, Alarm(**body))
    return {f"alarm/{event.number}": message}


def _config(stored: StoredRun) -> LauncherConfig | None:
    """Of a run that this launcher did not start it may be one that it does not understand."""
    try:
        return LauncherConfig.model_validate(json.loads(stored.spec_json).get("launcher", {}))
    except (ValidationError, ValueError):
        return None
