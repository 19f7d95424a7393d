"""Execution of a spec's `[[prepare]]` commands with missing or outdated results, with a progress
display."""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

from rich.status import Status
from rich.text import Text

from flotilla_common.text.printable_text import make_visible
from flotilla_launcher.cli.interrupts import Interrupts
from flotilla_launcher.cli.terminal import Terminal
from flotilla_launcher.control.prepare_commands import (
    CommandOptions,
    execute_command,
    parse_prepare_tables,
)
from flotilla_launcher.run_spec import read_spec
from flotilla_launcher.security.service_variables import variables_of_any_service


async def run_prepare_commands(
    spec: dict[str, Any], console: Terminal, interrupts: Interrupts, *, refresh: bool
) -> None:
    """Make missing results and, with `refresh`, outdated ones. A resumed run keeps the results
    with which it began. Raises PrepareError, InterruptedByUserError."""
    inherits = variables_of_any_service(read_spec(spec))
    for prepare in parse_prepare_tables(spec):
        if prepare.is_done() and not (refresh and prepare.is_outdated()):
            continue
        message = prepare.message or f"Making {prepare.creates}"
        with _shown_progress(message, console) as show_output:
            options = CommandOptions(show_output, inherits=inherits)
            await interrupts.unless_interrupted(execute_command(prepare, options))


@contextmanager
def _shown_progress(message: str, console: Terminal) -> Generator[Callable[[str], None]]:
    """Show the message and, as far as it has come, what the command says of its progress: the last
    line on a terminal, all of them elsewhere."""
    if not console.is_terminal:
        console.print(message, soft_wrap=True)
        yield lambda text: _print_lines(text, console)
        return
    # A plain string would be interpreted as markup.
    with console.status(Text(message)) as status:
        yield lambda text: _show_last_line(text, message, status)


def _print_lines(text: str, console: Terminal) -> None:
    for line in text.splitlines():
        console.print(f"  {line}", soft_wrap=True)


def _show_last_line(text: str, message: str, status: Status) -> None:
    lines = text.split("\n")
    if newest := next((line for line in reversed(lines) if line.strip()), ""):
        status.update(Text(f"{message}: {make_visible(newest.strip())}", overflow="ellipsis"))
