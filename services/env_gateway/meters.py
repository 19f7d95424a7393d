"""What a gateway shows to Prometheus."""

import asyncio
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from prometheus_client.core import Metric

from services.common import metrics
from services.env_gateway import overview
from services.env_gateway.adaptive import BreakerState
from services.env_gateway.session import Answer

if TYPE_CHECKING:
    from services.env_gateway.gateway import Gateway

_call_seconds = metrics.seconds_histogram(
    "flotilla_tool_call_seconds",
    "From a new tool call to its answer: waiting for its turn (queue), with the environment"
    " (upstream), in all",
    *("env", "outcome", "phase"),
)
open_seconds = metrics.seconds_histogram(
    "flotilla_episode_open_seconds",
    "From the request to READY or FAILED: queued, provisioning, warming, and all",
    *("env", "phase"),
)
_lag_seconds = metrics.seconds_histogram(
    "flotilla_event_loop_lag_seconds", "How late the event loop wakes what is due"
)
# "ok", or the kind of error: throttled, bad_gateway, timeout, ...
attempted = metrics.event_counter(
    "flotilla_upstream_attempts", "Tool calls as they were sent, retries included", "env", "result"
)
_LAG_PERIOD_S = 0.25
_ENV = ("env",)
_BREAKER = {BreakerState.CLOSED: 0.0, BreakerState.HALF_OPEN: 1.0, BreakerState.OPEN: 2.0}


def called(env_key: str, answer: Answer) -> None:
    """A call has been answered, for the first time."""
    outcome = answer.outcome.value
    _call_seconds(env_key, outcome, "queue")(answer.queue_s)
    _call_seconds(env_key, outcome, "upstream")(answer.upstream_s)
    _call_seconds(env_key, outcome, "all")(answer.queue_s + answer.upstream_s)


async def watch_loop() -> None:
    """Measure the event loop's lag, for ever."""
    loop = asyncio.get_running_loop()
    while True:
        due = loop.time() + _LAG_PERIOD_S
        await asyncio.sleep(_LAG_PERIOD_S)
        _lag_seconds()(max(0.0, loop.time() - due))


def show(gateway: "Gateway") -> None:
    """Everything that the gateway counts or knows at this moment."""
    families = [*_episodes(gateway), *_limits(gateway), *_counted(gateway)]
    metrics.show("env_gateway", families)


def _episodes(gateway: "Gateway") -> Iterator[Metric]:
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


def _limits(gateway: "Gateway") -> Iterator[Metric]:
    limiters = overview.limiters(gateway)
    labels = ("limiter", "of")
    for name, text, values in (
        ("limit", "At most so many at once", [one.limit for one in limiters]),
        ("inflight", "Places taken", [one.in_flight for one in limiters]),
        ("queue", "Waiting for a place", [one.waiting for one in limiters]),
    ):
        pairs = zip(limiters, values, strict=True)
        family = {(one.name, one.of): float(value) for one, value in pairs}
        yield metrics.gauge(f"flotilla_limiter_{name}", text, labels, family)
    breakers = {(env,): _BREAKER[state] for env, state in overview.breakers(gateway).items()}
    yield metrics.gauge(
        "flotilla_breaker_state", "0 closed, 1 half open, 2 open: no calls", _ENV, breakers
    )
    tokens = {(): gateway.caller.budget.tokens}
    yield metrics.gauge("flotilla_retry_budget_tokens", "Retries that may be made", (), tokens)


def _counted(gateway: "Gateway") -> Iterator[Metric]:
    counts = gateway.counts
    for name, text, by_env in (
        ("flotilla_grades", "Known grades", counts.grades),
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
