"""Limits on the requests in flight, fixed and adaptive. No I/O, no clock."""

_FACTOR = 0.7


class ConcurrencyLimit:
    """Fixed limit on the requests in flight. Each request that begins ends with one of the last
    three methods."""

    def __init__(self, limit: float) -> None:
        self._limit = float(limit)
        self.in_flight = 0

    @property
    def limit(self) -> int:
        return int(self._limit)

    @property
    def is_full(self) -> bool:
        return self.in_flight >= self.limit

    def begin_request(self) -> int:
        """Begin a request; pass the returned number to `end_with_overload`."""
        self.in_flight += 1
        return 0

    def end_with_success(self) -> None:
        self.in_flight -= 1

    def end_with_overload(self, begun: int) -> None:
        self.in_flight -= 1

    def end_without_evidence(self) -> None:
        """End a request that shows neither success nor overload."""
        self.in_flight -= 1


class AdaptiveLimit(ConcurrencyLimit):
    """Limit on the requests in flight by additive increase, multiplicative decrease (Chiu and
    Jain, 1989).

    While the limit is in use each success adds 1 / limit, and 1 until the first overload
    (slow start, RFC 5681). An overload multiplies it by 0.7, but at most once for all
    requests that were in flight together: those that began before the limit fell fail for
    the same reason."""

    def __init__(self, *, start: int, ceiling: int) -> None:
        super().__init__(min(start, ceiling))
        self._ceiling = ceiling
        self._falls = 0

    def begin_request(self) -> int:
        self.in_flight += 1
        return self._falls

    def end_with_success(self) -> None:
        used = 2 * self.in_flight >= self.limit
        self.in_flight -= 1
        if used:
            step = 1.0 / self._limit if self._falls else 1.0
            self._limit = min(self._ceiling, self._limit + step)

    def end_with_overload(self, begun: int) -> None:
        self.in_flight -= 1
        if begun == self._falls:
            self._falls += 1
            self._limit = max(1.0, self._limit * _FACTOR)
