"""A closed reader, such as `head`, ends commands that only print, and never a run."""

import subprocess
import sys

import pytest

from tests.support.repository import ROOT

PROGRAM = """
import sys
from flotilla_launcher.cli.{module} import {name}
console = {name}()
for _ in range(3):
    console.print("x" * 100_000)
sys.stderr.write("continues")
"""


@pytest.mark.parametrize(
    ("module", "name", "continues"),
    [("progress_view", "RunConsole", True), ("terminal", "Terminal", False)],
)
def test_a_reader_that_is_gone_ends_no_run(module: str, name: str, continues: bool) -> None:
    program = PROGRAM.format(module=module, name=name)
    command = (sys.executable, "-c", program)
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=ROOT, stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        output = process.stderr.read()
    assert output == ("continues" if continues else "")
    assert process.returncode == (0 if continues else 1)
