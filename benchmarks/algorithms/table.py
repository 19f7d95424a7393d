"""Rows of the result, and their tables in Markdown."""

import math
import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks.algorithms.cases import Case

# Two-sided 95 % quantiles of Student's t, by degrees of freedom.
T_975 = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}


def make_row(case: Case, scores: Sequence[float]) -> dict[str, Any]:
    """Result of one case over its seeds, in percent."""
    percent = [100 * score for score in scores]
    low, high = mean_interval(percent)
    return {
        "table": case.table,
        "name": case.name,
        "staleness": case.staleness,
        "seeds": [round(score, 1) for score in percent],
        "mean": round(statistics.mean(percent), 1),
        "interval": [round(low, 1), round(high, 1)],
    }


def mean_interval(percent: Sequence[float]) -> tuple[float, float]:
    """95 % interval of the mean over seeds, clipped to 0 to 100."""
    mean = statistics.mean(percent)
    freedom = len(percent) - 1
    if freedom not in T_975:
        return 0.0, 100.0
    half = T_975[freedom] * statistics.stdev(percent) / math.sqrt(len(percent))
    return max(0.0, mean - half), min(100.0, mean + half)


def format_tables(rows: Sequence[dict[str, Any]]) -> str:
    """Return both tables; the second has a row per correction and a column per age."""
    estimators = [r for r in rows if r["table"] == "estimator"]
    lines = ["| on policy | pass@1, mean [95 % interval] | seeds |", "|---|---|---|"]
    lines += [f"| {r['name']} | {_format_figure(r)} | {_format_seeds(r)} |" for r in estimators]
    ages = sorted({r["staleness"] for r in rows if r["table"] == "staleness"})
    if ages:
        header = "".join(f" {age} old |" for age in ages)
        lines += ["", f"| samples trained on |{header}", "|---|" + "---|" * len(ages)]
        names = dict.fromkeys(r["name"] for r in rows if r["table"] == "staleness")
        lines += [_stale_row(name, ages, rows) for name in names]
    return "\n".join(lines)


def _stale_row(name: str, ages: Sequence[int], rows: Sequence[dict[str, Any]]) -> str:
    found = {r["staleness"]: r for r in rows if r["table"] == "staleness" and r["name"] == name}
    cells = [f"{_format_figure(found[age])}: {_format_seeds(found[age])}" for age in ages]
    return f"| {name} | " + " | ".join(cells) + " |"


def _format_figure(r: dict[str, Any]) -> str:
    return f"{r['mean']} % [{r['interval'][0]}, {r['interval'][1]}]"


def _format_seeds(r: dict[str, Any]) -> str:
    return ", ".join(str(score) for score in r["seeds"])
