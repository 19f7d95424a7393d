"""Gates with a rate, for a control plane's work: creations, deletions and grades."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from services.common.deadlines import loop_time
from services.env_gateway.config.gateway import EnvGatewayConfig
from services.env_gateway.limits.adaptive_concurrency import AdaptiveLimit
from services.env_gateway.limits.backend_health import RequestObserver, UsualTime
from services.env_gateway.limits.capacity_gates import Gate

# A floor: against refusals at random, rather than by overload, a lower limit does not help.
_LEAST_GRADING = 4


class TokenBucket:
    """Token bucket: at most `burst` at once and `rate` a second in the long run."""

    def __init__(self, *, rate: float, burst: int) -> None:
        self._rate = rate
        self._burst = float(burst)
        self._tokens = float(burst)
        self._filled_at: float | None = None

    def take_token(self, now: float) -> float:
        """Take one token; return the seconds to wait before using it."""
        if self._filled_at is not None:
            gained = (now - self._filled_at) * self._rate
            self._tokens = min(self._burst, self._tokens + gained)
        self._filled_at = now
        self._tokens -= 1
        return max(0.0, -self._tokens / self._rate)


class PacedGate:
    """Gate for requests to one backend, with two waits: for a place among those in flight,
    which adapt to the backend's capacity, and for its request rate."""

    def __init__(self, gate: Gate, rate: TokenBucket) -> None:
        self.gate = gate
        self._rate = rate

    @asynccontextmanager
    async def hold_place(
        self, run_id: str, until: float, *, kind: str = "", instance_id: str = ""
    ) -> AsyncGenerator[None]:
        """Hold a place while the body runs. Raises NoPlaceError at `until`."""
        entry = self.gate.hold_place(run_id, until, kind=kind, instance_id=instance_id)
        async with entry as passage:
            wait_s = self._rate.take_token(loop_time())
            if wait_s > 0:
                await asyncio.sleep(wait_s)
            passage.mark_sent()
            yield


def creation_gate(config: EnvGatewayConfig) -> PacedGate:
    return _instance_gate(config, config.open_timeout_s)


def deletion_gate(config: EnvGatewayConfig) -> PacedGate:
    """Make a gate for deletions alone, so that they do not wait behind creations."""
    return _instance_gate(config, config.close_timeout_s)


def _instance_gate(config: EnvGatewayConfig, timeout_s: float) -> PacedGate:
    limits = config.limits
    gate = Gate(
        AdaptiveLimit(start=limits.start_creating, ceiling=limits.max_creating),
        # A machine that is not there yet is the control plane's concern.
        observer=RequestObserver(UsualTime.within_timeout(config.breaker, timeout_s)),
        weight_of=config.weight_of,
    )
    return PacedGate(gate, TokenBucket(rate=limits.creates_per_s, burst=limits.creates_burst))


def grade_gate(config: EnvGatewayConfig, *, apart: bool) -> PacedGate:
    limits = config.limits
    usual = UsualTime.within_timeout(config.breaker, config.verifiers.timeout_s)
    gate = Gate(
        AdaptiveLimit(start=limits.start_grading, ceiling=limits.max_grading, least=_LEAST_GRADING),
        observer=RequestObserver(usual, apart=apart),
        weight_of=config.weight_of,
    )
    return PacedGate(gate, TokenBucket(rate=limits.grades_per_s, burst=limits.grades_burst))
