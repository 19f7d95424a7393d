"""What a gateway shows to Prometheus."""

from typing import TYPE_CHECKING

from services.common import metrics

if TYPE_CHECKING:
    from services.env_gateway.gateway import Gateway

call_seconds = metrics.seconds_histogram(
    "flotilla_tool_call_seconds", "From a new tool call to its answer", "env", "outcome"
)
open_seconds = metrics.seconds_histogram(
    "flotilla_episode_open_seconds", "From the request to READY or FAILED", "env"
)
_ENV = ("env",)


def show(gateway: "Gateway") -> None:
    """Everything that the gateway counts or knows at this moment."""
    counts, admission = gateway.counts, gateway.admission
    states = gateway.book.counts()
    episodes = {
        (env, state): float(n) for env, by_state in states.items() for state, n in by_state.items()
    }
    limits = {(env,): float(admission.limit(env)) for env in {*states, *counts.calls}}
    grades = {(env,): float(n) for env, n in counts.grades.items()}
    families = [
        metrics.gauge("flotilla_episodes", "Open episodes", ("env", "state"), episodes),
        metrics.gauge("flotilla_episode_limit", "Episodes at once", _ENV, limits),
        metrics.gauge(
            "flotilla_episode_limit_all",
            "Episodes at once, all environments",
            (),
            {(): float(admission.max_episodes)},
        ),
        metrics.gauge("flotilla_episodes_held", "Places taken", (), {(): float(admission.held)}),
        metrics.gauge(
            "flotilla_episodes_waiting", "Episodes in the queue", (), {(): float(admission.waiting)}
        ),
        metrics.counter("flotilla_grades", "Known grades", _ENV, grades),
        metrics.counter(
            "flotilla_no_grades", "Unknown grades", ("env", "reason"), dict(counts.no_grade_reasons)
        ),
    ]
    metrics.show("env_gateway", families)
