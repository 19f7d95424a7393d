"""Every printer of the services goes through one of two: `print_visible` of
`flotilla_common.text.printable_text`, and the `Terminal` of the command line. Both show text of
others as text."""

import ast
import re
from collections.abc import Iterator

import pytest

from tests.support.repository import ROOT

# The two themselves; the log's handler, whose renderers use the first; and a program that imports
# nothing of ours, whose output the gateway reads and prints.
WAISTS = {
    "services/common/flotilla_common/text/printable_text.py": {"print"},
    "services/common/flotilla_common/telemetry/log.py": {"logging.StreamHandler", "sys.stderr"},
    # Flushes; reports a lost parent; prints the stacks of threads, but no foreign text.
    "services/common/flotilla_common/process/service_main.py": {"sys.stdout", "sys.stderr"},
    "services/common/flotilla_common/process/tied_child.py": {"SystemExit"},
    "services/common/flotilla_common/telemetry/watchdog.py": {"sys.stderr", "sys.__stderr__"},
    # Where there is no terminal any more, and nothing is printed.
    "services/launcher/flotilla_launcher/cli/interrupts.py": {"sys.__stdout__", "sys.__stderr__"},
    # Show by a Terminal.
    "services/launcher/flotilla_launcher/cli/data_collect.py": {"rich.progress.Progress"},
    "services/launcher/flotilla_launcher/cli/data_prepare.py": {"rich.progress.Progress"},
    "services/launcher/flotilla_launcher/cli/export_trajectories.py": {"rich.progress.Progress"},
    "services/launcher/flotilla_launcher/cli/sft.py": {"rich.progress.Progress"},
    # Queries the width; and shows by a Terminal.
    "services/launcher/flotilla_launcher/cli/progress_view.py": {"sys.stdout", "rich.live.Live"},
    "services/launcher/flotilla_launcher/cli/terminal.py": {"rich.console.Console"},
    "services/env_gateway/flotilla_env_gateway/adapters/fleet_openenv/worker.py": {
        "traceback.print_exc"
    },
    # Its standard error is a pipe, which stderr_tail.py makes visible.
    "services/env_gateway/flotilla_env_gateway/adapters/process_reaper.py": {
        "SystemExit",
        "os.write",
    },
    # Pipes as well: the gateway reads them, and shows what they say by its log.
    "services/env_gateway/flotilla_env_gateway/verify/package_module.py": {"sys.stdout"},
    "services/env_gateway/flotilla_env_gateway/verify/worker.py": {"os.write"},
}
# What prints, or makes something that does, by whatever name it is imported, called or handed on.
PRINTERS = {
    *("print", "input", "pprint.pprint", "pprint.pp"),
    *(
        f"{of}.{each}"
        for of in ("typer", "click")
        for each in ("echo", "secho", "prompt", "confirm")
    ),
    *(f"rich.{each}" for each in ("print", "print_json", "get_console", "inspect")),
    *("rich.console.Console", "rich.progress.track", "rich.pretty.pprint", "rich.pretty.install"),
    *("rich.prompt.Prompt", "rich.prompt.Confirm", "rich.logging.RichHandler"),
    *("rich.traceback.install", "rich.live.Live", "rich.progress.Progress", "rich.status.Status"),
    *("logging.StreamHandler", "logging.basicConfig", "logging.lastResort", "logging.FileHandler"),
    *("structlog.PrintLogger", "structlog.PrintLoggerFactory", "structlog.WriteLoggerFactory"),
    *("structlog.dev.ConsoleRenderer", "tqdm.tqdm", "tqdm.auto.tqdm", "getpass.getpass"),
    *("traceback.print_exc", "traceback.print_exception", "traceback.print_stack"),
}
STREAMS = {"sys.stdout", "sys.stderr", "sys.__stdout__", "sys.__stderr__"}
# Allowed uses of a stream; all others, and a stream that is handed on, may write.
REQUESTED = {"isatty", "flush", "fileno", "encoding"}
# Without one of these words a source prints nothing, and need not be parsed, which takes long.
_WORDS = {each.rpartition(".")[2] for each in PRINTERS | STREAMS}
_CALLED = {"write", "fdopen", "open", "exit", "quit", "SystemExit"}
_MENTION = re.compile(rf"\b({'|'.join(sorted(_WORDS | _CALLED))})\b")


def names_of(tree: ast.Module) -> dict[str, str]:
    """Return what each imported name is."""
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


def parents_of(tree: ast.Module) -> dict[ast.AST, ast.AST]:
    return {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}


def printers_in(source: str) -> Iterator[tuple[int, str]]:
    """Lines that print by other means than the two, or could, and by which."""
    if not _MENTION.search(source):
        return
    tree = ast.parse(source)
    names, parents = names_of(tree), parents_of(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and (called := _called(node, names)):
            yield node.lineno, called
        if not isinstance(node, ast.Name | ast.Attribute) or not isinstance(node.ctx, ast.Load):
            continue
        mentioned = dotted(node, names)
        if mentioned in PRINTERS and not _is_annotation(node, parents):
            yield node.lineno, mentioned
        if mentioned in STREAMS and not _is_allowed(parents[node], parents, names):
            yield node.lineno, mentioned


def _called(node: ast.Call, names: dict[str, str]) -> str:
    """A call that prints by what it is given."""
    called = dotted(node.func, names)
    first = ast.unparse(node.args[0]) if node.args else ""
    to_terminal = called in ("os.write", "os.fdopen", "open") and first in ("1", "2", "'/dev/tty'")
    # An exit with words prints them.
    words = node.args and isinstance(node.args[0], ast.JoinedStr | ast.Constant) and "'" in first
    ends = called in ("sys.exit", "SystemExit", "exit", "quit")
    return called if to_terminal or (ends and words) else ""


def _is_annotation(node: ast.AST, parents: dict[ast.AST, ast.AST]) -> bool:
    while not isinstance(node, ast.stmt):
        parent = parents[node]
        if getattr(parent, "annotation", None) is node or getattr(parent, "returns", None) is node:
            return True
        node = parent
    return False


def _is_allowed(user: ast.AST, parents: dict[ast.AST, ast.AST], names: dict[str, str]) -> bool:
    """Return True if a stream is queried, or passed to `print_visible`."""
    if isinstance(user, ast.keyword) and isinstance(call := parents[user], ast.Call):
        return dotted(call.func, names) == "flotilla_common.text.printable_text.print_visible"
    return isinstance(user, ast.Attribute) and user.attr in REQUESTED


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
        "for each in map(print, x): ...",
        "import sys\nout = sys.stdout\nout.write(x)",
        "import json, sys\njson.dump(x, sys.stdout)",
        "import sys\nsys.exit(f'{x}')",
        "raise SystemExit('x')",
        "import rich\nrich.get_console().print(x)",
        "from rich.progress import track\nfor each in track(x): ...",
        "from pprint import pprint\npprint(x)",
        "import os\nos.fdopen(2, 'w').write(x)",
        "open('/dev/tty', 'w').write(x)",
        "import structlog\nstructlog.PrintLoggerFactory()",
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
    assert not found, (
        "use flotilla_common.text.printable_text.print_visible, or the Terminal:\n"
        + "\n".join(found)
    )
