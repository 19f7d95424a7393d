"""The worked example of docs/data.md is what its commands print."""

import subprocess
import sys
from pathlib import Path

from flotilla_reading.data.collect.fates import Fate
from flotilla_reading.data.entries import Reason
from tests.support.repository import ROOT
from tests.support.worked_examples import read_examples

PAGE = (ROOT / "docs/data.md").read_text()


def test_every_command_of_the_page_prints_what_the_page_shows(tmp_path: Path) -> None:
    examples = read_examples(PAGE)
    assert len(examples) == 19
    here = Path(sys.executable).parent
    for command, printed in examples:
        done = subprocess.run(
            ["bash", "-ec", command],
            cwd=tmp_path,
            env={"PATH": f"{here}:/usr/bin:/bin", "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert [line.rstrip() for line in done.stdout.splitlines()] == printed


def test_every_reason_and_fate_is_on_the_page() -> None:
    assert [each for each in (*Reason, *Fate) if f"`{each.value}`" not in PAGE] == []
