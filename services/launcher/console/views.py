"""Shows a board: a live display on a terminal, plain lines elsewhere."""

import os
import sys
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from services.launcher.console.board import STATE_NAMES, Board, duration_text, raised

# Metric, heading and format of the numbers shown, in this order, where the learner sends them.
_NUMBERS = (
    ("reward/avg_pass_at_1", "pass@1", "{:.1%}"),
    ("reward/avg_raw_reward", "reward", "{:.3f}"),
    ("throughput/tokens_per_sec_gen", "tokens/s", "{:,.0f}"),
    ("async/staleness_mean", "staleness", "{:.2f}"),
    ("eval/all/pass_at_1", "held-out pass@1", "{:.1%}"),
)


class RunConsole(Console):
    """Goes on in silence when its reader is gone: a run does not end because `tee` did."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class View(Protocol):
    """Where the events of a run go."""

    def line(self, text: str) -> None: ...

    def update(self, board: Board) -> None: ...


def numbers(metrics: Mapping[str, float]) -> dict[str, str]:
    """The numbers that are there, formatted, by their heading."""
    return {
        heading: form.format(metrics[name]) for name, heading, form in _NUMBERS if name in metrics
    }


class PlainView:
    """One line for each thing that happens and for each step."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._shown: tuple[str, int] = ("", 0)

    def line(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def update(self, board: Board) -> None:
        if (board.phase, board.step) == self._shown:
            return
        self._shown = (board.phase, board.step)
        parts = [f"step {board.step}/{board.total_steps}", board.doing]
        parts += [f"{heading} {value}" for heading, value in numbers(board.metrics).items()]
        envs = [f"{env} {value:.0%}" for env, value in sorted(board.pass_by_env().items())]
        parts += [f"({', '.join(envs)})"] if envs else []
        if alarms := raised(board.metrics):
            parts.append(f"ALARM: {', '.join(alarms)}")
        if board.seconds_left:
            parts.append(f"{duration_text(board.seconds_left)} left")
        self.line("  ".join(part for part in parts if part))


class LiveView:
    """A bar and a table that stay in place; lines scroll by above them."""

    def __init__(self, live: Live) -> None:
        self._live = live

    def line(self, text: str) -> None:
        self._live.console.print(text, markup=False, highlight=False, style="dim")

    def update(self, board: Board) -> None:
        self._live.update(draw(board), refresh=True)


def draw(board: Board) -> Group:
    """The board as a rich renderable."""
    head = Table.grid(padding=(0, 2))
    left = board.seconds_left
    head.add_row(
        Text(STATE_NAMES.get(board.state, "") if not board.phase else board.doing, style="bold"),
        ProgressBar(total=max(1, board.total_steps), completed=board.step, width=40),
        f"step {board.step}/{board.total_steps}",
        "" if left is None else f"{duration_text(left)} left",
    )
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
    cells = numbers(board.metrics)
    cells |= {f"pass@1 {env}": f"{value:.0%}" for env, value in sorted(board.pass_by_env().items())}
    for heading in cells:
        table.add_column(heading, style="cyan")
    table.add_row(*cells.values())
    services = "  ".join(
        f"{name} {state}" for name, state in sorted(board.replicas.items()) if state != "stopped"
    )
    alarms = Text(", ".join(f"alarm: {name}" for name in raised(board.metrics)), style="red")
    shown = [head, table if cells else Text(""), *([alarms] if alarms else [])]
    return Group(*shown, Text(services, style="dim"))


@contextmanager
def viewing(console: Console) -> Generator[View]:
    """The view that fits the console."""
    if not console.is_terminal:
        yield PlainView(console)
        return
    # Events come about once a second; more often would only cost CPU that the run needs.
    with Live(console=console, auto_refresh=False, transient=True) as live:
        yield LiveView(live)
