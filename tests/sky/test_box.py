"""The box itself, without SkyPilot: small ones of their own."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.sky.box import Box, BoxError, Layout, prepare
from tests.sky.box.layout import LOGIN, ROOT, SERVICES_PYTHON
from tests.sky.session import SkySession

pytestmark = [pytest.mark.sky, pytest.mark.timeout(300)]

# Only root can look below pytest's own folder.
SMALL = Layout(
    base=Path("/var/tmp/flotilla-small"),
    user="flotilla-small",
    prefix="flosmall",
    network="10.89.0",
    gpu_nodes=1,
    cpu_nodes=1,
    runtimes=False,
)
_IMPORTS = "import torch, vllm, flotilla_learner, flotilla, socket; print(socket.gethostname())"
_START = "from tests.sky.test_box import SMALL, Box; Box(SMALL).start(); print(flush=True); input()"


@pytest.fixture(scope="module")
def box() -> Iterator[Box]:
    with Box(SMALL) as box:
        yield box


def output(box: Box, host: str, *command: str) -> str:
    done = subprocess.run(
        box.command(host, *command), check=True, capture_output=True, text=True, cwd="/"
    )
    return done.stdout.strip()


def test_every_host_is_a_machine_of_its_own(box: Box) -> None:
    for host in SMALL.hosts:
        assert output(box, host, "hostname") == host
        assert SMALL.address(host) in output(box, host, "ip", "-brief", "-4", "address")


def test_slurm_runs_jobs_on_the_node_that_has_what_they_request(box: Box) -> None:
    on_gpu = ("srun", "--partition=gpu", "--gres=gpu:h100:2", "--chdir=/")
    assert output(box, LOGIN, "srun", "--chdir=/", "hostname") == "mini2"
    assert output(box, LOGIN, *on_gpu, "hostname") == "mini1"
    assert output(box, LOGIN, *on_gpu, "printenv", "CUDA_VISIBLE_DEVICES") == "0,1"


def test_the_ordinary_user_of_the_nodes_can_import_the_services(box: Box) -> None:
    assert output(box, "mini1", "id", "--user", "--name") == SMALL.user
    environment = (f"PYTHONPATH={ROOT}:{ROOT}/gen", "OMP_NUM_THREADS=1")
    python = ("env", *environment, str(SERVICES_PYTHON), "-c", _IMPORTS)
    assert output(box, "mini1", *python).splitlines()[-1] == "mini1"


def test_a_killed_node_loses_its_jobs_and_serves_again(box: Box) -> None:
    box.slurm("sbatch", "--chdir=/", "--partition=gpu", "--output=/dev/null", "--wrap=sleep 600")
    box.until("the job", lambda: "sleep 600" in str(box.left().processes))
    box.kill_node("mini1")
    box.until("the job's end", lambda: not box.jobs())
    assert "sleep 600" not in str(box.left().processes)
    box.revive_node("mini1")
    assert output(box, LOGIN, "srun", "--partition=gpu", "--chdir=/", "hostname") == "mini1"


def test_a_box_that_runs_is_neither_started_again_nor_stopped_by_others(box: Box) -> None:
    for disturb in (Box(SMALL).start, Box(SMALL).stop, SkySession(SMALL).start):
        with pytest.raises(BoxError, match="another process has the box"):
            disturb()
    assert box.slurm("sinfo", "--noheader", "--Node", "--format=%t").split() == ["idle", "idle"]


def test_an_ordinary_user_must_become_root(box: Box) -> None:
    python = ("env", f"PYTHONPATH={ROOT}:{ROOT}/gen", sys.executable, "-m", "tests.sky.box", "stop")
    done = subprocess.run(
        box.command("mini1", *python), check=False, capture_output=True, text=True, cwd="/"
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        "error: a box needs root, because it makes namespaces: run it with sudo\n"
    )


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(prepare.PACKAGES, "no-such-program", "no-such-package")
    with pytest.raises(BoxError, match=r"apt-get install .* no-such-package "):
        Box(SMALL).start()


def test_nothing_is_left_of_a_box_whose_session_was_killed(box: Box) -> None:
    box.stop()
    command = [sys.executable, "-c", _START]
    with subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as session:
        assert session.stdout is not None
        assert session.stdout.readline() == b"\n"
        os.kill(session.pid, signal.SIGKILL)
    assert len(box.left().processes) > 3
    box.slurm("sbatch", "--chdir=/", "--output=/dev/null", "--wrap=sleep 600")
    # The next one clears it, and so does a stop.
    box.start()
    assert box.jobs() == []
    box.stop()
    box.stop()
    assert not box.left()
    assert str(SMALL.base) not in Path("/proc/self/mounts").read_text()
