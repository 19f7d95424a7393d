"""Scores of tasks that were attempted several times: pass@1 and pass@k. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from flotilla_common.domain.pass_rates import PASS_REWARD, pass_at_k
from flotilla_common.text.printable_text import make_visible


@dataclass(slots=True)
class TaskScore:
    """Ended attempts at one task. An attempt without a grade is no evidence, and no failure."""

    key: str
    attempts: int = 0
    graded: int = 0
    passed: int = 0

    def add_attempt(self, reward: float | None) -> None:
        self.attempts += 1
        self.graded += reward is not None
        self.passed += reward is not None and reward >= PASS_REWARD

    def pass_at(self, k: int) -> float | None:
        """Return pass@k; None if fewer than k attempts have a grade."""
        return pass_at_k(self.graded, self.passed, k) if self.graded >= k else None


def format_scores(scores: Sequence[TaskScore], k: int) -> list[str]:
    """Return a line for each task, and their sums and means; a mean is that of the tasks that have
    the figure."""
    ks = sorted({1, k})
    heading = ["attempts", "graded", "passed", *(f"pass@{each}" for each in ks)]
    width = max(map(len, heading))
    rows = [
        (s.key, [s.attempts, s.graded, s.passed], [s.pass_at(each) for each in ks]) for s in scores
    ]
    sums = [sum(column) for column in zip(*(counts for _, counts, _ in rows), strict=True)]
    means = [_mean(column) for column in zip(*(shares for _, _, shares in rows), strict=True)]
    rows.append((f"all {len(scores)} tasks", sums, means))
    lines = ["  ".join([*(each.rjust(width) for each in heading), "task"])]
    for key, counts, shares in rows:
        cells = [*map(str, counts), *("-" if s is None else f"{s:.3f}" for s in shares)]
        shown = make_visible(key, lines=False)
        lines.append("  ".join([*(cell.rjust(width) for cell in cells), shown]))
    return lines


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
