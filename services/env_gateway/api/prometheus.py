"""What a gateway measures as it happens. What it counts or knows anyway is in `overview`."""

import asyncio

from services.common import metrics
from services.env_gateway.episodes.session import Answer

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
# "ok", the kind of error, or "lost" for an instance that ended unheard.
heartbeat = metrics.event_counter(
    "flotilla_heartbeats", "Heartbeats of instances to their backend", "result"
)
_LAG_PERIOD_S = 0.25


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
