"""Tracker that logs the few metrics a person follows, one line per step."""

from collections.abc import Mapping

from flotilla_common.telemetry.log import get_logger
from flotilla_learner.ports import Tracker
from flotilla_learner.types import Histogram

_log = get_logger(__name__)

_SHOWN = {
    "pass_at_1": "reward/avg_pass_at_1",
    "reward": "reward/avg_raw_reward",
    "loss": "policy/loss",
    "grad_norm": "policy/grad_norm",
    "staleness": "async/staleness_mean",
    "tokens_per_s": "throughput/tokens_per_sec_gen",
    "seconds": "timing/step",
}


class ConsoleTracker(Tracker):
    """Logs the main metrics of each step."""

    def log_metrics(
        self, step: int, metrics: Mapping[str, float], histograms: Mapping[str, Histogram]
    ) -> None:
        shown = {
            short: round(metrics[name], 4) for short, name in _SHOWN.items() if name in metrics
        }
        evals = {n: round(v, 4) for n, v in metrics.items() if n.endswith("/all/pass_at_1")}
        if shown or evals:
            _log.info("step", step=step, **shown, **evals)
