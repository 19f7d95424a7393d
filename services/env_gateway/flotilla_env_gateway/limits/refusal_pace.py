"""Pace of requests to a backend that refuses some of them (429). No I/O; the clock is an argument,
in seconds."""

from collections import deque
from dataclasses import dataclass

# An admission shortens the interval, and three refusals undo that.
_SHORTER = 0.8
_LONGER = _SHORTER ** (-1 / 3)
_REPEAT_SHARE = 1 / 8
# The longest interval, or so many of those at which requests are admitted if that is more.
_LONGEST_S, _LONGEST_SHARE = 5.0, 2.0
_KEPT = 64
_FEWEST = 8
# A request is on time if it begins so long after it may, at most.
_LATE_S, _LATE_SHARE = 0.02, 0.25


@dataclass(eq=False, frozen=True, slots=True)
class PacedRequest:
    """A request that has begun, and the interval before it."""

    begun_at: float
    interval_s: float


class RefusalPace:
    """Interval between requests, from none while few are refused to any that a backend demands.

    A refusal comes fast and an answer may take minutes, so a request counts as admitted until it
    is refused. Each admission shortens the interval by a fifth and each refusal lengthens it, so
    that it settles where three of four requests are refused: a backend that admits 3 a second is
    asked about 12 times a second, wherever its limit comes from. One that refuses fewer than three
    of four at random, whatever the rate, is not slowed down at all. After a refusal the next
    request comes after an eighth of the interval, so as not to be late for the next admission.

    Refusals of requests that were in flight together lengthen the interval once: they all show
    that the same interval was too short."""

    def __init__(self, *, fastest_per_s: float) -> None:
        self._shortest_s = 1 / fastest_per_s
        self._interval_s = 0.0
        self._next_at = 0.0
        # The last ones that count as admitted, since all have begun as soon as they might: only
        # then is their rate the backend's, rather than that of whoever asks.
        self._admitted: deque[PacedRequest] = deque(maxlen=_KEPT)
        self._answers: deque[float] = deque(maxlen=_KEPT)

    def blocked_s(self, now: float) -> float:
        """Return how long, in seconds, no request may begin."""
        return max(0.0, self._next_at - now)

    @property
    def admitted_per_s(self) -> float | None:
        """The rate at which the backend admits requests, or None while that is unknown."""
        if len(self._admitted) < _FEWEST:
            return None
        return (len(self._admitted) - 1) / (
            self._admitted[-1].begun_at - self._admitted[0].begun_at
        )

    @property
    def fastest_answer_s(self) -> float:
        """The time of the fastest of the last answers."""
        return min(self._answers, default=0.0)

    def begin_request(self, now: float) -> PacedRequest:
        """Begin a request that is not blocked; pass the returned one to `end_with_refusal`."""
        request = PacedRequest(now, self._interval_s)
        late_at = self._next_at + _LATE_S + _LATE_SHARE * self._interval_s
        if not self._interval_s or now > late_at:
            self._admitted.clear()
        self._admitted.append(request)
        shorter_s = self._interval_s * _SHORTER
        self._interval_s = shorter_s if shorter_s >= self._shortest_s else 0.0
        self._next_at = now + self._interval_s
        return request

    def end_with_refusal(self, request: PacedRequest, now: float) -> None:
        if request in self._admitted:
            self._admitted.remove(request)
        longer_s = max(request.interval_s, self._shortest_s) * _LONGER
        # One that refuses everything for a while is asked often enough to see when it stops.
        per_s = self.admitted_per_s
        longest_s = max(_LONGEST_S, _LONGEST_SHARE / per_s) if per_s else _LONGEST_S
        self._interval_s = min(longest_s, max(self._interval_s, longer_s))
        self._next_at = now + self._interval_s * _REPEAT_SHARE

    def end_with_answer(self, seconds: float) -> None:
        """End a request that was answered after `seconds`."""
        self._answers.append(seconds)
