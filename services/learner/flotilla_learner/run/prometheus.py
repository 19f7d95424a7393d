"""Export of a learner's state to Prometheus and of its progress to its watchdog."""

from collections.abc import Callable

from prometheus_client.core import Metric

from flotilla_common.telemetry import metrics
from flotilla_common.telemetry.watchdog import Watchdog
from flotilla_learner.alarms.alarms import Alarms
from flotilla_learner.groups.dispatcher import GroupDispatcher
from flotilla_learner.run.status import LearnerStatus

_BOOK = {
    "flotilla_leased_groups": "Groups that are leased",
    "flotilla_free_slots": "TRAIN groups that may still be leased before the next publication",
    "flotilla_ready_groups": "Complete groups that wait for a step",
}


def make_metrics_exporter(
    dispatcher: GroupDispatcher, status: LearnerStatus, watchdog: Watchdog, alarms: Alarms
) -> Callable[[], None]:
    """Return a function that exports the metrics; call it about once a second."""
    seen = 0

    def export_metrics() -> None:
        nonlocal seen
        received = dispatcher.tally.received_in_all
        if received.total() > seen:
            seen = received.total()
            for stage in ("collect", "evaluate"):
                watchdog.note_progress(stage)
        alarms.judge_tries(dispatcher.tally.streaks, dispatcher.tally.spoiled)
        _export_gauges(dispatcher, status)

    return export_metrics


def _export_gauges(dispatcher: GroupDispatcher, status: LearnerStatus) -> None:
    phase = {(str(status.phase),): 1.0}
    received = dispatcher.tally.received_in_all
    trajectories = {(purpose,): float(count) for purpose, count in received.items()}
    newest = {(name,): value for name, value in status.shown_metrics.items()}
    families = [
        *_make_book_gauges(dispatcher),
        metrics.gauge("flotilla_step", "Optimizer steps done", (), {(): float(status.step)}),
        metrics.gauge("flotilla_steps", "Steps of the run", (), {(): float(status.total_steps)}),
        metrics.gauge("flotilla_phase", "1 for the phase of the run", ("phase",), phase),
        metrics.counter(
            "flotilla_trajectories", "Tries that were journaled", ("purpose",), trajectories
        ),
        metrics.gauge(
            "flotilla_metric", "The newest of metrics.jsonl, by its name there", ("name",), newest
        ),
    ]
    metrics.show("learner", families)


def _make_book_gauges(dispatcher: GroupDispatcher) -> list[Metric]:
    book = dispatcher.book
    sizes = (book.leased_groups, book.free_slots, len(dispatcher.batcher))
    return [
        metrics.gauge(name, help, (), {(): float(size)})
        for (name, help), size in zip(_BOOK.items(), sizes, strict=True)
    ]
