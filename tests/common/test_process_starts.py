"""Every process that a service starts gets an environment that was made for a child."""

import pytest

from tests.common.process_starts import ALLOWED, starts
from tests.support.repository import ROOT

# By file and function: why that start has another environment.
REASONS = {
    ("services/launcher/flotilla_launcher/cli/launcher_client.py", "_spawn_launcher"): (
        "the launcher, which hands to each service of its runs what that has a use for"
    ),
    ("services/launcher/flotilla_launcher/cli/demo.py", "run_demo"): (
        "becomes the same command in another environment, which is a launcher itself"
    ),
    (
        "services/launcher/flotilla_launcher/agent/parent_death_reaper.py",
        "cleaned_up_after_death",
    ): ("a fork of the watcher that runs no other program"),
    ("services/common/flotilla_common/process/run_child.py", "run_child"): (
        "a start itself, with the environment that its caller gives to it"
    ),
    ("services/common/flotilla_common/process/tied_children.py", "tie_children"): (
        "multiprocessing's own keeper of shared memory, which any start by it brings along"
    ),
    ("services/common/flotilla_common/process/tied_child.py", "main"): (
        "becomes the command, in the environment that its parent gave to it"
    ),
    ("services/common/record_commit.py", "_find_commit"): (
        "a build, which cannot import what it builds"
    ),
    (
        "services/env_gateway/flotilla_env_gateway/adapters/process_reaper.py",
        "main",
    ): "the fork becomes the command",
    ("services/env_gateway/flotilla_env_gateway/adapters/process_reaper.py", "_become"): (
        "becomes the command, in the environment that its parent gave to it"
    ),
}


def test_every_start_of_a_process_gets_what_a_child_may_have() -> None:
    found = {
        (str(path.relative_to(ROOT)), start.function): start
        for path in sorted((ROOT / "services").rglob("*.py"))
        for start in starts(path.read_text())
        if not start.allowed
    }
    bad = [f"{path}:{found[path, name].line} {name}" for path, name in found.keys() - REASONS]
    assert not bad, f"pass env={ALLOWED}(...): {bad}"
    assert not REASONS.keys() - found.keys(), "reasons of what is not there any more"


@pytest.mark.parametrize(
    "line",
    [
        "subprocess.run(command)",
        "subprocess.run(command, env=os.environ)",
        "subprocess.run(command, env={**os.environ, 'A': 'b'})",
        "subprocess.Popen(command, env={k: v for k, v in os.environ.items() if k != 'TOKEN'})",
        "subprocess.run(command, env={**child_environment(), **os.environ})",
        "await asyncio.create_subprocess_exec(*command, stdin=PIPE)",
        "await asyncio.create_subprocess_shell(command, env=environ)",
        "os.execvp(command[0], command)",
        "os.execve(command[0], command, dict(os.environ))",
        "os.posix_spawn(command[0], command, os.environ)",
        "os.fork()",
        "multiprocessing.Process(target=work)",
        "with ProcessPoolExecutor() as pool: pass",
        "from subprocess import check_output",
        "from os import execv",
        "await asyncio.to_thread(subprocess.run, command)",
        "call = subprocess.run",
        "partial(subprocess.Popen, command)()",
        "from multiprocessing import Process",
        "from torch.multiprocessing import spawn",
        "multiprocessing.pool.Pool()",
        "torch.multiprocessing.spawn(work)",
        "await loop.subprocess_shell(protocol, command)",
        "psutil.Popen(command)",
        "_posixsubprocess.fork_exec(command)",
        "await run_child(command, env=os.environ)",
        "await run_child(command, env=environ)",
        "made = child_environment(); made.update(os.environ); subprocess.run(command, env=made)",
        "made = child_environment(); made |= os.environ; subprocess.run(command, env=made)",
    ],
)
def test_a_start_with_another_environment_is_seen(line: str) -> None:
    (start,) = starts(f"async def f():\n    {line}\n")
    assert (start.line, start.function, start.allowed) == (2, "f", False)


@pytest.mark.parametrize(
    ("imported", "line"),
    [
        ("import subprocess as sp", "sp.run(command)"),
        ("import os as system", "system.execvp(command[0], command)"),
        ("import torch.multiprocessing as mp", "mp.spawn(work)"),
        ("from asyncio import subprocess", "await subprocess.create_subprocess_exec(*command)"),
        ("from asyncio import create_subprocess_exec as run", "await run(*command)"),
        ("from concurrent.futures import ProcessPoolExecutor as P", "P()"),
        ("from os import environ", "subprocess.run(c, env={**child_environment(), **environ})"),
    ],
)
def test_a_start_by_another_name_is_seen(imported: str, line: str) -> None:
    (start,) = starts(f"{imported}\nasync def f():\n    {line}\n")
    assert (start.line, start.allowed) == (3, False)


@pytest.mark.parametrize(
    "line",
    [
        "subprocess.run(command, env=child_environment('HF_TOKEN', ours=True))",
        "subprocess.run(command, env={**child_environment(environ=subject.environ), 'A': b})",
        "subprocess.run(command, env={})",
        "made = child_environment(); subprocess.run(command, env={**made, 'A': b})",
        "os.execve(command[0], command, child_environment())",
        "await asyncio.to_thread(subprocess.run, command, env=child_environment())",
    ],
)
def test_a_start_with_a_childs_environment_is_allowed(line: str) -> None:
    (start,) = starts(f"async def f():\n    {line}\n")
    assert start.allowed


def test_what_starts_nothing_is_left_alone() -> None:
    source = "from asyncio.subprocess import PIPE, Process\nrun(command)\nwork.Process()\n"
    source += "x: subprocess.Popen[bytes] = multiprocessing.active_children()\n"
    source += "def f(p: subprocess.Popen[bytes]) -> subprocess.Popen[bytes]: return p\n"
    assert starts(source) == []
