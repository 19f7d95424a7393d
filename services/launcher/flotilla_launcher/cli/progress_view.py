"""Progress of a run: a live display on a terminal, plain lines elsewhere."""

import errno
import os
import sys
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import IO, Any, Protocol, cast

from rich.console import Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from flotilla.launcher.v1 import alarm_pb2 as alarm_pb
from flotilla_launcher.cli.run_view import (
    STATE_NAMES,
    RunBoard,
    alarm_text,
    count_tokens,
    duration_text,
)
from flotilla_launcher.cli.terminal import Terminal

TRAINING, HELD_OUT = "reward/avg_pass_at_1", "eval/all/pass_at_1"
# Metric, heading and format of the displayed numbers, in this order.
_NUMBERS = (
    (TRAINING, "training pass@1", "{:.1%}"),
    ("reward/avg_raw_reward", "reward", "{:.3f}"),
    ("sft/loss", "loss", "{:.4f}"),
    ("sft/heldout_loss", "held-out loss", "{:.4f}"),
    ("sft/epoch", "epochs", "{:.2f}"),
    ("throughput/tokens_per_sec_gen", "tokens/s", "{:,.0f}"),
    ("async/staleness_mean", "staleness", "{:.2f}"),
    (HELD_OUT, "held-out pass@1", "{:.1%}"),
)
_ALARMS_SHOWN = 5
# Columns from which phase, bar, step and remaining time fit into a line.
_WIDE = 80
NOTICE = alarm_pb.ALARM_SEVERITY_NOTICE
ALARM_STYLES: Mapping["alarm_pb.AlarmSeverity.ValueType", str] = {
    alarm_pb.ALARM_SEVERITY_UNSPECIFIED: "red",
    NOTICE: "green",
    alarm_pb.ALARM_SEVERITY_WARNING: "yellow",
    alarm_pb.ALARM_SEVERITY_ERROR: "red",
}


class _Output:
    """Standard output that reports a closed terminal as a broken pipe."""

    def __init__(self) -> None:
        # A live display replaces sys.stdout.
        self._stream = sys.stdout

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError as error:
            raise _to_pipe_error(error) from error

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            raise _to_pipe_error(error) from error

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _to_pipe_error(error: OSError) -> OSError:
    return BrokenPipeError(*error.args) if error.errno == errno.EIO else error


class RunConsole(Terminal):
    """Console that falls silent when its reader is gone: the end of `tee` or the terminal must not
    end a run."""

    def __init__(self) -> None:
        super().__init__(file=cast(IO[str], _Output()))

    def on_broken_pipe(self) -> None:
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class ProgressView(Protocol):
    """Display for the events of a run."""

    def show_line(self, text: str) -> None: ...

    def show_board(self, board: RunBoard) -> None: ...


def format_metrics(metrics: Mapping[str, float]) -> dict[str, str]:
    """Format the available metrics, keyed by heading."""
    return {
        heading: form.format(metrics[name]) for name, heading, form in _NUMBERS if name in metrics
    }


def _list_figures(board: RunBoard) -> dict[str, str]:
    """Return the board's headline metrics by heading; of a run that is billed by tokens also their
    number, and its cost if a price is known."""
    figures = format_metrics(board.metrics)
    if tokens := sum(count_tokens(board.cost).values()):
        figures["tokens"] = f"{tokens:,}"
        if board.cost.accrued:
            figures["cost"] = f"${board.cost.accrued:,.2f}"
    return figures


class PlainView:
    """View with one line for each event and each step."""

    def __init__(self, console: Terminal) -> None:
        self._console = console
        self._shown: tuple[str, int] = ("", 0)

    def show_line(self, text: str) -> None:
        self._console.print(text, soft_wrap=True)

    def show_board(self, board: RunBoard) -> None:
        if (board.phase, board.step) == self._shown:
            return
        self._shown = (board.phase, board.step)
        parts = [f"step {board.step}/{board.total_steps}", board.phase_text]
        parts += [f"{heading} {value}" for heading, value in _list_figures(board).items()]
        envs = [f"{env} {value:.0%}" for env, value in sorted(board.pass_by_env().items())]
        parts += [f"({', '.join(envs)})"] if envs else []
        if alarms := [name for name, alarm in board.alarms.items() if alarm.severity > NOTICE]:
            parts.append(f"ALARM: {', '.join(alarms)}")
        if board.seconds_left:
            parts.append(f"{duration_text(board.seconds_left)} left")
        self.show_line("  ".join(part for part in parts if part))


class LiveView:
    """View with a fixed progress bar and table; lines scroll above them."""

    def __init__(self, live: Live) -> None:
        self._live = live

    def show_line(self, text: str) -> None:
        self._live.console.print(text, style="dim")

    def show_board(self, board: RunBoard) -> None:
        self._live.update(draw_board(board, self._live.console.width), refresh=True)


def draw_board(board: RunBoard, width: int = _WIDE) -> Group:
    """Render the board for a terminal of this width."""
    cells = _list_figures(board)
    cells |= {
        f"training {env}": f"{value:.0%}" for env, value in sorted(board.pass_by_env().items())
    }
    services = "  ".join(
        f"{name} {state}" for name, state in sorted(board.replicas.items()) if state != "stopped"
    )
    shown = [*_draw_progress(board, width), _draw_figures(cells, width), *_draw_alarms(board)]
    return Group(*shown, Text(services, style="dim"))


def _draw_figures(cells: Mapping[str, str], width: int) -> Table | Text:
    """Render figures side by side, or one a line where they do not fit."""
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
    if sum(max(map(len, cell)) + 3 for cell in cells.items()) <= width:
        for heading in cells:
            table.add_column(heading, style="cyan")
        table.add_row(*cells.values())
        return table if cells else Text("")
    lines = Table.grid(padding=(0, 2))
    for heading, value in cells.items():
        lines.add_row(heading, Text(value, style="cyan"))
    return lines


def _draw_progress(board: RunBoard, width: int) -> list[RenderableType]:
    """Render phase, bar and step in one line; in two if it would be wider than the terminal."""
    phase = board.phase_text if board.phase else STATE_NAMES.get(board.state, "")
    bar = ProgressBar(total=max(1, board.total_steps), completed=board.step, width=min(40, width))
    left = board.seconds_left
    words = [f"step {board.step}/{board.total_steps}"]
    words += [] if left is None else [f"{duration_text(left)} left"]
    if width < _WIDE:
        return [Text("  ".join((phase, *words)), style="bold"), bar]
    head = Table.grid(padding=(0, 2))
    head.add_row(Text(phase, style="bold"), bar, *words)
    return [head]


def _draw_alarms(board: RunBoard) -> list[Text]:
    """Render one line per alarm; the scrolled lines show the full texts."""
    alarms = sorted(board.alarms.values(), key=lambda alarm: -alarm.severity)
    lines = [
        Text(alarm_text(alarm), style=ALARM_STYLES[alarm.severity], no_wrap=True)
        for alarm in alarms[:_ALARMS_SHOWN]
    ]
    more = len(alarms) - len(lines)
    return [*lines, *([Text(f"and {more} more: flotilla status", style="dim")] if more else [])]


@contextmanager
def open_view(console: Terminal) -> Generator[ProgressView]:
    """Open the view that fits the console."""
    if not console.is_terminal:
        yield PlainView(console)
        return
    # No refresh between events, about one a second: it would cost CPU that the run needs.
    with Live(console=console, auto_refresh=False, transient=True) as live:
        yield LiveView(live)
