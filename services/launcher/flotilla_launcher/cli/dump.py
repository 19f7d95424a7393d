"""`flotilla dump`: prints the tables of a ledger or journal of any format."""

from pathlib import Path

from flotilla_common.files.table_dump import dump_tables
from flotilla_common.text.printable_text import print_visible
from flotilla_launcher.cli.command_runner import OK, reports_errors


@reports_errors()
def print_tables(path: Path) -> int:
    """Print each row as a JSON line; return the exit code."""
    for line in dump_tables(path):
        print_visible(line)
    return OK
