"""Gates for requests to instances: tool calls, and probes before an episode is READY."""

from contextlib import AbstractAsyncContextManager

from flotilla_env_gateway.config.gateway import EnvGatewayConfig
from flotilla_env_gateway.episodes.episode_session import Session
from flotilla_env_gateway.limits.adaptive_concurrency import AdaptiveLimit
from flotilla_env_gateway.limits.backend_health import RequestObserver, UsualTime
from flotilla_env_gateway.limits.circuit_breaker import CircuitBreaker
from flotilla_env_gateway.limits.request_gates import Gate, Passage
from flotilla_env_gateway.limits.shared_places import SharedPlaces


class CallGates:
    """Gates for calls in flight, one for each environment. They share the places of all calls, so
    that no environment and no run can hold them all.

    Probes of instances that are not ready yet pass separate gates, because their missing
    answers are no evidence about the others. These gates have half of the places, so that
    calls continue."""

    def __init__(self, config: EnvGatewayConfig) -> None:
        self._config = config
        self.warming_by_env: dict[str, Gate] = {}
        self._shared = SharedPlaces(
            config.limits.max_calls,
            reserved_share=config.limits.reserved_share,
            weight_of=config.weight_of,
        )
        self.by_env: dict[str, Gate] = {}

    def call_gate(self, env_key: str, *, apart: bool = False) -> Gate:
        """Return the environment's gate. `apart`: each instance is a separate machine or
        process."""
        gate = self.by_env.get(env_key)
        if gate is None:
            config = self._config
            breaker = config.breaker
            usual = UsualTime.within_timeout(breaker, config.call_timeout_s)
            gate = self.by_env[env_key] = Gate(
                AdaptiveLimit(
                    start=config.limits.start_calls, ceiling=config.max_calls_of(env_key)
                ),
                CircuitBreaker(
                    window=breaker.window, error_rate=breaker.error_rate, open_s=breaker.open_s
                ),
                shared=self._shared,
                name=env_key,
                observer=RequestObserver(usual, apart=apart),
                weight_of=config.weight_of,
            )
        return gate

    def warming_gate(self, env_key: str, *, apart: bool) -> Gate:
        gate = self.warming_by_env.get(env_key)
        if gate is None:
            config = self._config
            usual = UsualTime.within_timeout(config.breaker, config.open_timeout_s)
            ceiling = max(1, config.max_calls_of(env_key) // 2)
            gate = self.warming_by_env[env_key] = Gate(
                AdaptiveLimit(start=config.limits.start_calls, ceiling=ceiling),
                shared=self._shared,
                name=env_key,
                observer=RequestObserver(usual, apart=apart),
                weight_of=config.weight_of,
            )
        return gate

    def hold_call_place(
        self, session: Session, kind: str, until: float
    ) -> AbstractAsyncContextManager[Passage]:
        """Hold a place for a call; TimeoutError at `until`. Raises BackendError."""
        gate = self.call_gate(session.env_key, apart=session.backend.isolates_instances)
        return _hold_place(gate, session, kind, until)

    def hold_warming_place(
        self, session: Session, kind: str, until: float
    ) -> AbstractAsyncContextManager[Passage]:
        """Hold a place for a request to an instance that may not be ready yet; otherwise like
        `hold_call_place`."""
        gate = self.warming_gate(session.env_key, apart=session.backend.isolates_instances)
        return _hold_place(gate, session, kind, until)


def _hold_place(
    gate: Gate, session: Session, kind: str, until: float
) -> AbstractAsyncContextManager[Passage]:
    instance_id = session.instance.instance_id if session.instance else ""
    return gate.hold_place(session.run_id, until, kind=kind, instance_id=instance_id)
