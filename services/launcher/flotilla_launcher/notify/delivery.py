"""Delivery of letters from the outbox to their targets, with retries."""

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress

from flotilla_common.aio.concurrency import wait_for_event
from flotilla_common.telemetry.log import get_logger
from flotilla_common.text.redaction import redact
from flotilla_launcher.control.background_loops import run_safely
from flotilla_launcher.notify.outbox import DeliveryTarget, Letter, LetterState, Outbox
from flotilla_launcher.notify.sinks import DeliveryDelayedError, DeliveryRefusedError, Sink

_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 300.0
# A refused letter is retried: someone may have fixed the cause elsewhere.
_REFUSED_PAUSE_S = 600.0
_GIVE_UP_S = 7 * 24 * 3600.0
_LOOK_S = 5.0
_log = get_logger(__name__)


class DeliveryWorker:
    """Worker that sends the letters that are due. An unreachable, slow or wrong target delays no
    other."""

    def __init__(
        self,
        outbox: Outbox,
        make: Callable[[DeliveryTarget], Sink],
        *,
        clock: Callable[[], float] = time.time,
        first_pause_s: float = _FIRST_PAUSE_S,
    ) -> None:
        self._outbox = outbox
        self._make = make
        self._clock = clock
        self._first_pause_s = first_pause_s
        self._sinks: dict[DeliveryTarget, Sink] = {}
        self._resting: dict[DeliveryTarget, float] = {}
        self._complained: set[tuple[DeliveryTarget, str]] = set()
        self._wake = asyncio.Event()

    def wake_up(self) -> None:
        """Wake the worker: there is something new in the outbox."""
        self._wake.set()

    async def run_delivery(self) -> None:
        """Send until cancelled."""
        while True:
            self._wake.clear()
            await run_safely(self.deliver_due, "delivering messages")
            # Not wait_for: it swallows a cancellation that comes together with the event.
            await wait_for_event(self._wake, self._seconds_to_next())

    async def deliver_due(self) -> None:
        """Send all that is due now, to all targets at once, in order for each."""
        while letters := [letter for letter in self._outbox.list_heads() if self._is_due(letter)]:
            targets: dict[DeliveryTarget, list[Letter]] = {letter.target: [] for letter in letters}
            for letter in letters:
                targets[letter.target].append(letter)
            await asyncio.gather(*(self._deliver_in_order(found) for found in targets.values()))

    async def close(self, grace_s: float = 5.0) -> None:
        """Try once more to send what is due, within the grace; leave the rest to the next
        launcher."""
        with suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                await self.deliver_due()
        await asyncio.gather(*(sink.close() for sink in self._sinks.values()))
        self._sinks.clear()

    def _is_due(self, letter: Letter) -> bool:
        now = self._clock()
        return letter.due <= now and self._resting.get(letter.target, 0.0) <= now

    def _seconds_to_next(self) -> float:
        now = self._clock()
        dues = [
            max(x.due, self._resting.get(x.target, 0.0)) - now for x in self._outbox.list_heads()
        ]
        return max(0.01, min([_LOOK_S, *dues]))

    async def _deliver_in_order(self, letters: list[Letter]) -> None:
        for letter in letters:
            if self._is_due(letter):
                await self._deliver_one(letter)

    async def _deliver_one(self, letter: Letter) -> None:
        now = self._clock()
        if now - letter.created > _GIVE_UP_S:
            _log.warning("a message was never delivered", run_id=letter.run_id, key=letter.key)
            self._outbox.mark_given_up(letter, "too old")
            return
        unsure = letter.state is LetterState.SENDING
        try:
            thread = await self._send_letter(letter)
        except DeliveryDelayedError as error:
            pause_s = max(error.after_s, self._backoff_s(letter))
            if error.after_s:
                self._resting[letter.target] = now + error.after_s
            unsure = unsure or error.unsure
            self._outbox.mark_delayed(letter, now + pause_s, str(error), unsure=unsure)
            self._complain_once(letter.target, str(error), fatal=False)
        except DeliveryRefusedError as error:
            self._resting[letter.target] = now + _REFUSED_PAUSE_S
            self._outbox.mark_delayed(letter, now + _REFUSED_PAUSE_S, str(error), unsure=unsure)
            self._complain_once(letter.target, str(error), fatal=True)
        else:
            self._outbox.mark_sent(letter, thread)
            self._complained = {known for known in self._complained if known[0] != letter.target}

    async def _send_letter(self, letter: Letter) -> str:
        """Send a letter, unless an earlier attempt turns out to have arrived."""
        sink = self._sinks.get(letter.target)
        if sink is None:
            sink = self._sinks[letter.target] = self._make(letter.target)
        if letter.state is LetterState.SENDING:
            thread = await sink.find_thread(letter)
            if thread is not None:
                return thread
        self._outbox.mark_sending(letter)
        return await sink.send_letter(letter)

    def _backoff_s(self, letter: Letter) -> float:
        return min(_LONGEST_PAUSE_S, self._first_pause_s * 2 ** min(letter.attempts, 16))

    def _complain_once(self, target: DeliveryTarget, problem: str, *, fatal: bool) -> None:
        """Log each problem once, until a letter gets through."""
        if (target, problem) in self._complained:
            return
        self._complained.add((target, problem))
        log_problem = _log.error if fatal else _log.warning
        details = {"sink": target.kind, "channel": target.channel}
        log_problem("messages wait", **details, error=redact(problem))
