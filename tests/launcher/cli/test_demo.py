"""`flotilla demo` where what it needs is not installed: real environments, of small packages."""

import asyncio
import base64
import hashlib
import os
import pty
import signal
import socket
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from flotilla_common.process.own_version import own_version
from flotilla_launcher.cli import demo
from flotilla_launcher.cli.train import TrainOptions
from flotilla_reading.own_tools.toml_text import to_toml
from tests.launcher.cli.test_app import nothing_left, read_until
from tests.support.launcher import forged_fakes, spec
from tests.support.repository import ROOT
from tests.support.waiting import wait_until

OURS = ("protos", "common", "reading", "rollout", "learner", "env-gateway", "launcher")
# A command line without vLLM, with files of its own in place of the repository's.
PROGRAM = """
import pathlib, sys
sys.modules["{missing}"] = None
from flotilla_launcher.cli import app, shipped_files
shipped_files._PLACES = (pathlib.Path("{shipped}"),)
app.main()
"""
PRINTS_ITS_WORDS = "import sys\nprint('in the environment:', sys.prefix, *sys.argv[1:])\n"


def write_wheel(folder: Path, name: str, version: str, files: dict[str, str]) -> str:
    """Write a wheel; return its hash."""
    stem = f"{name.replace('-', '_')}-{version}"
    info = f"{stem}.dist-info"
    files = files | {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    lines = [f"{path},{_digest(text)},{len(text)}" for path, text in files.items()]
    record = {f"{info}/RECORD": "\n".join([*lines, f"{info}/RECORD,,", ""])}
    path = folder / f"{stem}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for each, text in (files | record).items():
            archive.writestr(each, text)
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _digest(text: str) -> str:
    found = hashlib.sha256(text.encode()).digest()
    return "sha256=" + base64.urlsafe_b64encode(found).rstrip(b"=").decode()


class DemoHome:
    """A folder with wheels, pins and a user's data folder, and the demo's command in it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.wheels = folder, folder / "wheels"
        self.environment = folder / "data/flotilla" / f"demo-{own_version().version}"
        self.wheels.mkdir()
        pins = folder / "shipped/requirements"
        pins.mkdir(parents=True)
        for file, name in (("torch-cpu.txt", "small-torch"), ("cpu.txt", "small-vllm")):
            digest = write_wheel(self.wheels, name, "1.0", {f"{name.replace('-', '_')}.py": ""})
            (pins / file).write_text(f"{name}==1.0 --hash=sha256:{digest}\n")
        for name in (*OURS, "environments"):
            app = {f"flotilla_{name.replace('-', '_')}/__init__.py": ""}
            if name == "launcher":
                cli = "flotilla_launcher/cli"
                app |= {f"{cli}/__init__.py": "", f"{cli}/app.py": PRINTS_ITS_WORDS}
            write_wheel(self.wheels, f"flotilla-rl-{name}", own_version().version, app)

    def variables(self, **more: str) -> dict[str, str]:
        # No PYTHONPATH: it would lead the new environment to the packages of this one.
        kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        pip = {
            "PIP_FIND_LINKS": str(self.wheels),
            "PIP_NO_INDEX": "1",
            "PIP_CONFIG_FILE": "/dev/null",
        }
        return {**kept, **pip, "XDG_DATA_HOME": str(self.folder / "data"), **more}

    def command(self, *words: str) -> Sequence[str]:
        program = PROGRAM.format(missing="vllm", shipped=self.folder / "shipped")
        return (sys.executable, "-P", "-c", program, "demo", *words)

    def call(self, *words: str, **more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command(*words),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=self.folder,
            env=self.variables(**more),
            check=False,
        )


@pytest.fixture
def home(tmp_path: Path) -> DemoHome:
    return DemoHome(tmp_path)


def test_with_nobody_to_answer_it_says_what_it_would_install_and_installs_nothing(
    home: DemoHome,
) -> None:
    done = home.call(PIP_INDEX_URL="https://me:a-password@packages.example/simple")
    assert done.returncode == 1
    assert "here, vllm cannot be imported" in done.stdout
    assert str(home.environment) in done.stdout
    assert "1.1 GB to download, 4 GB on disk" in done.stdout
    assert "packages are from https://packages.example/simple;" in done.stdout
    assert "nothing is installed; --yes agrees to it" in done.stdout
    assert "a-password" not in done.stdout
    assert not home.environment.exists()


def test_whoever_answers_no_gets_nothing(home: DemoHome) -> None:
    here, there = pty.openpty()
    process = subprocess.Popen(
        home.command(), stdin=there, stdout=there, stderr=there, env=home.variables()
    )
    os.close(there)
    os.write(here, b"\n")
    assert process.wait(60) == 1
    printed = os.read(here, 1 << 16).decode()
    os.close(here)
    assert "Install it? [y/N]" in printed
    assert not home.environment.exists()


@pytest.mark.timeout(300)
def test_it_installs_once_and_becomes_the_same_command_in_there(home: DemoHome) -> None:
    done = home.call("--yes", "--seed=1")
    assert done.returncode == 0, done.stdout
    words = f"in the environment: {home.environment} demo --yes --seed=1"
    assert done.stdout.splitlines()[-1] == words
    made = (home.environment / "bin/python").lstat().st_ctime_ns
    again = home.call("--seed=2")
    assert again.stdout == f"in the environment: {home.environment} demo --seed=2\n"
    assert (home.environment / "bin/python").lstat().st_ctime_ns == made


@pytest.mark.timeout(300)
def test_after_ctrl_c_nothing_is_left_and_meanwhile_no_second_call_interferes(
    home: DemoHome,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/simple"
        process = subprocess.Popen(
            home.command("--yes"),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=home.variables(PIP_INDEX_URL=url, PIP_NO_INDEX="0", PIP_FIND_LINKS=""),
            start_new_session=True,
        )
        silent.settimeout(200)
        # pip has come, and waits for an answer.
        with silent.accept()[0]:
            second = home.call("--yes")
            assert second.returncode == 1
            assert "another `flotilla demo` is making" in second.stdout
            os.killpg(process.pid, signal.SIGINT)
            assert process.wait(60) == 130
    wait_until(lambda: not home.environment.exists())


@pytest.mark.timeout(300)
def test_a_package_that_cannot_be_had_is_named_and_nothing_is_left(home: DemoHome) -> None:
    for wheel in home.wheels.glob("flotilla_rl_rollout-*"):
        wheel.unlink()
    done = home.call("--yes")
    assert done.returncode == 1
    assert "No matching distribution found for flotilla-rl-rollout==" in done.stdout
    assert "failed, for the reason above" in done.stdout
    assert not home.environment.exists()


def test_where_all_is_installed_it_trains_the_demos_spec_and_is_resumed_by_its_own_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    calls: list[tuple[object, ...]] = []
    monkeypatch.setattr(demo, "find_spec", lambda name: name)
    monkeypatch.setattr(demo, "train_policy", lambda *given: calls.append(given) or 0)
    assert demo.run_demo(tmp_path, ["--seed=1"], TrainOptions(resume=True), agreed=False) == 0
    spec = ROOT / "deploy/runs/local.toml"
    options = TrainOptions(resume=True, again=("demo",))
    assert calls == [(spec, tmp_path, ["--seed=1"], options)]


async def test_ctrl_c_stops_the_demos_run_and_names_the_command_that_resumes_it(
    tmp_path: Path,
) -> None:
    local = tmp_path / "shipped/deploy/runs/local.toml"
    local.parent.mkdir(parents=True)
    content = spec(learner={"steps": 10_000, "step_s": 0.1})
    local.write_text("".join(f"{key} = {to_toml(value)}\n" for key, value in content.items()))
    program = PROGRAM.format(missing="not_needed", shipped=tmp_path / "shipped")

    async def call(*words: str) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", program, "demo", "--runs", str(tmp_path / "runs"), *words),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            cwd=ROOT,
            env={**os.environ, **forged_fakes()},
            start_new_session=True,
        )

    process = await call()
    assert process.stdout is not None
    seen = await asyncio.wait_for(read_until(process.stdout, "step "), 60.0)
    process.send_signal(signal.SIGINT)
    output = seen + (await asyncio.wait_for(process.communicate(), 60.0))[0].decode()
    assert process.returncode == 130, output
    assert f"flotilla demo --resume --runs {tmp_path / 'runs'}" in output
    again = await call("--resume", "--learner.steps=3")
    output = (await asyncio.wait_for(again.communicate(), 60.0))[0].decode()
    assert again.returncode == 0, output
    assert len(list((tmp_path / "runs").glob("fake-*"))) == 1
    await nothing_left(tmp_path / "runs")
