"""`flotilla inspect`: pages of runs that the learner's own code has written."""

import asyncio
import io
import signal
import subprocess
import sys
import zipfile
from pathlib import Path
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import HTTPCookieProcessor, build_opener, urlopen

import psutil
import pytest

from flotilla_launcher.cli.inspector_process import linked_inspector
from flotilla_launcher.cli.terminal import Terminal
from tests.reading.inspector.conftest import write_run
from tests.reading.inspector.made_runs import RUN, open_run
from tests.support.launcher import run_cli_here
from tests.support.waiting import until

FLOTILLA = (sys.executable, "-m", "flotilla_launcher.cli.app")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inspected") / "runs"

    async def make_run() -> None:
        await write_run(open_run(folder))

    asyncio.run(make_run())
    return folder


def start_inspector(runs: Path, *arguments: str) -> "tuple[subprocess.Popen[str], str]":
    command = (*FLOTILLA, "inspect", *arguments, "--runs", str(runs))
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process.stdout as output:
        line = output.readline()
    assert line.startswith("Open http://127.0.0.1:"), line
    return process, line.split()[1]


def test_a_run_is_served_until_ctrl_c_and_nothing_is_left(runs: Path) -> None:
    process, url = start_inspector(runs, RUN)
    children = psutil.Process(process.pid).children(recursive=True)
    with build_opener(HTTPCookieProcessor()).open(url) as page:
        assert RUN in page.read().decode()
    bare = urlsplit(url)._replace(query="").geturl()
    with pytest.raises(HTTPError, match="401"):
        urlopen(bare)
    process.send_signal(signal.SIGINT)
    assert process.wait(20) == 0
    assert children and not any(child.is_running() for child in children)


def test_the_inspector_ends_with_a_command_that_is_killed(runs: Path) -> None:
    process, _ = start_inspector(runs)
    children = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.wait()
    _, left = psutil.wait_procs(children, timeout=20)
    assert not left


async def test_a_followed_runs_link_comes_once_its_learner_has_begun(tmp_path: Path) -> None:
    """A terminal of text, since no run of a test has one."""
    runs, shown = tmp_path / "runs", io.StringIO()
    runs.mkdir()
    terminal = Terminal(file=shown, force_terminal=True)
    async with linked_inspector(runs, RUN, terminal):
        run = open_run(runs)
        await until(lambda: "Look inside: http://127.0.0.1:" in shown.getvalue())
        await run.journal.close()
    assert "continues without" not in shown.getvalue()


async def test_a_folder_without_runs_is_named(runs: Path) -> None:
    code, output = await run_cli_here("inspect", "nowhere", "--runs", str(runs))
    assert code == 1
    assert "there are no runs" in output


async def test_steps_without_a_bundle_are_refused(runs: Path) -> None:
    code, output = await run_cli_here("inspect", RUN, "--step", "1", "--runs", str(runs))
    assert code == 2
    assert "--bundle" in output


async def test_a_bundle_opens_without_a_server(runs: Path, tmp_path: Path) -> None:
    out = tmp_path / "pages.zip"
    arguments = ("--bundle", str(out), "--step", "3", "--runs", str(runs))
    code, output = await run_cli_here("inspect", RUN, *arguments)
    assert code == 0, output
    assert str(out) in output.replace("\n", "")
    assert "index.html" in zipfile.ZipFile(out).namelist()
