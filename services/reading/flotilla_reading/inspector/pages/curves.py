"""The page of curves: up to four metrics of up to eight runs in one picture."""

from collections.abc import Sequence
from dataclasses import dataclass

from flotilla_reading.inspector.pages.page import Crumb, Page, embed
from flotilla_reading.inspector.pages.visible_text import visible
from flotilla_reading.inspector.queries.run_library import RunLibrary

DEFAULT_METRIC = "reward/avg_raw_reward"
MOST_RUNS, MOST_METRICS, _MOST_POINTS, _MOST_TABLE_ROWS = 8, 4, 4_000, 300


@dataclass(frozen=True, slots=True)
class Curve:
    """One run's values of a metric, thinned to the resolution of a screen."""

    run: str
    metric: str
    steps: tuple[int, ...]
    values: tuple[float, ...]


def curves_page(
    library: RunLibrary, runs: Sequence[str], metrics: Sequence[str], *, own_axes: bool = False
) -> Page:
    """Plot metrics of several runs together; by default the reward of the newest run. With
    `own_axes` each metric has its own axis."""
    known = [card.run_id for card in library.cards()]
    chosen = [run for run in dict.fromkeys(runs) if run in known][:MOST_RUNS] or known[:1]
    names = sorted({name for run in chosen for name in library.open(run).metrics.names()})
    default = DEFAULT_METRIC if DEFAULT_METRIC in names else next(iter(names), "")
    shown = [name for name in dict.fromkeys(metrics) if name in names][:MOST_METRICS] or [default]
    curves = [read_curve(library, run, metric) for metric in shown for run in chosen]
    labels = [_label(curve, len(chosen), len(shown)) for curve in curves]
    lines = [
        {"label": label, "axis": shown.index(each.metric), "steps": each.steps, "y": each.values}
        for label, each in zip(labels, curves, strict=True)
    ]
    axes = [visible(metric) for metric in shown] if own_axes else []
    values = {
        "runs": known[:100],
        "chosen": chosen,
        "names": names,
        "metrics": shown,
        "slots": [*shown, ""][:MOST_METRICS],
        "own_axes": own_axes,
        "labels": labels,
        "rows": _table_rows(curves),
        "data": embed({"lines": lines, "axes": axes}),
        "crumbs": (Crumb("Curves", ""),),
    }
    return Page("curves.html", "Curves", values)


def read_curve(library: RunLibrary, run: str, metric: str, most: int = _MOST_POINTS) -> Curve:
    """Keep the newest value of each step; of many steps, the last and every n-th. Raises
    NotFoundError."""
    steps, values = library.open(run).metrics.curve(metric)
    stride = -(-len(steps) // most) or 1
    return Curve(run, metric, tuple(steps[::-stride][::-1]), tuple(values[::-stride][::-1]))


def _label(curve: Curve, runs: int, metrics: int) -> str:
    """Name a curve by what distinguishes it from the others."""
    metric = visible(curve.metric)
    if metrics == 1:
        return curve.run
    return metric if runs == 1 else f"{metric} of {curve.run}"


def _table_rows(curves: Sequence[Curve]) -> list[tuple[int, list[float | None]]]:
    by_curve = [dict(zip(curve.steps, curve.values, strict=True)) for curve in curves]
    steps = sorted({step for each in by_curve for step in each})[-_MOST_TABLE_ROWS:]
    return [(step, [each.get(step) for each in by_curve]) for step in steps[::-1]]
