"""Prometheus metrics of a rollout worker."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from prometheus_client.core import Metric

from flotilla_common.rpc.deadlines import loop_time
from flotilla_common.telemetry import metrics

if TYPE_CHECKING:
    from flotilla_rollout.work.service_use import ServiceUse
    from flotilla_rollout.work.worker import Worker
    from flotilla_rollout.work.worker_totals import WorkerTotals


BURN_IN_HELP = {
    "burn_in_seconds": "Duration of the burn-in",
    "peak_memory_bytes": "Most memory of the worker's own process, as the burn-in ended",
    "engine_peak_memory_bytes": "Most memory of the engine's processes together, then",
    "engine_peak_gpu_bytes": "Most memory in use on the fullest of the engine's GPUs, then",
}


def show_worker_metrics(
    worker: "Worker",
    policy_version: int,
    burn_in: Mapping[str, float],
    use: "ServiceUse | None" = None,
) -> None:
    """Show the worker's current counters and state; -1 stands for no policy. With `use` the engine
    is a service that is paid for."""
    gauges = {
        "flotilla_running_attempts": ("Attempts under way", worker.running_attempts),
        "flotilla_held_leases": ("Leases held", worker.lease_count),
        "flotilla_policy_version": ("Version of the weights that are served", policy_version),
    }
    gauges |= {f"flotilla_{name}": (BURN_IN_HELP[name], burn_in[name]) for name in burn_in}
    families = _make_counters(worker.totals)
    if use is not None:
        help = "How long the service that samples has been answering nobody"
        gauges["flotilla_service_waiting_seconds"] = help, use.waiting_s(loop_time())
        families.append(_count_tokens(use))
    families += [
        metrics.gauge(name, help, (), {(): float(value)}) for name, (help, value) in gauges.items()
    ]
    metrics.show("rollout", families)


def _count_tokens(use: "ServiceUse") -> Metric:
    counts = {("prompt",): float(use.prompt_tokens), ("sampled",): float(use.sampled_tokens)}
    help = "Tokens of all requests that the service has answered"
    return metrics.counter("flotilla_service_tokens", help, ("kind",), counts)


def _make_counters(totals: "WorkerTotals") -> list[Metric]:
    ends = {(reason,): float(count) for reason, count in totals.stop_reasons.items()}
    counters = {
        "flotilla_turns": ("Turns of ended attempts", totals.turns),
        "flotilla_sampled_tokens": ("Tokens sampled in ended attempts", totals.sampled_tokens),
        "flotilla_leases": ("Leases taken", totals.leases),
        "flotilla_lost_leases": ("Leases lost", totals.lost_leases),
    }
    return [
        metrics.counter("flotilla_attempts", "Ended attempts", ("end",), ends),
        *(
            metrics.counter(name, help, (), {(): float(value)})
            for name, (help, value) in counters.items()
        ),
    ]
