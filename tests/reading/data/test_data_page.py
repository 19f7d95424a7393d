"""The worked example of docs/data.md is what its commands print."""

import re
import subprocess
import sys
from pathlib import Path

from services.reading.data.collect.fates import Fate
from services.reading.data.entries import Reason
from tests.support.repository import ROOT

PAGE = (ROOT / "docs/data.md").read_text()


def read_examples() -> list[tuple[str, list[str]]]:
    """The commands of the page's console blocks, each with the lines that it prints."""
    found: list[tuple[str, list[str]]] = []
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    for block in (text for language, text in blocks if not language):
        text = block.replace("\n> {", "\n{").replace("\n> END", "\nEND")
        for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
            here = re.match(r"(?s).*?\nEND\n", part) if "<<" in part else None
            command, _, printed = part.partition("\n")
            found.append((here[0], []) if here else (command, printed.splitlines()))
    return found


def test_every_command_of_the_page_prints_what_the_page_shows(tmp_path: Path) -> None:
    examples = read_examples()
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
