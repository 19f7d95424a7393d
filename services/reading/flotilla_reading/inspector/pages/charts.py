"""Small charts that a page draws itself, as SVG: they need no script, and a bundle holds them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

WIDTH, HEIGHT = 480, 190
_LEFT, _RIGHT, _TOP, _BOTTOM = 40, 10, 8, 24
Points = Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Chart:
    """A chart in the units of its picture. Ticks are (text, place)."""

    # By label: the places of its points.
    lines: Mapping[str, Points]
    # Of the first line: (x, y of the low end, y of the high end).
    intervals: tuple[tuple[float, float, float], ...]
    x_ticks: tuple[tuple[str, float], ...]
    y_ticks: tuple[tuple[str, float], ...]
    summary: str


def draw_chart(
    lines: Mapping[str, Points], intervals: Sequence[tuple[float, float, float]] = ()
) -> Chart | None:
    """Draw lines of (step, value), in order of steps, and intervals of the first one, as (step,
    low, high); None without any point. The axis of values holds at least 0 to 1."""
    drawn = {label: points for label, points in lines.items() if points}
    if not drawn:
        return None
    steps = [step for points in drawn.values() for step, _ in points]
    values = [value for points in drawn.values() for _, value in points]
    first, last = min(steps), max(steps)
    low, high = min(0.0, *values), max(1.0, *values)

    def x(step: float) -> float:
        share = (step - first) / (last - first) if last > first else 0.5
        return round(_LEFT + share * (WIDTH - _LEFT - _RIGHT), 1)

    def y(value: float) -> float:
        return round(_TOP + (high - value) / (high - low) * (HEIGHT - _TOP - _BOTTOM), 1)

    marks = dict.fromkeys((first, (first + last) // 2, last))
    ends = [f"{label} from {p[0][1]:.3g} to {p[-1][1]:.3g}" for label, p in drawn.items()]
    return Chart(
        {label: [(x(s), y(v)) for s, v in points] for label, points in drawn.items()},
        tuple((x(step), y(least), y(most)) for step, least, most in intervals),
        tuple((f"{step:g}", x(step)) for step in marks),
        tuple((f"{value:.3g}", y(value)) for value in (low, (low + high) / 2, high)),
        f"{'; '.join(ends)}; steps {first:g} to {last:g}",
    )
