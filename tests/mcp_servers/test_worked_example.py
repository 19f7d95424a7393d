"""The worked example of docs/env_gateway.md: its commands show what the page shows."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.mcp_servers.public_servers import INSTALLED
from tests.support.repository import ROOT

pytestmark = pytest.mark.mcp_servers

PAGE = (ROOT / "docs/env_gateway.md").read_text()
SECTION = PAGE.split("\n## From a server to a training step\n")[1].split("\n## ")[0]
# What only installs, and the training, which takes minutes.
LEFT_OUT = ("python3.11 -m venv ", "build/office/bin/python -m pip ", "flotilla train ")
# Connections are refused until it serves, for which a reader's fingers give it time.
SERVES = "until (exec 3<>/dev/tcp/127.0.0.1/8766 || ! kill -0 $!) 2>/dev/null; do sleep 0.1; done"
MARK = "next command"


def list_commands() -> list[tuple[str, str]]:
    """Return the commands of the section, with their input, and what each is to print."""
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", SECTION, re.DOTALL | re.MULTILINE)
    blocks = [text for language, text in fenced if not language]
    found: list[tuple[str, str]] = []
    for text in re.split(r"^\$ ", "".join(blocks), flags=re.MULTILINE)[1:]:
        first, _, rest = text.partition("\n")
        if first.endswith("<<END"):
            given, _, rest = rest.partition("END\n")
            first += f"\n{given}END"
        found.append((first, rest))
    return [each for each in found if not each[0].startswith(LEFT_OUT)]


def as_pattern(shown: str) -> str:
    """Return a pattern of an output: ids, measurements and line ends may differ, and `...` is
    anything."""
    words, found = shown.split(), list[str]()
    for word, unit in zip(words, [*words[1:], ""], strict=False):
        varies = re.search(r"[0-9a-f]{8}|\d:\d", word) or unit.strip(",;") in ("s", "CPU-s", "MiB")
        found.append(".*?" if word == "..." else r"\S+" if varies else re.escape(word))
    return r"\s+".join(found)


@pytest.mark.timeout(400)
def test_every_command_shows_what_the_page_shows(engine_folder: Path, tmp_path: Path) -> None:
    for name, target in {
        "docs": ROOT / "docs",
        "build/office": INSTALLED / "mcp1",
        "build/tiny-0": engine_folder,
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).symlink_to(target)
    flotilla = tmp_path / "bin/flotilla"
    flotilla.parent.mkdir()
    flotilla.write_text(f'#!/bin/sh\nexec {sys.executable} -m flotilla_launcher.cli.app "$@"\n')
    flotilla.chmod(0o755)
    commands = list_commands()
    assert [command.split()[0] for command, _ in commands] == [
        *("export", "build/office/bin/python", "flotilla", "flotilla", "kill"),
    ]
    words = [
        f"echo {MARK}\n{command}" + f"\n{SERVES}" * command.endswith("&") for command, _ in commands
    ]
    # Files, because the server in the background keeps what it writes to open.
    with (tmp_path / "out").open("w") as out, (tmp_path / "err").open("w") as err:
        subprocess.run(
            ["bash", "-c", "\n".join(words)],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            cwd=tmp_path,
            env={
                **os.environ,
                "PATH": f"{flotilla.parent}:{os.environ['PATH']}",
                "PYTHONPATH": f"{ROOT}:{ROOT}/gen",
            },
            check=False,
        )
    outputs = Path(out.name).read_text().split(f"{MARK}\n")[1:]
    for (command, shown), output in zip(commands, outputs, strict=True):
        assert re.search(as_pattern(shown), output, re.DOTALL), (
            f"{command}: {output}{Path(err.name).read_text()}"
        )
