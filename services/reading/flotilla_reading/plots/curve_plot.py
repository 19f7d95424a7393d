"""Curves over steps, and points by name, as SVG; run as a program with a request on standard input.

In a process of its own: matplotlib starts programs (fc-list), which inherit its environment, and a
command's has every key that the user has exported."""

import io
import json
import subprocess
import sys
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from flotilla_common.files.durable_files import replace_file
from flotilla_common.process.child_environment import child_environment
from flotilla_common.process.python_command import python_command
from flotilla_common.text.printable_text import one_line

_WIDE, _HIGH = 7, 4
# Characters of a label, of a name below an axis, and of all such names that are not turned.
_LABEL, _NAME, _ROW = 60, 30, 80


@dataclass(frozen=True, slots=True)
class PlotLine:
    """One curve. `low` and `high` bound a band around it; `style` and `color` are matplotlib's."""

    label: str
    steps: Sequence[float]
    values: Sequence[float]
    style: str = "-"
    color: str | None = None
    low: Sequence[float] = ()
    high: Sequence[float] = ()


@dataclass(frozen=True, slots=True)
class Panel:
    """One pair of axes; `is_share`: its values are between 0 and 1. With `names`, its steps are
    places of these names from 0, and bounds are drawn as bars."""

    ylabel: str
    lines: Sequence[PlotLine]
    title: str = ""
    is_share: bool = False
    names: Sequence[str] = ()
    xlabel: str = "optimizer step"


def draw_panels(out: Path, panels: Sequence[Panel]) -> bool:
    """Draw the panels that have any point, two in a row, into one file; return False if none has.
    A picture that cannot be drawn is no error of the caller: the program's own is shown."""
    drawn = [asdict(panel) for panel in panels if any(line.steps for line in panel.lines)]
    if not drawn:
        return False
    request = json.dumps({"out": str(out), "panels": drawn})
    command = python_command("-m", __name__)
    done = subprocess.run(
        command, input=request.encode(), env=child_environment(ours=True), check=False
    )
    return done.returncode == 0


def _draw(request: dict[str, Any]) -> None:
    import matplotlib
    from matplotlib.figure import Figure

    panels = request["panels"]
    columns = min(2, len(panels))
    rows = -(-len(panels) // columns)
    # The same curves make the same bytes; names of environments and runs are no formulas.
    style = {"svg.hashsalt": "flotilla", "text.parse_math": False}
    with matplotlib.rc_context(style):  # pyright: ignore[reportArgumentType]
        figure = Figure(figsize=(_WIDE * columns, _HIGH * rows), layout="constrained")
        for number, panel in enumerate(panels, 1):
            _draw_panel(figure.add_subplot(rows, columns, number), panel)
        picture = io.BytesIO()
        figure.savefig(picture, format="svg", metadata={"Date": None})
    replace_file(Path(request["out"]), picture.getvalue())


def _draw_panel(axes: Any, panel: dict[str, Any]) -> None:
    for line in panel["lines"]:
        if not line["steps"]:
            continue
        (drawn,) = axes.plot(line["steps"], line["values"], line["style"], color=line["color"])
        # A label with _ in front would be left out of the legend.
        drawn.set_label(one_line(line["label"].lstrip("_"), _LABEL))
        if line["low"]:
            band = (line["steps"], line["low"], line["high"])
            draw_bounds = axes.vlines if panel["names"] else axes.fill_between
            draw_bounds(*band, color=drawn.get_color(), alpha=0.5 if panel["names"] else 0.15)
    xlabel = "" if panel["names"] else panel["xlabel"]
    axes.set(xlabel=xlabel, ylabel=panel["ylabel"], title=panel["title"])
    if panel["names"]:
        # XML cannot hold control characters, which these have no more.
        names = [one_line(name, _NAME) for name in panel["names"]]
        turned = 0 if len(names) * max(map(len, names)) < _ROW else 90
        axes.set_xticks(range(len(names)), names, rotation=turned)
    if panel["is_share"]:
        axes.set_ylim(0, 1)
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right" if panel["is_share"] else "best")


if __name__ == "__main__":
    # A font without a character draws a box.
    warnings.filterwarnings("ignore", "Glyph")
    _draw(json.load(sys.stdin))
