"""Every printer of the services goes through one of two: `say` of `services.common.text`, and the
`Terminal` of the command line. Both show text of others as text."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# The two themselves; the log's handler, whose renderers use the first; and a program that imports
# nothing of ours, of which the gateway reads what it prints, and says it.
WAISTS = {
    "services/common/text.py": {"print"},
    "services/common/log.py": {"logging.StreamHandler"},
    "services/launcher/console/terminal.py": {"rich.console.Console"},
    "services/env_gateway/adapters/fleet_openenv/worker.py": {"traceback.print_exc"},
}
PRINTERS = {"print", "input", "typer.echo", "typer.secho", "rich.print", "click.echo"}
WRITERS = {"write", "writelines"}
STREAMS = {"sys.stdout", "sys.stderr", "sys.__stdout__", "sys.__stderr__"}
MAKERS = {"rich.console.Console", "logging.StreamHandler", "logging.basicConfig"}
FAULTS = {"traceback.print_exc", "traceback.print_exception", "traceback.print_stack"}


def names_of(tree: ast.Module) -> dict[str, str]:
    """What each imported name is."""
    found: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {each.asname or each.name: each.name for each in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {e.asname or e.name: f"{node.module}.{e.name}" for e in node.names}
    return found


def dotted(node: ast.expr, names: dict[str, str]) -> str:
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value, names)}.{node.attr}"
    return names.get(node.id, node.id) if isinstance(node, ast.Name) else "?"


def printers_in(source: str) -> Iterator[tuple[int, str]]:
    """Lines that print by other means than the two, and by which."""
    tree = ast.parse(source)
    names = names_of(tree)
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        called = dotted(node.func, names)
        stream, _, method = called.rpartition(".")
        buffer = stream.removesuffix(".buffer") in STREAMS and method in WRITERS
        to_terminal = called == "os.write" and ast.unparse(node.args[0]) in ("1", "2")
        if called in PRINTERS | MAKERS | FAULTS or buffer or to_terminal:
            yield node.lineno, called
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            bases = [dotted(base, names) for base in node.bases]
            yield from ((node.lineno, base) for base in bases if base in MAKERS)


@pytest.mark.parametrize(
    "source",
    [
        "print(1)",
        "import sys\nsys.stderr.write(x)",
        "import sys\nsys.stdout.buffer.write(x)",
        "from sys import stdout\nstdout.write(x)",
        "import typer as t\nt.echo(x)",
        "from rich.console import Console as C\nC().print(x)",
        "from rich.console import Console\nclass Mine(Console): ...",
        "from rich import print as p\np(x)",
        "import os\nos.write(1, x)",
        "import traceback\ntraceback.print_exc()",
        "import logging\nlogging.StreamHandler()",
    ],
)
def test_a_printer_is_found_by_whatever_name(source: str) -> None:
    assert list(printers_in(source))


def test_everything_that_is_printed_goes_through_one_of_two() -> None:
    found: list[str] = []
    for path in sorted((ROOT / "services").rglob("*.py")):
        where = str(path.relative_to(ROOT))
        for line, called in printers_in(path.read_text()):
            if called not in WAISTS.get(where, set()):
                found.append(f"{where}:{line}: {called}")
    assert not found, "use services.common.text.say, or the Terminal:\n" + "\n".join(found)
