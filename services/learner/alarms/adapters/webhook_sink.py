"""Alarms as chat messages: POST {"text": ...}, as accepted by Slack, Mattermost and others."""

import asyncio
import os
import queue
import threading
import time

from services.common.adapters.webhook import WebhookError, is_webhook_url, post_json
from services.common.rpc.errors import ConfigError
from services.common.telemetry.log import get_logger
from services.common.text.redaction import add_secret
from services.learner.alarms.types import Alarm

_log = get_logger(__name__)
_TIMEOUT_S = 5.0
_TRIES = 5
_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 30.0


def webhook_url(configured: str) -> str:
    """Return the URL, or the content of the named variable; logs mask it from now on.

    Raises ConfigError."""
    url = configured
    if configured.startswith("$"):
        # Removed, because a tracker's child processes inherit our environment.
        url = os.environ.pop(configured[1:], "")
        if not is_webhook_url(url):
            raise ConfigError(
                f"learner.alarms.webhook: the environment variable {configured[1:]} holds no"
                " http(s) URL; set it, or leave the key out"
            )
    add_secret(url)
    return url


class WebhookAlarmSink:
    """Sends from its own thread, with retries. Implements `AlarmSink`.

    A server that hangs, refuses or is unreachable costs messages, never time: messages that
    find the queue full or run out of retries are counted, and the loss is logged once."""

    def __init__(
        self,
        url: str,
        run_id: str,
        *,
        capacity: int = 64,
        timeout_s: float = _TIMEOUT_S,
        first_pause_s: float = _FIRST_PAUSE_S,
        close_s: float = 10.0,
    ) -> None:
        self._url = url
        self._run_id = run_id
        self._timeout_s = timeout_s
        self._first_pause_s = first_pause_s
        self._close_s = close_s
        self._queue: queue.Queue[str | None] = queue.Queue(capacity)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._send_queued, name="webhook", daemon=True)
        self._thread.start()
        self._failing = False
        self.dropped = 0

    def send_alarm(self, alarm: Alarm) -> None:
        try:
            self._queue.put_nowait(f"[{self._run_id}] {alarm.text}")
        except queue.Full:
            self._count_lost("the queue is full")

    def close(self) -> None:
        """Try each queued message once more."""
        self._closing.set()
        deadline = time.monotonic() + self._close_s
        try:
            self._queue.put(None, timeout=self._close_s)
        except queue.Full:
            self._count_lost("the run ended before it was sent")
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self.dropped:
            _log.warning("alarms did not reach the webhook", messages=self.dropped)

    def _send_queued(self) -> None:
        while (text := self._queue.get()) is not None:
            self._post_with_retries(text)

    def _post_with_retries(self, text: str) -> None:
        pause_s = self._first_pause_s
        for left in reversed(range(_TRIES)):
            try:
                asyncio.run(post_json(self._url, {"text": text}, timeout_s=self._timeout_s))
            except WebhookError as error:
                if not error.again or not left or self._closing.wait(pause_s):
                    self._count_lost(str(error))
                    return
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            else:
                self._failing = False
                return

    def _count_lost(self, why: str) -> None:
        self.dropped += 1
        if not self._failing:
            _log.warning("the webhook accepts no alarms; they are in the log", error=why)
        self._failing = True
