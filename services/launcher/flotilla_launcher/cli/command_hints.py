"""Commands printed for the user to copy: for the same runs folder, quoted for any shell."""

import shlex
from pathlib import Path

from flotilla_launcher.security import launcher_address


def format_command(*words: str, runs: Path = Path("runs")) -> str:
    """Format `flotilla WORDS`, quoted, for the runs of this folder or of a remote launcher."""
    here = str(runs) != "runs" and launcher_address.address_from_environment() is None
    return shlex.join(("flotilla", *words, *(("--runs", str(runs)) if here else ())))
