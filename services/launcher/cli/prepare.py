"""Runs the `[[prepare]]` commands of a spec whose results are missing or out of date, and shows
which."""

from typing import Any

from rich.text import Text

from services.common.config import parse
from services.launcher.cli.interrupts import Interrupts
from services.launcher.cli.terminal import Terminal
from services.launcher.config.launcher import LauncherConfig
from services.launcher.control.prepare_commands import PrepareError, Surroundings, make, parse_all
from services.launcher.security.env_filter import inherited_by_all

__all__ = ["PrepareError", "parse_all", "run_all"]


async def run_all(
    spec: dict[str, Any], console: Terminal, interrupts: Interrupts, *, refresh: bool
) -> None:
    """Make what is missing and, with `refresh`, what is out of date. A run that goes on keeps what
    it began with. Raises PrepareError, InterruptedByUserError."""
    config = parse(LauncherConfig, spec.get("launcher", {}), where="spec", section="launcher")
    around = Surroundings(inherits=inherited_by_all(spec, config))
    for prepare in parse_all(spec):
        if prepare.done() and not (refresh and prepare.outdated()):
            continue
        message = prepare.message or f"Making {prepare.creates}"
        if console.is_terminal:
            # A text, or it would be taken for markup.
            with console.status(Text(message)):
                await interrupts.unless(make(prepare, around))
        else:
            console.print(message, soft_wrap=True)
            await interrupts.unless(make(prepare, around))
