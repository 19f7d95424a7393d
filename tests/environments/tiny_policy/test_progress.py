"""Progress of a build, on a terminal and in a pipe."""

import io
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import pytest
from rich.console import Console

from flotilla_environments.tiny_policy import __main__ as command


def build_in_steps(out: Path, recipe: object, progress: Callable[[str, int, int], None]) -> bool:
    for done in range(1, 1001):
        progress("training", done, 1000)
    return True


@pytest.mark.parametrize("terminal", [False, True])
def test_a_build_says_what_it_does_and_how_far_it_has_come(*, terminal: bool) -> None:
    output = io.StringIO()
    console = Console(file=output, force_terminal=terminal, width=100)
    with patch("flotilla_environments.tiny_policy.build.build", build_in_steps):
        assert command._build_policy(Path("made"), "tools", 0, console) == 0  # pyright: ignore[reportPrivateUsage]
    text = output.getvalue()
    assert "made: built" in text
    if terminal:
        assert "training" in text and "1000/1000" in text
    else:
        lines = text.splitlines()
        assert "training 500 of 1,000" in lines
        assert len(lines) == 12, "a tenth each, and the end"
