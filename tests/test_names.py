"""Class names: each is there once in its service, its environment or its room of tests."""

import ast
from collections import defaultdict
from pathlib import Path

import pytest

from tests.support.repository import ROOT


def room_of(path: Path) -> str:
    """Return the service, the app or the room of tests that a file is in."""
    return "/".join(path.relative_to(ROOT).parts[:2])


def class_names(top: str) -> dict[tuple[str, str], list[str]]:
    """Return where each public class of a tree is defined, by its room and its name."""
    found: dict[tuple[str, str], list[str]] = defaultdict(list)
    for path in sorted((ROOT / top).rglob("*.py")):
        source = path.read_text()
        # To parse a file takes far longer than to read it.
        for node in ast.walk(ast.parse(source)) if "class " in source else ():
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                place = f"{path.relative_to(ROOT)}:{node.lineno}"
                found[room_of(path), node.name].append(place)
    return found


@pytest.mark.parametrize(
    ("top", "at_least"), [("services", 700), ("environments", 60), ("tests", 180)]
)
def test_no_room_has_two_classes_of_one_name(top: str, at_least: int) -> None:
    found = class_names(top)
    assert len(found) >= at_least, "the classes are somewhere else by now"
    assert {name: places for (_, name), places in found.items() if len(places) > 1} == {}
