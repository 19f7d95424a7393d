"""Commands that are printed to be copied: they name the same runs, and hold in any shell."""

import shlex
from pathlib import Path

from services.launcher import launcher_address


def command(*words: str, runs: Path = Path("runs")) -> str:
    """`flotilla WORDS`, quoted, for the runs of this folder or of the launcher elsewhere."""
    here = str(runs) != "runs" and launcher_address.from_environment() is None
    return shlex.join(("flotilla", *words, *(("--runs", str(runs)) if here else ())))
