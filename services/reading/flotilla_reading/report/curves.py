"""The curves of a report: the runs' lines of each metric in one pair of axes. Pure."""

from collections.abc import Iterator, Sequence

from flotilla_reading.plots.curve_plot import Panel, PlotLine
from flotilla_reading.report.run_facts import ReportedRun

_TRAINING, _HELD_OUT = "reward/avg_pass_at_1", "eval/all/pass_at_1"
_OTHERS = (
    "reward/avg_raw_reward",
    "reward/variance_per_prompt",
    "policy/entropy",
    "mismatch/kl_train_infer",
    "async/staleness_mean",
    "sft/loss",
    "sft/heldout_loss",
)


def make_panels(runs: Sequence[ReportedRun]) -> list[Panel]:
    """Return pass@1 in training and on held-out tasks, the latter with its interval, and the other
    metrics that tell how training goes."""
    several = len(runs) > 1
    rates = [
        line
        for number, run in enumerate(runs)
        for line in _pass_rates(run, f"{run.run_id}, " if several else "", number, several)
    ]
    others = [
        Panel(name, [PlotLine(run.run_id, *run.metrics.curve(name)) for run in runs])
        for name in _OTHERS
    ]
    return [Panel("pass@1", rates, is_share=True), *others]


def _pass_rates(run: ReportedRun, prefix: str, number: int, several: bool) -> Iterator[PlotLine]:
    """Yield the two lines of a run: next to those of others, both in its own colour."""
    (steps, values), low, high = (
        run.metrics.curve(f"{_HELD_OUT}{bound}") for bound in ("", "_low", "_high")
    )
    band = (low[1], high[1]) if steps == low[0] == high[0] else ((), ())
    style, color = (":", f"C{number}") if several else ("-", "C0")
    yield PlotLine(f"{prefix}training tasks", *run.metrics.curve(_TRAINING), style, color)
    color = color if several else "C1"
    yield PlotLine(f"{prefix}held-out tasks", steps, values, "o-", color, *band)
