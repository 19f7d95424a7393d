"""What a gateway knows of itself at this moment, for its status and for Prometheus."""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from prometheus_client.core import Metric

from services.common import metrics
from services.env_gateway.api.alarms import LateHeartbeats, Lateness
from services.env_gateway.episodes.gateway import Gateway
from services.env_gateway.limits.adaptive_concurrency import BreakerState
from services.env_gateway.limits.gates import Gate
from services.env_gateway.limits.rate_gates import PacedGate
from services.env_gateway.ports import HeartbeatBackend

_PERIOD_S = 1.0
_ENV = ("env",)
_BREAKER = {BreakerState.CLOSED: 0.0, BreakerState.HALF_OPEN: 1.0, BreakerState.OPEN: 2.0}


@dataclass(frozen=True, slots=True)
class Limiter:
    """`of` is the environment of `episodes`, `calls` and `warmups`, or empty for all of them, and
    the backend of `creations`, `deletions` and `grades`."""

    name: str
    of: str
    limit: int
    in_flight: int
    waiting: int


def limiters(gateway: Gateway) -> list[Limiter]:
    admission, gates = gateway.admission, gateway.caller.gates
    env_keys = sorted({*gateway.book.counts(), *gateway.counts.env_keys()})
    return [
        Limiter("episodes", "", admission.max_episodes, admission.held, admission.waiting),
        *(
            Limiter("episodes", env, admission.limit(env), *admission.use_of(env))
            for env in env_keys
        ),
        *_of_gates("calls", gates.by_env),
        *_of_gates("warmups", gates.warming_by_env),
        *_of_paced("creations", gateway.opener.creations),
        *_of_paced("deletions", gateway.closer.deletions),
        *_of_paced("grades", gateway.gradings),
    ]


def _of_paced(name: str, paced: Mapping[str, PacedGate]) -> Iterator[Limiter]:
    return _of_gates(name, {backend: one.gate for backend, one in paced.items()})


def _of_gates(name: str, gates: Mapping[str, Gate]) -> Iterator[Limiter]:
    for of, gate in sorted(gates.items()):
        yield Limiter(name, of, gate.limit, gate.in_flight, gate.waiting)


def breakers(gateway: Gateway) -> dict[str, BreakerState]:
    """By environment of which a tool has been called."""
    return {env: gate.breaker for env, gate in gateway.caller.gates.by_env.items()}


async def keep_showing(gateway: Gateway) -> None:
    """Show to Prometheus all that the gateway counts or knows, for ever."""
    while True:
        families = [
            *_episodes(gateway),
            *_heartbeats(gateway),
            *_limits(gateway),
            *_counted(gateway),
        ]
        metrics.show("env_gateway", families)
        await asyncio.sleep(_PERIOD_S)


async def keep_alarms(
    gateway: Gateway, alarms: LateHeartbeats, changed: Callable[[], None]
) -> None:
    """Raise and clear alarms for ever; `changed` is called when one was."""
    while True:
        backends = gateway.backends.items()
        found = {
            name: Lateness(one.late, one.beating, one.last_failure)
            for name, one in backends
            if isinstance(one, HeartbeatBackend)
        }
        if alarms.look(found, asyncio.get_running_loop().time()):
            changed()
        await asyncio.sleep(_PERIOD_S)


def _episodes(gateway: Gateway) -> Iterator[Metric]:
    backend_of, closer = gateway.config.backend_of, gateway.closer
    episodes = {
        (env, backend_of(env), state): float(n)
        for env, by_state in gateway.book.counts().items()
        for state, n in by_state.items()
    }
    yield metrics.gauge("flotilla_episodes", "Open episodes", ("env", "backend", "state"), episodes)
    backlog = {(): float(closer.pending)}
    yield metrics.gauge("flotilla_delete_backlog", "Instances being deleted", (), backlog)
    reclaimed = {(): float(closer.reclaimed)}
    yield metrics.counter(
        "flotilla_orphans_reclaimed", "Instances of a predecessor that were deleted", (), reclaimed
    )


def _heartbeats(gateway: Gateway) -> Iterator[Metric]:
    backends = gateway.backends.items()
    late = {(name,): float(one.late) for name, one in backends if isinstance(one, HeartbeatBackend)}
    text = "Instances that end soon unless their backend confirms to have heard of them"
    yield metrics.gauge("flotilla_heartbeats_late", text, ("backend",), late)


def _limits(gateway: Gateway) -> Iterator[Metric]:
    bounds = limiters(gateway)
    labels = ("limiter", "of")
    for name, text, values in (
        ("limit", "At most so many at once", [one.limit for one in bounds]),
        ("inflight", "Places taken", [one.in_flight for one in bounds]),
        ("queue", "Waiting for a place", [one.waiting for one in bounds]),
    ):
        pairs = zip(bounds, values, strict=True)
        family = {(one.name, one.of): float(value) for one, value in pairs}
        yield metrics.gauge(f"flotilla_limiter_{name}", text, labels, family)
    states = {(env,): _BREAKER[state] for env, state in breakers(gateway).items()}
    yield metrics.gauge(
        "flotilla_breaker_state", "0 closed, 1 half open, 2 open: no calls", _ENV, states
    )
    tokens = {(): gateway.caller.budget.tokens}
    yield metrics.gauge("flotilla_retry_budget_tokens", "Retries that may be made", (), tokens)


def _counted(gateway: Gateway) -> Iterator[Metric]:
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
    yield _by_kind("flotilla_no_grades", "Unknown grades", "reason", counts.no_grade_reasons)
    yield _by_kind("flotilla_content_bytes", "What tools answered", "kind", counts.content_bytes)


def _by_kind(name: str, text: str, label: str, values: Counter[tuple[str, ...]]) -> Metric:
    labels: Sequence[str] = ("env", label)
    return metrics.counter(name, text, labels, {key: float(n) for key, n in values.items()})
