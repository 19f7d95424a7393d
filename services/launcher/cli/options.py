"""Options that several commands of `flotilla` take, and their defaults."""

import math
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

OVERRIDES = {"allow_extra_args": True, "ignore_unknown_options": True}
RUNS = Path("runs")
GRACE_S = 60.0
_GRACE_MAX_S = 7 * 86400.0


def _check_folder(path: Path) -> Path:
    """Accept a folder that exists or can be made."""
    there = next((each for each in (path, *path.absolute().parents) if os.path.lexists(each)), path)
    if not there.is_dir():
        raise typer.BadParameter(f"{there} is no folder")
    return path


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value <= _GRACE_MAX_S:
        raise typer.BadParameter(f"{text!r}: give seconds, from 0 to {_GRACE_MAX_S:g}")
    return value


@dataclass(frozen=True, slots=True)
class GpuSizes:
    """Bytes of each GPU of a machine."""

    each: tuple[int, ...]


def parse_gpus(text: str) -> GpuSizes:
    """Parse `4x80GB`, by the GB that GPUs are sold by."""
    found = re.fullmatch(r"([1-9]\d{0,3})x([1-9]\d{0,3})(GB)?", text, re.IGNORECASE)
    if found is None:
        raise typer.BadParameter(f"{text!r}: give their number and memory, as in 4x80GB")
    return GpuSizes((int(found[2]) * 2**30,) * int(found[1]))


Runs = Annotated[
    Path,
    typer.Option("--runs", help="Folder of all runs.", show_default=True, callback=_check_folder),
]
Grace = Annotated[
    float, typer.Option("--grace", parser=_seconds, help="Seconds that draining may take.")
]
Gpus = Annotated[
    GpuSizes | None,
    typer.Option(
        "--gpus",
        parser=parse_gpus,
        metavar="NxGB",
        show_default=False,
        help="Judge memory by one machine with these GPUs, as in 4x80GB, whatever there is.",
    ),
]
Detach = Annotated[
    bool, typer.Option("--detach", help="Go as soon as the run has begun; it goes on.")
]
Resume = Annotated[
    bool,
    typer.Option(
        "--resume",
        help="Go on with the newest run of this spec, with RUN, or from the URL that its"
        " checkpoints are uploaded to. What the spec says other than the run is named first.",
    ),
]
ResumedRun = Annotated[
    str | None, typer.Argument(metavar="[RUN|URL]", help="The run to resume: an id, or `newest`.")
]
Update = Annotated[
    bool, typer.Option("--update", help="With --resume: the run takes what the spec says today.")
]
AcceptLoss = Annotated[
    bool,
    typer.Option(
        "--accept-loss",
        help="With --resume: give up what the run's journal has lost, count it as"
        " lost_with_disk, and go on from what is whole.",
    ),
]
