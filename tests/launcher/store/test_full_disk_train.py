"""`flotilla train` on a disk that fills up: the ledger is on it, as by default."""

import asyncio
import signal
import subprocess
from collections.abc import Generator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from flotilla_common.spec.config import canonical_json
from flotilla_launcher.store.ledger import Ledger
from tests.support.launcher import left_running, spec, start_cli
from tests.support.waiting import until

_CHUNKS = (1 << 20, 4096, 1)


@pytest.fixture
def disk(tmp_path: Path) -> Generator[Path]:
    """A small file system for the runs."""
    runs = tmp_path / "runs"
    runs.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(runs)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("only root may mount a file system")
    yield runs
    for process in left_running(runs):
        process.kill()
    subprocess.run(["umount", "--lazy", str(runs)], check=True)


def fill(disk: Path) -> Path:
    """Leave no byte of room; return the file that takes it."""
    path = disk / "filler"
    with path.open("wb", buffering=0) as file:
        for size in _CHUNKS:
            try:
                while file.write(bytes(size)) == size:
                    pass
            except OSError:
                continue
    return path


class Command:
    """A running `flotilla` command, and what it has printed."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.output = ""
        self._reading = asyncio.create_task(self._read())

    async def _read(self) -> None:
        assert self.process.stdout is not None
        while text := await self.process.stdout.read(4096):
            self.output += text.decode()

    async def says(self, text: str) -> None:
        """Wait until it has printed this."""
        try:
            await until(lambda: text in self.output, 60)
        except TimeoutError:
            raise AssertionError(f"{text!r} is not in\n{self.output}") from None

    async def ended(self) -> int:
        code = await asyncio.wait_for(self.process.wait(), 60)
        await self._reading
        return code


async def train(disk: Path, folder: Path) -> Command:
    """Train with a fake learner that writes each of its steps to the disk."""
    path = folder / "spec.json"
    learner = {"steps": 4000, "step_s": 0.02}
    launcher = {"max_restarts": 9, "drain_s": 1.0}
    path.write_text(canonical_json(spec(learner=learner, launcher=launcher)))
    return Command(await start_cli("train", str(path), "--runs", str(disk)))


async def begin(disk: Path, folder: Path) -> Command:
    command = await train(disk, folder)
    await command.says("training")
    return command


def has_learner(disk: Path) -> bool:
    with suppress(psutil.Error, OSError):
        return any("tests.support.fake_learner" in p.cmdline() for p in left_running(disk))
    return True


@pytest.mark.slow
async def test_a_full_disk_is_named_within_seconds_and_the_run_goes_on_after_room_is_made(
    disk: Path, tmp_path: Path
) -> None:
    command = await begin(disk, tmp_path)
    filler = fill(disk)
    await command.says("cannot be written")
    assert f"{disk / 'launcher.sqlite'} cannot be written" in command.output
    assert "disk is full" in command.output
    assert command.output.count("cannot be written") == 1
    # The learner dies of the full disk; its next start waits for the ledger.
    await until(lambda: not has_learner(disk), 60)
    filler.unlink()
    await command.says("learner-0 exited with code 1; restart 1 of 9")
    restarted = command.output.rindex("restart 1 of 9")
    await until(lambda: "training" in command.output[restarted:], 60)
    command.process.send_signal(signal.SIGINT)
    await command.ended()
    assert "run stopped" in command.output
    store = Ledger(disk / "launcher.sqlite")
    [stored] = store.list_newest()
    store.close()
    assert stored.ended is not None


async def test_a_second_interrupt_ends_a_run_whose_end_cannot_be_written(
    disk: Path, tmp_path: Path
) -> None:
    command = await begin(disk, tmp_path)
    fill(disk)
    await command.says("cannot be written")
    for told in ("Stopping: ", "Stopping at once"):
        command.process.send_signal(signal.SIGINT)
        await command.says(told)
        # Sooner, it would count as the same press.
        await asyncio.sleep(0.5)
    assert await command.ended() == 1, command.output
    assert "the next launcher of this folder takes the run up again" in command.output
    await until(lambda: not left_running(disk), 30)


async def test_a_start_on_a_full_disk_is_refused_in_a_sentence(disk: Path, tmp_path: Path) -> None:
    fill(disk)
    command = await train(disk, tmp_path)
    assert await command.ended() == 1
    assert "Traceback" not in command.output
    assert f"the disk of {disk} is full: make room" in command.output
