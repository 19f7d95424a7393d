"""The gateway's current state, for GetStatus and for Prometheus."""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

from prometheus_client.core import Metric

from flotilla.env_gateway.v1 import episode_service_pb2 as pb
from flotilla_common.rpc.deadlines import loop_time
from flotilla_common.telemetry import metrics
from flotilla_env_gateway.api.alarms import GatewayAlarms
from flotilla_env_gateway.episodes.gateway import Gateway
from flotilla_env_gateway.limits.circuit_breaker import BreakerState
from flotilla_env_gateway.limits.request_gates import Gate
from flotilla_env_gateway.ports import HeartbeatLateness

_PERIOD_S = 1.0
_ENV = ("env",)
_LAG_PERIOD_S = 0.25
_BREAKER = {BreakerState.CLOSED: 0.0, BreakerState.HALF_OPEN: 1.0, BreakerState.OPEN: 2.0}

_lag_seconds = metrics.seconds_histogram(
    "flotilla_event_loop_lag_seconds", "How late the event loop wakes what is due"
)


def list_limiters(gateway: Gateway) -> list[pb.LimiterStatus]:
    admission, gates = gateway.admission, gateway.caller.gates
    env_keys = sorted({*gateway.book.count_by_state(), *gateway.counts.env_keys()})
    return [
        _make_limiter(
            "episodes", "", admission.max_episodes, admission.held_places, admission.waiting
        ),
        *(
            _make_limiter("episodes", env, admission.limit_of(env), *admission.usage_of(env))
            for env in env_keys
        ),
        *_gate_limiters("calls", gates.by_env),
        *_gate_limiters("warmups", gates.warming_by_env),
        *_gate_limiters("creations", gateway.opener.creations),
        *_gate_limiters("deletions", gateway.closer.deletions),
        *_gate_limiters("grades", gateway.grader.gates),
        *(
            _make_limiter("warm_servers", pool.name, pool.size, pool.ready, 0)
            for backend in gateway.backends.values()
            for pool in backend.warm_pools
        ),
    ]


def _make_limiter(name: str, of: str, limit: int, in_flight: int, waiting: int) -> pb.LimiterStatus:
    return pb.LimiterStatus(name=name, of=of, limit=limit, in_flight=in_flight, waiting=waiting)


def _gate_limiters(name: str, gates: Mapping[str, Gate]) -> Iterator[pb.LimiterStatus]:
    for of, gate in sorted(gates.items()):
        yield _make_limiter(name, of, gate.limit, gate.in_flight, gate.waiting)


def breaker_states(gateway: Gateway) -> dict[str, BreakerState]:
    """Return the breaker's state of each environment that has had a tool call."""
    return {env: gate.breaker_state for env, gate in gateway.caller.gates.by_env.items()}


async def measure_loop_lag() -> None:
    """Measure the event loop's lag forever."""
    loop = asyncio.get_running_loop()
    while True:
        due = loop.time() + _LAG_PERIOD_S
        await asyncio.sleep(_LAG_PERIOD_S)
        _lag_seconds()(max(0.0, loop.time() - due))


async def export_metrics_forever(gateway: Gateway) -> None:
    """Export the gateway's counters and state to Prometheus forever."""
    while True:
        families = [
            *_episode_metrics(gateway),
            *_heartbeat_metrics(gateway),
            *_limit_metrics(gateway),
            *_counter_metrics(gateway),
        ]
        metrics.show("env_gateway", families)
        await asyncio.sleep(_PERIOD_S)


async def update_alarms_forever(
    gateway: Gateway, alarms: GatewayAlarms, changed: Callable[[], None]
) -> None:
    """Raise and clear alarms forever; call `changed` after each change."""
    while True:
        changes = gateway.opener.tool_watch.changes
        if alarms.update_alarms(gateway.backends, changes, loop_time()):
            changed()
        await asyncio.sleep(_PERIOD_S)


def _find_lateness(gateway: Gateway) -> dict[str, HeartbeatLateness]:
    backends = gateway.backends.items()
    return {name: found for name, one in backends if (found := one.lateness) is not None}


def _episode_metrics(gateway: Gateway) -> Iterator[Metric]:
    backend_of, closer = gateway.config.backend_of, gateway.closer
    episodes = {
        (env, backend_of(env), state): float(n)
        for env, by_state in gateway.book.count_by_state().items()
        for state, n in by_state.items()
    }
    yield metrics.gauge("flotilla_episodes", "Open episodes", ("env", "backend", "state"), episodes)
    backlog = {(): float(closer.pending)}
    yield metrics.gauge("flotilla_delete_backlog", "Instances being deleted", (), backlog)
    reclaimed = {(): float(closer.reclaimed)}
    yield metrics.counter(
        "flotilla_orphans_reclaimed", "Instances of a predecessor that were deleted", (), reclaimed
    )


def _heartbeat_metrics(gateway: Gateway) -> Iterator[Metric]:
    late = {(name,): float(found.late) for name, found in _find_lateness(gateway).items()}
    text = "Instances that end soon unless their backend confirms to have heard of them"
    yield metrics.gauge("flotilla_heartbeats_late", text, ("backend",), late)


def fewest_retry_tokens(gateway: Gateway) -> float:
    """Return how many retries the environment with the fewest may make."""
    tokens = [budget.tokens for budget in gateway.caller.budgets.values()]
    return min(tokens, default=gateway.config.retry.budget_cap)


def _limit_metrics(gateway: Gateway) -> Iterator[Metric]:
    bounds = list_limiters(gateway)
    labels = ("limiter", "of")
    for name, text, values in (
        ("limit", "At most so many at once", [one.limit for one in bounds]),
        ("inflight", "Places taken", [one.in_flight for one in bounds]),
        ("queue", "Waiting for a place", [one.waiting for one in bounds]),
    ):
        pairs = zip(bounds, values, strict=True)
        family = {(one.name, one.of): float(value) for one, value in pairs}
        yield metrics.gauge(f"flotilla_limiter_{name}", text, labels, family)
    states = {(env,): _BREAKER[state] for env, state in breaker_states(gateway).items()}
    yield metrics.gauge(
        "flotilla_breaker_state", "0 closed, 1 half open, 2 open: no calls", _ENV, states
    )
    tokens = {(env,): budget.tokens for env, budget in gateway.caller.budgets.items()}
    yield metrics.gauge("flotilla_retry_budget_tokens", "Retries that may be made", _ENV, tokens)


def _counter_metrics(gateway: Gateway) -> Iterator[Metric]:
    counts = gateway.counts
    for name, text, by_env in (
        ("flotilla_grades", "Known grades", counts.grades),
        (
            "flotilla_grade_suspects",
            "Grades of results the policy may have written",
            counts.suspects,
        ),
        ("flotilla_images", "Images that tools answered", counts.images),
        ("flotilla_episodes_tainted", "Episodes with a call of unknown outcome", counts.tainted),
        ("flotilla_lease_expiries", "Episodes that were not renewed, or too long", counts.expired),
    ):
        yield metrics.counter(name, text, _ENV, {(env,): float(n) for env, n in by_env.items()})
    yield _counter_by_kind(
        "flotilla_no_grades", "Unknown grades", "reason", counts.no_grade_reasons
    )
    yield _counter_by_kind(
        "flotilla_content_bytes", "What tools answered", "kind", counts.content_bytes
    )


def _counter_by_kind(name: str, text: str, label: str, values: Counter[tuple[str, ...]]) -> Metric:
    labels: Sequence[str] = ("env", label)
    return metrics.counter(name, text, labels, {key: float(n) for key, n in values.items()})
