"""Small charts as SVG text, without a library: bars of shares, and lines over steps."""

from collections.abc import Mapping, Sequence
from html import escape

# Inked like the text around them, except the data. Distinguishable without colour vision.
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
_WIDTH, _BAR, _LABEL = 640, 22, 190
_PLOT, _LEFT, _BOTTOM = 200, 44, 24
Series = Sequence[tuple[int, float]]


def draw_bars(title: str, values: Sequence[tuple[str, int]]) -> str:
    """Draw one bar for each label, as long as its count."""
    most, room = max((value for _, value in values), default=0) or 1, _WIDTH - _LABEL - 60
    parts = list[str]()
    for place, (label, value) in enumerate(values):
        y, width = place * _BAR, room * value / most
        size = f'y="{y + 3}" width="{width:.1f}" height="16"'
        parts += [
            _text(_LABEL - 8, y + 15, label, "end"),
            f'<rect x="{_LABEL}" {size} fill="{_COLOURS[0]}"/>',
            _text(_LABEL + width + 6, y + 15, f"{value:,}"),
        ]
    return _frame(title, len(values) * _BAR, parts)


def draw_lines(title: str, lines: Mapping[str, Series]) -> str:
    """Draw shares between 0 and 1 over steps, one line for each name, which is its legend."""
    steps = [step for series in lines.values() for step, _ in series]
    first, last = min(steps, default=0), max(steps, default=1)
    room = _WIDTH - _LEFT - _LABEL
    parts = [_text(_LEFT, _PLOT + 24, str(first))]
    parts.append(_text(_LEFT + room, _PLOT + 24, f"step {last}", "end"))
    for share in (0.0, 0.5, 1.0):
        y = _height_of(share)
        parts.append(f'<path d="M{_LEFT} {y}h{room}" stroke="currentColor" stroke-opacity=".25"/>')
        parts.append(_text(_LEFT - 6, y + 4, f"{share:.0%}", "end"))
    for number, (name, series) in enumerate(lines.items()):
        colour, y = _COLOURS[number % len(_COLOURS)], 18 + number * _BAR
        points = [
            (_LEFT + room * (step - first) / max(1, last - first), _height_of(value))
            for step, value in series
        ]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        parts.append(f'<polyline fill="none" stroke="{colour}" points="{path}"/>')
        # One step is no line.
        parts += (f'<circle r="2" fill="{colour}" cx="{x:.1f}" cy="{y:.1f}"/>' for x, y in points)
        parts.append(f'<circle r="6" fill="{colour}" cx="{_WIDTH - _LABEL + 18}" cy="{y - 3}"/>')
        parts.append(_text(_WIDTH - _LABEL + 30, y + 2, name))
    return _frame(title, max(_PLOT + _BOTTOM + 8, len(lines) * _BAR), parts)


def _height_of(share: float) -> float:
    return _PLOT * (1 - share) + 8


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="13"'
        f' fill="currentColor">{escape(text)}</text>'
    )


def _frame(title: str, height: int, parts: Sequence[str]) -> str:
    return (
        f'<svg role="img" aria-label="{escape(title)}" viewBox="0 0 {_WIDTH} {height}"'
        f' width="{_WIDTH}" xmlns="http://www.w3.org/2000/svg">{"".join(parts)}</svg>'
    )
