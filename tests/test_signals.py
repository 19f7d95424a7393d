"""Tests that interrupt processes may themselves run in the background."""

import subprocess
import sys

from tests.support.repository import ROOT

# Prints the signals that a child of a test process ignores.
CHILD = """
import subprocess
from tests.conftest import pytest_configure
pytest_configure()
subprocess.run(["grep", "SigIgn", "/proc/self/status"], check=True)
"""


def test_children_hear_an_interrupt_and_a_hang_up_under_nohup_and_in_the_background() -> None:
    done = subprocess.run(
        ("sh", "-c", 'trap "" INT HUP; exec "$0" -c "$1"', sys.executable, CHILD),
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    ignored = int(done.stdout.split()[1], 16)
    assert ignored & 0b11 == 0, done.stdout
