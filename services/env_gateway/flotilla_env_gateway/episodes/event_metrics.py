"""Metrics of episodes, measured as events happen. `api/status.py` exports those read from the
gateway's counters and state."""

from flotilla_common.telemetry import metrics
from flotilla_env_gateway.ports import CallAnswer

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
# "ok", or the kind of error: throttled, bad_gateway, timeout, ...
upstream_attempts = metrics.event_counter(
    "flotilla_upstream_attempts", "Tool calls as they were sent, retries included", "env", "result"
)


def observe_call(env_key: str, answer: CallAnswer) -> None:
    """Observe a call at its first answer."""
    outcome = answer.outcome.value
    _call_seconds(env_key, outcome, "queue")(answer.queue_s)
    _call_seconds(env_key, outcome, "upstream")(answer.upstream_s)
    _call_seconds(env_key, outcome, "all")(answer.queue_s + answer.upstream_s)
