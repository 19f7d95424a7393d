"""Options shared by several `flotilla` commands, and their defaults."""

import math
import os
import re
import time
from collections.abc import Collection
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

OVERRIDES = {"allow_extra_args": True, "ignore_unknown_options": True}
RUNS = Path("runs")
GRACE_S = 60.0
_GRACE_MAX_S = 7 * 86400.0


def _check_folder(path: Path) -> Path:
    """Return a folder that exists or can be created. Raises BadParameter."""
    there = next((each for each in (path, *path.absolute().parents) if os.path.lexists(each)), path)
    if not there.is_dir():
        raise typer.BadParameter(f"{there} is not a folder")
    return path


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value <= _GRACE_MAX_S:
        raise typer.BadParameter(f"{text!r} is not a number of seconds from 0 to {_GRACE_MAX_S:g}")
    return value


def parse_since(text: str | float) -> float:
    """Parse an age (`90m`, `12h`, `7d`) or a time in UTC; return seconds since the epoch."""
    found = re.fullmatch(r"([1-9]\d{0,5})([mhd])", str(text))
    if found is not None:
        return time.time() - int(found[1]) * {"m": 60, "h": 3600, "d": 86400}[found[2]]
    if not text:
        # The default.
        return 0.0
    try:
        at = datetime.fromisoformat(str(text))
        return (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError):
        message = f"{text!r}: write an age such as 12h or 7d, or a date such as 2026-11-20"
        raise typer.BadParameter(message) from None


@dataclass(frozen=True, slots=True)
class GpuSizes:
    """Bytes of each GPU of a machine."""

    each: tuple[int, ...]


def parse_gpus(text: str) -> GpuSizes:
    """Parse `4x80GB`; vendors' GB are GiB."""
    found = re.fullmatch(r"([1-9]\d{0,3})x([1-9]\d{0,3})(GB)?", text, re.IGNORECASE)
    if found is None:
        raise typer.BadParameter(f"{text!r}: write number and memory, such as 4x80GB")
    return GpuSizes((int(found[2]) * 2**30,) * int(found[1]))


def refuse_without_effect(context: typer.Context, chosen: str, *, besides: Collection[str]) -> None:
    """Raise BadParameter if the user has given an option, other than `besides`, that what was
    chosen would ignore."""
    for parameter in context.command.params:
        name = parameter.name or ""
        source = context.get_parameter_source(name)
        if name not in besides and source is not None and source.name == "COMMANDLINE":
            raise typer.BadParameter(
                f"it has no effect with {chosen}", param_hint=f"'{parameter.opts[0]}'"
            )


Runs = Annotated[
    Path,
    typer.Option("--runs", help="Folder of all runs.", show_default=True, callback=_check_folder),
]
Grace = Annotated[
    float, typer.Option("--grace", parser=_seconds, help="Longest drain, in seconds.")
]
Gpus = Annotated[
    GpuSizes | None,
    typer.Option(
        "--gpus",
        parser=parse_gpus,
        metavar="NxGB",
        show_default=False,
        help="Check memory against one machine with these GPUs, such as 4x80GB.",
    ),
]
Detach = Annotated[
    bool, typer.Option("--detach", help="Return as soon as the run has started; it continues.")
]
Wait = Annotated[
    bool,
    typer.Option(
        "--wait",
        help="If the GPUs of this machine are taken, wait in the queue instead of being refused.",
    ),
]
Priority = Annotated[
    int,
    typer.Option(
        "--priority",
        min=-1000,
        max=1000,
        help="Place in the queue for this machine's GPUs: the highest first, then by submission.",
    ),
]
Resume = Annotated[
    bool,
    typer.Option(
        "--resume",
        help="Resume the newest run of this spec, the run RUN, or the upload at URL. If the"
        " spec differs from the run's, the differences are listed and nothing starts.",
    ),
]
ResumedRun = Annotated[
    str | None, typer.Argument(metavar="[RUN|URL]", help="The run to resume: an id, or `newest`.")
]
Update = Annotated[
    bool,
    typer.Option("--update", help="With --resume: apply the spec's current values to the run."),
]
AcceptLoss = Annotated[
    bool,
    typer.Option(
        "--accept-loss",
        help="With --resume: accept data loss in the run's journal, count it as lost_with_disk,"
        " and resume from the intact state.",
    ),
]
