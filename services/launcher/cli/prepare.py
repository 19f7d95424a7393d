"""Execution of a spec's `[[prepare]]` commands with missing or outdated results, with a progress
display."""

from typing import Any

from rich.text import Text

from services.launcher.cli.interrupts import Interrupts
from services.launcher.cli.terminal import Terminal
from services.launcher.config.launcher import parse_launcher
from services.launcher.control.prepare_commands import (
    CommandOptions,
    execute_command,
    parse_prepare_tables,
)
from services.launcher.security.env_filter import variables_of_any_service


async def run_prepare_commands(
    spec: dict[str, Any], console: Terminal, interrupts: Interrupts, *, refresh: bool
) -> None:
    """Make missing results and, with `refresh`, outdated ones. A resumed run keeps the results
    with which it began. Raises PrepareError, InterruptedByUserError."""
    options = CommandOptions(inherits=variables_of_any_service(spec, parse_launcher(spec)))
    for prepare in parse_prepare_tables(spec):
        if prepare.is_done() and not (refresh and prepare.is_outdated()):
            continue
        message = prepare.message or f"Making {prepare.creates}"
        if console.is_terminal:
            # A plain string would be interpreted as markup.
            with console.status(Text(message)):
                await interrupts.unless_interrupted(execute_command(prepare, options))
        else:
            console.print(message, soft_wrap=True)
            await interrupts.unless_interrupted(execute_command(prepare, options))
