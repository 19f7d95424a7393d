"""A program that reports the start and the end of a run to Slack; of N runs, one after the other.

It reports run K in a process that is killed at its K-th step, then in another that is not. A step
is whatever lasts: a write to the ledger, before and behind it, and a request to Slack. Arguments:
folder, URL of the API, N.
"""

import asyncio
import os
import signal
import sys
import time
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

from flotilla_common.adapters.bounded_http import shared_ssl_context
from flotilla_launcher.notify.adapters.slack import SlackSink
from flotilla_launcher.notify.delivery import DeliveryWorker
from flotilla_launcher.notify.messages import Message, MessageKind
from flotilla_launcher.notify.outbox import DeliveryTarget, Letter, Outbox
from tests.launcher.notify.slack_double import CHANNEL_ID, TOKEN


class Countdown:
    """Counts steps, and kills at the last."""

    def __init__(self, steps: int) -> None:
        self._left = steps

    def step(self) -> None:
        self._left -= 1
        if self._left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def around(self, method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def call(*given: Any, **named: Any) -> Any:
            self.step()
            result = method(*given, **named)
            self.step()
            return result

        return call


class MortalSlack(SlackSink):
    """Dies before or behind a request."""

    countdown: Countdown

    async def send_letter(self, letter: Letter) -> str:
        self.countdown.step()
        thread = await super().send_letter(letter)
        self.countdown.step()
        return thread


async def report(folder: Path, url: str, run_id: str, countdown: Countdown) -> None:
    outbox = Outbox(folder / "launcher.sqlite")
    for name in ("put_message", "mark_sending", "mark_sent", "mark_delayed"):
        setattr(outbox, name, countdown.around(getattr(outbox, name)))
    MortalSlack.countdown = countdown
    post = DeliveryWorker(outbox, lambda target: MortalSlack(target, TOKEN), first_pause_s=0.01)
    target = DeliveryTarget("slack", "SLACK_BOT_TOKEN", url, CHANNEL_ID)
    for event, kind in (("state/1/0", MessageKind.STARTED), ("state/9/0", MessageKind.COMPLETED)):
        outbox.put_message(run_id, event, Message(kind, kind.value), [target], time.time())
        await post.deliver_due()
    await post.close()
    outbox.close()


def status_of(folder: Path, url: str, run_id: str, steps: int) -> int:
    """The exit status of a process that reports the run: 0, or that it was killed."""
    child = os.fork()
    if child == 0:
        asyncio.run(report(folder, url, run_id, Countdown(steps)))
        os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status)


def main(folder: Path, url: str, steps: int) -> None:
    shared_ssl_context()
    for step in range(1, steps + 1):
        assert status_of(folder, url, f"run-{step}", step) == -signal.SIGKILL
        assert status_of(folder, url, f"run-{step}", 0) == 0
    assert status_of(folder, url, "run-0", steps + 1) == 0, "there are more steps"


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
