"""Modules that are named in strings exist: those that are imported late, and those that run."""

import ast
import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[1]
# Folders in which packages of this repository are found.
PLACES = [ROOT, *sorted((ROOT / "services").iterdir()), ROOT / "environments"]
NAME = re.compile(r"(flotilla_[a-z_]+|tools|benchmarks)(\.[a-z_]\w*)+(:\w+)?")
# To parse a file takes far longer than to look for the beginning of such a string.
BEGINNING = re.compile(r"[\"'](flotilla_[a-z_]+|tools|benchmarks)\.")


def _strings(path: Path) -> set[str]:
    source = path.read_text()
    if not BEGINNING.search(source):
        return set()
    tree = ast.parse(source)
    return {
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }


def _find_source(name: str) -> Path | None:
    paths = [place / name.replace(".", "/") for place in PLACES]
    files = [file for path in paths for file in (path.with_suffix(".py"), path / "__init__.py")]
    return next((file for file in files if file.exists()), None)


def _exists(text: str) -> bool:
    """Return True for a module, a folder, or a name that is defined in a module."""
    name = text.replace(":", ".")
    if _find_source(name) or any((at / name.replace(".", "/")).is_dir() for at in PLACES):
        return True
    module, _, defined = name.rpartition(".")
    source = _find_source(module)
    return source is not None and re.search(rf"\b{defined}\b", source.read_text()) is not None


def test_every_module_that_a_string_names_exists() -> None:
    listed = ["git", "ls-files", "services", "tests", "tools", "benchmarks", "environments"]
    files = subprocess.check_output(listed, cwd=ROOT, text=True).split()
    named = {
        (text, file)
        for file in files
        if file.endswith(".py")
        for text in _strings(ROOT / file)
        if NAME.fullmatch(text)
    }
    assert len(named) > 50
    assert [(text, file) for text, file in sorted(named) if not _exists(text)] == []


def test_a_module_or_a_function_that_is_not_there_is_noticed() -> None:
    doctor = "flotilla_launcher.doctor"
    assert _exists(f"{doctor}.tcp_ports:probe_ports") and _exists("flotilla_launcher")
    assert not _exists(f"{doctor}.tcp_ports:probe_port") and not _exists(f"{doctor}.ports")
